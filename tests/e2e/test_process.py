"""`orchestrator process` as its users run it: real containers, and a scripted endpoint in another process."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.endpoint import ScriptedEndpoint, answers, says, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import flags, lines, outcomes, printed_outcomes
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.written import demand_as_published

pytestmark = pytest.mark.docker

KEY = "sk-canary-0123456789abcdef"
ODD_NAMES = (
    "plain.txt",
    "größer als ß.txt",
    "日本語🙂.txt",
    "two  spaces .txt",
    "-rf",
    ".hidden",
    "a;b$(id)`id`&|.txt",
    "quote'\"s.txt",
    "{{braces}} %s.txt",
    "line\nbreak.txt",
    "sub/inner.txt",
    "x" * 190 + ".txt",
)
# Adds up what is in the files and looks whether it may change them; goes on in the next step.
READS_ALL = """\
import os
found = sorted(os.listdir('/attachments'))
total = sum(int(open('/attachments/' + name).read()) for name in found)
print(len(found), total, os.listdir('.'), os.getcwd())
try:
    open('/attachments/' + found[0], 'a')
except OSError as error:
    print('refused', type(error).__name__)
open('copy.txt', 'w').write(str(total))"""
# GAIA's rows as they were published until 2025, in small.
GAIA_ROWS: tuple[dict[str, Any], ...] = (
    {"task_id": "c61d-0001", "Question": "How many kinds of fruit are in the list?", "Final answer": "3",
     "Level": 1, "file_name": "c61d-0001.csv", "Annotator Metadata": {"Steps": "count"}},
    {"task_id": "c61d-0002", "Question": "Which word comes first in the text?", "Final answer": "Ångström",
     "Level": "2", "file_name": "c61d-0002.txt", "Annotator Metadata": {}},
    {"task_id": "c61d-0003", "Question": "What is a thousand and one plus one?", "Final answer": "1002",
     "Level": 3, "file_name": ""},
)  # fmt: skip
GAIA_FILES = {"c61d-0001.csv": "apple\npear\nplum\n", "c61d-0002.txt": "Ångström, one word.\n"}
SCRIPT = {
    "Add up all the numbers": [
        [says("I read them.", READS_ALL), answers("int(open('copy.txt').read())")],
        [answers("-1")],
    ],
    "kinds of fruit": [
        [says("I count.", "n = len(open('/attachments/c61d-0001.csv').read().split())\nprint(n)"), answers("n")],
        [answers("'many'")],
    ],
    "Which word": [
        [answers("open('/attachments/c61d-0002.txt', encoding='utf-8').read().split(',')[0]")],
        [answers("'Angstrom'")],
    ],
    "thousand and one": [[answers("'1,002'")], [answers("1001")]],
    "simple": [[answers("4")], [answers("5")]],
}


@pytest.fixture(scope="module")
def vllm() -> Iterator[ScriptedEndpoint]:
    with scripted_endpoint(SCRIPT, "--dialect", "vllm") as endpoint:
        yield endpoint


def write_rows(home: Path, *rows: object) -> None:
    texts = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (home / "tasks.jsonl").write_text("".join(f"{text}\n" for text in texts))


def write_gaia(folder: Path) -> None:
    """The layout of the benchmark's folder until 2025."""
    split = folder / "2023" / "validation"
    split.mkdir(parents=True)
    (split / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in GAIA_ROWS))
    for name, text in GAIA_FILES.items():
        (split / name).write_text(text, encoding="utf-8")


def in_docker(home: Path, endpoint: ScriptedEndpoint, **env: object) -> list[str]:
    return flags(home, endpoint.base_url, launcher="docker", **env)


def said_to(endpoint: ScriptedEndpoint, task: str) -> str:
    """The prompt of a task, as the endpoint saw it."""
    return str(endpoint.completions_of(task)[0]["call"]["task"])


