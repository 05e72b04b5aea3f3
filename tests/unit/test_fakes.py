"""The parts of the scripted inference server: other tests rely on what it says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.types import Message
from tests.fakes.inference import (
    CLUMSY,
    Awkward,
    Call,
    ChatMessage,
    Fault,
    FaultPlan,
    Model,
    Reply,
    ScriptedServer,
    always,
    by_task,
    read_script,
)
from tests.fakes.inference.client import STOP, TASK, a_body, ask, prompt_of
from tests.fakes.inference.sampling import sample
from tests.fakes.tokenizer import DEFAULT_SYSTEM, tokenizer_folder

ROOT = Path(__file__).parents[2]
TEXT = "Thought: I add.\n<code>\nprint('né 日本')\n</code>"
PLAIN = "Thought: I add.\n<code>\nprint(1 + 1)\n</code>"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tokenizer_folder())


# ---------------------------------------------------------------- tokenizer


def test_the_folder_loads_as_any_models_tokenizer_and_gives_the_servers_ids(model: Model) -> None:
    ours = load_tokenizer(str(tokenizer_folder()))
    messages = (Message("system", TASK[0].content), Message("user", TASK[1].content))
    text = ours.render(messages, generation_prompt=True)
    assert text == model.render(TASK)
    assert ours.encode(text) == model.encode(text)
    broken = [*ours.encode("né 🦙"), 300]
    assert ours.decode(broken) == model.decode(broken)
    assert ours.size == model.size == 1500


def test_the_template_puts_in_a_system_text_of_its_own_where_there_is_none(model: Model) -> None:
    assert DEFAULT_SYSTEM in model.render((ChatMessage("user", "hi"),))
    assert DEFAULT_SYSTEM not in model.render(TASK)


def test_a_tokenizer_of_another_size_gives_other_ids(model: Model) -> None:
    other = Model(tokenizer_folder(900))
    assert other.encode(TEXT) != model.encode(TEXT)
    assert other.decode(other.encode(TEXT)) == TEXT


def test_a_rendered_prompt_reads_back_as_its_messages(model: Model) -> None:
    said = (*TASK, ChatMessage("assistant", "one\n"), ChatMessage("user", "Observation:\ntwo"))
    assert model.read_messages(model.render(said)) == said


# ---------------------------------------------------------------- awkward sampling


def test_other_ids_of_the_same_text_decode_to_it_also_within_characters(model: Model) -> None:
    canonical, within = model.encode(TEXT), 0
    for seed in range(50):
        awkward = Awkward(split=0.4)
        got = sample(model, TEXT, stop=STOP, max_tokens=500, awkward=awkward, rng=Random(seed))
        assert model.decode(got.ids) == TEXT
        assert model.encode(model.decode(got.ids)) == canonical
        assert got.ids != canonical
        assert got.stopped_by == "</code>"
        within += any(model.decode([i]) == "\ufffd" for i in got.ids)
    assert within == 50


def test_every_oddity_comes_when_it_is_certain(model: Model) -> None:
    def drawn(**certain: float) -> tuple[str, Any]:
        got = sample(model, PLAIN, stop=STOP, max_tokens=500, awkward=Awkward(**certain), rng=Random(1))
        return model.decode(got.ids), got

    text, _ = drawn(leading=1)
    assert text != PLAIN
    assert text.lstrip() == PLAIN
    text, got = drawn(end_after_stop=1)
    assert (text, got.stopped_by) == (PLAIN + "<|im_end|>", model.end_id)
    text, got = drawn(end_inside=1)
    assert text.endswith("<|im_end|>")
    assert PLAIN.startswith(text.removesuffix("<|im_end|>"))
    assert len(text.removesuffix("<|im_end|>")) < len(PLAIN)
    text, got = drawn(end_after_stop=1, other_end=1)
    assert got.ids[-1] == model.end_of_text_id
    text, got = drawn(cut=1)
    assert (got.finish, got.stopped_by) == ("length", None)
    assert PLAIN.startswith(text)
    text, got = drawn(beyond_stop=1)
    assert text.rstrip("\n") == PLAIN
    assert model.decode(got.ids[-1:]) in (">\n", ">\n\n")
    got = sample(model, "plan", stop=(), max_tokens=9, awkward=Awkward(trailing=1), rng=Random(1))
    assert model.decode(got.ids[:-1]) != "plan"
    assert model.decode(got.ids[:-1]).rstrip() == "plan"


def test_an_end_token_in_the_text_ends_the_turn_unless_it_is_ignored(model: Model) -> None:
    got = sample(model, "one<|im_end|>two", stop=(), max_tokens=50, rng=Random(1))
    assert model.decode(got.ids) == "one<|im_end|>"
    got = sample(model, "one<|im_end|>two", stop=(), max_tokens=50, ignore_end=True, rng=Random(1))
    assert model.decode(got.ids) == "one<|im_end|>two<|im_end|>"


async def test_the_same_requests_in_the_same_order_draw_the_same(model: Model) -> None:
    drawn = []
    for seed in (3, 3, 4):
        async with ScriptedServer("vllm", always(TEXT), awkward=CLUMSY, seed=seed) as server:
            for _ in range(4):
                await ask(server, a_body("vllm", prompt_of(model)))
            drawn.append([served.sampled_ids for served in server.log.completions])
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]


async def test_a_seed_draws_the_same_each_time_and_keeps_its_place_in_the_group(model: Model) -> None:
    script = by_task({"": [["one"], ["two"], ["three"]]})
    async with ScriptedServer("vllm", script, awkward=Awkward(split=0.5, leading=0.5)) as server:
        for seed in (7, 8, 7, 9, 8):
            await ask(server, a_body("vllm", prompt_of(model)) | {"seed": seed})
        first, second, again, third, second_again = server.log.completions
    assert [s.call.same for s in server.log.completions if s.call] == [0, 1, 0, 2, 1]
    assert first.sampled_ids == again.sampled_ids
    assert second.sampled_ids == second_again.sampled_ids
    assert len({s.sampled_text.strip() for s in (first, second, third)}) == 3


# ---------------------------------------------------------------- scripts


def a_call(task: str, *said: str, same: int = 0, seed: int | None = None) -> Call:
    messages = (ChatMessage("user", f"New task:\n{task}"), *(ChatMessage("assistant", text) for text in said))
    return Call(0, messages, f"New task:\n{task}", len(said), len(said), same, seed, 100, ())


async def test_a_call_knows_its_turn_from_the_conversation_alone(model: Model) -> None:
    calls: list[Call] = []

    def script(call: Call) -> str:
        calls.append(call)
        return PLAIN

    system = ChatMessage("system", "An example:\nObservation: nothing")
    old = (ChatMessage("user", "New task:\nold"), ChatMessage("assistant", "done"))
    seen = ChatMessage("user", "Observation:\nb")
    now = (ChatMessage("user", "New task:\nnew"), ChatMessage("assistant", "a"), seen)
    async with ScriptedServer("vllm", script) as server:
        await ask(server, a_body("vllm", prompt_of(model, (system, *old, *now))))
        await ask(server, a_body("vllm", prompt_of(model, (system, *old, *now))))
    first, second = calls
    assert (first.task, first.turn, first.observations, first.said) == ("New task:\nnew", 1, 1, ("a",))
    assert [(c.number, c.same) for c in calls] == [(0, 0), (1, 1)]
    assert second.messages == (system, *old, *now)


def test_the_rollouts_of_a_task_are_dealt_out_and_followed(model: Model) -> None:
    script = by_task({"cats": [["a1", "a2"], ["b1", "b2</code>", "b3"]], "": [["else"]]})
    assert [script(a_call("cats", same=n)) for n in range(4)] == ["a1", "b1", "a1", "b1"]
    assert script(a_call("cats", "a1", same=5)) == "a2"
    assert script(a_call("cats", "b1", "b2", same=4)) == "b3"
    assert script(a_call("cats", "b1", "b2</code>", "b3", "b3")) == "b3"
    assert script(a_call("dogs")) == "else"
    by_seed = by_task({"cats": [["a1"], ["b1"]]}, by="seed")
    assert [by_seed(a_call("cats", seed=n)) for n in (4, 7)] == ["a1", "b1"]


def test_a_script_in_json_knows_tasks_turns_and_faults() -> None:
    script, faults = read_script(
        {
            "tasks": [{"task": "cats", "rollouts": [["a", {"text": "cut", "length": True, "delay_s": 0.5}]]}],
            "default": "no idea",
            "delay_s": 0.25,
            "faults": [{"kind": "429", "calls": [0], "retry_after_s": 1}],
        }
    )
    assert script(a_call("cats")) == Reply("a", delay_s=0.25)
    assert script(a_call("cats", "a")) == Reply("cut", length=True, delay_s=0.5)
    assert script(a_call("dogs")) == Reply("no idea", delay_s=0.25)
    assert faults.meets(a_call("cats")) == Fault("429", calls=[0], retry_after_s=1)
    with pytest.raises(ValueError, match="rollout"):
        read_script({"tasks": [{"task": "cats", "rollout": []}]})
    with pytest.raises(ValueError, match="no fault"):
        read_script({"faults": [{"kind": "418"}]})


def test_faults_meet_the_calls_they_are_meant_for() -> None:
    def met(fault: Fault, *calls: Call) -> list[bool]:
        plan = FaultPlan((fault,), seed=1)
        return [plan.meets(call) is not None for call in calls]

    numbered = [replace(a_call("cats"), number=n) for n in range(4)]
    probe = replace(a_call("cats"), number=None)
    assert met(Fault("500", calls=[1, 3]), *numbered) == [False, True, False, True]
    assert met(Fault("500", times=2), *numbered) == [True, True, False, False]
    assert met(Fault("500", pattern="dog"), a_call("cats"), a_call("a dog")) == [False, True]
    assert met(Fault("500"), probe) == [False]
    assert met(Fault("500", probes=True), probe) == [True]
    many = [replace(a_call("cats"), number=n) for n in range(1000)]
    assert 200 < sum(met(Fault("500", ratio=0.3), *many)) < 400


# ---------------------------------------------------------------- log and program


async def test_probes_are_answered_and_kept_apart(model: Model) -> None:
    faults = (Fault("500", calls=[0]),)
    async with ScriptedServer("vllm", always(PLAIN), faults=faults) as server:
        body = a_body("vllm", prompt_of(model))
        probe = {"x-orchestrator-probe": "1"}
        assert [(await ask(server, body, **headers))[0] for headers in (probe, {}, {})] == [200, 500, 200]
        log = server.log
        assert [len(part) for part in (log.probes, log.completions, log.completed)] == [1, 2, 1]


async def test_delays_and_faults_of_a_script_are_not_for_probes(model: Model) -> None:
    script = always(Reply(PLAIN, delay_s=3600, fault=Fault("500")))
    async with ScriptedServer("vllm", script, delay_s=3600) as server:
        body = a_body("vllm", prompt_of(model))
        assert (await ask(server, body, **{"x-orchestrator-probe": "1"}))[0] == 200


async def test_two_servers_share_nothing(model: Model) -> None:
    async with ScriptedServer("vllm", always("a")) as one, ScriptedServer("sglang", always("b")) as other:
        await ask(one, a_body("vllm", prompt_of(model)))
        await ask(other, a_body("sglang", prompt_of(model)))
        assert [s.sampled_text for s in one.log.all] == ["a<|im_end|>"]
        assert [s.sampled_text for s in other.log.all] == ["b<|im_end|>"]
        assert other.log.all[0].cached == 0
