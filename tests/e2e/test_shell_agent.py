"""`env.agent shell` from endpoint to groups file, report and exports: exact ids, commands and their output."""

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

QUESTION = "How many lines has the longest file in notes?"


def call(*commands: str) -> str:
    """Calls in words that no template prints: what is trained is what was sampled."""
    return "\n".join(
        f'<tool_call>\n{{"arguments":   {json.dumps({"command": one})}, "name": "bash"}}\n</tool_call>'
        for one in commands
    )


def block(command: str) -> str:
    return f"Next.\n```bash\n{command}\n```"


SEE = "mkdir notes && cd notes && printf '1\\n2\\n3\\n' > a && printf '1\\n' > b; id -u; printf '<|im_%s|>\\n' end"
COUNT = "wc -l *; cat nothing"
CALLS = [
    f"I look.\n{call(SEE, 'pwd')}",
    call(COUNT).replace("}", "", 1),
    call(COUNT),
    "3",
]
BLOCKS = [block(SEE), "```bash\nls", block(COUNT), "3"]


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        task = {"task_id": "t", "question": QUESTION, "answer": "3"}
        (directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        yield directory


def given(home: Path, base_url: str, **more: object) -> list[str]:
    return flags(home, base_url, **{"agent": "shell", **more})


async def verified(home: Path) -> None:
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, checked.stdout


def members(home: Path) -> list[tuple[list[int], list[dict[str, str]], dict[str, Any]]]:
    (group,) = lines(home / "run" / "groups.jsonl")
    return list(zip(group["masks"], group["messages"], group["overrides"], strict=True))


@pytest.mark.parametrize(
    ("says", "more", "format"),
    [(CALLS, {}, "hermes"), (BLOCKS, {"tool_call_format": "fenced"}, "fenced")],
    ids=["calls", "blocks"],
)
async def test_one_line_of_sampled_ids(home: Path, says: list[str], more: dict[str, object], format: str) -> None:
    with scripted_endpoint({QUESTION: [says]}, "--dialect", "vllm") as endpoint:
        ended = await run(*given(home, endpoint.base_url, scoring_strategy="combined", **more), directory=home)
    assert ended.code == 0, ended.stderr
    tokenizer = load_tokenizer(str(tokenizer_folder()))
    for mask, messages, facts in members(home):
        assert (facts["outcome"], facts["answer"], facts["token_source"]) == ("finished", "3", "sampled")
        assert (facts["agent"], facts["shared_identity"]) == ("shell", False)
        assert (facts["segments"], facts["steps"]) == (1, 4)
        trained = tokenizer.decode([token for token in mask if token != -100]).replace("<|im_end|>", "")
        assert trained == "".join(says)
        assert [m["content"] for m in messages if m["role"] == "assistant"] == says
        assert messages[1] == {"role": "user", "content": QUESTION}
        assert "3 a\n" in next(m["content"] for m in messages if "4 total" in m["content"])
        parts = facts["score_parts"]
        assert (parts["correctness"], parts["format"], parts["execution"]) == (1.0, 0.75, 0.5)
    for line in lines(home / "run" / "rollouts.jsonl"):
        first, second, third, last = line["steps"]
        assert first["code"].startswith(SEE)
        assert "<|im_end|>" in first["observations"]
        assert "cannot be read" in second["observations"]
        assert "4 total\ncat: nothing: No such file or directory\n[exit code 1]" in third["observations"]
        assert last["is_final_answer"]
    told = json.loads((home / "run" / "run.json").read_text())["agent"]
    assert (told["kind"], told["identity"], told["tool_calls"]) == ("shell", "its own", format)
    await verified(home)
    page = (home / "run" / "groups.html").read_text()
    assert "4 total" in page
    for name in ("messages", "harbor"):
        exported = await run(str(home / "run"), "--format", name, directory=home, command="export")
        assert exported.code == 0, exported.stderr
    for mask, messages, facts in members(home):
        trial = home / "run" / "export-harbor" / "run" / facts["rollout_id"]
        (score,) = (
            line["score"] for line in lines(home / "run" / "rollouts.jsonl") if line["rollout_id"] == trial.name
        )
        assert json.loads((trial / "verifier" / "reward.json").read_text()) == {"reward": score}
        steps = json.loads((trial / "agent" / "trajectory.json").read_text())["steps"]
        served = [step["metrics"] for step in steps if step["source"] == "agent"]
        assert [i for one in served for i in one["completion_token_ids"]] == [i for i in mask if i != -100]
        assert len(served[-1]["prompt_token_ids"] + served[-1]["completion_token_ids"]) == len(mask)
        assert [step["message"] for step in steps[:2]] == [message["content"] for message in messages[:2]]
        assert [len(step.get("tool_calls", ())) for step in steps[2:]] == (
            [2, 0, 1, 0] if format == "hermes" else [0] * 4
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "more", "ids"),
    [(CALLS[:1] + CALLS[2:], {}, "retokenized"), (BLOCKS, {"tokenizer_name": "none"}, "none")],
    ids=["calls", "blocks"],
)
async def test_an_endpoint_without_ids(home: Path, says: list[str], more: dict[str, object], ids: str) -> None:
    with scripted_endpoint({QUESTION: [says]}, "--dialect", "openai") as endpoint:
        ended = await run(*given(home, endpoint.base_url, **more), directory=home)
    assert ended.code == 0, ended.stderr
    for _, _, facts in members(home):
        assert (facts["outcome"], facts["answer"], facts["token_source"]) == ("finished", "3", ids)
    await verified(home)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("says", "more"), [(CALLS, {}), (BLOCKS, {"tool_call_format": "fenced"})], ids=["calls", "blocks"]
)
async def test_the_answer_behind_the_last_step_stays_in_the_line(
    home: Path, says: list[str], more: dict[str, object]
) -> None:
    with scripted_endpoint({QUESTION: [[says[0], says[2], "3"]]}, "--dialect", "vllm") as endpoint:
        ended = await run(
            *given(home, endpoint.base_url, max_steps=2, final_answer_at_max_steps=True, **more), directory=home
        )
    assert ended.code == 0, ended.stderr
    for _, messages, facts in members(home):
        assert (facts["outcome"], facts["answer"], facts["segments"]) == ("finished", "3", 1)
        assert messages[-2]["role"] == "user"
        assert messages[-2]["content"].endswith("Write your answer.")
    await verified(home)


@pytest.mark.parametrize(
    ("says", "end"), [([call("true")] * 2, ("max_steps", None)), ([call("true"), ""], ("finished", ""))]
)
async def test_steps_that_are_used_up_and_an_empty_answer_are_ends(
    home: Path, says: list[str], end: tuple[str, str | None]
) -> None:
    with scripted_endpoint({QUESTION: [says]}, "--dialect", "vllm") as endpoint:
        ended = await run(*given(home, endpoint.base_url, max_steps=2), directory=home)
    assert ended.code == 0, ended.stderr
    assert {(facts["outcome"], facts["answer"]) for _, _, facts in members(home)} == {end}
    await verified(home)
