"""Where plans are carried out: on this machine (`local`) or on the nodes of a cluster (`cluster/`).

A run asks for room, is given a host for one attempt, and has it carry out the plan. What there is one of stays
with the run: tasks, groups, retries, scores, files.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.replay import Replayed
from orchestrator.launch.base import LauncherNow
from orchestrator.proxy.left_files import OutputRule
from orchestrator.tools.base import HostTool, ToolFacts
from orchestrator.types import Attempt, Entry, Failed, FailedName, RolloutPlan, SandboxSpec


@dataclass(frozen=True, slots=True)
class Provision:
    """What rollouts get besides their plan. `output`: where files go that they leave; None: sandboxes are asked
    for none. `tools`: in place of the run's host tools. `served`: is told what goes on record as soon as it does,
    with the Unix time at which the record begins; what a rollout that goes on has on record is not told again.
    `run_folder`: of the run, for bodies of what it asks of the outside; None: they are not kept."""

    output: OutputRule | None = None
    tools: Mapping[str, HostTool] | None = None
    served: Callable[[float, Entry], None] = lambda started_at, one: None
    run_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class HostNow:
    """How one host stands at a moment. `running`: rollouts that have one of its `slots`. `sandboxes`: by state,
    `starting`, `ready`, `leased` or `ending`. `sampling`: completions that are awaited. `away`: services, and
    whether each is away. So far: `claims`, of rollouts by what they found (a sandbox that was `ready`, one being
    `made`, or `none`), and how many sandboxes were `started` in `starting_s` seconds altogether."""

    slots: int
    running: int
    sandboxes: Mapping[str, int] = field(default_factory=dict)
    claims: Mapping[str, int] = field(default_factory=dict)
    started: int = 0
    starting_s: float = 0.0
    sampling: int = 0
    launcher: LauncherNow = field(default_factory=LauncherNow)
    away: Mapping[str, bool] = field(default_factory=dict)


STILL_UNDER_WAY = Failed(FailedName.CANCELLED, "")  # the outcome, so far, of what has not ended


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A rollout that has a sandbox now. `turns`: its completions so far. `attempt`: makes what is known of it so
    far; its outcome says nothing. None: only the run directory has what it was served."""

    plan: RolloutPlan
    turns: int
    elapsed_s: float
    attempt: Callable[[], Attempt] | None


SlotNeedless = Callable[[], AbstractContextManager[None]]


class Host(Protocol):
    """One host, with room for one attempt."""

    @property
    def name(self) -> str:
        """The node's name; empty: this machine."""

    async def works(self) -> None:
        """Returns once all that rollouts need there works. Raises RunUnhealthy if that takes too long."""

    async def carry_out(
        self, plan: RolloutPlan, provision: Provision, needless: SlotNeedless = nullcontext
    ) -> Attempt:
        """The finished attempt; nothing of its sandbox is left. `needless`: entered while it needs no room of a
        rollout, as it is graded in other room. A cancel removes the sandbox: on this machine
        before the call returns, on another one right after.

        Raises RolloutError, and AuthenticationError to stop the run."""

    async def excuses(self, failure: Failed) -> bool:
        """Whether the host, or a service that it needs, is away, and the failure comes from that."""


class Hosts(Protocol):
    """All hosts of a run, while they are open."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def takes_ids(self) -> bool:
        """Whether prompts go to the endpoint as ids and sampled ids come back."""

    @property
    def why_text(self) -> str:
        """Why the endpoint is asked for text; empty: it takes ids."""

    @property
    def tools(self) -> Mapping[str, ToolFacts]:
        """What agents are told of the run's host tools."""

    @property
    def capacity(self) -> int:
        """How many rollouts may have a sandbox at a time. It follows the nodes of a cluster."""

    @property
    def waiting(self) -> int:
        """How many rollouts wait for room."""

    def now(self) -> Mapping[str, HostNow]:
        """How each host stands, by its name. Of a node of a cluster: when it last gave a sign of life."""

    def under_way(self) -> Sequence[UnderWay]:
        """The rollouts that have a sandbox. Those on nodes of a cluster count once they were served something."""

    async def why_unfit(self, spec: SandboxSpec) -> str | None:
        """Why the image or the user makes such a sandbox impossible, wherever it would be made. None: they do not,
        or that is not known now. Gets the image ready on this machine."""

    def turn(self) -> int:
        """The next place in the order of groups. All rollouts of a group share one."""

    def slot(self, turn: int, spec: SandboxSpec) -> AbstractAsyncContextManager[Host | None]:
        """Room for one attempt in such a sandbox, in the order of turns. None: the run is drained, and no host has
        room. Raises RunUnhealthy if no host has worked for long."""

    def following(self, demand: Callable[[], float], changed: Callable[[], None]) -> AbstractContextManager[None]:
        """Within this block no more sandboxes are kept warm than `demand` says rollouts will still need, and
        `changed` is called when the capacity changes."""

    def expecting(self, spec: SandboxSpec, rollouts: int = 1) -> AbstractContextManager[None]:
        """Within this block so many rollouts wait for such a sandbox: it is made ahead, if any is. The block is
        left right before a host carries out the plan."""

    def drain(self) -> None:
        """No sandbox is made ahead any more, and those that are not used are removed."""

    async def describe(self) -> dict[str, Any]:
        """For run.json: what sandboxes get besides their plan (`agent`), how they are made (`sandbox`)."""

    def summary(self) -> str:
        """How many sandboxes may live at once, for people."""

    async def replayed(self) -> Replayed | None:
        """How faithful a replay was; None: completions came from an endpoint."""
