"""smolagents' Model over the orchestrator: a conversation goes out, a completion comes back.

smolagents would show an ordinary exception of `generate` to the model, or take it for the answer. So every
failure to get a completion is raised as an EpisodeEnd.

Calls are data where the orchestrator can parse the model's own format of calls (`AgentSettings.calls_as_data`).
The `raw` of a message then holds them as the orchestrator gave them: what an assistant called, or the one call
that a result answers. Sent back in the same words, they are found again in what was sampled.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from smolagents.models import (
    ChatMessage,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    MessageRole,
    Model,
    get_tool_json_schema,
)
from smolagents.monitoring import TokenUsage

from sandbox.errors import EpisodeCrashed
from sandbox.types import Call, Completion, Kind, Message, Role, Tools


class Complete(Protocol):
    """Asks for one completion, for the managed agent named `agent`, or the main one. `tools`: that it may call."""

    def __call__(
        self, kind: Kind, messages: tuple[Message, ...], agent: str = "", tools: Tools = ()
    ) -> Completion: ...


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

    def __init__(self, complete: Complete, agent: str = "", *, calls_as_data: bool = False) -> None:
        super().__init__(flatten_messages_as_text=True, model_id="orchestrator")
        self._complete = complete
        self._agent = agent
        self._calls_as_data = calls_as_data
        self._calls = 0

    def generate(
        self,
        messages: list[ChatMessage],
        stop_sequences: list[str] | None = None,
        response_format: dict[str, str] | None = None,
        tools_to_call_from: list[Any] | None = None,
        **kwargs: Any,
    ) -> ChatMessage:
        """One completion. Raises only EpisodeEnd."""
        try:
            kind = _kind(stop_sequences)
            tools = tuple(map(get_tool_json_schema, tools_to_call_from or ())) if self._calls_as_data else ()
            answer = self._complete(kind, conversation(messages, kind), self._agent, tools)
        except Exception as error:
            raise EpisodeCrashed(f"asking for a completion: {type(error).__name__}: {error}") from error
        return ChatMessage(
            role=MessageRole.ASSISTANT,
            content=answer.text,
            tool_calls=[
                ChatMessageToolCall(ChatMessageToolCallFunction(call.arguments, call.name), call.id, "function")
                for call in answer.calls
            ]
            or None,
            raw=answer.calls,
            token_usage=TokenUsage(answer.prompt_tokens, answer.completion_tokens),
        )

    def parse_tool_calls(self, message: ChatMessage) -> ChatMessage:
        """The call in the text of a completion. Its id is counted: equal runs have equal prompts. Raises
        ValueError."""
        message = super().parse_tool_calls(replace(message))  # a copy: the one in memory has no calls as data
        for call in message.tool_calls:
            if not isinstance(call.function.name, str):
                raise ValueError("the name of a tool must be text")
            self._calls += 1
            call.id = f"call_{self._calls}"
        return message


def conversation(messages: Iterable[ChatMessage], kind: Kind) -> tuple[Message, ...]:
    """Messages as they are sent; neighbours of one role are joined by a newline, as smolagents does.

    "Calling tools:" echoes are left out before joining: joined, they would become part of the model's own
    message, and stand behind its end-of-turn token. Requests for a plan keep them as the assistant's: a plan is
    made from a summary in which only the echoes tell what was done.
    """
    result: list[Message] = []
    for message in messages:
        if MessageRole(message.role) is MessageRole.TOOL_CALL and kind != "plan":
            continue
        one, before = _message(message, kind), result[-1] if result else None
        if before and before.role == one.role != "tool" and not (before.calls or one.calls):
            result[-1] = Message(one.role, f"{before.content}\n{one.content}")
        else:
            result.append(one)
    return tuple(result)


def _message(message: ChatMessage, kind: Kind) -> Message:
    """One message. Only actions have tools: elsewhere calls and results are text, in smolagents' words."""
    role, text = _ROLES[MessageRole(message.role)], _text(message.content)
    calls: tuple[Call, ...] = message.raw or ()
    if not calls:
        return Message(role, text)
    if kind == "action":
        return Message(role, text, calls) if role == "assistant" else Message("tool", text, call_id=calls[0].id)
    if role == "user":
        return Message(role, f"Observation:\n{text}")
    echo = "\n".join(f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in calls)
    return Message(role, f"{text}\nCalling tools:\n{echo}".lstrip())


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _kind(stop_sequences: list[str] | None) -> Kind:
    """What a completion is for: smolagents does not say, but uses other stop strings for each kind."""
    if stop_sequences is None:
        return "final"
    return "plan" if _PLAN_STOP in stop_sequences else "action"
