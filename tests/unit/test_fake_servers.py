"""The scripted inference server's dialects, asked by a plain HTTP client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from orchestrator.completion.statuses import is_context_length
from tests.fakes.inference import CLUMSY, Awkward, Fault, Model, ScriptedServer, always, logprob
from tests.fakes.inference.client import STOP, TASK, a_body, ask, prompt_of, told
from tests.fakes.inference.dialects import DIALECTS
from tests.fakes.inference.dialects.openai import OpenAIDialect
from tests.fakes.inference.dialects.sglang import SglangDialect
from tests.fakes.tokenizer import tokenizer_folder

TEXT = "Thought: I add.\n<code>\nprint('né 日本')\n</code>"
PLAIN = "Thought: I add.\n<code>\nprint(1 + 1)\n</code>"
ID_DIALECTS = ("vllm", "sglang", "llamacpp", "atropos")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tokenizer_folder())


# ---------------------------------------------------------------- completions


@pytest.mark.parametrize("dialect", ID_DIALECTS)
async def test_ids_and_log_probs_are_those_of_the_log(dialect: str, model: Model) -> None:
    text = PLAIN if dialect == "llamacpp" else TEXT
    prompt = prompt_of(model)
    async with ScriptedServer(dialect, always(text), awkward=replace(CLUMSY, end_inside=0, cut=0)) as server:
        for _ in range(10):
            status, answer = await ask(server, a_body(dialect, prompt))
            assert status == 200
            served = server.log.completions[-1]
            ids, logprobs, _, finish = told(dialect, answer)
            assert (ids, logprobs, finish) == (served.sampled_ids, served.logprobs, "stop")
            assert logprobs == [logprob(i, len(prompt) + n) for n, i in enumerate(ids)]
            assert all(-5 < p < 0 for p in logprobs)
            assert served.prompt_ids == prompt
            assert model.decode(ids) == served.sampled_text
            assert text in served.sampled_text
        assert len({tuple(s.sampled_ids) for s in server.log.completed}) > 5


@pytest.mark.parametrize(
    ("dialect", "text"),
    [("vllm", PLAIN), ("sglang", PLAIN + "\n"), ("llamacpp", PLAIN.removesuffix("</code>")), ("atropos", PLAIN)],
)
async def test_the_stop_string_is_sampled_and_the_text_cut_as_each_server_does(
    dialect: str, text: str, model: Model
) -> None:
    async with ScriptedServer(dialect, always(PLAIN + " and more"), awkward=Awkward(beyond_stop=1)) as server:
        _, answer = await ask(server, a_body(dialect, prompt_of(model)))
        assert server.log.completions[-1].stopped_by == "</code>"
    async with ScriptedServer(dialect, always(PLAIN), awkward=Awkward(beyond_stop=1), seed=1) as server:
        _, answer = await ask(server, a_body(dialect, prompt_of(model)))
    ids, logprobs, visible, finish = told(dialect, answer)
    assert finish == "stop"
    assert len(logprobs) == len(ids)
    assert model.decode(ids).rstrip("\n") == PLAIN
    assert model.decode(ids) != PLAIN, "the last token carries text beyond the stop string"
    assert visible is not None
    assert visible.rstrip("\n") == text.rstrip("\n")
    assert (visible == PLAIN) == (dialect in ("vllm", "atropos"))


@pytest.mark.parametrize("dialect", ID_DIALECTS)
async def test_without_a_stop_string_the_turn_ends_in_the_end_token(dialect: str, model: Model) -> None:
    async with ScriptedServer(dialect, always(PLAIN)) as server:
        _, answer = await ask(server, a_body(dialect, prompt_of(model), stop=()))
    ids, logprobs, _, finish = told(dialect, answer)
    assert (ids[-1], finish, len(logprobs)) == (model.end_id, "stop", len(ids))
    assert model.decode(ids[:-1]) == PLAIN


@pytest.mark.parametrize("dialect", ID_DIALECTS)
async def test_max_tokens_cut_in_the_middle_of_the_code(dialect: str, model: Model) -> None:
    async with ScriptedServer(dialect, always(PLAIN)) as server:
        _, answer = await ask(server, a_body(dialect, prompt_of(model), max_tokens=9))
    ids, logprobs, _, finish = told(dialect, answer)
    assert (len(ids), len(logprobs), finish) == (9, 9, "length")
    assert PLAIN.startswith(model.decode(ids))


async def test_vllm_and_sglang_trim_what_they_are_not_asked_to_keep(model: Model) -> None:
    prompt = prompt_of(model)
    async with ScriptedServer("vllm", always(PLAIN)) as server:
        _, answer = await ask(server, {"prompt": prompt, "stop": STOP, "max_tokens": 99})
    (choice,) = answer["choices"]
    assert choice["text"] == PLAIN.removesuffix("</code>")
    assert (choice["token_ids"], choice["logprobs"], choice["stop_reason"]) == (None, None, "</code>")
    async with ScriptedServer("sglang", always(PLAIN)) as server:
        _, answer = await ask(server, {"input_ids": prompt, "sampling_params": {"stop": STOP}})
    assert answer["text"] == PLAIN.removesuffix("</code>")
    assert "output_token_logprobs" not in answer["meta_info"]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "</code>"}


async def test_sampling_parameters_left_to_the_server_are_noted(model: Model) -> None:
    async with ScriptedServer("sglang", always(PLAIN)) as server:
        await ask(server, {"input_ids": [5], "sampling_params": {"temperature": 1.0}})
        assert "top_p" in server.log.completions[0].left_to_default
        assert "temperature" not in server.log.completions[0].left_to_default


async def test_the_weight_version_may_change_while_serving(model: Model) -> None:
    async with ScriptedServer("sglang", always(PLAIN), model=Model(tokenizer_folder())) as server:
        body = a_body("sglang", prompt_of(model))
        server.model.weight_version = "7"
        _, answer = await ask(server, body)
        assert answer["meta_info"]["weight_version"] == server.log.completions[0].weight_version == "7"


# ---------------------------------------------------------------- llama.cpp's own ways


async def test_llamacpp_in_one_piece_drops_the_log_probs_of_the_stop_string(model: Model) -> None:
    async with ScriptedServer("llamacpp", always(PLAIN)) as server:
        _, answer = await ask(server, a_body("llamacpp", prompt_of(model)) | {"stream": False})
    dropped = len(model.encode("</code>"))
    assert len(answer["tokens"]) - len(answer["completion_probabilities"]) == dropped > 0
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", "</code>")


async def test_llamacpp_streamed_never_tells_ids_that_end_within_a_character(model: Model) -> None:
    async with ScriptedServer("llamacpp", always("a🦙é日ok")) as server:
        _, events = await ask(server, a_body("llamacpp", prompt_of(model)))
        sampled = server.log.completions[0].sampled_ids
    ids = [i for event in events for i in event["tokens"]]
    within = [i for n, i in enumerate(sampled) if model.decode(sampled[: n + 1]).endswith("\ufffd")]
    assert within
    assert ids == [i for n, i in enumerate(sampled) if not model.decode(sampled[: n + 1]).endswith("\ufffd")]
    assert "".join(event["content"] for event in events) == "a🦙é日ok"
    assert events[-1]["tokens_predicted"] == len(sampled)
    assert bytes(events[1]["completion_probabilities"][0]["bytes"]).decode() == "🦙"


async def test_llamacpp_gives_as_many_likely_ids_as_asked_for(model: Model) -> None:
    prompt = prompt_of(model)
    async with ScriptedServer("llamacpp", always(PLAIN)) as server:
        body = a_body("llamacpp", prompt, max_tokens=1)
        for count in (3, 10_000):
            _, events = await ask(server, body | {"n_probs": count})
            top = events[0]["completion_probabilities"][0]["top_logprobs"]
            assert len(top) == min(count, model.size)
            assert top == sorted(top, key=lambda entry: -entry["logprob"])
            assert all(entry["logprob"] == logprob(entry["id"], len(prompt)) for entry in top)


async def test_the_prefix_cache_holds_all_earlier_ids_but_the_last_sampled(model: Model) -> None:
    async with ScriptedServer("llamacpp", always(PLAIN)) as server:
        line = prompt_of(model)
        _, events = await ask(server, a_body("llamacpp", line))
        assert events[-1]["timings"]["cache_n"] == 0
        for _ in range(3):
            line = [*line, *(i for event in events for i in event["tokens"])]
            known = len(line) - 1
            line += model.encode("<|im_end|>\n<|im_start|>user\nObservation:<|im_end|>\n<|im_start|>assistant\n")
            _, events = await ask(server, a_body("llamacpp", line))
            assert events[-1]["timings"]["cache_n"] == known
            assert events[-1]["tokens_evaluated"] == len(line)
        await ask(server, a_body("llamacpp", line))
        assert server.log.completions[-1].cached == len(line) - 1, "the last id is always evaluated"


async def test_llamacpp_helpers_answer(model: Model) -> None:
    async with ScriptedServer("llamacpp") as server:
        _, tokens = await ask(server, {"content": "<|im_start|>né", "add_special": False}, "/tokenize")
        assert tokens["tokens"] == model.encode("<|im_start|>né")
        messages = [{"role": m.role, "content": m.content} for m in TASK]
        _, rendered = await ask(server, {"messages": messages}, "/apply-template")
        assert rendered["prompt"] == model.render(TASK)
        assert (await ask(server, {"text": "x"}, "/tokenize"))[0] == 400


# ---------------------------------------------------------------- chat


async def test_chat_gives_text_usage_and_log_probs(model: Model) -> None:
    async with ScriptedServer("openai", always(PLAIN)) as server:
        status, answer = await ask(server, a_body("openai", []))
        served = server.log.completions[0]
    (choice,) = answer["choices"]
    assert status == 200
    assert choice["message"]["content"] == PLAIN.removesuffix("</code>")
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"]
    assert "id" not in entries[0]
    assert answer["usage"]["prompt_tokens"] == len(served.prompt_ids) == len(prompt_of(model))
    assert answer["usage"]["completion_tokens"] == len(served.sampled_ids)


async def test_chat_entries_have_ids_where_asked_for_and_on_llamacpp_and_vllm(model: Model) -> None:
    for dialect in (OpenAIDialect(ids_in_logprobs=True), DIALECTS["llamacpp"](), DIALECTS["vllm"]()):
        async with ScriptedServer(dialect, always(PLAIN)) as server:
            body = a_body("openai", []) | {"stop": None, "return_token_ids": True}
            _, answer = await ask(server, body, "/v1/chat/completions")
            sampled = server.log.completions[0].sampled_ids
        (choice,) = answer["choices"]
        if dialect.name == "vllm":
            assert (choice["token_ids"], len(choice["logprobs"]["content"])) == (sampled, len(sampled))
            continue
        ids = [entry["id"] for entry in choice["logprobs"]["content"]]
        assert ids == (sampled[:-1] if dialect.name == "openai" else sampled)


async def test_hosted_chat_refuses_what_openai_does_not_know(model: Model) -> None:
    async with ScriptedServer("openai-hosted", always(PLAIN)) as server:
        status, answer = await ask(server, a_body("openai", []) | {"top_k": 5, "min_p": 0.0})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["message"].endswith("min_p, top_k")
        assert (await ask(server, a_body("openai", [])))[0] == 200
    async with ScriptedServer(OpenAIDialect(hosted=True, new_limit=True), always(PLAIN)) as server:
        status, answer = await ask(server, a_body("openai", []))
        assert status == 400
        assert "max_completion_tokens" in answer["error"]["message"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("dialect", [*ID_DIALECTS, "openai"])
async def test_unknown_fields_are_refused(dialect: str, model: Model) -> None:
    async with ScriptedServer(dialect, always(PLAIN)) as server:
        status, answer = await ask(server, a_body(dialect, [5, 6]) | {"wisdom": 1})
        assert status == (500 if dialect == "atropos" else 400)
        assert dialect == "atropos" or "wisdom" in json.dumps(answer)
        assert "wisdom" in server.log.all[0].refusal
        assert not server.log.completions


async def test_sglang_fails_on_unknown_sampling_parameters_without_a_word(model: Model) -> None:
    async with ScriptedServer(SglangDialect(seeded=False), always(PLAIN)) as server:
        status, answer = await ask(server, {"input_ids": [5], "sampling_params": {"sampling_seed": 1}})
        assert (status, answer) == (500, "Internal Server Error")
        assert "'sampling_seed'" in server.log.all[0].refusal
        assert (await ask(server, {"input_ids": [5], "sampling_params": {"top_k": 1}}))[0] == 200


@pytest.mark.parametrize(
    ("dialect", "change"),
    [
        ("vllm", {"prompt": None}),
        ("vllm", {"prompt": [10**6]}),
        ("vllm", {"model": "another"}),
        ("vllm", {"temperature": -1}),
        ("vllm", {"logprobs": "many"}),
        ("sglang", {"input_ids": None}),
        ("sglang", {"input_ids": [10**6]}),
        ("sglang", {"sampling_params": {"top_p": 0}}),
        ("llamacpp", {"prompt": [10**6]}),
        ("llamacpp", {"n_predict": "x"}),
        ("llamacpp", {"n_predict": -7}),
        ("atropos", {"prompt": None}),
        ("atropos", {"temperature": "hot"}),
        ("openai", {"messages": []}),
        ("openai", {"model": "another"}),
    ],
)
async def test_bad_requests_are_refused_and_logged(dialect: str, change: dict[str, Any], model: Model) -> None:
    async with ScriptedServer(dialect, always(PLAIN)) as server:
        status, _ = await ask(server, a_body(dialect, [5, 6]) | change)
        assert status in (400, 404, 500)
        (served,) = server.log.all
        assert (served.status, served.call, bool(served.refusal)) == (status, None, True)


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp", "openai", "openai-hosted"])
async def test_a_prompt_that_is_too_long_is_refused_in_the_servers_own_words(dialect: str) -> None:
    short = Model(tokenizer_folder(), context_length=20)
    async with ScriptedServer(dialect, always(PLAIN), model=short) as server:
        status, answer = await ask(server, a_body(dialect, [5] * 21))
        assert is_context_length(status, json.dumps(answer))
    async with ScriptedServer(dialect, always(PLAIN), faults=(Fault("context_length"),)) as server:
        status, answer = await ask(server, a_body(dialect, [5] * 21))
        assert is_context_length(status, json.dumps(answer))


async def test_llamacpp_ends_a_completion_where_the_context_does(model: Model) -> None:
    short = Model(tokenizer_folder(), context_length=30)
    async with ScriptedServer("llamacpp", always(PLAIN), model=short) as server:
        _, events = await ask(server, a_body("llamacpp", [5] * 25))
    assert (events[-1]["stop_type"], events[-1]["truncated"], events[-1]["tokens_predicted"]) == ("limit", True, 5)


@pytest.mark.parametrize("dialect", [*ID_DIALECTS, "openai"])
async def test_only_the_right_key_is_taken_and_it_is_logged(dialect: str) -> None:
    async with ScriptedServer(dialect, always(PLAIN), api_key="sk-right") as server:
        assert (await ask(server, a_body(dialect, [5])))[0] == 401
        status, _ = await ask(server, a_body(dialect, [5]), Authorization="Bearer sk-right")
        assert status == 200
        assert server.log.all[-1].headers["authorization"] == "Bearer sk-right"


@pytest.mark.parametrize(
    ("dialect", "owner"), [("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llamacpp"), ("openai", "system")]
)
async def test_the_model_list_tells_the_kind_of_server(dialect: str, owner: str) -> None:
    async with ScriptedServer(dialect) as server, aiohttp.ClientSession() as session:
        async with session.get(f"{server.base_url}/models") as response:
            (card,) = (await response.json())["data"]
        assert (card["id"], card["owned_by"]) == ("scripted", owner)
        async with session.get(f"{server.url}/nowhere") as response:
            assert response.status == 404
