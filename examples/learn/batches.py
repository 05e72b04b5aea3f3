"""The batch of a step: taken from the run-api, checked, kept on disk. It needs no torch."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from examples.trainer import NO_ANSWER, Group, RunApi, check_group, sequences

POLL_S = 0.5
Thing = TypeVar("Thing")


class Unfit(Exception):
    """The batches are of no use, and no later one will be of more. One line for the user."""


def next_batch(
    api: RunApi, batch_size: int, longest: int, step: int, kept: Path, *, logprobs: bool
) -> list[Group]:
    """Waits for the batch that follows `step` steps; one that was taken already is in `kept`. Registers whenever
    the run-api knows no trainer, as after its restart. A wrong batch is left out, and one line says why.

    `logprobs`: whether there must be some. Raises Unfit where there are none.
    """
    while not kept.exists():
        try:
            if not api.registered():
                api.register(batch_size=batch_size, max_token_len=longest, step=step)
            batch = api.batch()
        except NO_ANSWER:
            batch = None
        if batch is None:
            time.sleep(POLL_S)
            continue
        try:
            check(batch, batch_size, step)
        except ValueError as error:
            print(f"trainer: a batch is left out: {error}", file=sys.stderr, flush=True)
            continue
        if logprobs and not all(group.get("inference_logprobs") for group in batch):
            raise Unfit("GRPO needs inference_logprobs, and a group has none: the model's server tells none")
        write_whole(kept, json.dumps(batch))
    read: list[Group] = json.loads(kept.read_text("utf-8"))
    return read


def check(batch: Sequence[Group], batch_size: int, step: int) -> None:
    """Raises ValueError where the policy after `step` steps cannot be trained on it. A server that does not tell
    its version is believed."""
    for group in batch:
        check_group(group)
        list(sequences(group))  # raises where there are more facts than rollouts, or fewer
    if (rollouts := sum(len(group["tokens"]) for group in batch)) != batch_size:
        raise ValueError(f"{rollouts} rollouts and not {batch_size}")
    told = [facts.get("policy_version") for group in batch for facts in group.get("overrides") or ()]
    others = {Path(str(version)).name for version in told if version} - {f"policy-{step}"}
    if others:
        raise ValueError(f"it was sampled by {', '.join(sorted(others))} and not by policy-{step}")


def evenly(things: Sequence[Thing], most: int) -> list[Sequence[Thing]]:
    """As few parts of at most `most` as there can be, nearly equal: each makes a step of the optimizer, and Adam's
    steps are of one size however little they are made of."""
    parts = -(-len(things) // most)
    return [things[n * len(things) // parts : (n + 1) * len(things) // parts] for n in range(parts)]


def write_whole(path: Path, text: str) -> None:
    """The file is there whole or not at all, also where two processes write it."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, "utf-8")
    part.replace(path)
