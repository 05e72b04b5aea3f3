"""Watches a run from outside: the orchestrator's memory and descriptors, its containers as the Engine tells."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from docker.errors import APIError

from orchestrator.launch.names import LABEL_OWNER, LABEL_PROJECT
from orchestrator.launch.owner import Owner
from tests.e2e.leftovers import engine

_PAUSE_S = 0.25
_LOG_LINES = 200


@dataclass(frozen=True, slots=True)
class Sample:
    """Of the orchestrator's process, when so many rollouts were on record."""

    rollouts: int
    rss_bytes: int
    descriptors: int


@dataclass
class Witness:
    """`with Witness(pid, rollouts_file) as seen`: looks four times a second until the block is left."""

    pid: int
    rollouts: Path
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
        with engine() as client:
            while not self._over.wait(_PAUSE_S):
                self._sample()
                self._look(client)
            self._look(client)

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

    def _look(self, client: Any) -> None:
        """Containers of this orchestrator: inspected once, logs read while they live, the time they went."""
        now = time.time()
        listed = {
            container["Id"]
            for container in client.containers(all=True, filters={"label": LABEL_PROJECT})
            if (owner := Owner.parse(container["Labels"].get(LABEL_OWNER, ""))) and owner.pid == self.pid
        }
        for gone in self._alive - listed:
            self.gone_at[gone] = now
        self._alive = listed
        for container in listed:
            try:
                if f"{container} inspected" not in self.texts:
                    self.texts[f"{container} inspected"] = json.dumps(client.inspect_container(container))
                logs = client.logs(container, tail=_LOG_LINES)
                self.texts[f"{container} logs"] = logs.decode("utf-8", "replace")
            except APIError:
                continue  # it went meanwhile
