"""A recorded run as endpoint: `replay:RUN_DIR`.

Completions come from rollouts.jsonl, by task, place in the group and number of the call; everything
else (containers, code, tools, scores, groups) happens anew. A prompt that differs from the recorded
one still gets the recorded answer, and is counted: whoever replays can see how far it went its own way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.completion.base import CompletionRequest
from orchestrator.errors import CompletionError, EnvironmentUnusable
from orchestrator.types import Completion, Message

Key = tuple[str, int]  # task id, index in the group


@dataclass(frozen=True, slots=True)
class _Recorded:
    messages: tuple[Message, ...]
    completion: Completion


class ReplayCompleter:
    """Serves what a run was served. `differing` counts prompts that were not the recorded ones."""

    def __init__(self, episodes: Mapping[Key, tuple[_Recorded, ...]], takes_ids: bool) -> None:
        self._episodes = episodes
        self.takes_ids = takes_ids
        self.served = 0
        self.differing = 0

    @classmethod
    def open(cls, run_directory: Path) -> ReplayCompleter:
        """Blocking. Raises EnvironmentUnusable for a directory without a recording."""
        path = run_directory / "rollouts.jsonl"
        episodes: dict[Key, tuple[_Recorded, ...]] = {}
        exact = True
        try:
            with path.open("rb") as file:
                for number, text in enumerate(file, 1):
                    try:
                        line = json.loads(text)
                        if line.get("score") is None:
                            continue
                        key = (str(line["task_id"]), int(line["index"]))
                        # The first group of a task is the one to replay; later ones are other epochs.
                        episodes.setdefault(key, _episode(line["completions"]))
                        exact = exact and all(c["prompt_ids"] is not None for c in line["completions"])
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        raise EnvironmentUnusable(f"{path}:{number} is no recorded rollout ({error})") from error
        except OSError as error:
            raise EnvironmentUnusable(f"no recorded run in {run_directory}: {error.strerror}") from error
        if not episodes:
            raise EnvironmentUnusable(f"{path} holds no rollout that was scored: nothing to replay")
        return cls(episodes, exact)

    async def sample(self, request: CompletionRequest) -> Completion:
        episode = self._episodes.get((request.task_id, request.index))
        if episode is None:
            raise CompletionError(f"the recording has no rollout {request.index} of task {request.task_id!r}")
        if request.sequence > len(episode):
            raise CompletionError(
                f"the recording of task {request.task_id!r}, rollout {request.index} "
                f"ends after {len(episode)} calls"
            )
        recorded = episode[request.sequence - 1]
        self.served += 1
        self.differing += recorded.messages != request.messages
        return recorded.completion

    async def aclose(self) -> None:
        """Nothing is open."""


def _episode(completions: list[dict[str, Any]]) -> tuple[_Recorded, ...]:
    recorded: list[_Recorded] = []
    talk: tuple[Message, ...] = ()
    for c in completions:
        talk = (*talk[: c["kept"]], *(Message(m["role"], m["content"]) for m in c["messages"]))
        ids, logprobs = c["token_ids"], c["logprobs"]
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
        recorded.append(_Recorded(talk, completion))
    return tuple(recorded)
