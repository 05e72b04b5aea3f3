"""smolagents' Model over the orchestrator: a conversation goes out as text, a completion comes back.

smolagents would show an ordinary exception of `generate` to the model, or take it for the answer. So every
failure to get a completion is raised as an EpisodeEnd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from smolagents.models import ChatMessage, MessageRole, Model
from smolagents.monitoring import TokenUsage

from sandbox.errors import EpisodeCrashed
from sandbox.types import Completion, Kind, Message, Role


class Complete(Protocol):
    """Asks for one completion, for the managed agent named `agent`, or the main one."""

    def __call__(self, kind: Kind, messages: tuple[Message, ...], agent: str = "") -> Completion: ...


_PLAN_STOP = "<end_plan>"
_ROLES: dict[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.USER: "user",
    MessageRole.TOOL_RESPONSE: "user",
    MessageRole.TOOL_CALL: "assistant",
    MessageRole.ASSISTANT: "assistant",
}


class OrchestratorModel(Model):
    """Asks `complete` for each answer. The orchestrator sets model, sampling and stop strings.

    `agent`: the managed agent whose model this is; empty: the main agent.
    """

    def __init__(self, complete: Complete, agent: str = "") -> None:
        super().__init__(flatten_messages_as_text=True, model_id="orchestrator")
        self._complete = complete
        self._agent = agent
        self._calls = 0

    def generate(
        self, messages: list[ChatMessage], stop_sequences: list[str] | None = None, **kwargs: Any
    ) -> ChatMessage:
        """One completion. Raises only EpisodeEnd."""
        try:
            kind = _kind(stop_sequences)
            answer = self._complete(kind, conversation(messages, kind), self._agent)
        except Exception as error:
            raise EpisodeCrashed(f"asking for a completion: {type(error).__name__}: {error}") from error
        return ChatMessage(
            role=MessageRole.ASSISTANT,
            content=answer.text,
            token_usage=TokenUsage(answer.prompt_tokens, answer.completion_tokens),
        )

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        """The call in a completion. Its id is counted: equal runs have equal prompts. Raises ValueError."""
        message = super().parse_tool_calls(message)
        for call in message.tool_calls:
            if not isinstance(call.function.name, str):
                raise ValueError("the name of a tool must be text")
            self._calls += 1
            call.id = f"call_{self._calls}"
        return message


def conversation(messages: Iterable[ChatMessage], kind: Kind) -> tuple[Message, ...]:
    """Messages as text; neighbours of one role are joined by a newline, as smolagents does.

    "Calling tools:" echoes are left out before joining: joined, they would become part of the model's own
    message, and stand behind its end-of-turn token. Requests for a plan keep them as the assistant's: a plan is
    made from a summary in which only the echoes tell what was done.
    """
    joined: list[Message] = []
    for message in messages:
        role = MessageRole(message.role)
        if role is MessageRole.TOOL_CALL and kind != "plan":
            continue
        text = _text(message.content)
        if joined and joined[-1].role == _ROLES[role]:
            joined[-1] = Message(_ROLES[role], f"{joined[-1].content}\n{text}")
        else:
            joined.append(Message(_ROLES[role], text))
    return tuple(joined)


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _kind(stop_sequences: list[str] | None) -> Kind:
    """What a completion is for: smolagents does not say, but uses other stop strings for each kind."""
    if stop_sequences is None:
        return "final"
    return "plan" if _PLAN_STOP in stop_sequences else "action"
