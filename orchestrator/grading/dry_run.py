"""One run of a task's tests on its untouched image, with a network: what they install is its *grader layer*.

Many tests install what they need when they grade: pytest by pip, uv and its cache, programs by apt. What they
wrote then lies over the agent's state in every later grade, which has no network. No agent was ever near the dry
run, and nothing that it wrote where agents work, or for itself alone, is kept.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from orchestrator.grading.grade import command_of, end_of, grading_spec
from orchestrator.launch.base import Launcher, SavedLayer, TooMuch
from orchestrator.launch.egress import Egress
from orchestrator.launch.image.site import Site
from orchestrator.launch.names import WORKSPACE_DIR
from orchestrator.launch.workspaces import Workspaces
from orchestrator.types import DryRun, SandboxSpec, Task

_SITE, _CA = "/.orchestrator-site", "authorities.pem"
_OWN = (
    r"/(?:tests|logs|solution|planted|tmp|var/tmp|run|var/run|dev|proc|sys|attachments|\.orchestrator[^/]*)(?:/|$)"
)
_HOME = re.compile(r"/(?:root|home/[^/]+)")


class DryRuns:
    """Of all tasks. `allowed`: as of an `Egress`. `folder`: an empty one, for what they are told of the operator's
    network. Blocks. Raises WorkspaceError, EnvironmentUnusable."""

    def __init__(self, allowed: Sequence[str], workspaces: Workspaces, site: Site, folder: Path) -> None:
        self._allowed, self._workspaces = allowed, workspaces
        self._layers: tuple[str, ...] = ()
        self._environment: Mapping[str, str] = {}
        if site.ca is not None:
            (folder / _CA).write_bytes(site.certificates())
            self._layers = (str(workspaces.layer(folder, _SITE, writable=False)),)
            self._environment = dict.fromkeys(site.ca_variables, f"{_SITE}/{_CA}")

    def place(self, layer: str) -> str:
        """Where the layer of this name is. Raises WorkspaceError, EnvironmentUnusable."""
        return str(self._workspaces.named(layer))

    async def of(self, task: Task, spec: SandboxSpec, launcher: Launcher, work: Iterable[str]) -> DryRun:
        """`work`: paths of what the task's own solution leaves. Raises RolloutError."""
        assert task.grader is not None
        grader, egress = task.grader, Egress(self._allowed)
        command = command_of(task, grader)
        command = replace(
            command,
            environment={**command.environment, **egress.environment, **self._environment},
            layers=(*command.layers, *self._layers),
            network=egress,
        )
        dropped, merged = left_out((grader.cwd or task.cwd or WORKSPACE_DIR, *(grader.declared or ())), work)
        async with launcher.run(grading_spec(spec, grader), command) as box:
            end = await end_of(box, command)

            def fill(folder: Path) -> SavedLayer:
                return box.save_layer(folder, dropped, merged)

            layer, error = None, end.error and f"they cannot be started: {end.error}"
            if not error and end.status is None:
                error = f"they did not end within {command.timeout_s:g} s"
            if not error:
                try:
                    layer = await asyncio.to_thread(self._workspaces.keep, fill)
                except TooMuch as too_much:
                    error = f"what they fetched cannot be kept: {too_much}"
        return DryRun(
            allowed=tuple(self._allowed),
            reached=egress.reached,
            refused=egress.refused,
            layer=None if layer is None else layer.digest,
            size_bytes=0 if layer is None else layer.size_bytes,
            error=error,
        )


def left_out(places: Iterable[str], work: Iterable[str]) -> tuple[str, str]:
    """Patterns: of what no grader layer has, and of folders in it that hide nothing. `places`: where agents work;
    in a home, what begins with a dot is no work."""
    patterns, paths = [_OWN], {*places, *work} - {"/"}
    for path in sorted(paths):
        inside = r"/(?!\.)[^/]" if _HOME.fullmatch(path) else "(?:/|$)"
        patterns.append(f"{re.escape(path)}{inside}")
    folders = {f"{folder}/" for path in paths for folder in map(str, PurePosixPath(path).parents)} - {"//"}
    merged = [re.escape(folder) for folder in sorted(folders | {f"{path}/" for path in paths})]
    return "|".join(patterns), f"(?:{'|'.join(merged) or '(?!)'})$"
