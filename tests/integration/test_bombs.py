"""A recording may be anybody's: what its few bytes become is bounded, whoever reads it."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from orchestrator.completion.replay import ReplayCompleter
from orchestrator.errors import EnvironmentUnusable
from orchestrator.run import lines as jsonl
from orchestrator.run.line import attempt_line
from tests.fakes.plans import a_member

pytestmark = pytest.mark.long

MIB = 1 << 20
MOST_BYTES = 800 * MIB
LONG = 100_000
# What it takes is measured in a process of its own, whose memory has an end where ours would not.
READERS = {
    "replay:": "from orchestrator.completion.replay import ReplayCompleter; ReplayCompleter.open(run)",
    "replay": (
        "from orchestrator.run.replay import Replayable; list(Replayable.read(run / 'rollouts.jsonl').attempts())"
    ),
    "resume": (
        "from orchestrator.run.earlier import read_earlier, repair_groups; "
        "repair_groups(run / 'groups.jsonl', several_lines=True); "
        "read_earlier(run / 'rollouts.jsonl', run / 'groups.jsonl', lambda line: None)"
    ),
    "torn": "from orchestrator.run.directory import RunDirectory; RunDirectory(run, resume=True)",
    "verify": "from orchestrator.commands.verify import run as verify; verify(run)",
    "view": "from orchestrator.commands import view; "
    "view.run(run, run / 'page.html', 'none', False, *[None] * 3, False, False, *[None] * 5)",
}
READ = """
import resource, sys
from pathlib import Path
from orchestrator.errors import OrchestratorError
run = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
try:
    {reader}
except OrchestratorError as error:
    print("refused:", error)
# Not `ru_maxrss`, which begins with the memory of whoever started this process.
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(own * 1024)
"""


def a_line() -> dict[str, Any]:
    line: dict[str, Any] = orjson.loads(jsonl.dumps(attempt_line(a_member())))
    return line


def packed(path: Path, pieces: Iterator[bytes]) -> None:
    with lzma.open(path, "wb", preset=1) as file:
        for piece in pieces:
            file.write(piece)


def read(reader: str, run: Path) -> tuple[str, int]:
    """(what it says, its memory in bytes)."""
    program = READ.replace("{reader}", READERS[reader])
    ended = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    *said, peak = ended.stdout.splitlines()
    return "\n".join(said), int(peak)


def lots_of_text() -> Iterator[bytes]:
    start, end = json.dumps(a_line() | {"notes": ["@"]}).encode().split(b"@")
    return iter((start, *[b"a" * MIB] * 2048, end, b"\n"))


def lots_of_numbers() -> Iterator[bytes]:
    start, end = json.dumps(a_line() | {"notes": ["@"]}).encode().split(b'"@"')
    return iter((start, *[b"0.25," * 200_000] * 1024, b"0", end, b"\n"))


def lots_of_lines() -> Iterator[bytes]:
    line = json.dumps(a_line() | {"notes": ["a" * MIB]}).encode() + b"\n"
    return iter([line] * 2048)


@pytest.mark.parametrize("made", [lots_of_text, lots_of_numbers, lots_of_lines], ids=lambda m: str(m.__name__))
def test_a_recording_of_kilobytes_does_not_become_gigabytes(tmp_path: Path, made: Any) -> None:
    packed(tmp_path / "rollouts.jsonl.xz", made())
    assert (tmp_path / "rollouts.jsonl.xz").stat().st_size < 2 * MIB
    said, peak = read("replay:", tmp_path)
    assert "refused: " in said
    assert "64 MiB" in said
    assert peak < MOST_BYTES


def empty_lists() -> bytes:
    return json.dumps(a_line() | {"notes": ["@"]}).encode().replace(b'"@"', b"[]," * 16_000_000 + b"0")


def prompts_of_prompts() -> bytes:
    line = a_line()
    completion = line["completions"][0] | {"token_ids": None, "logprobs": None, "prompt_ids": None}
    first = completion | {"messages": [{"role": "user", "content": ""}] * LONG}
    more = completion | {"kept": 2 * LONG, "messages": []}
    return json.dumps(line | {"completions": [first, *[more] * 20_000]}).encode()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("made", [empty_lists, prompts_of_prompts], ids=lambda made: str(made.__name__))
def test_no_line_takes_far_more_memory_than_its_text(tmp_path: Path, reader: str, made: Any) -> None:
    line = made() + b"\n"
    for name in ("rollouts.jsonl", "groups.jsonl") if reader != "resume" else ("rollouts.jsonl",):
        (tmp_path / name).write_bytes(json.dumps(a_line()).encode() + b"\n" + line)
    (tmp_path / "groups.jsonl").touch()
    (tmp_path / "run.json").write_text("{}")
    _, peak = read(reader, tmp_path)
    assert peak < MOST_BYTES


def test_what_model_written_text_holds_counts_for_nothing() -> None:
    line = a_line() | {"answer": "[{" * 3_000_000 + '\\"'}
    assert jsonl.loads(jsonl.dumps(line)) == line


def test_an_honest_recording_is_read_packed_or_not(tmp_path: Path) -> None:
    line = jsonl.dumps(a_line()) + b"\n"
    packed(tmp_path / "rollouts.jsonl.xz", iter([line]))
    ReplayCompleter.open(tmp_path)
    (tmp_path / "rollouts.jsonl.xz").write_bytes((tmp_path / "rollouts.jsonl.xz").read_bytes()[:-20])
    with pytest.raises(EnvironmentUnusable, match="damaged"):
        ReplayCompleter.open(tmp_path)


def test_a_torn_end_of_any_length_is_set_aside_piece_by_piece(tmp_path: Path) -> None:
    good = jsonl.dumps(a_line()) + b"\n"
    file = tmp_path / "rollouts.jsonl"
    with file.open("wb") as torn:
        torn.write(good)
        torn.truncate(len(good) + (1 << 30))  # a hole: nothing is on the disk
    _, peak = read("torn", tmp_path)
    assert peak < MOST_BYTES
    assert file.read_bytes() == good
    (tmp_path / "rollouts.jsonl.torn").unlink()
