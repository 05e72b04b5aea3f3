"""verl's own loop worker and server client, with our loop in live sandboxes: what comes out is the record."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra `verl`")

import numpy as np
import psutil
import torch
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker, DictConfigWrap
from verl.protocol import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset

from orchestrator.errors import ConfigError
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import read_attempt
from orchestrator.run.rows import Row, recorded_rows
from orchestrator.trainers import verl as connection
from orchestrator.trainers.verl import OrchestratorAgentLoop, RolloutLost
from tests.e2e.endpoint import answers, says
from tests.fakes.inference.script import always, by_task
from tests.fakes.runs import place
from tests.fakes.tokenizer import tokenizer_folder
from tests.fakes.verl_servers import Servers

pytestmark = pytest.mark.trainers

SCRIPT = {
    f"of q{n}!": [
        [says("Look.", f"x = {n}\nprint(x)"), answers("x")],
        [answers("-1")],
        [says("Look twice.", f"x = {n}\nprint(x, x)"), says("And again.", "print('again', x)"), answers("x")],
    ]
    for n in range(3)
}
ENV = {"launcher": "process", "max_concurrent_sandboxes": 4, "scoring_strategy": "correctness"}
TRAINING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
PROMPT, RESPONSE = 4096, 2048


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with place() as home:
        monkeypatch.setattr("tempfile.tempdir", str(home))
        yield home
        connection.close()
        assert not list(home.glob("orchestrator-*"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder as verl reads it, without weights."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(tokenizer_folder(), folder, dirs_exist_ok=True)
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 1500, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4}))
    return folder


def trainer_config(model: Path, **rollout: Any) -> DictConfig:
    """verl's own configuration, as its `main_ppo` composes it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    config.actor_rollout_ref.model.path = str(model)
    chosen = {"name": "vllm", "prompt_length": PROMPT, "response_length": RESPONSE, "calculate_log_probs": True}
    for name, value in {**chosen, **rollout}.items():
        config.actor_rollout_ref.rollout[name] = value
    return config


def a_worker(config: DictConfig, client: Any, home: Path, **settings: Any) -> AgentLoopWorker:
    """A worker as verl's manager makes it, with our loop from a file of the user."""
    loop = {
        "name": "orchestrator",
        "_target_": "orchestrator.trainers.verl.OrchestratorAgentLoop",
        "env": {**ENV, **settings},
    }
    file = home / "loops.yaml"
    OmegaConf.save(OmegaConf.create([loop]), file)
    config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(file)
    return AgentLoopWorker(config, client)


def a_row(n: int, **more: Any) -> dict[str, Any]:
    """A row of verl's data set."""
    return {
        "raw_prompt": [{"role": "user", "content": f"What is number {n} (of q{n}!)?"}],
        "data_source": "numbers",
        "reward_model": {"style": "rule", "ground_truth": str(n)},
        "extra_info": {"index": n, "task_id": f"q{n}"},
        **more,
    }


def a_batch(*rows: dict[str, Any], validate: bool = False) -> DataProto:
    columns = {}
    for name in rows[0]:
        columns[name] = np.empty(len(rows), dtype=object)
        columns[name][:] = [row[name] for row in rows]
    columns["agent_name"] = np.array(["orchestrator"] * len(rows), dtype=object)
    return DataProto(non_tensor_batch=columns, meta_info={"validate": validate, "global_steps": 1})


def a_loop(config: DictConfig, client: Any, **settings: Any) -> OrchestratorAgentLoop:
    """A loop as the worker makes it."""
    from transformers import AutoTokenizer

    return OrchestratorAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=client,
        tokenizer=AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path),
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        env={**ENV, **settings},
    )


def recorded(runs: Path) -> dict[str, Row]:
    """The main rows of all workers' run directories, by rollout."""
    rows: dict[str, Row] = {}
    for file in runs.glob("*/rollouts.jsonl"):
        for line in file.read_bytes().splitlines():
            if b'"index"' in line:
                row = recorded_rows(read_attempt(line), GroupFormat())[0]
                assert row.rollout_id not in rows
                rows[row.rollout_id] = row
    return rows


def same_as_recorded(output: AgentLoopOutput, row: Row) -> None:
    assert tuple(output.prompt_ids) == row.prompt_ids
    assert tuple(output.response_ids) == row.completion_ids
    assert tuple(output.response_mask) == row.env_mask
    assert row.logprobs is not None
    assert output.response_logprobs == [0.0 if p is None else p for p in row.logprobs]
    assert output.reward_score == row.score


# ---------------------------------------------------------------- verl's worker


async def test_a_batch_of_verls_worker_is_the_record_bit_by_bit(model: Path, home: Path) -> None:
    servers, config = Servers(by_task(SCRIPT)), trainer_config(model)
    worker = a_worker(config, servers.client(config), home, run_dir=str(home / "runs"))
    rows = [a_row(n) for n in range(3) for _ in range(3)]  # as verl repeats prompts: three samples of each
    batch = await worker.generate_sequences(a_batch(*rows))

    found = recorded(home / "runs")
    assert len(found) == 9
    extras = batch.non_tensor_batch["extras"]
    assert [extra["task_id"] for extra in extras] == [f"q{n}" for n in range(3) for _ in range(3)]
    assert {extra["rollout_id"] for extra in extras} == set(found)
    sampled_by_servers = {tuple(asked.output.token_ids) for asked in servers.asked}
    for place_in_batch, extra in enumerate(extras):
        row = found[extra["rollout_id"]]
        prompt, response = batch.batch["prompts"][place_in_batch], batch.batch["responses"][place_in_batch]
        count = len(row.completion_ids)
        assert prompt[PROMPT - len(row.prompt_ids) :].tolist() == list(row.prompt_ids)
        assert response[:count].tolist() == list(row.completion_ids)
        attention = batch.batch["attention_mask"][place_in_batch]
        assert int(attention.sum()) == len(row.prompt_ids) + count
        mask = batch.batch["response_mask"][place_in_batch]
        assert mask.tolist() == [*row.env_mask, *[0] * (RESPONSE - count)]
        logprobs = batch.batch["rollout_log_probs"][place_in_batch]
        assert row.logprobs is not None
        padded = [p or 0.0 for p in row.logprobs] + [0.0] * (RESPONSE - count)
        assert torch.equal(logprobs, torch.tensor(padded))
        assert int(logprobs.count_nonzero()) == sum(row.env_mask)
        scores = batch.batch["rm_scores"][place_in_batch]
        assert scores.count_nonzero() <= 1
        assert scores[count - 1].item() == row.score
        assert batch.non_tensor_batch["__num_turns__"][place_in_batch] == len(row.messages) - 1
        assert runs_of_ones(row) <= sampled_by_servers
    outcomes = sorted(float(scores.sum()) for scores in batch.batch["rm_scores"])
    assert outcomes == [0.0] * 3 + [1.0] * 6  # of each task's samples one is wrong: they sampled differently
    assert set(batch.non_tensor_batch["min_global_steps"]) == {0}


def runs_of_ones(row: Row) -> set[tuple[int, ...]]:
    """The completions of a row: what is trained without a gap."""
    found, run = set(), []
    for token, mask in zip((*row.completion_ids, 0), (*row.env_mask, 0), strict=True):
        if mask:
            run.append(token)
        elif run:
            found.add(tuple(run))
            run = []
    return found


async def test_validation_samples_as_verl_says_and_is_not_training_data(model: Path, home: Path) -> None:
    servers, config = Servers(by_task(SCRIPT)), trainer_config(model)
    worker = a_worker(config, servers.client(config), home, run_dir=str(home / "runs"))
    trained = await worker.generate_sequences(a_batch(a_row(0)))
    validated = await worker.generate_sequences(a_batch(a_row(0), a_row(1), validate=True))
    assert [asked.parameters["temperature"] for asked in servers.asked[-2:]] == [0.0, 0.0]
    assert validated.batch["rm_scores"].shape == (2, RESPONSE)
    assert set(recorded(home / "runs")) == {trained.non_tensor_batch["extras"][0]["rollout_id"]}


# ---------------------------------------------------------------- new weights


@pytest.mark.parametrize("joins", [False, True], ids=["continued here", "continued by verl's client"])
async def test_aborted_completions_are_continued_and_name_their_steps(
    model: Path, home: Path, joins: bool
) -> None:
    """The first request is aborted inside its closing code tag: neither part holds the stop string."""
    config, (said, last) = trainer_config(model), SCRIPT["of q0!"][0]
    whole = Servers(always(said)).model.encode(said)
    behind = len(whole) - 1
    servers = Servers(always(said, last), abort_after={0: behind}.get)
    loop = a_loop(config, servers.client(config, joins=joins), run_dir=str(home / "runs"))
    output = await loop.run(dict(TRAINING), **a_row(0))

    (row,) = recorded(home / "runs").values()
    same_as_recorded(output, row)
    first, second, *_ = servers.asked
    assert first.output.stop_reason == "aborted"
    assert second.prompt_ids == first.prompt_ids + first.output.token_ids
    assert first.parameters["max_tokens"] - second.parameters["max_tokens"] == behind
    assert not servers.model.decode(first.output.token_ids).endswith("</code>")
    ids = first.output.token_ids + second.output.token_ids
    assert ids[:-1] == whole
    assert ids[-1] in servers.model.ends, "the server did not stop at the stop string"
    assert output.response_ids[: len(ids) - 1] == whole
    assert output.response_mask[: len(ids)] == [1] * len(whole) + [0]
    assert [(span.tokens, span.oldest, span.newest) for span in row.policy_spans] == spans(servers, output, joins)
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 1)
    assert output.reward_score == 1.0
    assert output.response_logprobs is not None
    assert output.response_logprobs[: len(whole)] == (first.logprobs + second.logprobs)[:-1]


