"""docs/library.md, block by block: every program is checked by mypy and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.guide import blocks
from tests.fakes.runs import CACHE, DEADLINE_S, ROOT, lines, place
from tests.fakes.tokenizer import tokenizer_folder

pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.timeout(900)]

GUIDE = ROOT / "docs" / "library.md"
MYPY_S = 800.0  # it reads all that a program imports, torch too
SCRIPT = {
    "17 plus 25": [[says("I add.", "print(17 + 25)"), answers("42")], [answers("41")]],
    "6 times 8": [[answers("48")], [answers("54")]],
    **{f"{n} plus {n}": [[answers(str(2 * n))], [answers("-1")]] for n in range(3)},
}


@dataclass(frozen=True, slots=True)
class Followed:
    """What the guide left: the folder, and what each command printed."""

    home: Path
    said: dict[str, str]


@pytest.fixture(scope="module")
def followed() -> Iterator[Followed]:
    with scripted_endpoint(SCRIPT, "--dialect", "vllm") as endpoint, place() as home:
        text = GUIDE.read_text("utf-8").replace("http://localhost:9001/v1", endpoint.base_url)
        text = text.replace('"tokenizer_name": "my-model"', f'"tokenizer_name": "{tokenizer_folder()}"')
        text = text.replace("my-model", "scripted")
        said = {}
        for block in blocks(text):
            if block.kind == "python":
                (home / block.name).write_text(block.text, "utf-8")
                continue
            for command in block.text.splitlines():
                said[command] = run(command, home)
        yield Followed(home, said)


def run(command: str, home: Path) -> str:
    """As a shell would, with this Python and our command in the places of the installed ones."""
    for folder in ("t", "bin"):
        (home / folder).mkdir(exist_ok=True)
    ours = "import sys\nfrom orchestrator.cli import main\nsys.exit(main())\n"
    programs = {
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "orchestrator": f"#!{sys.executable}\n{ours}",
    }
    for name, text in programs.items():
        (home / "bin" / name).write_text(text)
        (home / "bin" / name).chmod(0o755)
    environ = {
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
        "HOME": str(home),
        "XDG_CACHE_HOME": CACHE,
        "TMPDIR": str(home / "t"),
    }
    ended = subprocess.run(
        command, shell=True, cwd=home, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    assert list((home / "t").glob("orchestrator-*")) == []
    return ended.stdout


def test_rows_of_two_epochs_are_told_in_order(followed: Followed) -> None:
    told = [line.split() for line in followed.said["python rows.py"].splitlines()]
    tasks = ["sum", "sum", "product", "product"]
    assert [line[:3] for line in told] == [[epoch, task, "finished"] for epoch in "01" for task in tasks]
    assert {tuple(sorted((told[n][3], told[n + 1][3]))) for n in range(0, 8, 2)} == {("0.0", "1.0")}
    assert all(int(line[4]) > 0 and int(line[5]) > 0 for line in told)
    recorded = lines(followed.home / "runs" / "rows" / "rollouts.jsonl")
    assert len({line["rollout_id"] for line in recorded}) == len(recorded) == 8
    assert "runs/rows" in followed.said["orchestrator verify runs/rows"]


def test_groups_are_told_as_they_end(followed: Followed) -> None:
    said = followed.said["python groups.py"].splitlines()
    assert sum(line.startswith("begun g") for line in said) == 6
    assert sum(line.startswith("ended g") and line.endswith(" finished") for line in said) == 6
    advantages = [line.split() for line in said if line.startswith("sum-")]
    assert sorted({line[0] for line in advantages}) == ["sum-0", "sum-1", "sum-2"]
    assert {line[2] for line in advantages} == {"0.5", "-0.5"}


def test_the_programs_are_typed(followed: Followed) -> None:
    """As a user's own mypy sees it: with the package's types and no configuration of ours."""
    programs = sorted(path.name for path in followed.home.glob("*.py"))
    assert len(programs) == 2
    assert mypy(followed.home, *programs) == []
    (followed.home / "wrong.py").write_text(
        "from orchestrator import Row, Task\n\n\ndef wrong(row: Row) -> float:\n    Task(1, 'x')\n"
        "    return row.score\n"
    )
    errors = mypy(followed.home, "wrong.py")
    assert [re.findall(r"\[([a-z-]+)\]$", line) for line in errors] == [["arg-type"], ["return-value"]], errors


def mypy(home: Path, *programs: str) -> list[str]:
    """The errors it finds in them."""
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", *programs],
        cwd=home,
        env={**os.environ, "MYPYPATH": f"{ROOT}:{ROOT / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=MYPY_S,
        check=False,
    )
    assert checked.returncode in (0, 1), checked.stderr
    return [line for line in checked.stdout.splitlines() if line.startswith(programs)]
