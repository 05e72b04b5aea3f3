"""An Engine that answers in shapes nobody foresaw: an infrastructure failure, neither silence nor a traceback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.doctor.sandboxes import check_sandboxes
from orchestrator.errors import DockerError, EngineUnfitError, EnvironmentUnusable, LaunchError
from orchestrator.launch.docker.calls import Engine
from orchestrator.launch.docker.client import is_lasting, why_refused
from orchestrator.launch.docker.events import ContainerEvent, EngineEvents
from orchestrator.launch.docker.launcher import DockerLauncher
from orchestrator.launch.docker.request import VOLUME
from orchestrator.launch.docker.sandbox import DockerSandbox
from orchestrator.launch.names import LABEL_PROJECT, LABEL_RUN, LABEL_STAGE, PROJECT
from orchestrator.launch.reaper import reap
from orchestrator.launch.uids import UidPair
from orchestrator.settings.config import Config
from orchestrator.settings.table import EnvSettings
from tests.fakes.odd_engine import OddEngine
from tests.fakes.plans import a_sandbox

DEADLINE_S = 10.0
DIED = {
    "Action": "die",
    "Actor": {"ID": "1", "Attributes": {"name": "sandbox-1", "exitCode": "3"}},
    "time": 1_700_000_000,
}


class Heard(asyncio.Queue[tuple[str, Any]]):
    """An `EventListener` that keeps what it is told."""

    def on_event(self, event: ContainerEvent) -> None:
        self.put_nowait(("event", event))

    def on_listing(self, states: Mapping[str, str], asked_s: float) -> None:
        self.put_nowait(("listing", states))

    def on_interruption(self, error: str) -> None:
        self.put_nowait(("interruption", error))


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OddEngine]:
    async with OddEngine(tmp_path / "engine") as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        yield engine


@asynccontextmanager
async def following() -> AsyncIterator[Heard]:
    heard = Heard()
    events = EngineEvents("label", heard)
    events.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield heard
    finally:
        await events.aclose()


@pytest.mark.parametrize(
    "odd",
    [
        None,
        [],
        {"error": "lost it"},
        DIED | {"Actor": None},
        DIED | {"Actor": {"Attributes": None}},
        DIED | {"Actor": {"Attributes": {"exitCode": "3"}}},
        DIED | {"Action": None},
    ],
)
async def test_an_odd_event_is_looked_into_and_the_next_is_heard(engine: OddEngine, odd: object) -> None:
    async with following() as heard:
        assert await heard.get() == ("listing", {})
        engine.answers["/containers/json"] = [{"Names": ["/sandbox-2"], "State": "exited"}]
        engine.events.put_nowait(odd)
        engine.events.put_nowait(DIED)
        assert await heard.get() == ("listing", {"sandbox-2": "exited"})
        assert await heard.get() == ("event", ContainerEvent("sandbox-1", "die", {"exitCode": "3"}))


@pytest.mark.parametrize("time", [{}, {"time": None}, {"time": "noon"}])
async def test_an_event_without_a_time_still_tells_what_happened(
    engine: OddEngine, time: dict[str, object]
) -> None:
    died = {"Action": "die", "Actor": {"Attributes": {"name": "sandbox-1", "exitCode": 3}}} | time
    async with following() as heard:
        assert await heard.get() == ("listing", {})
        engine.events.put_nowait(died)
        assert await heard.get() == ("event", ContainerEvent("sandbox-1", "die", {"exitCode": "3"}))


async def test_a_container_without_names_is_not_in_the_way_of_the_others(engine: OddEngine) -> None:
    engine.answers["/containers/json"] = [
        {"Names": None, "State": "removing"},
        {"Names": ["/sandbox-1"], "State": "running"},
    ]
    async with following() as heard:
        assert await heard.get() == ("listing", {"sandbox-1": "running"})


@pytest.mark.parametrize(
    "listing", [None, {}, [None], [{"Names": ["/sandbox-1"]}], [{"Names": [7], "State": "dead"}]]
)
async def test_a_listing_that_cannot_be_read_is_an_interruption_until_it_can(
    engine: OddEngine, listing: object
) -> None:
    engine.answers["/containers/json"] = listing
    async with following() as heard:
        assert (await heard.get())[0] == "interruption"
        engine.answers["/containers/json"] = []
        while (said := await heard.get())[0] == "interruption":
            pass
        assert said == ("listing", {})


# ---------------------------------------------------------------- calls

ODD: list[Any] = [None, [], {}, "no", 7]
STARTED: dict[str, object] = {
    "/containers/create": {"Id": "1"},
    "/1/start": None,
    "/images/image/json": {"Id": "sha256:1", "Config": {}},
}


@asynccontextmanager
async def connected() -> AsyncIterator[Engine]:
    engine = Engine(threads=1)
    try:
        yield engine
    finally:
        await engine.aclose()


@pytest.mark.parametrize("odd", ODD)
async def test_an_answer_to_a_plain_question_is_the_engines_failure(engine: OddEngine, odd: object) -> None:
    engine.answers |= {"/info": odd, "/1/stats": odd, "/containers/create": odd}
    async with connected() as calls:
        with pytest.raises(DockerError, match=r"unexpected shape \(info"):
            await calls.info()
        with pytest.raises(DockerError, match=r"unexpected shape \(stats"):
            await calls.cpu_ns("1", DEADLINE_S)
        with pytest.raises(DockerError, match=r"unexpected shape \(create"):
            await calls.create({}, "sandbox-1")


@pytest.mark.parametrize("odd", [*ODD, {"State": None}, {"State": {"Pid": 1}, "HostConfig": None}])
async def test_a_sandbox_of_which_nobody_can_tell_how_it_is_confined_is_not_used(
    engine: OddEngine, tmp_path: Path, odd: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.launch.docker.launcher.engine_runtime", lambda image: "/runtime")
    engine.answers |= STARTED | {"/images/image/json": {"Id": "1"}, "/1/json": odd}
    launcher = DockerLauncher("run", max_sandboxes=1)
    try:
        with pytest.raises(DockerError, match=r"unexpected shape \(inspect"):
            async with launcher.launch(a_sandbox(image="image"), tmp_path):
                pytest.fail("it was used")
    finally:
        await launcher.aclose()


@pytest.mark.parametrize("odd", [*ODD, {"Id": "1", "Config": {"Env": 7}}, {"Id": "1", "RootFS": 7}])
async def test_an_image_that_cannot_be_read_is_the_engines_failure(
    engine: OddEngine, tmp_path: Path, odd: object
) -> None:
    engine.answers |= {"/images/image/json": odd}
    launcher = DockerLauncher("run", max_sandboxes=1)
    try:
        with pytest.raises(DockerError, match=r"unexpected shape \(image"):
            async with launcher.launch(a_sandbox(image="image"), tmp_path):
                pytest.fail("it was used")
    finally:
        await launcher.aclose()


@pytest.mark.parametrize("odd", [*ODD, {"State": None}, {"State": {"Status": "exited", "OOMKilled": False}}])
async def test_an_end_that_cannot_be_read_is_the_engines_failure(engine: OddEngine, odd: object) -> None:
    engine.answers["/1/json"] = odd
    async with connected() as calls:
        sandbox = DockerSandbox(calls, UidPair(20_000, 20_001))
        sandbox.sandbox_id = "1"
        sandbox.end()
        with pytest.raises(DockerError, match=r"unexpected shape \(inspect"):
            await sandbox.exited()


async def test_cancelled_while_it_is_closed_the_launcher_still_removes_what_resisted(engine: OddEngine) -> None:
    engine.answers["/containers/create"] = "no"  # it may be there all the same
    launcher = DockerLauncher("run", max_sandboxes=1)
    with pytest.raises(DockerError):
        await launcher.ready(a_sandbox(image="image"))
    closing = asyncio.create_task(launcher.aclose())
    for _ in range(2):
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert any(call.startswith("DELETE ") for call in engine.asked)


LASTING = [
    "error creating overlay mount to /var/lib/docker/fuse-overlayfs/x/merged: /dev/fuse: Permission denied",
    "fuse: device not found, try 'modprobe fuse' first",
    "mkdir /var/lib/docker/overlay2/x-init: read-only file system",
    "open /data/image/overlay2/layerdb/sha256/x/diff: input/output error",
    "failed to register layer: operation not permitted",
    "mkdir /srv/docker/overlay2/x: permission denied",
    "layer does not exist",
    "failed to export image: failed to set parent sha256:0: unknown parent image ID sha256:0",  # removed meanwhile
]
NOT_LASTING = ["write /var/lib/docker/overlay2/x: no space left on device", "open /x: disk quota exceeded"]
ABOUT_THE_CONTAINER = [
    "failed to create task: OCI runtime create failed: runc create failed: mkdirat /run: read-only file system",
    'OCI runtime create failed: exec: "/bin/x": permission denied: unknown',
    "unable to convert uid/gid chown string to host mapping: can't find gid for group x: "
    "open /var/lib/docker/overlay2/x/merged/etc/group: no such file or directory",
    "Conflict. The container name is already in use",
    "No such image: rollout-orchestrator-sandbox:none",
]


@pytest.mark.parametrize("why", [*LASTING, *NOT_LASTING, *ABOUT_THE_CONTAINER])
async def test_an_engine_that_cannot_make_containers_is_named_by_what_fails(engine: OddEngine, why: str) -> None:
    launcher = DockerLauncher("run", max_sandboxes=1)
    engine.refusals["/containers/create"] = why
    try:
        with pytest.raises(LaunchError) as refused:
            await launcher.ready(a_sandbox(image="image"))
    finally:
        await launcher.aclose()
    assert isinstance(refused.value, EngineUnfitError) == (why in LASTING)
    assert str(refused.value).startswith("Docker's storage fails: ") == (why not in ABOUT_THE_CONTAINER)
    assert "`" in str(refused.value) or why in ABOUT_THE_CONTAINER, "it says what to do"


async def test_an_engine_without_the_runtime_is_not_waited_for(engine: OddEngine) -> None:
    launcher = DockerLauncher("run", max_sandboxes=1)
    engine.refusals["/containers/create"] = "unknown or invalid runtime name: runsc"
    try:
        with pytest.raises(EngineUnfitError, match=r"daemon\.json"):
            await launcher.ready(a_sandbox(image="image"))
    finally:
        await launcher.aclose()


PROFILE = "name=seccomp,profile=default"
LIMITS = dict.fromkeys(("MemoryLimit", "SwapLimit", "CpuCfsQuota", "PidsLimit"), True)
INFO = {"OSType": "linux", "MemTotal": 1 << 34, "NCPU": 2, "SecurityOptions": [PROFILE], **LIMITS}
ROOTLESS = {"SecurityOptions": [PROFILE, "name=rootless"], **dict.fromkeys(LIMITS, False)}
PODMAN = {"ApiVersion": "1.41", "Components": [{"Name": "Podman Engine", "Version": "4.3.1"}, {"Name": "Conmon"}]}


async def findings(engine: OddEngine, info: Mapping[str, object], waived: tuple[str, ...] = ()) -> list[str]:
    """What doctor says of an Engine without an image."""
    engine.answers |= {"/info": {**INFO, **info}}
    config = Config(env=EnvSettings(waive_hardening=waived, launcher="docker"))
    return [
        f"{found.level} {found.what}: {found.text}"
        async for found in check_sandboxes(config.env, config.sandbox_spec())
    ]


async def test_podman_is_refused_with_what_it_lacks_and_what_to_use(engine: OddEngine) -> None:
    engine.answers["/version"] = PODMAN
    first, *_ = await findings(engine, {})
    assert first.startswith("fail docker: DOCKER_HOST leads to Podman 4.3.1, which cannot limit the files")
    assert "--env.launcher oci" in first
    async with closing_launcher() as launcher:
        with pytest.raises(EnvironmentUnusable, match=r"leads to Podman 4\.3\.1"):
            await launcher.check(a_sandbox("image"))
    assert not [asked for asked in engine.asked if asked.startswith("POST")], "nothing was made"


async def test_what_a_rootless_engine_cannot_limit_is_told_with_its_cure(engine: OddEngine) -> None:
    usual = await findings(engine, {})
    assert [line for line in usual if "limits" in line and line.startswith("ok")]
    told = await findings(engine, ROOTLESS)
    assert "rootless on" in told[0]
    limits = [line for line in told if line.startswith("fail limits: ")]
    assert [line.split()[2] for line in limits] == ["memory:", "swap:", "cpus:", "pids:"]
    assert all("where the machine has cgroup v2 and delegates it" in line for line in limits)
    waived = await findings(engine, ROOTLESS, ("memory", "swap", "cpus", "pids"))
    assert "warn limits: not limited, as you waived it: memory, swap, cpus, pids" in waived


async def test_a_rootless_engine_of_another_user_is_told_apart_from_a_broken_one() -> None:
    refused = 'invalid mount config for type "bind": stat /tmp/orchestrator-1/x: permission denied'
    assert "run the orchestrator as that user" in why_refused(refused)
    assert is_lasting(refused)


@asynccontextmanager
async def closing_launcher() -> AsyncIterator[DockerLauncher]:
    launcher = DockerLauncher("run", max_sandboxes=1)
    try:
        yield launcher
    finally:
        await launcher.aclose()


@pytest.mark.parametrize("lives", [False, True])
async def test_volumes_of_runtimes_go_with_what_holds_them_unless_a_sandbox_lives(
    engine: OddEngine, lives: bool
) -> None:
    labels = {LABEL_PROJECT: PROJECT, LABEL_STAGE: "manual"}  # this Engine gives the same answer to every filter
    holder = {"Id": "7", "Names": [f"/{VOLUME}c0ffee"], "Labels": labels}
    sandbox = {"Id": "8", "Names": ["/sandbox-1"], "Labels": {**labels, LABEL_RUN: "r"}}
    engine.answers |= {
        "/containers/json": [holder, *([sandbox] if lives else [])],
        "/images/json": [],
        "/volumes": {"Volumes": [{"Name": f"{VOLUME}c0ffee"}]},
        "/containers/7": None,
        f"/volumes/{VOLUME}c0ffee": None,
    }
    await reap(old_images=True)
    removals = [call.partition(" ")[2].split("/", 2)[2] for call in engine.asked if call.startswith("DELETE ")]
    assert removals == ([] if lives else ["containers/7", f"volumes/{VOLUME}c0ffee"])
