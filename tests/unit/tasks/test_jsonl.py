"""Rows of every malformed kind, among good ones."""

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from orchestrator.tasks import open_tasks
from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, Task


def read(path: Path) -> list[Task | BadTask]:
    return list(open_tasks(f"jsonl:{path}", dataset_path=Path("data/gaia"), split="validation"))


def row(**changes: Any) -> dict[str, Any]:
    return {"task_id": "t", "question": "What is 6 x 7?", "answer": "42"} | changes


def one(tmp_path: Path, line: str | bytes | dict[str, Any]) -> Task | BadTask:
    """What becomes of one line, between two good ones that must not suffer."""
    if isinstance(line, dict):
        line = json.dumps(line)
    middle = line.encode() if isinstance(line, str) else line
    first, last = (json.dumps(row(task_id=name)).encode() for name in ("first", "last"))
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(first + b"\n" + middle + b"\n" + last + b"\n")
    before, *found, after = read(path)
    assert isinstance(before, Task)
    assert isinstance(after, Task)
    assert len(found) == 1
    return found[0]


def test_an_image_in_a_file_is_one_beside_the_dataset(tmp_path: Path) -> None:
    (tmp_path / "own.tar").touch()
    (tmp_path / "away").symlink_to("/etc")
    task = one(tmp_path, row(image="./own.tar"))
    assert isinstance(task, Task)
    assert task.image == str(tmp_path.resolve() / "own.tar")
    assert isinstance(one(tmp_path, row(image="./away/passwd")), BadTask)


def test_a_full_row_becomes_a_task(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1,2")
    task = one(
        tmp_path,
        row(
            files=["a.csv"],
            level=2,
            metadata={"tags": ["sum"], "deep": {"x": [1.5, None]}},
            scorer="exact",
            image="my/image:1.0",
            limits={"max_steps": 3, "rollout_timeout": 60.5},
        ),
    )
    assert isinstance(task, Task)
    assert (task.task_id, task.question, task.answer, task.level) == ("t", "What is 6 x 7?", "42", "2")
    assert [(a.name, a.size_bytes) for a in task.attachments] == [("a.csv", 3)]
    assert task.metadata["deep"] == {"x": [1.5, None]}
    assert (task.scorer, task.image) == ("exact", "my/image:1.0")
    assert task.limits == {"max_steps": 3, "rollout_timeout": 60.5}
    assert task.source == f"jsonl:{tmp_path}/tasks.jsonl"


def test_gaias_names_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    gaia = {
        "task_id": "c61d22de",
        "Question": "What?",
        "Level": 1,
        "Final answer": "egalitarian",
        "file_name": "x.txt",
        "Annotator Metadata": {"Steps": "1. look", "Number of steps": "1"},
    }
    task = one(tmp_path, gaia)
    assert isinstance(task, Task)
    assert (task.question, task.answer, task.level) == ("What?", "egalitarian", "1")
    assert task.attachments[0].name == "x.txt"
    assert task.metadata["Steps"] == "1. look"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"question": None}, "question is missing"),
        ({"question": ""}, "question is missing"),
        ({"question": " \n\t"}, "question is blank"),
        ({"question": 7}, "question must be text, not int"),
        ({"question": ["a"]}, "question must be text, not list"),
        ({"question": "x" * 10_000_000}, "at most 1048576"),
        ({"answer": None}, "answer is missing"),
        ({"answer": "  "}, "answer is blank"),
        ({"answer": True}, "answer must be text, not bool"),
        ({"answer": []}, "answer is a list of 0"),
        ({"answer": ["42"] * 101}, "answer is a list of 101"),
        ({"answer": ["42", ["43"]]}, "answer must be text, not list"),
        ({"answer": ["42", " "]}, "answer is blank"),
        ({"answer": "x" * 70_000}, "answer has 70000 bytes"),
        ({"answer": None, "Final answer": "?"}, "hidden"),
        ({"level": [1]}, "level must be text"),
        ({"level": "x" * 65}, "level has 65 characters"),
        ({"metadata": [1]}, "metadata must be an object"),
        ({"metadata": "{}"}, "metadata must be an object"),
        ({"files": {"a": 1}}, "files must be a list"),
        ({"files": [1]}, "files must be a list"),
        ({"files": ["../tasks.jsonl"]}, "leaves the dataset's folder"),
        ({"files": ["missing"]}, "does not exist"),
        ({"file_name": "/etc/passwd"}, "absolute"),
        ({"scorer": "python:os:system"}, "is unknown; valid are gaia, exact"),
        ({"scorer": ["gaia"]}, "is unknown; valid are gaia, exact"),
        ({"scorer": "reasoning_gym"}, "needs dataset, seed, index in metadata"),
        ({"image": "a b; rm"}, "no image name"),
        ({"image": "--privileged"}, "no image name"),
        ({"image": "/etc/passwd"}, "no image name"),
        ({"image": "./missing.tar"}, "not beside the dataset"),
        ({"image": "./\0"}, "not beside the dataset"),
        ({"image": "./../.."}, "leads out of the dataset's folder"),
        ({"limits": [1]}, "limits must be an object"),
        ({"limits": {"memory": 1}}, "is unknown; valid are max_steps"),
        ({"limits": {"max_steps": 1.5}}, "whole number"),
        ({"limits": {"max_steps": True}}, "whole number"),
        ({"limits": {"max_steps": 0}}, "above 0"),
        ({"limits": {"rollout_timeout": -1}}, "above 0"),
        ({"limits": {"rollout_timeout": 1e12}}, "at most 86400"),
        ({"task_id": " "}, "not be blank"),
        ({"task_id": True}, "task_id must be text"),
        ({"task_id": "x" * 300}, "1 to 256 characters"),
    ],
)
def test_a_malformed_row_is_a_bad_task_with_its_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    bad = one(tmp_path, row(**changes))
    assert isinstance(bad, BadTask)
    assert reason in bad.reason
    assert "\n" not in bad.reason
    assert bad.task_id == ("line 2" if "task_id" in changes and changes["task_id"] != "x" * 300 else bad.task_id)


