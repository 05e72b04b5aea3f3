"""GAIA from the hub into a folder: who may have it, what is fetched, how a broken-off download goes on.

    FOLDER/.download/COMMIT/    what the hub's client fetches into and goes on in; gone when everything is there

The dataset is moved out of there when it is whole, so nobody ever reads half of one. Files arrive without links,
since the loader follows none. What lies in them, and what is written beside them, is `gaia_folder`'s part.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import ConfigError, EnvironmentUnusable, OrchestratorError, OutputError, RunLocked
from orchestrator.tasks.gaia.folder import (
    MANIFEST,
    README,
    YEAR,
    Manifest,
    keep_levels,
    published_rows,
    read_rows,
    size_of,
    write_readme,
)
from orchestrator.tasks.gaia.source import SPLITS

ANNOTATED = "smolagents/GAIA-annotated"
RAW = "gaia-benchmark/GAIA"
ASK_TIMEOUT_S = 10.0  # the first question; without a network it must not take longer
_WORKERS = 4
_STAGING = ".download"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_AGAIN = "run the command again, it goes on where it stopped"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to fetch. Without a revision, whatever is there already will do."""

    repository: str
    revision: str | None = None
    levels: tuple[str, ...] = ()  # none: all

    def met_by(self, there: Manifest) -> bool:
        return (
            (there.repository, there.levels) == (self.repository, self.levels)
            # A branch may have moved, a commit has not.
            and self.revision in (None, there.commit)
        )


@dataclass(frozen=True, slots=True)
class Listing:
    """One commit of the repository: what lies below the splits, path → bytes."""

    commit: str
    sizes: Mapping[str, int]


def download_gaia(folder: Path, wanted: Wanted, say: Say) -> Manifest:
    """The dataset in `folder`, whole. Nothing is asked or fetched if it is there already.

    Raises ConfigError, EnvironmentUnusable (no access, not logged in, offline, a listing that is no GAIA),
    OutputError (disk full), RunLocked. After any of them, and after an interrupt, it can be called again.
    """
    there = Manifest.read(folder)
    if there is not None and wanted.met_by(there) and there.whole(folder):
        say(f"already complete: {_name(there)}; nothing downloaded (--revision main asks for a newer one)")
        return there
    if there is None and (foreign := [name for name in (YEAR, README, MANIFEST) if (folder / name).exists()]):
        raise ConfigError(
            f"--output-dir: {folder} holds {' and '.join(foreign)} that this command did not write; name another"
        )
    with _staging(folder) as staging, _explained(wanted, folder):
        listing = _list(wanted)
        if there is not None and there.whole(folder):
            if (there.repository, there.levels, there.commit) == (
                wanted.repository,
                wanted.levels,
                listing.commit,
            ):
                say(f"already complete: {_name(there)}; nothing downloaded")
                return there
            say(f"replacing {_name(there)}")
        return _fetch_and_place(folder, staging / listing.commit, wanted, listing, say)


def _fetch_and_place(folder: Path, staged: Path, wanted: Wanted, listing: Listing, say: Say) -> Manifest:
    rows = {split: published_rows(listing.sizes, split, wanted.levels) for split in SPLITS}
    heads = [name for names in rows.values() for name in names]
    if not heads:
        levels = f" of level {', '.join(wanted.levels)}" if wanted.levels else ""
        raise EnvironmentUnusable(
            f"{wanted.repository} at {listing.commit[:12]} holds no rows{levels}: no {YEAR}/*/metadata.*"
        )
    say(f"fetching {wanted.repository} at {listing.commit[:12]}")
    _fetch(staged, wanted.repository, listing, heads)
    names = [*heads, *_attachments(staged, listing, wanted.levels)]
    _fetch(staged, wanted.repository, listing, names)
    for split in SPLITS:
        keep_levels(staged, split, wanted.levels)
    _leave_only(staged, names)
    write_readme(staged, wanted.repository, listing.commit)
    files = [staged / README, *(file for file in sorted((staged / YEAR).rglob("*")) if file.is_file())]
    sizes = {str(file.relative_to(staged)): file.stat().st_size for file in files}
    manifest = Manifest(wanted.repository, wanted.revision, listing.commit, wanted.levels, sizes)
    manifest.write(staged)
    _place(staged, folder)
    return manifest


def _list(wanted: Wanted) -> Listing:
    """What the hub has, every name checked before anything is written."""
    from huggingface_hub import HfApi  # slow: only where it is needed

    not_a_hub = f"no listing of {wanted.repository} came; is HF_ENDPOINT a hub?"
    try:
        info = HfApi(endpoint=_endpoint()).dataset_info(
            wanted.repository, revision=wanted.revision, files_metadata=True, timeout=ASK_TIMEOUT_S
        )
    except (TypeError, KeyError, AttributeError) as error:  # JSON, but none of the hub's
        raise EnvironmentUnusable(not_a_hub) from error
    if not _COMMIT.fullmatch(str(info.sha)):
        raise EnvironmentUnusable(not_a_hub)
    sizes: dict[str, int] = {}
    for file in info.siblings or ():
        if not _stays_inside(file.rfilename):
            raise EnvironmentUnusable(
                f"{wanted.repository} lists {ascii(file.rfilename)[:120]}, which would leave the folder or "
                "is no plain path; nothing was downloaded"
            )
        if file.rfilename.startswith(tuple(f"{YEAR}/{split}/" for split in SPLITS)):
            if not isinstance(file.size, int) or file.size < 0:
                raise EnvironmentUnusable(f"the hub tells no size of {file.rfilename}")
            sizes[file.rfilename] = file.size
    return Listing(str(info.sha), sizes)


def _stays_inside(name: object) -> bool:
    """Whether a listed name is a plain relative path, on every system."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name or re.match(r"[A-Za-z]:", name):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def _attachments(staged: Path, listing: Listing, levels: Collection[str]) -> list[str]:
    """Everything beside the rows; with levels chosen, what is named by their rows or after their tasks.

    After their tasks: the annotated set has pictures of documents that no row names.
    """
    others = [name for name in listing.sizes if not name.split("/", 2)[2].startswith("metadata.")]
    if not levels:
        return others
    named: set[str | None] = set()
    tasks: set[str] = set()
    for split in SPLITS:
        for row in read_rows(staged, split):
            if row.level in levels:
                named.add(row.file(split))
                tasks.add(row.task_id)
    return [name for name in others if name in named or name.rpartition("/")[2].split(".")[0] in tasks]


def _fetch(staged: Path, repository: str, listing: Listing, names: list[str]) -> None:
    """The files whole. What arrived earlier is not fetched again."""
    from huggingface_hub import snapshot_download

    for name in _not_whole(staged, listing, names):
        # The client would take a torn or rewritten file for the one it once fetched.
        (staged / name).unlink(missing_ok=True)
    missing = sum(listing.sizes[name] for name in names if not (staged / name).exists())
    if missing > (free := shutil.disk_usage(staged.parent).free):
        raise OutputError(
            f"the disk is full: {in_mb(missing)} are to come, {staged.parent.parent} has {in_mb(free)}"
        )
    snapshot_download(
        repository,
        repo_type="dataset",
        revision=listing.commit,
        local_dir=staged,
        # Names that were checked, and only these: the client asks for a listing of its own.
        allow_patterns=[glob.escape(name) for name in names],
        max_workers=_WORKERS,
        endpoint=_endpoint(),
    )
    # The client returns without an error where it could not ask the hub.
    if torn := _not_whole(staged, listing, names):
        raise EnvironmentUnusable(
            f"{len(torn)} of {len(names)} files did not arrive whole, {torn[0]} among them; {_AGAIN}"
        )


def _not_whole(staged: Path, listing: Listing, names: list[str]) -> list[str]:
    return [name for name in names if size_of(staged / name) != listing.sizes[name]]


def _leave_only(staged: Path, names: list[str]) -> None:
    """Removes what an earlier attempt with other levels fetched."""
    wanted = set(names)
    for file in [file for file in (staged / YEAR).rglob("*") if not file.is_dir()]:
        name = str(file.relative_to(staged))
        made_here = file.name.startswith("metadata.level") and file.suffix == ".jsonl"
        if name not in wanted and not made_here:
            file.unlink()


def _place(staged: Path, folder: Path) -> None:
    """From the staging area to where it is read. Stopped in between, it is not `whole` and is done again."""
    replaced = folder / _STAGING / "replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    (staged / MANIFEST).replace(folder / MANIFEST)  # first: it makes the others this command's own
    if (folder / YEAR).exists():
        (folder / YEAR).rename(replaced)
    (staged / YEAR).rename(folder / YEAR)
    (staged / README).replace(folder / README)
    shutil.rmtree(folder / _STAGING)


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """FOLDER/.download, for one process at a time; left behind only with something in it."""
    staging, made = folder / _STAGING, not folder.exists()
    try:
        staging.mkdir(parents=True, exist_ok=True)
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(FileExistsError):
            (staging / "writable").touch(exist_ok=True)
        (staging / "writable").unlink()
    except OSError as error:
        raise ConfigError(
            f"--output-dir: cannot write in {folder}: {error.strerror}; name a folder that can be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield staging
    except BlockingIOError as error:
        raise RunLocked(f"another download-gaia works in {folder}") from error
    finally:
        os.close(lock)
        with suppress(OSError):  # not empty: something to go on with
            staging.rmdir()
            if made:
                folder.rmdir()


@contextmanager
def _explained(wanted: Wanted, folder: Path) -> Iterator[None]:
    """Turns what the hub, its client and the disk may raise into one line that says what to do."""
    try:
        yield
    except OrchestratorError:
        raise
    except Exception as error:
        if (explained := _explanation(error, wanted, folder)) is None:
            raise  # a bug
        raise explained from error


def _explanation(error: BaseException, wanted: Wanted, folder: Path) -> OrchestratorError | None:
    from huggingface_hub import errors

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"the disk is full: {folder} cannot take more; make room, then {_AGAIN}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return EnvironmentUnusable("offline: HF_HUB_OFFLINE is set; unset it to download")
    if isinstance(error, errors.LocalEntryNotFoundError):  # says "check your connection", whatever it was
        inner = _explanation(error.__cause__, wanted, folder) if error.__cause__ is not None else None
        return inner or EnvironmentUnusable(f"the hub stopped answering; {_AGAIN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"--revision: {wanted.repository} has no {wanted.revision!r}; leave it out for the newest"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error, wanted)
    names = {ancestor.__name__ for ancestor in type(error).__mro__}
    # By name: which HTTP library is below the client changes with its version.
    if names & {"TransportError", "RequestException", "ConnectionError"}:
        return EnvironmentUnusable(
            f"offline: {_endpoint() or 'the hub'} cannot be reached ({_first_line(error)}); {_AGAIN}"
        )
    if isinstance(error, OSError | ValueError | RuntimeError):  # the last is what its transfer library raises
        return EnvironmentUnusable(f"the download broke off ({_first_line(error)}); {_AGAIN}")
    return None


def _refusal(error: Exception, wanted: Wanted) -> OrchestratorError:
    from huggingface_hub import errors, get_token

    status = getattr(getattr(error, "response", None), "status_code", None)
    page = f"{(_endpoint() or 'https://huggingface.co').rstrip('/')}/datasets/{wanted.repository}"
    hidden = isinstance(error, errors.RepositoryNotFoundError)  # gated ones are among these
    if get_token() is None and (hidden or status in (401, 403)):
        return EnvironmentUnusable(
            f"not logged in: {wanted.repository} is for accounts that were given access. Request it at {page}, "
            "then run `hf auth login` or set HF_TOKEN"
        )
    if status == 401:
        return EnvironmentUnusable(
            "the hub does not accept the token: run `hf auth login` again, or correct HF_TOKEN"
        )
    if hidden or status == 403:
        return EnvironmentUnusable(
            f"no access yet: request it at {page} with the account of your token, and run this again when it is "
            "granted; a fine-grained token also needs the permission to read gated repositories"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return EnvironmentUnusable(f"the hub lists a file of {wanted.repository} that it does not have; try later")
    return EnvironmentUnusable(f"the hub answered {status}: {_first_line(error)}; {_AGAIN}")


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]


def _name(there: Manifest) -> str:
    levels = f", level {', '.join(there.levels)}" if there.levels else ""
    return f"{there.repository} at {there.commit[:12]}{levels}, {len(there.files)} files"


def in_mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
