"""A cluster and its host actors as a run sees them. `link` makes them of Ray."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.cluster.order import Broken, Delivery, Inspection, News, NodeFacts, Opening, Order, Pulse
from orchestrator.completion.replay import Replayed
from orchestrator.doctor.finding import Finding
from orchestrator.rules.policy import Served
from orchestrator.settings.config import Config
from orchestrator.types import SandboxSpec


class NodeLost(Exception):
    """Nothing comes back from a node, or from the cluster. The text is one line."""


@dataclass(frozen=True, slots=True)
class ListedNode:
    """A node as the cluster lists it. `draining`: it will leave soon."""

    node_id: str
    name: str
    draining: bool = False


class Remote(Protocol):
    """A host actor. Every call raises NodeLost when nothing comes back; a cancelled call is cancelled there."""

    async def look(self, image: str, *, docker: bool) -> Inspection: ...
    async def examine(
        self, config: Config, *, image_comes: bool, tokenizer_digest: str | None
    ) -> tuple[Finding, ...]: ...
    async def add_image(self, piece: bytes, *, begins: bool, ends: bool) -> Broken | None: ...
    async def open(self, opening: Opening) -> NodeFacts | Broken: ...
    async def add_file(self, digest: str, piece: bytes, *, begins: bool, ends: bool) -> Broken | None: ...
    async def add_layer(self, name: str, piece: bytes, *, begins: bool, ends: bool) -> Broken | None: ...
    async def carry_out(self, order: Order) -> Delivery: ...
    async def news(self) -> tuple[News, ...]: ...
    async def fetch(self, rollout_id: str, path: str, offset: int) -> bytes | Broken: ...
    async def fetch_body(self, digest: str, offset: int) -> bytes | Broken: ...
    async def forget(self, rollout_id: str) -> None: ...
    async def why_unfit(self, spec: SandboxSpec, image: Mapping[str, Any] | None) -> str | None: ...
    async def works(self) -> Broken | None: ...
    async def pulse(self) -> Pulse: ...
    async def drain(self) -> None: ...
    async def serve(self, served: Served) -> None: ...
    async def replayed(self) -> Replayed | None: ...
    async def close(self) -> None: ...

    def end(self) -> None:
        """Ends the actor's process at once, and with it its sandboxes."""


class Link(Protocol):
    """A cluster. `head_away_s`: after so long without its head, this process ends."""

    @property
    def head_away_s(self) -> float: ...

    async def nodes(self) -> list[ListedNode]:
        """The living nodes that carry out rollouts. Raises NodeLost."""

    async def start(self, node_id: str) -> Remote:
        """A host actor on that node. Raises NodeLost."""
