"""What rollouts under way were served, beside the record: a killed run goes on with them.

`under-way/` in the run directory has a file for each rollout that was served something and whose line is not in
the record yet. A line begins a sandbox, or is a completion or a tool call, in the order in which they were served.
It saves tokens, and no more: what cannot be written, or read again, is left out by name, and its rollout drawn
again.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NotRequired, TypeVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from orchestrator.run.line import tool_call_line, turn_line, turn_of
from orchestrator.run.lines import MAX_LINE_BYTES, MAX_TALK, demand_modest, dumps, line_start, texts
from orchestrator.run.schema import CompletionLine, Real, read_line
from orchestrator.types import (
    AgentSpec,
    Branch,
    Continued,
    Crossing,
    Entry,
    Parting,
    Record,
    RolloutPlan,
    Sampling,
    ToolCall,
    Tools,
    Turn,
    gathered,
)

log = logging.getLogger(__name__)

FOLDER = "under-way"
SUFFIX = ".jsonl"
MOST_WAITING = 10_000  # lines that were not written yet: a slow disk costs files here, and no memory
MOST_COPIED = 4 * MAX_TALK  # where sandboxes begin and part: a file may come from anybody
_NEW = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

T = TypeVar("T")


class _HeadLine(TypedDict):
    """A sandbox begins: with the task, or, where the rollout was `continued`, behind the lines before."""

    schema: Literal[1]
    rollout_id: str
    task_id: str
    sampling: Sampling
    agent: AgentSpec
    started_at: Real
    branch: NotRequired[Branch | None]
    continued: tuple[Continued, ...]


class _TurnLine(TypedDict):
    turn: CompletionLine


class _CallLine(TypedDict):
    tool_call: ToolCall


class _CrossingLine(TypedDict):
    crossing: Crossing


class _PartingLine(TypedDict):
    parting: Parting


_LINE: TypeAdapter[Any] = TypeAdapter(_HeadLine | _TurnLine | _CallLine | _CrossingLine | _PartingLine)


@dataclass(slots=True)
class _Rollout:
    """`plan`: whose sandbox was served last. `tools`: of the completion before. `size`: of its file, in bytes.
    `given_up`: that is no more."""

    plan: RolloutPlan | None = None
    tools: Tools = ()
    size: int = 0
    given_up: bool = False


@dataclass(eq=False, slots=True)
class UnderWay:
    """The folder of one run directory. A thread of its own writes, in the order of the calls."""

    folder: Path
    fsync: bool = False
    _rollouts: dict[str, _Rollout] = field(default_factory=dict)
    _waiting: int = 0
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "under-way"))

    def served(self, plan: RolloutPlan, started_at: float, one: Entry) -> None:
        """Writes it, soon. `started_at`: Unix time of the record's begin."""
        rollout = self._rollouts.setdefault(plan.rollout_id, _Rollout())
        if self._waiting >= MOST_WAITING and not rollout.given_up:
            rollout.given_up = True
            self._thread.submit(self._give_up, plan.rollout_id, f"{MOST_WAITING} lines wait for the disk")
        if not rollout.given_up:
            self._waiting += 1
            self._thread.submit(self._write, rollout, plan, started_at, one)

    async def over(self, rollout_id: str, *, kept: bool) -> None:
        """The line of this attempt is on disk. `kept`: another attempt may go on with what it was served."""
        if self._rollouts.pop(rollout_id, None) is not None:
            await self._apart(self._remove, rollout_id, kept)

    async def record(self, plan: RolloutPlan, ids: Sequence[str]) -> Record | None:
        """What a rollout that did not end was served, for a plan that goes on with it. `ids`: of its attempts, the
        last first; its file has the plan's name from now on."""
        return await self._apart(self._read, plan, ids)

    async def _apart(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(work, *arguments)))

    def close(self) -> None:
        """Waits until all is written. An empty folder is removed. Idempotent."""
        self._thread.shutdown()
        with suppress(OSError):  # there is none, or it holds something
            self.folder.rmdir()

    def _path(self, rollout_id: str) -> Path:
        return self.folder / f"{rollout_id}{SUFFIX}"

    # ------------------------------------------------------------ in the thread

    def _write(self, rollout: _Rollout, plan: RolloutPlan, started_at: float, one: Entry) -> None:
        self._waiting -= 1
        if rollout.given_up:
            return
        try:
            lines = []
            if plan is not rollout.plan:
                lines.append(dumps(_head(plan, started_at)))
                rollout.plan, rollout.tools = plan, ()
            lines.append(dumps(_line(one, rollout.tools)))
            rollout.tools = one.tools if isinstance(one, Turn) else rollout.tools
            text = b"".join(line + b"\n" for line in lines)
            rollout.size += len(text)
            demand_modest(text)
            if rollout.size > MAX_LINE_BYTES:
                raise ValueError(f"over {MAX_LINE_BYTES} bytes")
            self._append(self._path(plan.rollout_id), text)
        except (OSError, ValueError) as error:  # ValueError: what is written can be read
            rollout.given_up = True
            self._give_up(plan.rollout_id, str(error))

    def _append(self, path: Path, text: bytes) -> None:
        try:
            file = os.open(path, _NEW, 0o666)
        except FileNotFoundError:
            self.folder.mkdir(exist_ok=True)
            file = os.open(path, _NEW, 0o666)
        try:
            if os.write(file, text) < len(text):
                raise OSError("the disk is full")
            if self.fsync:
                os.fsync(file)
        finally:
            os.close(file)

    def _give_up(self, rollout_id: str, why: str) -> None:
        log.warning("%s is not written on, a killed run draws it again: %s", self._path(rollout_id), why)
        self._remove(rollout_id, kept=False)

    def _remove(self, rollout_id: str, kept: bool) -> None:
        """Where the file is `kept`, all of it is written now."""
        if not kept:
            with suppress(OSError):  # there is none
                self._path(rollout_id).unlink()

    def _read(self, plan: RolloutPlan, ids: Sequence[str]) -> Record | None:
        for rollout_id in ids:
            path = self._path(rollout_id)
            try:
                record = _record(path, ids, plan)
                if record is not None:
                    with path.open("r+b") as file:
                        end = file.truncate(line_start(file.fileno(), path.stat().st_size))
                    path.replace(self._path(plan.rollout_id))
                    self._rollouts[plan.rollout_id] = _Rollout(size=end)
                    return record
                self._remove(rollout_id, kept=False)  # else what is drawn again came behind half a line
            except (OSError, ValueError) as error:
                log.warning("%s is left out, and its rollout drawn again: %s", path, error)
                self._remove(rollout_id, kept=False)
        return None


