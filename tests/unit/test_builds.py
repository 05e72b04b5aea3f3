"""Images of tasks' Dockerfiles: who waits for them, what a failed one costs, and that each is made once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pytest

from orchestrator.engine.builds import PARALLEL, Builds, _workdir
from orchestrator.engine.draws import AHEAD, Draw, Draws
from orchestrator.errors import BuildError, DockerError, EnvironmentUnusable, ImageUnusable, LaunchError
from orchestrator.launch.image.task_images import TaskImages
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.uses import BuiltImage, Uses, images_in_use, unwanted
from orchestrator.rules.observer import Listener, Observer
from orchestrator.settings.config import Config
from orchestrator.settings.sources import load_config
from orchestrator.types import BadTask, Collect, Grader, SandboxSpec, Task
from tests.fakes.archives import file, layer, saved
from tests.fakes.held_rollouts import Held, held, until

PLAIN = Task("plain", "What is 6 times 7?", "42")
A, B, C = (replace(PLAIN, task_id=name, dockerfile=f"/{name}") for name in "abc")

# ---------------------------------------------------------------- draws


class Building:
    """Futures of builds, by task."""

    def __init__(self, *broken: str) -> None:
        self.begun: list[str] = []
        self.futures: dict[str, Future[Task | BadTask]] = {}
        self.broken = broken

    def __call__(self, task: Task) -> Future[Task | BadTask]:
        self.begun.append(task.task_id)
        return self.futures.setdefault(task.task_id, Future())

    def end(self, *tasks: Task) -> None:
        for task in tasks:
            bad = BadTask(task.task_id, "it fails")
            future = self.futures.setdefault(task.task_id, Future())
            future.set_result(bad if task.task_id in self.broken else replace(task, image=f"of-{task.task_id}"))


def ids(draws: Iterable[Draw]) -> list[tuple[int, str, str | None]]:
    return [(d.number, d.task.task_id, getattr(d.task, "image", "bad")) for d in draws]


def test_only_tasks_with_a_dockerfile_wait_for_an_image() -> None:
    building = Building()
    draws = Draws(lambda task: task, building).once([A, PLAIN, B, PLAIN], epoch=None, size=None)
    assert ids(islice(draws, 2)) == [(1, "plain", None), (3, "plain", None)]
    assert building.begun == ["a", "b"]
    building.end(B)
    assert ids(islice(draws, 1)) == [(2, "b", "of-b")]
    building.end(A)
    assert ids(draws) == [(0, "a", "of-a")]


def test_no_more_images_are_made_ahead_than_a_few() -> None:
    building = Building()
    tasks = [replace(A, task_id=f"t{n}") for n in range(3 * AHEAD)]
    building.end(tasks[5])
    draws = Draws(lambda task: task, building).once(tasks, epoch=None, size=None)
    assert ids(islice(draws, 1)) == [(5, "t5", "of-t5")]
    building.end(tasks[6])
    assert ids(islice(draws, 1)) == [(6, "t6", "of-t6")]
    building.end(tasks[0])
    assert ids(islice(draws, 1)) == [(0, "t0", "of-t0")]
    assert len(building.begun) <= AHEAD + 3


def test_a_task_without_an_image_counts_as_bad_and_another_takes_its_place() -> None:
    building = Building("a")
    building.end(A, B, C)
    draws = Draws(lambda task: task, building)
    assert ids(draws.several([A, B, C, PLAIN], 2, epoch=None, rounds=False)) == [
        (0, "a", "bad"), (1, "b", "of-b"), (2, "c", "of-c"),
    ]  # fmt: skip


@pytest.mark.parametrize("late", [False, True])
def test_bad_builds_come_in_the_first_round_alone_whenever_they_end(late: bool) -> None:
    building = Building("b")
    building.end(*(() if late else (A, B)))
    draws = Draws(lambda task: task, building).several([PLAIN, A, B], 5, epoch=None, rounds=True)
    drawn = list(islice(draws, 1))
    building.end(*((B, A) if late else ()))
    assert sorted(ids([*drawn, *draws])) == [
        (0, "plain", None), (1, "a", "of-a"), (2, "b", "bad"), (3, "plain", None), (4, "a", "of-a"),
        (5, "plain", None),
    ]  # fmt: skip


def test_rounds_end_where_no_image_can_be_made() -> None:
    building = Building("a", "b")
    building.end(A, B)
    draws = Draws(lambda task: task, building).several([A, B], 5, epoch=None, rounds=True)
    assert ids(draws) == [(0, "a", "bad"), (1, "b", "bad")]


def test_nothing_is_built_for_what_an_earlier_process_did() -> None:
    building = Building()
    building.end(C)
    draws = Draws(lambda task: task, building).several(
        [A, B, C], 4, epoch=None, rounds=True, done={0}.__contains__, bad={1}.__contains__
    )
    # B was bad: it comes no more. A was made, and is made again in the next round.
    assert ids(islice(draws, 3)) == [(0, "a", None), (1, "b", "bad"), (2, "c", "of-c")]
    building.end(A)
    assert sorted(ids(draws)) == [(3, "a", "of-a"), (4, "c", "of-c")]
    assert "b" not in building.begun


def test_a_draw_whose_build_is_cancelled_comes_as_it_was() -> None:
    building = Building()
    draws = Draws(lambda task: task, building).once([A], epoch=None, size=None)
    building(A).cancel()
    building(A).set_running_or_notify_cancel()  # as asyncio does when it cancels the coroutine
    assert ids(draws) == [(0, "a", None)]


# ---------------------------------------------------------------- the engine


class Told(Listener):
    def __init__(self) -> None:
        self.bad: list[str] = []

    def bad_task(self, task: BadTask) -> None:
        self.bad.append(f"{task.task_id}: {task.reason}")


def builds_of(config: Config, why_unfit: Callable[[SandboxSpec], Awaitable[str | None]]) -> Builds:
    return Builds(config.env, config.sandbox_spec, why_unfit, print)


class FakeBuilds:
    def __init__(self, building: Building) -> None:
        self.begin = building

    def stop(self) -> None:
        for future in self.begin.futures.values():
            if future.cancel():
                future.set_running_or_notify_cancel()


@asynccontextmanager
async def engine_of(building: Building, *listeners: Listener) -> AsyncIterator[Held]:
    """An engine whose images come when the test says so."""
    async with held(Observer(listeners=list(listeners)), group_size=1) as engine:
        shared = engine.orchestrator.shared
        assert shared.opened is not None
        shared.opened = replace(shared.opened, builds=FakeBuilds(building))  # type: ignore[arg-type]
        yield engine


async def groups_of(engine: Held, tasks: list[Task | BadTask]) -> list[tuple[int, str | None]]:
    async with aclosing(engine.orchestrator.groups(tasks)) as groups:
        return [(group.number, group.task.image) async for group in groups]


async def test_rollouts_go_on_while_an_image_is_made_and_a_failed_one_is_a_bad_task() -> None:
    building, told = Building("b"), Told()
    async with engine_of(building, told) as engine:
        run = asyncio.create_task(groups_of(engine, [A, B, PLAIN, PLAIN, PLAIN]))
        await engine.runs("g2-r0-a0", "g3-r0-a0")  # both slots, whatever waits for images
        engine.completer.let_all_go()
        await until(lambda: len(engine.completer.asked) == 3 and not engine.running)
        building.end(B, A)
        assert sorted(await run) == [(0, "of-a"), (2, None), (3, None), (4, None)]
    assert told.bad == ["b: it fails"]


async def test_a_machine_that_cannot_build_ends_the_run() -> None:
    building = Building()
    async with engine_of(building) as engine:
        run = asyncio.create_task(groups_of(engine, [PLAIN, A]))
        await until(lambda: building.begun == ["a"])
        building.futures["a"].set_exception(EnvironmentUnusable("Docker is not running here"))
        with pytest.raises(EnvironmentUnusable, match=r"^Docker is not running here$"):
            await run


async def test_a_drain_waits_for_no_image() -> None:
    building, told = Building(), Told()
    async with engine_of(building, told) as engine:
        run = asyncio.create_task(groups_of(engine, [PLAIN, A, B]))
        await until(lambda: building.begun == ["a", "b"])
        await engine.runs("g0-r0-a0")
        engine.orchestrator.drain()
        engine.completer.let_all_go()
        assert await run == [(0, None)]
        assert engine.orchestrator.cut_short
    assert told.bad == []


# ---------------------------------------------------------------- images


class FakeBuilder:
    """Builds nothing, and says what it was asked for."""

    first = "LABEL a=b"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.built: dict[str, str] = {}
        self.ids = {"base": "id-1"}
        self.hangs = False

    async def base(self, image: str) -> str:
        self.asked.append(f"base {image}")
        await asyncio.sleep(0)
        return self.ids.get(image, f"id-of-{image}")

    def name_in_build(self, image: str) -> str:
        return f"local/{image}"

    async def find(self, tag: str) -> str | None:
        return self.built.get(tag)

    async def build(self, context: IO[bytes], bases: tuple[str, ...], tag: str, labels: Mapping[str, str]) -> str:
        self.asked.append(f"build on {' '.join(bases)}")
        await asyncio.sleep(3600 if self.hangs else 0)
        self.built[tag] = f"image-{len(self.built)}"
        return self.built[tag]


def dockerfile(folder: Path, text: str = "FROM base\n") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    return folder / "Dockerfile"


def images(builder: FakeBuilder, table: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> TaskImages:
    return TaskImages(builder, table or {}, timeout_s, lambda line: None)


async def test_equal_folders_are_built_once(tmp_path: Path) -> None:
    builder = FakeBuilder()
    made, paths = images(builder), [dockerfile(tmp_path / name) for name in ("one", "two", "three")]
    assert set(await asyncio.gather(*map(made.image, paths))) == {"image-0"}
    assert builder.asked == ["base base", "build on base"]
    assert await images(builder).image(paths[0]) == "image-0"  # nor in the next run


async def test_another_base_or_another_text_is_another_image(tmp_path: Path) -> None:
    builder, path = FakeBuilder(), dockerfile(tmp_path)
    before = await images(builder).image(path)
    builder.ids["base"] = "id-2"
    after = await images(builder).image(path)
    mapped = await images(builder, {"base": "mine"}).image(path)
    assert len({before, after, mapped}) == 3
    assert builder.asked[-1] == "build on mine"


async def test_a_build_that_hangs_ends_at_its_time(tmp_path: Path) -> None:
    builder = FakeBuilder()
    builder.hangs = True
    with pytest.raises(BuildError, match=r"^its Dockerfile was not built within 0.1 s \(env.build_timeout\)$"):
        await images(builder, timeout_s=0.1).image(dockerfile(tmp_path))


async def test_no_room_for_a_context_is_the_machine_s_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dockerfile(tmp_path)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **_: Path("/dev/full").open("r+b", buffering=0))  # noqa: SIM115
    with pytest.raises(EnvironmentUnusable, match=r"No space left on device in .*: make room, or set TMPDIR"):
        await images(FakeBuilder()).image(path)


@pytest.mark.parametrize(
    ("env", "why"), [({"launcher": "process"}, "launcher process"), ({"dockerfiles": False}, "trust")]
)
async def test_where_nothing_is_built_the_task_says_why(env: dict[str, Any], why: str, tmp_path: Path) -> None:
    builds = builds_of(load_config(env=env, environ={}), fits)
    bad = await asyncio.wrap_future(builds.begin(replace(A, dockerfile=str(dockerfile(tmp_path)))))
    assert isinstance(bad, BadTask)
    assert why in bad.reason
    assert await asyncio.wrap_future(builds.begin(PLAIN)) is PLAIN
    await builds.aclose()
    assert await asyncio.wrap_future(builds.begin(A)) is A


# ---------------------------------------------------------------- images that no sandbox can be made of


async def fits(spec: SandboxSpec) -> str | None:
    return None


@asynccontextmanager
async def engine_of_images(*listeners: Listener, **images: Exception) -> AsyncIterator[Held]:
    """An engine whose launcher raises these errors for images of these names."""
    async with held(Observer(listeners=list(listeners)), group_size=1) as engine:
        engine.launcher.images = dict(images)
        shared = engine.orchestrator.shared
        assert shared.opened is not None
        builds = builds_of(engine.orchestrator.config, shared.opened.hosts.why_unfit)
        shared.opened = replace(shared.opened, builds=builds)
        yield engine
        await builds.aclose()


def of_image(name: str, task_id: str = "") -> Task:
    return replace(PLAIN, task_id=task_id or name, image=name)


async def test_a_task_whose_image_no_sandbox_can_be_made_of_is_bad_and_asked_about_once() -> None:
    told = Told()
    async with engine_of_images(told, odd=ImageUnusable("the image odd is for another machine")) as engine:
        engine.completer.let_all_go()
        tasks = [of_image("odd"), PLAIN, of_image("good"), of_image("odd", "same"), of_image("good", "too")]
        groups = await groups_of(engine, tasks)
        assert sorted(groups) == [(1, None), (2, "good"), (4, "good")]
        assert await groups_of(engine, [of_image("odd", "later")]) == []
    why = "the image odd is for another machine"
    assert sorted(told.bad) == sorted(f"{name}: {why}" for name in ("odd", "same", "later"))
    assert engine.launcher.launched == 3
    assert 1 <= engine.launcher.looked_at.count("odd") <= PARALLEL


@pytest.mark.parametrize(
    "error", [EnvironmentUnusable("no room for an image"), DockerError("no answer"), LaunchError("runc is gone")]
)
async def test_what_the_machine_lacks_is_no_task_s_fault(error: Exception) -> None:
    told = Told()
    async with engine_of_images(told, away=error) as engine:
        engine.completer.let_all_go()
        assert await groups_of(engine, [of_image("away")]) == [(0, "away")]
        engine.launcher.images["away"] = ImageUnusable("it is torn")
        assert await groups_of(engine, [of_image("away", "then")]) == []
    assert told.bad == ["then: it is torn"]


async def test_a_drain_waits_for_no_look_at_an_image() -> None:
    told, looking = Told(), asyncio.Event()

    async def hangs(spec: SandboxSpec) -> str | None:
        looking.set()
        await asyncio.sleep(3600)
        return "never"

    async with engine_of_images(told) as engine:
        shared = engine.orchestrator.shared
        assert shared.opened is not None
        builds = builds_of(engine.orchestrator.config, hangs)
        shared.opened = replace(shared.opened, builds=builds)
        run = asyncio.create_task(groups_of(engine, [of_image("a"), of_image("b"), of_image("c")]))
        await looking.wait()
        engine.orchestrator.drain()
        async with asyncio.timeout(30):
            assert await run == []
        assert engine.orchestrator.cut_short
        await builds.aclose()
    assert told.bad == []


async def test_an_image_is_asked_about_for_each_user_and_root() -> None:
    asked: list[SandboxSpec] = []

    async def why_unfit(spec: SandboxSpec) -> str | None:
        asked.append(spec)
        return f"no user {spec.user}" if spec.user == "ghost" else None

    builds = builds_of(load_config(env={"launcher": "oci"}, environ={}), why_unfit)
    own = replace(PLAIN, image="i", root="writable", user="ghost")
    results = [await asyncio.wrap_future(builds.begin(t)) for t in (own, replace(own, user="app"), own)]
    await builds.aclose()
    assert results == [bad := BadTask("plain", "no user ghost"), replace(own, user="app"), bad]
    assert [(spec.image, spec.root, spec.user) for spec in asked] == [
        ("i", "writable", "ghost"),
        ("i", "writable", "app"),
    ]


async def test_a_user_of_the_grader_that_the_image_lacks_is_found_before_anything_is_sampled() -> None:
    async def why_unfit(spec: SandboxSpec) -> str | None:
        return f"no user {spec.user}" if spec.user == "ghost" else None

    builds = builds_of(load_config(env={"launcher": "oci"}, environ={}), why_unfit)
    collected = Grader("harbor", collect=(Collect("true", 1.0, user="ghost"),))
    graders = [Grader("harbor", user="ghost"), Grader("harbor", user="ghost", image="own"), collected]
    tasks = [replace(PLAIN, image="i", root="writable", grader=grader) for grader in graders]
    results = [await asyncio.wrap_future(builds.begin(task)) for task in tasks]
    await builds.aclose()
    assert results == [bad := BadTask("plain", "its grader: no user ghost"), tasks[1], bad]


async def test_a_look_waits_for_no_build_and_an_image_that_was_built_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    async def why_unfit(spec: SandboxSpec) -> str | None:
        return "it has 300 layers" if spec.image == "image-0" else None

    def building(builder: FakeBuilder) -> Builds:
        builds = builds_of(load_config(env={"dockerfiles": True}, environ={}), why_unfit)
        builds._images = images(builder)
        return builds

    hanging = FakeBuilder()
    hanging.hangs = True
    paths = [dockerfile(tmp_path / str(n), f"FROM base\nRUN {n}\n") for n in range(PARALLEL)]
    tasks = [replace(A, dockerfile=str(path)) for path in paths]
    builds = building(hanging)
    for task in tasks:
        builds.begin(task)
    await until(lambda: hanging.asked.count("build on base") == PARALLEL)
    async with asyncio.timeout(30):
        assert await asyncio.wrap_future(builds.begin(of_image("i"))) == of_image("i")
    await builds.aclose()
    builds = building(FakeBuilder())
    assert await asyncio.wrap_future(builds.begin(tasks[0])) == BadTask("a", "it has 300 layers")
    await builds.aclose()


async def test_an_image_of_a_registry_is_fetched_as_one_to_begin_with(tmp_path: Path) -> None:
    builder, lines = FakeBuilder(), list[str]()
    made = TaskImages(builder, {"far.example/a": "near"}, 60.0, lines.append)
    assert await made.image("FROM far.example/a") == await made.image(dockerfile(tmp_path, "FROM far.example/a\n"))
    assert builder.asked == ["base near", "build on near"]
    assert lines == ["building far.example/a"]


class NamedImages:
    """Says what it makes, and fails at what is broken."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def image(self, dockerfile: str) -> str:
        self.asked.append(dockerfile)
        if "broken" in dockerfile:
            raise BuildError(f"{dockerfile} fails")
        return f"of-{dockerfile}"


