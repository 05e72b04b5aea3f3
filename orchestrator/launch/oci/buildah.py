"""Builds an image from a Dockerfile with buildah: without a daemon, as root or as an ordinary user.

All that buildah keeps is below one folder, which goes with the build. All that it starts is in a PID namespace of
its own: when this process ends in any way, `kill -9` included, the kernel ends the build. Steps run in containers
of the OCI runtime, without a network unless asked, and know nothing of this process' environment.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.control_groups import CGROUPS
from orchestrator.launch.image.program import run_program
from orchestrator.rules.text import printable

TIMEOUT_S = 1800.0
_REMOVAL_S = 300.0
_STORAGE, _HOME, _POLICY = "storage", "home", "policy.json"
_BASE, _BUILT = "localhost/base", "localhost/built"
_ANY_IMAGE = '{"default": [{"type": "insecureAcceptAnything"}]}'  # what was made or unpacked here a moment ago
_PROGRAMS = {"buildah": "buildah", "setpriv": "util-linux", "unshare": "util-linux", "mount": "mount"}
_ALONE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_AS_ROOT = ("setpriv", "--pdeathsig", "KILL", "buildah", "unshare")  # of a user namespace
# Drivers of buildah's storage, with where each has the files of a layer. The second one copies them.
_DRIVERS = {"overlay": "overlay/{}/diff", "vfs": "vfs/dir/{}"}
# Shows folders in the places of others until the program behind `--` ends. buildah mounts the folder of its
# overlays on itself unless it is a mount: that would hide them.
_SHOWING = """\
set -e
mount --bind "$1" "$1"
shift
while [ "$1" != -- ]; do
    mount --bind "$1" "$2"
    mount -o "remount,bind,$3" "$2"
    shift 3
