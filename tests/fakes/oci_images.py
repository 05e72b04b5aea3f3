"""The sandbox image in the store of images, for tests of the launcher `oci`; and why there can be none here."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import closing
from functools import cache
from pathlib import Path

import docker
from docker.utils import kwargs_from_env

from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.machine import why_not_here
from orchestrator.launch.oci.store import ImageStore, StoredImage

# For commands that tests start with a HOME of their own.
CACHE = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")}


def why_not(runtime: str = "runc") -> str | None:
    """Why there can be no such sandboxes here; None: there can."""
    if runtime == "crun" and not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "crun refuses machines with control groups of v1 and v2 at a time"
    return why_not_here(runtime)


@cache
def stored_image(name: str = DEFAULT_IMAGE) -> StoredImage:
    """The image that the Engine has under this name, in the user's store; put there if need be, by one process.
    Without an Engine, what the store has."""
    store = ImageStore()
    if os.geteuid() != 0 and (found := store.find(name)) is not None:
        return found
    with closing(docker.APIClient(**kwargs_from_env())) as engine:
        wanted = engine.inspect_image(name)["Id"].removeprefix("sha256:")
        (cache := Path(CACHE["XDG_CACHE_HOME"])).mkdir(exist_ok=True)
        with (cache / "orchestrator-tests.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = store.find(name)
            if found is None or found.digest != wanted:
                with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
                    for chunk in engine.get_image(name):
                        archive.write(chunk)
                    archive.flush()
                    found = store.put(Path(archive.name), name)
    return found
