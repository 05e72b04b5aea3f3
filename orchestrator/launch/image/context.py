"""The files the sandbox image is built from: found, hashed, packed. Knows nothing of Docker."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import orchestrator
from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.names import EXTRAS

DOCKERFILE = "Dockerfile.sandbox"
REQUIREMENTS = "sandbox/requirements.txt"
BUILD_REQUIREMENTS = "sandbox/requirements-build.txt"
_PACKAGES = ("sandbox", "proto/rollout_api")


def extra_requirements(extra: str) -> str:
    """The requirements file of what `image build --with EXTRA` installs in addition."""
    return f"sandbox/requirements-{extra}.txt"


def context_root() -> Path:
    """The folder with `Dockerfile.sandbox`: in the installed package, or in the source checkout."""
    package = Path(orchestrator.__file__).resolve().parent
    for root in (package / "context", package.parent):
        if (root / DOCKERFILE).is_file():
            return root
    raise EnvironmentUnusable(f"{DOCKERFILE} is missing from this installation: reinstall rollout-orchestrator")


_EXTRAS = frozenset(map(extra_requirements, EXTRAS))


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Name and content of every file the image is made of, except wheels."""

    files: tuple[tuple[str, bytes], ...]

    @classmethod
    def read(cls, root: Path, extras: Iterable[str] = ()) -> BuildContext:
        """Exactly the Dockerfile, the requirements (those of `extras` too) and the Python files of the two
        packages, without links. Raises EnvironmentUnusable."""
        names = {DOCKERFILE, REQUIREMENTS, BUILD_REQUIREMENTS, *map(extra_requirements, extras)}
        for package in _PACKAGES:
            names |= {p.relative_to(root).as_posix() for p in (root / package).rglob("*.py") if not p.is_symlink()}
        try:
            return cls(tuple((name, (root / name).read_bytes()) for name in sorted(names)))
        except OSError as error:
            raise EnvironmentUnusable(f"cannot read {error.filename}: reinstall rollout-orchestrator") from None

    def __getitem__(self, name: str) -> bytes:
        return dict(self.files)[name]

    @property
    def digest(self) -> str:
        """Changes with any name or content, and with nothing else."""
        return _digest(self.files)

    @property
    def runtime_digest(self) -> str:
        """As that of a context without extras: the runtime is the same."""
        return _digest((name, content) for name, content in self.files if name not in _EXTRAS)

    def pack(self, wheels: Iterable[Path], out: IO[bytes]) -> None:
        """Writes the build context as tar, with `wheels` in a folder of that name, and rewinds `out`."""
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, content in self.files:
                tar.addfile(_entry(name, len(content)), io.BytesIO(content))
            for wheel in {wheel.name: wheel for wheel in wheels}.values():
                with wheel.open("rb") as file:
                    tar.addfile(_entry(f"wheels/{wheel.name}", wheel.stat().st_size), file)
        out.seek(0)


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _entry(name: str, size_bytes: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size = size_bytes
    entry.mode = 0o644
    return entry
