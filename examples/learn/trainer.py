"""A trainer for Atropos' run-api on a CPU: GRPO or expert iteration on a LoRA adapter.

    python -m examples.learn.trainer --url http://127.0.0.1:8000 --weights model.gguf --folder policy \
        --algorithm grpo --batch-size 64 --steps 8

It takes a batch, makes a training step of it, and writes the next adapter as `policy-N.gguf`, for whoever serves
the model. A batch is on disk before it is trained on, and a step is done when `step-N.json` is there: after a
`kill -9` at any moment the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.learn.batches import Unfit, evenly, next_batch, write_whole
from examples.learn.loss import Loss, grpo, imitation
from examples.learn.policy import Pack, Policy, pack
from examples.learn.processes import HOPELESS, Broken, alone
from examples.trainer import MASKED, Group, Line, RunApi, sequences

WON = 1.0  # expert iteration learns from rollouts with this score
MOST_OFF = 0.1  # recorded log-probs from this policy's own, on average; the server's arithmetic alone makes 0.01


@dataclass(frozen=True)
class Recipe:
    """How a batch is learned from. A minibatch, of some groups, makes one step of the optimizer."""

    algorithm: str
    learning_rate: float
    epochs: int
    groups: int
    shuffled: bool  # a control: each rollout gets the score of another one, so there is nothing to learn


@dataclass(frozen=True)
class Lesson:
    """One group, ready for a loss. `weights_T`: the advantages of its trained tokens."""

    pack: Pack
    weights_T: torch.Tensor

    @property
    def tokens(self) -> int:
        """How many the loss is over."""
        return len(self.pack.places_T)


class Trainer:
    """One policy and its optimizer."""

    def __init__(self, policy: Policy, recipe: Recipe, seed: int) -> None:
        self.policy, self.recipe, self.seed = policy, recipe, seed
        self.optimizer = torch.optim.AdamW(policy.parameters(), recipe.learning_rate, weight_decay=0.0)

    def step(self, batch: Sequence[Group]) -> dict[str, Any]:
        """Trains on a batch; what there is to know about it."""
        began = time.monotonic()
        chance = random.Random(f"{self.seed} {self.policy.version}")  # noqa: S311 - no secret
        scores_RG = [list(map(float, group["scores"])) for group in batch]
        credited_RG = _shuffled(scores_RG, chance) if self.recipe.shuffled else scores_RG
        lessons = list(self._lessons(batch, credited_RG))
        told: dict[str, Any] = {
            "version": self.policy.version + 1,
            "groups": len(batch),
            "groups_learned_from": len(lessons),
            "reward": sum(map(sum, scores_RG)) / sum(map(len, scores_RG)),
            "tokens": sum(lesson.tokens for lesson in lessons),
            "check": self._check(batch),
        }
        losses, norms = [], []
        for _ in range(self.recipe.epochs):
            chance.shuffle(lessons)
            for minibatch in evenly(lessons, self.recipe.groups):
                loss, norm = self._update(minibatch)
                losses.append(loss)
                norms.append(norm)
                print(f"loss {loss.value.item():+.4f}", file=sys.stderr, flush=True)  # whoever waits sees it live
        self.policy.version += 1
        return told | {
            "losses": [loss.value.item() for loss in losses],
            "clipped": sum(loss.clipped for loss in losses) / max(1, len(losses)),
            "gradient_norm": max(norms, default=0.0),
            "seconds": time.monotonic() - began,
        }

    def _lessons(self, batch: Sequence[Group], scores_RG: Sequence[Sequence[float]]) -> Iterator[Lesson]:
        """The groups that teach something by these scores, which are not their own in a control. In GRPO all
        rollouts of a group with different scores count, also one whose advantage is 0; in expert iteration only
        those that were right."""
        compares = self.recipe.algorithm == "grpo"
        for group, scores_R in zip(batch, scores_RG, strict=True):
            of_tree = None if self.recipe.shuffled else group.get("advantages")  # they are of the true scores
            rollouts = list(sequences(group | {"scores": scores_R, "advantages": of_tree}))
            taught = [line for line, s in zip(rollouts, scores_R, strict=True) if compares or s >= WON]
            weights = [weight for line in taught for weight in _weights(line)]
            teaches = any(weights) if compares else bool(taught)
            if teaches and (lines := pack(taught)).places_T.numel():
                yield Lesson(lines, torch.tensor(weights))

    def _update(self, lessons: Sequence[Lesson]) -> tuple[Loss, float]:
        """One step of the optimizer, of the sum of the groups' gradients."""
        self.optimizer.zero_grad()
        tokens = sum(lesson.tokens for lesson in lessons)
        value, clipped = torch.zeros(()), 0.0
        for lesson in lessons:
            new_T, weights_T = self.policy.logprobs(lesson.pack), lesson.weights_T
            if self.recipe.algorithm == "grpo":
                loss = grpo(new_T, lesson.pack.sampled_T, weights_T, tokens)
            else:
                loss = imitation(new_T, tokens)
            loss.value.backward()
            value += loss.value.detach()
            clipped += loss.clipped * lesson.tokens / tokens
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return Loss(value, clipped), norm.item()

    def _check(self, batch: Sequence[Group]) -> dict[str, float]:
        """Recorded log-probs against this policy's own, before it changes. If it sampled the batch, they differ by
        the server's arithmetic alone (docs/runs.md has limits)."""
        with torch.inference_mode():
            packs = [pack(list(sequences(group))) for group in batch]
            parts = [self.policy.logprobs(p) - p.sampled_T for p in packs if p.places_T.numel()]
        difference_T = torch.cat(parts or [torch.zeros(0)])
        return {
            "tokens": len(difference_T),
            "mean": difference_T.abs().mean().item() if len(difference_T) else math.nan,
            "k3": (torch.expm1(difference_T) - difference_T).mean().item() if len(difference_T) else math.nan,
        }


