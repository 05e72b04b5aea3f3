"""Images go to the nodes that lack them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from orchestrator.cluster import image as image_module
from orchestrator.cluster import members as members_module
from orchestrator.cluster import nodes as nodes_module
from orchestrator.cluster.host import HostActor
from orchestrator.cluster.image import SavedImages
from orchestrator.cluster.order import (
    Broken,
)
from orchestrator.engine.executor import failure_of
from orchestrator.errors import (
    LaunchError,
)
from orchestrator.types import (
    FailedName,
)
from tests.fakes.cluster import (
    DOCKER_AWAY,
    SPEC,
    FakeCluster,
    begun,
    names,
    nodes_of,
    rollouts_on,
    until,
)
from tests.fakes.plans import a_plan, a_sandbox


class Images(SavedImages):
    """This machine's images; saving takes a while. The file of an image holds its name."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder, self.names, self.saved = folder, names, Counter[str]()
        self.broken: set[str] = set()

    def path(self, name: str) -> Path:
        if name not in self.names or name in self.broken:
            raise LaunchError(f"the image {name} cannot be sent to nodes: No such image")
        self.saved[name] += 1
        path = self.folder / name.replace(":", "-")
        if not path.exists():  # another node may be reading it
            path.write_text(name)
        return path


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    found = Images(tmp_path, SPEC.image, "own:1", "own:2")
    ids = {name: f"id of {name}" for name in found.names}
    monkeypatch.setattr(members_module, "image_id", ids.get)
    return found


async def test_a_node_that_lacks_the_image_gets_it_and_others_do_not(images: Images) -> None:
    cluster = FakeCluster("a", "b")
    cluster.prepare_one("b", lambda node: node.images.update({SPEC.image: f"id of {SPEC.image}"}))
    async with nodes_of(cluster, images=images) as nodes:
        assert nodes.capacity == 4
    assert cluster["a"].sent_images == [SPEC.image]
    assert cluster["b"].sent_images == []


async def test_the_image_of_a_task_is_sent_once_however_many_rollouts_wait_for_it(images: Images) -> None:
    cluster = FakeCluster("a")
    async with rollouts_on(cluster, images=images, max_concurrent_sandboxes=4) as (_, executor, _):
        runs = begun(executor, 4, sandbox=a_sandbox("own:1"))
        assert [names(await run) for run in runs] == [[("a0", "finished", "a")]] * 4
    assert cluster["a"].sent_images == [SPEC.image, "own:1"]
    assert images.saved["own:1"] == 1


def test_an_engine_that_falls_silent_has_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def inspect_image(self, name: str) -> None:
            raise requests.ReadTimeout(f"no answer about {name}")

        def close(self) -> None: ...

    monkeypatch.setattr(image_module, "connect", lambda timeout_s: Silent())
    assert image_module.image_id(SPEC.image) is None