def spans(servers: Servers, output: AgentLoopOutput, joins: bool) -> list[tuple[int, str, str]]:
    """Tokens of each version, or of both where verl's client does not say which are whose."""
    first = len(servers.asked[0].output.token_ids)
    second = len(servers.asked[1].output.token_ids) - 1  # without the end token behind the stop string
    rest = sum(output.response_mask) - first - second
    if joins:
        return [(first + second, "0", "1"), (rest, "1", "1")]
    return [(first, "0", "0"), (second + rest, "1", "1")]


# ---------------------------------------------------------------- many samples


async def test_samples_at_once_share_one_orchestrator_and_none_is_drawn_like_another(
    model: Path, home: Path
) -> None:
    servers, config = Servers(by_task(SCRIPT), servers=3), trainer_config(model)
    client = servers.client(config)
    loops = [a_loop(config, client, run_dir=str(home / "runs"), max_concurrent_sandboxes=3) for _ in range(12)]
    outputs = await asyncio.gather(
        *(loop.run(dict(TRAINING), **a_row(n % 2, priority=np.int64(n))) for n, loop in enumerate(loops))
    )
    found = recorded(home / "runs")
    assert len(list((home / "runs").iterdir())) == 1
    for output in outputs:
        same_as_recorded(output, found[output.extra_fields["extras"]["rollout_id"]])
    assert len({output.extra_fields["extras"]["rollout_id"] for output in outputs}) == 12

    firsts = [asked for asked in servers.asked if not any(m.role == "assistant" for m in asked.messages)]
    assert len({asked.parameters["seed"] for asked in firsts}) == len(firsts) == 12
    assert {asked.server for asked in firsts} == {0, 1, 2}
    assert {asked.priority for asked in firsts} == set(range(12))
    assert len(servers.sessions) == 12, "one session for each sample: its line is in one server's cache"
    assert servers.loops == {asyncio.get_running_loop()}, "verl's client is used on verl's event loop"


async def test_a_cancelled_sample_leaves_no_sandbox_and_the_next_one_is_rolled_out(
    model: Path, home: Path
) -> None:
    asked = asyncio.Event()

    def script(call: Any) -> str:
        asked.set()
        return answers("0")

    hold = asyncio.Event()
    servers, config = Servers(script, hold=hold), trainer_config(model)
    loop = a_loop(config, servers.client(config), run_dir=str(home / "runs"), max_concurrent_sandboxes=1)
    held = asyncio.create_task(loop.run(dict(TRAINING), **a_row(0)))
    await asked.wait()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    hold.set()
    output = await loop.run(dict(TRAINING), **a_row(0))
    assert output.reward_score == 1.0
    lines = [json.loads(line) for line in next((home / "runs").glob("*/rollouts.jsonl")).read_text().splitlines()]
    assert sorted(line["outcome"] for line in lines if "index" in line) == ["cancelled", "finished"]


# ---------------------------------------------------------------- what is no sample


async def test_a_server_that_fails_is_no_sample_and_no_score(model: Path, home: Path) -> None:
    """The client raises for every request: the sample is lost, after its retries, with the servers' word."""
    config = trainer_config(model)
    servers = Servers(by_task(SCRIPT), error=lambda number: RuntimeError("boom\n  no GPU"))
    settings = {"max_retries": 0, "run_dir": str(home / "runs")}
    loop = a_loop(config, servers.client(config), **settings)
    with pytest.raises(RolloutLost, match=r"of q0: llm_error: verl's server: no GPU \(4 attempts\)"):
        await loop.run(dict(TRAINING), **a_row(0))
    assert {(row.outcome, row.score) for row in recorded(home / "runs").values()} == {("llm_error", None)}


async def test_a_server_that_fails_for_a_while_costs_nothing(model: Path, home: Path) -> None:
    servers = Servers(by_task(SCRIPT), error=lambda number: RuntimeError("away") if number in (0, 2, 3) else None)
    config = trainer_config(model)
    loop = a_loop(config, servers.client(config), run_dir=str(home / "runs"))
    output = await loop.run(dict(TRAINING), **a_row(0))
    (row,) = recorded(home / "runs").values()
    same_as_recorded(output, row)
    assert row.outcome == "finished"


