"""The example that learns: its loss beside TRL's, its packing beside plain rollouts, and whole runs in which
processes are killed: a tiny random model, a real llama.cpp server, a real run-api and live sandboxes."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]
torch = pytest.importorskip("torch", reason="needs the extra learn")
trl = pytest.importorskip("trl", reason="needs the extra trl")
pytest.importorskip("peft", reason="needs the extra learn")
pytest.importorskip("gguf", reason="needs the extra learn")
pytest.importorskip("xllamacpp", reason="needs the extra learn")

import datasets  # noqa: E402

from examples.learn import processes  # noqa: E402
from examples.learn.loss import CLIP, grpo, imitation  # noqa: E402
from examples.learn.policy import Policy, pack  # noqa: E402
from examples.learn.trainer import Recipe, Trainer, go_on, main, save  # noqa: E402
from examples.trainer import MASKED, MASKED_LOGPROB, Group, Line, sequences  # noqa: E402
from tests.fakes.runs import ROOT, lines, place  # noqa: E402
from tests.fakes.tiny_model import a_model, write, write_gguf  # noqa: E402

ENTRIES = 1500
SAME = 1e-5  # two ways to compute one log-prob, in f32
LIMIT = 0.02  # mean difference of recorded log-probs, of these spread weights served by llama.cpp


@pytest.fixture(scope="module")
def weights() -> Iterator[Path]:
    with place() as folder:
        yield write_gguf(a_model(), folder / "tiny.gguf")


def a_group(seed: int, size: int = 4, scores: list[float] | None = None) -> Group:
    """Rollouts with one prompt, of different lengths, every other one with two turns. All begin alike."""
    chance = random.Random(seed)
    prompt = [chance.randrange(3, ENTRIES) for _ in range(20)]
    tokens_G, masks_G, logprobs_G = [], [], []
    for number in range(size):
        answer = [7, 8, *(chance.randrange(3, ENTRIES) for _ in range(3 + 2 * number))]
        more = [*prompt[:5], *answer] if number % 2 else []
        tokens = [*prompt, *answer, *more]
        mask = [MASKED] * len(prompt) + answer + ([MASKED] * 5 + answer if more else [])
        tokens_G.append(tokens)
        masks_G.append(mask)
        logprobs_G.append([MASKED_LOGPROB if m == MASKED else -5 * chance.random() for m in mask])
    return {
        "tokens": tokens_G,
        "masks": masks_G,
        "inference_logprobs": logprobs_G,
        "scores": scores or [float(n % 2) for n in range(size)],
    }


def alone(policy: Policy, line: Line) -> Any:
    """The log-probs of a line's trained tokens, by a plain forward pass."""
    ids = torch.tensor([list(line.tokens_T)])
    rows = torch.log_softmax(policy.model(input_ids=ids).logits[0], -1)
    places = [at for at, label in enumerate(line.labels_T) if label != MASKED]
    return torch.stack([rows[at - 1, line.tokens_T[at]] for at in places])


def test_packed_rollouts_have_the_log_probs_that_each_has_alone(weights: Path) -> None:
    policy = Policy(weights, 0)
    for seed, size in ((1, 4), (2, 1), (3, 2)):
        rollouts = list(sequences(a_group(seed, size)))
        together = pack(rollouts)
        assert len(together.tokens_S) <= sum(len(line.tokens_T) for line in rollouts)
        with torch.inference_mode():
            expected = torch.cat([alone(policy, line) for line in rollouts])
            assert torch.allclose(policy.logprobs(together), expected, atol=SAME)
        owners = [n for n, line in enumerate(rollouts) for label in line.labels_T if label != MASKED]
        assert together.rollouts_T.tolist() == owners
        recorded = [
            p
            for line in rollouts
            for p, m in zip(line.logprobs_T or (), line.labels_T, strict=True)
            if m != MASKED
        ]
        assert torch.allclose(together.sampled_T, torch.tensor(recorded))


