"""One stream of container events for all sandboxes of a run, read in a thread of its own.

After every (re)connection the containers are listed, so that nothing that happened in between is missed.
Events are handed to the listener in the event loop; `launcher` and `sandbox` decide what they mean.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Event, Lock, Thread
from typing import Any, Protocol

import docker

from orchestrator.errors import EnvironmentUnusable
from orchestrator.launch.docker.calls import CALL_TIMEOUT_S, UNREACHABLE
from orchestrator.launch.docker.client import connect, one_line, why_unreachable

log = logging.getLogger(__name__)

_EVENTS = ("die", "oom", "kill", "pause", "destroy")
_RECONNECT_S = (0.1, 0.5, 1.0, 2.0)
_JOIN_S = 5.0


@dataclass(frozen=True, slots=True)
class ContainerEvent:
    """An event of the container `name`. `action`: one of `_EVENTS`."""

    name: str
    action: str
    attributes: Mapping[str, str]


class EventListener(Protocol):
    """Called in the event loop."""

    def on_event(self, event: ContainerEvent) -> None: ...

    def on_listing(self, states: Mapping[str, str], asked_s: float) -> None:
        """The states (running, exited …) by name of all containers that existed at `asked_s` (loop time). The
        stream is open."""

    def on_interruption(self, error: str) -> None:
        """The stream broke. It will be opened again."""


class EngineEvents:
    """Follows the containers with one label from `start` to `aclose`."""

    def __init__(self, label: str, listener: EventListener, *, timeout_s: int = CALL_TIMEOUT_S) -> None:
        self._label = label
        self._listener = listener
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._run, name="engine-events", daemon=True)
        self._stop = Event()
        self._lock = Lock()  # guards `_stream`, which may be closed while it is being opened
        self._stream: Any = None
        self._since: int | None = None  # by the Engine's clock

    def start(self) -> None:
        self._thread.start()

    def interrupt(self) -> None:
        """Closes the stream, as if the Engine had gone away."""
        with self._lock:
            if self._stream is not None:
                with suppress(*UNREACHABLE, AttributeError):
                    self._stream.close()

    async def aclose(self) -> None:
        """Ends the thread. Idempotent."""
        self._stop.set()
        self.interrupt()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_S)
            if self._thread.is_alive():
                log.warning("the Docker Engine hangs: its event stream is left behind")

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                self._follow()
                failures = 0
                error = "the stream of events ended"
            except EnvironmentUnusable as failure:
                error = str(failure)
            except (*UNREACHABLE, ValueError, AttributeError) as failure:
                # The last two: the stream was closed under the reader.
                error = why_unreachable(failure)
            except Exception as failure:
                # If this thread ended unnoticed, a lost sandbox would end as a timeout, which is scored.
                log.debug("no events from the Docker Engine", exc_info=True)
                error = f"unforeseen: {one_line(repr(failure))}"
            if not self._stop.is_set():
                self._post(self._listener.on_interruption, error)
                self._stop.wait(_RECONNECT_S[min(failures, len(_RECONNECT_S) - 1)])
                failures += 1

    def _follow(self) -> None:
        """Opens the stream, lists the containers, reads until the stream ends."""
        client = connect(self._timeout_s)
        try:
            stream = client.events(
                since=self._since,
                filters={"type": ["container"], "event": list(_EVENTS), "label": [self._label]},
                decode=True,
            )
            with self._lock:
                self._stream = stream
            if self._stop.is_set():
                self.interrupt()
            self._list(client)
            for message in stream:
                if (event := _container_event(message)) is not None:
                    self._post(self._listener.on_event, event)
                    if isinstance(time := message.get("time"), int):
                        self._since = time
                else:
                    # It may have been the end of a container, which the listing shows only a moment later.
                    log.debug("odd event: %s", one_line(repr(message)))
                    self._stop.wait(_RECONNECT_S[0])
                    self._list(client)
        finally:
            with self._lock:
                self._stream = None
            client.close()

    def _list(self, client: docker.APIClient) -> None:
        """Hands over the containers that exist now."""
        asked_s = self._loop.time()
        listing = client.containers(all=True, filters={"label": self._label})
        if not isinstance(listing, list):  # an empty object would read as no containers at all
            raise TypeError(f"the answer is not a list of containers: {listing!r}")
        # A container without names is being removed.
        states = {name.removeprefix("/"): str(c["State"]) for c in listing for name in c["Names"] or ()}
        self._post(self._listener.on_listing, states, asked_s)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        # RuntimeError: the loop is closed, so there is no listener any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _container_event(message: object) -> ContainerEvent | None:
    """The event; None: its shape is unknown."""
    match message:
        case {"Action": str(action), "Actor": {"Attributes": {"name": str(name), **attributes}}}:
            return ContainerEvent(name, action, {str(key): str(value) for key, value in attributes.items()})
    return None
