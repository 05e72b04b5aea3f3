"""Images that are nothing like ours, as `docker save` writes them: made of Debian's packages, without a registry.

busybox    nothing but busybox, statically linked
musl       another C library, whose programs need its loader
static     one program and no shell
bullseye   an older glibc than the runtime's
bookworm   the next one
hostile    bookworm with USER, ENTRYPOINT, VOLUME, HEALTHCHECK, and an ENV that ends a Python of another glibc

And one to work in: `workshop`, a bookworm with apt, accounts, git, tmux and pip.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import pytest
from docker.utils import kwargs_from_env

from tests.fakes.archives import Entry, file, folder, layer, link, saved

KINDS = ("busybox", "musl", "static", "bullseye", "bookworm", "hostile")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-orchestrator" / "test-images"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}
SAYS = "of the image"
_SAY = f'#include <stdio.h>\nint main(void) {{ puts("{SAYS}"); return 0; }}\n'
_APPLETS = ("sh", "cat", "env", "ls", "mkdir", "rm", "touch", "true", "wc", "grep", "sed", "sleep", "which")
_PACKAGES = "libc6,dash,coreutils,base-files"
_WORKSHOP = "passwd,git,tmux,python3-pip"
_HOSTILE_ENV = (
    "LD_PRELOAD=/lib/x86_64-linux-gnu/libm.so.6",
    "LD_AUDIT=/hostile/audit.so",
    "LD_LIBRARY_PATH=/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu",
    "GLIBC_TUNABLES=glibc.malloc.check=3",
    "MALLOC_CHECK_=3",
    "MALLOC_PERTURB_=7",
    "PYTHONHOME=/hostile",
    "PYTHONPATH=/hostile",
    "PATH=/hostile:/bin",
)


def archive(kind: str, folder_: Path) -> Path:
    """The file of one of KINDS. Skips the test where this machine cannot make it."""
    config: dict[str, object] = {"Env": ["FROM_IMAGE=yes"]}
    compiler, *options = ("musl-gcc",) if kind == "musl" else ("gcc", "-static")
    own = [_program(folder_, compiler, "say" if kind == "static" else "bin/say", *options)]
    layers = []
    if kind in ("bullseye", "bookworm", "hostile"):
        layers = [_debian("bookworm" if kind == "hostile" else kind)]
    elif kind != "static":
        own += _busybox()
    if kind == "musl":
        own += _musl()
    if kind == "hostile":
        own += _hostile()
        config = {
            "Env": ["FROM_IMAGE=yes", *_HOSTILE_ENV],
            "User": "app",
            "Entrypoint": ["/bin/false"],
            "Cmd": ["--serve"],
            "WorkingDir": "/hostile",
            "Volumes": {"/hostile": {}},
            "Healthcheck": {"Test": ["CMD", "/bin/false"]},
        }
    machine = ARCHITECTURE[os.uname().machine]
    whole = {"architecture": machine, "os": "linux", "config": config}
    return saved(folder_ / f"{kind}.tar", *layers, layer(*own), config=whole)


@contextmanager
def loaded(path: Path, name: str) -> Iterator[str]:
    """The image in the Engine, under this name; removed at the end."""
    engine = docker.APIClient(**kwargs_from_env(), timeout=300)
    try:
        with path.open("rb") as content:
            said = "".join(str(line) for line in engine.load_image(content))
        digest = said.partition("sha256:")[2][:64]
        repository, _, tag = name.partition(":")
        engine.tag(digest, repository, tag)
        yield name
    finally:
        engine.remove_image(name, force=True)
        engine.close()


def _program(folder_: Path, compiler: str, name: str, *options: str) -> Entry:
    """A program that says SAYS."""
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}: see tests/system-packages.sh")
    made = folder_ / "say"
    argv = [compiler, "-x", "c", "-", "-o", str(made), *options]
    subprocess.run(argv, input=_SAY, text=True, check=True)
    return file(name, made.read_bytes(), mode=0o755)


def _busybox() -> list[Entry]:
    program = Path("/bin/busybox")
    if not program.exists():
        pytest.skip("there is no busybox: see tests/system-packages.sh")
    links = [link(f"bin/{name}", "busybox") for name in _APPLETS]
    return [folder("bin"), file("bin/busybox", program.read_bytes(), mode=0o755), *links]


def _musl() -> list[Entry]:
    loader = next(Path("/lib").glob("ld-musl-*.so.1"), None)
    if loader is None:
        pytest.skip("there is no musl: see tests/system-packages.sh")
    return [folder("lib"), file(f"lib/{loader.name}", loader.read_bytes(), mode=0o755)]


def _hostile() -> list[Entry]:
    """A library for all programs, modules that end who imports them, and a `python` that is none."""
    return [
        folder("hostile"),
        *(file(f"hostile/{name}.py", b"raise SystemExit(1)") for name in ("sandbox", "grpc", "smolagents")),
        file("etc/ld.so.preload", b"/lib/x86_64-linux-gnu/libm.so.6\n"),
        file("hostile/python", b"#!/bin/sh\necho hostile\n", mode=0o755),
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n"),
    ]


def workshop(folder_: Path, made: str = "workshop-1", packages: str = _WORKSHOP) -> Path:
    """The file of an image whose packages are installed, as its dpkg knows. `made`: the name of what is kept."""
    unused = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man")]
    emptied = '--customize-hook=rm -rf "$1"/var/lib/apt/lists "$1"/var/cache/apt'
    root = _made(made, "--variant=apt", f"--include={packages}", *unused, emptied, suite="bookworm")
    config = {"architecture": ARCHITECTURE[os.uname().machine], "os": "linux", "config": {}}
    return saved(folder_ / "workshop.tar", root.read_bytes(), config=config)


def _debian(suite: str) -> bytes:
    """A layer with libc, a shell and the usual programs, not configured."""
    removed = '--customize-hook=rm -rf "$1"/usr/share "$1"/var "$1"/dev "$1"/usr/lib/*/gconv'
    options = ("--variant=extract", f"--include={_PACKAGES}", removed)
    return _made(f"{suite}-1", *options, suite=suite).read_bytes()


def _made(name: str, *options: str, suite: str) -> Path:
    """A root file system of Debian's packages. Made once per machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    made = CACHE / f"{name}.tar"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            if shutil.which("mmdebstrap") is None or os.geteuid() != 0:
                pytest.skip("a Debian of another age needs mmdebstrap and root")
            draft = made.with_suffix(".draft.tar")
            argv = ["mmdebstrap", *options, suite, str(draft)]
            subprocess.run(argv, check=True, capture_output=True, timeout=600)
            draft.rename(made)
    assert stat.S_ISREG(made.stat().st_mode)
    assert tarfile.is_tarfile(made)
    return made
