"""Who speaks in a message: printed where the chat template has a place for it, left out elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.errors import ProtocolError
from orchestrator.proxy import wire
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest, CallMessage
from orchestrator.run.groups import scored_data_group
from orchestrator.run.line import attempt_line, read_attempt
from orchestrator.run.lines import dumps
from orchestrator.run.verify import Findings, Wanted, check_group
from orchestrator.types import (
    Attempt,
    CompletionKind,
    Ended,
    EndedName,
    Group,
    Member,
    Message,
    Record,
    Score,
    Wishes,
)
from sandbox.runner import wire as sandbox_wire
from sandbox.types import Message as SandboxMessage
from sandbox.types import Request
from tests.fakes import tokenizers
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan
from tests.unit.test_tool_lines import TOOL, Program, Scripted

HEADERS = {
    # OpenAI's ChatML: behind the role.
    "behind": "'<|im_start|>' + m.role + (' name=' + m.name if m.name else '') + '\n'",
    # Kimi's: in the place of the role.
    "instead": "'<|im_start|>' + (m.get('name') or m['role']) + '\n'",
    "users alone": "'<|im_start|>' + m.role + '\n' + (m.name + ': ' if m.name and m.role == 'user' else '')",
    "nowhere": "'<|im_start|>' + m.role + '\n'",
    "refuses": "'<|im_start|>' + m.role + '\n' + (raise_exception('no names') if m.name else '')",
    "as a mark": "'<|im_start|>' + m.role + ('<|' + m.name + '|>' if m.name else '') + '\n'",
}
SYSTEM = Message("system", "Be brief.", name="Rules")
TASK = Message("user", "How warm is it?", name="Ann-1")
NEXT = Message("user", "Sure?", name="Bob_2")


def template(how: str) -> str:
    return (
        "{% for m in messages %}{{ " + HEADERS[how] + " + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def with_header(how: str, marks: tuple[str, ...] = ()) -> HubTokenizer:
    return tokenizers.qwen(template(how), marks)


def line(system: str, task: str, after: str) -> str:
    """What both turns are, with these texts behind the beginnings of messages."""
    return (
        f"<|im_start|>{system}Be brief.<|im_end|>\n<|im_start|>{task}How warm is it?<|im_end|>\n"
        f"<|im_start|>assistant\n21<|im_end|>\n<|im_start|>{after}Sure?<|im_end|>\n<|im_start|>assistant\nYes"
    )


LINES = {
    "behind": line("system name=Rules\n", "user name=Ann-1\n", "user name=Bob_2\n"),
    "instead": line("Rules\n", "Ann-1\n", "Bob_2\n"),
    "users alone": line("system\n", "user\nAnn-1: ", "user\nBob_2: "),
    "nowhere": line("system\n", "user\n", "user\n"),
}
LINES["refuses"] = LINES["nowhere"]
KEPT = {
    "behind": ["Rules", "Ann-1", "", "Bob_2"],
    "instead": ["Rules", "Ann-1", "", "Bob_2"],
    "users alone": ["", "Ann-1", "", "Bob_2"],
}


async def conversation(tokenizer: HubTokenizer) -> Program:
    """Two turns of a program that names everybody, the model too."""
    program = Program(tokenizer, "21<|im_end|>", "Yes")
    await program.ask(SYSTEM, TASK, wishes=Wishes())
    await program.ask(SYSTEM, TASK, Message("assistant", "21", name="solver"), NEXT, wishes=Wishes())
    return program


@pytest.mark.parametrize("how", LINES)
async def test_names_are_in_the_prompt_and_on_record_where_the_template_prints_them(how: str) -> None:
    program = await conversation(with_header(how))
    assert program.segments == [0, 0]
    assert program.line == LINES[how]
    assert program.trained() == "21<|im_end|>Yes"
    messages = [message for turn in program.lease.turns for message in turn.messages]
    assert [message.name for message in messages] == KEPT.get(how, [""] * 4)
    assert program.lease.requests.unused_fields == ("messages[].name",)  # the model's own, at least


@pytest.mark.parametrize("how", LINES)
async def test_what_is_written_is_read_back_and_verified(how: str) -> None:
    tokenizer = with_header(how)
    program = await conversation(tokenizer)
    plan = replace(a_plan(), index=0)
    record = Record(0.0, turns=tuple(program.lease.turns), answer="42")
    attempt = Attempt(plan, record, Ended(EndedName.FINISHED))
    member = Member(attempt, trajectory(record, tokenizer, ""), Score(1.0))
    line = attempt_line(member)
    assert read_attempt(dumps(line)).record.turns == record.turns
    group = scored_data_group(Group(0, plan.task, (member,), (attempt,)))
    found = json.loads(dumps(group))
    assert [m.get("name", "") for m in found["messages"][0]][:4] == KEPT.get(how, [""] * 4)

    def failures(changed: Any) -> int:
        findings = Findings(Wanted(size=1))
        check_group(changed, "line 1", findings, {plan.rollout_id: dumps(line)})
        return findings.failed["messages"]

    assert failures(found) == 0
    for name in ("Eve", "<|im_end|>", 5, None, ["Ann"]):
        found["messages"][0][1]["name"] = name
        assert failures(found) == 1


@pytest.mark.parametrize("name", ["a b", "<|im_end|>", "n" * 65, "é", "a\n", "Ann\x00"])
def test_what_is_no_name_is_refused_at_the_border_and_in_a_record(name: str) -> None:
    with pytest.raises(ValueError, match="name has at most 64"):
        Message("user", "Hi", name=name)
    message = pb.Message(role=pb.ROLE_USER, content="Hi", name=name)
    request = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[message])
    with pytest.raises(ProtocolError, match="name has at most 64"):
        wire.completion_request(request.SerializeToString())


def test_a_name_travels_to_the_orchestrator() -> None:
    talk = (SandboxMessage("system", "Be brief."), SandboxMessage("user", "Hi", name="Ann"))
    sent = sandbox_wire.complete_request(1, "action", Request(talk)).SerializeToString()
    assert wire.completion_request(sent).messages == (
        Message("system", "Be brief."),
        Message("user", "Hi", name="Ann"),
    )


async def test_a_name_of_which_the_template_makes_a_control_token_is_left_out() -> None:
    program = Program(with_header("as a mark", ("<|tool|>",)), "21", "22", "23")
    await program.ask(replace(TASK, name="tool"), wishes=Wishes())
    assert program.line == "<|im_start|>user\nHow warm is it?<|im_end|>\n<|im_start|>assistant\n21"
    assert program.lease.requests.unused_fields == ("messages[].name",)
    for name in ("too", "Ann"):  # pieces of the token, and no part of it
        await program.ask(replace(TASK, name=name), wishes=Wishes())
        tokenizer, turn = program.tokenizer, program.lease.turns[-1]
        text = tokenizer.decode(turn.prompt_ids or ())
        assert text == f"<|im_start|>user<|{name}|>\nHow warm is it?<|im_end|>\n<|im_start|>assistant\n"


async def test_contents_beside_a_name_become_no_control_tokens() -> None:
    tokenizer = with_header("behind")
    program = Program(tokenizer, "21")
    await program.ask(replace(TASK, content="a<|im_end|>b"), wishes=Wishes())
    (turn,) = program.lease.turns
    ids = list(turn.prompt_ids or ())
    (end,) = tokenizer.encode("<|im_end|>")
    assert tokenizer.decode(ids).startswith("<|im_start|>user name=Ann-1\na<|im_end|>b<|im_end|>")
    assert ids.count(end) == 1


async def test_another_speaker_of_the_same_words_opens_a_new_line() -> None:
    program = Program(with_header("behind"), "21", "22")
    await program.ask(SYSTEM, TASK, wishes=Wishes())
    other = replace(TASK, name="Bob")
    await program.ask(SYSTEM, other, Message("assistant", "21"), NEXT, wishes=Wishes())
    assert program.segments == [0, 1]


@pytest.mark.parametrize(("second", "name"), [("Ann-1", "Ann-1"), ("Bob_2", "")])
async def test_joined_messages_have_the_name_that_both_had(second: str, name: str) -> None:
    tokenizer = with_header("behind")
    shape = replace(tokenizer.shape, neighbours=False)
    talk = (TASK, replace(NEXT, name=second))
    assert shape.fit(talk) == (Message("user", "How warm is it?\n\nSure?", name=name),)


def test_who_speaks_is_not_said_of_another_role() -> None:
    shape = replace(with_header("behind").shape, late_system=False)
    talk = (TASK, Message("assistant", "21"), SYSTEM)
    assert shape.fit(talk) == (*talk[:2], Message("user", "Be brief."))


def test_the_user_s_name_stays_where_the_system_message_is_folded_into_its_text() -> None:
    refusing = "{{ raise_exception('no system messages') if messages[0].role == 'system' }}"
    tokenizer = tokenizers.qwen(refusing + template("behind"))
    text = "<|im_start|>user name=Ann-1\nBe brief.\n\nHow warm is it?<|im_end|>\n"
    assert tokenizer.render((SYSTEM, TASK), generation_prompt=False) == text


async def test_a_name_that_was_left_out_once_stays_noted() -> None:
    program = Program(with_header("nowhere"), "21", "22")
    assert program.lease.requests.unused_fields == ()
    for task in (TASK, replace(TASK, name="")):
        await program.ask(task, wishes=Wishes())
        assert program.lease.requests.unused_fields == ("messages[].name",)


async def test_an_endpoint_that_takes_texts_gets_no_names() -> None:
    program = Program(with_header("behind"))
    completer = ScriptedCompleter(["21"])
    lease = Lease(program.lease.plan, completer, program.tokenizer, {})
    await lease.complete(AgentRequest(1, CompletionKind.ACTION, (SYSTEM, TASK)), b"1")
    assert completer.requests[0].messages == (replace(SYSTEM, name=""), replace(TASK, name=""))


async def test_only_a_program_may_name_who_speaks() -> None:
    lease = Lease(a_plan(), Scripted(with_header("behind"), "21"), None, {})
    with pytest.raises(ProtocolError, match="only a program may name"):
        await lease.complete(AgentRequest(1, CompletionKind.ACTION, (TASK,)), b"1")


async def test_a_result_has_the_name_of_its_tool_whatever_it_calls_itself() -> None:
    printed = (
        "{{ tools | tojson if tools }}<tool_call>{% for m in messages %}<|im_start|>{{ m.role }}"
        "{{ ' ' + m.name if m.name }}\n{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    )
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    program = Program(tokenizers.qwen(printed), call, "21")
    wishes = Wishes((TOOL,))
    reply = await program.ask(TASK, wishes=wishes)
    assert reply.parsed is not None
    calls = reply.parsed.calls
    result = CallMessage("tool", "21 degrees", call_id=calls[0].id, name="Eve")
    await program.ask(TASK, CallMessage("assistant", "", calls), result, wishes=wishes)
    assert "<|im_start|>tool weather\n21 degrees<|im_end|>" in program.line
    assert "Eve" not in program.line
    assert program.segments == [0, 0]
