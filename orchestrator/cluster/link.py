"""Ray: which nodes there are, and a host actor on each. The only module that knows it.

Checked with Ray 2.60. A call of an actor is made at most once. Ray sends nothing again: the run goes on with an
attempt that may be lost, or draws it under a new id. The actors are not detached: when the driver ends, in any
way, Ray ends them.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar, cast

from orchestrator.cluster.host import HostActor
from orchestrator.cluster.remote import ListedNode, NodeLost, Remote
from orchestrator.errors import EnvironmentUnusable
from orchestrator.rules.text import one_line
from orchestrator.rules.waits import apart

try:
    import ray
    import ray.exceptions as gone
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise EnvironmentUnusable(
        "env.cluster: Ray is not installed; run `pip install 'rollout-orchestrator[ray]'` here and on every node"
    ) from error

log = logging.getLogger(__name__)

RESOURCE = "sandbox"  # a node that has some of it carries out rollouts
CALLS = 100_000  # of one actor at a time; the actor has its own budget of sandboxes
OPEN_S = 60.0  # for the head to answer; Ray itself asks a wrong address for five minutes
START_S = 120.0  # for Ray to start the actor's process
# After so long without its head, Ray ends every process that is connected to it.
_HEAD_AWAY = "RAY_gcs_rpc_server_reconnect_timeout_s"
_HEAD_AWAY_S = 60.0
# A host actor runs on the event loop that a run has: uvloop starts processes by fork, which gRPC does not survive.
_ENVIRONMENT = {"env_vars": {"RAY_USE_UVLOOP": "0"}}
T = TypeVar("T")


class RayLink:
    """The connection to one cluster, until `close`."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def open(self) -> None:
        """Raises EnvironmentUnusable."""
        try:
            async with asyncio.timeout(OPEN_S):
                # In a thread Ray also leaves the run's signal handlers alone.
                await _apart(
                    lambda: ray.init(address=self._address, log_to_driver=False, logging_level=logging.CRITICAL)
                )
        except TimeoutError:
            raise self._no_cluster(f"no answer within {OPEN_S:g} s") from None
        except (ConnectionError, RuntimeError, ValueError, gone.RayError) as error:
            raise self._no_cluster(one_line(str(error))) from error

    def _no_cluster(self, why: str) -> EnvironmentUnusable:
        return EnvironmentUnusable(
            f"env.ray_address: no Ray cluster at {self._address}: {why}; start one with `ray start --head`, and "
            "join this machine to it"
        )

    async def close(self) -> None:
        """Ray ends all actors of the run."""
        await _apart(ray.shutdown)

    @property
    def head_away_s(self) -> float:
        """How long the head may be away before Ray ends this process."""
        try:
            return float(os.environ.get(_HEAD_AWAY, _HEAD_AWAY_S))
        except ValueError:
            return _HEAD_AWAY_S

    async def nodes(self) -> list[ListedNode]:
        """The living nodes that carry out rollouts. Raises NodeLost if Ray's head does not answer."""
        try:
            nodes, draining = await _apart(_look)
        except Exception as error:  # Ray's own client raises errors of many kinds here
            raise NodeLost(f"Ray's head does not answer: {one_line(str(error))}") from error
        hosts = Counter(node["NodeManagerHostname"] for node in nodes)
        return [
            ListedNode(
                node["NodeID"],
                node["NodeManagerHostname"] + f"-{node['NodeID'][:6]}" * (hosts[node["NodeManagerHostname"]] > 1),
                node["NodeID"] in draining,
            )
            for node in nodes
        ]

    async def start(self, node_id: str) -> Remote:
        """A host actor on that node. Raises NodeLost."""
        host: Remote | None = None
        try:
            async with asyncio.timeout(START_S):
                host = cast("Remote", RayHost(await _apart(lambda: _actor(node_id))))
                await host.pulse()
        except TimeoutError:
            if host is not None:
                host.end()
            raise NodeLost(f"Ray started no actor there within {START_S:g} s") from None
        except gone.RpcError as error:
            raise NodeLost(f"Ray's head does not answer: {one_line(str(error))}") from error
        return host


class RayHost:
    """A host actor as a `Remote`: its methods are those of `HostActor`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._actor, name)

        async def call(*args: Any, **named: Any) -> Any:
            return await self._answer(method.remote(*args, **named))

        return call

    def end(self) -> None:
        """Ends the actor's process, whatever it does. Its sandboxes end with it."""

        def kill() -> None:
            with suppress(Exception):  # it is gone already, or Ray is
                ray.kill(self._actor)

        _apart(kill)

    async def _answer(self, reference: Any) -> Any:
        answer = asyncio.wrap_future(reference.future())
        try:
            return await answer
        except asyncio.CancelledError:
            with suppress(Exception):  # the actor is gone
                ray.cancel(reference)
            raise
        except gone.TaskCancelledError as error:
            raise NodeLost("the call was cancelled there") from error
        except gone.RayTaskError:  # a bug of ours: it is raised as what it is
            raise
        except gone.RayError as error:
            with suppress(Exception):  # it may run on behind a broken connection
                ray.cancel(reference)
            raise NodeLost(_why(error)) from error


def _why(error: Exception) -> str:
    if isinstance(error, gone.RayActorError) and error.actor_init_failed:
        cause = str(error).rstrip().rpartition("\n")[2]  # the lines above are its traceback
        return f"no host actor can begin there ({one_line(cause)}); install the same packages on all nodes"
    return one_line(str(error))


def _apart(call: Callable[[], T]) -> asyncio.Future[T]:
    """Ray's calls may block for a minute while its head is away."""
    return apart(call, "ray")


def _actor(node_id: str) -> Any:
    """A new host actor on that node. Sends its class to the head first."""
    placed = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_concurrency": CALLS, "max_restarts": 0, "max_task_retries": 0}
    return ray.remote(HostActor).options(**options, runtime_env=_ENVIRONMENT, scheduling_strategy=placed).remote()


def _look() -> tuple[list[dict[str, Any]], set[str]]:
    draining = set(ray._private.state.state.get_draining_nodes())
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"] and node["Resources"].get(RESOURCE, 0) > 0], draining