def test_the_loss_and_its_gradient_are_trls_on_the_same_batch(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    sampled_RT, mask_RT = -3 * torch.rand(6, 9, generator=draw), torch.rand(6, 9, generator=draw) > 0.3
    moved_RT = sampled_RT + 0.3 * torch.randn(
        6, 9, generator=draw
    )  # some ratios are beyond the clip on both sides
    advantages_R = torch.randn(6, generator=draw)

    theirs = moved_RT.clone().requires_grad_()
    loss = _trls(theirs, sampled_RT, advantages_R, mask_RT, tmp_path)
    loss.backward()
    ours = moved_RT.clone().requires_grad_()
    tokens = int(mask_RT.sum())
    told = grpo(ours[mask_RT], sampled_RT[mask_RT], advantages_R[:, None].expand(6, 9)[mask_RT], tokens)
    told.value.backward()
    assert told.value.item() == pytest.approx(loss.item(), abs=1e-6)
    assert theirs.grad is not None
    assert ours.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)
    cut = int(((ours.grad == 0) & mask_RT).sum())
    assert 0 < cut < tokens
    assert told.clipped == pytest.approx(cut / tokens)
    # In two pieces, as a step of several groups is made.
    pieces = [
        grpo(ours[rows][mask_RT[rows]], sampled_RT[rows][mask_RT[rows]], a[mask_RT[rows]], tokens).value
        for rows in (slice(0, 2), slice(2, 6))
        for a in [advantages_R[rows, None].expand(-1, 9)]
    ]
    assert sum(piece.item() for piece in pieces) == pytest.approx(loss.item(), abs=1e-6)


def _trls(new_RT: Any, old_RT: Any, advantages_R: Any, mask_RT: Any, folder: Path) -> Any:
    """TRL's loss, of its own code, on these log-probs."""
    args = trl.GRPOConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        num_generations=2,
        per_device_train_batch_size=2,
        loss_type="bnpo",
        beta=0.0,
        epsilon=CLIP,
    )
    trainer = trl.GRPOTrainer(
        model=str(write(a_model(), folder / "model")),
        reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
        args=args,
        train_dataset=datasets.Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}]),
    )
    trainer.model.eval()  # one batch is one step
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new_RT, torch.zeros_like(new_RT), None)
    ids_RT = torch.ones(new_RT.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids_RT[:, :2],
        "prompt_mask": ids_RT[:, :2],
        "completion_ids": ids_RT,
        "completion_mask": mask_RT.long(),
        "advantages": advantages_R,
        "old_per_token_logps": old_RT,
        "num_items_in_batch": mask_RT.sum(),
    }
    return trainer._compute_loss(None, inputs)


def test_expert_iteration_makes_right_rollouts_likelier_and_learns_nothing_of_the_others(weights: Path) -> None:
    right, wrong = a_group(5, 2, [1.0, 0.0]), a_group(6, 2, [0.0, 0.0])
    trainer = Trainer(Policy(weights, 0), Recipe("expert", 1e-2, 3, 4, shuffled=False), 0)
    before = alone(trainer.policy, next(sequences(right))).sum().item()
    told = trainer.step([right, wrong])
    assert told["groups_learned_from"] == 1
    assert told["tokens"] == sum(label != MASKED for label in right["masks"][0])
    assert alone(trainer.policy, next(sequences(right))).sum().item() > before + 1
    assert told["losses"] == sorted(told["losses"], reverse=True)
    assert imitation(torch.tensor([-1.0, -3.0]), 2).value.item() == 2.0


def test_a_rollout_that_is_as_good_as_its_group_counts_and_a_group_of_equals_does_not(weights: Path) -> None:
    mixed, equal = a_group(5, 3, [0.0, 0.5, 1.0]), a_group(6, 3, [0.5, 0.5, 0.5])
    told = Trainer(Policy(weights, 0), Recipe("grpo", 1e-2, 1, 4, shuffled=False), 0).step([mixed, equal])
    assert told["groups_learned_from"] == 1
    assert told["tokens"] == sum(label != MASKED for mask in mixed["masks"] for label in mask)


