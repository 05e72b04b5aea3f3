"""A table as a task source."""

from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.tasks import open_tasks
from orchestrator.types import BadTask, Task


def read(tmp_path: Path, content: str | bytes) -> list[Task | BadTask]:
    path = tmp_path / "tasks.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    source = open_tasks(f"csv:{path}", dataset_path=Path("."), split="validation")
    assert list(source) == list(source)
    return list(source)


def test_columns_are_those_of_jsonl_rows(tmp_path: Path) -> None:
    for name in ("a.txt", "b c.txt", "d;e.txt"):
        (tmp_path / name).write_text("x")
    first, second, third = read(
        tmp_path,
        "\ufefftask_id,question,answer,files,level,metadata,limits\r\n"
        '1,"What, then?",42,a.txt; b c.txt,2,"{""tags"": [""x""]}","{""max_steps"": 3}"\r\n'
        '2,"two\r\nlines",yes,"[""d;e.txt""]",,,\r\n'
        "\r\n"
        ",no id,1,,,,\r\n",
    )
    assert isinstance(first, Task)
    assert isinstance(second, Task)
    assert isinstance(third, Task)
    assert (first.task_id, first.question, first.answer, first.level) == ("1", "What, then?", "42", "2")
    assert [a.name for a in first.attachments] == ["a.txt", "b c.txt"]
    assert (first.metadata, first.limits) == ({"tags": ["x"]}, {"max_steps": 3})
    assert second.question == "two\nlines"
    assert [a.name for a in second.attachments] == ["d;e.txt"]
    assert third.task_id.startswith("line-")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1,What?", "2 cells under a header of 4"),
        ("1,What?,a,b,c", "5 cells"),
        ("1,,42,", "question is missing"),
        ("1,What?,,", "answer is missing"),
        ("1,What?,42,{no json", "metadata is no JSON"),
        ("1,What?,42,[1]", "metadata must be an object"),
        ('1,"Wh"at?,42,', "no CSV"),
        (b"1,caf\xe9?,42,", "no valid UTF-8"),
        (b'1,What?,42,"{""a"": ""\xff""}"', "metadata is no JSON"),
    ],
)
def test_a_malformed_record_spoils_no_other(tmp_path: Path, line: str | bytes, reason: str) -> None:
    middle = line.encode() if isinstance(line, str) else line
    header = b"task_id,question,answer,metadata\n"
    first, bad, last = read(tmp_path, header + b"first,q,1,\n" + middle + b"\nlast,q,1,\n")
    assert (first.task_id, last.task_id) == ("first", "last")
    assert isinstance(bad, BadTask)
    assert reason in bad.reason
    assert bad.task_id in ("1", "line 3")


def test_a_long_question_is_read(tmp_path: Path) -> None:
    (task,) = read(tmp_path, f"question,answer\n{'x' * 500_000},1\n")
    assert isinstance(task, Task)


@pytest.mark.parametrize("header", ["", "a,b", "question,question", "answer"])
def test_a_header_without_question_is_refused_at_start(tmp_path: Path, header: str) -> None:
    with pytest.raises(ConfigError, match="columns"):
        read(tmp_path, f"{header}\n1,2\n")


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        open_tasks(f"csv:{tmp_path}/no.csv", dataset_path=Path("."), split="validation")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_that_of_the_header(tmp_path: Path, delimiter: str) -> None:
    rows = [("task_id", "question", "answer"), ("a", "What, then; or | so\t?", "1"), ("b", "Why?", "2")]
    text = "\r\n".join(delimiter.join(f'"{cell}"' for cell in row) for row in rows)
    tasks = read(tmp_path, text)
    assert [(t.task_id, t.question, t.answer) for t in tasks if isinstance(t, Task)] == list(rows[1:])


def test_a_header_without_a_question_is_refused_as_it_stands(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it has 'prompt;answer'"):
        read(tmp_path, "prompt;answer\na;b\n")
