"""The rule of blame: nothing a policy writes, samples or waits for buys it another draw, and nothing that a
service does to everybody is the policy's.

Every case is a real run of the command against a scripted server that works, but not for what this policy says.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator.completion.base import Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.types import CompletionKind, Message
from tests.fakes.inference import Fault, Reply, ScriptedServer, by_task
from tests.fakes.plans import TALK, a_plan
from tests.fakes.runs import Ended, flags, lines, outcomes, run, write_tasks
from tests.fakes.tokenizer import tokenizer_folder

POISON = "a text that the gateway does not like"
PRINTS = Reply(f"Thought: I look.\n<code>\nprint('{POISON}')\n</code>")
RIGHT = "Thought.\n<code>\nfinal_answer(0)\n</code>"
NEVER = RIGHT.replace("(0)", "(-1)")


async def played(home: Path, server: ScriptedServer, *arguments: str, **env: object) -> list[dict[str, Any]]:
    """One task's rollouts, every attempt of them, in the order of their places."""
    write_tasks(home / "tasks.jsonl", 1)
    async with server:
        ended = await run(*flags(home, server.base_url, max_retries=1, **env), *arguments, directory=home)
    assert not ended.traceback, ended.stderr
    assert ended.code == 0, ended.stderr
    return sorted(lines(home / "run" / "rollouts.jsonl"), key=lambda line: line["rollout_id"])


def controls(server: ScriptedServer) -> int:
    return sum(s.call is not None and "Say hello." in s.call.messages[-1].content for s in server.log.completions)


def drawn_once(attempts: list[dict[str, Any]], count: int = 2) -> bool:
    return [line["attempt"] for line in attempts] == [0] * count


# ---------------------------------------------------------------- text that was chosen


@pytest.mark.long
@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        *(("vllm", kind) for kind in ("400", "401", "500", "reset", "garbage")),
        *((dialect, "403") for dialect in ("sglang", "llamacpp", "openai")),
    ],
)
async def test_printed_text_that_an_endpoint_fails_on_is_the_policys_own_end(
    home: Path, dialect: str, kind: str
) -> None:
    fault = Fault(kind, anywhere=f"{POISON}\n")  # type: ignore[arg-type]
    server = ScriptedServer(dialect, by_task({"": [[PRINTS, RIGHT]]}), faults=(fault,))
    attempts = await played(home, server)
    assert drawn_once(attempts)
    for line in attempts:
        assert line["outcome"] == "no_answer"
        assert line["score"] <= 0.45
        assert line["score_parts"]["correctness"] == 0.0
        assert "a neutral question was answered" in line["reason"], "both answers are on record"
        assert len(line["completions"]) == 1, "what was sampled before is kept"
    assert 1 <= controls(server) <= 4, "each rollout's request is asked for once more behind the first"


async def test_a_prompt_that_only_the_policy_made_too_slow_is_its_own_timeout(home: Path) -> None:
    fault = Fault("hang", anywhere=f"{POISON}\n")
    server = ScriptedServer("vllm", by_task({"": [[PRINTS, RIGHT]]}), faults=(fault,))
    attempts = await played(home, server, "--openai.timeout=4")
    assert drawn_once(attempts)
    assert {line["outcome"] for line in attempts} == {"timeout"}


@pytest.mark.long
async def test_a_refusal_of_one_rollouts_text_ends_no_other_rollout(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 4)
    script = by_task({"of q0!": [[PRINTS, RIGHT]], "": [[RIGHT]]})
    async with ScriptedServer("openai", script, faults=(Fault("403", anywhere=f"{POISON}\n"),)) as server:
        ended = await run(*flags(home, server.base_url), directory=home)
    assert ended.code == 0, ended.stderr
    assert outcomes(home / "run") == {"no_answer": 2, "finished": 6}


@pytest.mark.long
async def test_a_task_whose_text_is_refused_is_no_refused_key_and_no_rollout_is_scored(home: Path) -> None:
    """Nothing was sampled yet: not the policy's, and not everybody's either."""
    write_tasks(home / "tasks.jsonl", 3)
    script = by_task({"": [[RIGHT]]})
    async with ScriptedServer("vllm", script, faults=(Fault("403", pattern="of q0!"),)) as server:
        ended = await run(*flags(home, server.base_url, max_retries=0, group_policy="drop"), directory=home)
    assert ended.code == 1, ended.stderr
    assert outcomes(home / "run") == {"llm_error": 2, "finished": 4}


# ---------------------------------------------------------------- samples that were chosen


@pytest.mark.long
@pytest.mark.parametrize(
    ("dialect", "kind", "turn"),
    [
        ("openai", "content_filter", 0),
        ("openai", "null_content", 1),
        ("vllm", "content_filter", 1),
        *((name, "foreign_ids", 0) for name in ("vllm", "sglang", "llamacpp")),
        ("vllm", "foreign_ids", 1),
        ("openai", "content_filter", 1),
    ],
)
async def test_a_sample_that_cannot_be_used_is_a_sample(home: Path, dialect: str, kind: str, turn: int) -> None:
    spoilt = Reply(NEVER, fault=Fault(kind))  # type: ignore[arg-type]
    bad = [spoilt] if turn == 0 else [Reply("Thought: I look.\n<code>\nprint(1)\n</code>"), spoilt]
    server = ScriptedServer(dialect, by_task({"of q0!": [bad]}))
    attempts = await played(home, server)
    assert drawn_once(attempts)
    for line in attempts:
        assert line["outcome"] == "no_answer"
        assert line["score_parts"]["correctness"] == 0.0
        assert len(line["completions"]) == turn + 1, "the sample is on record, as far as it can be"
    (group,) = lines(home / "run" / "groups.jsonl")
    assert len(group["scores"]) == 2
    verified = await run("run", directory=home, command="verify")
    assert verified.code == 0, verified.stdout


