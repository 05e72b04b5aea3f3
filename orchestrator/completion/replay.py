"""A recorded run as endpoint: `replay:RUN_DIR`.

Completions come from rollouts.jsonl (or rollouts.jsonl.xz), by rollout id where id and task are in the record,
else by task and place in the group, and by the call's messages and number; everything else (containers, code,
tools, scores, groups) happens anew. A prompt that differs from the recorded one still gets the recorded answer and
is counted, which shows how far a replay went its own way. A call that was never recorded ends the rollout as
`record_error`: there is nothing to score, and asking again would not help.

Only where a rollout's line begins is kept in memory; the line is read when its rollout is played.
"""

from __future__ import annotations

import asyncio
import io
import lzma
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.completion.base import CompletionRequest, Ids, ids_of
from orchestrator.errors import EnvironmentUnusable, RecordError
from orchestrator.run.excerpts import read_episode
from orchestrator.run.files import record_of
from orchestrator.run.frames import UNCLOSED
from orchestrator.run.lines import text_at, texts
from orchestrator.types import Completion, Turn, conversations

Key = tuple[str, int]  # task id, index in the group
Id = tuple[str, Key]  # rollout id and its place
RECORDING = "rollouts.jsonl"
MAX_UNPACKED_BYTES = 64 << 20  # of rollouts.jsonl.xz; the demo's has 5 MiB. Parsed, it is some eight times larger
_XZ_MEMORY_BYTES = 128 << 20  # for unpacking: the strongest preset takes 65 MiB
_PARSED = 64  # rollouts that were asked for last; those at play ask several times
Recording = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """How much was replayed, and how faithfully. `differing`: prompts that were not the recorded ones. `missing`:
    calls beyond the recording."""

    served: int
    differing: int
    missing: int

    def __add__(self, other: Replayed) -> Replayed:
        return Replayed(self.served + other.served, self.differing + other.differing, self.missing + other.missing)

    def __sub__(self, other: Replayed) -> Replayed:
        return Replayed(self.served - other.served, self.differing - other.differing, self.missing - other.missing)

    def __str__(self) -> str:
        prompts = f"{self.differing} of their prompts differed" if self.differing else "every prompt as recorded"
        missing = f"; {self.missing} calls beyond the recording" if self.missing else ""
        return f"{self.served} completions replayed, {prompts}{missing}"


@dataclass(eq=False, slots=True)
class ReplayCompleter:
    """Serves the completions of a recorded run."""

    guides = True  # what was recorded keeps to what was asked for then

    line_at: Callable[[int], bytes]
    episodes: Mapping[Key, int]
    takes_ids: bool
    by_id: Mapping[Id, int]
    _parsed: OrderedDict[int, Recording] = field(default_factory=OrderedDict)
    replayed: Replayed = field(default_factory=lambda: Replayed(0, 0, 0))  # so far

    @classmethod
    def open(cls, run_directory: Path) -> ReplayCompleter:
        """Reads a recording; blocking. Raises EnvironmentUnusable for a directory without one."""
        path = record_of(run_directory) or run_directory / RECORDING
        if not path.exists() and (packed := path.with_name(f"{RECORDING}.xz")).exists():
            path = packed
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise EnvironmentUnusable(f"no recorded run in {run_directory}: {path.name} is no file")
        episodes: dict[Key, int] = {}
        by_id: dict[Id, int] = {}
        exact = True
        try:
            lines, line_at = _unpacked(path) if path.suffix == ".xz" else _on_disk(path)
            for number, (offset, text) in enumerate(lines, 1):
                try:
                    episode = read_episode(text)
                except ValueError as error:
                    if not text.strip() or not text.endswith(b"\n"):
                        continue  # what a killed run left at the end
                    raise EnvironmentUnusable(f"{path}:{number} is no recorded rollout ({error})") from error
                if episode is None:
                    continue
                key = (episode.task_id, episode.index)
                # A task's first group stands for the task; groups of later epochs are found by rollout id.
                episodes.setdefault(key, offset)
                if episode.rollout_id is not None:
                    by_id[episode.rollout_id, key] = offset
                own = (turn for turn in episode.turns if not turn.inherited)
                exact = exact and all(turn.prompt_ids is not None for turn in own)
        except (lzma.LZMAError, EOFError, _TooLarge) as error:
            raise EnvironmentUnusable(f"{path} is damaged, or made to be too large: {error}") from error
        except OSError as error:
            raise EnvironmentUnusable(f"no recorded run in {run_directory}: {error.strerror}") from error
        if not episodes:
            raise EnvironmentUnusable(f"{path} holds no rollout that was scored: nothing to replay")
        return cls(line_at, episodes, exact, by_id)

    async def sample(self, request: CompletionRequest) -> Completion:
        """The recorded completion of this call. Raises RecordError where it was not recorded."""
        place = (request.task_id, request.index)
        offset = self.by_id.get((request.rollout_id, place), self.episodes.get(place))
        episode = () if offset is None else await self._episode(offset, place)
        number = _number(episode, request)
        if number is None:
            self.replayed += Replayed(0, 0, 1)
            raise RecordError(
                f"the recording of task {request.task_id!r}, rollout {request.index}, "
                + (
                    f"ends after {len(episode)} calls, without number {request.sequence}"
                    if episode
                    else "does not exist"
                )
            )
        self.replayed += Replayed(1, int(not _answers(episode[:number], request)), 0)
        return episode[number - 1].completion

    async def _episode(self, offset: int, place: Key) -> Recording:
        """Raises RecordError if the file is no longer what it was."""
        if (recording := self._parsed.pop(offset, None)) is None:
            try:
                recording = await asyncio.to_thread(lambda: _served(self.line_at(offset), place))
            except (OSError, ValueError) as error:
                raise RecordError(f"the recording cannot be read any more: {error}") from error
        self._parsed[offset] = recording  # as the last one
        while len(self._parsed) > _PARSED:
            self._parsed.popitem(last=False)
        return recording

    async def aclose(self) -> None:
        """Nothing is open."""


