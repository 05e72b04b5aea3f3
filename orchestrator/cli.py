"""`orchestrator COMMAND`: which command, with which configuration, and the exit code of its end.

Commands are modules under `commands/`, imported when asked for: help must not wait for the engine.
Exit codes: 0 all done, 1 some not, 2 usage, 3 environment unusable, 128 + n after a signal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from orchestrator import __version__
from orchestrator.errors import AuthenticationError, ConfigError, EnvironmentUnusable, OrchestratorError
from orchestrator.launch.names import EXTRAS
from orchestrator.settings.flags import OPTIONS, Command, parse
from orchestrator.settings.kinds import Choice, File, Flag, Text
from orchestrator.settings.row import Layer, Setting, nearest
from orchestrator.settings.table import (
    AGENT,
    ATROPOS,
    ENDPOINT,
    EVALUATION,
    LIMITS,
    OUTPUT,
    ROLLOUTS,
    SAMPLING,
    SANDBOX,
    SCORING,
    TASKS,
    TOOLS,
)
from orchestrator.terminal.streams import guard_streams
from orchestrator.text import printable

CarryOut = Mapping[str, Callable[..., int]]
_LEVELS = re.compile(r"[123](, ?[123])*").fullmatch
_REVISION = re.compile(r"\w[\w./-]{0,249}", re.ASCII).fullmatch
COMMANDS = (
    Command(
        "demo",
        "plays a recorded run of a real model through live sandboxes; needs no model, key or GPU",
        uses=(
            "env.total_steps",
            "env.max_concurrent_sandboxes",
            "env.sandbox_image",
            "env.data_path_to_save_groups",
            "env.run_dir",
            "env.resume",
        ),
        options=(Setting(False, Flag(), OPTIONS, "run the model itself, on this machine's CPU", name="live"),),
    ),
    Command(
        "process",
        "runs tasks and writes groups of scored rollouts to a JSONL file, with an HTML report",
        uses=(TASKS, ROLLOUTS, AGENT, LIMITS, SANDBOX, TOOLS, SAMPLING, SCORING, OUTPUT, ENDPOINT),
    ),
    Command(
        "evaluate",
        "measures a model on tasks, the held-out ones where there are any: accuracy, pass@k, intervals",
        uses=(
            TASKS,
            EVALUATION,
            "env.max_steps",
            "env.planning_interval",
            "env.final_answer_at_max_steps",
            "env.instructions",
            "env.max_retries",
            "env.drain_timeout",
            LIMITS,
            SANDBOX,
            TOOLS,
            SAMPLING,
            "env.run_dir",
            "env.resume",
            "env.fsync",
            "env.include_messages",
            "env.save_full_traces",
            SCORING,
            ENDPOINT,
        ),
        defaults={"env.scoring_strategy": "correctness"},  # `combined` is made to be trained on
    ),
    Command(
        "serve",
        "feeds a trainer with groups of scored rollouts, through Atropos' run-api",
        uses=(TASKS, ROLLOUTS, LIMITS, SANDBOX, TOOLS, SAMPLING, SCORING, EVALUATION, OUTPUT, ENDPOINT, ATROPOS),
    ),
    Command(
        "image build",
        "builds the image that sandboxes are made from",
        uses=("env.sandbox_image",),
        options=(
            Setting(None, Text("an image", "IMAGE"), OPTIONS, "what to build on", "chosen", name="base_image"),
            Setting(False, Flag(), OPTIONS, "build even if the image is up to date", name="force"),
            Setting(
                None,
                Choice(tuple(EXTRAS)),
                OPTIONS,
                "more packages, in an image of its own; documents: pandas, openpyxl, pypdf, python-docx, "
                "python-pptx and pillow",
                "none: the slim image",
                name="with_",
            ),
        ),
    ),
    Command(
        "image check",
        "says whether an image can serve as sandbox image, and if not, why",
        arguments=(
            Setting(None, Text("the name of an image", "IMAGE"), OPTIONS, "an image that is here", name="image"),
        ),
    ),
    Command(
        "verify",
        "checks whether a groups file or a whole run is what it must be",
        arguments=(Setting(None, File(), OPTIONS, "a groups file or a run directory", name="path"),),
    ),
    Command(
        "doctor",
        "checks what a run needs: Docker, image, tokenizer, endpoint, disk, keys; says what to do",
        uses=(
            SANDBOX,
            "env.tokenizer_name",
            "env.token_source",
            "env.tavily_base_url",
            "env.run_dir",
            ENDPOINT,
        ),
        without_endpoint=True,
    ),
    Command(
        "download-gaia",
        "fetches the GAIA benchmark from the hub with your account, and checks it",
        options=(
            Setting(Path("data/gaia"), File(), OPTIONS, "where to put it", name="output_dir"),
            Setting(
                False, Flag(), OPTIONS, "take gaia-benchmark/GAIA, not smolagents/GAIA-annotated", name="use_raw"
            ),
            Setting(
                None,
                Text("levels like 1 or 1,2", "LEVELS", _LEVELS),
                OPTIONS,
                "keep only these levels' rows and files",
                "all",
                name="level",
            ),
            Setting(
                None,
                Text("a branch, tag or commit", "REV", _REVISION),
                OPTIONS,
                "which version",
                "the newest, or the one that is there",
                name="revision",
            ),
        ),
    ),
    Command(
        "view",
        "writes the report of a run anew, finished or not, and sums it up",
        arguments=(Setting(None, File(), OPTIONS, "a run directory or a groups file", name="path"),),
        options=(
            Setting(
                None, File(), OPTIONS, "where to write the report", "in the run, or beside the file", name="output"
            ),
            Setting(
                None,
                Text("a folder, a hub id or none", "NAME"),
                OPTIONS,
                "the tokenizer that makes ids readable",
                "the run's own, where it is on this machine",
                name="tokenizer",
            ),
            Setting(False, Flag(), OPTIONS, "open it in a browser", name="browser"),
        ),
    ),
    Command(
        "replay",
        "plays a recorded run through live sandboxes again, with its settings, and says what differs",
        arguments=(Setting(None, File(), OPTIONS, "the run's directory", name="run_dir"),),
        options=(
            Setting(
                None,
                Text("the id of a rollout, like g000003-r01-a0", "ID"),
                OPTIONS,
                "this one alone",
                "all",
                name="rollout",
            ),
        ),
        uses=(
            "env.dataset",
            "env.dataset_path",
            "env.scoring_strategy",
            "env.agent",
            "env.prompt_templates",
            "env.sandbox_tools",
            "env.host_tools",
            "env.tokenizer_name",
            "env.run_dir",
            "env.fsync",
            "env.drain_timeout",
            "env.max_retries",
            SANDBOX,
        ),
        settings_of="run_dir",
    ),
    Command("cleanup", "removes what killed runs left: containers, sockets, temporary files"),
)
_HELP = frozenset({"--help", "-h"})
USAGE = 2
UNUSABLE = 3
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, carry_out: CarryOut | None = None) -> int:
    """Entry of the `orchestrator` script. Returns the exit code. `carry_out`: commands done in another way than
    by their modules. Without `argv` it is a process of our own."""
    if argv is None:
        guard_streams()
    try:
        return _main(list(sys.argv[1:] if argv is None else argv), carry_out or {})
    except ConfigError as error:
        return _failed(error, USAGE)
    except (EnvironmentUnusable, AuthenticationError) as error:
        return _failed(error, UNUSABLE)
    except OrchestratorError as error:
        return _failed(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(argv: list[str], carry_out: CarryOut) -> int:
    if not argv or argv[0] in _HELP:
        _say(_overview())
        return 0 if argv else USAGE
    if argv[0] == "--version":
        _say(f"rollout-orchestrator {__version__}")
        return 0
    if argv[0] == "help":
        return _main([*argv[1:], "--help"], carry_out)
    if argv[0] in _families() and argv[1:2] and argv[1] in _HELP:
        _say(_overview(argv[0]))
        return 0
    command, rest = find_command(argv, COMMANDS)
    if not _HELP.isdisjoint(rest):
        from orchestrator.settings.help import command_help

        _say(command_help(command))
        return 0
    return run_command(command, rest, carry_out)


def find_command(argv: Sequence[str], commands: Sequence[Command]) -> tuple[Command, list[str]]:
    """The command in front, of one word or two, and what follows it. Raises ConfigError."""
    by_name = {command.name: command for command in commands}
    for words in (2, 1):
        command = by_name.get(" ".join(argv[:words]))
        if command is not None:
            return command, list(argv[words:])
    second = [name for name in by_name if name.startswith(argv[0] + " ")]
    if second:
        raise ConfigError(f"{argv[0]!r} needs a second word: {', '.join(second)}")
    given = " ".join(argv[:1])
    raise ConfigError(f"unknown command {given!r}{nearest(given, by_name)}; see orchestrator --help")


def run_command(command: Command, argv: Sequence[str], carry_out: CarryOut | None = None) -> int:
    """Reads flags, environment and YAML, then hands over to the command's module."""
    given = parse(argv, command.flags(), command.arguments)
    _warn_of_keys(given)
    own = {
        row.name: given[row.key].value if row.key in given else row.default
        for row in (*command.options, *command.arguments)
    }
    if not command.uses:
        return int(import_module(command.module).run(**own))
    from orchestrator.settings.config import resolve

    resumed = given.get("env.resume")
    if command.name == "demo" and resumed is not None and resumed.value is not None:
        import_module(command.module).demand_demo(resumed.value)  # before it is asked whose run it is
    run_directory = own[command.settings_of] if command.settings_of else None
    config = resolve(given, run=run_directory, defaults=command.defaults)
    if command.samples and not command.without_endpoint:
        config.require_endpoint()
    run = (carry_out or {}).get(command.name) or import_module(command.module).run
    return int(run(config, **own))


def _warn_of_keys(given: Layer) -> None:
    from orchestrator.redact import Secret

    labels = [value.label for value in given.values() if isinstance(value.value, Secret)]
    if labels:
        print(
            f"orchestrator: warning: {' and '.join(labels)}: every user of this machine can see keys on a "
            "command line; better set OPENAI_API_KEY and TAVILY_API_KEY, or use .env",
            file=sys.stderr,
        )


def _families() -> set[str]:
    """First words that several commands share."""
    return {command.name.split()[0] for command in COMMANDS if " " in command.name}


def _overview(family: str = "") -> str:
    from orchestrator.settings.help import overview

    return overview([command for command in COMMANDS if command.name.startswith(family)])


def _say(text: str) -> None:
    print(text, flush=True)


def _failed(error: Exception, code: int) -> int:
    print(printable(f"orchestrator: {' '.join(str(error).split())}"), file=sys.stderr)
    return code
