"""A trainer without a GPU: everything but the gradient step.

    run-api --host 127.0.0.1 --port 8000
    python examples/trainer.py --url http://127.0.0.1:8000 --batch-size 16 --batches 20
    orchestrator serve --env.rollout_server_url http://127.0.0.1:8000 --env.group_size 8 ...

It registers, fetches batches, checks every group as a trainer must rely on it, and computes what a policy
gradient needs: advantages within the group, the trained positions, and the log-probs they were sampled with.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MASKED = -100  # not trained
MASKED_LOGPROB = 1.0  # no log-probability is positive
NO_ANSWER = (OSError, http.client.HTTPException, ValueError)  # refused, too late, broken off, or not whole

Group = dict[str, Any]


class RunApi:
    """The calls of Atropos' run-api that a trainer makes."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def register(
        self,
        *,
        batch_size: int,
        max_token_len: int = 32_768,
        checkpoint_dir: str = "",
        interval: int = 0,
        step: int = 0,
    ) -> None:
        """A second registration is ignored until `/reset_data`: the run-api keeps one trainer."""
        self._call(
            "/register",
            {
                "wandb_group": "example",
                "wandb_project": "example",
                "batch_size": batch_size,
                "max_token_len": max_token_len,
                "checkpoint_dir": checkpoint_dir,
                "save_checkpoint_interval": interval,
                "starting_step": step,
                "num_steps": 1_000_000,
            },
        )

    def batch(self) -> list[Group] | None:
        """The next batch, None while it is not full. The first call opens the run-api to environments."""
        batch: list[Group] | None = self._call("/batch")["batch"]
        return batch or None

    def wait(self, seconds: float) -> None:
        """Returns once the run-api answers, or after so long."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                self.registered()
            except NO_ANSWER:
                time.sleep(0.2)
            else:
                return

    def registered(self) -> bool:
        """Whether the run-api knows a trainer."""
        return bool(self._call("/info", timeout_s=5)["batch_size"] > 0)

    def waiting(self) -> int:
        """Groups that wait until there are enough for a batch."""
        waiting: int = self._call("/status", timeout_s=5)["queue_size"]
        return waiting

    def _call(self, path: str, body: object = None, timeout_s: float = 60) -> Any:
        """Raises one of NO_ANSWER."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
            return json.load(answer)


@dataclass(frozen=True)
class Line:
    """One rollout, ready for a loss. T = its tokens. `logprobs_T` is None where the endpoint gave none.
    `advantages_T`: token by token, of a group with branches; None: `advantage` is that of all."""

    tokens_T: Sequence[int]
    labels_T: Sequence[int]
    logprobs_T: Sequence[float] | None
    advantage: float
    rollout_id: str
    advantages_T: Sequence[float] | None = None


def advantages(scores_G: Sequence[float]) -> list[float]:
    """Each score relative to its group, in standard deviations; 0 where all are equal (GRPO)."""
    mean, spread = sum(scores_G) / len(scores_G), _spread(scores_G)
    return [(score - mean) / spread if spread > 1e-8 else 0.0 for score in scores_G]


def _spread(scores_G: Sequence[float]) -> float:
    mean = sum(scores_G) / len(scores_G)
    return math.sqrt(sum((score - mean) ** 2 for score in scores_G) / len(scores_G))


def check_group(group: Group, group_size: int | None = None) -> None:
    """What a trainer relies on and the run-api does not check. Raises ValueError."""
    tokens_G, masks_G, scores_G = group["tokens"], group["masks"], group["scores"]
    if not len(tokens_G) == len(masks_G) == len(scores_G) or (group_size and len(tokens_G) != group_size):
        raise ValueError(f"a group of {len(tokens_G)} lines, {len(masks_G)} masks, {len(scores_G)} scores")
    if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores_G):
        raise ValueError(f"scores {scores_G}")
    logprobs_G = group.get("inference_logprobs") or [None] * len(tokens_G)
    advantages_G = group.get("advantages")
    if advantages_G is not None and list(map(len, advantages_G)) != list(map(len, tokens_G)):
        raise ValueError("advantages that are not one for each token")
    for tokens_T, mask_T, logprobs_T in zip(tokens_G, masks_G, logprobs_G, strict=True):
        if len(tokens_T) != len(mask_T):
            raise ValueError(f"{len(tokens_T)} tokens, {len(mask_T)} masks")
        if any(mask not in (MASKED, token) for token, mask in zip(tokens_T, mask_T, strict=True)):
            raise ValueError("a mask that is neither -100 nor its token")
        if logprobs_T is None:
            continue
        if len(logprobs_T) != len(tokens_T):
            raise ValueError(f"{len(tokens_T)} tokens, {len(logprobs_T)} log-probs")
        for mask, logprob in zip(mask_T, logprobs_T, strict=True):
            right = logprob == MASKED_LOGPROB if mask == MASKED else math.isfinite(logprob) and logprob <= 0
            if not right:
                raise ValueError(f"log-prob {logprob} at a {'masked' if mask == MASKED else 'trained'} position")


