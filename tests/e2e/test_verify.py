"""`orchestrator verify`: passes on what `orchestrator process` writes, and names whatever is wrong with it."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import flags, lines, place, run, write_tasks

pytestmark = pytest.mark.docker

SCRIPT = {
    "number": [
        [says("One.", "x = '🙂ä'\nprint(x)"), "No code at all.", says("Two.", "print(x, 2)"), answers("0")],
        [answers("-1")],
    ]
}
GROUPS = "groups.jsonl"
ROLLOUTS = "rollouts.jsonl"
Group = dict[str, Any]


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A run directory with two groups of two rollouts, one of each of several turns."""

    async def make(home: Path) -> None:
        write_tasks(home / "tasks.jsonl", 2)
        with scripted_endpoint(SCRIPT, "--dialect", "vllm", "--clumsy", "--seed", "5") as endpoint:
            ended = await run_cleanly(*flags(home, endpoint.base_url, launcher="docker"), directory=home)
        assert ended.code == 0, ended.stderr

    with place() as home:
        asyncio.run(make(home))
        yield home / "run"


@pytest.fixture
def directory(made: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def spoil(directory: Path, change: Callable[[Group], None], file: str = GROUPS, number: int = 0) -> None:
    """Changes one line of a file."""
    rows = lines(directory / file)
    change(rows[number])
    (directory / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


def verified(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["verify", str(path)])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


async def test_what_process_wrote_is_verified(made: Path) -> None:
    ended = await run(str(made), directory=made.parent, command="verify")
    assert ended.code == 0, ended.stdout + ended.stderr
    assert "2 groups, 4 rollouts (tokens: sampled 4), 0 violations" in ended.stdout
    # Nothing was passed by: each check looked at something.
    table = [line.split() for line in ended.stdout.splitlines()[1:] if " 0 " in line]
    assert len(table) >= 12
    assert max(len(line["completions"]) for line in lines(made / ROLLOUTS)) > 2


def test_a_groups_file_alone_can_be_verified(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / ROLLOUTS).unlink()
    (directory / "run.json").unlink()
    code, out = verified(directory / GROUPS, capsys)
    assert code == 0
    assert "nothing was compared with the record" in out


def trained_place(group: Group) -> int:
    return next(i for i, m in enumerate(group["masks"][0]) if m != -100)


def change_id(group: Group) -> None:
    place = trained_place(group)
    group["tokens"][0][place] += 1
    group["masks"][0][place] += 1


def change_prompt_id(group: Group) -> None:
    group["tokens"][0][0] += 1


def change_mask(group: Group) -> None:
    group["masks"][0][trained_place(group)] += 1


def mask_one_more(group: Group) -> None:
    place = trained_place(group)
    group["masks"][0][place] = -100
    group["inference_logprobs"][0][place] = 1.0


def mask_all(group: Group) -> None:
    group["masks"][0] = [-100] * len(group["masks"][0])
    group["inference_logprobs"][0] = [1.0] * len(group["masks"][0])


def train_on_the_prompt(group: Group) -> None:
    group["masks"][0][0] = group["tokens"][0][0]
    group["inference_logprobs"][0][0] = -0.5


def set_logprob(value: float) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        group["inference_logprobs"][0][trained_place(group)] = value

    return change


def set_masked_logprob(group: Group) -> None:
    group["inference_logprobs"][0][0] = -1.0


def drop_logprob(group: Group) -> None:
    group["inference_logprobs"][0].pop()


def drop_message(place: int) -> Callable[[Group], None]:
    return lambda group: group["messages"][0].pop(place)


def change_message(group: Group) -> None:
    talk = next(talk for talk in group["messages"] if len(talk) > 3)
    talk[2]["content"] = talk[2]["content"].replace("Thought", "thought")


def drop_member(group: Group) -> None:
    for name in ("tokens", "masks", "scores", "inference_logprobs", "messages", "overrides"):
        group[name].pop()


def drop_member_and_say_so(group: Group) -> None:
    drop_member(group)
    group["group_overrides"]["group_size"] = 1


def double_member(group: Group) -> None:
    for name in ("tokens", "masks", "scores", "inference_logprobs", "messages", "overrides"):
        group[name][1] = group[name][0]


def set_fact(name: str, value: object) -> Callable[[Group], None]:
    return lambda group: group["overrides"][0].update({name: value})


def set_score(value: float) -> Callable[[Group], None]:
    return lambda group: group["scores"].__setitem__(0, value)


def drop_field(name: str) -> Callable[[Group], None]:
    return lambda group: group.pop(name)


SPOILT: dict[str, tuple[str, Callable[[Group], None]]] = {
    "changed id": ("sampled ids", change_id),
    "changed prompt id": ("one line", change_prompt_id),
    "changed mask": ("mask", change_mask),
    "id left out of training": ("sampled ids", mask_one_more),
    "rollout left out of training": ("trained", mask_all),
    "prompt trained on": ("sampled ids", train_on_the_prompt),
    "log-prob above 0": ("logprob", set_logprob(0.25)),
    "log-prob changed": ("sampled log-probs", set_logprob(-0.123456)),
    "log-prob NaN": ("logprob", set_logprob(math.nan)),
    "log-prob without end": ("logprob", set_logprob(-math.inf)),
    "log-prob where masked": ("logprob", set_masked_logprob),
    "log-prob missing": ("shape", drop_logprob),
    "system message missing": ("messages", drop_message(0)),
    "task missing": ("messages", drop_message(1)),
    "answer missing": ("messages", drop_message(-1)),
    "message changed": ("messages", change_message),
    "member missing": ("size", drop_member),
    "member missing, and it says so": ("size", drop_member_and_say_so),
    "member doubled": ("outcome", double_member),
    "score above 1": ("score", set_score(1.5)),
    "score NaN": ("score", set_score(math.nan)),
    "score of another": ("record", set_score(0.123)),
    "failure among the scored": ("outcome", set_fact("outcome", "llm_error")),
    "answer of another": ("record", set_fact("answer", "something else")),
    "rollout nobody ran": ("record", set_fact("rollout_id", "g000777-r00-a0")),
    "facts that are none": ("shape", lambda group: group["overrides"].__setitem__(0, "none")),
    "tokens missing": ("shape", drop_field("tokens")),
    "masks missing": ("shape", drop_field("masks")),
}


@pytest.mark.parametrize(("check", "change"), SPOILT.values(), ids=SPOILT)
def test_what_was_spoilt_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str], check: str, change: Callable[[Group], None]
) -> None:
    spoil(directory, change)
    code, out = verified(directory, capsys)
    assert code == 1
    assert any(line.startswith(f"{check}: ") for line in out.splitlines()), out