def test_a_bad_row_is_reported_under_its_own_name(tmp_path: Path) -> None:
    assert one(tmp_path, row(task_id="mine", question="")).task_id == "mine"
    assert one(tmp_path, row(task_id="mine", files=["no"])).task_id == "mine"


@pytest.mark.parametrize(
    "line",
    [
        b'{"task_id": "t", "question": "What?", "answer": "42"',  # torn
        b'{"question": "What?", "answer": NaN}',
        b'{"question": "What?", "answer": "1", "metadata": {"x": NaN}}',
        b'{"question": "What?", "answer": Infinity}',
        b'{"question": "What?", "answer": 1e999}',
        b'{"question": "What?", "answer": "\xff\xfe"}',
        b'{"question": "What?", "answer": "\\ud800"}',
        b'{"question": "What?", "answer": 1' + b"0" * 5000 + b"}",
        b'{"question": "What?", "answer": "1", "metadata": ' + b"[" * 100_000,
        b'{"question": "What?", "answer": "1", "metadata": ' + b'{"a":' * 2000 + b"1" + b"}" * 2001,
        b"What is this?",
        b"{} {}",
        b"\x00\x01\x02",
        b'["question"]',
        b'"text"',
        b"null",
        b"17",
        b"{" + b" " * (17 << 20) + b"}",  # over the bound of a line
    ],
    ids=lambda line: ascii(line[-30:]),
)
def test_a_line_that_is_no_row_is_a_bad_task_named_by_its_line(tmp_path: Path, line: bytes) -> None:
    bad = one(tmp_path, line)
    assert isinstance(bad, BadTask)
    assert bad.task_id == "line 2"
    assert bad.reason
    assert "\n" not in bad.reason


def test_nesting_below_the_parsers_bound_is_fine(tmp_path: Path) -> None:
    deep = b'{"question": "What?", "answer": "1", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 901
    assert isinstance(one(tmp_path, deep), Task)


def test_a_byte_order_mark_blank_lines_and_a_missing_last_newline_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = ["", json.dumps(row(task_id="a")), "   ", "", json.dumps(row(task_id="b"))]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [task.task_id for task in read(path)] == ["a", "b"]
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row()).encode())
    assert isinstance(read(path)[0], Task)


def test_numbers_become_text_as_people_write_them(tmp_path: Path) -> None:
    for given_answer, text in [(42, "42"), (42.0, "42"), (0.1, "0.1"), (-3, "-3"), (1e300, "1e+300"), (0, "0")]:
        task = one(tmp_path, row(answer=given_answer, task_id=7))
        assert isinstance(task, Task)
        assert (task.answer, task.task_id) == (text, "7")


