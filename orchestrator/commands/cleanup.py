"""`orchestrator cleanup`: removes what killed runs left behind, and images that newer builds replaced.

The Engine is asked, with the launcher auto where it answers; what the launcher oci leaves is removed in any case.
"""

import asyncio
import time

from orchestrator.errors import ConfigError, DockerError, EnvironmentUnusable
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.reaper import reap, reap_directories, remove_built
from orchestrator.launch.runtime_folder import remove_old_runtimes
from orchestrator.launch.uses import images_in_use, unwanted
from orchestrator.launch.workspaces import Workspaces
from orchestrator.settings.config import Config

USUAL_AGE_S = 7 * 86_400.0


def run(config: Config, images: bool, older_than: float | None, keep_bytes: int | None) -> int:
    """0: nothing of a dead run is left. Raises EnvironmentUnusable without an Engine to ask, if one is needed."""
    for flag, value in (("--older-than", older_than), ("--keep-bytes", keep_bytes)):
        if value is not None and not images:
            raise ConfigError(f"{flag}: says which images of tasks go; it needs --images")
    env, store, reaped, built, layers = config.env, ImageStore(), None, 0, 0
    before = time.time() - (USUAL_AGE_S if older_than is None else older_than)
    try:
        if env.takes_docker:
            built = asyncio.run(remove_built(used_before=before, keep_bytes=keep_bytes)) if images else 0
            reaped = asyncio.run(reap(old_images=True))
    except (DockerError, EnvironmentUnusable) as error:
        if env.launcher == "docker":
            raise EnvironmentUnusable(str(error)) from error
    if images:
        in_use, kept = images_in_use() or set(), Workspaces().kept()
        go = unwanted([*store.built(), *kept], used_before=before, keep_bytes=keep_bytes, in_use=in_use)
        built += store.remove([one for one in go if one not in kept])
        layers = Workspaces().remove_kept([one for one in go if one in kept])
    reaped = reaped or reap_directories()
    count = reaped.images + store.remove_unused() + remove_old_runtimes(store) + built
    workspaces = Workspaces().remove_unused()
    more = f", {workspaces} workspaces" if workspaces else ""
    more += f", {layers} grader layers" if layers else ""
    print(f"removed {reaped.containers} containers, {reaped.directories} directories, {count} images{more}")
    return 0
