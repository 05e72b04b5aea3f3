"""Lines that are compressed one by one: in order and alone, cut short, damaged, and made to fill the memory."""

from __future__ import annotations

import asyncio
import json
import tempfile
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import OutputError
from orchestrator.run.frames import END, PackedLine, Packer, ZstdCompressor, ZstdDecompressor, lines_from
from orchestrator.run.lenient import json_lines
from orchestrator.run.lines import (
    JsonLines,
    end_now,
    text_at,
    texts,
)
from orchestrator.run.repair import set_end_aside, set_torn_end_aside

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
    """50 lines in four frames: 16, 16, 16, 2."""
    return written(tmp_path / "rollouts.jsonl.zst", VALUES)


def killed(file: Path) -> bytes:
    """The file as a writer leaves it that is killed: its last frame is open."""
    whole = file.read_bytes()
    assert whole.endswith(END)
    file.write_bytes(whole[: -len(END)])
    return whole[: -len(END)]


def compressed(text: bytes) -> bytes:
    """As `zstd` packs it, in one frame."""
    return ZstdCompressor().compress(text, ZstdCompressor.FLUSH_FRAME)


def values(path: Path) -> list[object]:
    return [value for _, value in json_lines(path)]


def test_what_is_written_is_read_in_order_and_alone(file: Path) -> None:
    found = list(texts(file))
    assert [json.loads(line.text) for line in found] == VALUES
    assert [line.number for line in found] == list(range(1, 51))
    assert [text_at(file, line.offset) for line in found] == [line.text for line in found]
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
    for line in first:
        assert [json.loads(one.text)["n"] for one in texts(file, end=line.offset)] == list(range(line.number - 1))
        following = next(texts(file, start=line.end))
        assert json.loads(following.text)["n"] == line.number


def test_an_open_frame_is_read_up_to_its_last_line_and_goes_on(tmp_path: Path) -> None:
    file, packer = tmp_path / "groups.jsonl.zst", Packer()
    place = 0
    for n in range(40):
        with file.open("ab") as end:
            end.write(packer.packed([b'{"n": %d}\n' % n]))
        assert [json.loads(line.text)["n"] for line in texts(file, start=place) if line.is_whole] == [n]
        place = end_now(file, growing=True)
        assert len(list(texts(file, end=place))) == n + 1


@pytest.mark.parametrize("left", [0, 1, 2, 5, 9])
def test_what_a_killed_writer_left_unfinished_is_set_aside_and_nothing_else(file: Path, left: int) -> None:
    whole = killed(file)
    file.write_bytes(whole + b"\x85\x02\x00"[:left] + b"x" * max(0, left - 3))
    assert values(file)[:50] == VALUES
    assert set_torn_end_aside(file) == left
    assert file.read_bytes() == whole + END
    assert Path(f"{file}.damaged").exists() == (left > 0)
    assert set_torn_end_aside(file) == 0
    written(file, [{"n": 50}])
    assert values(file) == [*VALUES, {"n": 50}]


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_at_any_byte_loses_one_line_at_most_and_the_file_goes_on(file: Path, step: int) -> None:
    whole = file.read_bytes()
    ends = [line.end for line in read_frames(file)]
    beside = {end + more for end in ends for more in (-1, 0, 1)} & set(range(len(whole)))
    for size in sorted({*range(0, len(whole), step), *beside}):
        file.write_bytes(whole[:size])
        set_torn_end_aside(file)
        kept = sum(end <= size for end in ends)
        assert values(file) == VALUES[:kept]
        written(file, ["on"])
        assert [json.loads(line.text) for line in texts(file)] == [*VALUES[:kept], "on"]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.95])
def test_a_finished_file_that_was_cut_says_so(file: Path, share: float) -> None:
    """As after a copy that broke off: nothing of a line is left over, and the lines before it are good."""
    whole = file.read_bytes()
    ends = [line.end for line in read_frames(file)]
    size = max(end for end in ends if end <= share * len(whole))
    file.write_bytes(whole[:size])
    closed = size in (ends[15], ends[31], ends[47])
    assert values(file) == [*VALUES[: ends.index(size) + 1], *([] if closed else [None])]


def test_all_damage_at_the_end_is_set_aside_as_it_is(file: Path) -> None:
    whole = file.read_bytes()
    garbage = bytes(50) + b"\x28\xb5\x2f\xfd" + b"junkjunk" * 30
    file.write_bytes(whole + garbage)
    assert set_torn_end_aside(file) == len(garbage)
    assert file.read_bytes() == whole
    assert Path(f"{file}.damaged").read_bytes() == garbage
    written(file, ["on"])
    assert [json.loads(line.text) for line in texts(file)] == [*VALUES, "on"]


