"""Lines that are compressed one by one: read in order and alone, cut short, damaged, and made to fill the memory."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.run.frames import ZstdDecompressor, compressed
from orchestrator.run.lenient import json_lines
from orchestrator.run.lines import JsonLines, end_now, line_after, set_torn_end_aside, text_at, texts

VALUES = [{"n": n, "text": "Thought: I add them up. " * n} for n in range(50)]


def written(path: Path, values: Sequence[object]) -> Path:
    async def write() -> None:
        lines = JsonLines(path)
        for value in values:
            await lines.append(lambda value=value: [value])
        lines.close()

    asyncio.run(write())
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "rollouts.jsonl.zst", VALUES)


def values(path: Path) -> list[object]:
    return [value for _, value in json_lines(path)]


def test_what_is_written_is_read_in_order_and_alone(file: Path) -> None:
    found = list(texts(file))
    assert [json.loads(line.text) for line in found] == VALUES
    assert [line.number for line in found] == list(range(1, 51))
    assert [text_at(file, line.offset) for line in found] == [line.text for line in found]
    assert [line.end for line in found] == [*(line.offset for line in found[1:]), file.stat().st_size]
    assert all(line.is_whole for line in found)


def test_any_zstd_program_reads_the_whole_file(file: Path) -> None:
    plain, rest = b"", file.read_bytes()
    while rest:
        program = ZstdDecompressor()
        plain += program.decompress(rest)
        rest = program.unused_data
    assert [json.loads(line) for line in plain.splitlines()] == VALUES
    assert file.stat().st_size < len(plain) / 3


def test_reading_goes_on_where_it_ended(file: Path) -> None:
    first = list(texts(file))
    written(file, [{"n": 50}])
    assert [json.loads(line.text)["n"] for line in texts(file, start=first[-1].end)] == [50]
    assert [json.loads(line.text)["n"] for line in texts(file, end=first[3].offset)] == [0, 1, 2]
    assert line_after(file, first[4].offset) == first[5].offset
    assert line_after(file, file.stat().st_size - 3) == file.stat().st_size


@pytest.mark.parametrize("left", [1, 3, 5, 12, -1])
def test_a_line_that_a_killed_writer_left_unfinished_is_set_aside(file: Path, left: int) -> None:
    whole, last = file.read_bytes(), compressed(b'{"n": 50}\n')
    file.write_bytes(whole + last[:left])
    assert end_now(file, growing=True) == len(whole)
    assert values(file) == [*VALUES, None]
    assert set_torn_end_aside(file) == len(last[:left])
    assert file.read_bytes() == whole
    assert Path(f"{file}.torn").read_bytes() == last[:left]
    assert set_torn_end_aside(file) == 0


@given(place=st.integers(0, 2000), byte=st.integers(1, 255))
def test_damage_costs_the_line_that_it_hit(place: int, byte: int) -> None:
    whole = b"".join(compressed(json.dumps(value).encode() + b"\n") for value in VALUES[:20])
    damaged = bytearray(whole)
    damaged[place % len(whole)] ^= byte
    with tempfile.NamedTemporaryFile(suffix=".zst") as file:
        file.write(damaged)
        file.flush()
        found = values(Path(file.name))
    readable = [value for value in found if value is not None]
    assert len(readable) >= 18  # the length of a frame may be what was hit, which costs the next one too
    assert all(value in VALUES for value in readable)
    assert found != VALUES[:20]


def test_a_line_that_unpacks_to_more_than_any_line_is_refused_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.run.lines.MAX_LINE_BYTES", 1 << 20)
    file = tmp_path / "groups.jsonl.zst"
    bomb = compressed(b" " * (64 << 20))
    assert len(bomb) < 1 << 14
    file.write_bytes(compressed(b'{"n": 1}\n') + bomb + compressed(b'{"n": 2}\n'))
    assert values(file) == [{"n": 1}, None, {"n": 2}]
    assert max(len(line.text) for line in texts(file)) < 100


def test_what_is_no_such_file_has_one_unusable_line(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl.zst"
    file.write_bytes(b'{"tokens": []}\n')
    assert values(file) == [None]
    file.write_bytes(b"")
    assert values(file) == []
