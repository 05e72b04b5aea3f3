"""What services answer in their own words and statuses: none of it is a trained zero.

Every case is a real run of the command against a scripted server that answers as some service does.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fakes.inference import Fault, Reply, ScriptedServer, by_task
from tests.fakes.runs import flags, lines, outcomes, run, write_tasks
from tests.unit.test_refused_parameters import Strict, serving

LOOKS = "Thought: I look.\n<code>\nprint('a page of cats')\n</code>"
RIGHT = "Thought.\n<code>\nfinal_answer(0)\n</code>"
WORDS = ("stop_sequence", "end_turn", "STOP", "eos_token", "COMPLETE", "REASON_STOP", "eosFound", "", None, "odd")


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "kind"), [("vllm", "404"), ("openai", "404"), ("openai", "402")])
async def test_a_status_that_no_text_causes_and_that_passes_costs_no_rollout(
    home: Path, dialect: str, kind: str
) -> None:
    """Four rollouts, one such status at the second completion of one of them: the groups had [1, 1, 0, 1]."""
    write_tasks(home / "tasks.jsonl", 1)
    faults = (Fault(kind, anywhere="a page of cats\n", times=1),)  # type: ignore[arg-type]
    async with ScriptedServer(dialect, by_task({"": [[LOOKS, RIGHT]]}), faults=faults) as server:
        ended = await run(*flags(home, server.base_url, group_size=4), directory=home)
    assert ended.code == 0, ended.stderr
    (group,) = lines(home / "run" / "groups.jsonl")
    assert [one["score_parts"]["correctness"] for one in group["overrides"]] == [1.0] * 4
    assert outcomes(home / "run") == {"finished": 4}


@pytest.mark.slow
async def test_one_server_of_five_that_lacks_the_model_costs_no_rollout(home: Path) -> None:
    """7 of 20 rollouts were false zeros."""
    write_tasks(home / "tasks.jsonl", 1)
    faults = (Fault("404", ratio=0.2),)
    async with ScriptedServer("vllm", by_task({"": [[LOOKS, LOOKS, RIGHT]]}), faults=faults) as server:
        ended = await run(*flags(home, server.base_url, group_size=20), directory=home)
    assert ended.code == 0, ended.stderr
    assert outcomes(home / "run") == {"finished": 20}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["quota", "402"])
async def test_an_account_without_credit_ends_the_run_soon_with_the_services_words(home: Path, kind: str) -> None:
    write_tasks(home / "tasks.jsonl", 40)
    faults = (Fault(kind),)  # type: ignore[arg-type]
    async with ScriptedServer("openai", by_task({"": [[RIGHT]]}), faults=faults) as server:
        ended = await run(*flags(home, server.base_url), directory=home)
        assert len(server.log.completions) < 120
    assert ended.code == 3, ended.stderr
    assert ("insufficient_quota" if kind == "quota" else "Insufficient Balance") in ended.stderr
    assert "serves nothing more for this account" in ended.stderr
    assert "finished" not in outcomes(home / "run")


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["openai", "vllm"])
async def test_a_whole_answer_is_one_whatever_its_finish_reason_is_called(home: Path, dialect: str) -> None:
    write_tasks(home / "tasks.jsonl", 1)
    replies = [[Reply(RIGHT, fault=Fault("finish", word=word))] for word in WORDS]
    async with ScriptedServer(dialect, by_task({"": replies}, by="order")) as server:
        ended = await run(*flags(home, server.base_url, group_size=len(WORDS)), directory=home)
    assert ended.code == 0, ended.stderr
    assert Counter(outcomes(home / "run")) == {"finished": len(WORDS)}
    assert ended.stderr.count("finish reason 'odd'") == 1, "an unknown word is said once"
    told = [line["completions"][0]["finish_reason"] for line in lines(home / "run" / "rollouts.jsonl")]
    assert set(told) == {"stop"}


@pytest.mark.parametrize("word", ["max_tokens", "model_length", "MAX_TOKENS", None, "odd"])
async def test_an_answer_that_was_cut_off_says_so_in_whatever_words(home: Path, word: str | None) -> None:
    write_tasks(home / "tasks.jsonl", 1)
    reply = Reply("Thought. " * 60, length=True, fault=Fault("finish", word=word))
    async with ScriptedServer("openai", by_task({"": [[reply, RIGHT]]})) as server:
        given = flags(home, server.base_url, max_completion_tokens=32)
        ended = await run(*given, directory=home)
    assert ended.code == 0, ended.stderr
    for line in lines(home / "run" / "rollouts.jsonl"):
        assert line["completions"][0]["finish_reason"] == "length"


async def test_an_endpoint_that_takes_no_tools_is_known_at_the_start(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 1)
    async with serving(Strict(tools=False)) as (address, asked):
        given = flags(
            home, address, agent="tool_calling", tokenizer_name="none", tool_call_format="hermes", group_size=None
        )
        ended = await run(*given, directory=home, command="evaluate")
        assert ended.code == 3, ended.stderr
        assert "refuses tools" in ended.stderr
        assert "--env.tool_call_format json" in ended.stderr
        assert all(body["probe"] for body in asked), "no rollout asked"
