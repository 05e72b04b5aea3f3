"""The file tools: text of any encoding, clear words about everything else."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from sandbox.worker import tools as files
from sandbox.worker.tools import FILE_FUNCTIONS, FILE_TOOLS, MAX_READ_BYTES, decode_text


@pytest.fixture(autouse=True)
def _workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "Größe €".encode(),
        codecs.BOM_UTF8 + "Größe €".encode(),
        "Größe €".encode("utf-16"),
        codecs.BOM_UTF16_BE + "Größe €".encode("utf-16-be"),
        "Größe €".encode("utf-32"),
        codecs.BOM_UTF32_BE + "Größe €".encode("utf-32-be"),
        "Größe €".encode("cp1252"),
    ],
)
def test_text_is_read_in_any_encoding(content: bytes) -> None:
    assert decode_text(content, "f") == "Größe €"


def test_bytes_that_no_encoding_knows_are_still_text() -> None:
    assert decode_text(b"a\x81\xff", "f") == "a\x81ÿ"
    assert decode_text(codecs.BOM_UTF8 + b"\xff", "f") == "\ufffd"
    assert decode_text(b"", "f") == ""


def test_line_ends_are_those_of_python() -> None:
    assert decode_text(b"a\r\nb\rc\n", "f") == "a\nb\nc\n"


def test_a_binary_file_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(ValueError, match=r"x\.png is a binary file of 6 bytes, not text"):
        files.read_file("x.png")


def test_a_huge_file_is_not_read_at_once(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_READ_BYTES + 1)
    with pytest.raises(ValueError, match="too many to read at once"):
        files.read_file("huge")


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    assert files.write_file("new/dir/a.txt", "one\n") == f"Wrote 4 characters to {tmp_path}/new/dir/a.txt"
    assert files.append_to_file("new/dir/a.txt", "två") == f"Appended 3 characters to {tmp_path}/new/dir/a.txt"
    assert files.read_file(str(tmp_path / "new/dir/a.txt")) == "one\ntvå"
    files.write_file("new/dir/a.txt", "fresh")
    assert files.read_file("new/dir/a.txt") == "fresh"
    assert files.append_to_file("b.txt", "x").startswith("Appended 1")


def test_errors_name_the_path_and_the_trouble(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such file.*absent\.txt"):
        files.read_file("absent.txt")
    with pytest.raises(IsADirectoryError):
        files.read_file(".")
    with pytest.raises(TypeError, match="the content must be text, not int"):
        files.write_file("a.txt", 5)  # type: ignore[arg-type]


def test_the_prompt_and_the_worker_know_the_same_tools() -> None:
    assert list(FILE_FUNCTIONS) == [tool.name for tool in FILE_TOOLS]
