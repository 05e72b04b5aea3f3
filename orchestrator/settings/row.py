"""What one setting is: a row. Rows are in the modules beside this one, by group; `table` joins them.

Plain dataclasses rather than pydantic models: values need readers of their own anyway, errors are always one line,
and `--help` need not wait for an import.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import shown
from orchestrator.settings.kinds import Choice, Key, Kind
from orchestrator.types import AgentKind

AUTO = "auto"
TASKS = "Tasks"
ENDPOINT = "Endpoint"
EVALUATION = "Evaluation"
ATROPOS = "Atropos"  # Atropos' names: every command takes them; most have an effect in `serve` only

CommandName = Literal[
    "demo", "process", "evaluate", "serve", "image build", "image check", "doctor", "replay", "branch", "rescore",
    "export", "cleanup", "check-tasks",
]  # fmt: skip
RUNS: tuple[CommandName, ...] = ("process", "evaluate", "serve")
PLAYS: tuple[CommandName, ...] = ("replay", "branch")  # what a record says through live sandboxes


class Resume(Enum):
    """What becomes of a setting when a run is continued: whether it must be what it was, and what is done with its
    value in a run.json that another user, or another machine, may have written. There, consent means that the
    operator must give the value again."""

    DATA = "data"  # decides about the data: must be what it was, and is taken from any run.json
    CODE = "code"  # as DATA, but a value that names code or a service needs consent
    SIZE = "size"  # as DATA, but more than the default needs consent
    CONFIRM = "confirm"  # must be what it was; what is not the default needs consent
    FREE = "free"  # where, how many, how long: may change, and another's run.json does not say it
    FREE_DATA = "free data"  # may change, and is taken from any run.json
    FREE_CONFIRM = "free confirm"  # may change; what is not the default needs consent

    @property
    def stays(self) -> bool:
        """Whether a continued run must have the value that it began with."""
        return self in (Resume.DATA, Resume.CODE, Resume.SIZE, Resume.CONFIRM)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: everything about one setting, or about an option of one command.

    `unset`: what None means, in words, for a setting that may be left open; None for the others. `resume`: None
    for options and keys. `commands`: those that take it. `from_run`: those that take it from the run they look at,
    if it is not given. `to`: a spec and the field of it that the value is copied to. `only_for`: the agents that
    it has a meaning for; empty: all. `first_run`: the commands whose short help shows it.
    """

    default: Any
    kind: Kind
    group: str
    text: str
    unset: str | None = None
    aliases: tuple[str, ...] = ()
    resume: Resume | None = None
    commands: tuple[CommandName, ...] = ()
    from_run: tuple[CommandName, ...] = ()
    to: tuple[type, str] | None = None
    only_for: tuple[AgentKind, ...] = ()
    first_run: tuple[CommandName, ...] = ()
    section: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        """Its key in a Layer: `env.group_size`."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flag(self) -> str:
        """`--env.group_size`; for a command's own option `--base-image`, or `-n` of one letter."""
        dashes = "--" if len(self.name) > 1 else "-"
        return f"--{self.key}" if self.section else dashes + self.name.rstrip("_").replace("_", "-")

    @property
    def other_flags(self) -> tuple[str, ...]:
        """The flags of its aliases."""
        return tuple(f"--{self.section}.{alias}" if self.section else f"--{alias}" for alias in self.aliases)

    @property
    def secret(self) -> bool:
        """Whether its value may never be shown."""
        return isinstance(self.kind, Key)

    @property
    def valid(self) -> str:
        """The valid values, in words."""
        return self.kind.valid + (f", or {self.unset_words[0]}" if self.unset is not None else "")

    @property
    def shown_default(self) -> str:
        """The default, as it would be given."""
        if self.default is None:
            return self.unset or "none"
        return self.kind.show(self.default) or "none"

    def read(self, raw: object) -> Any:
        """The value; None if it is left open. Raises ValueError without text."""
        left_open = raw is None or (isinstance(raw, str) and raw.strip().lower() in self.unset_words)
        return None if left_open and self.unset is not None else self.kind.read(raw)

    def refusal(self, raw: object, label: str = "") -> str:
        """The error line for `raw`, given as `label`."""
        value = "this one is not" if self.secret or self.kind.hidden else f"not {shown(raw)}"
        return f"{label or self.key}: must be {self.valid}; {value}"

    @property
    def unset_words(self) -> tuple[str, ...]:
        """The words that leave it open, if it may be left open."""
        # If `none` is a value (no tokenizer, no reasoning), another word leaves the setting open.
        if self.unset == AUTO:
            return (AUTO,)
        if isinstance(self.kind, Choice) and "none" in self.kind.words:
            return ("null",)
        return ("none", "null")


@dataclass(frozen=True, slots=True)
class Entry:
    """A value that was read, and the name of its place (a flag, a variable, a YAML key) for error texts."""

    value: Any
    label: str


Layer = dict[str, Entry]  # by the row's key


def put(layer: Layer, row: Setting, raw: object, label: str) -> None:
    """Adds a value to a layer. A setting given twice must have the same value. Raises ConfigError."""
    try:
        value = row.read(raw)
    except ValueError:
        raise ConfigError(row.refusal(raw, label)) from None
    if row.secret and not value:
        return  # an empty key is none
    earlier = layer.get(row.key)
    if earlier is not None and earlier.value != value:
        twice = "is given twice" if earlier.label == label else f"and {earlier.label} are the same setting"
        raise ConfigError(f"{label} {twice}, with different values")
    layer[row.key] = Entry(value, label)


def nearest(name: str, names: Iterable[str], similarity: float = 0.6) -> str:
    """`; did you mean ...?`, or an empty text if no name is that similar."""
    from difflib import get_close_matches

    return "".join(f"; did you mean {match}?" for match in get_close_matches(name, list(names), 1, similarity))


def row(
    default: Any,
    kind: Kind,
    text: str,
    *,
    resume: Resume | None = None,
    unset: str | None = None,
    also: tuple[str, ...] = (),
    commands: tuple[CommandName, ...] = (),
    from_run: tuple[CommandName, ...] = (),
    to: tuple[type, str] | None = None,
    only_for: tuple[AgentKind, ...] = (),
    first_run: tuple[CommandName, ...] = (),
    group: str = "",
) -> Any:
    """One row, as a field of a section; `Setting` says what the arguments are. With a default of None the setting
    may be left open. `resume`, `commands`, `group`: left out for those of its section."""
    if default is None and unset is None:
        unset = "none"
    setting = Setting(default, kind, group, text, unset, also, resume, commands, from_run, to, only_for, first_run)
    return field(default=default, metadata={"row": setting})
