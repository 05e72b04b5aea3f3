"""Every `orchestrator` command that a page shows is one: its name, its flags and their values are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from orchestrator.cli import find_command
from orchestrator.commands.table import COMMANDS
from orchestrator.settings.flags import parse

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "SECURITY.md", "examples/README.md", "examples/code-tasks/README.md")
]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FENCE = re.compile(r"^```\w+\n(.*?)^```$", re.M | re.S)
BEFORE = r"sudo |docker compose run --rm |OTEL_\w+=\S+ |source <\("
SHOWN = re.compile(rf"^    ((?:{BEFORE})?orchestrator [a-z].*)$|`(orchestrator [a-z][^`]*)`", re.M)
STANDS_FOR = {
    "...": "",
    "=MORE": "=1",
    " MORE": " 1",
    " PATH": " x",
    "RUN RUN ...": "a b",
    "FORMAT": "sft",
    " URL": " http://x",
}


def shown(page: Path) -> list[str]:
    """The commands of a page, each on one line."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    text = FENCE.sub(lambda block: re.sub("^", "    ", block[1], flags=re.M), text)
    return [next(filter(None, match)) for match in SHOWN.findall(text)]


def words(command: str) -> list[str]:
    for name, value in STANDS_FOR.items():
        command = command.replace(name, value)
    command = command[command.index("orchestrator ") :].partition(" | ")[0]
    if command.startswith("orchestrator completion"):
        command = command.partition(")")[0]
    return shlex.split(command.rstrip(","), comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_that_is_shown_is_one(page: Path) -> None:
    for said in shown(page):
        command, rest = find_command(words(said), COMMANDS)
        if command.arguments and not [word for word in rest if not word.startswith("-")]:
            continue  # `orchestrator view`: it is only named
        parse(rest, command.flags(), command.arguments, repeats=command.repeats)


def test_some_are_found() -> None:
    assert sum(len(shown(page)) for page in PAGES) > 100
