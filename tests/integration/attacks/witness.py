"""Watches a run from outside: the orchestrator's memory and descriptors, its containers as the Engine or the OCI
runtime tells."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from docker.errors import APIError

from orchestrator.launch.names import LABEL_OWNER, LABEL_PROJECT
from orchestrator.launch.owner import Owner
from tests.e2e.leftovers import engine

_PAUSE_S = 0.25
_LOG_LINES = 200
_STATES = ("state.json", "status")  # as runc and as crun name it


@dataclass(frozen=True, slots=True)
class Sample:
    """Of the orchestrator's process, when so many rollouts were on record."""

    rollouts: int
    rss_bytes: int
    descriptors: int


class Eyes(Protocol):
    """Sees containers."""

    def look(self, known: Mapping[str, str]) -> Mapping[str, Mapping[str, str]]:
        """What is told of each container there is, by its id and kind of text. What is `known` need not be told
        again."""


@dataclass
class EngineEyes:
    """Of the containers of the orchestrator with this pid: inspected once, logs read while they live."""

    client: Any
    pid: int

    def look(self, known: Mapping[str, str]) -> Mapping[str, Mapping[str, str]]:
        seen: dict[str, dict[str, str]] = {}
        for container in self.client.containers(all=True, filters={"label": LABEL_PROJECT}):
            owner, name = Owner.parse(container["Labels"].get(LABEL_OWNER, "")), container["Id"]
            if owner is None or owner.pid != self.pid:
                continue
            seen[name] = {}
            with suppress(APIError):  # it went meanwhile
                if f"{name} inspected" not in known:
                    seen[name]["inspected"] = json.dumps(self.client.inspect_container(name))
                seen[name]["logs"] = self.client.logs(name, tail=_LOG_LINES).decode("utf-8", "replace")
        return seen


@dataclass
class RuntimeEyes:
    """Of the containers of launchers that keep their directories in `temporary`: what the runtime is told and
    remembers, and what /proc shows of pid 1."""

    temporary: Path

    def look(self, known: Mapping[str, str]) -> Mapping[str, Mapping[str, str]]:
        seen: dict[str, dict[str, str]] = {}
        for bundle in self.temporary.glob("orchestrator-*/bundles/sandbox-*"):
            if f"{bundle.name} inspected" in known:
                seen[bundle.name] = {}
                continue
            with suppress(OSError, StopIteration):  # it went meanwhile, or is just coming
                texts = [(bundle / "config.json").read_text()]
                remembered = bundle.parents[1] / "state" / bundle.name
                state = next(path for name in _STATES if (path := remembered / name).exists())
                process = Path("/proc", (bundle / "pid").read_text())
                for path in (state, *(process / name for name in ("environ", "cmdline", "mountinfo"))):
                    # Of an ordinary user's containers, some are a subordinate id's alone.
                    with suppress(PermissionError) if os.geteuid() else nullcontext():
                        texts.append(path.read_text(errors="replace"))
                seen[bundle.name] = {"inspected": "\n".join(texts)}
        return seen


@contextmanager
def engine_eyes(pid: int) -> Iterator[Eyes]:
    with engine() as client:
        yield EngineEyes(client, pid)


@dataclass
class Witness:
    """`with Witness(pid, rollouts_file, eyes) as seen`: looks four times a second until the block is left."""

    pid: int
    rollouts: Path
    eyes: Eyes
    samples: list[Sample] = field(default_factory=list)
    gone_at: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)  # by container and kind: what the Engine tells

    def __enter__(self) -> Witness:
        self._over = threading.Event()
        self._alive: set[str] = set()
        self._thread = threading.Thread(target=self._watch, name="witness")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_PAUSE_S):
            self._sample()
            self._look()
        self._look()

    def _sample(self) -> None:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
            descriptors = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        except OSError:
            return  # it has ended
        fields = dict(line.split(":", 1) for line in status.splitlines())
        if "VmRSS" in fields:
            lines = self.rollouts.read_bytes().count(b"\n") if self.rollouts.exists() else 0
            self.samples.append(Sample(lines, int(fields["VmRSS"].split()[0]) * 1024, descriptors))

    def _look(self) -> None:
        """What is told of the containers, and the time at which they went."""
        now, seen = time.time(), self.eyes.look(self.texts)
        for gone in self._alive - set(seen):
            self.gone_at[gone] = now
        self._alive = set(seen)
        for container, texts in seen.items():
            self.texts |= {f"{container} {kind}": text for kind, text in texts.items()}