def test_a_frame_whose_head_is_damaged_is_kept_for_who_can_mend_it(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    last = read_frames(file)[-1].frame
    whole[last] ^= 1
    file.write_bytes(whole)
    set_torn_end_aside(file)
    assert values(file) == VALUES[:48]
    assert Path(f"{file}.damaged").read_bytes() == whole[last:]


def test_what_another_program_packed_is_cut_where_a_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl.zst"
    lines = [json.dumps(value).encode() + b"\n" for value in VALUES]
    file.write_bytes(compressed(b"".join(lines)))
    places = list(texts(file))
    assert set_end_aside(file, places[40].offset) != 0
    assert values(file) == VALUES[:40]
    assert Path(f"{file}.torn").read_bytes() == b"".join(lines[40:])
    file.write_bytes(compressed(b"".join(lines) + b'{"n": 5'))
    set_torn_end_aside(file)
    written(file, [{"n": "on"}])
    assert values(file) == [*VALUES, {"n": "on"}]


def test_frames_without_data_are_passed_over(file: Path) -> None:
    skipped = (0x184D2A53).to_bytes(4, "little") + (9).to_bytes(4, "little") + b"anything."
    file.write_bytes(skipped + file.read_bytes() + skipped)
    assert values(file) == VALUES


@pytest.mark.long
def test_few_bytes_hold_no_million_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl.zst"
    block = b"\x02\x00\x10" + b"\n"  # 128 KiB of newlines
    file.write_bytes(b"\x28\xb5\x2f\xfd\x00\x58" + block * 1000 + END)
    assert sum(1 for _ in texts(file)) < 500_000


def read_frames(file: Path) -> list[PackedLine]:
    with file.open("rb") as opened:
        return list(lines_from(opened, 1 << 20))


def test_zeros_that_a_loss_of_power_leaves_are_set_aside(file: Path) -> None:
    whole = killed(file)
    file.write_bytes(whole + bytes(5000))
    set_torn_end_aside(file)
    assert values(file) == VALUES
    assert file.read_bytes() == whole + END


def test_a_group_s_lines_can_be_taken_off_the_end(file: Path) -> None:
    lines = list(texts(file))
    for keep in (49, 48, 47, 16, 3, 0):
        set_end_aside(file, lines[keep].offset)
        assert values(file) == VALUES[:keep]
    aside = [json.loads(line) for line in Path(f"{file}.torn").read_text().splitlines()]
    assert sorted(one["n"] for one in aside) == list(range(50))


def test_after_a_full_disk_the_file_goes_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        lines = JsonLines(file)
        await lines.append(lambda: [{"n": 50}])
        with monkeypatch.context() as full:
            full.setattr(lines, "_file", Full(lines._file))
            with pytest.raises(OutputError):
                await lines.append(lambda: [{"n": "lost"}])
        await lines.append(lambda: [{"n": 51}, {"n": 52}])
        lines.close()

    asyncio.run(work())
    assert values(file) == [*VALUES, {"n": 50}, {"n": 51}, {"n": 52}]


LARGE_VALUES = [{"n": Random(n).randbytes(6000).hex()} for n in range(64)]
LARGE = Packer().packed([json.dumps(value).encode() + b"\n" for value in LARGE_VALUES])


class Full:
    """A file on a disk that takes a few bytes more."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        self._file.write(data[:7])
        raise OSError(28, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@given(place=st.integers(0, 1 << 20), byte=st.integers(1, 255))
def test_damage_costs_a_frame_or_two(place: int, byte: int) -> None:
    damaged = bytearray(LARGE)
    damaged[place % len(LARGE)] ^= byte
    with tempfile.NamedTemporaryFile(suffix=".zst") as file:
        file.write(damaged)
        file.flush()
        found = values(Path(file.name))
    assert len([value for value in found if value in LARGE_VALUES]) >= len(LARGE_VALUES) - 32


def test_a_line_that_unpacks_to_more_than_any_line_is_refused_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.run.lines.MAX_LINE_BYTES", 1 << 20)
    file = tmp_path / "groups.jsonl.zst"
    file.write_bytes(compressed(b'{"n": 1}\n') + compressed(b" " * (64 << 20)) + compressed(b'{"n": 2}\n'))
    assert file.stat().st_size < 1 << 14
    tracemalloc.start()
    found = values(file)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    assert found == [{"n": 1}, None, {"n": 2}]


def test_what_is_no_such_file_has_one_unusable_line(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl.zst"
    file.write_bytes(b'{"tokens": []}\n')
    assert values(file) == [None]
    file.write_bytes(b"")
    assert values(file) == []


def test_a_file_that_another_program_packed_is_read_as_well(tmp_path: Path) -> None:
    file = tmp_path / "groups.jsonl.zst"
    file.write_bytes(compressed(b"".join(json.dumps(value).encode() + b"\n" for value in VALUES)))
    assert values(file) == VALUES
    assert [json.loads(text_at(file, line.offset)) for line in texts(file)] == VALUES
