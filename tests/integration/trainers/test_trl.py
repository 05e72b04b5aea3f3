"""TRL's real GRPOTrainer on the CPU: a small real model, live sandboxes, and an endpoint that samples from weights
which the trainer replaces. What the trainer computes on is compared with the record bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]
torch = pytest.importorskip("torch", reason="needs the extra trl")
trl = pytest.importorskip("trl", reason="needs the extra trl")
pytest.importorskip("peft", reason="needs the extra torch")
pytest.importorskip("gguf", reason="needs the extra torch")

from orchestrator import ConfigError, EnvironmentUnusable, Row, SyncOrchestrator, Task, load_config  # noqa: E402
from orchestrator.run.groups import GroupFormat  # noqa: E402
from orchestrator.run.line import read_attempt  # noqa: E402
from orchestrator.run.rows import recorded_rows  # noqa: E402
from orchestrator.trainers.trl import dataset, reward, rollout_func  # noqa: E402
from tests.fakes.inference import Call, Fault, Reply  # noqa: E402
from tests.fakes.policy_server import PolicyServer, serving  # noqa: E402
from tests.fakes.runs import DEADLINE_S, ROOT, place  # noqa: E402
from tests.fakes.tiny_model import a_model, write  # noqa: E402
from tests.fakes.tokenizer import tokenizer_folder  # noqa: E402

TASKS = [Task(f"q{n}", f"What is number {n} (of q{n}!)?", str(n)) for n in range(4)]
HELD_OUT = [Task("held-out", "What is number 7 (of q7!)?", "7")]
GROUP = 4
BROKEN = "of q1!"  # one rollout of this task gets no completion
SAME = 1e-4  # two ways to compute one log-prob, in f32


_came: defaultdict[str, dict[int | None, int]] = defaultdict(dict)  # task: the place of each seed, by arrival


def script(call: Call) -> Reply | str:
    """A step, then an answer: wrong and right in turns, so that every group has both. Every turn ends on a stop
    string."""
    number = next((n for n in range(8) if f"of q{n}!" in call.task), 0)
    fault = Fault("400") if BROKEN in call.task and call.turn == 0 and call.same == 2 else None
    if call.turn == 0:
        return Reply(f"Thought: so.\n<code>\nx = {number}\nprint(x)\n</code>", fault=fault)
    came = _came[call.task]
    said = number if came.setdefault(call.seed, len(came)) % 2 else -1
    return f"Thought: done.\n<code>\nfinal_answer({said})\n</code>"


def config(server: PolicyServer, run_dir: Path | None = None, **env: Any) -> Any:
    return load_config(
        env={
            "launcher": "process",
            "max_concurrent_sandboxes": 4,
            "tokenizer_name": str(tokenizer_folder()),
            "token_source": "exact",
            "scoring_strategy": "correctness",
            "group_size": GROUP,
            "group_policy": "partial:2",
            "max_retries": 0,
            "max_steps": 3,
            "seed": 7,
            **({} if run_dir is None else {"run_dir": str(run_dir)}),
            **env,
        },
        openai={"base_url": server.base_url, "model_name": "scripted"},
    )


def arguments(home: Path, **more: Any) -> Any:
    return trl.GRPOConfig(
        **{
            "output_dir": str(home / "out"),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "num_generations": GROUP,
            "num_generations_eval": 2,
            "per_device_train_batch_size": GROUP,
            "per_device_eval_batch_size": 2,
            # One generation is trained on in two steps, so TRL computes the old log-probs itself.
            "steps_per_generation": 2,
            "gradient_accumulation_steps": 1,
            "max_steps": 4,
            "scale_rewards": "none",
            "mask_truncated_completions": True,
            "shuffle_dataset": False,
            **more,
        }
    )


@dataclass
class Seen:
    """What went through the trainer: what it was given, and the tensors that it made of it, call by call."""

    given: list[dict[str, Any]] = field(default_factory=list)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    first: Any = None  # the weights before training


class Watched(trl.GRPOTrainer):  # type: ignore[misc,name-defined]
    seen: Seen

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        self.seen.tensors.append(made)
        return made


def recorded(run: Path) -> dict[str, Row]:
    """The main rows of a run directory, by rollout."""
    lines = (run / "rollouts.jsonl").read_bytes().splitlines()
    rows = [
        row for line in lines if b'"index"' in line for row in recorded_rows(read_attempt(line), GroupFormat())
    ]
    return {row.rollout_id: row for row in rows if row.main}


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with place() as directory:
        yield directory


@pytest.fixture(scope="module")
def folder(home: Path) -> Path:
    return write(a_model(), home / "policy")


@pytest.fixture(scope="module")
def seen(home: Path, folder: Path) -> Seen:
    """Four steps of training on two generations, then an evaluation."""
    seen = Seen(first=a_model())
    with serving("vllm", a_model(), script) as server:
        with SyncOrchestrator(config(server, home / "run")) as orchestrator:

            def update(trainer: Any) -> None:
                server.take(trainer.model.named_parameters())

            ours = rollout_func(orchestrator, [*TASKS, *HELD_OUT], update=update)

            def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
                seen.versions.append(trainer.state.global_step)
                seen.given.append(given := ours(prompts, trainer))
                return given

            trainer = Watched(
                model=str(folder),
                reward_funcs=reward,
                args=arguments(home),
                train_dataset=dataset(TASKS),
                eval_dataset=dataset(HELD_OUT),
                rollout_func=rollouts,
            )
            trainer.seen = seen
            trainer.train()
            trainer.evaluate()
        assert server.updates == 3
    seen.log = trainer.state.log_history
    seen.rows = recorded(home / "run")
    return seen


def test_rows_come_in_the_order_of_the_prompts_with_the_trainers_group_size(seen: Seen) -> None:
    assert [given["task_id"] for given in seen.given] == [
        ["q0"] * GROUP + ["q1"] * GROUP,
        ["q2"] * GROUP + ["q3"] * GROUP,
        ["held-out"] * 2,
    ]
    assert len({rollout for given in seen.given[:2] for rollout in given["rollout_id"]}) == 4 * GROUP


def test_what_the_trainer_computes_on_is_the_record_bit_by_bit(seen: Seen) -> None:
    compared = 0
    for given, tensors in zip(seen.given[:2], seen.tensors[:2], strict=True):
        for n, rollout in enumerate(given["rollout_id"]):
            row = seen.rows[rollout]
            if row.score is None:
                continue
            count = len(row.completion_ids)
            assert given["prompt_ids"][n] == list(row.prompt_ids)
            assert given["completion_ids"][n][:count] == list(row.completion_ids)
            assert given["env_mask"][n][:count] == list(row.env_mask)
            assert given["logprobs"][n][:count] == [p or 0.0 for p in row.logprobs or ()]
            assert given["score"][n] == row.score
            padding = tensors["prompt_ids"].shape[1] - len(row.prompt_ids)
            assert tensors["prompt_ids"][n, padding:].tolist() == list(row.prompt_ids)
            assert tensors["completion_ids"][n, :count].tolist() == list(row.completion_ids)
            told = tensors["sampling_per_token_logps"][n, :count]
            assert torch.equal(told, torch.tensor([p or 0.0 for p in row.logprobs or ()]))
            mask = tensors["tool_mask"][n] * tensors["completion_mask"][n]
            assert mask[:count].tolist() == list(row.env_mask)
            assert mask.sum() == sum(row.env_mask) > 0
            compared += 1
    assert compared == 4 * GROUP - 1
    assert set(seen.rows) == {rollout for given in seen.given[:2] for rollout in given["rollout_id"]}


def test_its_own_log_probs_are_those_that_were_delivered(seen: Seen) -> None:
    for tensors in seen.tensors[:2]:
        mask = (tensors["tool_mask"] * tensors["completion_mask"]).bool()
        off = (tensors["old_per_token_logps"] - tensors["sampling_per_token_logps"]).abs()[mask]
        assert off.max() < SAME
    # A second generation by the first weights would have been noticed.
    row = next(row for row in seen.rows.values() if row.policy_version == "2")
    line = torch.tensor([[*row.prompt_ids, *row.completion_ids]])
    with torch.inference_mode():
        rows = seen.first(line[:, :-1]).logits[0].log_softmax(-1)
    first = rows.gather(-1, line[0, 1:, None])[len(row.prompt_ids) - 1 :, 0]
    off = [abs(p - q) for p, q in zip(row.logprobs or (), first.tolist(), strict=True) if p is not None]
    assert max(off) > 100 * SAME


def test_the_record_says_which_step_of_the_training_sampled(seen: Seen) -> None:
    assert seen.versions == [0, 2, 4]
    for step, given in zip(("0", "2"), seen.given, strict=False):
        versions = {seen.rows[rollout].policy_versions for rollout in given["rollout_id"]}
        assert versions - {()} == {(step,)}


def test_a_rollout_without_a_score_is_out_of_the_mean_and_masked(seen: Seen) -> None:
    given, tensors = seen.given[0], seen.tensors[0]
    (place,) = [n for n, score in enumerate(given["score"]) if score is None]
    assert given["task_id"][place] == "q1"
    assert given["outcome"][place] == "llm_error"
    assert given["env_mask"][place] == [0] * len(given["completion_ids"][place])
    assert tensors["advantages"][place] == 0.0
    assert (tensors["tool_mask"] * tensors["completion_mask"])[place].sum() == 0
    scores = [score for score in given["score"][GROUP : 2 * GROUP] if score is not None]
    mean = sum(scores) / 3
    expected = [0.0 if score is None else score - mean for score in given["score"][GROUP : 2 * GROUP]]
    assert tensors["advantages"][GROUP : 2 * GROUP].tolist() == pytest.approx(expected, abs=1e-6)
    assert len(set(scores)) == 2


def test_stop_strings_are_no_truncation(seen: Seen) -> None:
    trained = [entry for entry in seen.log if "completions/clipped_ratio" in entry]
    assert [entry["completions/clipped_ratio"] for entry in trained] == [0.0] * len(trained)
    assert trained
    scored = [row for row in seen.rows.values() if row.score is not None]
    assert {row.finish_reason for row in scored} == {"stop"}
    assert not {row.completion_ids[-1] for row in scored} & {0, 2}  # none ends on <|endoftext|> or <|im_end|>


def test_an_evaluation_is_not_in_the_record(seen: Seen) -> None:
    assert {row.task_id for row in seen.rows.values()} == {task.task_id for task in TASKS}
    (evaluated,) = [entry for entry in seen.log if "eval_rewards/reward/mean" in entry]
    scores = seen.given[2]["score"]
    assert evaluated["eval_rewards/reward/mean"] == pytest.approx(sum(scores) / 2)


def test_the_run_is_verified_like_any_other(seen: Seen, home: Path) -> None:
    program = "import sys; from orchestrator.cli import main; sys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", program, "verify", str(home / "run")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


# ---------------------------------------------------------------- several processes

PROGRAM = """
import json, sys
from pathlib import Path
from orchestrator import OrchestratorError, SyncOrchestrator, load_config
from orchestrator.trainers.trl import dataset, reward, rollout_func
from tests.integration.trainers.test_trl import TASKS, Seen, Watched, arguments

