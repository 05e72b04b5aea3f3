"""A recorded run as endpoint: `replay:RUN_DIR`.

Completions come from rollouts.jsonl (or rollouts.jsonl.xz), by rollout where its id and task are in the
record, else by task and place in the group, and by number of the call; everything else (containers, code,
tools, scores, groups) happens anew. A prompt that differs from the recorded one still gets the recorded
answer, and is counted: whoever replays can see how far it went its own way. A call that was never recorded
ends the rollout as `record_error`: there is nothing to score, and asking again would not help.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from orchestrator.completion.base import CompletionRequest, Ids, ids_of
from orchestrator.errors import EnvironmentUnusable, RecordError
from orchestrator.run.lines import MAX_LINE_BYTES, loads
from orchestrator.run.typed import typed
from orchestrator.types import Completion, Message

Key = tuple[str, int]  # task id, index in the group
Id = tuple[str, Key]  # rollout id and its place
RECORDING = "rollouts.jsonl"
MAX_UNPACKED_BYTES = 64 << 20  # of rollouts.jsonl.xz; the demo's has 5 MiB. Read, it is some eight times larger
_XZ_MEMORY_BYTES = 128 << 20  # for unpacking: the strongest preset takes 65 MiB
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One call: what its prompt adds to the one before, and what was answered."""

    kept: int
    messages: tuple[Message, ...]
    segment: int
    prompt_ids: Ids | None
    completion: Completion


Episode = tuple[_Recorded, ...]


class ReplayCompleter:
    """Serves what a run was served. `differing` counts prompts that were not the recorded ones."""

    def __init__(
        self,
        episodes: Mapping[Key, Episode],
        takes_ids: bool,
        by_id: Mapping[Id, Episode] | None = None,
    ) -> None:
        self._episodes = episodes
        self._by_id = by_id or {}
        self.takes_ids = takes_ids
        self.served = 0
        self.differing = 0
        self.missing = 0

    @classmethod
    def open(cls, run_directory: Path) -> ReplayCompleter:
        """Blocking. Raises EnvironmentUnusable for a directory without a recording."""
        path = run_directory / RECORDING
        if not path.exists() and (packed := path.with_name(f"{RECORDING}.xz")).exists():
            path = packed
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise EnvironmentUnusable(f"no recorded run in {run_directory}: {path.name} is no file")
        episodes: dict[Key, Episode] = {}
        by_id: dict[Id, Episode] = {}
        exact = True
        try:
            for number, text in enumerate(_lines(path), 1):
                try:
                    line = loads(text)
                    if line.get("score") is None:
                        continue
                    key = (str(line["task_id"]), int(line["index"]))
                    episode = _episode(line["completions"])
                    # Of a task's places the first group's; later ones are other epochs, found by their ids.
                    episodes.setdefault(key, episode)
                    if (rollout_id := line.get("rollout_id")) is not None:  # a recording put together has none
                        by_id[str(rollout_id), key] = episode
                    exact = exact and all(c["prompt_ids"] is not None for c in line["completions"])
                except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                    raise EnvironmentUnusable(f"{path}:{number} is no recorded rollout ({error})") from error
        except (lzma.LZMAError, EOFError, _TooLarge) as error:
            raise EnvironmentUnusable(f"{path} is damaged, or made to be too large: {error}") from error
        except OSError as error:
            raise EnvironmentUnusable(f"no recorded run in {run_directory}: {error.strerror}") from error
        if not episodes:
            raise EnvironmentUnusable(f"{path} holds no rollout that was scored: nothing to replay")
        return cls(episodes, exact, by_id)

    async def sample(self, request: CompletionRequest) -> Completion:
        """The recorded completion of this call. Raises RecordError where there is none."""
        place = (request.task_id, request.index)
        episode = self._by_id.get((request.rollout_id, place), self._episodes.get(place, ()))
        if not 0 < request.sequence <= len(episode):
            self.missing += 1
            raise RecordError(
                f"the recording of task {request.task_id!r}, rollout {request.index}, "
                + (f"ends after {len(episode)} calls" if episode else "does not exist")
            )
        self.served += 1
        self.differing += not _answers(episode[: request.sequence], request)
        return episode[request.sequence - 1].completion

    def account(self) -> str:
        """One line for the end of a run: how much was replayed, and how faithfully."""
        prompts = f"{self.differing} of their prompts differed" if self.differing else "every prompt as recorded"
        missing = f"; {self.missing} calls beyond the recording" if self.missing else ""
        return f"{self.served} completions replayed, {prompts}{missing}"

    async def aclose(self) -> None:
        """Nothing is open."""


class _TooLarge(Exception):
    """A recording that would fill the memory."""


def _lines(path: Path) -> Iterator[bytes]:
    with io.BytesIO(_unpacked(path)) if path.suffix == ".xz" else path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            yield line


def _unpacked(path: Path) -> bytes:
    """Raises LZMAError, EOFError, _TooLarge."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
    text = bytearray()
    with path.open("rb") as file:
        while not decoder.eof:
            packed = file.read(_CHUNK_BYTES) if decoder.needs_input else b""
            if decoder.needs_input and not packed:
                raise EOFError("it ends too early")
            text += decoder.decompress(packed, max_length=_CHUNK_BYTES)
            if len(text) > MAX_UNPACKED_BYTES:
                raise _TooLarge(f"it holds more than {MAX_UNPACKED_BYTES >> 20} MiB; unpack it if you trust it")
    return bytes(text)


def _episode(completions: list[dict[str, Any]]) -> Episode:
    recorded: list[_Recorded] = []
    for c in completions:
        kept, messages = index(c["kept"]), tuple(typed(Message(m["role"], m["content"])) for m in c["messages"])
        ids, logprobs, added = c["token_ids"], c["logprobs"], c["prompt_ids"]
        completion = Completion(
            text=c["text"],
            visible=c["visible"],
            finish_reason=c["finish_reason"],
            tokens_T=None if ids is None else tuple(ids),
            logprobs_T=None if logprobs is None else tuple(logprobs),
            prompt_tokens=c["prompt_tokens"],
            completion_tokens=c["completion_tokens"],
            policy_version=c["policy_version"],
        )
        prompt = None if added is None else ids_of(added)
        recorded.append(_Recorded(kept, messages, c["segment"], prompt, typed(completion)))
    return tuple(recorded)


def _answers(episode: Episode, request: CompletionRequest) -> bool:
    """Whether its last call is what is asked: the same words and, where both sides have ids, the same ids."""
    talk: tuple[Message, ...] = ()
    for call in episode:
        talk = (*talk[: call.kept], *call.messages)
    if talk != request.messages:
        return False
    prompt = _prompt(episode)
    return prompt is None or request.prompt_ids is None or prompt == request.prompt_ids


def _prompt(episode: Episode) -> Ids | None:
    """The ids of the last call's whole prompt: its segment's, prompts and samples one after the other."""
    last, prompt = episode[-1], ids_of()
    if last.prompt_ids is None or last.completion.tokens_T is None:
        return None
    for call in episode:
        if call.segment == last.segment and call.prompt_ids is not None and call.completion.tokens_T is not None:
            prompt += call.prompt_ids
            if call is not last:
                prompt += ids_of(call.completion.tokens_T)
    return prompt
