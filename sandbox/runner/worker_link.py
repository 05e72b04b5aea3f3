"""The runner's side of the current code worker: frames out, frames in, output collected meanwhile.

Everything that comes from the worker may be hostile: frames are capped, parsed as plain data, and must be
JSON objects. Every wait for the worker has a deadline, when sending and when receiving.
"""

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.control import CheckBegun, ControlLost, OutputBegun, RunnerEnd, WorkerEnded, WorkerStarted
from sandbox.errors import (
    EpisodeCrashed,
    Interrupted,
    PlaceUnusable,
    StepTimeout,
    SupervisorGone,
    WorkerDied,
    WorkerMisbehaved,
)
from sandbox.runner.bounded_output import BoundedOutput
from sandbox.types import Place

MAX_FRAME_BYTES = 2 << 20  # more than twice an answer of 64 Ki characters, each escaped to twelve
_READ_BYTES = 64 * 1024
_PROBLEM_CHARS = 500
_MAX_LEFT_IN_PIPE = 1 << 20  # what a pipe can hold at most for an ordinary user
_PLACE_LIMIT_S = 30.0
_HEALTH_MARGIN_S = 20.0
_DEATH_NEWS_S = 2.0  # how long pid 1 may take to announce a worker's end after its pipe has closed

N = TypeVar("N", WorkerStarted, OutputBegun, CheckBegun)