async def test_images_go_to_a_node_one_after_the_other(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node adds pieces to what it has."""
    monkeypatch.setattr("orchestrator.cluster.parcels.PIECE_BYTES", 2)
    cluster = FakeCluster("a")
    async with rollouts_on(cluster, images=images, max_concurrent_sandboxes=4) as (_, executor, _):
        plans = [a_plan(i, sandbox=a_sandbox(f"own:{1 + i % 2}")) for i in range(4)]
        await asyncio.gather(*(executor.execute(plan) for plan in plans))
    assert sorted(cluster["a"].sent_images) == ["own:1", "own:2", SPEC.image]


async def test_many_rollouts_that_wait_for_an_image_on_one_node_hold_no_other_node_up(images: Images) -> None:
    cluster = FakeCluster("a", "b")
    async with rollouts_on(cluster, images=images, max_concurrent_sandboxes=8) as (nodes, executor, _):
        for node in cluster.started:
            node.taking.clear()
        runs = begun(executor, 16, sandbox=a_sandbox("own:1"))
        await until(lambda: [node.used for node in nodes._members.nodes.values()] == [8, 8])
        cluster["b"].taking.set()
        await until(lambda: "own:1" in cluster["b"].images)
        assert "own:1" not in cluster["a"].images
        cluster["a"].taking.set()
        await asyncio.gather(*runs)
    assert [node.sent_images.count("own:1") for node in cluster.started] == [1, 1]


@pytest.mark.parametrize("here", [True, False])
async def test_a_node_s_own_image_is_taken_only_where_this_machine_has_none(images: Images, here: bool) -> None:
    name = "own:1" if here else "theirs:1"
    images.broken.add(name)
    cluster = FakeCluster("a")
    async with rollouts_on(cluster, images=images) as (_, executor, _):
        cluster["a"].images[name] = "another id"
        results = await executor.execute(a_plan(sandbox=a_sandbox(name)))
    assert names(results) == [("a0", "launch_error" if here else "finished", "a")]


async def test_no_image_is_sent_to_a_node_without_docker(images: Images) -> None:
    refusal = Broken("EnvironmentUnusable", "Docker is not running here")
    cluster = FakeCluster("a", "b")
    cluster.prepare_one("b", lambda node: vars(node).update(engine=False, refusal=refusal))
    async with rollouts_on(cluster, images=images) as (_, executor, _):
        assert cluster.notes == ["node b is not used: Docker is not running here"]
        assert cluster["b"].sent_images == []
        cluster["a"].engine, cluster["a"].answers = False, [DOCKER_AWAY]
        run = asyncio.create_task(executor.execute(a_plan(sandbox=a_sandbox("own:1"))))
        await until(lambda: cluster.away["a"] == "Docker is away")
        assert cluster["a"].sent_images == [SPEC.image]
        cluster["a"].engine = True
        cluster["a"].works_again.set()
        assert names(await run) == [("a0", "docker_error", "a"), ("a1", "finished", "a")]
    assert cluster["a"].sent_images == [SPEC.image, "own:1"]


def test_saved_images_of_tasks_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def engine(what: str) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(get_image=lambda name: [name.encode()])

    monkeypatch.setattr(image_module, "_engine", engine)
    (tmp_path / "owner").write_text("this process")
    saved = SavedImages(tmp_path)
    for number in range(image_module.KEPT + 3):
        assert saved.path("the/run:1").read_bytes() == b"the/run:1"
        assert saved.path(f"own:{number}").read_bytes() == f"own:{number}".encode()
    kept = {path.name for path in tmp_path.iterdir()}
    assert len(kept) == image_module.KEPT + 1
    assert {"owner", "the%run:1", f"own:{image_module.KEPT + 2}"} <= kept


async def test_an_image_that_is_nowhere_breaks_its_rollouts_by_name(images: Images) -> None:
    async with rollouts_on(FakeCluster("a"), images=images) as (_, executor, recorded):
        await executor.execute(a_plan(sandbox=a_sandbox("nowhere:1")))
    (broken,) = recorded
    assert (failure := failure_of(broken)) is not None
    assert (failure.name, "nowhere:1" in failure.reason) == (FailedName.LAUNCH_ERROR, True)


@pytest.mark.parametrize("here", [None, {"Id": "of this machine"}])
async def test_a_task_s_image_is_unfit_if_it_is_on_every_node_that_works(
    images: Images, monkeypatch: pytest.MonkeyPatch, here: dict[str, str] | None
) -> None:
    monkeypatch.setattr(nodes_module, "described", {"own:1": here}.get)
    cluster = FakeCluster("a", "b")
    async with nodes_of(cluster, images=images) as nodes:
        spec = a_sandbox("own:1")
        assert await nodes.why_unfit(spec) is None
        cluster["a"].unfit = "it is not here"
        assert await nodes.why_unfit(spec) is None
        cluster["b"].unfit = "it is for linux/s390x"
        assert await nodes.why_unfit(spec) in (cluster["a"].unfit, cluster["b"].unfit)
        assert cluster["b"].looked_at[-1] == ("own:1", here)
        cluster["b"].silent.set()
        nodes._members.nodes["b"].lose("it left")
        assert await nodes.why_unfit(spec) == "it is not here"
        nodes._members.nodes["a"].lose("it left")
        assert await nodes.why_unfit(spec) is None


async def test_a_node_judges_the_image_that_is_sent_to_it_by_its_own_machine() -> None:
    layers = {"Layers": ["one"]}
    own = {"Id": "i", "Os": "linux", "RootFS": layers, "Config": {"Env": ["A=b"]}}
    other = {**own, "Architecture": "s390x"}
    actor = HostActor()
    assert await actor.why_unfit(a_sandbox("own:1"), own) is None
    assert "the image own:1 is for linux/s390x" in (await actor.why_unfit(a_sandbox("own:1"), other) or "")
