"""What crosses between the run and its nodes: plans, keys, errors, attachments, output."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import pickle
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from orchestrator.agents.equipment import Equipment
from orchestrator.border.keys import read_keys
from orchestrator.cluster import host as host_module
from orchestrator.cluster.host import HostActor
from orchestrator.cluster.order import (
    Broken,
    Delivery,
    Opening,
    Parcel,
    differences,
    for_node,
    settings_for_nodes,
    software,
)
from orchestrator.cluster.parcels import Desk, KeptOutput, Shelf, pieces
from orchestrator.cluster.remote import NodeLost
from orchestrator.errors import (
    AuthenticationError,
    EnvironmentUnusable,
    LaunchError,
    SandboxLostError,
)
from orchestrator.host.base import Provision
from orchestrator.proxy.left_files import OutputRule
from orchestrator.rules.redact import Secret
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.table import EnvSettings
from orchestrator.types import (
    Attachment,
    Attempt,
    Crossing,
    Ended,
    EndedName,
    Output,
    OutputFile,
    Record,
)
from tests.fakes.cluster import (
    SPEC,
    FakeCluster,
    nodes_of,
    rollouts_on,
    until,
)
from tests.fakes.plans import a_plan


async def test_a_node_gets_the_keys_that_rollouts_need_and_no_other() -> None:
    config = Config(openai=(OpenAISettings(api_key=Secret("sk-e")),), judge_api_key=Secret("sk-j"))
    given = settings_for_nodes(replace(config, tavily_api_key=Secret("tv")), None)
    assert given.openai[0].api_key.reveal() == "sk-e"
    assert given.tavily_api_key.reveal() == "tv"
    assert not given.judge_api_key
    assert b"sk-j" not in pickle.dumps(given)


async def test_a_node_gets_the_values_of_variables_that_are_here_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "hunter22")
    servers = ({"name": "a", "command": "x", "env": {"API_KEY": "env:MY_KEY", "TZ": "UTC"}},)
    secrets = ({"host": "a.example", "header": "X-Key", "from": "env:MY_KEY"},)
    config = Config(env=EnvSettings(mcp_servers=servers, egress=("a.example",), secrets=secrets))  # type: ignore[arg-type]
    given = settings_for_nodes(config, None)
    monkeypatch.delenv("MY_KEY")
    there = pickle.loads(pickle.dumps(given)).env
    assert there.mcp_servers[0].env == {"API_KEY": Secret("hunter22"), "TZ": "UTC"}
    assert [key.value for key in read_keys(there.key_entries)] == [Secret("hunter22")]
    assert "hunter22" not in repr(given)
    assert "hunter22" not in repr(given.env.secrets)


def test_no_answer_and_no_metadata_go_to_a_node() -> None:
    task = replace(a_plan().task, answer="SECRET", metadata={"key": "SECRET"})
    assert b"SECRET" not in pickle.dumps(for_node(replace(a_plan(), task=task)))


@pytest.mark.parametrize("kind", [LaunchError, SandboxLostError, AuthenticationError, EnvironmentUnusable])
def test_errors_cross_as_what_they_are(kind: type[Exception]) -> None:
    error = Broken.of(kind("it broke")).error("a")  # type: ignore[arg-type]
    assert type(error) is kind
    assert str(error) == "node a: it broke"


def test_an_error_of_an_unknown_kind_is_infrastructure() -> None:
    assert isinstance(Broken("Nonsense", "x").error("a"), SandboxLostError)
    assert isinstance(Broken("log", "x").error("a"), SandboxLostError)
    assert isinstance(Broken("OrchestratorError", "x").rollout_error("a"), SandboxLostError)


def test_differences_are_named() -> None:
    assert differences({"python": "3.11.1", "ray": "2"}, {"python": "3.11.1", "ray": "2"}) == ""
    assert differences({}, {"ray": "2"}) == "ray unknown and not 2"


async def test_attachments_go_to_a_node_once(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    files = (Attachment("f", tmp_path / "f", 7), Attachment("g", tmp_path / "f", 7))
    cluster = FakeCluster("a")
    async with rollouts_on(cluster) as (_, executor, _):
        plans = [replace(a_plan(i), task=replace(a_plan(i).task, attachments=files)) for i in range(3)]
        await asyncio.gather(*(executor.execute(plan) for plan in plans))
    assert list(cluster["a"].files.values()) == [b"content"]
    assert len(cluster["a"].orders) == 3


def test_a_shelf_keeps_what_is_used_and_checks_what_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cluster.parcels.KEPT_BYTES", 10)
    shelf, desk, files = Shelf(tmp_path), Desk(), tmp_path / "mine"
    files.mkdir()
    attachments = []
    for number in range(3):
        (files / str(number)).write_bytes(bytes([number]) * 8)
        attachments.append(Attachment(str(number), files / str(number), 8))
    for attachment in attachments:
        (parcel,) = desk.parcels((attachment,))
        assert shelf.missing((parcel,)) == (parcel.digest,)
        with attachment.path.open("rb") as file:
            for piece, begins, ends in pieces(file, 8):
                shelf.add(parcel.digest, piece, begins=begins, ends=ends)
        with shelf.used((attachment,), (parcel,)) as (there,):
            assert there.path.read_bytes() == attachment.path.read_bytes()
            assert shelf.missing((parcel,)) == ()
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 1
    with pytest.raises(LaunchError, match="changed on its way"):
        shelf.add("0" * 64, b"other", begins=True, ends=True)


def on_shelf(shelf: Shelf, content: bytes) -> Parcel:
    parcel = Parcel(hashlib.sha256(content).hexdigest(), len(content))
    shelf.add(parcel.digest, content, begins=True, ends=True)
    return parcel


def test_a_file_is_on_the_shelf_when_it_lies_there_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are added in a thread, and rollouts look in another one."""
    shelf, seen = Shelf(tmp_path), []
    rename = Path.rename

    def slow(path: Path, target: Path) -> Path:
        seen.append(shelf.missing((Parcel(target.name, 1),)))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", slow)
    parcel = on_shelf(shelf, b"x")
    assert seen == [(parcel.digest,)]
    assert shelf.missing((parcel,)) == ()


