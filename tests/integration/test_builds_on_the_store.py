"""Images that buildah makes on those of the store: only what a build adds is made, and nothing below changes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.errors import BuildError
from orchestrator.launch.image.site import Site
from orchestrator.launch.image.task_images import TaskImages
from orchestrator.launch.oci import buildah
from orchestrator.launch.oci.buildah import missing_packages
from orchestrator.launch.oci.program import find_oci_runtime
from orchestrator.launch.oci.store import ImageStore, StoredImage
from orchestrator.launch.oci.task_builder import BuildahBuilder
from tests.fakes.archives import file, folder, layer, link, saved
from tests.fakes.ordinary_user import USER, ordinary_user
from tests.fakes.ordinary_user import why_not as no_ordinary_user

BUSYBOX = Path("/bin/busybox")
BASE = "small-base"
CONFIG = {"config": {"Env": ["A=b"], "Entrypoint": ["/bin/sh"], "Labels": {"l": "v"}, "WorkingDir": "/data"}}
CHANGES = f"""\
FROM {BASE}
COPY word /data/word
RUN echo more >> /data/file && rm -r /data/gone && mkdir /data/gone && echo new > /data/gone/new && echo $A > /env
"""
# What a step could try to write to the image that it runs on, and to that of another stage.
HOSTILE = f"""\
FROM {BASE} AS other
RUN ln -s / /up && echo x > /data/file
FROM {BASE}
RUN chmod -R 777 /data; chown -R 7:7 /data; touch /data /data/file; ln /data/file /data/2; echo x > /data/2
RUN mount -o remount,rw /; mount -o remount,rw /data; mount -t tmpfs t /data; umount /; echo x > /data/file
RUN for p in /proc/[0-9]*; do echo x > $p/root/data/file; echo x > $p/cwd/data/file; done; exit 0
RUN for s in STORE/images/*/rootfs /proc/1/root/STORE/images/*/rootfs; do echo x > $s/data/file; done; exit 0
RUN --mount=type=bind,from=other,target=/mnt,rw rm -rf /mnt/data/gone; echo x > /mnt/bin/new; exit 0
RUN --mount=type=bind,from=IN_BUILD,target=/mnt,rw rm -rf /mnt/data; echo x > /mnt/bin/new; exit 0
COPY --from=other /data/file /up/data/file
RUN rm -rf /data; exit 0
"""


def why_not() -> str | None:
    if os.geteuid() != 0 or missing_packages():
        return "needs root and buildah"
    if not BUSYBOX.exists():
        return "there is no busybox: see tests/system-packages.sh"
    return None


pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ImageStore]:
    store = ImageStore(tmp_path / "store")
    store.put(small_base(tmp_path / "base.tar"), BASE)
    yield store
    assert list((store.folder / "drafts").iterdir()) == []


def small_base(path: Path) -> Path:
    programs = ("sh", "echo", "rm", "mkdir", "ln", "chmod", "chown", "touch", "mount", "umount", "sleep", "cat")
    entries = [folder("bin"), file("bin/busybox", BUSYBOX.read_bytes(), mode=0o755)]
    entries += [link(f"bin/{name}", "busybox") for name in programs]
    data = layer(
        folder("data"), file("data/file", b"as it was\n"), folder("data/gone"), file("data/gone/old", b"old")
    )
    return saved(path, layer(*entries), data, config=CONFIG)


def builder(store: ImageStore) -> BuildahBuilder:
    return BuildahBuilder(store, find_oci_runtime("runc"), "none", Site({}, None, ()))


def images(store: ImageStore) -> TaskImages:
    return TaskImages(builder(store), {}, 300, print)


def task(place: Path, text: str, word: str = "word") -> Path:
    place.mkdir(parents=True)
    (place / "Dockerfile").write_text(text)
    (place / "word").write_text(word)
    return place / "Dockerfile"


def found(store: ImageStore, name: str) -> StoredImage:
    image = store.find(name)
    assert image is not None
    return image


def digest(*roots: Path) -> str:
    """Of all names, kinds, modes, owners, times and contents."""
    whole = hashlib.sha256()
    for root in roots:
        for path in (root, *sorted(root.rglob("*"))):
            status = path.lstat()
            seen = (str(path), status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_ino)
            whole.update(repr(seen).encode())
            if path.is_file() and not path.is_symlink():
                whole.update(path.read_bytes())
    return whole.hexdigest()


@pytest.mark.parametrize("drivers", [["overlay", "vfs"], ["vfs"]])
async def test_only_what_a_build_adds_is_made(
    store: ImageStore, tmp_path: Path, drivers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buildah, "_DRIVERS", {name: buildah._DRIVERS[name] for name in drivers})
    base = found(store, BASE)
    layers = [store.folder / "layers" / layer_id.removeprefix("sha256:") for layer_id in base.layers]
    below = digest(base.root, *layers)
    made = found(store, await images(store).image(task(tmp_path / "task", CHANGES)))
    assert made.layers[:-1] == base.layers
    (added,) = {place.name for place in (store.folder / "layers").iterdir()} - {place.name for place in layers}
    assert made.layers[-1] == f"sha256:{added}"
    entries = (store.folder / "layers" / added / "entries.jsonl").read_text()
    assert "busybox" not in entries
    assert (made.root / "data" / "file").read_text() == "as it was\nmore\n"
    assert (made.root / "data" / "word").read_text() == "word"
    assert [path.name for path in (made.root / "data" / "gone").iterdir()] == ["new"]
    assert (made.root / "env").read_text() == "b\n"
    assert (made.root / "bin" / "busybox").samefile(base.root / "bin" / "busybox")
    assert not [path for path in made.root.iterdir() if "stands" in path.name]
    assert made.config["Entrypoint"] == ["/bin/sh"]
    assert made.config["WorkingDir"] == "/data"
    assert made.config["Labels"]["l"] == "v"
    assert digest(base.root, *layers) == below


async def test_a_hostile_build_changes_nothing_of_its_base(store: ImageStore, tmp_path: Path) -> None:
    base = found(store, BASE)
    below = digest(base.root)
    name = builder(store).name_in_build(BASE)
    text = HOSTILE.replace("STORE", str(store.folder)).replace("IN_BUILD", name)
    made = found(store, await images(store).image(task(tmp_path / "hostile", text)))
    assert not (made.root / "data" / "file").exists()
    assert digest(base.root) == below
    next_one = found(store, await images(store).image(task(tmp_path / "next", CHANGES)))
    assert (next_one.root / "data" / "file").read_text() == "as it was\nmore\n"


async def test_the_same_dockerfile_in_other_folders_makes_other_images_at_a_time(
    store: ImageStore, tmp_path: Path
) -> None:
    made = images(store)
    words = ["one", "two", "three", "one"]
    tasks = [task(tmp_path / str(number), CHANGES, word) for number, word in enumerate(words)]
    ids = await asyncio.gather(*map(made.image, tasks))
    assert [(found(store, image).root / "data" / "word").read_text() for image in ids] == words
    assert ids[0] == ids[3]
    assert len(set(ids)) == 3


async def test_several_bases_are_each_what_they_are(store: ImageStore, tmp_path: Path) -> None:
    first = found(store, await images(store).image(task(tmp_path / "first", CHANGES)))
    text = f"FROM {BASE} AS plain\nFROM sha256:{first.digest}\nCOPY --from=plain /data/file /plain\n"
    second = found(store, await images(store).image(task(tmp_path / "second", text)))
    assert second.layers[: len(first.layers)] == first.layers
    assert (second.root / "plain").read_text() == "as it was\n"
    assert (second.root / "data" / "file").read_text() == "as it was\nmore\n"
    empty = f"FROM {BASE} AS plain\nFROM scratch\nCOPY --from=plain /data /data\n"
    third = found(store, await images(store).image(task(tmp_path / "third", empty)))
    assert not (third.root / "bin").exists()
    assert (third.root / "data" / "file").read_text() == "as it was\n"


async def test_a_build_that_fails_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    before = digest(store.folder / "images", store.folder / "layers")
    with pytest.raises(
        BuildError, match=r"its Dockerfile fails at `RUN echo x > /data/file` \(exit code 3\): why"
    ):
        await images(store).image(
            task(tmp_path / "bad", f"FROM {BASE}\nRUN echo x > /data/file; echo why; exit 3\n")
        )
    assert digest(store.folder / "images", store.folder / "layers") == before


BUILDING = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.integration.test_builds_on_the_store import images
from orchestrator.launch.oci.store import ImageStore
print(asyncio.run(images(ImageStore(Path(sys.argv[1]))).image(Path(sys.argv[2]))), flush=True)
"""
ROOT = str(Path(__file__).parents[2])