home, model, settings = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
more = {"max_steps": 1, "steps_per_generation": 1, "num_generations": 2, "per_device_train_batch_size": 3}
ours = rollout_func(SyncOrchestrator(load_config(**settings)), TASKS, update=lambda trainer: None)
given = []
trainer = Watched(
    model=model,
    reward_funcs=reward,
    args=arguments(home, learning_rate=0.0, **more),
    train_dataset=dataset(TASKS),
    rollout_func=lambda prompts, trainer: given.append(ours(prompts, trainer)) or given[-1],
)
trainer.seen = Seen()
told = {"rank": trainer.accelerator.process_index}
try:
    trainer.train()
    told |= given[0] | {"advantages": trainer.seen.tensors[0]["advantages"].tolist()}
except OrchestratorError as error:
    told |= {"error": f"{type(error).__name__}: {error}"}
(home / f"rank-{told['rank']}.json").write_text(json.dumps(told))
"""


def two_processes(home: Path, folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of them told."""
    program = home / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(program),
         str(home), str(folder), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "TMPDIR": str(home), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((home / f"rank-{rank}.json").read_text()) for rank in range(2)]


def as_mappings(made: Any, **openai: Any) -> dict[str, Any]:
    env = made.env
    names = (
        "group_size",
        "launcher",
        "max_concurrent_sandboxes",
        "tokenizer_name",
        "token_source",
        "scoring_strategy",
    )
    told = {name: getattr(env, name) for name in (*names, "group_policy", "max_retries", "max_steps", "seed")}
    server = {"base_url": made.openai[0].base_url, "model_name": made.openai[0].model_name, **openai}
    return {"env": {**told, "run_dir": str(env.run_dir)}, "openai": server}


