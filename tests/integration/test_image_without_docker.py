"""The sandbox image made without a Docker Engine, from Debian packages: what is in it, and what a build leaves."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.contents import ENVIRONMENT
from orchestrator.launch.docker.client import connect
from orchestrator.launch.image.base import DEBIAN_BASE
from orchestrator.launch.image.build import LABEL_CONTEXT, BuiltImage
from orchestrator.launch.image.context import DOCKERFILE, BuildContext, context_root
from orchestrator.launch.image.wheels import wheels_cache
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci import build
from orchestrator.launch.oci.build import ensure_stored
from orchestrator.launch.oci.program import find_oci_runtime
from orchestrator.launch.oci.store import ImageStore, StoredImage
from tests.fakes.ordinary_user import USER, ordinary_user
from tests.fakes.ordinary_user import why_not as no_ordinary_user

RUNTIME = "runc"
TAG = "test:1"


def why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    for program in ("mmdebstrap", "buildah"):
        if shutil.which(program) is None:
            return f"needs {program}"
    try:
        find_oci_runtime(RUNTIME)
    except EnvironmentUnusable as error:
        return str(error)
    return None


pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]


@dataclass(frozen=True, slots=True)
class Made:
    store: ImageStore
    built: BuiltImage
    planted: str  # in the environment of the build, as a key would be

    @property
    def image(self) -> StoredImage:
        found = self.store.find(TAG)
        assert found is not None
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder, planted = tmp_path_factory.mktemp("store"), f"planted-{uuid.uuid4().hex}"
    store = ImageStore(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", f"unix://{folder}/no.sock")
        patch.setenv("OPENAI_API_KEY", planted)
        yield Made(store, _ensured(store), planted)
    shutil.rmtree(folder)


def _ensured(store: ImageStore, **asked: Any) -> BuiltImage:
    return asyncio.run(ensure_stored(TAG, store=store, runtime=RUNTIME, progress=print, **asked))


def _paths(image: StoredImage, folder: str) -> set[str]:
    top = image.root / folder
    return {str(path.relative_to(top)) for path in top.rglob("*")}


def _inside(image: StoredImage, script: str) -> Any:
    """What `script` prints as JSON when the image's own Python runs it."""
    command = [
        shutil.which("chroot") or "/usr/sbin/chroot",
        image.root,
        "/opt/sandbox/bin/python",
        "-c",
        script,
    ]
    return json.loads(subprocess.run(command, env=dict(ENVIRONMENT), capture_output=True, check=True).stdout)


# ---------------------------------------------------------------- what is inside


def test_the_image_says_how_it_runs(made: Made) -> None:
    config = made.image.config
    assert not config["Entrypoint"]
    assert {"LANG=C.UTF-8", "TZ=UTC"} < set(config["Env"])
    assert config["Labels"][LABEL_CONTEXT] == BuildContext.read(context_root()).digest
    assert made.built.fresh
    assert made.built.python.startswith("3.")


