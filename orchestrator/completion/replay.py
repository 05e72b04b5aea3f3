"""A recorded run as endpoint: `replay:RUN_DIR`.

Completions come from rollouts.jsonl (or rollouts.jsonl.xz), by rollout where its id and task are in the
record, else by task and place in the group, and by number of the call; everything else (containers, code,
tools, scores, groups) happens anew. A prompt that differs from the recorded one still gets the recorded
answer, and is counted: whoever replays can see how far it went its own way. A call that was never recorded
ends the rollout as `record_error`: there is nothing to score, and asking again would not help.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.completion.base import CompletionRequest, Ids, ids_of
from orchestrator.errors import EnvironmentUnusable, RecordError
from orchestrator.typed import typed
from orchestrator.types import Completion, Message

Key = tuple[str, int]  # task id, index in the group
Id = tuple[str, Key]  # rollout id and its place
RECORDING = "rollouts.jsonl"


@dataclass(frozen=True, slots=True)
class _Recorded:
    messages: tuple[Message, ...]
    prompt_ids: Ids | None
    completion: Completion

    def answers(self, request: CompletionRequest) -> bool:
        """Whether this is what was asked then: the same words and, where both sides have ids, the same ids."""
        if self.messages != request.messages:
            return False
        return self.prompt_ids is None or request.prompt_ids is None or self.prompt_ids == request.prompt_ids


class ReplayCompleter:
    """Serves what a run was served. `differing` counts prompts that were not the recorded ones."""

    def __init__(
        self,
        episodes: Mapping[Key, tuple[_Recorded, ...]],
        takes_ids: bool,
        by_id: Mapping[Id, tuple[_Recorded, ...]] | None = None,
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
        episodes: dict[Key, tuple[_Recorded, ...]] = {}
        by_id: dict[Id, tuple[_Recorded, ...]] = {}
        exact = True
        try:
            for number, text in enumerate(_lines(path), 1):
                try:
                    line = json.loads(text)
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
        except (lzma.LZMAError, EOFError) as error:
            raise EnvironmentUnusable(f"{path} is damaged: {error}") from error
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
        recorded = episode[request.sequence - 1]
        self.served += 1
        self.differing += not recorded.answers(request)
        return recorded.completion

    def account(self) -> str:
        """One line for the end of a run: how much was replayed, and how faithfully."""
        prompts = f"{self.differing} of their prompts differed" if self.differing else "every prompt as recorded"
        missing = f"; {self.missing} calls beyond the recording" if self.missing else ""
        return f"{self.served} completions replayed, {prompts}{missing}"

    async def aclose(self) -> None:
        """Nothing is open."""


def _lines(path: Path) -> Iterator[bytes]:
    with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
        yield from file


def _episode(completions: list[dict[str, Any]]) -> tuple[_Recorded, ...]:
    recorded: list[_Recorded] = []
    talk: tuple[Message, ...] = ()
    line: dict[int, Ids] = {}  # ids so far, by segment
    for c in completions:
        talk = (*talk[: c["kept"]], *(typed(Message(m["role"], m["content"])) for m in c["messages"]))
        ids, logprobs, added = c["token_ids"], c["logprobs"], c["prompt_ids"]
        prompt = None if added is None or ids is None else line.get(c["segment"], ids_of()) + ids_of(added)
        if prompt is not None:
            line[c["segment"]] = prompt + ids_of(ids)
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
        recorded.append(_Recorded(talk, prompt, typed(completion)))
    return tuple(recorded)
