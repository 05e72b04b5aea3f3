"""TRL's real AsyncGRPOTrainer with our worker, on the CPU: a small real model, live sandboxes, an endpoint whose
weights the trainer replaces. Only the attention kernel, which needs a GPU, is one of plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(900)]
torch = pytest.importorskip("torch", reason="needs the extra trl")
pytest.importorskip("trl", reason="needs the extra trl")
peft = pytest.importorskip("peft", reason="needs the extra torch")
pytest.importorskip("gguf", reason="needs the extra torch")

from trl.experimental.async_grpo import (  # noqa: E402
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)

from orchestrator import BadTask, ConfigError, Listener, Observer, Row, SyncOrchestrator, Task  # noqa: E402
from orchestrator.run.groups import GroupFormat  # noqa: E402
from orchestrator.run.line import read_attempt  # noqa: E402
from orchestrator.run.rows import recorded_rows  # noqa: E402
from orchestrator.trainers.trl import dataset  # noqa: E402
from orchestrator.trainers.trl_async import RolloutWorker  # noqa: E402
from orchestrator.types import Attempt, Member  # noqa: E402
from tests.fakes.flash_attention import FlashAttention  # noqa: E402
from tests.fakes.inference import Call, Reply  # noqa: E402
from tests.fakes.policy_server import PolicyServer, serving  # noqa: E402
from tests.fakes.runs import DEADLINE_S, ROOT, place  # noqa: E402
from tests.fakes.tiny_model import a_model, write  # noqa: E402
from tests.integration.trainers.test_trl import SAME, TASKS, as_mappings, config, script  # noqa: E402

GROUP = 4
Weights = dict[str, Any]


def watched(worker: RolloutWorker) -> list[Any]:
    """What is taken out of the worker's buffer from now on."""
    taken: list[Any] = []
    get = worker.rollout_buffer.get

    def remembered(*given: Any, **named: Any) -> Any:
        taken.append(sample := get(*given, **named))
        return sample

    worker.rollout_buffer.get = remembered  # type: ignore[method-assign]
    return taken


class Transfer:
    """TRL's WeightTransferProtocol, with a copy in the place of NCCL. `versions`: all weights that were sent."""

    def __init__(self, server: PolicyServer) -> None:
        self.server = server
        self.versions: list[Weights] = []

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None:
        self.server.pause()

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        sent = {name: weight.detach().clone() for name, weight in iterator}
        self.versions.append(sent)
        self.server.take(sent.items())

    def resume(self) -> None:
        self.server.resume()

    def destroy(self) -> None: ...


def arguments(home: Path, **more: Any) -> Any:
    return AsyncGRPOConfig(
        **{
            "output_dir": str(home / "out"),
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "learning_rate": 3e-3,
            "num_generations": GROUP,
            "per_device_train_batch_size": GROUP,
            "gradient_accumulation_steps": 1,
            "token_budget": -1,
            "queue_maxsize": GROUP,
            "max_steps": 6,
            **more,
        }
    )


def recorded(run: Path) -> dict[tuple[int, ...], Row]:
    """The rows of a run directory, by all their ids."""
    lines = (run / "rollouts.jsonl").read_bytes().splitlines()
    rows = [
        row for line in lines if b'"index"' in line for row in recorded_rows(read_attempt(line), GroupFormat())
    ]
    return {(*row.prompt_ids, *row.completion_ids): row for row in rows}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with place() as home:
        yield write(a_model(), home / "policy")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    """In the place of the one for GPUs, which TRL fetches from the hub."""
    attention = FlashAttention()
    monkeypatch.setattr(packing, "_flash_attn", lambda: attention)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *given: None)  # asks the GPU
    return attention


def same_as_recorded(samples: list[Any], rows: dict[tuple[int, ...], Row]) -> None:
    """Every sample is a row of the record, bit by bit; its advantage comes from its group's scores."""
    for sample in samples:
        row = rows[tuple(sample.input_ids.tolist())]
        before = len(row.prompt_ids)
        assert sample.completion_mask.tolist() == [0] * before + list(row.env_mask)
        told = torch.tensor([0.0] * before + [p or 0.0 for p in row.logprobs or ()], dtype=torch.float32)
        assert torch.equal(torch.from_numpy(sample.old_log_probs), told)
        assert sample.group_id == row.group
        group = [row.score for row in rows.values() if row.group == sample.group_id and row.score is not None]
        scores = torch.tensor(group, dtype=torch.float64)
        assert row.score is not None
        expected = (row.score - scores.mean()) / (scores.std(correction=0) + 1e-8)
        assert sample.advantage == pytest.approx(float(expected), abs=1e-9)
        assert sample.metrics["reward"] == row.score


