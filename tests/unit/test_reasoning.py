"""Reasoning: on record and trained on, never given to the agent, whatever way it comes in."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from orchestrator.completion.base import CompletionRequest, Endpoint
from orchestrator.completion.chat import ChatCompleter
from orchestrator.completion.connect import connect
from orchestrator.completion.endpoints import endpoint
from orchestrator.completion.http import HttpClient
from orchestrator.completion.line import TokenLine, visible_text
from orchestrator.completion.reasoning import TAGS, Tags, opened_by, reasoning_chars, without_empty
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer, tokenizer_here
from orchestrator.completion.trajectory import trajectory
from orchestrator.errors import ConfigError, EnvironmentUnusable
from orchestrator.host.setup import completion_needs
from orchestrator.report.details import rollout_details
from orchestrator.run.groups import scored_data_group
from orchestrator.run.line import attempt_line
from orchestrator.scorers.manners import code_block
from orchestrator.settings.sources import load_config
from orchestrator.types import (
    Completion,
    CompletionKind,
    Group,
    Member,
    Message,
    Record,
    Sampling,
    Score,
    Task,
    Turn,
)
from tests.fakes.plans import TALK, an_attempt
from tests.fakes.tokenizer import tokenizer_folder
from tests.unit.test_verify import look_at_text, plain

STOP = ("</code>",)
CODE = "Thought: now.\n<code>\nprint(1)\n"
WHOLE, HARMONY, FINAL = "all of it", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_tokens=100, seed=1)


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


@pytest.mark.parametrize(
    ("text", "opened", "reasoning"),
    [
        ("plain answer", "", ""),
        ("<think>\nwell\n</think>\n\nanswer", "", "<think>\nwell\n</think>\n\n"),
        ("\n <think>a</think>b", "", "\n <think>a</think>"),
        ("[THINK]a[/THINK]b", "", "[THINK]a[/THINK]"),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "", None),
        ("<|channel|>final<|message|>b", "", None),
        ("<think>without an end <code>\nx\n", "", "<think>without an end <code>\nx\n"),
        ("well\n</think>\nanswer", "<think>", "well\n</think>\n"),
        ("still going", "<think>", "still going"),
        ("well</think>answer", None, "well</think>"),
        ("print('</think>')", "", ""),
        ("print('</think>')", None, ""),
        ("I cut at `</think>`.\n</think>\nprint('</think>')", None, "I cut at `</think>`.\n</think>\n"),
        ("x = '<think>a</think>'", None, ""),
        ("code that says <think>a</think>", "", ""),
        ("", "", ""),
        ("", None, ""),
        ("<think>a</think>\n<think>b</think>\nanswer", "", "<think>a</think>\n<think>b</think>\n"),
        ("well</thinking>answer", None, "well</thinking>"),
        ("<|channel|>commentary<|message|>I look.<|end|>", "", ""),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>a",
            "",
            WHOLE,
        ),
        (f"{HARMONY}a<|end|><|start|>assistant{HARMONY}b<|end|><|start|>assistant{FINAL}", "", WHOLE),
        (f"{HARMONY}a<|end|><|start|>assistant to=functions.f", "", f"{HARMONY}a<|end|>"),
        ("<|START_RESPONSE|>b", "", None),
        ("a<|END_THINKING|><|START_RESPONSE|>b", "<|START_THINKING|>", None),
        ("<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>", "", "<|START_THINKING|>a<|END_THINKING|>"),
    ],
)
def test_what_is_reasoning(text: str, opened: str | None, reasoning: str | None) -> None:
    expected = text if reasoning == WHOLE else text.removesuffix("b") if reasoning is None else reasoning
    assert text[: reasoning_chars(text, opened)] == expected


def test_a_template_may_begin_the_reasoning_itself() -> None:
    assert opened_by("<|im_start|>assistant\n<think>\n") == "<think>"
    assert opened_by("<think>\n\n</think>\n\n") == ""
    assert opened_by("") == ""


def test_code_in_the_reasoning_is_no_action(tokenizer: HubTokenizer) -> None:
    said = "<think>I could run <code>\nos.remove('x')\n"
    text, visible, thought = visible_text(tokenizer, tuple(tokenizer.encode(said + "</code>")), STOP)
    assert (visible, thought) == ("", len(text)), "sampling stopped in the middle of a thought"
    whole = f"<think>maybe <code>\nbad()\n</code> no</think>\n{CODE}</code>"
    text, visible, thought = visible_text(tokenizer, tuple(tokenizer.encode(whole)), STOP)
    assert visible == CODE
    completion = Completion(text, visible, "stop", None, None, 1, 9, reasoning_chars=thought)
    assert completion.unseen == "</code>"
    assert code_block(completion, ("<code>", "</code>")) == "\nprint(1)\n"


@pytest.mark.parametrize("tags", TAGS, ids=lambda tags: tags.opens)
def test_code_in_a_thought_of_any_family_is_no_action(tokenizer: HubTokenizer, tags: Tags) -> None:
    inside = "maybe <code>\nbad()\n</code> no"
    for close in tags.closes:
        behind = "" if close.endswith("<|message|>") else tags.answer
        thought = f"{inside}{close}\n{behind}"
        for whole, opened in ((f"{tags.opens}\n{thought}{CODE}", ""), (f"{thought}{CODE}", tags.opens)):
            ids = tuple(tokenizer.encode(whole + "</code>"))
            text, visible, chars = visible_text(tokenizer, ids, STOP, opened)
            assert (visible, text[chars:]) == (CODE, f"{CODE}</code>")
    cut = tuple(tokenizer.encode(f"{tags.opens}I could run <code>\nbad()\n</code>"))
    assert visible_text(tokenizer, cut, STOP)[1] == ""
    assert opened_by(f"<|im_start|>assistant\n{tags.opens}\n") == tags.opens
    assert without_empty(f"x\n{tags.opens}\n\n{tags.closes[0]}\n\n") == "x\n"


def test_the_table_holds_the_tags_of_the_families_that_think() -> None:
    known = {tags.opens: tags.closes for tags in TAGS}
    assert known["<|channel>thought"] == ("<channel|>",)
    assert known["◁think▷"] == ("◁/think▷",)
    assert {"<think>", "[THINK]", "<seed:think>", "<reasoning>", "<|START_THINKING|>"} < known.keys()


@pytest.mark.slow
def test_many_thoughts_are_read_in_linear_time() -> None:
    took = []
    for many in (8_000, 64_000):
        text = f"{HARMONY}<|end|>" * many
        began = time.process_time()
        assert reasoning_chars(text) == len(text)
        took.append(time.process_time() - began)
    assert took[1] < 24 * took[0]


def test_the_next_prompt_continues_the_line_with_the_reasoning_in_it(tokenizer: HubTokenizer) -> None:
    line = TokenLine(tokenizer, "</code>")
    ids = tuple(tokenizer.encode(f"<think>hm</think>\n{CODE}</code>"))
    text, visible, thought = visible_text(tokenizer, ids, STOP)
    completion = Completion(text, visible, "stop", ids, (-0.5,) * len(ids), 1, len(ids), reasoning_chars=thought)
    first = line.prompt(TALK)
    line.append(first, TALK, completion)
    said = Message("assistant", f"{visible.strip()}</code>")  # as the agent writes it into its history
    second = line.prompt((*TALK, said, Message("user", "Observation: 1")))
    assert second.segment == first.segment
    assert second.closing == "", "the stop string was sampled"
    assert second.ids[: len(first.ids) + len(ids)].tolist() == [*first.ids, *ids]


def _turn(text: str, sequence: int, kept: int, messages: tuple[Message, ...]) -> Turn:
    thought = reasoning_chars(text, None)
    completion = Completion(text, text[thought:], "stop", None, None, 5, 9, reasoning_chars=thought)
    return Turn(sequence, CompletionKind.ACTION, kept, messages, 0, None, "", completion, 0.0, 1.0)


def test_a_line_made_from_text_trains_the_reasoning_of_every_turn(tokenizer: HubTokenizer) -> None:
    told = (Message("assistant", "print(1)</code>"), Message("user", "Observation: 1"))
    turns = (_turn("<think>one</think>\nprint(1)", 1, 0, TALK), _turn("<think>two</think>\ndone", 2, 2, told))
    line = trajectory(Record(0.0, turns=turns), tokenizer, "</code>")
    assert line.messages[2].content == "<think>one</think>\nprint(1)</code>"
    trained = [i for i, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn]
    assert tokenizer.decode(trained) == "<think>one</think>\nprint(1)<think>two</think>\ndone"
    attempt = replace(an_attempt(), record=Record(0.0, turns=turns, answer="42"))
    member = Member(attempt, line, Score(1.0))
    group = plain(scored_data_group(Group(0, Task("task", "?", "42"), (member,), (attempt,))))
    assert look_at_text(group, {attempt.plan.rollout_id: plain(attempt_line(member))}, tokenizer).wrong == {}


def test_the_report_shows_it_apart() -> None:
    attempt = replace(an_attempt(), record=Record(0.0, turns=(_turn("<think>one</think>\nprint(1)", 1, 0, TALK),)))
    (completion,) = rollout_details(plain(attempt_line(attempt)))["completions"]
    assert (completion["reasoning"], completion["text"]) == ("<think>one</think>\n", "print(1)")


# ---------------------------------------------------------------- chat endpoints

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@asynccontextmanager
async def chatting(
    message: dict[str, Any], bodies: list[dict[str, Any]], finish: str = "stop"
) -> AsyncIterator[str]:
    async def chat(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 9}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def sampled(
    message: dict[str, Any], finish: str = "stop", **extras: Any
) -> tuple[Completion, dict[str, Any]]:
    bodies: list[dict[str, Any]] = []
    async with chatting(message, bodies, finish) as url:
        completer = ChatCompleter(HttpClient(Endpoint(url, "m", **extras)))
        try:
            request = CompletionRequest(TALK, None, STOP, SAMPLING, "r", "t", 0, 1)
            return await completer.sample(request), bodies[-1]
        finally:
            await completer.aclose()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_told_apart_is_the_beginning_of_the_text(name: str) -> None:
    completion, _ = await sampled({"content": "print(1)", name: "I add <code>"})
    assert completion.visible == "print(1)"
    assert completion.text == "<think>\nI add <code>\n</think>\n\nprint(1)"
    assert completion.reasoning == "<think>\nI add <code>\n</think>\n\n"


async def test_a_model_that_did_not_come_to_an_answer_said_nothing() -> None:
    for message in ({"content": None, "reasoning_content": "hm"}, {"content": "", "reasoning": "hm"}):
        completion, _ = await sampled(message, "length")
        assert (completion.visible, completion.finish_reason) == ("", "length")
        assert "hm" in completion.reasoning


async def test_reasoning_within_the_answer_is_found() -> None:
    for text in ("<think>a</think>b", "a</think>b"):
        completion, _ = await sampled({"content": text})
        assert (completion.visible, completion.text) == ("b", text)


# ---------------------------------------------------------------- what is asked for


async def test_what_the_template_is_told_goes_out_to_a_chat_endpoint() -> None:
    config = load_config(
        ["--env.chat_template_kwargs", '{"enable_thinking": false}', "--openai.n_kwarg_is_ignored"]
    )
    there = endpoint(completion_needs(config), config.openai[0])
    _, body = await sampled({"content": "x"}, chat_extras=there.chat_extras, takes_n=there.takes_n)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "n" not in body


@pytest.mark.parametrize(
    ("flags", "extras"),
    [
        ([], {}),
        (["--env.thinking_mode"], {"reasoning": {"enabled": True}}),
        (["--env.reasoning_effort", "none"], {"reasoning": {"enabled": False, "effort": "none"}}),
        (["--env.reasoning_effort", "low"], {"reasoning": {"enabled": True, "effort": "low"}}),
        (["--env.max_reasoning_tokens", "2048"], {"reasoning": {"enabled": True, "max_tokens": 2048}}),
    ],
)
def test_a_hosted_service_is_asked_as_atropos_asks(flags: list[str], extras: dict[str, Any]) -> None:
    for address in ("https://openrouter.ai/api/v1", "https://api.openai.com/v1"):
        config = load_config(["--openai.base_url", address, *flags])
        assert endpoint(completion_needs(config), config.openai[0]).chat_extras == extras


def test_what_a_service_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_reasoning_tokens"):
        load_config(["--env.max_reasoning_tokens", "2048", "--env.reasoning_effort", "low"])


# ---------------------------------------------------------------- the template

THINKING = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if loop.last and message.role == 'assistant' -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{{- message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{%- endif -%}"
)


@pytest.fixture
def thinking(tmp_path: Path) -> Path:
    """A tokenizer whose template thinks unless it is told otherwise, as Qwen3's."""
    import shutil

    from transformers import AutoTokenizer

    folder = tmp_path / "thinking"
    shutil.copytree(tokenizer_folder(), folder)
    made = AutoTokenizer.from_pretrained(str(folder))
    made.chat_template = THINKING
    made.save_pretrained(str(folder))
    return folder


