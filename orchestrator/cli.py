"""`orchestrator COMMAND`: finds the command and its configuration, runs it, returns the exit code.

Commands are modules under `commands/`, imported only to run: help must not wait for the engine's imports.
Exit codes: 0 all done, 1 some not, 2 usage, 3 environment unusable, 128 + n after a signal.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from orchestrator import __version__
from orchestrator.commands.table import COMMANDS
from orchestrator.errors import AuthenticationError, ConfigError, EnvironmentUnusable, OrchestratorError
from orchestrator.rules.text import printable
from orchestrator.settings.flags import Command, parse
from orchestrator.settings.hints import command_hint
from orchestrator.settings.row import Layer
from orchestrator.terminal.streams import guard_streams

CarryOut = Mapping[str, Callable[..., int]]
_HELP = frozenset({"--help", "-h"})
USAGE = 2
UNUSABLE = 3
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, carry_out: CarryOut | None = None) -> int:
    """Entry of the `orchestrator` script. Returns the exit code. `carry_out`: functions called in place of the
    commands' modules, by the commands' names. Without `argv`, `sys.argv` is read and the streams are guarded."""
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

        _say(command_help(command, full="all" in rest))
        return 0
    return run_command(command, rest, carry_out)


def find_command(argv: Sequence[str], commands: Sequence[Command]) -> tuple[Command, list[str]]:
    """The command that `argv` begins with, of one word or two, and the arguments after it. Raises ConfigError."""
    by_name = {command.name: command for command in commands}
    for words in (2, 1):
        command = by_name.get(" ".join(argv[:words]))
        if command is not None:
            return command, list(argv[words:])
    second = [name for name in by_name if name.startswith(argv[0] + " ")]
    if second:
        raise ConfigError(f"{argv[0]!r} needs a second word: {', '.join(second)}")
    raise ConfigError(f"unknown command {argv[0]!r}{command_hint(argv[0], by_name)}; see orchestrator --help")


def run_command(command: Command, argv: Sequence[str], carry_out: CarryOut | None = None) -> int:
    """Reads flags, environment and YAML, then hands over to the command's module."""
    layer = parse(argv, command.flags(), command.arguments, repeats=command.repeats)
    _warn_of_keys(layer)
    own = {
        row.name: layer[row.key].value if row.key in layer else row.default
        for row in (*command.options, *command.arguments)
    }
    if not command.uses:
        return int(import_module(command.module).run(**own))
    from orchestrator.settings.sources import resolve

    resumed = layer.get("env.resume")
    if command.name == "demo" and resumed is not None and resumed.value is not None:
        import_module(command.module).demand_demo(resumed.value, own["tasks"])  # before `resolve` asks whose run
    run_directory = own[command.settings_of] if command.settings_of else None
    config = resolve(layer, run=run_directory, command=command.name)
    if command.samples and not command.without_endpoint:
        config.require_endpoint()
    run = (carry_out or {}).get(command.name) or import_module(command.module).run
    return int(run(config, **own))


def _warn_of_keys(layer: Layer) -> None:
    from orchestrator.rules.redact import Secret

    labels = [value.label for value in layer.values() if isinstance(value.value, Secret)]
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
