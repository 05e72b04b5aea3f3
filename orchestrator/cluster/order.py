"""What crosses between a run and the host actor of a node: frozen values, pickled.

Nothing of a task that only grading needs goes to a node: no reference answer, no metadata.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator import errors
from orchestrator.agents.equipment import Equipment
from orchestrator.border.keys import with_values
from orchestrator.completion.endpoints import REPLAY
from orchestrator.completion.startup import Wait
from orchestrator.errors import EnvironmentUnusable, OrchestratorError, RolloutError, SandboxLostError
from orchestrator.host.base import HostNow
from orchestrator.rules.redact import Secret
from orchestrator.settings.config import Config
from orchestrator.tools.base import HostTool
from orchestrator.tools.mcp.keys import with_keys
from orchestrator.types import Entry, Outcome, Record, RolloutPlan

# Whatever decides what a rollout becomes, or what its record looks like when it is pickled.
PACKAGES = (
    *("rollout-orchestrator", "ray", "grpcio", "protobuf", "docker", "smolagents"),
    *("transformers", "tokenizers", "tavily-python", "aiohttp", "orjson"),
)


@dataclass(frozen=True, slots=True)
class Parcel:
    """A file that a node needs, named by its content. `digest`: sha256, in hex."""

    digest: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A node before it is opened. `image_id` None: it has no such image. `engine` False: it needs an Engine, and
    none answers."""

    software: Mapping[str, str]
    image_id: str | None
    engine: bool = True


@dataclass(frozen=True, slots=True)
class Opening:
    """How a host actor opens its node. `config` holds the keys; it goes as an argument of a call and nowhere else.

    `tokenizer_digest`: of the run's own; None: the run has no tokenizer.
    """

    config: Config = field(repr=False)
    equipment: Equipment
    tokenizer_digest: str | None
    software: Mapping[str, str]


def settings_for_nodes(config: Config, tokenizer_name: str | None) -> Config:
    """The settings of a node: its own machine, the run's tokenizer, a recording by its absolute path, and no key
    that only grading needs."""
    env = replace(
        config.env,
        cluster="none",
        tokenizer_name=tokenizer_name,
        # Variables and files are this machine's.
        mcp_servers=tuple(map(with_keys, config.env.mcp_servers)),
        secrets=with_values(config.env.key_entries),
    )
    servers = []
    for server in config.openai:
        if server.base_url.startswith(REPLAY):
            path = Path(server.base_url.removeprefix(REPLAY)).absolute()
            server = replace(server, base_url=f"{REPLAY}{path}")
        servers.append(server)
    return replace(config, env=env, openai=tuple(servers), judge_api_key=Secret())


@dataclass(frozen=True, slots=True)
class RemoteTool:
    """What agents are told of a host tool that is on the nodes."""

    description: str
    inputs: Mapping[str, Mapping[str, Any]]
    output_type: str
    server: str = ""  # the MCP server that it is of


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """An opened node. `why_text`: why its endpoint is asked for text."""

    takes_ids: bool
    sandbox: Mapping[str, Any]
    tools: Mapping[str, RemoteTool]
    notes: tuple[str, ...]
    why_text: str = ""


@dataclass(frozen=True, slots=True)
class Order:
    """One plan for a node. Attachments are named by their content: `parcels`, in the order of the task's. Layers
    have the last part of their path here as their name there.

    `output`: most files and most bytes that may come back; None: the sandbox is asked for none. `demand`: how many
    more rollouts this node will still get, infinite while nobody knows. `tools`: in place of the run's. `number`:
    under which the node tells what the rollout is served.
    """

    plan: RolloutPlan
    parcels: tuple[Parcel, ...] = ()
    output: tuple[int, int] | None = None
    tools: Mapping[str, HostTool] | None = None
    demand: float = float("inf")
    number: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """What the rollout of the order `number` was served, the `place`-th from 0 on: one that is missing shows."""

    number: int
    place: int
    started_at: float
    served: Entry


@dataclass(frozen=True, slots=True)
class Broken:
    """An error of ours on a node: the name of its class, and its text. Exceptions themselves do not cross: one
    that cannot be pickled would hide what happened."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: OrchestratorError) -> Broken:
        return cls(type(error).__name__, str(error))

    def error(self, node: str) -> OrchestratorError:
        """The error, as raised here; its text names the node."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, OrchestratorError)):
            kind = SandboxLostError
        return kind(f"node {node}: {self.text}")

    def rollout_error(self, node: str) -> RolloutError:
        error = self.error(node)
        return error if isinstance(error, RolloutError) else SandboxLostError(str(error))


@dataclass(frozen=True, slots=True)
class Delivery:
    """The finished attempt, without its plan. `missing`: digests of parcels and names of layers that the node
    lacks; nothing was begun.

    `away`: the service that is away, if the attempt failed by it; the node then takes no more until `works`
    returns."""

    record: Record | None = None
    outcome: Outcome | None = None
    broken: Broken | None = None
    missing: tuple[str, ...] = ()
    away: str = ""
    contents: Mapping[str, bytes] = field(default_factory=dict)  # small output files, by path
    warm: int = 0  # sandboxes that are ready now
    now: HostNow | None = None  # how the node stands


@dataclass(frozen=True, slots=True)
class Pulse:
    """A node's sign of life. `lines`: for people, since the last one. `warm`: sandboxes ready for a
    rollout. `waits`: how those for the node's endpoints stand, while it is opened. `now`: how the node stands,
    once it is open."""

    lines: tuple[str, ...] = ()
    warm: int = 0
    waits: tuple[Wait, ...] = ()
    now: HostNow | None = None


def for_node(plan: RolloutPlan) -> RolloutPlan:
    """The plan without what only grading needs."""
    return replace(plan, task=replace(plan.task, answer=None, metadata={}, scorer=None))


@cache
def software() -> Mapping[str, str]:
    """Python's version, that of each package that matters, and a digest of our own source."""
    versions = {"python": platform.python_version(), "source": _source_digest()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions


def _source_digest() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """What differs, for people; empty: nothing."""
    names = [name for name in ours if theirs.get(name) != ours[name]]
    return ", ".join(f"{name} {theirs.get(name, 'unknown')} and not {ours[name]}" for name in names)


def demand_same(theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Raises EnvironmentUnusable for a node whose software is not the run's."""
    if differs := differences(theirs, ours):
        raise EnvironmentUnusable(f"it has {differs}; install the same versions on all nodes")
