"""`orchestrator cleanup`: removes what killed runs left behind, and images that newer builds replaced.

The Engine is asked, with the launcher auto where it answers; what the launcher oci leaves is removed in any case.
"""

import asyncio

from orchestrator.errors import DockerError, EnvironmentUnusable
from orchestrator.launch.oci.store import ImageStore
from orchestrator.launch.reaper import reap, reap_directories
from orchestrator.launch.runtime_folder import remove_old_runtimes
from orchestrator.launch.workspaces import Workspaces
from orchestrator.settings.config import Config


def run(config: Config) -> int:
    """0: nothing of a dead run is left. Raises EnvironmentUnusable without an Engine to ask, if one is needed."""
    env, reaped = config.env, None
    try:
        reaped = asyncio.run(reap(old_images=True)) if env.takes_docker else None
    except (DockerError, EnvironmentUnusable) as error:
        if env.launcher == "docker":
            raise EnvironmentUnusable(str(error)) from error
    reaped = reaped or reap_directories()
    images = reaped.images + (store := ImageStore()).remove_unused() + remove_old_runtimes(store)
    workspaces = Workspaces().remove_unused()
    more = f", {workspaces} workspaces" if workspaces else ""
    print(f"removed {reaped.containers} containers, {reaped.directories} directories, {images} images{more}")
    return 0
