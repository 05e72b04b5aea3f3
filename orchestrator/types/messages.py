"""Messages of a conversation, and what an agent asks for besides a text."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, count
from operator import is_not
from re import compile
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]
_NAME = compile("[a-zA-Z0-9_-]{0,64}")  # OpenAI's rule


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, text only. `name`: who speaks, where the prompt says so."""

    role: Role
    content: str
    name: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        """Raises ValueError for what is no name: chat templates print it as it is."""
        if self.name and not _NAME.fullmatch(self.name):
            raise ValueError("a message's name has at most 64 of A-Z, a-z, 0-9, _ and -")

    @property
    def entry(self) -> dict[str, str]:
        """As chat templates and files have it."""
        return {"role": self.role, "content": self.content, **({"name": self.name} if self.name else {})}


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call as the model wrote it. `arguments`: the text of a JSON object."""

    id: str
    name: str
    arguments: str


Tools = tuple[Mapping[str, Any], ...]  # that an agent offers its model, in the form of OpenAI's chat completions


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an agent asks for besides a text; smolagents' agents ask for tools alone.

    `tool_name`: the one tool that must be called. `response_format`: as OpenAI's, empty for any text."""

    tools: Tools = ()
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str = ""
    response_format: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """Of the JSON that `response_format` asks for; of any object where it names none. None: any text."""
        if self.response_format.get("type", "text") == "text":
            return None
        return (self.response_format.get("json_schema") or {}).get("schema") or {"type": "object"}

    @property
    def demands(self) -> bool:
        """Whether a tool must be called."""
        return self.tool_choice == "required" and bool(self.tools)

    @property
    def demanded(self) -> Mapping[str, Any] | None:
        """The function of the one tool that must be called. None: none must, or one of several."""
        functions = [tool["function"] for tool in self.tools if self.tool_name in ("", tool["function"]["name"])]
        return functions[0] if self.demands and len(functions) == 1 else None


class Prompted(Protocol):
    """A completion whose conversation is stored as a difference to the one before."""

    @property
    def kept(self) -> int: ...

    @property
    def messages(self) -> tuple[Message, ...]: ...


def conversations(turns: Iterable[Prompted]) -> Iterator[tuple[Message, ...]]:
    """The whole conversation of each completion's prompt, rebuilt from the differences on record."""
    talk: tuple[Message, ...] = ()
    for turn in turns:
        talk = (*talk[: turn.kept], *turn.messages)
        yield talk


def shared(one: tuple[Message, ...], other: tuple[Message, ...]) -> int:
    """How many messages are the same at the beginning of both."""
    most = min(len(one), len(other))
    same = next(compress(count(), map(is_not, one, other)), most)  # nearly all: they are one object
    return next((at for at in range(same, most) if one[at] != other[at]), most)


def beginnings(messages: tuple[Message, ...], known: Sequence[int] = (0,)) -> list[int]:
    """A hash of the first n messages for each n, from none to all. `known`: of those before `messages`."""
    *before, last = known
    return [*before, *accumulate(messages, lambda last, message: hash((last, message)), initial=last)]
