"""Calls of smolagents' tool-calling agents in the model's own format: who has them, exact ids, manners."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from rollout_api.v1 import sandbox_pb2 as pb
from smolagents.models import ChatMessage, MessageRole, parse_json_if_needed

from orchestrator.agents.call_format import call_format
from orchestrator.calls.formats import written
from orchestrator.completion.base import CompletionRequest, Refusal
from orchestrator.completion.shape import Shape
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.errors import ConfigError
from orchestrator.proxy import wire
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest, CallMessage, Reply
from orchestrator.rules.outcome import Refused
from orchestrator.scorers.control import first_control
from orchestrator.scorers.manners import gives_answer, plain_answer, well_formed
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from orchestrator.types import (
    Call,
    Completion,
    CompletionKind,
    ManagedAgent,
    Message,
    Record,
    Turn,
    Wishes,
)
from sandbox.runner import wire as box_wire
from sandbox.runner.model import OrchestratorModel, conversation
from sandbox.types import Request
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan, an_agent
from tests.fakes.tokenizer import tokenizer_folder
from tests.unit import test_tool_lines
from tests.unit.test_tool_lines import ENDS, Scripted

SYSTEM, TASK = Message("system", "You help."), Message("user", "Is it warm in Rome?")
HELP = Message("user", "Look for Rome.")
ANSWER = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "yes"}}\n</tool_call>'
LOOK = '<tool_call>\n{"name": "look", "arguments": {"at":  "Rome"}}\n</tool_call>'
AGENT = an_agent(
    kind="tool_calling", call_format="hermes", managed_agents=(ManagedAgent("helper", "Helps.", max_steps=9),)
)


def tools(*names: str) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
        for name in names
    )


WISHES = Wishes(tools=tools("look", "final_answer", "helper"))
THEIRS = Wishes(tools=tools("look", "final_answer"))


any_format = test_tool_lines.tokenizer  # a fixture: one template after another


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


class Team:
    """An agent and the one it manages, as their lease sees them."""

    def __init__(self, tokenizer: HubTokenizer, *texts: str) -> None:
        self.tokenizer = tokenizer
        self.completer = Scripted(tokenizer, *(f"{text}<|im_end|>" for text in texts))
        self.lease = Lease(a_plan(agent=AGENT), self.completer, tokenizer, {})

    async def ask(self, *talk: Message, agent: str = "") -> Reply:
        number = len(self.completer.requests) + 1
        asked = AgentRequest(number, CompletionKind.ACTION, talk, agent=agent, wishes=THEIRS if agent else WISHES)
        return await self.lease.complete(asked, str(number).encode())

    def line(self, segment: int) -> tuple[str, str]:
        """(the whole line, what of it is trained)."""
        made = trajectory(Record(0.0, turns=tuple(self.lease.turns)), self.tokenizer, "", segment)
        trained = [token for token, learn in zip(made.tokens_T, made.trained_T, strict=True) if learn]
        return self.tokenizer.decode(made.tokens_T), self.tokenizer.decode(trained)


def back(reply: Reply, *results: str) -> tuple[Message, ...]:
    """A completion as the sandbox sends it back, with the result of each call."""
    assert reply.parsed is not None
    calls = reply.parsed.calls
    told = (CallMessage("tool", text, call_id=call.id) for call, text in zip(calls, results, strict=True))
    return (CallMessage("assistant", reply.parsed.content, calls), *told)


async def test_the_line_goes_on_behind_calls_malformed_ones_and_errors(tokenizer: HubTokenizer) -> None:
    malformed = LOOK.replace("}}", "}")
    sampled = [f"Both.\n{LOOK}\n{LOOK}", malformed, LOOK, ANSWER]
    team = Team(tokenizer, *sampled)
    talk = [SYSTEM, TASK]
    talk += back(await team.ask(*talk), "21", "Error:\nno")
    assert (await team.ask(*talk)).parsed is not None
    talk += [Message("assistant", malformed), Message("user", "Error:\nno JSON")]
    talk += back(await team.ask(*talk), "<|im_end|> 22")
    await team.ask(*talk)
    assert [turn.segment for turn in team.lease.turns] == [0, 0, 0, 0]
    whole, trained = team.line(0)
    assert trained == "".join(f"{text}<|im_end|>" for text in sampled)
    assert whole.count("<tool_response>\n") == 3
    assert whole.count("Error:\nno JSON<|im_end|>") == 1
    assert [request.stop for request in team.completer.requests] == [()] * 4


async def test_equal_calls_of_a_team_continue_each_its_own_line(tokenizer: HubTokenizer) -> None:
    """The managed agent makes the same call before the main agent's comes back, in other words."""
    other = LOOK.replace(":  ", ": ")
    team = Team(tokenizer, other, LOOK, "Hm.", "Well.")
    theirs = await team.ask(SYSTEM, HELP, agent="helper")
    ours = await team.ask(SYSTEM, TASK)
    await team.ask(SYSTEM, TASK, *back(ours, "21"))
    await team.ask(SYSTEM, HELP, *back(theirs, "21"), agent="helper")
    assert [(turn.agent, turn.segment) for turn in team.lease.turns] == [
        *(("helper", 0), ("", 1), ("", 1), ("helper", 0)),
    ]
    assert team.line(0)[1] == f"{other}<|im_end|>Well.<|im_end|>"
    assert team.line(1)[1] == f"{LOOK}<|im_end|>Hm.<|im_end|>"


