"""What an agent plants in its sandbox gains it nothing where its state is graded in another one."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.grading.grade import grade, with_tests
from orchestrator.launch.base import Command, CommandEnd
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.workspaces import Workspaces
from orchestrator.types import Case, Checked, Collect, Grade, Grader, SandboxSpec, Task
from tests.fakes import oci_images
from tests.fakes.plans import WAIVED_WITHOUT_ROOT, a_writable_sandbox
from tests.integration.grading.attacks import ATTACKS, SOLUTION, Attack, put

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(300),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
TEST_SH = """#!/bin/bash
cd /app
if pytest -p no:cacheprovider /tests/test_outputs.py -rA; then r=1; else r=0; fi
echo $r > /logs/verifier/reward.txt
"""
TEST_OUTPUTS = """
import subprocess, pytest
@pytest.mark.parametrize(("a", "b", "c"), [("2", "3", "5"), ("40", "2", "42")])
def test_sum(a, b, c):
    run = subprocess.run(["python3", "/app/calc.py", a, b], capture_output=True, text=True, timeout=5)
    assert run.stdout.strip() == c
"""
PRELOAD_C = """
#include <stdio.h>
__attribute__((destructor)) static void w(void) {
    FILE *f = fopen("/logs/verifier/reward.json", "w");
    if (f) { fputs("1", f); fclose(f); }
}
"""
SCOPES: Mapping[str, Grader] = {
    "whole": Grader("harbor", environment=PATH, timeout_s=60),
    "solution": Grader("harbor", environment=PATH, timeout_s=60, checked=Checked(scope=("/app",))),
    "declared": Grader("harbor", environment=PATH, timeout_s=60, declared=("/app/calc.py",)),
}


@pytest.fixture(scope="module")
def workspaces() -> Iterator[Workspaces]:
    """With layers of `base` (Debian's Python with pytest, and the task's folder) and of the tests."""
    with tempfile.TemporaryDirectory(prefix="graders") as folder:
        made = Workspaces(Path(folder) / "layers")
        yield made
        made.close()


@pytest.fixture(scope="module")
def spec(workspaces: Workspaces, tmp_path_factory: pytest.TempPathFactory) -> SandboxSpec:
    root = tmp_path_factory.mktemp("base")
    dist, here = root / "usr/lib/python3/dist-packages", Path(sysconfig.get_path("purelib"))
    for name in PACKAGES:
        for package in (here / name, *here.glob(f"{name}-*.dist-info")):
            shutil.copytree(package, dist / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(here / "py.py", dist)
    (root / "usr/bin").mkdir()
    (program := root / "usr/bin/pytest").write_text(
        "#!/usr/bin/python3\nimport pytest\nraise SystemExit(pytest.main())\n"
    )
    program.chmod(0o755)
    (root / "app").mkdir()
    oci_images.stored_image()
    return a_writable_sandbox(DEFAULT_IMAGE, storage_bytes=256 << 20, layers=(str(root),))


@pytest.fixture(scope="module")
def tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tests")
    (folder / "test.sh").write_text(TEST_SH)
    (folder / "test_outputs.py").write_text(TEST_OUTPUTS)
    return folder


@pytest.fixture
async def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OciLauncher]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = OciLauncher("attacks", max_sandboxes=2, waived=WAIVED_WITHOUT_ROOT)
    yield made
    await made.aclose()


def shell(script: str, **more: object) -> Command:
    return replace(Command(("/bin/sh", "-c", script), 60, "/", PATH), **more)  # type: ignore[arg-type]


async def graded(launcher: OciLauncher, spec: SandboxSpec, task: Task, script: str) -> Grade:
    """Of the state in which an agent leaves its sandbox that runs this script."""
    async with launcher.run(spec, shell(script)) as box:
        await box.command_end()
        return await grade(task, spec, launcher, (box,))


def a_task(grader: Grader, tests: Path, workspaces: Workspaces) -> Task:
    return with_tests(Task("calc", "Add.", grader=replace(grader, tests=str(tests))), workspaces)


async def in_place(
    launcher: OciLauncher, spec: SandboxSpec, script: str, tests: Path, workspaces: Workspaces
) -> str:
    """The reward of tests that are laid into the agent's own sandbox, and run beside what it left running."""
    laid = workspaces.layer(tests, "/laid", writable=False)
    script += (
        "\nrm -f /logs/verifier/reward.txt /logs/verifier/reward.json; mkdir -p /logs/verifier /tests;"
        " cp -r /laid/. /tests/; chmod +x /tests/test.sh; timeout 30 /tests/test.sh > /dev/null 2>&1; sleep 0.3;"
        " cat /logs/verifier/reward.json 2> /dev/null || cat /logs/verifier/reward.txt"
    )
    async with launcher.run(spec, shell(script, layers=(str(laid),))) as box:
        end: CommandEnd = await box.command_end()
        assert end.status == 0
        with box.written() as top:
            path = f"/proc/self/fd/{top}/logs/verifier/test-stdout.txt"
            return Path(path).read_text().strip().rpartition("\n")[2]


