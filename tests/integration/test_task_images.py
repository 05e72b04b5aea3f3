"""Images of tasks' Dockerfiles, made by a real Engine: what is in them, what failures are told, what is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import docker
import pytest
from docker.errors import DockerException

from orchestrator.errors import BuildError
from orchestrator.launch.image.build import ensure_image
from orchestrator.launch.image.docker_builder import DockerBuilder
from orchestrator.launch.image.site import Site
from orchestrator.launch.image.task_images import TaskImages
from orchestrator.launch.names import LABEL_TASK, TASK_REPOSITORY
from orchestrator.launch.oci.build import ensure_stored
from orchestrator.launch.oci.buildah import missing_packages
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.oci.task_builder import open_builder
from orchestrator.launch.reaper import remove_built
from orchestrator.launch.uses import Uses
from tests.e2e.endpoint import answers, says, scripted_endpoint
from tests.fakes.runs import cleaning, flags, lines, place, run, running

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

PLANTED = "planted-password"
SITE = Site({"HTTP_PROXY": f"http://me:{PLANTED}@127.0.0.1:1", "NO_PROXY": "localhost"}, None, ())
# What a step costs is up to the Engine's storage: there are few.
MULTI_STAGE = """\
ARG TAG=3.12
FROM python:${TAG}-slim@sha256:%s AS made
RUN test -n "$HTTP_PROXY" && echo %s > /made
FROM python:3.12-slim
COPY --from=made /made /copied
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.APIClient]:
    client = docker.APIClient(timeout=600)
    yield client
    client.close()


@pytest.fixture(scope="module")
def base() -> str:
    return asyncio.run(ensure_image(progress=print)).tag


@pytest.fixture
def word(engine: docker.APIClient) -> Iterator[str]:
    """A word that Dockerfiles of one test have in them. Its images are removed, and no container may be left."""
    word = f"word{uuid.uuid4().hex[:12]}"
    with cleaning():
        yield word
        for image in engine.images(filters={"label": LABEL_TASK}):
            if any(word in str(layer["CreatedBy"]) for layer in engine.history(image["Id"])):
                with suppress(DockerException):
                    engine.remove_image(image["RepoTags"][0], force=True)
        assert containers(engine, word) == []


def containers(engine: docker.APIClient, word: str) -> list[str]:
    return [container["Id"] for container in engine.containers(all=True) if word in container["Command"]]


def images(base: str, timeout_s: float = 600.0) -> TaskImages:
    builder = DockerBuilder("default", SITE, parallel=2)
    return TaskImages(builder, {"python:3.12-slim": base}, timeout_s, print)


def dockerfile(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(text)
    return folder / "Dockerfile"


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.1)


# ---------------------------------------------------------------- one image


@pytest.mark.slow
async def test_stages_bases_and_proxies_are_those_of_the_operator(
    engine: docker.APIClient, base: str, word: str, tmp_path: Path
) -> None:
    text = MULTI_STAGE % ("a" * 64, word)
    one, two = (dockerfile(tmp_path / name, text) for name in ("one", "two"))
    made = images(base)
    ids = await asyncio.gather(made.image(one), made.image(two))
    assert len(set(ids)) == 1
    image = engine.inspect_image(ids[0])
    (tag,) = image["RepoTags"]
    assert tag == f"{TASK_REPOSITORY}:{image['Config']['Labels'][LABEL_TASK]}"
    assert image["Config"]["Entrypoint"] == engine.inspect_image(base)["Config"]["Entrypoint"]
    assert PLANTED not in json.dumps([image, engine.history(ids[0])])
    container = engine.create_container(ids[0], entrypoint=["cat"], command=["/copied"])["Id"]
    engine.start(container)
    engine.wait(container)
    try:
        assert engine.logs(container) == f"{word}\n".encode()
        # Of a container, or noted by a live run, it is not removed, however old.
        await remove_built(used_before=time.time() + 60, keep_bytes=0)
    finally:
        engine.remove_container(container)
    uses = Uses()
    uses.add(ids[0])
    await remove_built(used_before=time.time() + 60, keep_bytes=0)
    uses.close()
    before = time.time()
    assert await images(base).image(one) == ids[0]  # found, and used now
    await remove_built(used_before=before, keep_bytes=None)
    assert engine.images(tag)
    await remove_built(used_before=time.time() + 60, keep_bytes=None)
    assert not engine.images(tag)


