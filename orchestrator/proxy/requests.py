"""A sandbox's requests to its lease and the replies, as plain values. `outcome` has the ones for its end."""

from dataclasses import dataclass, field

from orchestrator.calls.parsed import ParsedText
from orchestrator.types import Call, Completion, CompletionKind, Message, RequestNotes, Step, Wishes


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a program's request is not served, for the program. `param`: OpenAI's name of the field at fault."""

    text: str
    param: str = ""
    too_long: bool = False


class RequestRefused(Exception):
    """A program's request cannot be served. Nothing was sampled, and the rollout goes on."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to Complete: a completion, a refusal of this request, or the name of the outcome that ended the
    lease.

    `parsed`: the completion as an agent gets it that has calls as data. `logprobs`: texts and log-probs of its
    tokens, if they were asked for. `stop`: the stop string that ended it, where one was sampled. `counted`: tokens
    of the prompt, where nothing was to be sampled."""

    completion: Completion | None = None
    ended: str | None = None
    refused: Refusal | None = None
    parsed: ParsedText | None = None
    logprobs: tuple[tuple[str, float], ...] = ()
    stop: str = ""
    counted: int | None = None


@dataclass(frozen=True, slots=True)
class ToolReply:
    """Answer to CallTool."""

    output: str | None = None
    error: str | None = None
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class CallMessage(Message):
    """A message with calls as data, as agents send it. `calls`: the tools that an assistant calls, besides what it
    says. `call_id`: the call that a tool's result answers."""

    calls: tuple[Call, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request for a completion. `agent`: the managed agent that asks; empty: the main one. `steps` and `notes`:
    since the last request. `count_only`: only the tokens of the prompt are wanted. `refusal`: it is over a limit,
    and was not read further. `is_long`: what is done with all of it takes milliseconds."""

    sequence: int
    kind: CompletionKind
    messages: tuple[Message, ...]
    stop: tuple[str, ...] = ()
    agent: str = ""
    steps: tuple[Step, ...] = ()
    wishes: Wishes = field(default_factory=Wishes)
    count_only: bool = False
    notes: RequestNotes = field(default_factory=RequestNotes)
    refusal: Refusal | None = None
    is_long: bool = False

    @property
    def is_step(self) -> bool:
        """Whether it is a step of the main agent, as `Turn.is_step`."""
        return self.kind is CompletionKind.ACTION and not self.agent
