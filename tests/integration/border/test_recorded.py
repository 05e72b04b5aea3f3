"""What is on record answers without a network, and the second download of a file costs no egress."""

from __future__ import annotations

import asyncio
import time
from errno import ENOSPC
from hashlib import sha256
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import BinaryIO

import pytest

from orchestrator.border.bodies import Bodies
from orchestrator.border.recorded import Cache, Playback, is_file
from orchestrator.rules.egress import Entry
from orchestrator.types import Crossing
from tests.fakes.upstream import Got, answer, upstream
from tests.integration.border.world import NAME, WAIT_S, box

WHEEL = b"PK" + b"w" * 300_000


async def test_bodies_that_are_kept_already_have_their_hashes_on_record(tmp_path: Path) -> None:
    answers = iter((b"one", b"two", b"one", b""))
    bodies = Bodies(tmp_path / "egress", 1 << 30)
    async with (
        upstream(lambda got: answer(next(answers))) as server,
        box(server, bodies=bodies) as at,
    ):
        for sent in (b"x", b"x", b"y", b"y"):
            assert (await at.get("/p", method="POST", body=sent)).status == 200
        told = [(one.sent_sha256, one.received_sha256, one.kept) for one in at.border.crossings]
    passed = [(b"x", b"one"), (b"x", b"two"), (b"y", b"one"), (b"y", b"")]
    assert told == [(sha256(sent).hexdigest(), sha256(got).hexdigest(), True) for sent, got in passed]
    assert bodies.left_out == 0


async def test_a_record_answers_as_the_outside_did_and_a_miss_says_so_by_name(tmp_path: Path) -> None:
    counts = {"asked": 0}

    def answering(got: Got) -> bytes:
        counts["asked"] += 1
        return answer(
            got.body + str(counts["asked"]).encode(), "201 Made", "X-One: a", "Set-Cookie: s=secret; Path=/"
        )

    bodies = Bodies(tmp_path / "egress", 1 << 30)
    async with upstream(answering) as server:
        async with box(server, bodies=bodies) as at:
            first = [
                await at.get("/a"),
                await at.get("/a"),
                await at.get("/p", method="POST", body=b"x"),
                await at.plain("/a"),
            ]
        record = at.border.crossings
        assert all(one.kept for one in record)
        assert "secret" not in repr(record)
        playback = Playback(record, Bodies(tmp_path / "egress"))
        async with box(server, playback=playback, network=False) as at:
            again = [
                await at.get("/a"),
                await at.get("/a"),
                await at.get("/p", method="POST", body=b"x"),
                await at.plain("/a"),
            ]
            for got, then in zip(again, first, strict=True):
                assert (got.status, got.body, got.header("x-one")) == (
                    then.status,
                    then.body,
                    then.header("x-one"),
                )
            for path, method, body in (("/a", "GET", None), ("/p", "POST", b"y"), ("/new", "GET", None)):
                missed = await at.get(path, method=method, body=body)
                assert missed.status == 504
                assert f"{method} https://{NAME}:{server.tls_port}{path} is not on record" in missed.body.decode()
        assert len(server.got) == 4
        assert (playback.served, playback.missed) == (4, 3)
        assert [one.source for one in at.border.crossings] == ["record"] * 4 + ["border"] * 3
        assert at.border.crossings[0].received_sha256 == record[0].received_sha256