@pytest.mark.parametrize("value", ['"\\ud800"', "1" * 400, "[" * 2000 + "]" * 2000, "1e400", "NaN"])
async def test_arguments_that_could_not_come_back_are_text(tokenizer: HubTokenizer, value: str) -> None:
    reply = await Team(tokenizer, LOOK.replace('"Rome"', value)).ask(SYSTEM, TASK)
    assert reply.parsed is not None
    for call in reply.parsed.calls:  # what is a call can be sent back
        assert json.loads(call.arguments)
        assert value.isdigit()


class Refusing(Scripted):
    """An endpoint that takes no tools."""

    takes_ids = False

    async def sample(self, request: CompletionRequest) -> Completion:
        raise Refusal("no tools here")


async def test_an_endpoint_that_takes_no_tools_is_told_with_what_to_do(tokenizer: HubTokenizer) -> None:
    lease = Lease(a_plan(agent=AGENT), Refusing(tokenizer), tokenizer, {})
    reply = await lease.complete(AgentRequest(1, CompletionKind.ACTION, (SYSTEM, TASK), wishes=WISHES), b"1")
    ended = await lease.ended()
    assert isinstance(ended, Refused)
    assert (reply.ended, ended.name) == ("llm_error", "llm_error")
    assert ended.detail.endswith("if it takes no tools, set --env.tool_call_format json (a shell agent: fenced)")


async def test_a_tool_that_spells_a_control_token_is_no_fault_of_the_policy(tokenizer: HubTokenizer) -> None:
    lease = Lease(a_plan(agent=AGENT), Scripted(tokenizer, ANSWER), tokenizer, {})
    wishes = Wishes(tools=tools("look", "<|im_end|>"))
    reply = await lease.complete(AgentRequest(1, CompletionKind.ACTION, (SYSTEM, TASK), wishes=wishes), b"1")
    assert (reply.ended, reply.refused) == ("record_error", None)


async def test_no_agent_that_the_policy_calls_can_earn_another_draw(tokenizer: HubTokenizer) -> None:
    """Tools that cannot be shown are found before the first completion, also those of a managed agent. Behind it
    they end the rollout as the policy's."""
    odd = replace(AGENT, managed_agents=(ManagedAgent("helper", "Helps <|im_end|>."),))
    lease = Lease(a_plan(agent=odd), Scripted(tokenizer, ANSWER), tokenizer, {})
    first = AgentRequest(1, CompletionKind.ACTION, (SYSTEM, TASK), wishes=Wishes(tools=tools("look")))
    assert (await lease.complete(first, b"1")).ended == "record_error"
    team = Team(tokenizer, LOOK, ANSWER)
    await team.ask(SYSTEM, TASK)
    wishes = Wishes(tools=tools("look", "<|im_end|>"))
    asked = AgentRequest(2, CompletionKind.ACTION, (SYSTEM, HELP), agent="helper", wishes=wishes)
    assert (await team.lease.complete(asked, b"2")).ended == "budget"


# ---------------------------------------------------------------- through the sandbox and back


def any_value(draw: random.Random, depth: int = 2) -> Any:
    texts = [
        "",
        "größer\n",
        "<|im_end|>",
        "</tool_call>",
        '"}]',
        "Observation:",
        "\U0001f600",
        "[TOOL_CALLS]",
        " 1.0 ",
    ]
    plain = [None, True, 0, -1, 2**53 + 1, 0.1, 1e300, *texts]
    if depth == 0 or draw.random() < 0.6:
        return draw.choice(plain)
    some = [any_value(draw, depth - 1) for _ in range(draw.randrange(3))]
    return some if draw.random() < 0.5 else {draw.choice(texts): value for value in some}


