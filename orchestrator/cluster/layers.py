"""Layers of tasks for nodes: folders of the run's `launch.workspaces`, each sent once, as a tar."""

import tarfile
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, cast

from orchestrator.launch.difference import OPAQUE, OPAQUE_OF_USERS, is_opaque
from orchestrator.launch.workspaces import MARK
from orchestrator.types import Grader, RolloutPlan


def layers_of(plan: RolloutPlan) -> tuple[str, ...]:
    """Absolute paths of all that the plan's sandboxes take: the one of the agent, and the one that grades."""
    layers = list(plan.sandbox.layers)
    for grader in plan.task.graders:
        own = (grader.tests, grader.shared_tests, grader.checked and grader.checked.layer)
        layers += [layer for layer in own if layer]
    return tuple(dict.fromkeys(layers))


def with_layers_in(plan: RolloutPlan, folder: Path) -> RolloutPlan:
    """The plan with its layers where a node has them."""

    def there(path: str | None) -> str | None:
        return path and str(folder / Path(path).name)

    def moved(grader: Grader) -> Grader:
        checked = grader.checked and replace(grader.checked, layer=there(grader.checked.layer))
        own = there(grader.shared_tests)
        return replace(grader, tests=there(grader.tests), shared_tests=own, checked=checked)

    sandbox = plan.sandbox
    task = plan.task.with_graders(moved)
    task = replace(task, workspace=there(task.workspace), hosts=there(task.hosts))
    sandbox = replace(sandbox, layers=tuple(str(folder / Path(layer).name) for layer in sandbox.layers))
    return replace(plan, task=task, sandbox=sandbox)


def packed(layer: str) -> BinaryIO:
    """The layer as a tar, in a file that has no name. Blocks. Raises OSError."""
    file = TemporaryFile()  # noqa: SIM115 - the caller's
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.add(layer, arcname="", filter=lambda entry: _marked(entry, Path(layer, entry.name)))
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return cast("BinaryIO", file)


def _marked(entry: tarfile.TarInfo, place: Path) -> tarfile.TarInfo:
    """With the attribute by which a folder hides what lies below it."""
    for mark in (OPAQUE, OPAQUE_OF_USERS) if entry.isdir() else ():
        if is_opaque(place, mark):
            entry.pax_headers = {**entry.pax_headers, MARK: mark}
    return entry