async def test_a_lost_sandbox_is_rolled_out_again(model: Path, home: Path) -> None:
    lost: list[int] = []
    hold = asyncio.Event()  # the lost one gets no answer

    def lose(number: int) -> None:
        if number > 0:
            hold.set()
            return
        lost.extend(sandboxes())
        for process in lost:
            os.killpg(process, signal.SIGKILL)

    servers, config = Servers(by_task(SCRIPT), error=lose, hold=hold), trainer_config(model)
    env = {"run_dir": str(home / "runs"), "max_concurrent_sandboxes": 1, "warm_sandboxes": 0}
    output = await a_loop(config, servers.client(config), **env).run(dict(TRAINING), **a_row(0))
    assert len(lost) == 1
    found = recorded(home / "runs")
    assert sorted(row.outcome for row in found.values()) == ["finished", "sandbox_lost"]
    rollout = output.extra_fields["extras"]["rollout_id"]
    assert rollout.endswith("-a1")
    same_as_recorded(output, found[rollout])


def sandboxes() -> list[int]:
    """The first processes of sandboxes, which are children of this one."""
    return [process.pid for process in psutil.Process().children() if "sandbox" in process.cmdline()]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"reward_model": {"ground_truth": None}}, "q0: bad_task: the answer is missing"),
        ({"raw_prompt": [{"role": "system", "content": "Be brief."}]}, "bad_task: raw_prompt must be one text"),
        ({"raw_prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "raw_prompt must be one text"),
        ({"extra_info": {"task_id": "q0", "files": ["a.csv"]}}, "has no folder to find them in"),
    ],
    ids=["no answer", "a system prompt", "an image", "files without a folder"],
)
async def test_a_row_that_is_no_task_says_so(model: Path, home: Path, more: dict[str, Any], why: str) -> None:
    servers, config = Servers(by_task(SCRIPT)), trainer_config(model)
    loop = a_loop(config, servers.client(config))
    with pytest.raises(RolloutLost, match=why):
        await loop.run(dict(TRAINING), **a_row(0, **more))
    assert servers.asked == []


# ---------------------------------------------------------------- what verl's tensors hold


async def test_a_response_ends_where_verls_tensor_ends(model: Path, home: Path) -> None:
    """Steps without end: the last completion is cut at the last place, and no further one is asked for."""
    endless = always(says("More.", "print('once more, and once more, and once more')"))
    servers, config = Servers(endless), trainer_config(model, response_length=150)
    loop = a_loop(config, servers.client(config), run_dir=str(home / "runs"))
    output = await loop.run(dict(TRAINING), **a_row(0))
    (row,) = recorded(home / "runs").values()
    same_as_recorded(output, row)
    assert row.outcome == "context_length"
    assert "actor_rollout_ref.rollout.response_length is 150" in row.reason
    assert 100 < len(output.response_ids) <= 150
    assert output.reward_score == 0.0


async def test_prompts_without_room_for_the_agents_are_refused(model: Path, home: Path) -> None:
    config = trainer_config(model, prompt_length=512)
    loop = a_loop(config, Servers(by_task(SCRIPT)).client(config))
    with pytest.raises(ConfigError, match=r"prompt_length: the agent's system prompt alone has \d+ tokens"):
        await loop.run(dict(TRAINING), **a_row(0))


async def test_verls_v1_workers_get_the_same_tensors(model: Path, home: Path) -> None:
    """They take `as_dict` instead of padding."""
    servers, config = Servers(by_task(SCRIPT)), trainer_config(model)
    output = await a_loop(config, servers.client(config)).run(dict(TRAINING), **a_row(0))
    fields = output.as_dict()
    assert fields["prompts"].tolist() == output.prompt_ids
    assert fields["responses"].tolist() == output.response_ids
    assert fields["response_mask"].tolist() == output.response_mask
    assert torch.equal(fields["rollout_log_probs"], torch.tensor(output.response_logprobs))
    assert fields["rm_scores"][-1].item() == output.reward_score
    assert fields["extra_fields"]["min_global_steps"] == 0


@pytest.mark.docker
async def test_sealed_containers(model: Path, home: Path) -> None:
    servers, config = Servers(by_task(SCRIPT)), trainer_config(model)
    worker = a_worker(config, servers.client(config), home, run_dir=str(home / "runs"), launcher="docker")
    batch = await worker.generate_sequences(a_batch(*[a_row(n) for n in range(3)]))
    found = recorded(home / "runs")
    assert len(found) == 3
    for number, extra in enumerate(batch.non_tensor_batch["extras"]):
        row = found[extra["rollout_id"]]
        count = len(row.completion_ids)
        assert batch.batch["responses"][number][:count].tolist() == list(row.completion_ids)
        assert batch.batch["response_mask"][number][:count].tolist() == list(row.env_mask)