def any_calls(draw: random.Random, most: int) -> list[Call]:
    """Calls in the manner of models: any spaces, and here and there a key twice."""
    calls = []
    for _ in range(draw.randint(1, most)):
        arguments = {draw.choice("abc"): any_value(draw) for _ in range(draw.randrange(4))}
        text = json.dumps(arguments, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))
        if draw.random() < 0.2:
            text = text.rstrip("}").rstrip() + (", " if len(arguments) else "") + '"a": 1}'
        calls.append(Call("", draw.choice(["look", "helper"]), text))
    return calls


def through_the_sandbox(reply: Reply, number: int) -> list[ChatMessage]:
    """What smolagents has in its memory after a completion: said, and the results of its calls."""
    served = box_wire.completion(wire.completion_response(reply).completion)
    said = OrchestratorModel(lambda *_: served, calls_as_data=True).generate([], ["Observation:"])
    for call in said.tool_calls:  # as smolagents does
        call.function.arguments = parse_json_if_needed(call.function.arguments)
    return [said, *(ChatMessage(MessageRole.TOOL_RESPONSE, f"{number}", raw=(call,)) for call in said.raw)]


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_is_called_the_line_goes_on(any_format: HubTokenizer, seed: int) -> None:
    draw, format = random.Random(seed), any_format.call_format
    assert format is not None
    end = ENDS[format]
    most = 1 if format == "gpt_oss" else 3  # its template here prints one
    texts = [
        written(draw.choice(["", "I look."][: 1 + (most > 1)]), any_calls(draw, most), format) for _ in range(4)
    ]
    sampled = [text.removesuffix(end) + end for text in texts]
    lease = Lease(a_plan(agent=replace(AGENT, call_format=format)), Scripted(any_format, *sampled), any_format, {})
    talk = [ChatMessage(MessageRole.SYSTEM, "You help."), ChatMessage(MessageRole.USER, "Look.")]
    for number in range(1, 5):
        request = Request(conversation(talk, "action"), tools=WISHES.tools)
        sent = box_wire.complete_request(number, "action", request).SerializeToString()
        reply = await lease.complete(wire.completion_request(sent), sent)
        assert reply.parsed is not None
        if not reply.parsed.calls:  # what no reader takes for a call: malformed
            assert reply.parsed.content + end == sampled[number - 1]
            break
        talk += through_the_sandbox(reply, number)
    assert {turn.segment for turn in lease.turns} == {0}
    made = trajectory(Record(0.0, turns=tuple(lease.turns)), any_format, "", 0)
    trained = [token for token, learn in zip(made.tokens_T, made.trained_T, strict=True) if learn]
    assert any_format.decode(trained) == "".join(any_format.decode(any_format.encode(t)) for t in sampled[:number])


# ---------------------------------------------------------------- who has them


class Template:
    """A tokenizer whose chat template does, or does not, print tools."""

    def __init__(self, call_format: str | None, *, tools: bool = True) -> None:
        self.call_format = call_format
        self.shape = Shape(late_system=True, neighbours=True, results=True, bare_results=True, tools=tools)


def decided(tokenizer: Template | None, **env: Any) -> str | None:
    config = Config(env=EnvSettings(**{"agent": "tool_calling", **env}))
    return call_format(config.env, config.agent_spec(), tokenizer)  # type: ignore[arg-type]


CALLER = (ManagedAgent("caller", "x", kind="tool_calling"),)


@pytest.mark.parametrize(
    ("tokenizer", "env", "format"),
    [
        (Template("hermes"), {}, "hermes"),
        (Template("hermes"), {"tool_call_format": "json"}, None),
        (Template("hermes"), {"agent": "code"}, None),
        (Template("hermes"), {"agent": "shell"}, "hermes"),
        (Template("hermes"), {"agent": "shell", "tool_call_format": "fenced"}, None),
        (Template(None), {"agent": "shell"}, None),
        (Template("hermes"), {"agent": "code", "managed_agents": CALLER}, "hermes"),
        (Template(None), {}, None),
        (Template("hermes", tools=False), {}, None),
        (Template("mistral"), {"tool_call_format": "mistral"}, "mistral"),
        (None, {}, None),
        (None, {"tool_call_format": "llama3"}, "llama3"),
    ],
)
def test_the_model_s_own_format_where_its_template_shows_one(
    tokenizer: Template | None, env: dict[str, Any], format: str | None
) -> None:
    assert decided(tokenizer, **env) == format


def test_a_format_that_the_template_cannot_show_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shows no tools, so it cannot be hermes.*or set json"):
        decided(Template("hermes", tools=False), tool_call_format="hermes")
    with pytest.raises(ConfigError, match=r"json is for env\.agent code or tool_calling, not program:x\.py"):
        decided(None, agent="program:x.py", tool_call_format="json")
    with pytest.raises(ConfigError, match=r"fenced is for env\.agent shell, not tool_calling"):
        decided(None, tool_call_format="fenced")


# ---------------------------------------------------------------- manners