async def test_a_refusal_is_played_again_word_by_word() -> None:
    asked = (
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET http://127.0.0.1/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    )
    async with upstream(lambda got: answer()) as server:
        async with box(server) as at:
            first = [await at.raw(data, eof=True) for data in asked]
        async with box(server, playback=Playback(at.border.crossings, Bodies(None)), network=False) as at:
            assert [await at.raw(data, eof=True) for data in asked] == first
            assert b"504" in await at.raw(asked[1], eof=True)


async def test_a_rollout_that_goes_on_asks_the_outside_only_for_what_is_not_on_record(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "egress", 1 << 30)
    async with upstream(lambda got: answer(got.body or got.target.encode())) as server:
        async with box(server, bodies=bodies) as at:
            await at.get("/a")
            await at.get("/p", method="POST", body=b"small")
        playback = Playback(at.border.crossings, bodies)
        async with box(server, bodies=bodies, playback=playback) as at:
            assert (await at.get("/a")).body == b"/a"
            assert (await at.get("/b")).body == b"/b"
            assert (await at.get("/p", method="POST", body=b"large" * 1_000_000)).body == b"large" * 1_000_000
            assert (await at.get("/p", method="POST", body=b"small")).body == b"small"
            assert (await at.get("/p", method="POST", body=b"small")).body == b"small"
        sources = [one.source for one in at.border.crossings]
        assert sources == ["record", "network", "network", "record", "network"]
        playback = Playback(at.border.crossings, bodies, goes_on=True)  # what was paid then is paid, and once
        async with box(server, bodies=bodies, playback=playback) as at:
            assert [(await at.get(path)).body for path in ("/a", "/b")] == [b"/a", b"/b"]
        assert [one.source for one in at.border.crossings] == ["record", "network"]
        assert len([got for got in server.got if got.target == "/b"]) == 1


async def test_a_tunnel_cannot_be_played_again_and_says_so(tmp_path: Path) -> None:
    tunnel = Crossing(1, 0.0, 1.0, "CONNECT", "tunnel", NAME, 443, "", 200, source="network")
    async with upstream(lambda got: answer()) as server:
        playback = Playback((tunnel,), Bodies(None))
        async with box(server, playback=playback, network=False) as at:
            got = await at.raw(f"CONNECT {NAME}:443 HTTP/1.1\r\nHost: {NAME}:443\r\n\r\n".encode())
    assert got.startswith(b"HTTP/1.1 403")
    assert b"by a tunnel, whose inside is not on record" in got


async def test_a_body_over_the_bound_is_hashed_and_its_replay_says_so(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "egress", 100)
    async with upstream(lambda got: answer(b"x" * 200)) as server:
        async with box(server, bodies=bodies) as at:
            await at.get("/")
        (crossing,) = at.border.crossings
        assert (crossing.kept, crossing.received_sha256) == (False, sha256(b"x" * 200).hexdigest())
        assert bodies.left_out == 1
        assert list((tmp_path / "egress").iterdir()) == []
        async with box(server, playback=Playback((crossing,), bodies), network=False) as at:
            got = await at.get("/")
    assert b"its body was not kept" in got.body


async def test_a_large_body_is_kept_as_it_came_and_one_that_breaks_off_while_it_is_written_leaves_nothing(
    tmp_path: Path,
) -> None:
    bodies, pieces = Bodies(tmp_path, 16 << 20), [bytes([number]) * 300_007 for number in range(30)]
    for breaks_off in (True, False):
        body = bodies.body()
        for piece in pieces:
            await body.add(piece)
        if breaks_off:  # a thread is writing
            await body.drop()
            assert list(tmp_path.iterdir()) == []
    assert await body.whole() == (sha256(b"".join(pieces)).hexdigest(), True)  # there was room for it
    (file,) = tmp_path.iterdir()
    assert file.read_bytes() == b"".join(pieces)
    again = bodies.body()
    for piece in pieces[:10]:
        await again.add(piece)
    assert await again.whole() == (sha256(b"".join(pieces[:10])).hexdigest(), True)
    over = bodies.body()
    for piece in pieces:
        await over.add(piece)
    assert await over.whole() == (
        sha256(b"".join(pieces)).hexdigest(),
        True,
    )  # it is known, and takes no more room
    over = bodies.body()
    for piece in reversed(pieces):
        await over.add(piece)
    assert await over.whole() == (sha256(b"".join(reversed(pieces))).hexdigest(), False)
    assert len(list(tmp_path.iterdir())) == 2


async def test_what_broke_off_takes_no_room(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "egress", 10)
    for _ in range(3):
        await (broken := bodies.body()).add(b"x" * 9)
        await broken.drop()
    await (whole := bodies.body()).add(b"y" * 9)
    assert await whole.whole() == (sha256(b"y" * 9).hexdigest(), True)
    await whole.drop()
    await (more := bodies.body()).add(b"z" * 9)
    assert (await more.whole())[1] is False, "the first one has the room"


class _FullFile(FileIO):
    def write(self, data: object) -> int:
        raise OSError(ENOSPC, "No space left on device")


class _FullDisk(Bodies):
    def open_part(self) -> BinaryIO:
        return BufferedWriter(_FullFile(super().open_part().name, "w"))


@pytest.mark.parametrize("pieces", [3, 3_000])
async def test_a_full_disk_takes_nothing_from_the_rollout_and_has_no_part_left(
    pieces: int, tmp_path: Path
) -> None:
    body, piece = _FullDisk(tmp_path, 1 << 30).body(), b"x" * 1_000  # as small as those of a network
    for _ in range(pieces):
        await body.add(piece)
    assert await body.whole() == (sha256(piece * pieces).hexdigest(), False)
    assert list(tmp_path.iterdir()) == []


class _SlowDisk(Bodies):
    def open_part(self) -> BinaryIO:
        time.sleep(0.2)
        return super().open_part()


async def test_a_stream_that_is_cancelled_twice_is_on_record_and_leaves_no_part(tmp_path: Path) -> None:
    bodies = _SlowDisk(tmp_path, 1 << 30)
    begun = b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + bytes(3 << 20)
    async with upstream(lambda got: begun) as server, box(server, bodies=bodies) as at:
        reader, writer = await at.open()
        place = f"{NAME}:{server.port}"
        writer.write(f"GET http://{place}/ HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        await reader.readexactly(2 << 20)  # a thread is writing
        (stream,) = (task for task in asyncio.all_tasks() if task.get_name() == "stream of a service")
        for _ in range(2):  # as where a sandbox hangs up and its lease ends
            stream.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([stream])
        (crossing,) = at.border.crossings
        assert crossing.refusal == "the sandbox ended it"
        assert list(tmp_path.iterdir()) == []
        writer.close()


async def test_equal_bodies_that_end_together_take_the_room_of_one(tmp_path: Path) -> None:
    bodies = _SlowDisk(tmp_path, 45)
    for piece in (b"x", b"y"):
        equal = [bodies.body() for _ in range(2)]
        for body in equal:
            await body.add(piece * 15)
        assert all(kept for _, kept in await asyncio.gather(*(body.whole() for body in equal)))
    assert len(list(tmp_path.iterdir())) == 2


async def test_equal_bodies_are_kept_once_and_parts_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "egress"
    async with upstream(lambda got: answer(b"same" * 1_000)) as server:
        async with box(server, bodies=Bodies(folder, 1 << 20)) as at:
            await asyncio.gather(*(at.get(f"/{number}") for number in range(5)))
    (kept,) = folder.iterdir()
    assert kept.name == sha256(b"same" * 1_000).hexdigest()
    (folder / "part-x").write_bytes(b"half")
    again = Bodies(folder, 1 << 20)
    assert again.holds(kept.name)
    assert list(folder.iterdir()) == [kept]


async def test_the_second_download_of_a_file_costs_no_egress(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "egress", 1 << 30)
    cache = Cache(bodies)
    async with upstream(lambda got: answer(WHEEL, "200 OK", "Content-Type: application/zip")) as server:
        for _ in range(2):
            async with box(server, bodies=bodies, cache=cache) as at:
                got = await at.get("/packages/thing-1.0-py3-none-any.whl", "User-Agent: pip/26")
                assert (got.status, got.body, got.header("content-type")) == (200, WHEEL, "application/zip")
    assert len(server.got) == 1
    (crossing,) = at.border.crossings
    assert (crossing.source, crossing.received) == ("cache", len(WHEEL))
    assert (cache.served, cache.saved) == (1, len(WHEEL))


@pytest.mark.parametrize(
    ("path", "headers", "raw"),
    [
        ("/simple/thing/", (), answer(b"x")),
        ("/thing.whl", ("Authorization: x",), answer(b"x")),
        ("/thing.whl", ("Cookie: x",), answer(b"x")),
        ("/thing.whl", ("X-Forwarded-Host: evil",), answer(b"x")),
        ("/thing.whl", ("Range: bytes=0-1",), answer(b"x")),
        ("/thing.whl", ("If-None-Match: x",), answer(b"x")),
        ("/thing.whl", (), answer(b"x", "200 OK", "Set-Cookie: a=b")),
        ("/thing.whl", (), answer(b"x", "200 OK", "Vary: User-Agent")),
        ("/thing.whl", (), answer(b"x", "200 OK", "Cache-Control: no-store")),
        ("/thing.whl", (), answer(b"x", "200 OK", "Content-Encoding: gzip")),
        ("/thing.whl", (), answer(b"x", "200 OK", "Vary: User-Agent", "Vary: Accept-Encoding")),
        ("/thing.whl", (), answer(b"x", "200 OK", "Cache-Control: no-store", "Cache-Control: max-age=9")),
        ("/thing.whl", (), answer(b"x", "404 Not Found")),
        ("/thing.whl", (), b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nbroken o"),
    ],
)
async def test_what_may_differ_is_fetched_by_everybody(
    path: str, headers: tuple[str, ...], raw: bytes, tmp_path: Path
) -> None:
    bodies = Bodies(tmp_path / "egress", 1 << 30)
    cache = Cache(bodies)
    async with upstream(lambda got: raw) as server:
        for _ in range(2):
            async with box(server, bodies=bodies, cache=cache) as at:
                await at.get(path, *headers)
    assert len(server.got) == 2


@pytest.mark.parametrize(
    ("target", "is_one"),
    [
        ("/a/b-1.0-py3-none-any.whl", True),
        ("/a/b-1.0-py3-none-any.whl.metadata", True),
        ("/pool/main/c/curl_8.0_amd64.deb?x=1", True),
        ("/b-1.0.tar.gz", True),
        (f"/blobs/sha256:{'a' * 64}", True),
        (f"/{'a' * 40}/comments", False),
        ("/index.html", False),
        ("/whl", False),
        ("/x.whl/", False),
        ("/?x=b.whl", False),
    ],
)
def test_which_names_are_of_files_that_never_change(target: str, is_one: bool) -> None:
    assert is_file(target) is is_one


async def test_a_file_is_given_only_to_who_may_ask_for_it(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "egress", 1 << 30)
    cache = Cache(bodies)
    async with upstream(lambda got: answer(WHEEL)) as server:
        async with box(server, bodies=bodies, cache=cache) as at:
            await at.get("/thing.whl")
        entry = Entry(NAME, (server.tls_port,), paths=("/other",), private=True)
        async with box(server, entry, bodies=bodies, cache=cache) as at:
            async with asyncio.timeout(WAIT_S):
                assert (await at.get("/thing.whl")).status == 403


async def test_a_record_that_is_full_gives_no_file_the_name_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.border.journal._TEXT_BYTES", 0)
    bodies = Bodies(tmp_path / "egress", 1 << 30)
    cache = Cache(bodies)
    wheel = f"/{'w' * 195}.whl"  # as long as an address on record that was cut off
    async with upstream(lambda got: answer(got.target.encode(), "200 OK", "X-One: a")) as server:
        async with box(server, bodies=bodies, cache=cache) as at:
            await at.plain(f"{wheel}.metadata")
        assert len(at.border.crossings[0].target) == len(wheel)
        async with box(server, bodies=bodies, cache=cache) as at:
            assert (await at.plain(wheel)).body == wheel.encode()
            again = await at.plain(wheel)
    assert (again.body, again.header("x-one"), cache.served) == (wheel.encode(), "a", 1)


@pytest.mark.parametrize("last", ["Cache-Control: no-store", "Content-Encoding: gzip"])
async def test_an_answer_whose_headers_are_not_all_on_record_is_no_file_for_others(
    last: str, tmp_path: Path
) -> None:
    bodies = Bodies(tmp_path / "egress", 1 << 30)
    cache = Cache(bodies)
    long = [f"X-{number}: {'x' * 1000}" for number in range(9)]
    async with upstream(lambda got: answer(WHEEL, "200 OK", *long, last)) as server:
        for _ in range(2):
            async with box(server, bodies=bodies, cache=cache) as at:
                assert (await at.get("/thing.whl")).body == WHEEL
    assert (len(server.got), cache.served) == (2, 0)
