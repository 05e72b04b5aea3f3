"""What a sandbox asks for costs little, and what must take long holds up nobody else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from orchestrator.calls.formats import FORMATS
from orchestrator.calls.parsed import parsed
from orchestrator.completion.line import TokenLine
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.proxy import wire
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.offers import Offers
from orchestrator.proxy.requests import AgentRequest, CallMessage
from orchestrator.proxy.talk import Talk
from orchestrator.types import Completion, CompletionKind, Message, Tools, Wishes
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan, an_agent, some_limits
from tests.fakes.tokenizer import tokenizer_folder
from tests.unit.test_tool_lines import Scripted


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


class Counted(dict[str, Any]):
    """A schema that counts how often it is looked into."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.looks += 1
        return super().get(key, default)


def test_a_schema_is_walked_once_however_many_parameters_have_it() -> None:
    schema = Counted(anyOf=[Counted() for _ in range(500)])
    tools: Tools = ({"function": {"name": "f", "parameters": {"properties": {"p": schema}}}},)
    value = "<parameter=p>\n1\n</parameter>\n"
    Counted.looks = 0
    once = parsed(f"<function=f>\n{value}</function>", "qwen3_coder", tools, 1)
    looks = Counted.looks
    said = parsed(f"<function=f>\n{value * 250}</function>" * 4, "qwen3_coder", tools, 1)
    assert (len(once.calls), len(said.calls)) == (1, 4)
    assert Counted.looks == looks, "known from the first time"


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_conversation_reads_its_tools_once(format: Any) -> None:
    """However many messages it has."""
    tools: Tools = tuple(Counted(function=Counted(name=f"f{i}")) for i in range(100))
    Counted.looks = 0
    for number in range(50):
        parsed("Only words, and no call.", format, tools, number)
    assert Counted.looks <= 300, "three for each tool"


class Rendered:
    """A tokenizer that counts what it prints."""

    def __init__(self, inner: HubTokenizer) -> None:
        self._inner = inner
        self.renders = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def render(self, *talk: Any, **how: Any) -> str:
        self.renders += 1
        return self._inner.render(*talk, **how).replace(
            "<|im_start|>assistant\nyes", "<|im_start|>assistant\nyes yes"
        )


def test_many_lines_that_cannot_go_on_cost_few_renderings(tokenizer: HubTokenizer) -> None:
    """Each request finds the conversations of all earlier ones in its own."""
    counting = Rendered(tokenizer)
    line = TokenLine(counting, "</code>")  # type: ignore[arg-type]
    line._behind = lambda *_: counting.render((Message("user", "q"),), generation_prompt=True) and None  # type: ignore
    talk: tuple[Message, ...] = (Message("user", "q"),)
    for _ in range(30):
        prompt = line.prompt(talk)
        line.append(prompt, talk, Completion("yes", "yes", "stop", (5,), (-1.0,), 1, 1))
        talk = (*talk, Message("assistant", "yes"), Message("user", "q"))
    counting.renders = 0
    line.following(talk)
    assert counting.renders <= 6