def test_shuffled_scores_are_the_same_scores_given_to_others(weights: Path) -> None:
    batch = [a_group(seed, 8, [1.0] * 2 + [0.0] * 6) for seed in range(8)]
    trainer = Trainer(Policy(weights, 0), Recipe("expert", 0.0, 0, 4, shuffled=True), 0)
    told = trainer.step(batch)
    assert told["reward"] == 0.25
    trained = [sum(label != MASKED for label in mask) for group in batch for mask in group["masks"][:2]]
    assert told["tokens"] != sum(trained), "other rollouts than the right ones are learned from"


def test_log_probs_that_are_not_on_record_are_not_taken_for_certain_ones(weights: Path) -> None:
    bare = [a_group(1) | {"inference_logprobs": None}]
    told = Trainer(Policy(weights, 0), Recipe("expert", 0.0, 1, 4, shuffled=False), 0).step(bare)
    assert math.isnan(told["check"]["mean"])
    assert all(map(math.isfinite, told["losses"])), "expert iteration needs none"
    told = Trainer(Policy(weights, 0), Recipe("grpo", 0.0, 1, 4, shuffled=False), 0).step(bare)
    assert all(map(math.isnan, told["losses"]))


def test_a_batch_that_another_policy_sampled_is_set_aside_and_ends_the_trainer(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--weights", str(weights), "--folder", str(tmp_path), "--steps", "1"]
    with processes.alone(tmp_path):
        assert main(words) == 1
    assert "another process learns in" in capsys.readouterr().err
    (tmp_path / "batch-0.json").write_text(json.dumps([a_group(1), a_group(2)]))  # log-probs by chance
    assert main(words) == 2
    assert "the limit is 0.1" in capsys.readouterr().err
    assert (tmp_path / "batch-0.refused").exists()
    assert not (tmp_path / "batch-0.json").exists()
    assert not (tmp_path / "step-1.json").exists()


def test_a_trainer_goes_on_where_it_was_with_its_optimizer(weights: Path, tmp_path: Path) -> None:
    recipe = Recipe("grpo", 1e-2, 1, 1, shuffled=False)
    batches = [[a_group(1), a_group(2)], [a_group(3), a_group(4)]]
    whole = Trainer(Policy(weights, 3), recipe, 3)
    go_on(whole, tmp_path)
    save(whole, tmp_path, whole.step(batches[0]))
    straight = whole.step(batches[1])
    halved = Trainer(Policy(weights, 3), recipe, 3)
    go_on(halved, tmp_path)
    assert halved.policy.version == 1
    again = halved.step(batches[1])
    assert again["losses"] == pytest.approx(straight["losses"], abs=1e-6)
    for one, other in zip(whole.policy.parameters(), halved.policy.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


# ---------------------------------------------------------------- whole runs


def learning(folder: Path, weights: Path, *more: str) -> subprocess.Popen[str]:
    words = ["--folder", folder, "--model", weights, "--rounds", 2, "--groups", 3, "--group-size", 4]
    words += ["--sets", "gcd+products", "--held-out", 2, "--scoring", "python:tests.fakes.coin:score"]
    words += ["--sandboxes", 4, "--learning-rate", 0.01, "--epochs", 2, *more]
    command = [sys.executable, "-m", "examples.learn", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ORCHESTRATOR_ENV__LAUNCHER": "process"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def children(parent: int) -> dict[str, int]:
    """Process ids by the module they run."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                status = (entry / "status").read_text()
            except OSError:
                continue
            if f"\nPPid:\t{parent}\n" in status and "-m" in words:
                at = words.index("-m")
                found[" ".join(words[at + 1 : at + 3])] = int(entry.name)
    return found


def kill(run: subprocess.Popen[str], module: str, when: Callable[[], bool]) -> None:
    """`kill -9` of the run's process of this module as soon as `when` holds."""
    deadline = time.monotonic() + 240
    while True:
        found = [pid for name, pid in children(run.pid).items() if name.startswith(module)]
        if found and when():
            os.kill(found[0], signal.SIGKILL)
            return
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline, f"{module} does not come: {children(run.pid)}"
        time.sleep(0.02)


def held(folder: Path, said: str) -> None:
    """A whole run of two rounds: it was trained on what was sampled, by the policy that was to sample it."""
    policy = folder / "policy"
    steps = [json.loads((policy / f"step-{n}.json").read_text()) for n in (1, 2)]
    batches = [json.loads((policy / f"batch-{n}.json").read_text()) for n in (0, 1)]
    recorded = {line["rollout_id"]: line for line in lines(folder / "train" / "rollouts.jsonl")}
    given = [facts["rollout_id"] for batch in batches for group in batch for facts in group["overrides"]]
    assert len(given) == len(set(given)) == 24, "every batch is full, and nothing is trained on twice"
    for version, (step, batch) in enumerate(zip(steps, batches, strict=True)):
        facts_R = [facts for group in batch for facts in group["overrides"]]
        assert {facts["policy_version"] for facts in facts_R} == {str(policy / f"policy-{version}")}
        assert {facts["staleness"] for facts in facts_R} == {0}
        assert all(facts["rollout_id"] in recorded for facts in facts_R)
        assert step["check"]["mean"] < LIMIT, said
        assert step["check"]["tokens"] == sum(
            m != MASKED for group in batch for mask in group["masks"] for m in mask
        )
    assert all((folder / f"eval-{n}" / "metrics.json").exists() for n in (0, 1, 2))
    assert "after round 2" in said
    page = (folder.parent / "learn.html").read_text()
    assert "none is held out or has a held-out task's words" in page


def test_two_rounds_hold_together_while_each_process_is_killed_once(weights: Path) -> None:
    with place() as home:
        folder = home / "runs" / "one"
        run = learning(folder, weights)
        rollouts = folder / "train" / "rollouts.jsonl"

        def sampled(least: int) -> bool:
            return rollouts.exists() and rollouts.read_bytes().count(b"\n") >= least

        try:
            kill(run, "orchestrator evaluate", lambda: (folder / "eval-0" / "run.json").exists())
            kill(run, "orchestrator.local_model", lambda: sampled(1))
            kill(run, "orchestrator serve", lambda: sampled(3))
            kill(run, "uvicorn", lambda: sampled(6))
            kill(run, "examples.learn.trainer", lambda: (folder / "policy" / "batch-0.json").exists())
            kill(run, "examples.learn.trainer", lambda: (folder / "policy" / "step-1.json").exists())
            said = run.communicate(timeout=600)[0]
        finally:
            run.kill()
        assert run.returncode == 0, said
        held(folder, said)
        # The check would see another policy than the trained one: the first does not fit the second batch.
        policy = Policy(weights, 1)
        batch = json.loads((folder / "policy" / "batch-1.json").read_text())
        told = Trainer(policy, Recipe("grpo", 0.0, 0, 4, shuffled=False), 0).step(batch)
        assert told["check"]["mean"] > 5 * LIMIT
        assert not children(run.pid)


def test_a_run_that_is_stopped_or_killed_goes_on(weights: Path) -> None:
    with place() as home:
        folder = home / "runs" / "one"
        for number, reached in (
            (signal.SIGTERM, folder / "eval-0" / "run.json"),
            (signal.SIGINT, folder / "policy" / "batch-0.json"),
            (signal.SIGKILL, folder / "policy" / "batch-1.json"),
        ):
            run = learning(folder, weights, "--algorithm", "expert")
            while not reached.exists():
                assert run.poll() is None, run.communicate()[0]
                time.sleep(0.05)
            under = children(run.pid)
            run.send_signal(number)
            said = run.communicate(timeout=120)[0]
            assert run.returncode == (-9 if number == signal.SIGKILL else 128 + number), said
            for pid in under.values():
                assert _ended(pid), under
            assert number == signal.SIGKILL or "run it again to go on" in said
        run = learning(folder, weights, "--algorithm", "expert")
        said = run.communicate(timeout=600)[0]
        assert run.returncode == 0, said
        held(folder, said)


def _ended(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
