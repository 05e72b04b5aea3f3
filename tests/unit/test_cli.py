"""The entry: commands, help, exit codes, and that help does not wait for anything."""

from __future__ import annotations

import importlib.util
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from orchestrator import __version__, cli
from orchestrator.errors import AuthenticationError, ConfigError, EnvironmentUnusable, RunLocked
from orchestrator.settings import hints
from orchestrator.settings.config import Config
from orchestrator.settings.help import WIDTH, command_help
from orchestrator.settings.table import EnvSettings

URL = ("--openai.base_url", "http://localhost:8000/v1")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, and none of the variables that are read."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("ORCHESTRATOR_") or name in ("OPENAI_API_KEY", "TAVILY_API_KEY"):
            monkeypatch.delenv(name)


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What commands are called with, instead of being carried out."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def run(*args: Any, **own: Any) -> int:
        calls.append((args, own))
        return 0

    for command in cli.COMMANDS:
        module = ModuleType(command.module)
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, command.module, module)
    return calls


def ends_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """`process` raises this."""

    def run(config: Config) -> int:
        raise error

    module = ModuleType("process")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orchestrator.commands.process", module)


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_listed_command_is_there(command: Any) -> None:
    assert importlib.util.find_spec(command.module) is not None


def test_without_a_command_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr().out
    assert all(command.name in printed for command in cli.COMMANDS)
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == printed


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["proces"], "unknown command 'proces'; did you mean process?"),
        (["image"], "'image' needs a second word: image build"),
        (["image", "bild"], "'image' needs a second word: image build"),
        (["--env.seed", "1", "process"], "unknown command '--env.seed'"),
        (["process"], "no inference endpoint: set --openai.base_url URL"),
        (["process", *URL, "junk"], "unexpected 'junk'"),
        (["process", *URL, "--env.grop_size=1"], "did you mean --env.group_size?"),
        (["process", *URL, "--env.group_size", "0"], "--env.group_size: must be a whole number from 1"),
        (["process", *URL, "--env.group_policy", "partial:9"], "more rollouts than env.group_size (8)"),
        (["cleanup", "--env.group_size", "3"], "this command does not use --env.group_size"),
        (["verify"], "PATH is missing"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str], carried_out: list[Any]
) -> None:
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("orchestrator: ")
    assert printed.err.count("\n") == 1
    assert text in printed.err
    assert carried_out == []


def test_command_gets_its_configuration(carried_out: list[Any]) -> None:
    assert cli.main(["process", *URL, "--env.group_size", "4", "--env.batch_size", "16"]) == 0
    [((config,), own)] = carried_out
    assert (config.env.group_size, config.env.batch_size, own) == (4, 16, {})


def test_command_gets_its_own_options_and_arguments(carried_out: list[Any]) -> None:
    assert cli.main(["image", "build", "--force", "--base-image", "debian:13"]) == 0
    assert cli.main(["verify", "some/run"]) == 0
    assert carried_out[0][1] == {"base_image": "debian:13", "force": True, "with_": None, "oci": False}
    assert carried_out[1] == (
        (),
        {"path": Path("some/run"), "model": None, "adapter": None, "max_rollouts": None} | {"json": False},
    )


@pytest.mark.parametrize("flag", ["--ray_address", "--ray-address"])
def test_the_doctor_s_cluster_is_spelled_as_the_setting_or_as_an_option(
    carried_out: list[Any], capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert cli.main(["doctor", flag, "head:6379", "--ray_address=head:6379"]) == 0
    assert carried_out[0][1] == {"ray_address": "head:6379", "json": False}
    assert cli.main(["doctor"]) == 0
    assert carried_out[1][1] == {"ray_address": None, "json": False}
    for wrong in ([flag], [flag, "head"], [flag, "head:6379", "--ray_address", "other:6379"]):
        assert cli.main(["doctor", *wrong]) == 2
    assert len(carried_out) == 2
    assert flag in command_help(next(command for command in cli.COMMANDS if command.name == "doctor"))


def test_key_on_the_command_line_works_with_one_warning(
    carried_out: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["process", *URL, "--api-key", "canary-1", "--tavily-api-key", "canary-2"]) == 0
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert "OPENAI_API_KEY" in warning
    assert "canary" not in warning
    assert carried_out[0][0][0].openai[0].key() == "canary-1"


def test_placeholder_key_is_no_reason_to_warn(carried_out: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["process", *URL, "--openai.api_key", "x"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("two\nlines"), 2),
        (EnvironmentUnusable("no Docker"), 3),
        (AuthenticationError("wrong key"), 3),
        (RunLocked("another"), 1),
    ],
)
def test_errors_of_a_command_are_one_line_and_an_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(error, monkeypatch)
    assert cli.main(["process", *URL]) == code
    assert capsys.readouterr().err == f"orchestrator: {' '.join(str(error).split())}\n"


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(KeyboardInterrupt(), monkeypatch)
    assert cli.main(["process", *URL]) == 130


def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_with(ZeroDivisionError(), monkeypatch)
    with pytest.raises(ZeroDivisionError):  # the interpreter prints it and exits 1
        cli.main(["process", *URL])


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_help_fits_the_screen_and_names_every_flag(command: Any) -> None:
    text = command_help(command, full=True)
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    for row in command.rows():
        assert f"  {row.flag} " in text