def test_the_end_of_a_rollout_costs_the_same_however_many_files_are_kept(tmp_path: Path) -> None:
    """Looking at all of them also failed when another came meanwhile."""

    class Counted(dict[str, int]):
        looked_at = 0

        def __iter__(self) -> Iterator[str]:
            for key in super().__iter__():
                Counted.looked_at += 1
                yield key

    shelf = Shelf(tmp_path)
    parcels = [on_shelf(shelf, bytes([number])) for number in range(200)]
    for name, value in vars(shelf).items():
        if isinstance(value, dict):
            setattr(shelf, name, Counted(value))
    with shelf.used((), ()), shelf.used((Attachment("f", tmp_path, 1),), (parcels[7],)):
        pass
    assert Counted.looked_at < 20


def test_a_disk_that_fails_on_a_node_breaks_what_needs_it_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path)
    parcel = on_shelf(shelf, b"x")

    def fails(*_: object, **__: object) -> Path:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("orchestrator.cluster.parcels.KEPT_BYTES", 0)
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(LaunchError, match="Read-only file system"):
        on_shelf(shelf, b"y")
    monkeypatch.setattr(Path, "unlink", fails)
    with shelf.used((Attachment("f", tmp_path, 1),), (parcel,)):
        pass


async def test_a_node_without_room_cannot_be_opened_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    monkeypatch.setattr(host_module, "open_local", full)
    told = await HostActor().open(Opening(Config(), Equipment(), None, software()))
    assert told == Broken(
        "EnvironmentUnusable", "it cannot be opened: [Errno 28] No space left on device: '/tmp/x'"
    )


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 24])
def test_pieces_are_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("orchestrator.cluster.parcels.PIECE_BYTES", 8)
    (tmp_path / "f").write_bytes(bytes(range(size)))
    with (tmp_path / "f").open("rb") as file:
        found = list(pieces(file, size))
    assert b"".join(piece for piece, _, _ in found) == bytes(range(size))
    assert [begins for _, begins, _ in found] == [True] + [False] * (len(found) - 1)
    assert [ends for _, _, ends in found] == [False] * (len(found) - 1) + [True]


# ---------------------------------------------------------------- files that rollouts leave


OUTPUT = Output((OutputFile("sub/x.txt", 5), OutputFile("empty", 0)))


@asynccontextmanager
async def leaving_files(
    cluster: FakeCluster, folder: Path, contents: dict[str, bytes]
) -> AsyncIterator[asyncio.Task[Attempt]]:
    """An attempt that left OUTPUT on its node, of which `contents` come with it."""
    async with nodes_of(cluster) as nodes, nodes.slot(0, SPEC) as room:
        assert room is not None
        record = Record(started_at=1.0, output=OUTPUT)
        node = cluster["a"]
        node.answers = [Delivery(record, Ended(EndedName.FINISHED), contents=contents)]
        yield asyncio.create_task(room.carry_out(a_plan(), Provision(OutputRule(folder, 10, 1000))))
    assert node.orders[0].output == (10, 1000)


@pytest.mark.parametrize("small", [True, False])
async def test_output_files_come_into_the_run_s_folder(tmp_path: Path, small: bool) -> None:
    contents = {"sub/x.txt": b"small", "empty": b""} if small else {}
    cluster = FakeCluster("a")
    async with leaving_files(cluster, tmp_path, contents) as made:
        assert (await made).record.output == OUTPUT
    folder = tmp_path / a_plan().rollout_id
    assert (folder / "sub" / "x.txt").read_bytes() == (b"small" if small else b"large")
    assert (folder / "empty").read_bytes() == b""
    assert cluster["a"].forgotten == ([] if small else [a_plan().rollout_id])


