"""Tasks that the run's launcher makes no sandbox for are bad tasks that say what to do."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.engine.one_group import GroupMaker
from orchestrator.engine.shared import Shared
from orchestrator.engine.task_needs import why_unfit
from orchestrator.launch.workspaces import Workspaces
from orchestrator.rules.observer import Observer
from orchestrator.settings.sources import load_config
from orchestrator.tasks.content import content_of
from orchestrator.types import BadTask, Checked, Grader, Task, TaskCheck, TaskStep

DOCKER, OCI, PROCESS = (("--env.launcher", name) for name in ("docker", "oci", "process"))
GRADER = Grader("command", command=("true",))
WRITABLE = ("--env.launcher", "oci", "--env.sandbox_root", "writable")


@pytest.mark.parametrize(
    ("user", "flags", "words"),
    [
        (0, (), None),
        (1000, (), "its steps need root here"),
        (0, ("--env.sandbox_storage", "4GiB"), "its steps need a root in memory"),
    ],
)
def test_several_steps_need_a_sandbox_that_can_be_held_still_and_copied(
    user: int, flags: tuple[str, ...], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    config = load_config([*OCI, *flags], environ={})
    wanted = Task("t", "?", grader=GRADER, steps=(TaskStep("a", "?", GRADER), TaskStep("b", "?", GRADER)))
    reason = why_unfit(wanted, config.env, config.sandbox_spec(wanted))
    assert (reason or "").startswith(words or "")
    assert (reason is None) == (words is None)


@pytest.mark.parametrize(
    ("flags", "task", "words"),
    [
        (DOCKER, {}, None),
        (DOCKER, {"cwd": "/app", "environment": {"A": "1"}, "root": "read-only"}, None),
        (DOCKER, {"workspace": "/w"}, "its workspace needs a root that can be written to: --env.launcher oci"),
        (DOCKER, {"root": "writable"}, "its root needs a root that can be written to"),
        (DOCKER, {"user": "1000"}, 'its user needs a root that can be written to: "root": "writable"'),
        (DOCKER, {"image": "/images/a"}, "its image is a file, which only the launcher oci takes"),
        (OCI, {"workspace": "/w", "user": "1000"}, None),
        (OCI, {"root": "writable", "user": "1000", "image": "/images/a"}, None),
        (OCI, {"user": "1000"}, "its user needs"),
        (WRITABLE, {"user": "1000"}, None),
        (WRITABLE, {"memory_bytes": 1 << 50}, "a sandbox of 1073742336 MiB does not fit into this machine's"),
        (WRITABLE, {"user": "1000", "root": "read-only"}, "its user needs"),
        (DOCKER, {"grader": GRADER}, "its grader needs a root that can be written to: --env.launcher oci"),
        (OCI, {"grader": GRADER}, None),
        (OCI, {"grader": replace(GRADER, dockerfile="/d")}, None),
        ((*OCI, "--env.cluster", "ray"), {"grader": GRADER, "workspace": "/w"}, None),
        (PROCESS, {"grader": GRADER}, "its grader needs a sandbox with files"),
        (PROCESS, {"environment": {"A": "1"}}, None),
        *(
            (PROCESS, {name: "x"}, f"its {name} needs a sandbox with files")
            for name in ("cwd", "user", "workspace")
        ),
    ],
)
def test_a_task_is_held_against_the_launcher(
    flags: tuple[str, ...], task: dict[str, Any], words: str | None
) -> None:
    config, wanted = load_config(list(flags), environ={}), Task("t", "?", **task)
    reason = why_unfit(wanted, config.env, config.sandbox_spec(wanted))
    assert (reason or "").startswith(words or "")
    assert (reason is None) == (words is None)


@pytest.mark.parametrize(
    ("strategy", "task", "bad"),
    [
        ("correctness", {"grader": GRADER}, True),
        ("judge", {"grader": GRADER}, True),
        ("correctness", {"grader": GRADER, "answer": "42"}, False),
        ("python:a:b", {"grader": GRADER}, False),
        ("correctness", {}, False),
    ],
)
def test_tests_are_no_answer(strategy: str, task: dict[str, Any], bad: bool, tmp_path: Path) -> None:
    config = load_config([*OCI, "--env.scoring_strategy", strategy], environ={})
    shared = Shared(config, logging.info)
    shared.workspaces = Workspaces(tmp_path / "store")
    fitted = GroupMaker(config, Observer(), shared, "train").fitting(Task("t", "?", **task))
    assert isinstance(fitted, BadTask) == bad
    if isinstance(fitted, BadTask):
        assert fitted.reason.startswith("it has tests in the place of an answer: --env.scoring_strategy")


def test_a_task_without_a_grader_is_none_where_graders_score(tmp_path: Path) -> None:
    config = load_config([*OCI, "--env.scoring_strategy", "grader"], environ={})
    shared = Shared(config, logging.info)
    shared.workspaces = Workspaces(tmp_path / "store")
    maker = GroupMaker(config, Observer(), shared, "train")
    bad = maker.fitting(Task("t", "?"))
    assert isinstance(bad, BadTask)
    assert bad.reason.startswith("it has no grader")
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/test.sh").touch()
    drawn = Task("t", "?", grader=replace(GRADER, tests=str(tmp_path / "checks")))
    shared.checks = {"t": TaskCheck(content_of(drawn), checked=Checked(source="exit"))}
    task = maker.fitting(drawn)
    assert isinstance(task, Task)
    assert task.grader is not None
    assert task.grader.checked == Checked(source="exit")
    assert Path(task.grader.tests or "", "tests/test.sh").stat().st_mode & 0o777 == 0o644
    drawn = Task("t", "?", grader=GRADER)
    shared.checks = {"t": TaskCheck(content_of(drawn), checked=Checked(layer="a" * 64))}
    gone = maker.fitting(drawn)
    assert isinstance(gone, BadTask)
    assert gone.reason.endswith("is not on this machine: run check-tasks again here")


def test_a_workspace_is_unpacked_when_its_task_is_drawn(tmp_path: Path) -> None:
    config = load_config(list(OCI), environ={})
    shared = Shared(config, logging.info)
    shared.workspaces = Workspaces(tmp_path / "store")
    maker = GroupMaker(config, Observer(), shared, "train")
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/a").write_text("1")
    task = maker.fitting(Task("t", "?", workspace=str(tmp_path / "repo"), cwd="/app"))
    assert isinstance(task, Task)
    spec = config.sandbox_spec(task)
    assert (spec.root, spec.layers) == ("writable", (task.workspace,))
    assert (Path(spec.layers[0]) / "app/a").read_text() == "1"
    in_place = maker.fitting(Task("t", "?", workspace=str(tmp_path / "repo")))
    assert isinstance(in_place, Task)
    assert (Path(str(in_place.workspace)) / "workspace/a").read_text() == "1"
    (tmp_path / "no.tar").write_text("no archive")
    bad = maker.fitting(Task("t", "?", workspace=str(tmp_path / "no.tar")))
    assert isinstance(bad, BadTask)
    assert bad.reason.startswith("its workspace cannot be used: no.tar: ")