def _weights(line: Line) -> list[float]:
    """The advantages of its trained tokens."""
    values_T = line.advantages_T or [line.advantage] * len(line.tokens_T)
    return [value for value, label in zip(values_T, line.labels_T, strict=True) if label != MASKED]


def _shuffled(scores_RG: Sequence[Sequence[float]], chance: random.Random) -> list[list[float]]:
    pool = [score for scores_R in scores_RG for score in scores_R]
    chance.shuffle(pool)
    return [[pool.pop() for _ in scores_R] for scores_R in scores_RG]


# ------------------------------------------------------------------- what is on disk


def save(trainer: Trainer, folder: Path, told: dict[str, Any]) -> None:
    """The adapter, all that is needed to go on, and then the word that the step is done."""
    policy = trainer.policy
    policy.write_adapter(folder / f"policy-{policy.version}.gguf")
    state = folder / "state.part"
    torch.save({"policy": policy.state(), "optimizer": trainer.optimizer.state_dict()}, state)
    os.replace(state, folder / f"state-{policy.version}.pt")
    write_whole(folder / f"step-{policy.version}.json", json.dumps(told))


def go_on(trainer: Trainer, folder: Path) -> None:
    """From the last step that was done; without any, from the model as it came."""
    done = [int(path.stem.removeprefix("step-")) for path in folder.glob("step-*.json")]
    if not done:
        save(trainer, folder, {"version": 0})
        return
    state = torch.load(folder / f"state-{max(done)}.pt", weights_only=True)
    trainer.policy.load(state["policy"])
    trainer.optimizer.load_state_dict(state["optimizer"])


def train(options: argparse.Namespace) -> None:
    """Until all steps are done. Raises Unfit."""
    recipe = Recipe(options.algorithm, options.learning_rate, options.epochs, options.groups, options.shuffled)
    trainer = Trainer(Policy(options.weights, options.seed), recipe, options.seed)
    go_on(trainer, options.folder)
    api, logprobs = RunApi(options.url), options.algorithm == "grpo"
    while (step := trainer.policy.version) < options.steps:
        kept = options.folder / f"batch-{step}.json"
        batch = next_batch(api, options.batch_size, options.longest, step, kept, logprobs=logprobs)
        told = trainer.step(batch)
        if (off := told["check"]["mean"]) > MOST_OFF:
            refused = kept.replace(kept.with_suffix(".refused"))
            raise Unfit(
                f"nothing was learned from {refused}: recorded log-probs are {off:.3f} from this policy's own, the"
                f" limit is {MOST_OFF}; another policy sampled it, or the server computes in another way"
            )
        save(trainer, options.folder, told)
        print(json.dumps(told), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0: all steps are done; 1: another trainer is at work there; 2: the batches are of no use."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the run-api")
    parser.add_argument("--weights", type=Path, required=True, help="the GGUF file that is served")
    parser.add_argument("--folder", type=Path, required=True, help="where adapters, states and batches go")
    parser.add_argument("--algorithm", choices=["grpo", "expert"], default="grpo")
    parser.add_argument("--batch-size", type=int, default=64, help="rollouts of a step")
    parser.add_argument("--steps", type=int, default=8, help="batches in all")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--epochs", type=int, default=2, help="how often each batch is gone through")
    parser.add_argument("--groups", type=int, default=4, help="groups of a minibatch, at most")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest line it trains on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffled", action="store_true", help="control: scores are shuffled, nothing is learned")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        with alone(options.folder):
            train(options)
    except (Broken, Unfit) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return HOPELESS if isinstance(error, Unfit) else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