class WorkerLink:
    """Frames to and from one worker at a time; `replace` gives the next one."""

    def __init__(self, control: RunnerEnd) -> None:
        self._control = control
        self._max_output_chars = 0
        self._output = BoundedOutput(0)
        self._worker: WorkerStarted | None = None
        self._output_open = False
        self._received = bytearray()
        self.place = Place()

    @property
    def number(self) -> int:
        """Number of the current worker; `replace` changes it."""
        return self._current().number

    def limit_output(self, max_chars: int) -> None:
        """Sets how many characters of a step's output are kept from now on."""
        self._max_output_chars = max_chars
        self._output = BoundedOutput(max_chars)

    def replace(self) -> None:
        """Takes a fresh worker; all processes of the old one are dead. Raises SupervisorGone."""
        news = self._end_worker(self._control.ask_for_replacement, WorkerStarted)
        for fd in (news.commands, news.frames, news.output):
            os.set_blocking(fd, False)
        self._worker, self._output_open = news, True
        self._received.clear()
        self._output = BoundedOutput(self._max_output_chars)

    def greet(self) -> None:
        """Sees that a fresh worker works. Raises WorkerLost."""
        deadline = time.monotonic() + _PLACE_LIMIT_S
        self.send({"kind": "place", "cwd": "", "environment": {}}, deadline)
        self.receive(deadline)

    def close(self) -> None:
        """Ends the worker, and what gives workers."""
        self._drop_worker()
        self._control.close()

    def settle(self) -> None:
        """Sends a fresh worker to the place where its code is to work. Raises WorkerLost; PlaceUnusable if it
        cannot work there."""
        if self.place == Place():
            return
        deadline = time.monotonic() + _PLACE_LIMIT_S
        place = {"cwd": self.place.cwd, "environment": dict(self.place.environment)}
        self.send({"kind": "place", **place}, deadline)
        if (problem := self.receive(deadline).get("error")) is not None:
            raise PlaceUnusable(f"the task's working directory cannot be used: {str(problem)[:_PROBLEM_CHARS]}")

    def demand_healthy(self, healthcheck: pb.Healthcheck) -> None:
        """Has a healthcheck run where the task's code works. Raises PlaceUnusable if it fails for good;
        SupervisorGone; EpisodeCrashed if nobody knows."""
        from sandbox.pid1.healthcheck import HEALTHY, UNHEALTHY, Healthcheck  # most tasks have none

        assignment = pb.Assignment(
            working_directory=self.place.cwd, environment=self.place.environment, healthcheck=healthcheck
        )
        limit_s = Healthcheck.of(healthcheck).longest_s + _HEALTH_MARGIN_S
        deadline, words = time.monotonic() + limit_s, b""
        pipe = self._ask(lambda: self._control.ask_for_healthcheck(assignment), CheckBegun).pipe
        try:
            while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (piece := os.read(pipe, _READ_BYTES)):
                    break
                words += piece
            else:
                raise EpisodeCrashed(f"the healthcheck did not end within {limit_s:g} s")
        finally:
            os.close(pipe)
        if words.startswith(UNHEALTHY):
            raise PlaceUnusable(words.removeprefix(UNHEALTHY).decode("utf-8", "replace"))
        if words != HEALTHY:
            raise EpisodeCrashed("what ran the healthcheck ended without a word")

    def open_output(self, limits: pb.OutputLimits) -> int:
        """Ends the worker; returns a pipe with its files. Raises SupervisorGone."""
        return self._end_worker(lambda: self._control.ask_for_output(limits), OutputBegun).pipe

    def take_output(self) -> str:
        """What was printed since the last call, shortened."""
        text = self._output.text()
        self._output = BoundedOutput(self._max_output_chars)
        return text

    def give_back_output(self, text: str) -> None:
        """Makes `text` the only output collected so far."""
        self._output = BoundedOutput(self._max_output_chars)
        self._output.append(text.encode("utf-8", "replace"))

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Raises StepTimeout, WorkerDied, WorkerMisbehaved. `deadline` is of time.monotonic."""
        worker = self._current()
        body = json.dumps(message).encode("ascii")
        rest = memoryview(len(body).to_bytes(4, "big") + body)
        while rest:
            try:
                rest = rest[os.write(worker.commands, rest) :]
            except BlockingIOError:
                self._wait(deadline, writing=True)
            except BrokenPipeError:
                self._await_death()

    def receive(self, deadline: float, bell: int = -1) -> dict[str, Any]:
        """The next frame. Raises StepTimeout, WorkerDied, WorkerMisbehaved; Interrupted: `bell` can be read."""
        while (message := self._next_frame()) is None:
            if self._wait(deadline, bell=bell) and not self._read_frames():
                self._await_death()
        return message

    def drain_output(self) -> None:
        """Takes what is in the output pipe now, when the step that printed it is over."""
        left = _MAX_LEFT_IN_PIPE
        while self._output_open and left > 0 and (read := self._read_output()):
            left -= read

    # ------------------------------------------------------------ waiting

    def _wait(self, deadline: float, writing: bool = False, bell: int = -1) -> bool:
        """Until a frame may be there (True), or the pipe may take more (False). Collects output meanwhile."""
        worker = self._current()
        while True:
            poll = select.poll()
            poll.register(self._control, select.POLLIN)
            if self._output_open:
                poll.register(worker.output, select.POLLIN)
            if bell >= 0:
                poll.register(bell, select.POLLIN)
            if writing:
                poll.register(worker.commands, select.POLLOUT)
            else:
                poll.register(worker.frames, select.POLLIN)
            left = deadline - time.monotonic()
            if left <= 0:
                raise StepTimeout
            ready = dict(poll.poll(left * 1000))
            if ready.get(self._control.fileno(), 0) & select.POLLHUP:  # whatever the worker still says
                raise SupervisorGone("pid 1 is gone")
            if bell in ready:
                raise Interrupted
            if worker.output in ready:
                self._read_output()
            if worker.frames in ready:
                return True
            if worker.commands in ready:
                return False
            if self._control.fileno() in ready:
                self._hear_of_death()

    def _hear_of_death(self) -> None:
        try:
            news = self._control.receive()
        except ControlLost:
            raise SupervisorGone("pid 1 is gone") from None
        if isinstance(news, WorkerEnded) and news.number == self._current().number:
            self.drain_output()
            raise WorkerDied(news.status)

    def _await_death(self) -> NoReturn:
        """The worker's end of a pipe is closed: the worker has ended, or its code closed the pipe."""
        deadline = time.monotonic() + _DEATH_NEWS_S
        # Looks once more at the end: after a standstill of the machine the news is there.
        while select.select([self._control], [], [], max(0.0, deadline - time.monotonic()))[0]:
            self._hear_of_death()
        raise WorkerMisbehaved("it closed its pipe to the agent")

    # ------------------------------------------------------------ reading

    def _read_output(self) -> int:
        """Bytes read; 0: none are there now, or the pipe has ended."""
        try:
            chunk = os.read(self._current().output, _READ_BYTES)
        except BlockingIOError:
            return 0
        self._output_open = bool(chunk)
        self._output.append(chunk)
        return len(chunk)

    def _read_frames(self) -> bool:
        """Returns whether the pipe is still open."""
        try:
            chunk = os.read(self._current().frames, _READ_BYTES)
        except BlockingIOError:
            return True
        self._received += chunk
        return bool(chunk)

    def _next_frame(self) -> dict[str, Any] | None:
        if len(self._received) < 4:
            return None
        size = int.from_bytes(self._received[:4], "big")
        if size > MAX_FRAME_BYTES:
            raise WorkerMisbehaved("it sent more than a frame may hold")
        if len(self._received) < 4 + size:
            return None
        body = bytes(self._received[4 : 4 + size])
        del self._received[: 4 + size]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise WorkerMisbehaved("it sent an invalid frame") from None
        if not isinstance(message, dict):
            raise WorkerMisbehaved("it sent an invalid frame")
        return message

    # ------------------------------------------------------------ the current worker

    def _current(self) -> WorkerStarted:
        assert self._worker is not None, "replace() comes first"
        return self._worker

    def _end_worker(self, ask: Callable[[], None], answer: type[N]) -> N:
        """Closes the worker's pipes, asks pid 1 for what comes next, and waits for it. Raises SupervisorGone."""
        self._drop_worker()
        return self._ask(ask, answer)

    def _drop_worker(self) -> None:
        if self._worker is not None:
            for fd in (self._worker.commands, self._worker.frames, self._worker.output):
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._worker = None

    def _ask(self, ask: Callable[[], None], answer: type[N]) -> N:
        """Asks pid 1 and waits for its answer. Raises SupervisorGone."""
        try:
            ask()
            while not isinstance(news := self._control.receive(), answer):
                pass  # older news
        except ControlLost:
            raise SupervisorGone("pid 1 is gone") from None
        return news