@pytest.mark.long
async def test_samples_that_are_filtered_are_wrong_where_a_model_is_measured(home: Path) -> None:
    """Four of eight samples were filtered, and what was left was all correct: an accuracy of 1.0."""
    write_tasks(home / "tasks.jsonl", 1)
    filtered = [Reply(NEVER, fault=Fault(kind)) for kind in ("content_filter", "null_content")]
    script = by_task({"of q0!": [[reply] for reply in (RIGHT, filtered[0], RIGHT, filtered[1])]}, by="order")
    async with ScriptedServer("openai", script) as server:
        given = flags(home, server.base_url, group_size=None, eval_samples=8, max_retries=1, tokenizer_name="none")
        ended = await run(*given, directory=home, command="evaluate")
    assert ended.code == 0, ended.stderr
    found = json.loads((home / "run" / "metrics.json").read_text())["results"]["all"]
    assert found["eval/accuracy"] == 0.5
    assert found["eval/samples_missing"] == 0
    assert Counter(outcomes(home / "run")) == {"finished": 4, "no_answer": 4}


# ---------------------------------------------------------------- waiting that was chosen


@pytest.mark.long
async def test_many_completions_at_a_slow_endpoint_that_serves_are_the_policys_own_timeout(home: Path) -> None:
    looks = Reply("Thought: I look.\n<code>\nprint(1)\n</code>", delay_s=1.0)
    server = ScriptedServer("vllm", by_task({"of q0!": [[looks] * 50]}))
    attempts = await played(home, server, rollout_deadline=6, max_steps=40)
    assert drawn_once(attempts)
    assert {line["outcome"] for line in attempts} == {"timeout"}
    assert all("a neutral question was answered" in line["reason"] for line in attempts)


async def test_the_first_sample_that_never_comes_is_the_endpoints(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 1)
    script = by_task({"": [[RIGHT]]})
    async with ScriptedServer("vllm", script, faults=(Fault("hang", pattern="of q0!", times=1),)) as server:
        ended: Ended = await run(*flags(home, server.base_url, rollout_deadline=4), directory=home)
    assert ended.code == 0, ended.stderr
    assert outcomes(home / "run") == {"llm_error": 1, "finished": 2}


# ---------------------------------------------------------------- what everybody gets


@pytest.mark.long
@pytest.mark.parametrize("kind", ["400", "500", "null_content"])
async def test_what_the_control_gets_too_is_the_endpoints_and_is_drawn_again(home: Path, kind: str) -> None:
    dialect = "openai" if kind == "null_content" else "vllm"
    first = Reply("Thought: I look.\n<code>\nprint(1)\n</code>")
    # Both rollouts' second calls fail, each with its attempts, so does the control; then all is well again.
    faults = (Fault(kind, calls=range(2, 16 if kind == "500" else 6)),)  # type: ignore[arg-type]
    write_tasks(home / "tasks.jsonl", 1)
    script = by_task({"": [[first, RIGHT]]})
    async with ScriptedServer(dialect, script, faults=faults) as server:
        given = flags(home, server.base_url, max_retries=20, group_policy="drop")
        ended = await run(*given, directory=home)
    assert ended.code == 0, ended.stderr
    counts = outcomes(home / "run")
    assert counts["finished"] == 2
    assert set(counts) == {"finished", "llm_error"}
    assert counts["llm_error"] >= (0 if kind == "500" else 2)  # a completion has attempts enough of its own


@pytest.mark.long
async def test_an_endpoint_that_comes_back_between_failure_and_control_costs_no_rollout(home: Path) -> None:
    """The control is answered, and yet the policy had no part in it: the same request is served now."""
    first = Reply("Thought: I look.\n<code>\nprint(1)\n</code>")
    script = by_task({"": [[first, RIGHT]]})
    # The second call of the only rollout fails with all its attempts, the control is the first that is served.
    async with ScriptedServer("vllm", script, faults=(Fault("503", calls=range(1, 5)),)) as server:
        write_tasks(home / "tasks.jsonl", 1)
        ended = await run(*flags(home, server.base_url, group_size=1), directory=home)
    assert ended.code == 0, ended.stderr
    assert outcomes(home / "run") == {"finished": 1}
    (line,) = lines(home / "run" / "rollouts.jsonl")
    assert len({c["sequence"] for c in line["completions"]}) == len(line["completions"]) == 2


# ---------------------------------------------------------------- templates


NO_EMPTY_TURNS = (
    "{% for m in messages %}{% if m['content'] == '' %}{{ raise_exception('an empty turn') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.long
@pytest.mark.parametrize("refuses", ["empty turns", "everything"])
async def test_a_conversation_that_only_the_policy_made_unrenderable_is_its_own_end(refuses: str) -> None:
    """A turn of the end token alone, in a history that is rendered anew."""
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    async with ScriptedServer("vllm", by_task({"": [[""]]})) as server:
        completer = await connect(Endpoint(server.base_url, server.model.name), tokenizer, tokens="exact")
        try:
            lease = Lease(a_plan(), completer, tokenizer, {})
            assert (
                await lease.complete(AgentRequest(1, CompletionKind.ACTION, TALK), b"1")
            ).completion is not None
            template = NO_EMPTY_TURNS if refuses == "empty turns" else "{{ raise_exception('no') }}"
            tokenizer._tokenizer.chat_template = template
            another = (TALK[0], Message("user", "Go on."), Message("assistant", ""), Message("user", "Well?"))
            reply = await lease.complete(AgentRequest(2, CompletionKind.ACTION, another), b"2")
            assert reply.ended == ("no_answer" if refuses == "empty turns" else "record_error")
            assert len(lease.turns) == 1
        finally:
            await completer.aclose()
