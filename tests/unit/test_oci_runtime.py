"""The keeper as a process that somebody else may stop, with a runtime that cannot be started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from orchestrator.errors import SandboxLostError
from orchestrator.launch.oci import runtime
from orchestrator.launch.oci.runtime import Runtime, is_stopped


@pytest.fixture
def unstarted(tmp_path: Path) -> Runtime:
    return Runtime(["/no/such/runtime", "--root", str(tmp_path)], {})


async def stopped(watching: Runtime) -> int:
    """Its keeper, which has been stopped."""
    with pytest.raises(SandboxLostError, match="cannot start"):
        await watching.remove("box")
    assert watching._keeper is not None
    os.kill(keeper := watching._keeper.pid, signal.SIGSTOP)
    while not is_stopped(keeper):
        pass
    return keeper


async def test_a_keeper_that_was_stopped_costs_one_limit_of_time(
    unstarted: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = await stopped(unstarted)
    with monkeypatch.context() as soon:
        soon.setattr(runtime, "_ANSWER_S", 0.1)
        with pytest.raises(SandboxLostError, match="did not answer"):
            await unstarted.remove("box")
    with pytest.raises(SandboxLostError, match=r"has ended|cannot start"):
        await unstarted.remove("box")
    with pytest.raises(SandboxLostError, match="cannot start"):
        await unstarted.remove("box")
    assert unstarted._keeper is not None
    assert unstarted._keeper.pid != keeper
    await unstarted.aclose()


async def test_a_keeper_that_was_stopped_is_not_left_behind(
    unstarted: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = await stopped(unstarted)
    monkeypatch.setattr(runtime, "_CLOSING_S", 0.1)
    await unstarted.aclose()
    assert not Path(f"/proc/{keeper}").exists()
