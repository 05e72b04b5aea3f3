"""`orchestrator cleanup`: removes what killed runs left behind, and images that newer builds replaced.

With the launcher docker, the Engine is asked; what the launcher oci leaves is removed in any case.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError, DockerError, EnvironmentUnusable
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.reaper import reap, reap_directories, remove_built
from orchestrator.launch.uses import images_in_use, unwanted

if TYPE_CHECKING:
    from orchestrator.settings.config import Config

USUAL_AGE_S = 7 * 86_400.0


def run(config: Config, images: bool, older_than: float | None, keep_bytes: int | None) -> int:
    """0: nothing of a dead run is left. Raises EnvironmentUnusable without an Engine to ask, if one is needed."""
    for flag, value in (("--older-than", older_than), ("--keep-bytes", keep_bytes)):
        if value is not None and not images:
            raise ConfigError(f"{flag}: says which images of tasks go; it needs --images")
    docker, store = config.env.launcher == "docker", ImageStore()
    try:
        built = 0
        if images:
            before = time.time() - (USUAL_AGE_S if older_than is None else older_than)
            if docker:
                built = asyncio.run(remove_built(used_before=before, keep_bytes=keep_bytes))
            in_use = images_in_use() or set()
            built += store.remove(
                unwanted(store.built(), used_before=before, keep_bytes=keep_bytes, in_use=in_use)
            )
        reaped = asyncio.run(reap(old_images=True)) if docker else reap_directories()
    except DockerError as error:
        raise EnvironmentUnusable(str(error)) from error
    count = reaped.images + store.remove_unused() + built
    print(f"removed {reaped.containers} containers, {reaped.directories} directories, {count} images")
    return 0
