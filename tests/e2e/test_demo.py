"""The demo as a stranger runs it: one command, real containers, a recorded model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from orchestrator.demo import recording
from orchestrator.settings.tasks import DEMO_TASKS
from tests.fakes import oci_images
from tests.fakes.wheel import installed_wheel

COMMAND = "import sys; from orchestrator.cli import main; sys.exit(main())"
GROUPS = 2
DEADLINE_S = 280


def orchestrator(
    *arguments: str | Path, cwd: Path, python: str | Path = sys.executable, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Without any key, proxy or setting of whoever runs the tests."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [python, "-c", COMMAND, *arguments],
        cwd=cwd,
        env=environment | {"XDG_CACHE_HOME": str(cwd / "cache")} | environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """(the run directory, what was printed) of a demo of two groups."""
    folder = tmp_path_factory.mktemp("demo")
    result = orchestrator("demo", f"--env.total_steps={GROUPS}", "--env.run_dir=run", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "run", result


def _json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.docker
def test_the_first_line_says_what_is_recorded_and_what_is_live(played) -> None:
    _, result = played
    first = result.stdout.splitlines()[0]
    assert re.search(r"recorded is what \S+ said.*live are the containers", first)


@pytest.mark.docker
def test_the_demo_gives_mixed_scores_of_sampled_tokens(played) -> None:
    run, _ = played
    groups = _json_lines(run / "groups.jsonl")
    assert len(groups) == GROUPS
    assert all(len(set(group["scores"])) > 1 for group in groups)
    assert {facts["token_source"] for group in groups for facts in group["overrides"]} == {"sampled"}


@pytest.mark.docker
def test_the_same_code_in_new_containers_earns_the_recorded_scores(played) -> None:
    run, _ = played
    then = {(line["task_id"], line["index"]): line for line in recording.lines()}
    lines = _json_lines(run / "rollouts.jsonl")
    assert len({line["sandbox"]["id"] for line in lines}) == len(lines)
    for line in lines:
        before = then[line["task_id"], line["index"]]
        assert (line["outcome"], line["answer"]) == (before["outcome"], before["answer"])
        assert line["score"] == pytest.approx(before["score"])
        ids = [[c[name] for c in of["completions"]] for of in (line, before) for name in ("token_ids", "logprobs")]
        assert ids[:2] == ids[2:]


@pytest.mark.docker
def test_differences_of_prompt_are_counted_and_said(played) -> None:
    run, result = played
    then = {(line["task_id"], line["index"]): line for line in recording.lines()}
    assert _told_of_prompts(_json_lines(run / "rollouts.jsonl"), then) in result.stdout


def _told_of_prompts(lines: list[dict], then: dict[tuple[str, int], dict]) -> str:
    served = differing = 0
    for line in lines:
        talks = [_talks(of["completions"]) for of in (line, then[line["task_id"], line["index"]])]
        served += len(talks[0])
        differing += sum(now != before for now, before in zip(*talks, strict=True))
    prompts = f"{differing} of their prompts differed" if differing else "every prompt as recorded"
    return f"{served} completions replayed, {prompts}\n"


def _talks(completions: list[dict]) -> list[list[dict]]:
    talks: list[list[dict]] = []
    for completion in completions:
        talks.append([*(talks[-1][: completion["kept"]] if talks else ()), *completion["messages"]])
    return talks


@pytest.mark.docker
def test_verify_finds_nothing_wrong_with_the_demo(played) -> None:
    run, _ = played
    result = orchestrator("verify", run, cwd=run.parent)
    assert result.returncode == 0, result.stdout
    assert f"{GROUPS} groups, " in result.stdout
    assert ", 0 violations" in result.stdout


@pytest.mark.slow
@pytest.mark.docker
def test_the_demo_says_where_its_report_is_and_nothing_is_left_to_do_again(played) -> None:
    run, result = played
    assert re.search(r"^report +run/groups\.html$", result.stdout, re.MULTILINE)
    page = (run / "groups.html").read_text()
    assert "default-src 'none'" in page
    (cached,) = (run.parent / "cache" / "rollout-orchestrator" / "demo").iterdir()
    made = cached.stat().st_mtime_ns
    again = orchestrator("demo", "--env.total_steps=1", "--env.run_dir=again", cwd=run.parent)
    assert again.returncode == 0, again.stderr
    assert "building" not in again.stderr
    assert cached.stat().st_mtime_ns == made


@pytest.mark.long
@pytest.mark.docker
def test_a_demo_goes_on_where_it_was(played) -> None:
    run, _ = played
    before = _json_lines(run / "groups.jsonl")
    more = orchestrator("demo", f"--env.total_steps={GROUPS + 1}", "--env.resume=run", cwd=run.parent)
    assert more.returncode == 0, more.stderr
    after = _json_lines(run / "groups.jsonl")
    assert after[:GROUPS] == before
    assert len(after) == GROUPS + 1


@pytest.mark.docker
def test_a_run_of_anything_else_is_not_gone_on_with(played) -> None:
    run, _ = played
    other = run.parent / "other"
    other.mkdir()
    facts = json.loads((run / "run.json").read_text())
    facts["config"]["env"]["dataset"] = "jsonl:tasks.jsonl"
    (other / "run.json").write_text(json.dumps(facts))
    result = orchestrator("demo", "--env.resume=other", cwd=run.parent)
    assert result.returncode == 2
    assert "other was not made by `orchestrator demo`" in result.stderr


@pytest.mark.long
@pytest.mark.docker
def test_keys_for_the_web_change_nothing_about_the_demo(tmp_path: Path) -> None:
    """With web tools the agent would be told of them, and no prompt would be the recorded one."""
    (tmp_path / ".env").write_text("TAVILY_API_KEY=tvly-not-a-key\nOPENAI_API_KEY=not-a-key\n")
    result = orchestrator("demo", "--env.total_steps=1", "--env.run_dir=run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "completions replayed, every prompt as recorded" in result.stdout


# ---------------------------------------------------------------- code tasks


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """(the run directory, what was printed) of all code tasks."""
    if (reason := oci_images.why_not()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("demo-code")
    # With the usual store of images: filling one of its own takes minutes.
    result = orchestrator("demo", "--tasks=code", "--env.run_dir=run", cwd=folder, **oci_images.CACHE)
    assert result.returncode == 0, result.stderr
    return folder / "run", result


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.timeout(900)
def test_the_recorded_work_is_graded_anew_and_earns_the_recorded_scores(graded) -> None:
    run, result = graded
    then = {(line["task_id"], line["index"]): line for line in recording.lines(recording.CODE_RECORDING)}
    lines = _json_lines(run / "rollouts.jsonl")
    assert {(line["task_id"], line["index"]) for line in lines} == then.keys()
    boxes = [line["sandbox"]["id"] for line in lines]
    assert len(set(boxes)) == len(lines)
    for line in lines:
        before = then[line["task_id"], line["index"]]
        assert (line["outcome"], line["score"]) == (before["outcome"], pytest.approx(before["score"])), line[
            "task_id"
        ]
        assert line["grade"]["rewards"]
        ids = [[c[name] for c in of["completions"]] for of in (line, before) for name in ("token_ids", "logprobs")]
        assert ids[:2] == ids[2:]
    assert _told_of_prompts(lines, then) in result.stdout


@pytest.mark.long
@pytest.mark.docker
@pytest.mark.timeout(900)
def test_verify_finds_nothing_wrong_with_graded_groups(graded) -> None:
    run, _ = graded
    result = orchestrator("verify", run, cwd=run.parent)
    assert result.returncode == 0, result.stdout
    assert ", 0 violations" in result.stdout


@pytest.mark.parametrize(
    ("flag", "code", "said"),
    [
        ("--env.oci_runtime=/nowhere/runc", 3, "code tasks need the launcher oci, which does not work here: "),
        ("--env.launcher=docker", 2, "env.launcher: code tasks need oci, not docker"),
    ],
)
def test_where_code_tasks_cannot_be_graded_one_line_says_so(
    tmp_path: Path, flag: str, code: int, said: str
) -> None:
    result = orchestrator("demo", "--tasks=code", flag, cwd=tmp_path)
    assert result.returncode == code
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert said in line


def test_a_demo_of_other_tasks_is_not_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    env = {"dataset": DEMO_TASKS["code"]}
    (tmp_path / "run" / "run.json").write_text(json.dumps({"config": {"env": env}}))
    result = orchestrator("demo", "--env.resume=run", cwd=tmp_path)
    assert result.returncode == 2
    assert "plays the code: give --tasks code" in result.stderr


@pytest.mark.full
@pytest.mark.docker
def test_the_wheel_carries_the_demo(tmp_path: Path) -> None:
    made = installed_wheel(tmp_path)
    names = set(zipfile.ZipFile(made.wheel).namelist())
    here = recording.ROOT
    data = [path for path in here.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {f"orchestrator/demo/{path.relative_to(here)}" for path in data} <= names
    code = recording.code_tasks_folder()
    files = [
        path.relative_to(code) for path in code.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert {f"orchestrator/demo/code-tasks/{path}" for path in files} <= names

    result = orchestrator("demo", "--env.total_steps=1", "--env.run_dir=run", cwd=tmp_path, python=made.python)
    assert result.returncode == 0, result.stderr
    assert f"replay:{made.site}" in result.stderr
    assert "1 of 1 written" in result.stdout
