"""Writes the reference of all commands and settings beside itself: `python docs/reference/make.py`.

It says what `orchestrator COMMAND --help` says, from the same tables. A test fails where it is not current.
"""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.commands.table import COMMANDS
from orchestrator.settings.flags import CONFIG_FILE, Command
from orchestrator.settings.help import argument
from orchestrator.settings.row import ATROPOS, Setting
from orchestrator.settings.table import SECTIONS, TAVILY_KEY

PAGE = Path(__file__).parent / "README.md"
_HEAD = """\
# Commands and settings

Made by `python docs/reference/make.py` from the tables that `orchestrator COMMAND --help` reads. A setting
`env.NAME` is the flag `--env.NAME VALUE`, the variable `ORCHESTRATOR_ENV__NAME` and the key `NAME` below `env:` in
the file that `--config` names. How these go together, and the forms of values:
[configuration.md](../configuration.md). `orchestrator COMMAND --help all` lists the settings of a command.
"""
# Long words of the command line for what a value may be, and the short ones of this page.
_SHORT = (
    (r"^(true, false, yes, no, 1 or 0|text|a key|a name)$", ""),  # as its default or meaning shows
    (r"^a path \(.*\)$", "path"),
    (r"^one of ", ""),
    (r"^of the form ", ""),
    (r" \(or 90s, 5m, 1h\), at most a year", ""),
    (r"a whole number from (\S+) to (\S+)", r"integer \1–\2"),
    (r"a number from (\S+) to (\S+)", r"number \1–\2"),
    (r"a whole number", "integer"),
    (r"^bytes, or a size like [^,]*, ", "bytes "),
    (r"^a number ", "number "),
    (r"(of )?at least ", "≥ "),
    (r"above ", "> "),
    (r"at most (?=\d+$)", "≤ "),
    (r"^a URL with http:// or https://", "URL"),
    (r"^a JSON list, each item (an? )?", "JSON list, each "),
    (r"^a JSON list like ", "JSON list like "),
    (r"^a JSON object", "JSON object"),
)


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "## Commands\n", *map(_command, COMMANDS), "## Settings\n"]
    for group, rows in _groups().items():
        parts += [f"### {group}\n", _table(rows, "setting")]
    parts.append(f"### Elsewhere\n\n{_table([TAVILY_KEY, CONFIG_FILE], 'flag')}")
    return "\n".join(parts)


def _command(command: Command) -> str:
    words = "".join(map(argument, command.arguments)) + " ..." * command.repeats
    text = f"### `orchestrator {command.name}{words}`\n\n{command.summary[0].upper()}{command.summary[1:]}.\n"
    arguments = "".join(f"- `{row.name.upper()}`: {_cell(row.text)}\n" for row in command.arguments)
    parts = [text, arguments]
    if options := [row for row in command.options if row.name != "json"]:
        parts.append(_table(options, "flag"))
    if len(options) < len(command.options):
        parts.append("`--json`: [fields](../runs.md#answers-for-programs).\n")
    return "\n".join(part for part in parts if part)


def _groups() -> dict[str, list[Setting]]:
    """Heading → rows."""
    groups: dict[str, list[Setting]] = {}
    for section in SECTIONS.values():
        for row in section.rows().values():
            groups.setdefault(row.group, []).append(row)
    groups[ATROPOS] = groups.pop(ATROPOS)  # last, as few need it
    return groups


def _table(rows: list[Setting] | tuple[Setting, ...], name: str) -> str:
    lines = [f"| {name} | default | meaning, *valid values* |", "|---|---|---|"]
    for row in rows:
        shown = row.key if name == "setting" else row.flag
        also = f" Also {', '.join(f'`{flag}`' for flag in row.other_flags)}." if row.other_flags else ""
        valid = "a key" if row.secret else row.kind.valid
        for long, short in _SHORT:
            valid = re.sub(long, short, valid)
        valid = f" *{_cell(valid)}*" if valid else ""
        lines.append(f"| `{shown}` | {_cell(row.shown_default)} | {_cell(row.text)}.{also}{valid} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
