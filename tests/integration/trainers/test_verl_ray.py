"""verl's default trainer asks for rollouts: its manager, Ray workers, TransferQueue; sandboxes in each worker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transfer_queue", reason="needs TransferQueue, as verl's default trainer does")
pytest.importorskip("verl", reason="needs the extra `verl`")

import numpy as np
import psutil

from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import read_attempt
from orchestrator.run.rows import Row, recorded_rows
from tests.e2e.endpoint import answers, says
from tests.fakes.runs import COMMAND, ROOT, place
from tests.fakes.tokenizer import tokenizer_folder

pytestmark = pytest.mark.trainers
START_S = 400.0


def a_row(n: int, question: str) -> dict[str, Any]:
    return {
        "raw_prompt": [{"role": "user", "content": question}],
        "data_source": "numbers",
        "reward_model": {"style": "rule", "ground_truth": str(n)},
        "extra_info": {"index": n, "task_id": f"q{n}"},
    }


def recorded(run: Path) -> dict[str, Row]:
    lines = (run / "rollouts.jsonl").read_bytes().splitlines()
    rows = [recorded_rows(read_attempt(line), GroupFormat())[0] for line in lines if b'"index"' in line]
    return {row.rollout_id: row for row in rows}


def test_samples_in_the_queue_are_the_record_and_a_lost_one_is_not_among_them() -> None:
    with place() as home:
        model = home / "model"
        shutil.copytree(tokenizer_folder(), model)
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 1500}
        (model / "config.json").write_text(json.dumps({**config, "hidden_size": 64, "num_attention_heads": 4}))
        env = {
            "launcher": "process",
            "max_concurrent_sandboxes": 2,
            "scoring_strategy": "correctness",
            "max_retries": 0,
            "run_dir": str(home / "runs"),
        }
        loop = {"name": "orchestrator", "_target_": "orchestrator.trainers.verl.OrchestratorAgentLoop", "env": env}
        (home / "loops.yaml").write_text(json.dumps([loop]))
        prompts = [a_row(0, "What is zero?"), a_row(1, "What is broken?"), a_row(2, "What is two?")]
        job = {"model": str(model), "loops": str(home / "loops.yaml"), "workers": 2, "n": 2, "prompts": prompts}
        turns = [says("Look.", "x = 0\nprint(x)"), answers("x")]
        (home / "job.json").write_text(json.dumps({**job, "turns": turns}))
        environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}", "TMPDIR": str(home), "HOME": str(home)}
        ended = subprocess.run(
            [sys.executable, "-m", "tests.fakes.verl_run", str(home)],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        told = json.loads(ended.stdout.splitlines()[-1])
        assert told["status"] == ["finished", "failure", "finished"]
        # Both samples of the second prompt are lost: verl has no trajectory, and so no reward, of them.
        assert sorted(told["samples"]) == [f"uid{n}_{sample}_0" for n in (0, 2) for sample in (0, 1)]
        runs = list((home / "runs").iterdir())
        assert len(runs) == 2
        for key, sample in told["samples"].items():
            extras = sample["extra_fields"]["extras"]
            row = recorded(Path(extras["run_dir"]))[extras["rollout_id"]]
            assert sample["prompts"] == list(row.prompt_ids)
            assert sample["responses"] == list(row.completion_ids)
            assert sample["response_mask"] == list(row.env_mask)
            assert row.logprobs is not None
            assert sample["rollout_log_probs"] == [np.float32(p or 0.0).item() for p in row.logprobs]
            assert sample["rm_scores"] == [0.0] * (len(row.completion_ids) - 1) + [row.score]
            assert row.score == (1.0 if key.startswith("uid0") else 0.0)
            assert (sample["tag"]["min_global_steps"], sample["tag"]["max_global_steps"]) == (3, 3)
        outcomes = [row.outcome for run in runs for row in recorded(run).values()]
        assert outcomes.count("finished") == 4
        assert set(outcomes) == {"finished", "llm_error"}
        for run in runs:
            verified = subprocess.run(
                [*COMMAND, "verify", str(run)], env=environ, capture_output=True, text=True, check=False
            )
            assert verified.returncode == 0, verified.stdout + verified.stderr
        # The workers were killed: their sandboxes ended with them.
        left = [process.cmdline() for process in psutil.process_iter() if str(home) in " ".join(_command(process))]
        assert left == []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []
