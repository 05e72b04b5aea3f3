"""A digest of all that decides how a task is graded: its row, and the files that its sandboxes are made of."""

import hashlib
import json
import os
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator.types import Grader, Task

_NEW = ("services", "extra_hosts")
_PIECE_BYTES = 1 << 20
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def content_of(task: Task) -> str:
    """The same wherever the files lie. Blocks. Raises OSError."""
    assert task.graders, "a task without a grader is not checked"
    folders = [_folder_of(task.dockerfile), task.workspace]
    for grader in task.graders:
        shared = [grader.shared_tests] if grader.shared_tests is not None else []
        folders += [grader.tests, grader.solution, *shared, _folder_of(grader.dockerfile)]
    folders += [_folder_of(service.dockerfile) for service in task.services]
    services = tuple(replace(one, dockerfile=_image_of(one.dockerfile)) for one in task.services)
    own = replace(task.with_graders(_bare), dockerfile=_image_of(task.dockerfile), workspace=None)
    own = replace(own, services=services, hosts=None)
    row = asdict(replace(own, attachments=(), source="", notes=()))
    if not task.steps:  # as it was before there were any: what was checked then, counts
        row = {name: row[name] for name in row if name not in ("steps", "steps_reward")}
        del row["grader"]["shared_tests"]
    row = _as_before_services(row)
    absent = {name for name in ("context", "network") if not row[name]}
    row = {name: row[name] for name in row if name not in absent}
    files = [(one.name, one.size_bytes) for one in task.attachments]
    digest = hashlib.sha256(json.dumps([row, files], sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    for folder in folders:
        digest.update(b"\0folder\0" if folder is not None else b"\0none\0")
        if folder is not None:
            _feed(Path(folder), digest)
    return digest.hexdigest()


def _as_before_services(row: dict[str, Any]) -> dict[str, Any]:
    """Without what it says of services where it has none."""
    for grader in (row["grader"], *(step["grader"] for step in row.get("steps", ()))):
        if not grader["of_services"]:
            del grader["of_services"]
        for one in grader["collect"]:
            if not one["service"]:
                del one["service"]
    for one in row["services"]:
        if not one["extra_hosts"]:
            del one["extra_hosts"]
    return {name: one for name, one in row.items() if name != "hosts" and (name not in _NEW or one)}


def _bare(grader: Grader) -> Grader:
    image = _image_of(grader.dockerfile)
    return replace(grader, tests=None, shared_tests=None, solution=None, dockerfile=image, checked=None)


def _folder_of(dockerfile: str | None) -> str | None:
    return os.path.dirname(dockerfile) if dockerfile is not None and _image_of(dockerfile) is None else None


def _image_of(dockerfile: str | None) -> str | None:
    """`FROM` and the name of an image; None: it is a file."""
    return None if dockerfile is None or dockerfile.startswith("/") else dockerfile


def _feed(source: Path, digest: Any) -> None:
    """Names, modes, links and content. No link is followed."""
    if not source.is_dir():
        _feed_file(os.open(source, _FILE), digest)
        return
    for way, folders, names, at in os.fwalk(source, follow_symlinks=False, onerror=_raise):
        folders.sort()
        for name in sorted((*folders, *names)):
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
            place = os.path.relpath(os.path.join(way, name), source)
            digest.update(b"\0%b\0%o\0" % (os.fsencode(place), status.st_mode & 0o170111))
            if stat.S_ISLNK(status.st_mode):
                digest.update(os.fsencode(os.readlink(name, dir_fd=at)))
            elif stat.S_ISREG(status.st_mode):
                _feed_file(os.open(name, _FILE, dir_fd=at), digest)


def _feed_file(opened: int, digest: Any) -> None:
    with open(opened, "rb") as file:
        digest.update(b"%d\0" % os.fstat(opened).st_size)
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)


def _raise(error: OSError) -> None:
    raise error