async def test_a_killed_build_leaves_nothing_that_counts(store: ImageStore, tmp_path: Path) -> None:
    base = found(store, BASE)
    below = digest(base.root, store.folder / "images", store.folder / "layers")
    hangs = task(tmp_path / "hangs", f"FROM {BASE}\nRUN echo x > /data/file; touch /begun; sleep 1000\n")
    argv = (sys.executable, "-c", BUILDING, str(store.folder), str(hangs), ROOT)
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.DEVNULL)
    drafts = store.folder / "drafts"
    while not list(drafts.glob("*/storage/root/*/*/diff/begun")):
        await asyncio.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    while b"begun" in b"".join(_commands()):
        await asyncio.sleep(0.05)
    assert store.remove_unused() == 1
    assert digest(base.root, store.folder / "images", store.folder / "layers") == below
    (tmp_path / "hangs" / "Dockerfile").write_text(f"FROM {BASE}\nCOPY word /data/word\n")
    made = found(store, await images(store).image(hangs))
    assert (made.root / "data" / "file").read_text() == "as it was\n"


def _commands() -> Iterator[bytes]:
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield process.read_bytes()
        except OSError:
            continue


@pytest.mark.skipif(no_ordinary_user() is not None, reason=no_ordinary_user() or "")
def test_an_ordinary_user_builds_so_too(tmp_path: Path) -> None:
    with ordinary_user(delegated=False) as user:
        one = task(user.home / "task", CHANGES)
        script = (
            "import sys; from pathlib import Path; from orchestrator.launch.oci.store import ImageStore\n"
            f"ImageStore(Path(sys.argv[1])).put(Path({str(user.home / 'base.tar')!r}), {BASE!r})\n"
        )
        small_base(user.home / "base.tar")
        subprocess.run(["chown", "-R", f"{USER}:{USER}", user.home], check=True)
        store = ImageStore(user.home / "store")
        command = user.command(
            sys.executable, "-c", script + BUILDING, str(store.folder), str(one), ROOT, DOCKER_HOST="unix:///none"
        )
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        made, base = found(store, done.stdout.splitlines()[-1]), found(store, BASE)
        assert made.layers[:-1] == base.layers
        assert (made.root / "data" / "file").read_text() == "as it was\nmore\n"
        assert [path.name for path in (made.root / "data" / "gone").iterdir()] == ["new"]
        assert (base.root / "data" / "file").read_text() == "as it was\n"
        assert list((store.folder / "drafts").iterdir()) == []