done
shift
exec "$@"
"""
# An ordinary user may not take these from a mount.
_LOCKED = {os.ST_NOSUID: "nosuid", os.ST_NODEV: "nodev", os.ST_NOEXEC: "noexec"}
STEP = re.compile(r"(\[\d+/\d+\] )?STEP \d+/\d+: ")
OWN_LINE = re.compile(
    r"time=\"|error running container|Getting image|Copying |Writing manifest|Storing |-->|\[Warning\] one"
)
FAILED_STEP = re.compile(r"while running runtime: exit status (\d+)$")
_WHERE = re.compile(r'^Error: (building at STEP ".*?": |committing container for step \{.*\}: )?')
_REASON_CHARS = 300


class Buildah:
    """One build. `folder`: an empty one, for all that there is of it. `runtime`: the OCI runtime's path."""

    def __init__(
        self,
        folder: Path,
        runtime: str,
        progress: Callable[[str], None],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._folder = folder
        self._progress = progress
        self._timeout_s = timeout_s
        for place in (folder / _HOME, storage := folder / _STORAGE, storage / "tmp"):
            place.mkdir(mode=0o700)
        (folder / _POLICY).write_text(_ANY_IMAGE)
        self._rootless = os.geteuid() != 0
        self._driver = "vfs"
        self._shown: dict[str, Path] = {}  # in the places of layers, by their ids
        self._environment = {
            "HOME": str(folder / _HOME),
            "TMPDIR": str(storage / "tmp"),
            "XDG_RUNTIME_DIR": "",
            "BUILDAH_ISOLATION": "rootless" if self._rootless else "oci",
            "BUILDAH_RUNTIME": runtime,
        }
        # The operator's logins to registries, as `docker login` keeps them.
        logins = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
        if "REGISTRY_AUTH_FILE" not in os.environ and logins.is_file():
            self._environment["REGISTRY_AUTH_FILE"] = str(logins)

    async def begin(self, image: str | None, root: Path | None = None, config: Sequence[str] = ()) -> None:
        """Makes the base, an image to build on: `image` from a registry, else the files in `root`, a folder or a
        tar. `config`: options of `buildah config`. Raises EnvironmentUnusable."""
        policy = () if image else self._policy
        await self._call("from", *policy, "--name", "base", f"docker://{image}" if image else "scratch")
        if root is not None:
            await self._call("add", "--quiet", "base", str(root), "/")
        if config:
            await self._call("config", *config, "base")
        # In one layer: buildah counts those of images without a history wrongly.
        options = ("--quiet", "--identity-label=false", "--squash")
        await self._call("commit", *self._policy, *options, "base", _BASE)

    async def stand_in(self, saved: Path, layer_id: str, root: Path) -> None:
        """Takes an image to build on from what `docker save` would write, with one layer of this id. Steps find
        the files in `root` in its place. The kernel lets nothing of a build write there: it is mounted read-only,
        below an overlay or to be copied. Raises EnvironmentUnusable."""
        code, tail = 1, tuple[str, ...]()
        for driver in (self._driver,) if self._shown else _DRIVERS:
            self._driver = driver
            code, tail = await self._carried_out("pull", "--quiet", *self._policy, f"docker-archive:{saved}")
            if code == 0:
                break
        self._demand(code, tail)
        self._shown[layer_id.removeprefix("sha256:")] = root

    async def save(self, out: Path) -> None:
        """Writes the base to `out` as `docker save` would. Raises EnvironmentUnusable."""
        await self._call("push", "--quiet", *self._policy, _BASE, f"docker-archive:{out}")

    async def run(self, argv: Sequence[str]) -> str:
        """The last line that a program prints in the base; none if it fails."""
        code, tail = await self._carried_out("run", "--network=none", "base", "--", *argv)
        return tail[-1] if code == 0 and tail else ""

    async def build(self, context: IO[bytes], dockerfile: str, arguments: Mapping[str, str], out: Path) -> None:
        """Carries out `dockerfile` of the build context, a tar, with the base in the place of its first FROM.
        Writes to `out` what `docker save` would. Raises EnvironmentUnusable."""
        options = ["--network=none", "--no-hosts", "--http-proxy=false", "--from", _BASE]
        options += [f"--build-arg={name}={value}" for name, value in arguments.items()]
        code, tail = await self.try_build(context, dockerfile, options, out)
        self._demand(code, tail)

    async def try_build(
        self, context: IO[bytes], dockerfile: str, options: Sequence[str], out: Path
    ) -> tuple[int, tuple[str, ...]]:
        """As `build`, with these `options`. Returns the exit code and the last lines."""
        fixed = ["--pull=never", "--layers=false", "--identity-label=false", "--format=docker"]
        if not self._rootless:
            fixed += ["--cgroup-parent", f"/{_group(self._folder)}"]
        # A layer in whose place others files are shown can be saved only as it is itself: after the build.
        made = _BUILT if self._shown else f"docker-archive:{out}"
        argv = ("build", *self._policy, *fixed, *options, "-f", dockerfile, "-t", made, "-")
        code, tail = await self._carried_out(*argv, stdin=context)
        if code != 0 or not self._shown:
            return code, tail
        return await self._carried_out("push", "--quiet", *self._policy, _BUILT, f"docker-archive:{out}")

    @property
    def _policy(self) -> tuple[str, str]:
        return "--signature-policy", str(self._folder / _POLICY)

    async def _call(self, *argv: str) -> None:
        self._demand(*await self._carried_out(*argv))

    def _demand(self, code: int, tail: Sequence[str]) -> None:
        if code != 0:
            raise EnvironmentUnusable(f"the image could not be built: {why_failed(tail) or f'exit code {code}'}")

    async def _carried_out(self, *argv: str, stdin: IO[bytes] | None = None) -> tuple[int, tuple[str, ...]]:
        storage = self._folder / _STORAGE
        root = storage / "root"
        where = ("--storage-driver", self._driver, "--root", str(root), "--runroot", str(storage / "run"))
        showing: list[str] = []
        if stdin is not None and self._shown:
            showing = ["sh", "-c", _SHOWING, "sh", str(root / self._driver)]
            for layer, files in self._shown.items():
                place = root / _DRIVERS[self._driver].format(layer)
                showing += [str(files), str(place), ",".join(("ro", *_locked(files)))]
            showing.append("--")
        return await run_program(
            [*(_AS_ROOT if self._rootless else ()), *_ALONE, *showing, "buildah", *where, *argv],
            timeout_s=self._timeout_s,
            progress=self._show if stdin else lambda line: None,  # the rest says nothing of interest
            env=self._environment,
            cwd=self._folder / _HOME,  # it looks for the Dockerfile here first
            stdin=stdin,
        )

    def _show(self, line: str) -> None:
        if STEP.match(line):
            self._progress(printable(line.partition(";")[0]))
        elif not OWN_LINE.match(line):
            self._progress(printable(line))


def _locked(folder: Path) -> list[str]:
    flags = os.statvfs(folder).f_flag
    return [name for flag, name in _LOCKED.items() if flags & flag]


def missing_packages() -> list[str]:
    """Debian's names of what must be installed to build."""
    return sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})


def why_failed(tail: Sequence[str]) -> str:
    """Of a failed step its last line, else buildah's own reason."""
    errors = [line for line in tail if line.startswith("Error: ")]
    if not errors:
        return ""
    if (failed := FAILED_STEP.search(errors[-1])) is None:
        return printable(_WHERE.sub("", errors[-1]))[:_REASON_CHARS]
    output = [line for line in tail if line != errors[-1] and not OWN_LINE.match(line)]
    last = output[-1] if output and not STEP.match(output[-1]) else f"exit code {failed[1]}"
    return printable(last)[:_REASON_CHARS]


def remove_build(folder: Path) -> None:
    """Removes what a build, perhaps one that was killed, has left and this user's `rm` would not: files of
    subordinate ids in its folder, and its control group. Blocks."""
    if os.geteuid() != 0 and (folder / _STORAGE).exists():
        environment = {"HOME": str(folder / _HOME), "PATH": os.environ.get("PATH", os.defpath)}
        command = ["buildah", "unshare", "rm", "-rf", "--", str(folder / _STORAGE)]
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=_REMOVAL_S, check=False, env=environment)  # noqa: S603
    for group in (CGROUPS / _group(folder), *CGROUPS.glob(f"*/{_group(folder)}")):
        for place, _, _ in os.walk(group, topdown=False):
            with suppress(OSError):
                os.rmdir(place)


def _group(folder: Path) -> str:
    return f"orchestrator-build-{folder.name}"
