"""`orchestrator cleanup`: removes what killed runs left behind, and images that newer builds replaced."""

from __future__ import annotations

import asyncio

from orchestrator.errors import DockerError, EnvironmentUnusable
from orchestrator.launch.reaper import reap


def run() -> int:
    """0: nothing of a dead run is left. Raises EnvironmentUnusable without an Engine to ask."""
    try:
        reaped = asyncio.run(reap(old_images=True))
    except DockerError as error:
        raise EnvironmentUnusable(str(error)) from error
    print(f"removed {reaped.containers} containers, {reaped.directories} directories, {reaped.images} images")
    return 0
