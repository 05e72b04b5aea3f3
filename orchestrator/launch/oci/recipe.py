"""Carries out the steps of a Dockerfile: each stage is a folder, RUN runs in it, COPY writes into it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.oci.dockerfile import (
    Arg,
    Copy,
    CopyStage,
    EntryPoint,
    Env,
    From,
    Instruction,
    Label,
    Run,
    User,
    expand,
    parse,
)
from orchestrator.launch.oci.steps import Steps
from orchestrator.launch.oci.store import inside
from orchestrator.waits import uninterrupted

# Docker's, where an image has none.
_BUILT_IN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

Files = Mapping[str, bytes | Path]  # of the build context: name → content, or the file with it


@dataclass(slots=True)
class Stage:
    """An image in the making. `arguments`: the build arguments it has declared, with their values."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    entry_point: list[str] = field(default_factory=list)
    arguments: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path, config: Mapping[str, Any]) -> Stage:
        """An image's files with its configuration, as far as it matters to what is built on it."""
        pairs = (entry.partition("=") for entry in config.get("Env") or ())
        return cls(root, {name: value for name, _, value in pairs}, dict(config.get("Labels") or {}))

    @property
    def config(self) -> dict[str, Any]:
        """As Docker has it."""
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        return {"Env": environment, "Entrypoint": self.entry_point, "Labels": self.labels}

    @property
    def variables(self) -> dict[str, str]:
        """What instructions and the programs of RUN see."""
        return {**_BUILT_IN, **self.arguments, **self.environment}


class Recipe:
    """One build. `folder`: for its stages. `base`: the image BASE_IMAGE, used up. `given`: build arguments."""

    def __init__(self, steps: Steps, folder: Path, base: Stage, files: Files, given: Mapping[str, str]) -> None:
        self._steps = steps
        self._folder = folder
        self._base: Stage | None = base
        self._files = files
        self._given = given
        self._before: dict[str, str] = {}  # arguments declared before the first FROM
        self._stages: list[Stage] = []
        self._named: dict[str, Stage] = {}

    async def carry_out(self, dockerfile: str, progress: Callable[[str], None]) -> Stage:
        """The last stage. Raises EnvironmentUnusable, OSError."""
        steps = parse(dockerfile)
        for number, step in enumerate(steps, 1):
            progress(f"Step {number}/{len(steps)} : {step.shown}")
            await self._do(step.instruction)
        return self._stages[-1]

    async def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Arg(defaults):
                self._declare(defaults)
                return
            case From(base, name):
                await self._begin(expand(base, self._before), name)
                return
        stage = self._stages[-1]
        match instruction:
            case Env(values):
                stage.environment |= _expanded(values, stage)
            case Label(values):
                stage.labels |= _expanded(values, stage)
            case EntryPoint(argv):
                stage.entry_point = list(argv)
            case User():
                pass  # root is the only one that the parser knows, and steps run as root
            case Copy(sources, target):
                await uninterrupted(asyncio.to_thread(_copy, self._files, sources, target, stage.root))
            case CopyStage(name):
                self._take(name, stage.root)
            case Run(script):
                code, said = await self._steps.run(stage.root, ("/bin/sh", "-c", script), stage.variables)
                if code != 0:
                    last = said.strip().rpartition("\n")[2].strip()
                    raise EnvironmentUnusable(f"the image could not be built: {last or f'exit code {code}'}")

    def _declare(self, defaults: Mapping[str, str | None]) -> None:
        for name, default in defaults.items():
            known = self._stages[-1].variables if self._stages else self._before
            value = self._before.get(name) if default is None else expand(default, known)
            value = self._given.get(name, value)
            if value is not None:
                (self._stages[-1].arguments if self._stages else self._before)[name] = value

    async def _begin(self, base: str, name: str | None) -> None:
        if base == "scratch":
            stage = Stage(self._folder / f"stage-{len(self._stages)}")
            stage.root.mkdir()
            stage.root.chmod(0o755)
        elif base == self._given["BASE_IMAGE"] and self._base is not None:
            stage, self._base = self._base, None
        else:
            raise EnvironmentUnusable(f"FROM {base}: only scratch, and once the base image, are known here")
        self._stages.append(stage)
        if name is not None:
            self._named[name] = stage

    def _take(self, name: str, root: Path) -> None:
        """Moves a stage's files instead of copying them: nothing comes back to it."""
        stage = self._named.pop(name, None)
        if stage is None or stage.root == root or any(root.iterdir()):
            raise EnvironmentUnusable(f"COPY --from={name}: only once, from an earlier stage into an empty one")
        root.rmdir()
        stage.root.rename(root)


def _expanded(values: Mapping[str, str], stage: Stage) -> dict[str, str]:
    return {name: expand(value, stage.variables) for name, value in values.items()}


def _copy(files: Files, sources: tuple[str, ...], target: str, root: Path) -> None:
    """All that the sources match: a file by its name, a folder by what is in it."""
    found: dict[str, bytes | Path] = {}
    for source in sources:
        wanted = source.strip("/").split("/")
        before = len(found)
        for name, content in files.items():
            parts = name.split("/")
            if len(parts) >= len(wanted) and all(map(fnmatchcase, parts, wanted)):
                found["/".join(parts[len(wanted) :] or parts[-1:])] = content
        if len(found) == before and not set("*?[") & set(source):
            raise EnvironmentUnusable(f"COPY {source}: there is no such file in the build context")
    for name, content in found.items():
        place = inside(root, target + name)
        missing = [folder for folder in place.parents if not folder.exists()]
        place.parent.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            folder.chmod(0o755)
        place.write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        place.chmod(0o644)