def test_a_group_is_not_torn_between_two_processes(folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        first, second = two_processes(home, folder, as_mappings(config(server, home / "run", group_size=2)))
        rows = recorded(home / "run")
        assert list(home.glob("orchestrator-*")) == []
    assert [told["task_id"] for told in (first, second)] == [["q0", "q0", "q1"], ["q1", "q2", "q2"]]
    rollouts = [*first["rollout_id"], *second["rollout_id"]]
    assert [(rows[rollout].task_id, rows[rollout].index) for rollout in rollouts] == [
        (f"q{n}", index) for n in range(3) for index in range(2)
    ]
    for told in (first, second):
        for place_, rollout in enumerate(told["rollout_id"]):
            assert told["completion_ids"][place_][: len(rows[rollout].completion_ids)] == list(
                rows[rollout].completion_ids
            )
    scores = [*first["score"], *second["score"]]
    means = [sum(scores[n : n + 2]) / 2 for n in range(0, 6, 2)]
    expected = [score - means[n // 2] for n, score in enumerate(scores)]
    assert [*first["advantages"], *second["advantages"]] == pytest.approx(expected, abs=1e-6)
    assert any(expected)


def test_all_processes_hear_why_there_are_no_rollouts(folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        settings = as_mappings(
            config(server, home / "run", group_size=2), base_url="http://127.0.0.1:9/v1", startup_timeout=0
        )
        told = two_processes(home, folder, settings)
    assert [one["error"].partition(":")[0] for one in told] == ["NotServing"] * 2
    assert all("does not serve" in one["error"] for one in told)


# ---------------------------------------------------------------- one process, containers


@pytest.mark.docker
def test_it_trains_on_rollouts_of_containers(folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        with SyncOrchestrator(config(server, home / "run", launcher="docker", group_size=2)) as orchestrator:
            trainer = Watched(
                model=str(folder),
                reward_funcs=reward,
                args=arguments(home, max_steps=1, num_generations=2),
                train_dataset=dataset(TASKS),
                rollout_func=rollout_func(
                    orchestrator, TASKS, update=lambda trainer: server.take(trainer.model.named_parameters())
                ),
            )
            trainer.seen = Seen()
            trainer.train()
        rows = recorded(home / "run")
    assert len(rows) == 2 * GROUP
    masks = (trainer.seen.tensors[0]["tool_mask"] * trainer.seen.tensors[0]["completion_mask"]).sum(-1).tolist()
    assert masks == [sum(rows[rollout].env_mask) for rollout in sorted(rows)]


def test_errors_are_the_trainers_to_see(home: Path, folder: Path) -> None:
    with serving("vllm", a_model(), script) as server:
        there = SyncOrchestrator(config(server))

        def trainer(rollouts: Any, tasks: list[Task] = TASKS, **more: Any) -> Any:
            return trl.GRPOTrainer(
                model=str(folder),
                reward_funcs=reward,
                args=arguments(home, **more),
                train_dataset=dataset(tasks),
                rollout_func=rollouts,
            )

        with pytest.raises(ConfigError, match="TRL does not update an endpoint"):
            trainer(rollout_func(there, TASKS)).train()
        with pytest.raises(ConfigError, match=r"env\.temperature is 1 and TRL's temperature 0\.7; set both alike"):
            trainer(rollout_func(there, TASKS, update=lambda trainer: None), temperature=0.7).train()
        with pytest.raises(ConfigError, match="a prompt has the task_id 'held-out', which none of the tasks has"):
            trainer(rollout_func(there, TASKS, update=lambda trainer: None), HELD_OUT * 2).train()
        other = SyncOrchestrator(config(server, tokenizer_name=str(tokenizer_folder(1400))))
        with pytest.raises((ConfigError, EnvironmentUnusable), match="tokenizer"):
            trainer(rollout_func(other, TASKS, update=lambda trainer: None)).train()
        there.close()
        other.close()