@pytest.mark.parametrize("fault", [{"unreadable": True}, {"large": b"lar"}, {"large": b"larger"}])
async def test_a_rollout_whose_output_does_not_come_whole_is_drawn_again_and_leaves_nothing(
    tmp_path: Path, fault: dict[str, object]
) -> None:
    """Without its files a scorer would take it for one that wrote none."""
    cluster = FakeCluster("a")
    cluster.prepare = lambda node: vars(node).update(fault)
    async with leaving_files(cluster, tmp_path, {}) as made:
        with pytest.raises(LaunchError):
            await made
    assert list(tmp_path.iterdir()) == []
    assert cluster["a"].forgotten == [a_plan().rollout_id]


@pytest.mark.parametrize(("number", "ended"), [(errno.ENOSPC, False), (errno.EINVAL, True)])
async def test_output_that_this_disk_does_not_keep_is_drawn_again_unless_a_name_may_be_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, ended: bool
) -> None:
    def fail(kept: KeptOutput, path: str, piece: bytes) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(KeptOutput, "append", fail)
    async with leaving_files(FakeCluster("a"), tmp_path, {}) as made:
        if ended:
            attempt = await made
            assert attempt.outcome == Ended(EndedName.FINISHED)
            assert attempt.record.output == Output(left_out=2, complete=False)
        else:
            with pytest.raises(LaunchError, match="cannot be kept"):
                await made


async def test_a_node_that_is_lost_with_the_output_of_a_rollout_ends_that_rollout(tmp_path: Path) -> None:
    cluster = FakeCluster("a")
    async with leaving_files(cluster, tmp_path, {}) as made:
        (node := cluster["a"]).fetched.clear()
        await until(lambda: any(tmp_path.rglob("x.txt")))
        node.ended = True
        node.fetched.set()
        with pytest.raises(SandboxLostError):
            await made
    assert list(tmp_path.iterdir()) == []


async def test_output_on_its_way_leaves_nothing_when_the_rollout_is_cancelled(tmp_path: Path) -> None:
    cluster = FakeCluster("a")
    async with leaving_files(cluster, tmp_path, {}) as made:
        cluster["a"].fetched.clear()
        await until(lambda: any(tmp_path.rglob("x.txt")))
        made.cancel()
        with pytest.raises(asyncio.CancelledError):
            await made
        assert list(tmp_path.iterdir()) == []
        assert cluster["a"].forgotten == [a_plan().rollout_id]


async def test_output_that_came_whole_is_kept_whatever_becomes_of_its_node(tmp_path: Path) -> None:
    async def lost(rollout_id: str) -> None:
        raise NodeLost("the actor is dead")

    cluster = FakeCluster("a")
    cluster.prepare = lambda node: setattr(node, "forget", lost)
    async with leaving_files(cluster, tmp_path, {}) as made:
        assert (await made).record.output == OUTPUT
    assert (tmp_path / a_plan().rollout_id / "sub" / "x.txt").read_bytes() == b"large"


ASKED = Crossing(1, 0.0, 1.0, "GET", "https", "a.example", 443, "/", 200, sent_sha256=sha256(b"").hexdigest())


@pytest.mark.parametrize(
    ("there", "kept"), [({b"one": b"one"}, True), ({}, False), ({b"one": b"other"}, False), (None, False)]
)
async def test_bodies_come_to_the_run_s_folder_each_once_and_what_does_not_come_is_not_kept(
    tmp_path: Path, there: dict[bytes, bytes] | None, kept: bool
) -> None:
    """None: the node is lost behind the rollout, which has ended all the same."""
    cluster, digest = FakeCluster("a"), sha256(b"one").hexdigest()
    asked = replace(ASKED, received_sha256=digest, received=3, kept=True)
    crossings = (asked, asked, replace(asked, received_sha256="0" * 64, kept=False))
    async with nodes_of(cluster) as nodes, nodes.slot(0, SPEC) as room:
        assert room is not None
        node = cluster["a"]
        node.bodies = None if there is None else {sha256(name).hexdigest(): body for name, body in there.items()}
        node.answers = [Delivery(Record(started_at=1.0, crossings=crossings), Ended(EndedName.FINISHED))]
        attempt = await room.carry_out(a_plan(), Provision(run_folder=tmp_path))
    assert attempt.outcome == Ended(EndedName.FINISHED)
    assert [one.kept for one in attempt.record.crossings] == [kept, kept, False]
    assert [path.name for path in (tmp_path / "egress").iterdir()] == ([digest] if kept else [])
    assert node.asked_bodies == [digest] * (1 if kept or there is None else 2)


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x"])
def test_no_output_file_leaves_its_folder(tmp_path: Path, path: str) -> None:
    kept = KeptOutput(tmp_path / "out", "r")
    with pytest.raises(ValueError, match="leaves its folder"):
        kept.append(path, b"x")