@pytest.mark.parametrize("name", ["process", "evaluate", "serve"])
def test_help_of_a_first_run_is_one_screen_whose_example_is_accepted(
    name: str, capsys: pytest.CaptureFixture[str], carried_out: list[Any]
) -> None:
    assert cli.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= WIDTH
    assert "--env.dataset SOURCE" in text
    assert "--api-key KEY" in text
    assert "--env.web_deny_words" not in text
    assert ("--env.branch RULE" in text) == (name == "process")
    assert f"`orchestrator {name} --help all` shows all" in text
    example = text.partition("example:\n")[2].partition("\n\n")[0]
    assert cli.main(shlex.split(example.replace("\\\n", " "))[1:]) == 0
    assert len(carried_out) == 1
    assert cli.main(["help", name, "all"]) == 0
    assert "--env.web_deny_words" in capsys.readouterr().out


def test_help_is_quick() -> None:
    """In CPU time, which other work on this machine does not change much."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "orchestrator", "process", "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.6


@pytest.mark.parametrize(
    ("command", "flag", "end"),
    [
        ("process", "--limit", "did you mean --env.max_tasks?"),
        ("process", "--model", "did you mean --openai.model_name?"),
        ("process", "--dry-run", "give `orchestrator doctor` the same flags"),
        ("process", "--n", "did you mean --env.group_size?"),
        ("process", "-n", "did you mean --env.group_size?"),
        ("evaluate", "--n", "did you mean --env.eval_samples?"),
        ("evaluate", "--env.group_size", "did you mean --env.eval_samples?"),
        ("process", "--dataset", "did you mean --env.dataset?"),
        ("process", "--env.limit", "did you mean --env.max_tasks?"),
        ("process", "--endpoint", "did you mean --openai.base_url?"),
        ("process", "--url", "did you mean --openai.base_url?"),
        ("process", "--batch-size", "--env.group_size the rollouts of a task"),
        ("process", "--version", "`orchestrator --version` prints the version"),
        ("process", "--max-steps", "did you mean --env.max_steps?"),
        ("process", "--zzz", "unknown flag --zzz"),
        ("verify", "--limit", "unknown flag --limit"),
        ("export", "--out", "did you mean --output?"),
    ],
)
def test_words_of_other_programs_lead_to_the_right_flag(
    command: str, flag: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, flag, "3"]) == 2
    assert capsys.readouterr().err.endswith(f"{end}\n")


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("list", "runs"), ("run", "process"), ("train", "serve"), ("eval", "evaluate"), ("new", "init"),
        ("check", "doctor"), ("report", "view"), ("version", "--version"), ("prosess", "process"),
    ],
)  # fmt: skip
def test_words_of_other_programs_lead_to_the_right_command(
    word: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word]) == 2
    assert f"unknown command {word!r}; did you mean {command}?" in capsys.readouterr().err


def test_every_hint_names_what_exists() -> None:
    names = {command.name for command in cli.COMMANDS}
    assert set(hints._COMMANDS.values()) <= names | {"--version"}
    assert not set(hints._COMMANDS) & names
    flags = {flag for command in cli.COMMANDS for flag in command.flags()}
    assert {flag for named in hints._FLAGS for flag in named} <= flags


def test_help_tells_defaults_constraints_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["process", "--env.nonsense", "-h", "all"]) == 0
    text = capsys.readouterr().out
    assert "--env.group_size N  (default: 8)" in text
    assert "Rollouts per task, compared with each other. A whole number from 1 to 1024." in " ".join(text.split())
    assert "--env.token_source auto|exact|retokenize  (default: auto)" in text
    assert "--env.sandbox_memory SIZE  (default: 1GiB)" in text
    assert "--env.process_timeout" in text
    assert "--env.rollout_server_url" not in text


def test_help_shows_every_setting_that_is_ours() -> None:
    rows = {command.name: {row.key for row in command.rows()} for command in cli.COMMANDS}
    ours = {row.key: row.group for row in EnvSettings.rows().values() if row.group != "Atropos"}
    assert set(ours) <= rows["process"] | rows["evaluate"] | rows["check-tasks"]
    agent = {key for key, group in ours.items() if group == "Agent"}
    for command in ("process", "evaluate", "serve"):
        assert agent <= rows[command]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["image", "--help"], "image build"),
        (["image", "-h"], "image check"),
        (["help", "image"], "image build"),
        (["help"], "download-gaia"),
        (["-h"], "download-gaia"),
        (["help", "image", "check"], "usage: orchestrator image check IMAGE"),
        (["help", "view"], "usage: orchestrator view PATH"),
        (["view", "-h"], "usage: orchestrator view PATH"),
    ],
)
def test_help_is_found_wherever_it_is_looked_for(
    capsys: pytest.CaptureFixture[str], argv: list[str], shown: str
) -> None:
    assert cli.main(argv) == 0
    told = capsys.readouterr().out
    assert shown in told
    assert ("download-gaia" in told) == (argv in (["help"], ["-h"]))
