"""The wheels of the sandbox image, downloaded on the host so that the build itself needs no network.

pip's own settings (index, proxy, certificates) apply; nothing here overrides them.
"""

import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.image.program import run_program

DOWNLOAD_TIMEOUT_S = 900.0
_FIRST_PEP600_GLIBC = 17  # manylinux_2_17, also known as manylinux2014


@dataclass(frozen=True, slots=True)
class ImagePython:
    """The Python of a base image, as it described itself."""

    version: tuple[int, int, int]
    machine: str  # x86_64, aarch64
    glibc: tuple[int, int]

    def __str__(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def tag(self) -> str:
        return f"cp{self.version[0]}{self.version[1]}"

    @property
    def platforms(self) -> tuple[str, ...]:
        """Every manylinux tag that its glibc can load; pip does not derive the older ones from the newest."""
        minors = range(_FIRST_PEP600_GLIBC, self.glibc[1] + 1)
        return (f"manylinux2014_{self.machine}", *(f"manylinux_2_{minor}_{self.machine}" for minor in minors))


def wheels_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollout-orchestrator" / "wheels"


async def fetch_wheels(
    requirements: bytes, python: ImagePython, *, cache: Path, progress: Callable[[str], None]
) -> tuple[Path, ...]:
    """The wheels that `requirements` pins, from `cache` or downloaded into it. Raises EnvironmentUnusable.

    A folder appears in the cache complete or not at all. pip checks every hash here, and again in the build.
    """
    key = hashlib.sha256(requirements).hexdigest()[:16]
    folder = cache / f"{python.tag}-{python.machine}-glibc2.{python.glibc[1]}-{key}"
    if not folder.is_dir():
        if importlib.util.find_spec("pip") is None:
            raise EnvironmentUnusable(
                f"no pip to download the sandbox's wheels with: run `{sys.executable} -m ensurepip`"
            )
        with _scratch(cache) as scratch:
            await _download(requirements, python, scratch, progress)
            try:
                (scratch / "wheels").rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another build was faster
                    raise
    return tuple(sorted(folder.glob("*.whl")))


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
            yield Path(scratch)
    except OSError as error:
        raise EnvironmentUnusable(f"cannot keep wheels in {cache}: {error.strerror}; set XDG_CACHE_HOME") from None


async def _download(
    requirements: bytes, python: ImagePython, scratch: Path, progress: Callable[[str], None]
) -> None:
    listed = scratch / "requirements.txt"
    listed.write_bytes(requirements)
    argv = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    argv += ["--progress-bar", "off", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    argv += ["--implementation", "cp", "--python-version", str(python)]
    argv += [part for abi in (python.tag, "abi3", "none") for part in ("--abi", abi)]
    argv += [part for platform in python.platforms for part in ("--platform", platform)]
    argv += ["--requirement", str(listed), "--dest", str(scratch / "wheels")]
    code, tail = await run_program(
        argv,
        timeout_s=DOWNLOAD_TIMEOUT_S,
        progress=lambda line: progress(line) if line.startswith("Downloading ") else None,
    )
    if code != 0:
        raise EnvironmentUnusable(
            f"the sandbox's wheels cannot be downloaded: {pip_reason(tail)}; check pip's index and network"
        )


def pip_reason(tail: tuple[str, ...]) -> str:
    """The line of pip's output that says what went wrong."""
    errors = [line.removeprefix("ERROR: ") for line in tail if line.startswith("ERROR: ")]
    return (errors or list(tail) or ["pip said nothing"])[-1]
