"""GAIA from the hub into a folder: who may have it, what is fetched, how a broken-off download goes on.

    FOLDER/download.json        what a finished download consists of
    FOLDER/.download/COMMIT/    where the hub's client fetches and goes on; gone when everything is there

The dataset is moved out of there when it is whole. So nobody ever reads half of one.
"""

import errno
import fcntl
import glob
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath

from orchestrator.errors import ConfigError, EnvironmentUnusable, OrchestratorError, OutputError, RunLocked
from orchestrator.tasks.gaia.folder import README, arrange
from orchestrator.tasks.gaia.source import SPLITS, YEAR

ANNOTATED = "smolagents/GAIA-annotated"
RAW = "gaia-benchmark/GAIA"
MANIFEST = "download.json"
_AGAIN = "run the command again, it goes on where it stopped"

Sizes = dict[str, int]  # path from the dataset's root → bytes
Say = Callable[[str], None]


@dataclass(frozen=True)
class Manifest:
    """download.json: what was asked for, and what came of it."""

    repository: str
    revision: str | None
    levels: list[str]  # none: all
    commit: str
    files: Sizes


def download_gaia(folder: Path, repository: str, revision: str | None, levels: list[str], say: Say) -> Manifest:
    """The dataset in `folder`, whole. Nothing is asked or fetched if it is there already.

    Without a revision, whatever is there will do. A branch may have moved, so it is asked for. Raises ConfigError,
    EnvironmentUnusable (no access, login or network), OutputError (disk full), RunLocked. Called again after an
    error or an interrupt, it goes on where it stopped.
    """
    try:
        return _download(folder, repository, revision, levels, say)
    except Exception as error:
        if (explained := _explain(error, folder, repository, revision)) is None:
            raise  # it explains itself, or is a bug
        raise explained from error


def _download(folder: Path, repository: str, revision: str | None, levels: list[str], say: Say) -> Manifest:
    earlier, complete = _manifest(folder), None
    if earlier and (earlier.repository, earlier.levels) == (repository, levels):
        complete = None if _incomplete(folder, earlier.files) else earlier
    commit, sizes = (
        (complete.commit, {}) if complete and revision in (None, complete.commit) else _list(repository, revision)
    )
    name = f"{repository} at {commit}"
    if complete and complete.commit == commit:
        say(f"already complete: {name}; nothing downloaded (--revision main asks for a newer one)")
        return complete
    say(f"fetching {name}" + (", which replaces what is there" if earlier else ""))
    staged = folder / ".download" / commit
    with _alone_in(folder):
        _fetch(staged, repository, commit, sizes)
        arrange(staged, name, levels)
        paths = (staged / README, *sorted((staged / YEAR).rglob("*")))
        files = {str(path.relative_to(staged)): path.stat().st_size for path in paths if path.is_file()}
        return _place(staged, folder, Manifest(repository, revision, levels, commit, files))


def _manifest(folder: Path) -> Manifest | None:
    """What an earlier download left. Raises ConfigError where files of somebody else are in the way."""
    with suppress(OSError, ValueError, TypeError):
        manifest = Manifest(**json.loads((folder / MANIFEST).read_bytes()))
        if isinstance(manifest.files, dict):
            return manifest
    for file in (folder / YEAR, folder / README, folder / MANIFEST):
        if file.exists():
            raise ConfigError(f"--output-dir: this command did not write {file}; name another folder")
    return None