def sequences(group: Group) -> Iterator[Line]:
    """The group's rollouts with their advantages. `labels_T` is what a cross-entropy takes."""
    logprobs_G = group.get("inference_logprobs") or [None] * len(group["tokens"])
    facts_G = group.get("overrides") or [{}] * len(group["tokens"])
    values_G, spread = group.get("advantages") or [None] * len(group["tokens"]), _spread(group["scores"])
    for tokens_T, mask_T, logprobs_T, advantage, facts, values_T in zip(
        group["tokens"], group["masks"], logprobs_G, advantages(group["scores"]), facts_G, values_G, strict=True
    ):
        scaled_T = None if values_T is None else [v / spread if spread > 1e-8 else 0.0 for v in values_T]
        yield Line(tokens_T, mask_T, logprobs_T, advantage, facts.get("rollout_id", ""), scaled_T)


def train(batch: Sequence[Group], step: int) -> str:
    """Where the gradient step would be. With the policy's own log-probs `new_T` at the trained positions, the
    importance ratio is exp(new_T - logprobs_T) and the loss -mean(min(ratio, clipped ratio) * advantage)."""
    lines = [line for group in batch for line in sequences(group)]
    trained = sum(label != MASKED for line in lines for label in line.labels_T)
    pushed = sum(line.advantage > 0 for line in lines)
    scores = [score for group in batch for score in group["scores"]]
    return (
        f"step {step}: {len(batch)} groups, {len(lines)} rollouts, mean score {sum(scores) / len(scores):.3f}, "
        f"{trained} trained tokens, {pushed} rollouts above their group's mean"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0: all batches came and every group was right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the run-api")
    parser.add_argument("--batch-size", type=int, default=16, help="rollouts in a batch, a multiple of group_size")
    parser.add_argument("--batches", type=int, default=10, help="how many to train on")
    parser.add_argument("--max-token-len", type=int, default=32_768, help="longest line it can train on")
    parser.add_argument("--checkpoint-dir", default="", help="where environments keep their positions too")
    parser.add_argument("--checkpoint-interval", type=int, default=0, help="steps between two checkpoints")
    parser.add_argument("--starting-step", type=int, default=0, help="the step it goes on from")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long a step takes")
    parser.add_argument("--wait-seconds", type=float, default=60.0, help="how long the run-api may take to start")
    parser.add_argument("--save", type=Path, help="a file for the batches, one JSON line each")
    options = parser.parse_args(argv)
    api = RunApi(options.url)
    api.wait(options.wait_seconds)
    api.register(
        batch_size=options.batch_size,
        max_token_len=options.max_token_len,
        checkpoint_dir=options.checkpoint_dir,
        interval=options.checkpoint_interval,
        step=options.starting_step,
    )
    step = options.starting_step
    while step < options.starting_step + options.batches:
        batch = api.batch()
        if batch is None:
            time.sleep(0.1)
            continue
        step += 1
        for group in batch:
            check_group(group)
        if sum(len(group["tokens"]) for group in batch) != options.batch_size:
            raise ValueError("a batch that is not full")
        print(train(batch, step), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(batch) + "\n")
        time.sleep(options.step_seconds)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (urllib.error.URLError, ConnectionError, TimeoutError, http.client.HTTPException) as error:
        sys.exit(f"the run-api gives no answer: {error}")
