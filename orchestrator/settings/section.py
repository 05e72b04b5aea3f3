"""The base class of sections of rows: it checks every value by its row, and shows values without keys."""

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from orchestrator.errors import ConfigError
from orchestrator.rules.redact import Secret, redact
from orchestrator.settings.row import CommandName, Resume, Setting
from orchestrator.tools.mcp.base import McpServer
from orchestrator.types import ManagedAgent

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """Some rows with their values. Every value is read by its row, so an instance cannot hold an invalid one.

    A subclass names what its rows have in common: `section`, the first word of their keys; `group`, their heading
    in help; `resume` and `commands`, what resuming does with them and which commands take them, unless a row says
    otherwise; `from_run`, which commands take all of them from a run, besides what rows say.
    """

    section: ClassVar[str] = "env"

    def __init_subclass__(
        cls,
        *,
        section: str = "env",
        group: str = "",
        resume: Resume | None = None,
        commands: tuple[CommandName, ...] = (),
        from_run: tuple[CommandName, ...] = (),
    ) -> None:
        cls.section = section
        for name, field in vars(cls).items():
            if isinstance(field, Field):
                row: Setting = field.metadata["row"]
                complete = replace(
                    row,
                    section=section,
                    name=name,
                    group=row.group or group,
                    resume=row.resume or resume,
                    commands=row.commands or commands,
                    from_run=tuple(dict.fromkeys((*row.from_run, *from_run))),
                )
                field.metadata = MappingProxyType({"row": complete})

    def __post_init__(self) -> None:
        for name, row in self.rows().items():
            raw = getattr(self, name)
            try:
                object.__setattr__(self, name, row.read(raw))
            except ValueError:
                raise ConfigError(row.refusal(raw)) from None

    @classmethod
    def rows(cls) -> Mapping[str, Setting]:
        """Field name → row, in the order of help."""
        return {field.name: field.metadata["row"] for field in fields(cls)}

    def fill(self, spec: type[T], **others: Any) -> T:
        """A `spec` of the values whose rows lead `to` its fields, and of `others`."""
        copied = {
            row.to[1]: getattr(self, name) for name, row in self.rows().items() if row.to and row.to[0] is spec
        }
        return spec(**copied, **others)

    def hidden(self) -> tuple[Secret, ...]:
        """The keys held here."""
        values = (getattr(self, name) for name in self.rows())
        return tuple(value for value in values if isinstance(value, Secret) and value)

    def public(self, *secrets: Secret) -> dict[str, Any]:
        """Plain JSON values without keys. Texts that look like keys are removed from the other values."""
        hidden = (*self.hidden(), *secrets)
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
    if isinstance(value, ManagedAgent | McpServer):
        return _plain(value.as_setting(), secrets)
    return redact(str(value), *secrets)
