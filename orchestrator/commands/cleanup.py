"""`orchestrator cleanup`: removes what killed runs left behind, and images that newer builds replaced.

With the launcher docker, the Engine is asked; what the launcher oci leaves is removed in any case.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.errors import DockerError, EnvironmentUnusable
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.reaper import reap, reap_directories
from orchestrator.launch.workspaces import Workspaces

if TYPE_CHECKING:
    from orchestrator.settings.config import Config


def run(config: Config) -> int:
    """0: nothing of a dead run is left. Raises EnvironmentUnusable without an Engine to ask, if one is needed."""
    try:
        docker = config.env.launcher == "docker"
        reaped = asyncio.run(reap(old_images=True)) if docker else reap_directories()
    except DockerError as error:
        raise EnvironmentUnusable(str(error)) from error
    images = reaped.images + ImageStore().remove_unused()
    workspaces = Workspaces().remove_unused()
    more = f", {workspaces} workspaces" if workspaces else ""
    print(f"removed {reaped.containers} containers, {reaped.directories} directories, {images} images{more}")
    return 0