@pytest.fixture
async def harbor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[tuple[Builds, NamedImages]]:
    """Builds of a run whose images are in a store of their own."""
    made = NamedImages()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    async def opened(*_: object) -> NamedImages:
        return made

    monkeypatch.setattr("orchestrator.engine.builds._open", opened)
    builds = builds_of(load_config(environ={}), fits)
    yield builds, made
    await builds.aclose()


@pytest.mark.parametrize("grader", [None, "/tests", "FROM a", "/broken"])
async def test_agent_and_grader_get_their_images(grader: str | None, harbor: tuple[Builds, NamedImages]) -> None:
    builds, made = harbor
    task = Task("t", "?", dockerfile="FROM a", cwd="", grader=Grader("harbor", dockerfile=grader, cwd="/here"))
    built = await asyncio.wrap_future(builds.begin(task))
    assert made.asked == list(dict.fromkeys(["FROM a", *([grader] if grader else [])]))
    if grader == "/broken":
        assert built == BadTask("t", "/broken fails")
        return
    assert isinstance(built, Task)
    assert built.grader is not None
    own = None if grader is None else f"of-{grader}"
    assert (built.image, built.grader.image, built.cwd, built.grader.cwd) == ("of-FROM a", own, "/", "/here")


@pytest.mark.parametrize(
    ("named", "place"), [("/app/", "/app"), ("app/../..", "/"), ("", "/"), ("/a\nb", "/"), ("/" + "x" * 2000, "/")]
)
def test_the_working_directory_is_the_image_s(
    named: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ImageStore().put(
        saved(tmp_path / "i.tar", layer(file("a", b"1")), config={"config": {"WorkingDir": named}}), "image"
    )
    assert _workdir("image") == place


# ---------------------------------------------------------------- uses


def test_images_are_in_use_while_the_run_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert images_in_use() is None
    one, two = Uses(), Uses()
    assert images_in_use() == set()
    one.add("sha256:a")
    one.add("sha256:b")
    two.add("sha256:b")
    assert images_in_use() == {"sha256:a", "sha256:b"}
    one.close()
    assert images_in_use() == {"sha256:b"}
    two.close()
    assert images_in_use() is None
    assert list((tmp_path / "rollout-orchestrator" / "uses").iterdir()) == []


@pytest.mark.parametrize(
    ("used_before", "keep_bytes", "in_use", "gone"),
    [
        (0.0, None, "", ""),
        (25.0, None, "", "ab"),
        (25.0, None, "a", "b"),
        (0.0, 30, "", ""),
        (0.0, 20, "", "a"),
        (0.0, 19, "", "ab"),
        (0.0, 0, "b", "ac"),
        (25.0, 0, "", "abc"),
    ],
)
def test_the_longest_unused_images_go_by_age_and_by_size(
    used_before: float, keep_bytes: int | None, in_use: str, gone: str
) -> None:
    images = [BuiltImage(name, name, at, 10) for name, at in (("c", 30.0), ("a", 10.0), ("b", 20.0))]
    out = unwanted(images, used_before=used_before, keep_bytes=keep_bytes, in_use=set(in_use))
    assert "".join(image.tag for image in out) == gone