def check_shapes(group: Mapping[str, Any], size: int, *, exact: bool) -> None:
    """A ScoredDataGroup of `size` rollouts."""
    assert group["group_overrides"] == {"group_size": size}
    for name in ("tokens", "masks", "scores", "messages", "overrides"):
        assert len(group[name]) == size, name
    for tokens, mask in zip(group["tokens"], group["masks"], strict=True):
        assert len(tokens) == len(mask)
        assert {m for t, m in zip(tokens, mask, strict=True) if m != t} == {-100}
        assert any(m != -100 for m in mask)
    assert (group["inference_logprobs"] is not None) == exact
    for mask, logprobs in zip(group["masks"], group["inference_logprobs"] or (), strict=exact):
        assert len(logprobs) == len(mask)
        assert all(p == 1.0 if m == -100 else p <= 0.0 for m, p in zip(mask, logprobs, strict=True))
    for messages in group["messages"]:
        assert [m["role"] for m in messages][:3] == ["system", "user", "assistant"]
        assert all(set(m) == {"role", "content"} for m in messages)
    source = "sampled" if exact else "retokenized"
    assert {facts["token_source"] for facts in group["overrides"]} == {source}
    assert all(0.0 <= score <= 1.0 for score in group["scores"])


async def test_files_of_any_name_are_read_and_the_group_tells_all(home: Path, vllm: ScriptedEndpoint) -> None:
    for number, name in enumerate(ODD_NAMES, start=1):
        path = home / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(number))
    total = sum(range(len(ODD_NAMES) + 1))
    write_rows(
        home,
        {"task_id": "ä/1", "question": "Add up all the numbers.", "answer": total, "files": ODD_NAMES, "level": 1},
    )
    ended = await run_cleanly(
        *in_docker(home, vllm, group_size=4, max_token_length=32_000), "--openai.api_key", KEY, directory=home
    )
    assert ended.code == 0, ended.stderr
    (group,) = lines(home / "run" / "groups.jsonl")
    check_shapes(group, 4, exact=True)
    demand_as_published(home / "run")
    assert {facts["answer"] for facts in group["overrides"]} == {str(total), "-1"}
    for score, facts in zip(group["scores"], group["overrides"], strict=True):
        assert (score > 0.5) == (facts["answer"] == str(total))
        assert (facts["task_id"], facts["outcome"]) == ("ä/1", "finished")
        assert facts["steps"] == (2 if facts["answer"] == str(total) else 1)
    shown = said_to(vllm, "Add up all the numbers")
    for name in ODD_NAMES:
        visible = "attachment-10.txt" if "\n" in name else name.rpartition("/")[2]
        assert f"/attachments/{visible}" in shown
    observed = {m["content"] for talk in group["messages"] for m in talk if m["role"] == "user"} - {shown}
    assert any(f"{len(ODD_NAMES)} {total} [] /workspace\nrefused PermissionError" in text for text in observed)
    rollouts = lines(home / "run" / "rollouts.jsonl")
    assert len(rollouts) == 4
    assert sum(len(line["completions"]) for line in rollouts) == len(vllm.completions_of("Add up all the numbers"))
    assert all(line["completions"] and line["sandbox"]["id"] and line["steps"] for line in rollouts)
    assert printed_outcomes(ended) == outcomes(home / "run") == {"finished": 4}
    told = json.loads((home / "run" / "run.json").read_text())
    assert told["token_ids"] == "exact"
    assert told["config"]["env"]["group_size"] == 4
    assert (home / "run" / "groups.html").stat().st_size > 1000
    assert "command line" in ended.stderr
    for file in (home / "run").iterdir():
        assert KEY.encode() not in file.read_bytes(), file
    assert KEY not in ended.stdout + ended.stderr


async def test_gaia_s_old_folder_is_run_through_with_its_files(home: Path, vllm: ScriptedEndpoint) -> None:
    write_gaia(home / "gaia")
    ended = await run_cleanly(
        *in_docker(home, vllm, dataset="gaia", dataset_path="gaia", scoring_strategy="correctness"),
        directory=home,
    )
    assert ended.code == 0, ended.stderr
    groups = {group["overrides"][0]["task_id"]: group for group in lines(home / "run" / "groups.jsonl")}
    assert set(groups) == {row["task_id"] for row in GAIA_ROWS}
    for group in groups.values():
        check_shapes(group, 2, exact=True)
        assert sorted(group["scores"]) == [0.0, 1.0]
    assert {line["level"] for line in lines(home / "run" / "rollouts.jsonl")} == {"1", "2", "3"}
    assert "/attachments/c61d-0002.txt" in said_to(vllm, "Which word")
    # Reference answers stay on our side.
    for task, answer in (("Which word", "Ångström"), ("thousand and one", "1002")):
        asked = [
            message["content"] for served in vllm.completions_of(task) for message in served["call"]["messages"]
        ]
        assert asked
        assert answer not in "".join(asked)


