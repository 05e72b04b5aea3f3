"""One run of a task's tests on its untouched image, with a network: what they install is its *grader layer*.

Many tests install what they need when they grade: pytest by pip, uv and its cache, programs by apt. What they
wrote then lies over the agent's state in every later grade, which has no network. No agent was ever near the dry
run, and nothing that it wrote where agents work, or for itself alone, is kept.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import ClassVar

from orchestrator.border.border import Border
from orchestrator.border.outside import Outside
from orchestrator.grading.grade import command_of, end_of, grading_spec
from orchestrator.launch.base import Launcher, SavedLayer, TooMuch
from orchestrator.launch.image.site import Site
from orchestrator.launch.names import WORKSPACE_DIR
from orchestrator.launch.workspaces import Workspaces
from orchestrator.rules.egress import ANY, USUAL_PORTS, Place, Rules, written
from orchestrator.types import Crossing, DryRun, Listener, SandboxSpec, Task

_SITE, _CA = "/.orchestrator-site", "authorities.pem"
_OWN = (
    r"/(?:tests|logs|solution|planted|tmp|var/tmp|run|var/run|dev|proc|sys|attachments|\.orchestrator[^/]*)(?:/|$)"
)
_PORT = 61_080  # of the sandbox' loopback device; above those that programs get without asking for one
_OWN_NAMES = ("localhost", "127.0.0.1", "::1")  # of the sandbox itself
_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
_NAMES = 50  # of hosts, that are remembered
_HOME = re.compile(r"/(?:root|home/[^/]+)")


@dataclass(frozen=True, slots=True)
class Network:
    """The one way out of a sealed sandbox: the border, at a port of its loopback device."""

    border: Border
    environment: Mapping[str, str]
    listener: ClassVar = Listener(port=_PORT)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream, to its end. Raises OSError."""
        await self.border.carry(reader, writer)

    @property
    def reached(self) -> tuple[str, ...]:
        """The hosts that were asked, the first of them."""
        return _names(one for one in self.border.crossings if one.source == "network")

    @property
    def refused(self) -> tuple[str, ...]:
        """The hosts that were not, by the rules."""
        return _names(one for one in self.border.crossings if one.status == 403)


def network_of(allowed: Sequence[str]) -> Network:
    """`allowed`: NAME, NAME:PORT or `*`; without a port, 80 and 443. What is named may be anywhere, in this
    machine's network too; `*` is for public addresses. What is inside TLS is nobody's business here."""
    entries = tuple(written(text, tls="tunnel", private=text != ANY) for text in allowed)
    named = {entry.host for entry in entries}
    variables = dict.fromkeys(_VARIABLES, f"http://127.0.0.1:{_PORT}")
    inside = ",".join(name for name in _OWN_NAMES if name not in named)
    border = Border(Rules(entries, "env.grader_network"), Outside())
    return Network(border, variables | dict.fromkeys(("no_proxy", "NO_PROXY"), inside))


def _names(crossings: Iterable[Crossing]) -> tuple[str, ...]:
    places = [Place(one.host, one.port) for one in crossings if one.host]
    shown = [place.host if place.port in USUAL_PORTS.values() else str(place) for place in places]
    return tuple(dict.fromkeys(shown))[:_NAMES]


class DryRuns:
    """Of all tasks. `allowed`: as `network_of` takes them. `folder`: an empty one, for what they are told of the
    operator's network. Blocks. Raises WorkspaceError, EnvironmentUnusable."""

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
        grader, network = task.grader, network_of(self._allowed)
        command = command_of(task, grader)
        command = replace(
            command,
            environment={**command.environment, **network.environment, **self._environment},
            layers=(*command.layers, *self._layers),
            ways=(network,),
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
            reached=network.reached,
            refused=network.refused,
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