def files_in(directory: Path) -> Mapping[str, Path]:
    """The files of the run in `directory`, by rollout id."""
    return {path.stem: path for path in sorted((directory / FOLDER).glob(f"*{SUFFIX}")) if path.is_file()}


def served_so_far(directory: Path, rollout_id: str) -> Record | None:
    """What this rollout was served by now. Blocks. None: nothing that is on disk, or can be read."""
    with suppress(OSError, ValueError):
        return _record(directory / FOLDER / f"{rollout_id}{SUFFIX}")
    return None


def under_way_in(directory: Path) -> Iterator[tuple[str, Record]]:
    """The rollouts that a killed run left under way, each with its id. What cannot be read is left out."""
    for rollout_id, path in files_in(directory).items():
        with suppress(OSError, ValueError):
            if (record := _record(path)) is not None:
                yield rollout_id, record


def _head(plan: RolloutPlan, started_at: float) -> dict[str, Any]:
    prefix = plan.prefix
    return {
        "schema": 1,
        "rollout_id": plan.rollout_id,
        "task_id": plan.task.task_id,
        "sampling": asdict(plan.sampling),
        "agent": asdict(plan.agent),
        "started_at": started_at,
        "branch": asdict(prefix.branch) if prefix and prefix.branch else None,
        "continued": [asdict(one) for one in prefix.continued] if prefix else [],
    }


def _line(one: Entry, tools: Tools) -> dict[str, Any]:
    """`tools`: of the completion before."""
    if isinstance(one, ToolCall):
        return {"tool_call": tool_call_line(one)}
    if isinstance(one, Parting):
        return {"parting": asdict(one)}
    if isinstance(one, Crossing):
        return {"crossing": asdict(one)}
    return {"turn": turn_line(one, {} if one.tools is tools or one.tools == tools else {"tools": one.tools})}


def _record(path: Path, ids: Sequence[str] | None = None, plan: RolloutPlan | None = None) -> Record | None:
    """None: there is no such file, or nothing in it. `ids`, `plan`: whose it must be. Raises OSError,
    ValueError."""
    if not path.is_file():
        return None
    if path.is_symlink() or path.stat().st_size > MAX_LINE_BYTES:
        raise ValueError(f"it is a link, or has over {MAX_LINE_BYTES} bytes")
    record: Record | None = None
    served: list[Entry] = []
    tools: Tools = ()
    length = together = copied = 0  # messages of the last prompt; of all, and other entries; each time gathered
    for line in texts(path):
        if not line.is_whole:
            break  # its writer was killed
        value = read_line(_LINE, line.text)
        if "started_at" in value:
            _demand_of(value, ids, plan)
            copied += together
            goes_on, began = value["continued"], record and gathered(served, record)
            before = Record(value["started_at"], branch=value.get("branch"))
            if goes_on and began is None:
                raise ValueError("it goes on with nothing")
            record, served, tools = _behind(began or before, goes_on) if goes_on else before, [], ()
        elif record is None:
            raise ValueError("its first line does not say what it is")
        elif "turn" in value:
            turn = turn_of(value["turn"], tools)
            tools = turn.tools
            served.append(turn)
            length = min(length, turn.kept) + len(turn.messages)
            together += length
        else:
            served.append(next(value[name] for name in ("tool_call", "crossing", "parting") if name in value))
            together += 1
            copied += together * ("parting" in value)
        if together > MAX_TALK or copied > MOST_COPIED:
            raise ValueError(f"over {MAX_TALK} messages in its prompts together, or too many sandboxes")
    if record is None:
        return None
    record = gathered(served, record)
    return record if record.turns else None


def _behind(record: Record, continued: tuple[Continued, ...]) -> Record:
    """What a sandbox is behind that goes on after the last of `continued`."""
    return replace(
        Record(record.started_at, record.turns, record.tool_calls, branch=record.branch),
        continued=continued,
        crossings=record.crossings,
    )


def _demand_of(head: _HeadLine, ids: Sequence[str] | None, plan: RolloutPlan | None) -> None:
    """Raises ValueError for a rollout that the plan is not of."""
    if ids is not None and head["rollout_id"] not in ids:
        raise ValueError(f"it is of rollout {head['rollout_id'][:80]!r}")
    if plan is None:
        return
    ours = plan.task.task_id, plan.sampling, plan.agent
    if (head["task_id"], head["sampling"], head["agent"]) != ours:
        raise ValueError("its task, sampling or agent is another one")
