"""The help texts, made from the tables of commands and settings, for 80 columns without colour."""

import textwrap
from collections.abc import Sequence

from orchestrator import __version__
from orchestrator.settings.flags import Command
from orchestrator.settings.kinds import Forms
from orchestrator.settings.row import AUTO, ENDPOINT, TASKS, Setting

WIDTH = 80
LONGEST_METAVAR = 30
_FORMS = """\
Flags are --NAME VALUE or --NAME=VALUE; booleans are true, false, yes, no, 1 or
0, and the bare flag means true; lists are JSON; `none` leaves an optional
setting open. The command line wins over the environment, that over YAML, that
over the defaults. Environment: OPENAI_API_KEY, TAVILY_API_KEY, and for any
setting ORCHESTRATOR_ENV__NAME or ORCHESTRATOR_OPENAI__NAME; `.env` is read."""
_EXAMPLES = {
    "process": ("--env.dataset jsonl:tasks.jsonl --env.group_size 4 --env.total_steps 2",),
    "evaluate": ("--env.dataset jsonl:tasks.jsonl --env.eval_split hash:0.2", "--env.eval_samples 4"),
    "serve": (
        *("--env.rollout_server_url http://127.0.0.1:8000", "--env.dataset jsonl:tasks.jsonl --env.group_size 8"),
    ),
}
_EXAMPLE_ENDPOINT = "--openai.base_url http://localhost:9001/v1 --openai.model_name NAME"
_FIRST_WIDTH = 33
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


def command_help(command: Command, *, full: bool = False) -> str:
    """What `orchestrator COMMAND --help` prints, and with `full` `--help all`."""
    if command.name in _EXAMPLES and not full:
        return _first_run_help(command, _EXAMPLES[command.name])
    rows = command.rows()
    words = "".join(map(argument, command.arguments)) + " ..." * command.repeats
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


def argument(row: Setting) -> str:
    """An argument in a usage line, in brackets if it may be left out."""
    return f" {row.name.upper()}" if row.default is None else f" [{row.name.upper()}]"


def _first_run_help(command: Command, example: Sequence[str]) -> str:
    """What a first run needs, on one screen."""
    rows = command.rows()
    name = f"orchestrator {command.name}"
    lines = [f"usage: {name} [FLAGS]", "", *_wrapped(f"{command.summary[0].upper()}{command.summary[1:]}.", "")]
    lines += [
        "",
        "example:",
        " \\\n".join((f"  {name}", *(f"    {part}" for part in (*example, _EXAMPLE_ENDPOINT)))),
    ]
    lines += ["", "what a first run needs:"]
    for row in sorted(rows, key=lambda row: (row.group != TASKS, row.group != ENDPOINT)):
        if command.name not in row.first_run:
            continue
        flag = "--api-key" if row.secret else row.flag
        text = row.valid if isinstance(row.kind, Forms) else ";".join(row.text.split(";")[:2])
        text = text.removeprefix("or --api-key; ")
        default = row.shown_default
        default = "" if row.secret or default.startswith("none") or default == AUTO else f" (default: {default})"
        label = f"{flag} {_metavar(row)}"
        lines += _wrapped(f"  {label:<{_FIRST_WIDTH}}  {text}{default}", " " * (_FIRST_WIDTH + 4))
    return "\n".join([*lines, "", f"`{name} --help all` shows all {len(rows)} flags, with what each may be."])


def _metavar(row: Setting) -> str:
    return row.kind.metavar if len(row.kind.metavar) <= LONGEST_METAVAR else "WORD"


def _row(row: Setting) -> list[str]:
    """The flag with its default, then its meaning and its valid values."""
    metavar = _metavar(row)
    # Valid values are left out if the metavar says them already: choices, `a path` after PATH.
    is_plain = row.secret or "|" in metavar or row.kind.valid.removeprefix("a ") == metavar.lower()
    sentences = [row.text] if is_plain else [row.text, row.valid]
    if row.aliases:
        sentences.append("Also " + ", ".join(row.other_flags))
    text = " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)
    return [
        *_wrapped(f"  {row.flag} {metavar}  (default: {row.shown_default})", "      "),
        *_wrapped(f"      {text}", "      "),
    ]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
