"""What a model's code prints of addresses is the same in all sandboxes: whoever goes on with a rollout in another
one finds what it said before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from orchestrator.launch.oci.machine import why_no_forks
from tests.fakes import oci_images
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import flags, outcomes, run, write_tasks
from tests.integration.test_oci_run import environ

_WHY_NOT = oci_images.why_not() or why_no_forks("runc")
pytestmark = [pytest.mark.docker, pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")]
OURS = {"run": b"/sandbox/__main__.py", "fork": b"/sandbox/boot/parent.py"}
LEVELS = {"run": 2, "fork": 3}  # of process numbers: the machine's, in `fork` the parent's, and its own


def script(call: Call) -> str:
    return f"Here.\n<code>\n{'print' if call.turn == 0 else 'final_answer'}(final_answer)\n</code>"


def supervisors(start: str) -> Iterator[int]:
    """Pid 1 of each sandbox on this machine that was started so."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            numbers = re.findall(r"NSpid:(.*)", (process / "status").read_text())[0].split()
            if (
                len(numbers) == LEVELS[start]
                and numbers[-1] == "1"
                and OURS[start] in (process / "cmdline").read_bytes()
            ):
                yield int(process.name)


@asynccontextmanager
async def crowded(start: str) -> AsyncIterator[None]:
    """As on a crowded machine, pid 1 of a sandbox has its turn now and then."""

    async def hold_up() -> None:
        while True:
            held = [pid for pid in supervisors(start) if random.random() < 0.4]
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in held:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                await asyncio.sleep(random.choice([0.002, 0.01, 0.05, 0.25]))

    task = asyncio.create_task(hold_up())
    try:
        yield
    finally:
        task.cancel()
        for pid in supervisors(start):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("start", OURS)
async def test_addresses_do_not_depend_on_when_a_process_has_its_turn(home: Path, start: str) -> None:
    write_tasks(home / "tasks.jsonl", 8)
    limits = {
        "group_size": 8,
        "warm_sandboxes": 0,
        "max_concurrent_sandboxes": 8,
        "launcher": "oci",
        "start": start,
    }
    async with ScriptedServer("vllm", script) as server, crowded(start):
        ended = await run(*flags(home, server.base_url, **limits), directory=home, environ=environ())
    assert ended.code == 0, ended.stderr
    assert outcomes(home / "run") == {"finished": 64}
    found = re.findall(r"function final_answer at (0x[0-9a-f]+)", (home / "run" / "groups.jsonl").read_text())
    assert len(found) >= 64
    assert len({*found}) == 1