def test_a_group_that_is_written_twice_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (directory / GROUPS).read_text()
    (directory / GROUPS).write_text(text + text.splitlines(keepends=True)[0])
    code, out = verified(directory, capsys)
    assert code == 1
    assert "outcome: groups.jsonl:3" in out


@pytest.mark.parametrize("file", [GROUPS, ROLLOUTS])
def test_a_torn_line_is_named(directory: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(content[:-100])
    code, out = verified(directory, capsys)
    assert code == 1
    assert f"shape: {file}:" in out


def test_a_rollout_that_is_recorded_twice_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (directory / ROLLOUTS).read_text()
    (directory / ROLLOUTS).write_text(text + text.splitlines(keepends=True)[0])
    code, out = verified(directory, capsys)
    assert code == 1
    assert "record: rollouts.jsonl:5" in out


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line["completions"][0]["token_ids"].pop(),
        lambda line: line["completions"][0]["logprobs"].pop(),
        lambda line: line.update(completions=7),
        lambda line: line.update(completions=[{}]),
        lambda line: line.pop("task_id"),
    ],
)
def test_a_spoilt_record_is_no_proof(
    directory: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Group], None]
) -> None:
    spoil(directory, change, ROLLOUTS)
    assert verified(directory, capsys)[0] == 1


def test_an_empty_file_proves_nothing(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / GROUPS).write_text("")
    assert verified(directory, capsys)[0] == 1


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "absent.jsonl"):
        assert main(["verify", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
