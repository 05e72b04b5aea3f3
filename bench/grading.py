"""Grading: what a second sandbox costs beside the tests' own work, and beside the rollout whose state it grades.

CPU is that of this process, of the keeper, and of all that the keeper has waited for: the OCI runtime and all
processes in its sandboxes. What others use is not in it. The tests' own is what their script takes without a
sandbox, from the fork of its shell on.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from statistics import mean

from bench.boxes import ANSWER
from bench.numbers import p50
from bench.report import Findings, Scale
from orchestrator.completion.base import CompletionRequest
from orchestrator.errors import EnvironmentUnusable
from orchestrator.grading.grade import grade, with_tests
from orchestrator.host.resources import Resources
from orchestrator.host.rollout import run_rollout
from orchestrator.launch.channels import Channels
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.oci.machine import why_not_here
from orchestrator.launch.oci.program import USUAL
from orchestrator.launch.workspaces import Workspaces
from orchestrator.types import Completion, Ended, Grader, RolloutPlan, Task
from tests.fakes.oci_images import stored_image
from tests.fakes.plans import a_plan, a_writable_sandbox

TITLE = "Grading in a second sandbox"
STEPS = 4
TEST_SH = "#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n"
STEP = "Thought: I write.\n<code>\nopen('f', 'a').write('x')\n</code>"
_TICKS = os.sysconf("SC_CLK_TCK")


async def measure(scale: Scale) -> Findings:
    if (reason := why_not_here(USUAL[0])) is not None:
        raise EnvironmentUnusable(reason)
    await asyncio.to_thread(stored_image)
    found = Findings()
    spec, times = a_writable_sandbox(DEFAULT_IMAGE), scale.pick(1, 20, 60)
    with tempfile.TemporaryDirectory() as place:
        (tests := Path(place) / "tests").mkdir()
        (tests / "test.sh").write_text(TEST_SH)
        workspaces = Workspaces(Path(place) / "layers")
        graded = with_tests(Task("t", "q", grader=Grader("harbor", tests=str(tests))), workspaces)
        async with _machine() as around:
            plain = replace(a_plan(), task=Task("t", "q", "42"), sandbox=spec)
            await _rollout(replace(plain, task=graded), around)  # opens what all share
            cold: list[float] = []
            walls: list[float] = []
            tests_own: list[float] = []
            alone: list[float] = []
            both: list[float] = []
            for number in range(times):
                before, started = _cpu_s(around), time.perf_counter()
                await grade(graded, spec, around.launcher)
                walls.append(time.perf_counter() - started)
                cold.append(_cpu_s(around) - before)
                tests_own.append(await asyncio.to_thread(_cpu_s_of_tests, Path(place)))
                for task in (graded, plain.task) if number % 2 else (plain.task, graded):
                    before = _cpu_s(around)
                    await _rollout(replace(plain, task=task, rollout_id=secrets.token_hex(4)), around)
                    (both if task is graded else alone).append(_cpu_s(around) - before)
        workspaces.close()
    most = (None, None) if scale is Scale.TINY else (40.0, 0.5)
    note = "start, end and reading included"
    beside = mean(cold) - mean(tests_own)
    found.add("CPU of a cold grader, mean", mean(cold) * 1e3, "ms", note=note)
    found.add("of it beside the tests' own", beside * 1e3, "ms", at_most=most[0])
    found.add("wall clock of a cold grader, p50", p50(walls) * 1e3, "ms")
    found.add(f"CPU of a rollout of {STEPS} steps, mean", mean(alone), "CPU-s", note="its sandbox made cold")
    found.add("what grading adds / the rollout", mean(both) / mean(alone) - 1, "x", at_most=most[1])
    found.samples |= {
        "cold grader, CPU-s": cold,
        "tests alone, CPU-s": tests_own,
        "rollout, CPU-s": alone,
        "rollout with grading, CPU-s": both,
    }
    return found


class _Steps:
    """Writes a file in each step, and answers 42 in the last one."""

    takes_ids = guides = False

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}

    async def sample(self, request: CompletionRequest) -> Completion:
        number = self._asked[request.rollout_id] = self._asked.get(request.rollout_id, 0) + 1
        text = ANSWER if number == STEPS else STEP
        visible = text.removesuffix("</code>")
        return Completion(text, visible, "stop", None, None, prompt_tokens=1000, completion_tokens=20)

    async def aclose(self) -> None:
        """Nothing is open."""


@asynccontextmanager
async def _machine() -> AsyncIterator[Resources]:
    run_id = secrets.token_hex(8)
    launcher = OciLauncher(run_id, max_sandboxes=2, advise=lambda line: None)
    with Channels(run_id) as channels:
        try:
            yield Resources(launcher, _Steps(), None, channels.directory)
        finally:
            await launcher.aclose()


async def _rollout(plan: RolloutPlan, around: Resources) -> None:
    attempt = await run_rollout(plan, around)
    grade = attempt.record.grade
    if not isinstance(attempt.outcome, Ended) or (plan.task.grader and (grade is None or not grade.rewards)):
        raise RuntimeError(f"the rollout did not end as it should: {attempt.outcome}, {grade}")


def _cpu_s_of_tests(place: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    script = TEST_SH.replace("/logs/verifier", str(place))
    subprocess.run(["/bin/sh", "-c", script], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _cpu_s(around: Resources) -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    seconds = own.ru_utime + own.ru_stime
    assert isinstance(around.launcher, OciLauncher)
    for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        if b"oci/keeper.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            # utime, stime, and those of children that were waited for
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
            seconds += sum(map(int, ticks)) / _TICKS
    return seconds