def test_an_id_is_any_text(tmp_path: Path) -> None:
    for name in ("a/b", "../../x", "ü 東京", "two\nlines", "-x", "x" * 256):
        assert one(tmp_path, row(task_id=name)).task_id == name


def test_a_row_without_id_gets_the_same_one_each_time(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "1"}\n')
    first, again = ([task.task_id for task in read(path)] for _ in range(2))
    assert first == again
    assert len(set(first)) == 2
    assert first[0].startswith("line-1-")


def test_the_second_task_of_one_id_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row(task_id=name)) for name in (7, "8", "7", "8")))
    first, second, *rest = read(path)
    assert isinstance(first, Task)
    assert isinstance(second, Task)
    assert all(isinstance(task, BadTask) and "same task_id" in task.reason for task in rest)
    assert len(rest) == 2


def test_a_scorer_that_needs_no_answer_takes_a_row_without(tmp_path: Path) -> None:
    about = {"dataset": "countdown", "seed": 1, "index": 0}
    task = one(tmp_path, row(answer=None, scorer="reasoning_gym", metadata=about))
    assert isinstance(task, Task)
    assert task.answer is None


def test_a_source_reads_again_in_the_same_order(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(row(task_id=n)) + "\n" for n in range(50)))
    source = open_tasks(f"jsonl:{path}", dataset_path=Path("."), split="validation")
    assert list(source) == list(source)
    assert source.name == f"jsonl:{path}"


@pytest.mark.long
def test_ten_thousand_tasks_stream_quickly(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    with path.open("w") as file:
        for n in range(10_000):
            file.write(json.dumps(row(task_id=n, question=f"{n} " + "word " * 200)) + "\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    assert (
        sum(isinstance(task, Task) for task in open_tasks(f"jsonl:{path}", dataset_path=path, split="")) == 10_000
    )
    assert time.process_time() - start < 10  # seconds; measured 0.3: something quadratic would take minutes
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < path.stat().st_size // 1024  # streamed: less than the file itself


@pytest.mark.parametrize("name", ["missing.jsonl", "folder", "pipe", "a\0b"])
def test_a_file_that_cannot_be_read_is_refused_at_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    __import__("os").mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"env\.dataset") as refused:
        open_tasks(f"jsonl:{tmp_path / name}", dataset_path=tmp_path, split="validation")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("dataset", ["", "gaia2", "jsonl", "jsonl:", "nope:x", "JSONL:x"])
def test_an_unknown_dataset_is_refused_with_what_is_valid(dataset: str) -> None:
    with pytest.raises(ConfigError, match="valid are gaia, harbor:PATH, jsonl:PATH"):
        open_tasks(dataset, dataset_path=Path("."), split="validation")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = ["task_id", "question", "answer", "files", "level", "metadata", "scorer", "image", "limits"]


@given(st.dictionaries(st.sampled_from([*NAMES, "Final answer", "file_name"]), values) | values)
def test_whatever_a_row_holds_nothing_is_raised(content: object) -> None:
    made = make_task(content, source="s", place="row 1", root=Path("/nonexistent"))
    assert isinstance(made, Task | BadTask)
    assert made.task_id


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**5000], ids=["nan", "inf", "huge"])
def test_numbers_only_python_rows_can_hold_are_bad_tasks(number: float) -> None:
    for name in ("answer", "task_id", "level"):
        made = make_task(row(**{name: number}), source="s", place="row 1", root=None)
        assert isinstance(made, BadTask)
    if number != 10**5000:
        assert isinstance(make_task(row(metadata={"x": [number]}), source="s", place="r", root=None), BadTask)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 300])
def test_a_path_that_can_be_none_is_refused_in_one_line(kind: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.dataset: '.*' cannot be a path"):
        open_tasks(f"{kind}:{path}", dataset_path=Path(), split="")


def test_a_list_is_of_answers_that_are_all_right(tmp_path: Path) -> None:
    rows = [{"question": "How many?", "answer": [4, "four", "4", "IV"]}, {"question": "One?", "answer": ["one"]}]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    several, one = open_tasks(f"jsonl:{path}", dataset_path=Path("."), split="validation")
    assert isinstance(several, Task)
    assert isinstance(one, Task)
    assert (several.answer, several.other_answers) == ("4", ("four", "IV"))
    assert (one.answer, one.other_answers, one.reference) == ("one", (), "one")
    assert several.reference == "4\nOR\nfour\nOR\nIV"