def test_the_image_is_the_one_that_docker_makes(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST")
    try:
        connect(10).close()
    except EnvironmentUnusable:
        pytest.skip("there is no Engine to compare with")
    theirs = asyncio.run(ensure_stored(DEFAULT_IMAGE, store=made.store, runtime=RUNTIME, progress=print))
    stored = made.store.find(DEFAULT_IMAGE)
    assert stored is not None
    assert theirs.image_id == f"sha256:{stored.digest}"
    assert _paths(made.image, "opt/sandbox") == _paths(stored, "opt/sandbox")
    assert {key: value for key, value in made.image.config["Labels"].items() if key != "orchestrator.base"} == {
        key: value for key, value in stored.config["Labels"].items() if key != "orchestrator.base"
    }
    for key in ("Env", "Entrypoint"):
        assert made.image.config[key] == stored.config[key]
    # Saved from the Engine, it is as quick to start as the one that was made here.
    for image in (made.image, stored):
        modules, opened = _inside(image, PACKED)
        assert modules > 150
        assert opened == []


PACKED = """
import json, sys
from sandbox.boot.packed import PackedImports
before, opened = set(sys.modules), []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
with PackedImports():
    from sandbox.boot.imported import imported
    imported()
print(json.dumps([len(set(sys.modules) - before), [path for path in opened if path.endswith((".py", ".pyc"))]]))
"""


def test_nothing_of_the_building_machine_is_in_the_image(made: Made) -> None:
    root = made.image.root
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 3000
    assert [path for path in files if made.planted.encode() in path.read_bytes()] == []
    assert made.planted not in (made.image.folder / "image.json").read_text()
    names = {str(path.relative_to(root)) for path in files}
    own = re.compile(r"etc/(apt/(sources\.list|apt\.conf\.d/99)|resolv\.conf|hostname)|build/|\.dockerenv")
    assert not {name for name in names if own.match(name)}
    assert {path.name for path in made.image.folder.iterdir()} == {"rootfs", "image.json"}
    assert "localhost" in (root / "etc" / "hosts").read_text()
    assert os.uname().nodename not in (root / "etc" / "hosts").read_text()


def test_an_unchanged_image_is_not_built_again(made: Made) -> None:
    again = _ensured(made.store)
    assert not again.fresh
    assert again.image_id == made.built.image_id


@pytest.mark.skipif(no_ordinary_user() is not None, reason=no_ordinary_user() or "")
def test_an_ordinary_user_makes_the_same_files(made: Made) -> None:
    with ordinary_user(delegated=False) as user:
        cache = user.home / ".cache" / "rollout-orchestrator"
        shutil.copytree(made.store.folder / "bases", cache / "oci" / "bases")  # saves a minute and a half
        shutil.copytree(wheels_cache(), cache / "wheels")
        subprocess.run(["chown", "-R", f"{USER}:{USER}", user.home / ".cache"], check=True)
        command = user.command(
            sys.executable, "-m", "orchestrator", "image", "build", "--oci", DOCKER_HOST="unix:///none"
        )
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        store = ImageStore(cache / "oci")
        theirs = store.find(DEFAULT_IMAGE)
        assert theirs is not None
        assert _paths(theirs, "opt/sandbox") == _paths(made.image, "opt/sandbox")
        assert _left(store) == []


# ---------------------------------------------------------------- steps, and builds that do not end well


@pytest.fixture
def recipe(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another Dockerfile in the place of ours: write it there."""
    source = context_root()
    for name, content in BuildContext.read(source).files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(build, "context_root", lambda: tmp_path)
    return tmp_path / DOCKERFILE


def _left(store: ImageStore) -> list[str]:
    """Of builds: drafts, control groups, and processes that know of them."""
    drafts = store.folder / "drafts"
    told = [str(group) for group in Path("/sys/fs/cgroup").glob("**/orchestrator-build-*")]
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            told.append(process.read_text())
        except OSError:
            continue
    return [*map(str, drafts.iterdir()), *(line for line in told if str(drafts) in line)]


def test_a_step_has_neither_network_nor_our_processes_nor_rights_over_the_kernel(made: Made, recipe: Path) -> None:
    before = made.built.image_id
    recipe.write_text(
        "ARG BASE_IMAGE=x\nFROM ${BASE_IMAGE}\n"
        'RUN test "$(ls /sys/class/net)" = lo && test "$(ls -d /proc/[0-9]* | wc -l)" -lt 6 \\\n'
        "  && test -c /dev/null \\\n"
        "  && ! mount -t tmpfs t /tmp 2>/dev/null && ! (echo x > /proc/sys/kernel/hostname) 2>/dev/null \\\n"
        "  && ! mknod /dev/sda b 8 0 2>/dev/null && echo x > /written\n"
    )
    built = asyncio.run(ensure_stored("test:steps", store=made.store, runtime=RUNTIME, progress=print))
    image = made.store.find("test:steps")
    assert image is not None
    assert (image.root / "written").read_text() == "x\n"
    assert built.image_id != before
    assert _left(made.store) == []


def test_a_failed_build_says_why_and_leaves_nothing(made: Made, recipe: Path) -> None:
    recipe.write_text(
        "ARG BASE_IMAGE=x\nFROM ${BASE_IMAGE}\nRUN echo first; echo last words >&2; sleep 100 & exit 3\n"
    )
    before = set((made.store.folder / "images").iterdir())
    with pytest.raises(EnvironmentUnusable, match=r"^the image could not be built: last words$"):
        _ensured(made.store)
    assert _left(made.store) == []
    assert set((made.store.folder / "images").iterdir()) == before
    assert made.image.digest == made.built.image_id.removeprefix("sha256:")


async def test_a_cancelled_build_leaves_nothing(made: Made, recipe: Path) -> None:
    recipe.write_text("ARG BASE_IMAGE=x\nFROM ${BASE_IMAGE}\nRUN touch /begun; sleep 1000 & sleep 1000\n")
    before = set((made.store.folder / "images").iterdir())
    making = asyncio.create_task(ensure_stored(TAG, store=made.store, runtime=RUNTIME, progress=print))
    async with asyncio.timeout(120):
        while not list((made.store.folder / "drafts").glob("*/storage/root/vfs/dir/*/begun")):
            await asyncio.sleep(0.1)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
    assert _left(made.store) == []
    assert set((made.store.folder / "images").iterdir()) == before
    assert made.image.digest == made.built.image_id.removeprefix("sha256:")


def test_a_killed_build_leaves_nothing_that_runs_and_cleanup_removes_the_rest(made: Made, recipe: Path) -> None:
    recipe.write_text("ARG BASE_IMAGE=x\nFROM ${BASE_IMAGE}\nRUN touch /begun; sleep 1000 & sleep 1000\n")
    script = (
        "import asyncio, sys; from pathlib import Path; from orchestrator.launch.oci import build\n"
        "from orchestrator.launch.oci.store import ImageStore\n"
        f"build.context_root = lambda: Path({str(recipe.parent)!r})\n"
        f"store = ImageStore(Path({str(made.store.folder)!r}))\n"
        f"asyncio.run(build.ensure_stored({TAG!r}, store=store, runtime={RUNTIME!r}, progress=print))\n"
    )
    drafts = made.store.folder / "drafts"
    before = set((made.store.folder / "images").iterdir())
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as building:
        until(lambda: bool(list(drafts.glob("*/storage/root/vfs/dir/*/begun"))))
        building.kill()
    until(lambda: not [line for line in _left(made.store) if str(drafts) in line and "\0" in line])
    assert made.store.remove_unused() == 1
    assert _left(made.store) == []
    assert set((made.store.folder / "images").iterdir()) == before


def until(done: Callable[[], bool]) -> None:
    while not done():  # the test's own limit of time ends it
        time.sleep(0.1)


def test_a_build_knows_what_dockerfiles_know(made: Made, recipe: Path) -> None:
    """Not only what ours uses: this is the way to build any other."""
    (recipe.parent / "sandbox" / "more.py").write_text("more")
    recipe.write_text(
        "# syntax=docker/dockerfile:1\nARG BASE_IMAGE=x\nFROM ${BASE_IMAGE} AS one\n"
        'SHELL ["/bin/sh", "-eu", "-c"]\nWORKDIR /src\n'
        "RUN echo me:x:1234:1234::/:/bin/sh >> /etc/passwd && echo $PWD > where\n"
        'USER me\nRUN ["/usr/bin/touch", "/tmp/mine"]\n'
        'FROM one AS two\nUSER root\nENV A="b c" D=$A\nCOPY --chown=1234:1234 sandbox/more.py /src/\n'
        'ADD sandbox /added/\nVOLUME /data\nEXPOSE 80\nLABEL l=\'$A \\"q\\"\'\nCMD ["x"]\n'
        'FROM scratch\nCOPY --from=two /src /src\nCOPY --from=one /tmp/mine /mine\nENV A=b\nENTRYPOINT ["/e"]\n'
    )
    asyncio.run(ensure_stored("test:any", store=made.store, runtime=RUNTIME, progress=print))
    image = made.store.find("test:any")
    assert image is not None
    root = image.root
    assert (root / "src" / "where").read_text() == "/src\n"
    assert ((root / "src" / "more.py").stat().st_uid, (root / "mine").stat().st_uid) == (1234, 1234)
    assert image.config["Entrypoint"] == ["/e"]
    assert "A=b" in image.config["Env"]


class Registry(BaseHTTPRequestHandler):
    """Serves one image, by Docker's protocol. `blobs`: by the last part of their address."""

    blobs: ClassVar[dict[str, Path | bytes]] = {}

    def do_GET(self) -> None:
        content = self.blobs.get(self.path.rpartition("/")[2], b"{}")
        self.send_response(200)
        kind = "application/vnd.oci.image.manifest.v1+json" if "/manifests/" in self.path else "application/json"
        self.send_header("Content-Type", kind)
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if isinstance(content, bytes):
            self.wfile.write(content)
        else:
            with content.open("rb") as file:
                shutil.copyfileobj(file, self.wfile)

    def log_message(self, *told: object) -> None:
        pass


def test_a_base_may_come_from_a_registry(
    made: Made, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe.write_text("ARG BASE_IMAGE=x\nFROM ${BASE_IMAGE}\nRUN echo $OF_THE_BASE > /told\n")
    tar = made.store.base(DEBIAN_BASE)
    with tar.open("rb") as file:
        layer = hashlib.file_digest(file, "sha256").hexdigest()
    told = {"Env": ["OF_THE_BASE=yes", "PATH=/usr/bin:/bin"]}
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": told,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer}"]},
        }
    ).encode()

    def described(kind: str, digest: str, size: int) -> dict[str, Any]:
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": size}

    named = hashlib.sha256(config).hexdigest()
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described("config.v1+json", named, len(config)),
        "layers": [described("layer.v1.tar", layer, tar.stat().st_size)],
    }
    monkeypatch.setattr(
        Registry, "blobs", {"2": json.dumps(manifest).encode(), f"sha256:{named}": config, f"sha256:{layer}": tar}
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        where = f"127.0.0.1:{server.server_port}"
        (tmp_path / "registries.conf").write_text(f'[[registry]]\nlocation = "{where}"\ninsecure = true\n')
        monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(tmp_path / "registries.conf"))
        asked: dict[str, Any] = {"store": made.store, "runtime": RUNTIME, "progress": print}
        built = asyncio.run(ensure_stored("test:pulled", base_image=f"{where}/mine/base:2", **asked))
        server.shutdown()
    image = made.store.find("test:pulled")
    assert image is not None
    assert (image.root / "told").read_text() == "yes\n"
    assert built.fresh
    with pytest.raises(
        EnvironmentUnusable, match=f"cannot be pulled: .*`docker save -o base.tar {where}/mine/base:2`"
    ):
        asyncio.run(ensure_stored("test:none", base_image=f"{where}/mine/base:2", **asked))
    assert _left(made.store) == []