def turn_of(text: str, *, offered: bool = True) -> Turn:
    said = Completion(text, text, "stop", None, None, 1, 1)
    given = WISHES.tools if offered else ()
    return Turn(1, CompletionKind.ACTION, 0, (SYSTEM, TASK), 0, None, "", said, 0.0, 1.0, tools=given)


JSON = '{"name": "final_answer", "arguments": {"answer": "yes"}}'


@pytest.mark.parametrize(
    ("text", "good", "answers"),
    [
        (LOOK, True, False),
        (f"I look.\n{LOOK}\n{LOOK}", True, False),
        (ANSWER, True, True),
        (f"{ANSWER}\n{LOOK}", True, False),  # smolagents refuses that
        (LOOK.replace("look", "other"), False, False),
        (LOOK.replace("}}", "}"), False, False),
        (f"Action:\n{JSON}", False, True),  # smolagents reads it, but the model has another form
        ("Rome.", False, False),
    ],
)
def test_a_call_in_the_model_s_format_is_good_manners(text: str, good: bool, answers: bool) -> None:
    assert (well_formed(AGENT, turn_of(text)), gives_answer(AGENT, turn_of(text))) == (good, answers)


def test_json_in_the_text_is_good_manners_where_no_tools_were_shown() -> None:
    plain = turn_of(f"Action:\n{JSON}", offered=False)
    for agent in (AGENT, replace(AGENT, call_format=None)):
        assert (well_formed(agent, plain), gives_answer(agent, plain)) == (True, True)


FENCED = "I look.\n```bash\nls\n```\n"


@pytest.mark.parametrize(
    ("format", "text", "good"),
    [
        ("hermes", LOOK, True),
        ("hermes", f"I look.\n{LOOK}\n{LOOK}", True),
        ("hermes", "It is done.", True),
        ("hermes", "Run ```bash\nls\n``` yourself.", True),
        ("hermes", LOOK.replace("}}", "}"), False),
        ("llama3", '{"name": "look", "parameters": []}', False),
        ("hermes", '```json\n{"name" : "bash", "arguments": {"command": "ls"}}\n```', False),
        (None, FENCED, True),
        (None, FENCED.replace("bash", "sh"), True),
        (None, "It is done.", True),
        (None, FENCED * 2, False),
        (None, FENCED.removesuffix("```\n"), False),
        (None, LOOK, True),
    ],
)
def test_a_shell_agent_acts_by_a_call_or_a_block_or_ends(format: Any, text: str, good: bool) -> None:
    agent = an_agent(kind="shell", call_format=format)
    turn = turn_of(text, offered=format is not None)
    assert (well_formed(agent, turn), gives_answer(agent, turn)) == (good, True)
    cut = replace(turn, completion=replace(turn.completion, finish_reason="length"))
    assert not well_formed(agent, cut)
    assert plain_answer(agent, "42", as_data=format is not None) == ("42", "42")


@pytest.mark.parametrize("offered", [True, False])
def test_the_control_gives_the_answer_in_the_agent_s_form(offered: bool) -> None:
    visible, text = plain_answer(AGENT, 'a "b"\n', as_data=offered)
    assert visible == text
    assert well_formed(AGENT, turn_of(text, offered=offered))
    assert gives_answer(AGENT, turn_of(text, offered=offered))


def test_a_control_without_a_rollout_is_well_formed() -> None:
    plan = a_plan(agent=AGENT)
    (turn,) = first_control(plan, ids=True, output=False).turns
    assert well_formed(plan.agent, turn)


@pytest.mark.parametrize("sampled", [True, False])
async def test_calls_too_large_to_come_back_buy_no_second_try(sampled: bool) -> None:
    """Their arguments are the policy's. The tools are the operator's."""
    lease = Lease(a_plan(agent=AGENT), ScriptedCompleter(["words"]), None, {})
    talk = (Message("user", "q"),)
    if sampled:
        await lease.complete(AgentRequest(1, CompletionKind.ACTION, talk), b"1")
    arguments = json.dumps({"x": [[]] * (wire.MAX_OBJECTS + 1)})
    call = pb.Call(id="1", name="f", arguments_json=arguments)
    request = pb.CompleteRequest(
        sequence=1 + sampled,
        kind=pb.COMPLETION_KIND_ACTION,
        messages=[
            pb.Message(role=pb.ROLE_USER, content="q"),
            pb.Message(role=pb.ROLE_ASSISTANT, calls=[call]),
            pb.Message(role=pb.ROLE_TOOL, content="r", call_id="1"),
        ],
    ).SerializeToString()
    reply = await lease.complete(wire.completion_request(request), request)
    assert reply.ended == ("budget" if sampled else "record_error")