def _served(text: bytes, place: Key) -> Recording:
    """Raises ValueError."""
    episode = read_episode(text)
    if episode is None or (episode.task_id, episode.index) != place:
        raise ValueError("it is not the file that it was")
    return episode.turns


class _TooLarge(Exception):
    """A recording that would fill the memory."""


Lines = tuple[Iterator[tuple[int, bytes]], Callable[[int], bytes]]  # (offset, line) of all; the line at an offset


def _on_disk(path: Path) -> Lines:
    path.stat()  # raises OSError where there is none
    # The last frame is not closed where the run goes on, or was killed.
    lines = ((line.offset, line.text) for line in texts(path) if line.text != UNCLOSED)
    return lines, lambda offset: text_at(path, offset)


def _unpacked(path: Path) -> Lines:
    """Raises LZMAError, EOFError, _TooLarge."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
    with path.open("rb") as file:
        content = decoder.decompress(file.read(MAX_UNPACKED_BYTES), max_length=MAX_UNPACKED_BYTES + 1)
    if len(content) > MAX_UNPACKED_BYTES:
        raise _TooLarge(f"it holds more than {MAX_UNPACKED_BYTES >> 20} MiB; unpack it if you trust it")
    if not decoder.eof:
        raise EOFError("it ends too early")

    def lines() -> Iterator[tuple[int, bytes]]:
        offset = 0
        for line in io.BytesIO(content):
            yield offset, line
            offset += len(line)

    def line_at(offset: int) -> bytes:
        end = content.find(b"\n", offset) + 1
        return content[offset : end or len(content)]

    return lines(), line_at


def _number(episode: Recording, request: CompletionRequest) -> int | None:
    """Which call of the episode this request is, from 1 on: the one of its sequence number. The numbers of a
    program's parallel requests are chance, so a call with its very messages comes first."""
    if request.sequence > max((turn.sequence for turn in episode), default=0):
        return None
    same = [n for n, talk in enumerate(conversations(episode), 1) if talk == request.messages]
    by_number = [n for n, turn in enumerate(episode, 1) if turn.sequence == request.sequence]
    return next(iter([n for n in by_number if n in same] or same or by_number), None)


def _answers(episode: Recording, request: CompletionRequest) -> bool:
    """Whether the episode's last call is this request: equal messages and, where both have ids, equal ids."""
    *_, talk = conversations(episode)
    if talk != request.messages:
        return False
    prompt = _prompt(episode)
    return prompt is None or request.prompt_ids is None or prompt == request.prompt_ids


def _prompt(episode: Recording) -> Ids | None:
    """The ids of the last call's whole prompt: all prompts and samples of its segment before it."""
    last, prompt = episode[-1], ids_of()
    if last.prompt_ids is None or last.completion.tokens_T is None:
        return None
    for call in episode:
        if call.abandoned and call is not last:
            continue  # the line went on before it
        if call.segment == last.segment and call.prompt_ids is not None and call.completion.tokens_T is not None:
            prompt += ids_of(call.prompt_ids)
            if call is not last:
                prompt += ids_of(call.completion.tokens_T)
    return prompt