# As they stand in the README of the system before this one.
PREDECESSOR = {
    "minimal": (
        1,
        r"""python -m environments.smolagents_integration.smolagents_env process \
  --env.data_path_to_save_groups output/gaia/smolagents_output.jsonl \
  --env.total_steps 1 \
  --env.group_size 2 \
  --env.include_messages true \
  --env.max_concurrent_processes 8 \
  --env.use_chat_completion true \
  --openai.model_name "gpt-4o" \
  --openai.base_url "https://api.openai.com/v1" \
  --openai.api_key x""",
    ),
    "standard": (
        10,
        r"""python -m environments.smolagents_integration.smolagents_env process \
  --env.data_path_to_save_groups output/gaia/smolagents_output.jsonl \
  --env.total_steps 10 \
  --env.group_size 2 \
  --env.include_messages true \
  --env.max_concurrent_processes 8 \
  --env.use_chat_completion true \
  --openai.model_name "gpt-4o" \
  --openai.base_url "https://api.openai.com/v1" \
  --openai.api_key x""",
    ),
    "local server": (
        10,
        r"""python -m environments.smolagents_integration.smolagents_env process \
  --env.data_path_to_save_groups output/gaia/smolagents_output.jsonl \
  --env.total_steps 10 \
  --env.group_size 2 \
  --env.include_messages true \
  --env.max_concurrent_processes 8 \
  --env.use_chat_completion true \
  --openai.model_name "your-model-name" \
  --openai.base_url "http://localhost:8000/v1" """,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("groups", "command"), PREDECESSOR.values(), ids=PREDECESSOR)
async def test_the_predecessor_s_commands_work(home: Path, groups: int, command: str) -> None:
    write_gaia(home / "data" / "gaia")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:4] == ["python", "-m", "environments.smolagents_integration.smolagents_env", "process"]
    environ = {"OPENAI_API_KEY": KEY, "ORCHESTRATOR_ENV__TOKENIZER_NAME": str(tokenizer_folder())}
    model = words[words.index("--openai.model_name") + 1]
    with scripted_endpoint(SCRIPT, "--dialect", "openai", "--api-key", KEY, "--model", model) as endpoint:
        words[words.index("--openai.base_url") + 1] = endpoint.base_url
        ended = await run_cleanly(*words[4:], directory=home, environ=environ)
    assert ended.code == 0, ended.stderr
    written = lines(home / "output" / "gaia" / "smolagents_output.jsonl")
    assert len(written) == groups
    for group in written:
        check_shapes(group, 2, exact=False)
    assert (home / "output" / "gaia" / "smolagents_output.html").is_file()
    (run_directory,) = (home / "runs").iterdir()
    assert printed_outcomes(ended) == outcomes(run_directory) == {"finished": 2 * groups}
    # More groups than there are tasks: each comes round again.
    rounds = Counter(group["overrides"][0]["task_id"] for group in written)
    assert max(rounds.values()) - min(rounds.values()) <= 1
    assert KEY not in ended.stdout + ended.stderr + (run_directory / "run.json").read_text()


async def test_bad_rows_are_reported_and_the_run_goes_on(home: Path, vllm: ScriptedEndpoint) -> None:
    write_rows(
        home,
        "{torn",
        {"task_id": "good 1", "question": "simple: two and two?", "answer": "4"},
        {"task_id": "no answer", "question": "simple?"},
        {"task_id": "no file", "question": "simple?", "answer": "4", "files": ["absent.txt"]},
        {"task_id": "outside", "question": "simple?", "answer": "4", "files": ["../../etc/passwd"]},
        ["no object"],
        {"task_id": "good 2", "question": "simple: three and one?", "answer": 4},
        {"task_id": "never read", "question": "simple: and so on?", "answer": 4},
    )
    ended = await run_cleanly(*in_docker(home, vllm, total_steps=2), directory=home)
    assert ended.code == 0, ended.stderr
    groups = lines(home / "run" / "groups.jsonl")
    assert {group["overrides"][0]["task_id"] for group in groups} == {"good 1", "good 2"}
    bad = [line for line in lines(home / "run" / "rollouts.jsonl") if line["outcome"] == "bad_task"]
    assert {line["task_id"] for line in bad} >= {"no answer", "no file", "outside"}
    assert all(line["reason"] and "\n" not in line["reason"] for line in bad)
    assert printed_outcomes(ended) == outcomes(home / "run") == {"finished": 4, "bad_task": 5}
    assert "bad task outside" in ended.stderr