def test_the_template_is_told(thinking: Path) -> None:
    told = load_tokenizer(str(thinking), {"enable_thinking": False})
    assert told.render(TALK, generation_prompt=True).endswith("<think>\n\n</think>\n\n")
    assert load_tokenizer(str(thinking)).render(TALK, generation_prompt=True).endswith("assistant\n")
    assert told.unknown_template_kwargs == []


@pytest.mark.parametrize("name", ["messages", "conversation", "chat_template", "add_generation_prompt", "tools"])
def test_nothing_but_the_template_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match=f"chat_template_kwargs: {name}"):
        load_tokenizer(str(tokenizer_folder()), {name: "x"})
    assert tokenizer_here(str(tokenizer_folder()), {name: "x"}) is None, "a run.json may name anything"


def test_no_empty_reasoning_stands_before_the_reasoning(thinking: Path) -> None:
    line = trajectory(
        Record(0.0, turns=(_turn("<think>two</think>\ndone", 1, 0, TALK),)), load_tokenizer(str(thinking)), ""
    )
    text = load_tokenizer(str(thinking)).decode(line.tokens_T)
    assert "<|im_start|>assistant\n<think>two</think>\ndone" in text
    assert "<think>\n\n</think>" not in text


async def test_what_the_template_does_not_know_is_refused(tokenizer: HubTokenizer) -> None:
    from tests.fakes.inference import ScriptedServer, always

    misspelt = load_tokenizer(str(tokenizer_folder()), {"enable_thinkng": False})
    async with ScriptedServer("vllm", always("x")) as server:
        with pytest.raises(EnvironmentUnusable, match="enable_thinkng"):
            await connect(Endpoint(server.base_url, server.model.name), misspelt)
        asked = Endpoint(server.base_url, server.model.name, chat_extras={"reasoning": {"enabled": True}})
        for tokens in ("auto", "retokenize"):
            with pytest.raises(EnvironmentUnusable, match="chat_template_kwargs"):
                await connect(asked, tokenizer, tokens=tokens)  # type: ignore[arg-type]
