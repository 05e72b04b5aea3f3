"""What Ray does, as the run sees it: without a cluster, its calls replaced."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cluster.remote import NodeLost

pytest.importorskip("ray")

import ray.exceptions as gone

from orchestrator.cluster import link as link_module
from orchestrator.cluster.link import RayHost, RayLink
from orchestrator.cluster.order import Pulse


def answering(answer: object) -> Any:
    """An actor whose `pulse` ends so."""
    told: Future[Any] = Future()
    if isinstance(answer, BaseException):
        told.set_exception(answer)
    else:
        told.set_result(answer)
    reference = SimpleNamespace(future=lambda: told)
    return SimpleNamespace(pulse=SimpleNamespace(remote=lambda: reference))


@pytest.mark.parametrize(
    "error",
    [
        gone.ActorDiedError(),
        gone.ActorUnavailableError("the connection broke", None),
        gone.ActorUnschedulableError("the node left before the actor was there"),
        gone.RuntimeEnvSetupError("the agent of the node is gone"),
        gone.OutOfMemoryError("the node killed it"),
        gone.LocalRayletDiedError(),
        gone.OwnerDiedError("00", None, ""),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_ray_says_of_an_actor_is_a_lost_node(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module.ray, "cancel", lambda reference: None)
    with pytest.raises(NodeLost) as told:
        await RayHost(answering(error)).pulse()
    assert "\n" not in str(told.value)


async def test_a_bug_of_ours_on_a_node_is_raised_as_what_it_is() -> None:
    bug = gone.RayTaskError("pulse", "Traceback", KeyError("x")).as_instanceof_cause()
    with pytest.raises(KeyError):
        await RayHost(answering(bug)).pulse()


async def test_an_actor_is_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends the class to its head first, which may be away."""

    def made() -> Any:
        time.sleep(0.3)
        return answering(Pulse())

    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made))
    monkeypatch.setattr(link_module.ray, "remote", lambda actor: options)
    starting = asyncio.create_task(RayLink("x").start("a" * 56))
    started_s = asyncio.get_running_loop().time()
    await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - started_s < 0.2
    assert isinstance(await starting, RayHost)
