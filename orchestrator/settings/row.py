"""What one setting is: a row of the `table`, and the base class of sections of rows, which checks its values.

Plain dataclasses rather than pydantic models: values need readers of their own anyway, errors are always one line,
and `--help` need not wait for an import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import Secret, redact, shown
from orchestrator.settings.kinds import Choice, Key, Kind
from orchestrator.types import ManagedAgent

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `unset`: what None means, in words, for a setting that may be left open; None for the others."""

    default: Any
    kind: Kind
    group: str
    text: str
    unset: str | None = None
    aliases: tuple[str, ...] = ()
    section: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        """Its key in a Layer: `env.group_size`."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flag(self) -> str:
        """`--env.group_size`; for a command's own option `--base-image`."""
        return f"--{self.key}" if self.section else "--" + self.name.rstrip("_").replace("_", "-")

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
        given = "this one is not" if self.secret else f"not {shown(raw)}"
        return f"{label or self.key}: must be {self.valid}; {given}"

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
class Given:
    """A value that was read, and the name of its place (a flag, a variable, a YAML key) for error texts."""

    value: Any
    label: str


Layer = dict[str, Given]  # by the row's key


def give(layer: Layer, row: Setting, raw: object, label: str) -> None:
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
    layer[row.key] = Given(value, label)


def nearest(name: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """`; did you mean ...?`, or an empty text if no known name is that similar."""
    from difflib import get_close_matches

    return "".join(f"; did you mean {match}?" for match in get_close_matches(name, list(known), 1, similarity))


def setting(
    default: Any, kind: Kind, group: str, text: str, *, unset: str | None = None, also: tuple[str, ...] = ()
) -> Any:
    """One row of the table, as a dataclass field. With a default of None the setting may be left open."""
    if default is None and unset is None:
        unset = "none"
    return field(default=default, metadata={"row": Setting(default, kind, group, text, unset, also)})


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """Base of the sections. Every field is read by its row, so it cannot hold an invalid value."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        for name, row in self.rows().items():
            raw = getattr(self, name)
            try:
                object.__setattr__(self, name, row.read(raw))
            except ValueError:
                raise ConfigError(row.refusal(raw)) from None

    @classmethod
    def rows(cls) -> Mapping[str, Setting]:
        """Field name → row, in the order of the table."""
        return {f.name: replace(f.metadata["row"], section=cls.section, name=f.name) for f in fields(cls)}

    def secrets(self) -> tuple[Secret, ...]:
        """The keys held here."""
        values = (getattr(self, name) for name in self.rows())
        return tuple(value for value in values if isinstance(value, Secret) and value)

    def public(self, *secrets: Secret) -> dict[str, Any]:
        """Plain JSON values without keys. Texts that look like keys are removed from the other values."""
        hidden = (*self.secrets(), *secrets)
        values = {name: getattr(self, name) for name, row in self.rows().items() if not row.secret}
        return {name: _plain(value, hidden) for name, value in values.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.public().items())})"


def _plain(value: object, secrets: tuple[Secret, ...]) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item, secrets) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item, secrets) for name, item in value.items()}
    if isinstance(value, ManagedAgent):
        return _plain(value.given(), secrets)
    return redact(str(value), *secrets)
