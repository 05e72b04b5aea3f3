"""The help texts, made from the tables of commands and settings, for 80 columns without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from orchestrator import __version__
from orchestrator.settings.flags import Command
from orchestrator.settings.row import Setting
from orchestrator.settings.table import ENDPOINT

WIDTH = 80
LONGEST_METAVAR = 30
_FORMS = """\
Flags are --NAME VALUE or --NAME=VALUE; booleans are true, false, yes, no, 1 or
0, and the bare flag means true; lists are JSON; `none` leaves an optional
setting open. The command line wins over the environment, that over YAML, that
over the defaults. Environment: OPENAI_API_KEY, TAVILY_API_KEY, and for any
setting ORCHESTRATOR_ENV__NAME or ORCHESTRATOR_OPENAI__NAME; `.env` is read."""
_ACCEPTED = """\
Every other env.* and openai.* name of Atropos is accepted too."""


def overview(commands: Sequence[Command]) -> str:
    """What `orchestrator --help` prints."""
    width = max(len(command.name) for command in commands)
    lines = [
        f"rollout-orchestrator {__version__}: one smolagents agent per rollout, each in its own",
        "sealed container; what happened becomes scored, grouped training data.",
        "",
        "usage: orchestrator COMMAND [FLAGS]",
        "",
    ]
    for command in commands:
        lines += _wrapped(f"  {command.name:<{width}}  {command.summary}", " " * (width + 4))
    lines += ["", "`orchestrator COMMAND --help` tells its flags; `--version` the version."]
    return "\n".join(lines)


def command_help(command: Command) -> str:
    """What `orchestrator COMMAND --help` prints."""
    rows = command.rows()
    words = "".join(f" {row.name.upper()}" for row in command.arguments) + " ..." * command.repeats
    lines = [f"usage: orchestrator {command.name}{words}{' [FLAGS]' * bool(rows)}", ""]
    lines += _wrapped(command.summary[0].upper() + command.summary[1:] + ".", "")
    for row in command.arguments:
        lines += ["", *_wrapped(f"  {row.name.upper()}  {row.text}", "      ")]
    for group in dict.fromkeys(row.group for row in rows):
        lines += ["", f"{group}:"]
        for row in rows:
            if row.group == group:
                lines += _row(row)
    if command.uses:
        lines += ["", _FORMS]
    if ENDPOINT in command.uses:
        lines += [_ACCEPTED]
    return "\n".join(lines)


def _row(row: Setting) -> list[str]:
    """The flag with its default, then its meaning and its valid values."""
    metavar = row.kind.metavar if len(row.kind.metavar) <= LONGEST_METAVAR else "WORD"
    # Valid values are left out if the metavar says them already: choices, `a path` after PATH.
    told = row.secret or "|" in metavar or row.kind.valid.removeprefix("a ") == metavar.lower()
    sentences = [row.text] if told else [row.text, row.valid]
    if row.aliases:
        sentences.append("Also " + ", ".join(row.other_flags))
    text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)
    return [
        *_wrapped(f"  {row.flag} {metavar}  (default: {row.shown_default})", "      "),
        *_wrapped(f"      {text}", "      "),
    ]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
