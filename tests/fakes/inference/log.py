"""The record of what a scripted server was asked and what it gave."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.inference.script import Call

PROBE_HEADER = "x-orchestrator-probe"


@dataclass(slots=True)
class Served:
    """One request and its answer. Everything sampled is the truth, whatever a fault made of the answer.

    left_to_default: sampling parameters the request did not set, by the dialect's names.
    status: None while under way and where the connection was reset or given up by the client.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    started_s: float
    dialect: str
    probe: bool
    call: Call | None = None
    left_to_default: tuple[str, ...] = ()
    begun: str = ""  # what an aborted request has sampled before, at the end of the prompt
    prompt_ids: list[int] = field(default_factory=list)
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_text: str = ""
    finish: str = ""
    stopped_by: str | int | None = None
    cached: int = 0
    weight_version: str = ""
    fault: str | None = None
    status: int | None = None
    refusal: str = ""
    ended_s: float | None = None
    disconnected: bool = False

    @property
    def completed(self) -> bool:
        """Whether an answer with a completion went out whole, and as it should be."""
        return (
            self.status == 200
            and bool(self.sampled_ids)
            and self.fault in (None, "slow")
            and not self.disconnected
        )


class Log:
    """All requests of a server, oldest first; on disk too if there is a `file`, each once it has ended."""

    def __init__(self, file: Path | None = None) -> None:
        self.all: list[Served] = []
        self._file = file

    @property
    def completions(self) -> list[Served]:
        """Completions that were asked for, probes not among them."""
        return [s for s in self.all if s.call is not None and not s.probe]

    @property
    def completed(self) -> list[Served]:
        """Completions that a client got, probes not among them."""
        return [s for s in self.completions if s.completed]

    @property
    def sampled(self) -> int:
        """How many completions were sampled, whoever got them."""
        return sum(bool(s.sampled_ids) for s in self.completions)

    @property
    def probes(self) -> list[Served]:
        return [s for s in self.all if s.probe]

    def begin(self, served: Served) -> None:
        self.all.append(served)

    def end(self, served: Served) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(served)) + "\n")

    def as_json(self) -> str:
        return json.dumps([asdict(served) for served in self.all])
