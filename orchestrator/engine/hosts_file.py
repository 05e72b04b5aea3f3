"""The file that names a task's services and extra hosts, as a layer of its sandboxes: those that are made ahead
have it, too."""

import tempfile
from dataclasses import replace
from pathlib import Path

from orchestrator.launch.workspaces import Workspaces
from orchestrator.services.places import FOLDER, HOSTS, hosts
from orchestrator.types import Task


def with_hosts(task: Task, workspaces: Workspaces) -> Task:
    """Blocks. Raises WorkspaceError, EnvironmentUnusable."""
    if not task.services and not task.extra_hosts:
        return task
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        (place := Path(folder, HOSTS)).write_text(hosts(task.services, task.extra_hosts))
        place.chmod(0o644)
        return replace(task, hosts=str(workspaces.layer(Path(folder), FOLDER, writable=False)))
