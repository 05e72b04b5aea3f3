"""Completion of command lines, by the shells themselves."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.commands.table import COMMANDS
from orchestrator.settings.json_kinds import Words


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    asked = " ".join(f"'{word}'" for word in words)
    told = f"source {script}; COMP_WORDS=(orchestrator {asked}); COMP_CWORD={len(words)}; _orchestrator"
    shown = f"{told}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    return script


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("pro",), ["process"]),
        (("image", ""), ["build", "check"]),
        (("image", "build", "--for"), ["--force"]),
        (("image", "check", "--for"), []),
        (("process", "--env.group_s"), ["--env.group_size"]),
        (("process", "--env.launcher", ""), ["auto", "docker", "oci", "process"]),
        (("export", "run", "--format", "d"), ["dpo"]),
        (("demo", "--tasks", ""), ["questions", "code"]),
        (("completion", ""), ["bash", "zsh", "fish"]),
        (("process", "--env.launcher", "=", "d"), ["docker"]),
        (("process", "--env.launcher", "="), ["auto", "docker", "oci", "process"]),
        (("help", "pro"), ["process"]),
        (("process", "--env.scoring_strategy", "c"), ["correctness", "combined"]),
        (("process", "--env.agent", ""), ["code", "tool_calling", "shell", "program:"]),
        (("process", "--env.group_policy", "p"), ["partial:"]),
        (("process", "--env.dataset", "j"), ["jsonl:"]),
        (("process", "--env.dataset", "re"), ["reasoning_gym:"]),
        (("process", "--env.warm_sandboxes", ""), ["auto"]),
        (("process", "--env.main_line", "a"), ["auto"]),
        (("process", "--env.run_dir", ""), []),
        (("view", "--env.group_s"), []),
        (("nonsense", "--x"), []),
    ],
)
def test_bash_offers_what_goes_there(bash: Path, words: tuple[str, ...], offered: list[str]) -> None:
    assert completed(bash, *words) == offered


def test_every_choice_of_every_command_is_offered(bash: Path) -> None:
    script = bash.read_text()
    for command in COMMANDS:
        for flag, row in command.flags().items():
            for word in getattr(row.kind, "words", ()) if not isinstance(row.kind, Words) else ():
                assert re.search(rf"^ +{re.escape(flag)}\) words=.*{re.escape(word)}", script, re.MULTILINE), flag


def test_every_command_is_offered_with_its_flags(bash: Path) -> None:
    assert set(completed(bash, "")) == {"help", *(command.name.split()[0] for command in COMMANDS)}
    for command in COMMANDS:
        flags = {flag for flag in command.flags() if flag.startswith("--")}
        assert set(completed(bash, *command.name.split(), "--")) == flags


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_scripts(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    shells = {
        "fish": ("-c", f"source {script}; complete -C 'orchestrator process --env.launcher '"),
        "zsh": ("-fc", f"autoload -U compinit && compinit -u -d d; source {script}; echo $_comps[orchestrator]"),
    }
    environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [shell, *shells[shell]]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, cwd=tmp_path)
    assert ended.stderr == ""
    assert ("docker" if shell == "fish" else "_bash_complete") in ended.stdout


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "one of bash, zsh, fish" in capsys.readouterr().err
