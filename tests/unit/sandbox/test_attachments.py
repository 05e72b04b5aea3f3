"""Attachments: written once, read-only, exactly as announced."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.errors import EpisodeCrashed
from sandbox.runner.attachments import receive_attachments

START = pb.ParkResponse(start=pb.Start())


def chunk(index: int, content: bytes) -> pb.ParkResponse:
    return pb.ParkResponse(chunk=pb.AttachmentChunk(index=index, content=content))


def test_files_of_any_name_arrive_in_pieces(tmp_path: Path) -> None:
    files = [
        pb.AttachmentFile(name=name, size_bytes=size)
        for name, size in (("a b'$(x).txt", 4), ("-rf", 0), ("ü.bin", 1))
    ]
    responses = [chunk(0, b"ab"), chunk(0, b"cd"), chunk(2, b"\0"), START]
    places = receive_attachments(responses, files, tmp_path)
    assert [place.read_bytes() for place in places] == [b"abcd", b"", b"\0"]
    assert places[0] == tmp_path / "a b'$(x).txt"
    assert {place.stat().st_mode & 0o777 for place in places} == {0o444}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "x" * 256])
def test_a_name_that_is_no_single_component_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(EpisodeCrashed, match="cannot be called"):
        receive_attachments([START], (pb.AttachmentFile(name=name, size_bytes=0),), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_no_link_followed(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("there", "link"):
        with pytest.raises(EpisodeCrashed, match="File exists"):
            receive_attachments([START], (pb.AttachmentFile(name=name, size_bytes=0),), tmp_path)
    assert (tmp_path / "there").read_text() == "old"
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("responses", "told"),
    [
        ([chunk(0, b"abc"), START], "longer"),
        ([chunk(1, b""), START], "longer"),
        ([chunk(0, b"a"), START], "shorter"),
        ([chunk(0, b"ab")], "ended before its start"),
        ([pb.ParkResponse(assignment=pb.Assignment())], "unexpected assignment"),
        ([pb.ParkResponse()], "unexpected None"),
    ],
)
def test_bytes_other_than_announced_are_refused(
    tmp_path: Path, responses: list[pb.ParkResponse], told: str
) -> None:
    with pytest.raises(EpisodeCrashed, match=told):
        receive_attachments(responses, (pb.AttachmentFile(name="f", size_bytes=2),), tmp_path)
