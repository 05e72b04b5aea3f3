"""A real model on a real llama.cpp server: the ids recorded are those it sampled, and its own prefix
cache sees one line. Skipped with the reason where model or server cannot be had."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import AutoTokenizer

from orchestrator.completion.base import Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.llamacpp import LlamaCppCompleter
from orchestrator.completion.startup import Patience, Wait
from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest, CallMessage
from orchestrator.types import CompletionKind, Message, Record, Sampling, Wishes
from tests.fakes.plans import a_plan, an_agent

pytestmark = pytest.mark.full
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, str]]:
    command = [sys.executable, "-m", "orchestrator.local_model", "serve", "--model", MODEL, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            if not line:
                said = process.stderr.read().strip().splitlines() or ["no word why"]
                pytest.skip(f"no real model here: {said[-1]}")
            yield json.loads(line)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def fetched() -> dict[str, str]:
    """Where weights and tokenizer are."""
    command = [sys.executable, "-m", "orchestrator.local_model", "fetch", "--model", MODEL]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"no real model here: {(ended.stderr.strip().splitlines() or ['no word why'])[-1]}")
    told: dict[str, str] = json.loads(ended.stdout)
    return told


async def test_a_real_server_that_is_still_loading_is_waited_for_and_is_exact() -> None:
    """AgentRequest from its start on: connections are refused, then it says that it is loading, then it serves."""
    told = await asyncio.to_thread(fetched)
    tokenizer = await asyncio.to_thread(load_tokenizer, told["tokenizer"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "orchestrator.local_model", "serve", "--model", MODEL, "--port", str(port)]
    waits: list[Wait] = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            completer = await connect(
                Endpoint(f"http://127.0.0.1:{port}/v1", MODEL, "", 300.0),
                tokenizer,
                notes=(notes := []),
                # Often, so that a small model is met while it loads.
                patience=Patience(600.0, waits.append, sleep=lambda seconds: asyncio.sleep(0.02)),
            )
            await completer.aclose()
        finally:
            process.terminate()
    assert isinstance(completer, LlamaCppCompleter)
    assert notes == []
    *answers, last = [wait.answer for wait in waits]
    assert last == ""
    kinds = list(dict.fromkeys("refused" if "connection failed" in answer else answer[:8] for answer in answers))
    assert kinds in (["refused"], ["refused", "HTTP 503"]), "the second one unless it loads within a look"


class Watched(LlamaCppCompleter):
    """Keeps the last event of every answer: what the server says of prompt and cache."""

    def watch(self) -> list[dict[str, Any]]:
        ends: list[dict[str, Any]] = []
        dialect = self.dialect
        read = dialect.read

        def reading(answer: Any) -> Any:
            ends.append(answer[-1])
            return read(answer)

        dialect.read = reading  # type: ignore[method-assign]
        return ends


@pytest.mark.timeout(1200)  # other work on the cores makes it spin
@pytest.mark.parametrize(
    "task",
    [
        "Count from one to ten in words.",
        "Write three words of Greek and some emoji: 🙂🙃",
        "请写一首关于山和水的长诗，用很多表情符号🙂🌊🏔️：",  # answered with bytes that are no text, too
    ],
)
async def test_a_real_episode_is_one_line_that_the_server_s_cache_confirms(
    served: dict[str, str], task: str
) -> None:
    tokenizer = await asyncio.to_thread(load_tokenizer, served["tokenizer"])
    completer = await connect(
        Endpoint(served["base_url"], served["model_name"], "", 300.0), tokenizer, tokens="exact"
    )
    assert isinstance(completer, LlamaCppCompleter)
    ends = Watched.watch(completer)  # type: ignore[arg-type]
    try:
        lease = Lease(
            a_plan(sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=40, seed=11)), completer, tokenizer, {}
        )
        talk = (Message("system", "You are a small model."), Message("user", task))
        for number in range(1, 5):
            reply = await lease.complete(AgentRequest(number, CompletionKind.ACTION, talk), str(number).encode())
            assert reply.completion is not None, await lease.ended()
            said = reply.completion.visible
            if said and not said.strip().endswith("</code>"):
                said += "</code>"
            talk = (*talk, Message("assistant", said.strip()), Message("user", f"Observation:\n{number}"))
    finally:
        await completer.aclose()
    assert {turn.segment for turn in lease.turns} == {0}
    line = trajectory(Record(0.0, turns=tuple(lease.turns)), tokenizer, "</code>")
    sampled = [i for turn in lease.turns for i in turn.completion.tokens_T or ()]
    assert [t for t, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn] == sampled
    assert line.logprobs_T is not None
    assert all(p <= 0 for p, learn in zip(line.logprobs_T, line.trained_T, strict=True) if learn)
    if len(ends) == len(lease.turns):  # no completion had to be asked for again
        before = 0
        for turn, end in zip(lease.turns, ends, strict=True):
            if before:
                # The last id before a stop is not in the cache: it was sampled, never evaluated.
                assert end["timings"]["cache_n"] == before - 1
            before += len(turn.prompt_ids or ()) + len(turn.completion.tokens_T or ())
            assert end["tokens_evaluated"] + end["tokens_predicted"] == before


_PRINTS_TOOLS = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<tool_call>{"name": ...}</tool_call><|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{%- for c in m.tool_calls %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Bonn"]},
        "days": {"type": "integer"},
        "note": {"$ref": "#/$defs/note"},
    },
    "required": ["city", "days", "note"],
    "$defs": {"note": {"type": "string", "maxLength": 8}},
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
async def test_a_demanded_call_is_held_to_its_schema(served: dict[str, str], seed: int) -> None:
    """By a model of 135 million parameters, which writes no calls of its own."""
    inner = AutoTokenizer.from_pretrained(served["tokenizer"])
    inner.chat_template = _PRINTS_TOOLS
    inner.pad_token = "<|endoftext|>"
    tokenizer = HubTokenizer(inner, served["tokenizer"])
    tool = {"type": "function", "function": {"name": "weather", "parameters": _WEATHER}}
    endpoint = Endpoint(served["base_url"], served["model_name"], "", 300.0)
    completer = await connect(endpoint, tokenizer, tokens="exact")
    try:
        sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=300, seed=seed)
        plan = a_plan(agent=an_agent(kind="program", max_steps=9), sampling=sampling)
        lease = Lease(plan, completer, tokenizer, {})
        talk: tuple[Message, ...] = (Message("user", "Is it warm in Rome?"),)
        wishes = Wishes((tool,), "required", "weather")
        reply = await lease.complete(AgentRequest(1, CompletionKind.ACTION, talk, wishes=wishes), b"1")
        assert reply.parsed is not None, await lease.ended()
        (call,) = reply.parsed.calls
        given = json.loads(call.arguments)
        assert call.name == "weather"
        assert given["city"] in ("Rome", "Bonn")
        assert isinstance(given["days"], int)
        assert len(given["note"]) <= 8
        talk = (*talk, CallMessage("assistant", "", (call,)), CallMessage("tool", "21", call_id=call.id))
        await lease.complete(AgentRequest(2, CompletionKind.ACTION, talk, wishes=Wishes((tool,))), b"2")
    finally:
        await completer.aclose()
    assert [turn.segment for turn in lease.turns] == [0, 0]
