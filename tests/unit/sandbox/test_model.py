"""What smolagents' memory becomes on the wire, and what may not come back from it."""

from __future__ import annotations

import pytest
from smolagents import CodeAgent
from smolagents.local_python_executor import CodeOutput, PythonExecutor
from smolagents.models import ChatMessage, MessageRole
from smolagents.monitoring import LogLevel

from sandbox.errors import EpisodeCrashed, LeaseEnded
from sandbox.runner.model import OrchestratorModel, conversation
from sandbox.runner.tool_calling import CalledTool
from sandbox.types import Call, Completion, Kind, Message, Tools, ToolSpec


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
    for kind in ("action", "final"):
        assert conversation(messages, kind) == (
            Message("system", "s"),
            Message("user", "u"),
            Message("assistant", "a"),
            Message("user", "Observation:\no\nError:\ne"),
        )


class Runs(PythonExecutor):
    """Runs nothing, and finds 6 in everything but an answer."""

    def __init__(self) -> None:
        self.state: dict[str, object] = {}

    def send_tools(self, tools: object) -> None:
        pass

    def send_variables(self, variables: object) -> None:
        pass

    def __call__(self, code: str) -> CodeOutput:
        return CodeOutput(output="6", logs="six", is_final_answer="final_answer" in code)


def asked_by_a_planning_agent() -> list[tuple[Kind, tuple[Message, ...]]]:
    """What smolagents' own code agent asks for, planning anew at each of its two steps."""
    asked: list[tuple[Kind, tuple[Message, ...]]] = []

    def complete(kind: Kind, messages: tuple[Message, ...], agent: str = "", tools: Tools = ()) -> Completion:
        asked.append((kind, messages))
        said = {"plan": "My plan.", "action": "Thought: go\n<code>\nx = 2 * 3\n", "final": "six"}
        return Completion(said[kind], 7, 3)

    agent = CodeAgent(
        tools=[],
        model=OrchestratorModel(complete),
        planning_interval=1,
        max_steps=2,
        executor=Runs(),
        verbosity_level=LogLevel.OFF,
        code_block_tags=("<code>", "</code>"),
    )
    agent.run("How much is 2 * 3?")
    return asked


def test_a_plan_that_is_made_anew_sees_the_code_that_was_run() -> None:
    asked = asked_by_a_planning_agent()
    assert [kind for kind, _ in asked] == ["plan", "action", "plan", "action", "final"]
    roles = [message.role for message in asked[2][1]]
    assert roles == ["system", "user", "assistant", "user"]
    _, task, call, observation = asked[2][1]
    assert "How much is 2 * 3?" in task.content
    assert call.content.startswith("Calling tools:\n[")
    assert "x = 2 * 3" in call.content
    assert observation.content.startswith("Observation:\n")
    assert "six" in observation.content


def test_an_answer_asked_for_at_the_end_sees_what_was_written_once() -> None:
    """Not as a summary: what was run stands in what the model wrote."""
    kind, messages = asked_by_a_planning_agent()[-1]
    said = "".join(message.content for message in messages)
    assert kind == "final"
    assert said.count("x = 2 * 3") == 2  # of two steps
    assert "Calling tools:" not in said


def test_actions_continue_what_was_said_whatever_was_planned() -> None:
    (_, first), (_, second) = (ask for ask in asked_by_a_planning_agent() if ask[0] == "action")
    assert second[: len(first)] == first
    assert second[len(first)].content.startswith("Thought: go")
    assert "Calling tools:" not in "".join(message.content for message in second)


@pytest.mark.parametrize(
    ("stop", "kind"),
    [(["Observation:", "</code>"], "action"), (["<end_plan>"], "plan"), (None, "final")],
)
def test_the_stop_strings_tell_what_a_completion_is_for(stop: list[str] | None, kind: Kind) -> None:
    asked: list[Kind] = []

    def complete(kind: Kind, messages: tuple[Message, ...], agent: str = "", tools: Tools = ()) -> Completion:
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
    def complete(kind: Kind, messages: tuple[Message, ...], agent: str = "", tools: Tools = ()) -> Completion:
        raise raised

    with pytest.raises(seen) as caught:
        OrchestratorModel(complete).generate([chat(MessageRole.USER, "u")])
    assert not isinstance(caught.value, Exception)


# ---------------------------------------------------------------- calls as data

TWO = (Call("c1", "look", '{"at":  "a"}'), Call("c2", "look", '{"at": "b"}'))


def said_and_seen() -> list[ChatMessage]:
    """Two calls and their results, as the agent has them in its memory."""
    results = [ChatMessage(MessageRole.TOOL_RESPONSE, call.arguments[-3:], raw=(call,)) for call in TWO]
    return [chat(MessageRole.USER, "u"), ChatMessage(MessageRole.ASSISTANT, "I look.", raw=TWO), *results]


def test_calls_and_results_go_out_as_data_one_by_one() -> None:
    told = [
        *said_and_seen(),
        ChatMessage(MessageRole.ASSISTANT, "Hm."),
        chat(MessageRole.TOOL_RESPONSE, "Error:\ne"),
    ]
    assert conversation(told, "action") == (
        Message("user", "u"),
        Message("assistant", "I look.", TWO),
        Message("tool", 'a"}', call_id="c1"),
        Message("tool", 'b"}', call_id="c2"),
        Message("assistant", "Hm."),
        Message("user", "Error:\ne"),
    )


def test_a_completion_without_tools_gets_calls_and_results_as_text() -> None:
    _, said, seen = conversation(said_and_seen(), "final")
    assert said.content.startswith('I look.\nCalling tools:\n{"name": "look", "arguments": {"at":  "a"}}\n{"name"')
    assert seen.content == 'Observation:\na"}\nObservation:\nb"}'
    assert (said.calls, seen.role, seen.call_id) == ((), "user", "")


@pytest.mark.parametrize("as_data", [True, False])
def test_tools_go_out_and_calls_come_back(as_data: bool) -> None:
    asked: list[Tools] = []

    def complete(kind: Kind, messages: tuple[Message, ...], agent: str = "", tools: Tools = ()) -> Completion:
        asked.append(tools)
        return Completion("I look.", 7, 3, calls=TWO if tools else ())

    spec = ToolSpec("look", "Looks.", {"at": {"type": "string", "description": "Where."}}, "string")
    model = OrchestratorModel(complete, calls_as_data=as_data)
    answer = model.generate([chat(MessageRole.USER, "u")], ["Observation:"], tools_to_call_from=[CalledTool(spec)])
    assert [[tool["function"]["name"] for tool in tools] for tools in asked] == [["look"] * as_data]
    if not as_data:
        assert answer.tool_calls is None
        return
    assert asked[0][0]["function"]["parameters"]["required"] == ["at"]
    assert answer.raw == TWO
    called = [(call.id, call.function.name, call.function.arguments) for call in answer.tool_calls]
    assert called == [(call.id, call.name, call.arguments) for call in TWO]


def test_a_call_parsed_from_text_is_not_one_as_data() -> None:
    said = ChatMessage(MessageRole.ASSISTANT, 'Action: {"name": "look", "arguments": {}}', raw=())
    assert OrchestratorModel(lambda *_: Completion("", 0, 0)).parse_tool_calls(said).tool_calls
    assert said.tool_calls is None
