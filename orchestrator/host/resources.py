"""What all rollouts on one host share. `open` makes it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.agents.equipment import Equipment
from orchestrator.completion.base import Completer, Tokenizer
from orchestrator.completion.control import EndpointControl
from orchestrator.host.egress import Opening, no_world
from orchestrator.host.sandbox import ParkedSandbox, parked_sandbox
from orchestrator.launch.base import Launcher
from orchestrator.launch.pool import WarmPool
from orchestrator.proxy.lease import Lease
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.services.control import ServiceControl
from orchestrator.tools.base import HostTool
from orchestrator.types import SandboxSpec


@dataclass(frozen=True, slots=True)
class Resources:
    """What every rollout on one host shares.

    Without a `pool` each rollout makes its own sandbox. `control`: shared, so that few control questions are
    asked; None: each rollout has its own. `why_text`: why the endpoint is asked for text; empty: it takes ids.
    `leases`: of the rollouts under way. `cost_limit`: of all their completions; None: there is none. `world`:
    opens what one rollout reaches through its channel. `service_control`: shared, too; None: each rollout has its
    own."""

    launcher: Launcher
    completer: Completer
    tokenizer: Tokenizer | None
    channel_directory: Callable[[], AbstractContextManager[Path]]
    tools: Mapping[str, HostTool] = field(default_factory=dict)
    pool: WarmPool[ParkedSandbox] | None = None
    equipment: Equipment = Equipment()  # noqa: RUF009 - immutable
    control: EndpointControl | None = None
    why_text: str = ""
    leases: set[Lease] = field(default_factory=set)
    cost_limit: CostLimit | None = None
    world: Opening = no_world
    service_control: ServiceControl | None = None

    def sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[ParkedSandbox]:
        """A sandbox for one rollout, from the pool if there is one."""
        if self.pool is not None:
            return self.pool.claim(spec)
        return parked_sandbox(spec, self.launcher, self.channel_directory)
