"""What one setting is: a row of the table in `settings`, and a class of such rows that checks itself.

Plain dataclasses rather than pydantic models: text needs readers of its own anyway, errors are one line
by construction, and `--help` need not wait for an import.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from orchestrator.errors import ConfigError
from orchestrator.redact import Secret, redact, shown
from orchestrator.settings.kinds import Choice, Key, Kind
from orchestrator.types import ManagedAgent

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `unset` says what None means, for a setting that may be left open; else it is None."""

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
        """What a value of it is filed under: `env.group_size`."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flag(self) -> str:
        """`--env.group_size`; a command's own: `--base-image`."""
        return f"--{self.key}" if self.section else "--" + self.name.rstrip("_").replace("_", "-")

    @property
    def secret(self) -> bool:
        """Whether its value may never be shown."""
        return isinstance(self.kind, Key)

    @property
    def valid(self) -> str:
        """What may be given, in words."""
        return self.kind.valid + (f", or {self._unset_words[0]}" if self.unset is not None else "")

    @property
    def shown_default(self) -> str:
        """The default, as it could be given."""
        if self.default is None:
            return self.unset or "none"
        return self.kind.show(self.default) or "none"

    def read(self, raw: object) -> Any:
        """The value, None where it is left open. Raises ValueError without text."""
        left_open = raw is None or (isinstance(raw, str) and raw.strip().lower() in self._unset_words)
        return None if left_open and self.unset is not None else self.kind.read(raw)

    def refusal(self, raw: object, label: str = "") -> str:
        """The error line for `raw`, given as `label`."""
        given = "this one is not" if self.secret else f"not {shown(raw)}"
        return f"{label or self.key}: must be {self.valid}; {given}"

    @property
    def _unset_words(self) -> tuple[str, ...]:
        # Where `none` is a value of its own (no tokenizer, no reasoning), another word leaves it open.
        if self.unset == AUTO:
            return (AUTO,)
        if isinstance(self.kind, Choice) and "none" in self.kind.words:
            return ("null",)
        return ("none", "null")


@dataclass(frozen=True, slots=True)
class Given:
    """A value that was read, and what an error line calls the place it was given at."""

    value: Any
    label: str


Layer = dict[str, Given]  # by the row's key


def give(layer: Layer, row: Setting, raw: object, label: str) -> None:
    """Files a value under its row. The same setting twice must be the same value. Raises ConfigError."""
    try:
        value = row.read(raw)
    except ValueError:
        raise ConfigError(row.refusal(raw, label)) from None
    if row.secret and not value:
        return  # not given
    earlier = layer.get(row.key)
    if earlier is not None and earlier.value != value:
        twice = "is given twice" if earlier.label == label else f"and {earlier.label} are the same setting"
        raise ConfigError(f"{label} {twice}, with different values")
    layer[row.key] = Given(value, label)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing where nothing is near."""
    from difflib import get_close_matches

    return "".join(f"; did you mean {match}?" for match in get_close_matches(name, list(known), 1, 0.3))


def setting(
    default: Any, kind: Kind, group: str, text: str, *, unset: str | None = None, also: tuple[str, ...] = ()
) -> Any:
    """One row of the table, as a dataclass field. A default of None: the setting may be left open."""
    if default is None and unset is None:
        unset = "none"
    return field(default=default, metadata={"row": Setting(default, kind, group, text, unset, also)})


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """Base of the classes of rows. Every field is read by its row, so an invalid value cannot be held."""

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
        """Plain JSON values, keys left out and everything else cleaned of what looks like one."""
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
