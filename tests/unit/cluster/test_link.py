"""What Ray does, as the run sees it: without a cluster, its calls replaced."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cluster.order import Pulse
from orchestrator.cluster.remote import NodeLost

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")


@pytest.fixture(scope="module")
def link() -> Any:
    """The module, with Ray: not imported by each process that collects this file, as that takes a second."""
    return import_module("orchestrator.cluster.link")


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
    ("error", "arguments"),
    [
        ("ActorDiedError", ()),
        ("ActorUnavailableError", ("the connection broke", None)),
        ("ActorUnschedulableError", ("the node left before the actor was there",)),
        ("RuntimeEnvSetupError", ("the agent of the node is gone",)),
        ("OutOfMemoryError", ("the node killed it",)),
        ("LocalRayletDiedError", ()),
        ("OwnerDiedError", ("00", None, "")),
    ],
)
async def test_whatever_ray_says_of_an_actor_is_a_lost_node(
    error: str, arguments: tuple[Any, ...], link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link.ray, "cancel", lambda reference: None)
    with pytest.raises(NodeLost) as told:
        await link.RayHost(answering(getattr(link.ray.exceptions, error)(*arguments))).pulse()
    assert "\n" not in str(told.value)


async def test_a_bug_of_ours_on_a_node_is_raised_as_what_it_is(link: Any) -> None:
    bug = link.ray.exceptions.RayTaskError("pulse", "Traceback", KeyError("x")).as_instanceof_cause()
    with pytest.raises(KeyError):
        await link.RayHost(answering(bug)).pulse()


async def test_an_actor_is_made_off_the_event_loop(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sends the class to its head first, which may be away."""

    def made() -> Any:
        time.sleep(0.3)
        return answering(Pulse())

    options = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made))
    monkeypatch.setattr(link.ray, "remote", lambda actor: options)
    starting = asyncio.create_task(link.RayLink("x").start("a" * 56))
    started_s = asyncio.get_running_loop().time()
    await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - started_s < 0.2
    assert isinstance(await starting, link.RayHost)