@pytest.mark.parametrize("scope", SCOPES)
async def test_honest_work_gets_its_reward_and_no_work_gets_none(
    scope: str, launcher: OciLauncher, spec: SandboxSpec, tests: Path, workspaces: Workspaces
) -> None:
    task = a_task(SCOPES[scope], tests, workspaces)
    right = await graded(launcher, spec, task, SOLUTION)
    assert (right.rewards, right.fault, right.source, right.scope) == ({"reward": 1}, "", "reward.txt", scope), (
        right
    )
    assert [test.outcome for test in right.tests] == ["passed", "passed"]
    nothing = await grade(task, spec, launcher)
    assert (nothing.rewards, nothing.fault) == ({"reward": 0}, "")
    assert [test.outcome for test in nothing.tests] == ["failed", "failed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
async def test_what_an_agent_plants_gains_it_nothing(
    name: str, launcher: OciLauncher, spec: SandboxSpec, tests: Path, workspaces: Workspaces
) -> None:
    attack = ATTACKS[name]
    if attack.wins_in_place:  # else it would not be known to be one
        found = await in_place(launcher, spec, attack.script, tests, workspaces)
        assert found in ("1", '{"reward": 1}'), found
    for grader in SCOPES.values():
        grade = await graded(launcher, spec, a_task(grader, tests, workspaces), attack.script)
        expected = {"reward": float(attack.in_solution)}
        assert (grade.rewards, grade.fault) == (expected, ""), grade


async def test_a_preloaded_library_gains_nothing(
    launcher: OciLauncher, spec: SandboxSpec, tests: Path, workspaces: Workspaces, tmp_path: Path
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no compiler here")
    (tmp_path / "w.c").write_text(PRELOAD_C)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "w.so", tmp_path / "w.c"], check=True)
    (carried := tmp_path / "carried").mkdir()
    shutil.copy(tmp_path / "w.so", carried)
    carrying = replace(spec, layers=(*spec.layers, str(workspaces.layer(carried, "/srv/carried"))))
    script = "cp /srv/carried/w.so /usr/lib/w.so; echo /usr/lib/w.so > /etc/ld.so.preload"
    assert await in_place(launcher, carrying, script, tests, workspaces) == "1"
    for grader in SCOPES.values():
        found = await graded(launcher, carrying, a_task(grader, tests, workspaces), script)
        assert (found.rewards, found.fault) == ({"reward": 0}, ""), found


IO = Grader(
    "io",
    command=("python3", "/app/calc.py"),
    environment=PATH,
    timeout_s=20,
    cases=(Case(("2", "3"), "", "5"), Case(("40", "2"), "", "42")),
)


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.in_solution])
async def test_cases_stop_what_no_grader_beside_the_delivered_program_can(
    name: str, launcher: OciLauncher, spec: SandboxSpec
) -> None:
    task = Task("calc", "Add.", grader=IO)
    attack: Attack = ATTACKS[name]
    assert (await graded(launcher, spec, task, attack.script)).rewards == {"reward": 0, "cases": 0}
    assert (await graded(launcher, spec, task, SOLUTION)).rewards == {"reward": 1, "cases": 1}


async def test_a_reward_file_that_the_tests_do_not_write_is_flagged_and_does_not_count(
    launcher: OciLauncher, spec: SandboxSpec, tests: Path, workspaces: Workspaces
) -> None:
    checked = Checked(scope=("/app",), source="reward.txt", duration_s=1)
    task = a_task(replace(SCOPES["whole"], checked=checked), tests, workspaces)
    found = await graded(launcher, spec, task, ATTACKS["the work writes the reward"].script)
    assert found.rewards == {"reward": 0}
    assert found.flags[0].endswith("processes were left running")
    assert found.flags[1] == "reward.json was written, which the task's own tests do not write"


@pytest.mark.slow
async def test_what_does_not_end_is_the_policys_doing_only_where_the_solution_ends_early(
    launcher: OciLauncher, spec: SandboxSpec, tmp_path: Path, workspaces: Workspaces
) -> None:
    (slow := tmp_path / "slow").mkdir()
    (slow / "test.sh").write_text("#!/bin/sh\npython3 /app/calc.py 1 2\necho 1 > /logs/verifier/reward.txt\n")
    grader = replace(SCOPES["whole"], timeout_s=2)
    endless = put("/app/calc.py", "while True: pass")
    unknown = await graded(launcher, spec, a_task(grader, slow, workspaces), endless)
    assert (unknown.rewards, unknown.fault) == ({}, "the grader did not end within 2 s")
    for duration_s, rewards in ((0.5, {"reward": 0}), (1.5, {})):
        checked = Checked(source="reward.txt", duration_s=duration_s)
        known = await graded(launcher, spec, a_task(replace(grader, checked=checked), slow, workspaces), endless)
        assert known.rewards == rewards
        assert bool(known.fault) is not bool(rewards)


async def test_what_is_collected_is_graded_and_does_not_show_in_what_was_declared_alone(
    launcher: OciLauncher, spec: SandboxSpec, tmp_path: Path, workspaces: Workspaces
) -> None:
    (checks := tmp_path / "checks").mkdir()
    (checks / "test.sh").write_text(
        "#!/bin/sh\ncat /logs/artifacts/out /srv/other; ls /srv; echo 1 > /logs/verifier/reward.txt\n"
    )
    collect = (
        Collect("cp /srv/made /logs/artifacts/out; echo other > /srv/other", 10),
        Collect("echo more >> /logs/artifacts/out", 10),
    )
    grader = replace(SCOPES["whole"], declared=("/logs/artifacts",), collect=collect)
    found = await graded(launcher, spec, a_task(grader, checks, workspaces), "echo made > /srv/made")
    assert (found.rewards, found.kept) == ({"reward": 1}, ("/logs/artifacts",))
    assert found.stdout == "made\nmore\n"
