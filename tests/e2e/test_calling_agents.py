"""smolagents' tool-calling agents in the model's own format of calls: exact ids from endpoint to groups file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.completion.tokenizer import load_tokenizer
from tests.e2e.endpoint import scripted_endpoint
from tests.fakes.runs import flags, lines, place, run
from tests.fakes.tokenizer import tokenizer_folder

QUESTION = "What do a pen and ink cost, and how many words has 'a b c'?"
PRICES = '''\
def price(article: str) -> float:
    """Looks up what an article costs.

    Args:
        article: Its name.
    """
    return {"pen": 1.5, "ink": 12.0}[article]
'''
TEAM = [
    {"name": "counter", "description": "Counts words.", "agent": "tool_calling", "max_steps": 3},
    {"name": "coder", "description": "Writes code.", "agent": "code", "max_steps": 3},
]


def call(name: str, **arguments: object) -> str:
    """A call in words that no template prints: what is trained is what was sampled."""
    return f'<tool_call>\n{{"arguments":   {json.dumps(arguments)}, "name": "{name}"}}\n</tool_call>'


MAIN = [
    f"I look.\n{call('price', article='pen')}\n{call('price', article='ink')}",
    call("price", article="pen").replace("</tool_call>", "}</tool_call>"),
    f"{call('price', article='paper')}\n{call('python_interpreter', code='n = 6; print(n * 7)')}",
    call("counter", task="Count the words of this text: a b c"),
    call("coder", task="Count by code: a b c"),
    call("final_answer", answer="13.5 and 3"),
]
COUNTER = [call("python_interpreter", code="len('a b c'.split())"), call("final_answer", answer="three")]
CODER = ["Thought: so.\n<code>\nfinal_answer(3)\n</code>"]
SCRIPT = {"Count the words of this text": [COUNTER], "Count by code": [CODER], QUESTION: [MAIN]}
# As smolagents itself has them written where a template shows no format.
JSON = ['Action:\n{"name": "final_answer", "arguments": {"answer": "13.5 and 3"}}']


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        task = {"task_id": "t", "question": QUESTION, "answer": "13.5 and 3"}
        (directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        (directory / "prices.py").write_text(PRICES)
        yield directory


def given(home: Path, base_url: str, **more: object) -> list[str]:
    team, tools = json.dumps(TEAM), json.dumps(["python:prices:price"])
    return flags(home, base_url, **{"agent": "tool_calling", "managed_agents": team, "host_tools": tools, **more})


def group_of(home: Path) -> dict[str, Any]:
    (group,) = lines(home / "run" / "groups.jsonl")
    return group


async def verified(home: Path) -> None:
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, checked.stdout


@pytest.mark.slow
async def test_a_team_keeps_one_line_of_sampled_ids_for_each_agent(home: Path) -> None:
    with scripted_endpoint(SCRIPT, "--dialect", "vllm") as endpoint:
        ended = await run(*given(home, endpoint.base_url, trained_segments="all_segments"), directory=home)
    assert ended.code == 0, ended.stderr
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    texts = {0: MAIN, 1: COUNTER, 2: CODER}
    seen = set()
    for group in lines(home / "run" / "groups.jsonl"):
        for mask, messages, facts in zip(group["masks"], group["messages"], group["overrides"], strict=True):
            assert (facts["outcome"], facts["answer"], facts["token_source"]) == (
                "finished",
                "13.5 and 3",
                "sampled",
            )
            assert (facts["segments"], facts["main_segment"]) == (3, 0)
            trained = tokenizer.decode([token for token in mask if token != -100]).replace("<|im_end|>", "")
            assert trained == "".join(texts[facts["segment"]])
            assert [m["content"] for m in messages if m["role"] == "assistant"] == texts[facts["segment"]]
            seen.add(facts["segment"])
            if facts["segment"] == 0:
                roles = [m["role"] for m in messages]
                both, malformed, failed = roles[2:5], roles[5:7], roles[7:10]
                assert both == failed == ["assistant", "tool", "tool"]
                assert malformed == ["assistant", "user"]
                assert [m["content"] for m in messages[3:5]] == ["1.5", "12.0"]
                assert messages[6]["content"].startswith("Error:\nError while parsing tool call")
                assert messages[8]["content"].startswith("Error:\nError executing tool 'price'")
                assert messages[9]["content"] == "Stdout:\n42\n\nOutput: None"
                assert "three" in messages[11]["content"]
    assert seen == {0, 1, 2}
    for line in lines(home / "run" / "rollouts.jsonl"):
        asked = [(turn["agent"], turn["segment"]) for turn in line["completions"]]
        assert asked == [*[("", 0)] * 4, *[("counter", 1)] * 2, ("", 0), ("coder", 2), ("", 0)]
        assert line["plan"]["agent"]["call_format"] == "hermes"
        assert (line["score_parts"]["format"], line["score_parts"]["final_answer"]) == (5 / 6, 1.0)
        assert line["score_parts"]["execution"] == 4 / 6
    await verified(home)
    tools = ("--env.launcher", "process", "--env.host_tools", json.dumps(["python:prices:price"]))
    replayed = await run(str(home / "run"), *tools, directory=home, command="replay")
    assert replayed.code == 0, replayed.stdout + replayed.stderr
    assert "2 of 2 rollouts as recorded" in replayed.stdout
    for form in ("sft", "messages"):
        out = ("--format", form, "--output", str(home / form))
        exported = await run(str(home / "run"), *out, directory=home, command="export")
        assert exported.code == 0, exported.stdout + exported.stderr


async def test_an_endpoint_without_ids_gets_tools_and_calls_as_its_api_has_them(home: Path) -> None:
    with scripted_endpoint(SCRIPT, "--dialect", "openai") as endpoint:
        ended = await run(*given(home, endpoint.base_url), directory=home)
    assert ended.code == 0, ended.stderr
    for messages, facts in zip(group_of(home)["messages"], group_of(home)["overrides"], strict=True):
        assert (facts["outcome"], facts["token_source"], facts["segments"]) == ("finished", "retokenized", 3)
        assert [m["role"] for m in messages[2:5]] == ["assistant", "tool", "tool"]
    await verified(home)


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "more"), [("vllm", {"tool_call_format": "json"}), ("openai", {"tokenizer_name": "none"})])  # fmt: skip # noqa: E501
async def test_without_a_format_calls_are_json_in_the_text(home: Path, dialect: str, more: dict[str, str]) -> None:
    with scripted_endpoint({QUESTION: [JSON]}, "--dialect", dialect) as endpoint:
        ended = await run(*given(home, endpoint.base_url, **more), directory=home)
    assert ended.code == 0, ended.stderr
    assert {facts["answer"] for facts in group_of(home)["overrides"]} == {"13.5 and 3"}
    for line in lines(home / "run" / "rollouts.jsonl"):
        (turn,) = line["completions"]
        assert "tools" not in turn
        assert "Here are a few examples using notional tools" in turn["messages"][0]["content"]
        assert (line["plan"]["agent"]["call_format"], line["score_parts"]["format"]) == (None, 1.0)
    assert json.loads((home / "run" / "run.json").read_text())["agent"]["tool_calls"] == "json"
    await verified(home)


async def test_an_endpoint_that_refuses_tools_ends_the_run_before_its_first_rollout(home: Path) -> None:
    with scripted_endpoint({QUESTION: [JSON]}, "--dialect", "vllm") as endpoint:
        text = {"token_source": "retokenize", "managed_agents": None}
        ended = await run(*given(home, endpoint.base_url, **text), directory=home)
        assert ended.code == 3
        line = ended.stderr.strip().splitlines()[-1]
        assert "refuses tools" in line
        assert "--env.tool_call_format json" in line
        assert endpoint.completions() == []
        ended = await run(*given(home, endpoint.base_url, **text, tool_call_format="json"), directory=home)
        assert ended.code == 0, ended.stderr
