"""The command line parser: dotted flags, negative numbers, booleans with or without a value.

    --env.NAME V   --env.NAME=V   --openai.NAME V   --base-image V   --force

Nothing is abbreviated or guessed. A flag given twice, or by an alias too, must have the same value.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import shown
from orchestrator.settings.hints import flag_hint
from orchestrator.settings.kinds import BOOLEANS, File, Flag
from orchestrator.settings.row import ATROPOS, ENDPOINT, RUNS, Layer, Setting, put
from orchestrator.settings.table import SECTIONS, TAVILY_KEY, section_rows

OPTIONS = "Options"
GENERAL = "General"
CONFIG_FILE = Setting(
    None, File(), GENERAL, "YAML with `env:` and `openai:` (one server or a list)", name="config", first_run=RUNS
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command: `commands/<name>.py` with `run(config, **own) -> int`, or `run(**own)` if it uses no
    settings; `own` are its `options` and `arguments`, by name.

    Which settings it takes, their rows say. A command that uses the endpoint also accepts those of Atropos, whose
    users bring their command lines; with `lenient` it accepts all: those of a run that it is to look at.
    """

    name: str
    summary: str
    options: tuple[Setting, ...] = ()
    arguments: tuple[Setting, ...] = ()
    without_endpoint: bool = False  # whether it also works without one
    settings_of: str = ""  # the argument that names a run directory, whose settings are the defaults
    lenient: bool = False
    repeats: bool = False  # whether its one argument comes several times

    @property
    def uses(self) -> tuple[str, ...]:
        """The groups of the settings that it takes."""
        return tuple(dict.fromkeys(row.group for row in self.settings()))

    @property
    def samples(self) -> bool:
        """Whether it uses an endpoint."""
        return ENDPOINT in self.uses

    @property
    def module(self) -> str:
        """The module that runs it."""
        return "orchestrator.commands." + self.name.replace(" ", "_").replace("-", "_")

    def settings(self) -> list[Setting]:
        """The rows of the table that it takes."""
        table = [row for section in SECTIONS.values() for row in section.rows().values()]
        return [row for row in table if self.name in row.commands]

    def rows(self) -> list[Setting]:
        """All that help shows: its options, its settings, keys and the configuration file."""
        used = self.settings()
        keys = [TAVILY_KEY] if self.samples else []
        general = [CONFIG_FILE] if used else []
        return [*self.options, *used, *keys, *general]

    def flags(self) -> dict[str, Setting]:
        """Flag → row, for all that the command accepts."""
        accepted = {flag: row for row in self.rows() for flag in (row.flag, *row.other_flags)}
        if self.samples:
            used = {row.key for row in self.rows()}
            accepted |= {
                f: r for f, r in dotted_flags().items() if self.lenient or r.group == ATROPOS or r.key in used
            }
        return accepted


def dotted_flags() -> dict[str, Setting]:
    """Flag → row, for all settings with aliases, keys and the configuration file."""
    flags = {f"--{section}.{name}": row for section in SECTIONS for name, row in section_rows(section).items()}
    flags["--api-key"] = flags["--openai.api_key"]
    return flags | {row.flag: row for row in (TAVILY_KEY, CONFIG_FILE)}


def parse(
    argv: Sequence[str], flags: dict[str, Setting], arguments: Sequence[Setting] = (), *, repeats: bool = False
) -> Layer:
    """Everything given on a command line, read and checked. `repeats`: the last argument takes all words that are
    left. Raises ConfigError."""
    layer: Layer = {}
    words: list[str] = []
    tokens, expected = deque(argv), deque(arguments)
    last: Setting | None = None
    while tokens:
        token = tokens.popleft()
        name, equals, value = token.partition("=")
        if token.startswith("-") and len(token) > 1:
            row = flags.get(name)
            if row is None:
                raise ConfigError(_unknown(name, flags))
            put(layer, row, value if equals else _value(row, name, tokens), name)
            last = row
        elif repeats and len(expected) == 1:
            words.append(token)
            last = None
        elif expected:
            row = expected.popleft()
            put(layer, row, token, row.name.upper())
            last = None
        else:
            raise ConfigError(_unexpected(token, last))
    if words:
        put(layer, row := expected.popleft(), words, row.name.upper())
    if expected and expected[0].default is None:
        raise ConfigError(f"{expected[0].name.upper()} is missing: {expected[0].text}")
    return layer


def _value(row: Setting, name: str, tokens: deque[str]) -> str:
    """The value after a flag. For a boolean, the next token is taken only if it is a boolean word."""
    if isinstance(row.kind, Flag):
        return tokens.popleft() if tokens and tokens[0].lower() in BOOLEANS else "true"
    if not tokens or tokens[0].startswith("--"):
        raise ConfigError(f"{name} needs a value: {row.valid}")
    return tokens.popleft()


def _unexpected(token: str, last: Setting | None) -> str:
    if last is None:
        return f"unexpected {shown(token)}"
    what = "word" if last.secret else shown(token)  # the word may be the rest of a key
    return f"unexpected {what} after {last.flag}, which takes {last.valid}"


def _unknown(name: str, flags: dict[str, Setting]) -> str:
    if name in dotted_flags():
        return f"this command does not use {name}{flag_hint(name, flags)}"
    return f"unknown flag {shown(name)[1:-1]}{flag_hint(name, flags)}"
