"""Follows a page of the documentation: every file in it is written, every command in it is run.

A block is a file if the line above it ends with the file's name, as in "`tasks.jsonl`:", so that each block can be
copied as it is.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.runs import CACHE, DEADLINE_S, ROOT, lines

BLOCK = re.compile(r"(?:`([\w./-]+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: `kind` is its language, `name` the file that it is, if any."""

    name: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Followed:
    """What the guide left: the folder, and what each command printed."""

    home: Path
    said: dict[str, str]
    under_way: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def rollouts(self, name: str) -> list[dict[str, object]]:
        return lines(self.home / "runs" / name / "rollouts.jsonl")

    def scores(self, name: str) -> list[float]:
        return sorted(float(str(line["score"])) for line in self.rollouts(name))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*match) for match in BLOCK.findall(text)]


@contextmanager
def follow(text: str, home: Path, environ: Mapping[str, str] | None = None) -> Iterator[Followed]:
    """Carries a page out in `home`. A block `sh` holds commands; one of `bash` begins what goes on until the end,
    and each other block is a file."""
    followed = Followed(home, {})
    with ExitStack() as stack:
        for block in blocks(text):
            if block.kind == "bash":
                followed.under_way.append(stack.enter_context(_going_on(block.text.strip(), home, environ)))
                continue
            if block.kind != "sh":
                assert block.name, f"no line above says which file this is: {block.text}"
                path = home / block.name
                path.parent.mkdir(exist_ok=True)
                path.write_text(block.text, "utf-8")
                continue
            for command in block.text.replace("\\\n", "").splitlines():
                followed.said[command] = run(command, home, environ)
        yield followed


def run(command: str, home: Path, environ: Mapping[str, str] | None = None) -> str:
    """As a shell would, with our command in the place of the installed one."""
    ended = subprocess.run(
        command,
        shell=True,
        cwd=home,
        env=_environment(home, environ),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def serve(command: str, home: Path) -> None:
    """One that goes on until Ctrl-C: which comes once it has printed where it serves."""
    with subprocess.Popen(
        f"exec {command}", shell=True, cwd=home, env=_environment(home, None), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any("http://" in line for line in process.stdout), command
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0, command
        finally:
            process.kill()


@contextmanager
def _going_on(command: str, home: Path, environ: Mapping[str, str] | None) -> Iterator[subprocess.Popen[bytes]]:
    with (home / "under-way.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=home,
            env=_environment(home, environ),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)


def _environment(home: Path, more: Mapping[str, str] | None) -> dict[str, str]:
    (home / "t").mkdir(exist_ok=True)
    (home / "bin").mkdir(exist_ok=True)
    program = home / "bin" / "orchestrator"
    if not program.exists():  # a command under way may be starting from it, and then the file is busy
        program.write_text(
            f"#!{sys.executable}\nimport sys\nfrom orchestrator.cli import main\nsys.exit(main())\n"
        )
        program.chmod(0o755)
    return {
        "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
        "HOME": str(home),
        "XDG_CACHE_HOME": CACHE,
        "TMPDIR": str(home / "t"),
        "DOCKER_BUILDKIT": "0",
        **(more or {}),
    }
