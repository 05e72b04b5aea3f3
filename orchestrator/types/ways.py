"""Where the streams of a sandbox lead: what its loopback device listens at, and who answers there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Protocol

from orchestrator.types.record import Crossing

if TYPE_CHECKING:
    import asyncio


@dataclass(frozen=True, slots=True)
class Listener:
    """A place of a sandbox's loopback device. `port` 0: any free one. `is_proxy`: an HTTP proxy answers, and the
    agent's processes find it by their variables. Raises ValueError."""

    address: str = "127.0.0.1"
    port: int = 0
    is_proxy: bool = False

    def __post_init__(self) -> None:
        address = ip_address(self.address)
        if address.version != 4 or not address.is_loopback:
            raise ValueError(f"{self.address} is not an IPv4 address of a loopback device")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"{self.port} is not a port")


class Way(Protocol):
    """What a listener of a sandbox leads to. Used by one rollout."""

    @property
    def listener(self) -> Listener:
        """Where the sandbox listens for it."""
        ...

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One stream, to its end. When this returns the stream is closed; whatever it raises resets the stream. It
        is cancelled when the sandbox has reset the stream, and when the lease ends."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """What one rollout reaches through its channel. `authorities`: certificates in PEM form that its processes
    trust, besides those that its sandbox has. `crossings`: what it asked of the outside so far; `notes`: what
    people should know of it. `keep_time`: is given who knows how many seconds the rollout has lasted so far."""

    ways: tuple[Way, ...] = ()
    authorities: bytes = b""
    crossings: Callable[[], tuple[Crossing, ...]] = tuple
    notes: Callable[[], tuple[str, ...]] = tuple
    keep_time: Callable[[Callable[[], float]], None] = lambda elapsed_s: None


NO_WORLD = World()
