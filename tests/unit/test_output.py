"""Files that rollouts leave: what the sandbox sends of a hostile folder, and what is made of a hostile stream."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ProtocolError
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.left_files import OutputReceiver, OutputRule
from orchestrator.types import Output, OutputFile
from sandbox.pid1.outbox import write_output
from tests.fakes.completers import ScriptedCompleter
from tests.fakes.plans import a_plan


def sent(folder: Path, *, max_files: int = 10, max_bytes: int = 1000) -> bytes:
    """What the sandbox's side writes of `folder`."""
    readable, writable = os.pipe()
    pieces: list[bytes] = []

    def read() -> None:
        while piece := os.read(readable, 7):
            pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert write_output(folder, writable, max_files=max_files, max_bytes=max_bytes) == 0
    finally:
        os.close(writable)
        reader.join()
        os.close(readable)
    return b"".join(pieces)


def received(stream: bytes, root: Path, pieces: int = 1, **limits: int) -> Output:
    receiver = OutputReceiver(OutputRule(root, limits.get("max_files", 10), limits.get("max_bytes", 1000)), "r")
    size = max(1, -(-len(stream) // pieces))
    for start in range(0, len(stream), size):
        receiver.feed(stream[start : start + size])
    return receiver.finish()


def record(path: bytes, content: bytes, size: int | None = None) -> bytes:
    length = len(content) if size is None else size
    return b"F" + len(path).to_bytes(2, "big") + path + length.to_bytes(8, "big") + content


END = b"E" + bytes(4)


def test_files_come_back_and_nothing_else_does(tmp_path: Path) -> None:
    folder, root = tmp_path / "output", tmp_path / "run"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "plain.txt").write_text("one")
    (folder / "a" / "b" / "deep.bin").write_bytes(bytes(range(256)))
    (folder / "empty").touch()
    (folder / "line\nbreak").write_text("x")
    (folder / os.fsdecode(b"caf\xe9")).write_text("y")
    os.symlink("/etc/passwd", folder / "link")
    os.symlink("/etc", folder / "folder link")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
    (folder / "secret").write_text("z")
    (folder / "secret").chmod(0)
    deep = folder.joinpath(*"12345678")
    deep.mkdir(parents=True)
    (deep / "too deep").touch()
    output = received(sent(folder), root, pieces=97)
    names = {file.path: file.size_bytes for file in output.files}
    readable_by_root = {"secret": 1} if os.geteuid() == 0 else {}
    expected = {"plain.txt": 3, "a/b/deep.bin": 256, "empty": 0} | readable_by_root
    neutral = {name: size for name, size in names.items() if name not in expected}
    assert {name: names[name] for name in expected} == expected
    assert len(neutral) == 2
    assert all(name.startswith("unnamed-") and size == 1 for name, size in neutral.items())
    assert output.complete
    assert output.left_out == 5 + (os.geteuid() != 0)  # two links, a pipe, a socket, a folder too deep
    assert (root / "r" / "a/b/deep.bin").read_bytes() == bytes(range(256))
    assert {p.relative_to(root / "r").as_posix() for p in (root / "r").rglob("*") if p.is_file()} == set(names)
    assert [p.name for p in root.iterdir()] == ["r"]


def test_limits_leave_out_what_is_too_much(tmp_path: Path) -> None:
    folder = tmp_path / "output"
    folder.mkdir()
    for name, size in (("a", 600), ("b", 500), ("c", 400), ("d", 1)):
        (folder / name).write_bytes(bytes(size))
    output = received(sent(folder), tmp_path / "run")
    assert [(f.path, f.size_bytes) for f in output.files] == [("a", 600), ("c", 400)]
    assert output.left_out == 2
    few = received(sent(folder, max_files=1), tmp_path / "run")
    assert [f.path for f in few.files] == ["a"]
    assert [p.name for p in (tmp_path / "run" / "r").iterdir()] == ["a"], "the earlier files are replaced"


@pytest.mark.parametrize("kind", ["missing", "file", "link", "empty"])
def test_a_folder_that_holds_nothing_makes_none(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "output"
    match kind:
        case "file":
            folder.touch()
        case "link":
            folder.symlink_to("/etc")
        case "empty":
            folder.mkdir()
    assert received(sent(folder), tmp_path / "run") == Output()
    assert not (tmp_path / "run" / "r").exists()


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b"tar", "not a stream of files"),
        (record(b"../x", b"1"), "leaves its folder"),
        (record(b"/etc/x", b"1"), "leaves its folder"),
        (record(b"a/./x", b"1"), "leaves its folder"),
        (record(b"a//x", b"1"), "leaves its folder"),
        (record(b"a\0b", b"1"), "leaves its folder"),
        (record(b"/".join([b"d"] * 9), b"1"), "leaves its folder"),
        (record(b"", b"1"), "a path of 0 bytes"),
        (record(b"x" * 1025, b"1"), "a path of 1025 bytes"),
        (record(b"a", b"1") * 2, "two output files of one path"),
        (record(b"a", b"1") + record(b"a/b", b"1"), "two output files of one path"),
        (record(b"a/b", b"1") + record(b"a", b"1"), "two output files of one path"),
        (record(b"a", b"", size=1001), "more than 1000 bytes"),
        (record(b"a", b"", size=2**64 - 1), "more than 1000 bytes"),
        (b"".join(record(b"%d" % n, b"") for n in range(11)), "more than 10 output files"),
        (END + record(b"a", b"1"), "behind its end"),
    ],
)
def test_a_forged_stream_is_refused(tmp_path: Path, stream: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        received(stream, tmp_path)
    outside = {p.name for p in tmp_path.iterdir()} - {".r.part"}
    assert outside == set()


def test_a_stream_that_breaks_off_keeps_whole_files_only(tmp_path: Path) -> None:
    output = received(record(b"whole", b"123") + record(b"half", b"12", size=3), tmp_path)
    assert output == Output((OutputFile("whole", 3),), 0, complete=False)
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["whole"]


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_be_refused(tmp_path_factory: pytest.TempPathFactory, stream: bytes) -> None:
    root = tmp_path_factory.mktemp("any")
    receiver = OutputReceiver(OutputRule(root, 10, 1000), "r")
    try:
        receiver.feed(stream)
    except ProtocolError:
        receiver.discard()
    else:
        receiver.finish()
    assert {p.name for p in root.iterdir()} <= {"r"}


async def pieces(*contents: bytes) -> AsyncIterator[bytes]:
    for content in contents:
        yield content


async def test_a_lease_takes_one_output_while_it_lives(tmp_path: Path) -> None:
    lease = Lease(a_plan(), ScriptedCompleter([""]), None, {}, output=OutputRule(tmp_path, 10, 1000))
    await lease.output.take(pieces(record(b"a", b"1"), END))
    with pytest.raises(ProtocolError, match="sent already"):
        await lease.output.take(pieces(END))
    output = await lease.output.finish()
    assert output is not None
    assert [f.path for f in output.files] == ["a"]
    await lease.aclose()
    assert (tmp_path / a_plan().rollout_id / "a").read_bytes() == b"1"
    with pytest.raises(ProtocolError, match="sent already"):
        await lease.output.take(pieces(END))


async def test_output_of_a_revoked_lease_is_not_kept(tmp_path: Path) -> None:
    lease = Lease(a_plan(), ScriptedCompleter([""]), None, {}, output=OutputRule(tmp_path, 10, 1000))
    begun, gate = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield record(b"a", b"1")
        begun.set()
        await gate.wait()
        yield record(b"b", b"1")

    taking = asyncio.create_task(lease.output.take(slow()))
    await begun.wait()
    await lease.aclose()
    gate.set()
    with pytest.raises(ProtocolError, match="has ended"):
        await taking
    assert list(tmp_path.iterdir()) == []
    flooded = Lease(a_plan(), ScriptedCompleter([""]), None, {}, output=OutputRule(tmp_path, 10, 1000))
    with pytest.raises(ProtocolError, match="too many pieces"):
        await flooded.output.take(pieces(*[b""] * 100))
    await flooded.aclose()