@pytest.mark.slow
async def test_authorities_are_there_for_steps_and_not_in_the_image(
    engine: docker.APIClient, base: str, word: str, tmp_path: Path
) -> None:
    certificates = tmp_path / "site.pem"
    certificates.write_text(f"{word} {PLANTED}")
    site = Site({}, certificates, ("SSL_CERT_FILE", "PIP_CERT"))
    text = f"FROM here AS one\nRUN grep -h {word} $SSL_CERT_FILE $PIP_CERT > /seen\nFROM one\nCOPY . /context/\n"
    builder = DockerBuilder("default", site, parallel=1)
    image = await TaskImages(builder, {"here": base}, 600, print).image(dockerfile(tmp_path / "task", text))
    told = json.dumps([engine.inspect_image(image), engine.history(image)])
    assert ".orchestrator-ca" not in told
    assert "SSL_CERT_FILE=" not in told
    look = (
        "import glob; print(open('/seen').read().count('planted'), glob.glob('/.orch*'), glob.glob('/context/*'))"
    )
    container = engine.create_container(image, entrypoint=["python3", "-c"], command=[look])["Id"]
    try:
        engine.start(container)
        engine.wait(container)
        assert engine.logs(container) == b"2 [] ['/context/Dockerfile']\n"
        pieces = b"".join(engine.get_image(image))
        assert b"site.pem" not in pieces
        # Two lines of what the step saw are all that there is of the file.
        assert pieces.count(PLANTED.encode()) == 2
    finally:
        engine.remove_container(container)
        engine.remove_image(builder.first.split("--from=")[1].split()[0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "FROM python:3.12-slim\nRUN echo WORD && echo no $HTTP_PROXY && exit 7\n",
            "its Dockerfile fails at `RUN echo WORD && echo no $HTTP_PROXY && exit 7` (exit code 7): WORD | no "
            "http://127.0.0.1:1",
        ),
        ("FROM python:3.12-slim\nCOPY nothing /x\n", "its Dockerfile fails at `COPY nothing /x` (COPY failed: "),
        ("FROM python:3.12-slim\nFLY away\n", "unknown instruction: FLY"),
        (
            "FROM 127.0.0.1:9/away/WORD:1\n",
            "its Dockerfile begins with 127.0.0.1:9/away/WORD:1, which is not here and cannot be pulled: ",
        ),
    ],
)
async def test_a_build_that_fails_is_told_in_one_line(
    base: str, word: str, tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(BuildError) as failure:
        await images(base).image(dockerfile(tmp_path, text.replace("WORD", word)))
    assert why.replace("WORD", word) in str(failure.value)
    assert PLANTED not in str(failure.value)


async def test_a_cancelled_build_leaves_no_container(
    engine: docker.APIClient, base: str, word: str, tmp_path: Path
) -> None:
    path = dockerfile(tmp_path, f"FROM python:3.12-slim\nRUN echo {word} && sleep 1000\n")
    building = asyncio.create_task(images(base).image(path))
    await until(lambda: containers(engine, word))
    building.cancel()
    with suppress(asyncio.CancelledError):
        await building
    await until(lambda: not containers(engine, word))


# ---------------------------------------------------------------- a run


def tasks(home: Path, **dockerfiles: str) -> None:
    rows = [{"task_id": "plain", "question": "plain: what is in /made?", "answer": "nothing"}]
    for name, text in dockerfiles.items():
        dockerfile(home / name, text)
        rows.append(
            {"task_id": name, "question": f"{name}: what is in /made?", "answer": "it", "dockerfile": name}
        )
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


LOOK = "final_answer(open('/made').read() if os.path.exists('/made') else 'nothing')"


@pytest.mark.slow
async def test_a_run_rolls_tasks_out_in_the_images_of_their_dockerfiles(base: str, word: str) -> None:
    with (
        place() as home,
        scripted_endpoint({"": [[says("look", f"import os\n{LOOK}")]]}, "--dialect", "vllm") as endpoint,
    ):
        made = f"FROM here\nRUN : {word} && echo it > /made\n"
        tasks(home, one=made, two=made, broken=f"FROM here\nRUN echo {word} && false\n")
        command = flags(
            home, endpoint.base_url, launcher="docker", max_concurrent_sandboxes=2, base_images=f"here={base}"
        )
        ended = await run(*command, directory=home)
        assert ended.code == 0, ended
        records = lines(home / "run" / "rollouts.jsonl")
        (bad,) = [line for line in records if line["outcome"] == "bad_task"]
        assert bad["task_id"] == "broken"
        assert bad["reason"] == f"its Dockerfile fails at `RUN echo {word} && false` (exit code 1): {word}"
        good = {line["task_id"]: line for line in records if line is not bad}
        assert {name: line["score"] for name, line in good.items()} == {"plain": 1.0, "one": 1.0, "two": 1.0}
        ids = {name: line["plan"]["sandbox"]["image"] for name, line in good.items()}
        assert ids["one"] == ids["two"] != ids["plain"] == base
        assert ids["one"].startswith("sha256:")
        assert ended.stderr.count("building ") + ended.stdout.count("building ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_run_that_is_stopped_leaves_no_build(
    engine: docker.APIClient, base: str, word: str, number: signal.Signals
) -> None:
    with place() as home, scripted_endpoint({"": [[answers("42")]]}, "--dialect", "vllm") as endpoint:
        tasks(home, hangs=f"FROM {base}\nRUN echo {word} && sleep 1000\n")
        async with running(*flags(home, endpoint.base_url, launcher="docker"), directory=home) as started:
            await until(lambda: containers(engine, word))
            started.signal(number)
            ended = await started.ended()
            assert not ended.traceback, ended
            assert ended.code == (128 + number if number is signal.SIGTERM else -number)
        await until(lambda: not containers(engine, word))
        assert not [line for line in lines(home / "run" / "rollouts.jsonl") if line["outcome"] == "bad_task"]


# ---------------------------------------------------------------- without an Engine


@pytest.fixture
def store(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    """A store of its own, with the sandbox image."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asyncio.run(ensure_stored(base, store=ImageStore(), runtime="runc", progress=print))
    return ImageStore()


needs_root = pytest.mark.skipif(os.geteuid() != 0 or bool(missing_packages()), reason="needs root and buildah")


@pytest.mark.full
@needs_root
async def test_buildah_makes_the_same_of_a_dockerfile(
    store: ImageStore, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    certificates = tmp_path / "site.pem"
    certificates.write_text(PLANTED)
    monkeypatch.setenv("HTTP_PROXY", SITE.proxies["HTTP_PROXY"])
    builder = await open_builder("default", Site({}, certificates, ("PIP_CERT",)), "runc", parallel=2)
    hanging = asyncio.create_task(  # while the others are built
        TaskImages(builder, {}, 60, print).image(
            dockerfile(tmp_path / "hangs", f"FROM {base}\nRUN sleep 1234567\n")
        )
    )
    made = TaskImages(builder, {"python:3.12-slim": base}, 600, print)
    text = MULTI_STAGE % ("a" * 64, "it") + "RUN grep -c planted $PIP_CERT >> /copied\n"
    image = await made.image(dockerfile(tmp_path / "task", text))
    stored = store.find(image)
    assert stored is not None
    root = stored.folder / "rootfs"
    assert (root / "copied").read_text() == "it\n1\n"
    assert stored.config["Entrypoint"] == store.find(base).config["Entrypoint"]  # type: ignore[union-attr]
    assert set(stored.config["Env"]) == set(store.find(base).config["Env"])  # type: ignore[union-attr]
    assert not list(root.rglob("*orchestrator-ca*"))
    with pytest.raises(BuildError) as failure:
        await made.image(dockerfile(tmp_path / "bad", "FROM python:3.12-slim\nRUN echo one && exit 3\n"))
    assert str(failure.value) == "its Dockerfile fails at `RUN echo one && exit 3` (exit code 3): one"
    with pytest.raises(
        BuildError, match=r"begins with 127.0.0.1:9/away:1, which is not here and cannot be pulled"
    ):
        await made.image(dockerfile(tmp_path / "away", "FROM 127.0.0.1:9/away:1\n"))
    with pytest.raises(BuildError, match=r"its Dockerfile was not built within 60 s"):
        await hanging
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if b"1234567" in _command(pid)]
    assert list((store.folder / "drafts").iterdir()) == []
    # By age, and not while a sandbox may be made of it.
    (built,) = store.built()
    assert (built.image_id, built.used_at > time.time() - 600) == (image, True)
    with store.using(stored):
        assert store.remove([built]) == 0
    assert store.remove([built]) == 1
    assert store.find(image) is None
    assert store.built() == []


def _command(process: Path) -> bytes:
    with suppress(OSError):
        return (process / "cmdline").read_bytes()
    return b""


@pytest.mark.full
@needs_root
async def test_the_launcher_oci_takes_what_docker_has_built(base: str, word: str) -> None:
    with (
        place() as home,
        scripted_endpoint({"": [[says("look", f"import os\n{LOOK}")]]}, "--dialect", "vllm") as endpoint,
    ):
        store = ImageStore(home / ".cache" / "rollout-orchestrator" / "oci")
        await ensure_stored(base, store=store, runtime="runc", progress=print)
        tasks(home, one=f"FROM {base}\nRUN : {word} && echo it > /made\n")
        ended = await run(*flags(home, endpoint.base_url, launcher="oci"), directory=home)
        assert ended.code == 0, ended
        assert [line["score"] for line in lines(home / "run" / "rollouts.jsonl")] == [1.0] * 4
        replayed = await run(str(home / "run"), "--env.launcher=oci", directory=home, command="replay")
        assert replayed.code == 0, replayed
        cleaned = await run("--env.launcher=oci", "--images", "--older-than=0", directory=home, command="cleanup")
        assert cleaned.code == 0, cleaned
        assert store.built() == []