def _list(repository: str, revision: str | None) -> tuple[str, Sizes]:
    """The commit, and its files below the splits. Every name is checked before anything is written."""
    from huggingface_hub import HfApi  # slow: only where it is needed

    hub = HfApi(endpoint=_endpoint())
    try:
        info = hub.dataset_info(repository, revision=revision, files_metadata=True, timeout=10)  # seconds
        sizes = {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
        bad = [ascii(name)[:120] for name in sizes if not _stays_inside(name)]
        (commit,) = re.findall(r"\A[0-9a-f]{40}\Z", info.sha or "")
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # no JSON, or none of the hub's
        raise EnvironmentUnusable(f"no listing of {repository} came; is {_endpoint()} a hub?") from error
    if bad:
        raise EnvironmentUnusable(f"{repository} lists {bad[0]}, which is no plain path; nothing was downloaded")
    below = tuple(f"{YEAR}/{split}/" for split in SPLITS)
    return commit, {name: size for name, size in sizes.items() if name.startswith(below)}


def _stays_inside(name: str) -> bool:
    """Whether a listed name is a plain relative path, on every system."""
    path = PureWindowsPath(name)  # the strictest: it knows drives and backslashes
    return name.isprintable() and path.as_posix() == name and not path.anchor and ".." not in path.parts


def _fetch(staged: Path, repository: str, commit: str, sizes: Sizes) -> None:
    """Fetches the files whole. What arrived earlier is not fetched again."""
    from huggingface_hub import HfApi

    absent = _incomplete(staged, sizes)
    for name in absent:
        (staged / name).unlink(missing_ok=True)  # the client would take a torn file for a whole one
    coming, free = sum(sizes[name] for name in absent), shutil.disk_usage(staged.parents[1]).free
    if coming > free:
        raise OSError(errno.ENOSPC, f"{coming / 1e6:,.1f} MB are to come, {free / 1e6:,.1f} are free")
    # Only names that were checked: the client asks for a listing of its own.
    names = [glob.escape(name) for name in sizes]
    HfApi(endpoint=_endpoint()).snapshot_download(
        repository, repo_type="dataset", revision=commit, local_dir=staged, allow_patterns=names
    )
    if torn := _incomplete(staged, sizes):  # the client raises nothing where it could not ask the hub
        raise EnvironmentUnusable(f"{len(torn)} files did not arrive whole, {torn[0]} among them; {_AGAIN}")


def _place(staged: Path, folder: Path, manifest: Manifest) -> Manifest:
    """Moves what is staged to where it is read. Stopped in between, files are missing, and it is done again."""
    (staged / MANIFEST).write_text(json.dumps(vars(manifest), indent=1) + "\n", "utf-8")
    shutil.rmtree(staged / "replaced", ignore_errors=True)
    if (folder / YEAR).exists():
        (folder / YEAR).rename(staged / "replaced")
    for name in (MANIFEST, YEAR, README):  # the manifest first: it makes the others this command's own
        (staged / name).replace(folder / name)
    shutil.rmtree(staged.parent)
    return manifest


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder, and lets one process at a time work in it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise RunLocked(f"another download-gaia works in {folder}; wait for it") from error
    finally:
        os.close(lock)


def _incomplete(folder: Path, sizes: Sizes) -> list[str]:
    """The files that are not there in their size. A link is none: `process` follows none."""
    paths = {name: folder / name for name in sizes}
    there = {name: path.stat().st_size for name, path in paths.items() if path.is_file() and not path.is_symlink()}
    return [name for name, size in sizes.items() if there.get(name) != size]


def _explain(error: Exception, folder: Path, repository: str, revision: str | None) -> OrchestratorError | None:
    """What to do about what the hub, its client or the disk raised. None for everything else."""
    from huggingface_hub import errors, get_token

    # The client says "check your connection", whatever it was.
    cause = error.__cause__ or error if isinstance(error, errors.LocalEntryNotFoundError) else error
    message = " ".join(str(getattr(cause, "strerror", None) or cause).split())[:200] or type(cause).__name__
    number = getattr(cause, "errno", None)
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"the disk is full: {message}; make room for {folder}, then {_AGAIN}")
    if isinstance(cause, PermissionError | NotADirectoryError | FileExistsError) or number == errno.EROFS:
        return ConfigError(f"--output-dir: cannot write in {folder}: {message}; name a folder that can be written")
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return EnvironmentUnusable("offline: HF_HUB_OFFLINE is set; unset it to download")
    if isinstance(cause, errors.RevisionNotFoundError):
        return ConfigError(f"--revision: {repository} has no {revision!r}; omit it for the newest")
    if status in (401, 403) or isinstance(cause, errors.RepositoryNotFoundError):  # gated ones look missing
        login = "run `hf auth login` or set HF_TOKEN"
        request = f"request it at {_endpoint()}/datasets/{repository}"
        if get_token() is None:
            message = f"not logged in: {repository} is for accounts with access; {request}, then {login}"
        elif status == 401:
            message = f"the hub does not accept the token: {login}"
        else:
            message = (
                f"no access yet: {request} with your token's account, and run this again when it is granted; "
                "a fine-grained token also needs the right to read gated repositories"
            )
        return EnvironmentUnusable(message)
    # By name: which HTTP library is below the client changes with its version.
    if {"TransportError", "ConnectionError"} & {ancestor.__name__ for ancestor in type(cause).__mro__}:
        return EnvironmentUnusable(f"offline: {_endpoint()} cannot be reached ({message}); {_AGAIN}")
    if isinstance(error, OSError | ValueError | RuntimeError):  # the last is what its transfer library raises
        return EnvironmentUnusable(f"the download broke off ({message}); {_AGAIN}")
    return None


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
