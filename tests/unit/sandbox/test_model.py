"""What smolagents' memory becomes on the wire, and what may not come back from it."""

from __future__ import annotations

import pytest
from smolagents.models import ChatMessage, MessageRole

from sandbox.errors import EpisodeCrashed, LeaseEnded
from sandbox.model import OrchestratorModel, conversation
from sandbox.types import Completion, Kind, Message


def chat(role: MessageRole, text: str) -> ChatMessage:
    return ChatMessage(role=role, content=[{"type": "text", "text": text}])


def test_tool_call_echoes_are_dropped_before_neighbours_are_joined() -> None:
    messages = [
        chat(MessageRole.SYSTEM, "s"),
        chat(MessageRole.USER, "u"),
        chat(MessageRole.ASSISTANT, "a"),
        chat(MessageRole.TOOL_CALL, "Calling tools:\n[...]"),
        chat(MessageRole.TOOL_RESPONSE, "Observation:\no"),
        chat(MessageRole.TOOL_RESPONSE, "Error:\ne"),
    ]
    assert conversation(messages) == (
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "a"),
        Message("user", "Observation:\no\nError:\ne"),
    )


@pytest.mark.parametrize(
    ("stop", "kind"),
    [(["Observation:", "</code>"], "action"), (["<end_plan>"], "plan"), (None, "final")],
)
def test_the_stop_strings_tell_what_a_completion_is_for(stop: list[str] | None, kind: Kind) -> None:
    asked: list[Kind] = []

    def complete(kind: Kind, messages: tuple[Message, ...], agent: str = "") -> Completion:
        asked.append(kind)
        return Completion("text", 7, 3)

    answer = OrchestratorModel(complete).generate([chat(MessageRole.USER, "u")], stop_sequences=stop)
    assert asked == [kind]
    assert (answer.content, answer.token_usage.input_tokens, answer.token_usage.output_tokens) == ("text", 7, 3)


@pytest.mark.parametrize(
    ("raised", "seen"), [(ValueError("x"), EpisodeCrashed), (LeaseEnded("budget"), LeaseEnded)]
)
def test_no_failure_of_a_completion_is_an_ordinary_exception(
    raised: BaseException, seen: type[BaseException]
) -> None:
    def complete(kind: Kind, messages: tuple[Message, ...], agent: str = "") -> Completion:
        raise raised

    with pytest.raises(seen) as caught:
        OrchestratorModel(complete).generate([chat(MessageRole.USER, "u")])
    assert not isinstance(caught.value, Exception)