def test_the_trainer_trains_on_the_record_of_the_weights_it_sent(kernel: FlashAttention, folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        args, transfer = arguments(home), Transfer(server)
        worker = RolloutWorker(SyncOrchestrator(config(server, home / "run")), TASKS, args)
        samples = watched(worker)
        trainer = AsyncGRPOTrainer(
            model=str(folder),
            args=args,
            train_dataset=dataset(TASKS),
            rollout_worker=worker,
            weight_transfer=transfer,
        )
        trainer.train()
        rows = recorded(home / "run")
        assert threading.enumerate() == [thread for thread in threading.enumerate() if thread.name != "rollouts"]
    assert trainer.state.global_step == 6
    assert kernel.calls > 0
    assert trainer.model_version == len(transfer.versions) == 7
    assert len(samples) >= 6 * GROUP
    same_as_recorded(samples, rows)
    # Weights of the version that a sample names give its log-probs. TRL lets the server go on before it says so: a
    # completion that is sampled in between is the next version's.
    model, exact, tokens = a_model(), 0, 0
    for sample in samples:
        row = rows[tuple(sample.input_ids.tolist())]
        assert sample.model_version == min(map(int, row.policy_versions))
        ids, mask = torch.from_numpy(sample.input_ids)[None], torch.from_numpy(sample.completion_mask)[1:].bool()
        fits = []
        for sent in transfer.versions[sample.model_version - 1 :][: 1 + len(row.policy_versions)]:
            model.load_state_dict(sent)
            with torch.inference_mode():
                logprobs = model(ids[:, :-1]).logits[0].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            fits.append(((logprobs - torch.from_numpy(sample.old_log_probs)[1:]).abs() < SAME)[mask])
        assert torch.stack(fits).any(0).all()
        exact, tokens = exact + int(fits[0].sum()), tokens + int(mask.sum())
    assert exact > 0.5 * tokens
    first, *_, last = transfer.versions
    assert not all(torch.equal(first[name], last[name]) for name in first)
    assert len({sample.model_version for sample in samples}) > 1
    logged = [entry for entry in trainer.state.log_history if "rewards/score" in entry]
    assert len(logged) == 6
    assert logged[0]["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert any("completions/mean_length" in entry for entry in logged)


def test_adapters_are_asked_for_by_the_name_that_trl_publishes_them_under(
    kernel: FlashAttention, folder: Path
) -> None:
    """TRL's own way of updating the server, over HTTP: it loads each adapter under a new name."""
    with place() as home, serving("vllm", a_model(), script) as server:
        args = arguments(home, max_steps=3, vllm_server_base_url=server.url)
        worker = RolloutWorker(SyncOrchestrator(config(server, home / "run")), TASKS, args)
        samples = watched(worker)
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        trainer = AsyncGRPOTrainer(
            model=str(folder), args=args, train_dataset=dataset(TASKS), rollout_worker=worker, peft_config=lora
        )
        trainer.train()
        rows = recorded(home / "run")
    assert trainer._lora_sync
    assert server.calls.count("/v1/load_lora_adapter") == server.calls.count("/pause") == 4
    probe, *rest = server.sampled_under
    assert probe == "scripted"
    assert set(rest) <= {f"trl-policy-v{n}" for n in range(1, 5)}
    assert len(set(rest)) > 1
    same_as_recorded(samples, rows)
    assert {version for row in rows.values() for version in row.policy_versions} <= {"1", "2", "3", "4"}


# ---------------------------------------------------------------- as its trainer drives it


def test_no_group_begins_before_the_trainer_has_taken_the_one_before(folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        worker = RolloutWorker(
            SyncOrchestrator(config(server, home / "run")), TASKS, arguments(home, queue_maxsize=1)
        )
        worker.update_model_version(3)
        worker.start()
        samples = []
        for _ in range(3 * GROUP):
            samples.append(worker.rollout_buffer.get(timeout=DEADLINE_S))
            assert worker.rollout_buffer.qsize() < GROUP
        worker.check_health(60.0)
        with pytest.raises(RuntimeError, match="started before"):
            worker.start()
        worker.stop()
        worker.stop()
        rows = recorded(home / "run")
        assert list(home.glob("orchestrator-*")) == []
    assert {sample.model_version for sample in samples} == {3}
    same_as_recorded(samples, rows)
    # Tasks come again and again; the rollout that failed gives no sample and is counted.
    assert {sample.prompt[-1]["role"] for sample in samples} == {"user"}
    counted = []
    while not worker.metrics_queue.empty():
        counted.append(worker.metrics_queue.get())
    assert sum(one["rollout/unscored_total"] for one in counted) >= 1.0
    assert all(one["completions/clipped_ratio"] == (0.0, float(GROUP)) for one in counted)


def test_side_lines_have_the_advantage_of_their_rollout(folder: Path) -> None:
    def planning(call: Call) -> Reply | str:
        return "Plan: think.\n<end_plan>" if not call.task else script(call)

    with place() as home, serving("vllm", a_model(), planning) as server:
        settings = config(server, home / "run", planning_interval=1, trained_segments="all_segments")
        worker = RolloutWorker(SyncOrchestrator(settings), TASKS[2:3], arguments(home))
        worker.update_model_version(1)
        worker.start()
        samples = [worker.rollout_buffer.get(timeout=DEADLINE_S) for _ in range(2 * GROUP)]
        worker.stop()
        rows = recorded(home / "run")
    found: dict[str, set[float]] = {}
    mains = set()
    for sample in samples:
        row = rows[tuple(sample.input_ids.tolist())]
        found.setdefault(row.rollout_id, set()).add(sample.advantage)
        mains.add(row.main)
    assert mains == {True, False}
    assert all(len(advantages) == 1 for advantages in found.values())


def test_an_error_of_the_rollouts_comes_out_of_check_health(folder: Path) -> None:
    class Failing(Listener):
        def attempt(self, result: Member | Attempt) -> None:
            raise ZeroDivisionError("in a listener")

    with place() as home, serving("vllm", a_model(), script) as server:
        observer = Observer(listeners=[Failing()])
        worker = RolloutWorker(SyncOrchestrator(config(server), observer), TASKS, arguments(home))
        worker.update_model_version(1)
        worker.start()
        assert worker._thread is not None
        worker._thread.join(DEADLINE_S)
        with pytest.raises(RuntimeError, match="the rollouts have ended: in a listener") as raised:
            worker.check_health(60.0)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        worker.stop()


def test_tasks_of_which_none_can_be_rolled_out_end_it(folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        worker = RolloutWorker(SyncOrchestrator(config(server)), [BadTask("torn", "no question")], arguments(home))
        worker.start()
        assert worker._thread is not None
        worker._thread.join(DEADLINE_S)
        with pytest.raises(RuntimeError, match="none of the tasks can be rolled out"):
            worker.check_health(60.0)
        worker.stop()


def test_stop_cancels_rollouts_that_would_go_on_for_hours(folder: Path) -> None:
    begun = threading.Event()

    class Says(Listener):
        def begun(self, plan: Any, node: str) -> None:
            begun.set()

    def slow(call: Call) -> Reply | str:
        return "Thought: wait.\n<code>\nimport time\ntime.sleep(9_000)\n</code>"

    with place() as home, serving("vllm", a_model(), slow) as server:
        long = {"step_timeout": 9_000, "rollout_timeout": 9_000, "rollout_deadline": 9_000}
        observer = Observer(listeners=[Says()])
        worker = RolloutWorker(SyncOrchestrator(config(server, **long), observer), TASKS, arguments(home))
        worker.update_model_version(1)
        worker.start()
        assert begun.wait(DEADLINE_S)
        worker.check_health(60.0)
        worker.stop()
        worker.check_health(60.0)
        assert worker.rollout_buffer.empty()
        assert list(home.glob("orchestrator-*")) == []


PROGRAM = """
import json, sys
from pathlib import Path
from orchestrator import SyncOrchestrator, Task, load_config
from orchestrator.trainers.trl_async import RolloutWorker
from tests.integration.trainers.test_trl_async import arguments

home, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
tasks = [Task("q0", "What is number 0 (of q0!)?", "0")]
worker = RolloutWorker(SyncOrchestrator(load_config(**settings)), tasks, arguments(home, queue_maxsize=1))
worker.update_model_version(1)
worker.start()
worker.rollout_buffer.get()
sys.exit(3)
"""


def test_a_trainer_that_ends_without_stopping_it_leaves_nothing_behind(folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        settings = as_mappings(config(server, home / "run"))
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(home), json.dumps(settings)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "TMPDIR": str(home)},
        )
        assert ended.returncode == 3, ended.stderr
        assert "Traceback" not in ended.stderr
        assert list(home.glob("orchestrator-*")) == []


def test_a_drained_orchestrator_says_so(folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        orchestrator = SyncOrchestrator(config(server))
        worker = RolloutWorker(orchestrator, TASKS, arguments(home, queue_maxsize=0))
        worker.update_model_version(1)
        worker.start()
        orchestrator.drain()
        assert worker._thread is not None
        worker._thread.join(DEADLINE_S)
        with pytest.raises(RuntimeError, match="drained while the trainer still wanted samples"):
            worker.check_health(60.0)
        worker.stop()


def test_what_cannot_be_trained_on_is_refused_before_anything_starts(folder: Path) -> None:
    with place() as home, serving("vllm", a_model(), script) as server:
        args = arguments(home)
        with pytest.raises(ConfigError, match=r"env\.total_steps"):
            RolloutWorker(SyncOrchestrator(config(server, total_steps=3)), TASKS, args)
        with pytest.raises(ConfigError, match=r"env\.curriculum"):
            RolloutWorker(SyncOrchestrator(config(server, curriculum="pools")), TASKS, args)
        cold = SyncOrchestrator(config(server, temperature=0.6))
        with pytest.raises(ConfigError, match=r"env\.temperature is 0\.6 and TRL's temperature 1"):
            RolloutWorker(cold, TASKS, args)
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            RolloutWorker(cold, TASKS, arguments(home, temperature=0.6))
        RolloutWorker(cold, TASKS, arguments(home, temperature=0.6), logprobs_mode="processed")
        text = SyncOrchestrator(config(server, token_source="retokenize"))
        worker = RolloutWorker(text, [*TASKS, Task("x", "?")], args)
        with pytest.raises(ConfigError, match=r"sampled token ids, and the endpoint's are made from text"):
            worker.start()
        worker.stop()
