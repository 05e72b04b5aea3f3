"""TRL's loop for OpenEnv sessions over ours: what it puts into its buffer is the record, bit by bit.

The loop is what `HarnessRolloutWorker` runs in its process. The worker itself needs vLLM; the loop does not.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openenv", reason="needs the extra openenv")
pytest.importorskip("trl", reason="needs TRL")

from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo.openenv_harness import _HarnessRolloutLoop

from orchestrator import Task, load_config
from orchestrator.trainers.openenv import RolloutSessionFactory
from tests.e2e.endpoint import ScriptedEndpoint, answers, says, scripted_endpoint
from tests.fakes.runs import DEADLINE_S, lines, place
from tests.fakes.tokenizer import tokenizer_folder
from tests.integration.trainers.test_openenv import trained

pytestmark = pytest.mark.trainers

TASKS = [Task(f"q{n}", f"What is number {n} (of q{n}!)?", str(n)) for n in range(2)]
SCRIPT: dict[str, Any] = {
    f"of q{n}!": [
        [says("Look.", f"x = {n}\nprint(x)"), answers("x")],
        [answers("-1")],
        [{"text": answers("0"), "fault": {"kind": "500"}}],  # before anything was sampled: nobody's choice
    ]
    for n in range(2)
}
GENERATIONS, GROUPS = 4, 4


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with place() as home:
        monkeypatch.setattr("tempfile.tempdir", str(home))
        yield home


@contextmanager
def trl_loop(endpoint: ScriptedEndpoint, run: Path, tasks: list[Task]) -> Iterator[queue.Queue[Any]]:
    """TRL's loop in a thread; gives its buffer of samples."""
    env = {
        "launcher": "process",
        "group_size": 1,
        "max_concurrent_sandboxes": 4,
        "tokenizer_name": str(tokenizer_folder()),
        "token_source": "exact",
        "scoring_strategy": "correctness",
        "max_retries": 0,
        "group_policy": "drop",
        "run_dir": str(run),
        "seed": 7,
    }
    config = load_config(env=env, openai={"base_url": endpoint.base_url, "model_name": "scripted"})
    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_folder()))
    tokenizer.response_template = "{}"  # for loops in which TRL samples itself
    buffer: queue.Queue[Any] = queue.Queue()
    PartialState()  # as TRL's process does, for its logging
    loop = _HarnessRolloutLoop(
        harness_session_factory=functools.partial(RolloutSessionFactory, config, tasks),
        model_name="scripted",
        dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": t.question}]} for t in tasks]),
        reward_funcs=[],
        processing_class=tokenizer,
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=buffer,
        model_version_value=SimpleNamespace(value=0),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(1),
        metrics_queue=queue.Queue(),
        num_generations=GENERATIONS,
        max_inflight_tasks=GENERATIONS,
    )
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield buffer
    finally:
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        thread.join(DEADLINE_S)
        loop._factory.close()
    assert not loop._failed_event.is_set()


def test_what_trl_buffers_is_the_record_bit_by_bit(home: Path) -> None:
    groups: dict[int, list[Any]] = defaultdict(list)
    with scripted_endpoint(SCRIPT, "--dialect", "vllm", by="seed") as endpoint:
        with trl_loop(endpoint, home / "run", TASKS) as buffer:
            while len(groups) <= GROUPS:  # a group is whole when the next one begins
                sample = buffer.get(timeout=DEADLINE_S / 4)
                groups[sample.group_id].append(sample)
    rows = {
        (tuple(tokens), tuple(mask), np.asarray(logprobs, np.float32).tobytes())
        for tokens, mask, logprobs in trained(home / "run").values()
    }
    record = lines(home / "run" / "rollouts.jsonl")
    broken = [line for line in record if line["score"] is None and line["outcome"] != "cancelled"]
    seeds = [line["plan"]["sampling"]["seed"] for line in record]
    assert {line["outcome"] for line in broken} == {"llm_error"}
    assert len(set(seeds)) == len(seeds), "TRL gives all rollouts of a group the same seed"
    # Groups arrive in the order in which TRL scored them. The last to arrive may be cut, whatever its number.
    numbers = list(groups)[:GROUPS]
    for number in numbers:
        for sample in groups[number]:
            logprobs = sample.old_log_probs.tobytes()  # in 32 bits
            assert (tuple(sample.input_ids), tuple(sample.completion_mask), logprobs) in rows
            assert sample.completion[-1]["role"] == "assistant"
        rewards = np.array([sample.metrics["reward"] for sample in groups[number]])
        assert set(rewards) <= {0.0, 1.0}
        # What broke is not in the mean: it is no 0.
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        assert [sample.advantage for sample in groups[number]] == pytest.approx(advantages)
    assert len(broken) >= 1
    assert sum(len(groups[number]) for number in numbers) < GROUPS * GENERATIONS