def test_served_calls_are_found_without_being_compared_one_by_one() -> None:
    talk = Talk("hermes")
    tools: Tools = ({"function": {"name": "look", "parameters": {}}},)
    text = '<tool_call>\n{"name": "look", "arguments": {"n": %d}}\n</tool_call>'
    for number in range(200):
        talk.parsed_text(text % number, Wishes(tools), number)
    looked: list[Any] = []

    class Places(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            looked.append(key)
            return super().get(key, default)

    talk._places = Places(talk._places)
    said = talk.parsed_text(text % 7, Wishes(tools), 300)
    (message,) = talk.plain([CallMessage("assistant", "", said.calls)])
    assert message.content == text % 7
    assert len(looked) <= 2


def test_the_same_calls_in_other_words_come_back_in_the_order_in_which_they_were_sampled() -> None:
    talk = Talk("hermes")
    tools: Tools = ({"function": {"name": "look", "parameters": {}}},)
    texts = ['<tool_call>\n{"name": "look", "arguments": {"n":%s7}}\n</tool_call>' % (" " * n) for n in range(3)]
    calls = [talk.parsed_text(text, Wishes(tools), 1).calls for text in texts]
    back = [
        CallMessage("assistant", "", tuple(replace(call, id=f"own {n}") for call in calls[n])) for n in range(3)
    ]
    assert [message.content for message in talk.plain(back)] == texts
    assert [message.content for message in talk.plain([*back, back[0]])] == [*texts, texts[0]]


def long_request(sequence: int = 1) -> bytes:
    """As an attacker would write it: many parameters whose schema is large, in a message nobody sampled."""
    properties = {"p": {"anyOf": [{} for _ in range(8_000)]}}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    call = json.dumps({"name": "f", "arguments": {f"a{i}": [] for i in range(500)}})
    return pb.CompleteRequest(
        sequence=sequence,
        kind=pb.COMPLETION_KIND_ACTION,
        tools_json=json.dumps([{"type": "function", "function": function}]),
        messages=[
            pb.Message(role=pb.ROLE_USER, content="q"),
            pb.Message(role=pb.ROLE_ASSISTANT, content=f"<tool_call>{call}</tool_call>"),
            pb.Message(role=pb.ROLE_USER, content="q"),
        ],
    ).SerializeToString()


def a_lease(tokenizer: HubTokenizer) -> Lease:
    plan = a_plan(agent=an_agent(kind="program"), limits=some_limits(completions=100, max_token_length=200_000))
    return Lease(plan, ScriptedCompleter(["yes"] * 4), tokenizer, {})


async def test_a_short_request_overtakes_long_ones(tokenizer: HubTokenizer) -> None:
    tokenizer.shape  # noqa: B018 - found once, before the first rollout
    asked = wire.completion_request(long_request())
    ended: list[str] = []

    async def ask(name: str, lease: Lease, request: AgentRequest) -> None:
        reply = await lease.complete(request, name.encode())
        assert reply.completion is not None or reply.refused is not None
        ended.append(name)

    short = AgentRequest(1, CompletionKind.ACTION, (Message("user", "q"),))
    async with asyncio.TaskGroup() as tg:
        for number in range(4):
            tg.create_task(ask(f"long {number}", a_lease(tokenizer), asked))
        await asyncio.sleep(0)
        tg.create_task(ask("short", a_lease(tokenizer), short))
    assert ended[0] == "short"


async def test_a_long_conversation_is_printed_beside_the_event_loop(tokenizer: HubTokenizer) -> None:
    tokenizer.shape  # noqa: B018 - found once, before the first rollout
    threads: list[threading.Thread] = []

    class Noted(Rendered):
        def render(self, *talk: Any, **how: Any) -> str:
            threads.append(threading.current_thread())
            return super().render(*talk, **how)

    talk = [pb.Message(role=pb.ROLE_USER, content="q"), pb.Message(role=pb.ROLE_USER, content="x" * 60_000)]
    data = pb.CompleteRequest(sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=talk).SerializeToString()
    plan = a_plan(agent=an_agent(kind="program"), limits=some_limits(completions=1, max_token_length=200_000))
    lease = Lease(plan, Scripted(tokenizer, "yes"), Noted(tokenizer), {})  # type: ignore[arg-type]
    reply = await lease.complete(wire.completion_request(data), b"1")
    assert reply.completion is not None
    assert threads
    assert threading.main_thread() not in threads


def long_ones() -> Iterator[tuple[str, pb.CompleteRequest]]:
    user = pb.Message(role=pb.ROLE_USER, content="q")
    call = pb.Call(id="1", name="f", arguments_json=json.dumps({"x": [[]] * 600}))
    yield "bytes", pb.CompleteRequest(messages=[pb.Message(role=pb.ROLE_USER, content="x" * 60_000)])
    yield "messages", pb.CompleteRequest(messages=[user] * 300)
    yield "objects", pb.CompleteRequest(messages=[pb.Message(role=pb.ROLE_ASSISTANT, calls=[call])])


@pytest.mark.parametrize(("name", "request_"), [*long_ones()])
def test_a_request_that_takes_long_is_known_before_it_is_read(name: str, request_: pb.CompleteRequest) -> None:
    request_.kind = pb.COMPLETION_KIND_ACTION
    assert wire.short_request(request_.SerializeToString()) is None
    assert wire.completion_request(request_.SerializeToString()).is_long


async def test_a_program_s_tools_are_kept_once_in_memory(tokenizer: HubTokenizer) -> None:
    lease = a_lease(tokenizer)
    for number in range(1, 4):
        tool = {"type": "function", "function": {"name": "f", "description": "word"}}
        wishes = Wishes(tools=(tool if number % 2 else dict(reversed(tool.items())),))
        talk = (Message("user", f"q{number}"),)
        await lease.complete(AgentRequest(number, CompletionKind.ACTION, talk, wishes=wishes), b"%d" % number)
    first, *others = lease.turns
    assert all(turn.tools is first.tools for turn in others)


def test_tools_that_are_looked_at_twice_at_a_time_are_kept_once() -> None:
    """A thread goes on with a request that was given up."""
    looks, goes_on = threading.Semaphore(0), threading.Event()
    kept: list[Tools] = []

    def flaw(tools: Tools) -> None:
        if threading.current_thread() is aside:
            looks.release()
            assert goes_on.wait(10)

    def look() -> None:
        kept.append(offers.same(({"function": {"name": "f"}},)))

    offers, aside = Offers(flaw), threading.Thread(target=look)
    aside.start()
    assert looks.acquire(timeout=10)
    look()
    goes_on.set()
    aside.join()
    look()
    assert kept[0] is kept[1] is kept[2]


def test_tools_are_at_fault_only_where_they_alone_are_too_many() -> None:
    """What an agent's tools are at fault for is the operator's. Calls are the policy's."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [[]] * (wire.MAX_OBJECTS - 100)}}}
    call = pb.Call(id="c", name="f", arguments_json=json.dumps({"a": [[]] * 200}))
    spoken = pb.Message(role=pb.ROLE_ASSISTANT, calls=[call])
    request_ = pb.CompleteRequest(
        sequence=1, kind=pb.COMPLETION_KIND_ACTION, messages=[spoken], tools_json=json.dumps([tool])
    )
    refusal = wire.completion_request(request_.SerializeToString()).refusal
    assert refusal is not None
    assert refusal.param == "messages"
    tool["function"]["parameters"]["a"] = [[]] * wire.MAX_OBJECTS  # type: ignore[index]
    request_.tools_json = json.dumps([tool])
    refusal = wire.completion_request(request_.SerializeToString()).refusal
    assert refusal is not None
    assert refusal.param == "tools"
