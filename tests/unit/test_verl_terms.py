"""What verl says, in our words: its rows, its configuration, its servers' parameters and answers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.completion.base import CompletionRequest, ids_of
from orchestrator.errors import ConfigError
from orchestrator.trainers.verl_terms import (
    config_of,
    demand_unfiltered,
    is_raw,
    parameters_of,
    sampled_of,
    steps_of,
    task_of,
)
from orchestrator.types import BadTask, PolicySpan, Sampling, Task

TRAINER: dict[str, Any] = {
    "actor_rollout_ref": {
        "model": {"path": "some/model"},
        "rollout": {
            "name": "vllm",
            "temperature": 1.0,
            "top_p": 1,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "prompt_length": 3000,
            "response_length": 5000,
            "max_model_len": None,
            "calculate_log_probs": True,
        },
    },
    "data": {},
}
PLAIN = Sampling(1.0, 1.0, 100, 7)
ROW = {
    "raw_prompt": [{"role": "user", "content": "What is 6 times 7?"}],
    "data_source": "numbers",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 3, "split": "train"},
    "uid": "0c0ffee",
}


def trainer(**rollout: Any) -> dict[str, Any]:
    config = copy.deepcopy(TRAINER)
    config["actor_rollout_ref"]["rollout"].update(rollout)
    return config


def configured(config: dict[str, Any], **env: Any) -> Any:
    return config_of(config, env, tokenizer_name="a/folder", run_dir=Path("runs/w"))


# ---------------------------------------------------------------- configuration


def test_what_verl_decides_is_taken_from_it() -> None:
    config = trainer(temperature=0.7, top_p=0.9, calculate_log_probs=False)
    config["data"]["apply_chat_template_kwargs"] = {"enable_thinking": False}
    env = configured(config, scoring_strategy="correctness").env
    assert (env.temperature, env.top_p, env.max_token_length, env.group_size) == (0.7, 0.9, 8000, 1)
    assert (env.tokenizer_name, env.token_source, env.run_dir) == ("a/folder", "exact", Path("runs/w"))
    assert env.chat_template_kwargs == {"enable_thinking": False}
    assert env.scoring_strategy == "correctness"
    assert configured(trainer(max_model_len=6000)).env.max_token_length == 6000
    (server,) = configured(trainer()).openai
    assert (server.base_url, server.model_name) == ("", "some/model")


@pytest.mark.parametrize(
    ("rollout", "env", "why"),
    [
        (
            {},
            {"temperature": 0.5},
            r"env\.temperature: verl decides that \(actor_rollout_ref\.rollout\.temperature",
        ),
        ({}, {"group_size": 4}, r"env\.group_size: verl decides that \(actor_rollout_ref\.rollout\.n\); leave it"),
        ({}, {"seed": 1}, r"env\.seed: .* every worker has a seed of its own"),
        ({}, {"no_such": 1}, r"no_such"),
        ({"name": "trtllm"}, {}, r"rollout\.name trtllm: .* use vllm or sglang"),
        ({"name": "sglang"}, {}, r"skip_tokenizer_init: .*; set false"),
        ({"logprobs_mode": "raw_logits"}, {}, r"logprobs_mode raw_logits: set processed_logprobs or raw_logprobs"),
        ({"full_determinism": True}, {}, r"full_determinism: .*; set false"),
        ({"top_k": 50}, {}, r"rollout\.top_k 50: only temperature and top_p are sampled with; set -1"),
        ({"val_kwargs": {"top_k": 20}}, {}, r"rollout\.val_kwargs\.top_k 20: only"),
        ({"repetition_penalty": 1.1}, {}, r"repetition_penalty 1\.1: .*; set 1\.0"),
        ({"temperature": 0.7}, {}, r"calculate_log_probs: .* set temperature 1 and top_p 1, or this to false"),
        ({"top_p": 0.9}, {}, r"calculate_log_probs: "),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_what_cannot_be_is_refused(rollout: dict[str, Any], env: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configured(trainer(**rollout), **env)


def test_a_template_that_is_not_in_the_folder_is_refused() -> None:
    config = trainer()
    config["actor_rollout_ref"]["model"]["custom_chat_template"] = "{{ messages }}"
    with pytest.raises(ConfigError, match=r"custom_chat_template: .* leave this out"):
        configured(config)


def test_sglang_with_a_tokenizer_is_taken() -> None:
    assert configured(trainer(name="sglang", skip_tokenizer_init=False)).env.temperature == 1.0


# ---------------------------------------------------------------- tasks


def test_a_row_is_a_task_whose_id_follows_from_its_question() -> None:
    task, again = task_of(ROW, None), task_of({**ROW, "uid": "another"}, None)
    assert isinstance(task, Task)
    assert (task.question, task.answer, task.source) == ("What is 6 times 7?", "42", "numbers")
    assert task.task_id.startswith("numbers-")
    assert task == again
    other = task_of({**ROW, "raw_prompt": [{"role": "user", "content": "And 7 times 8?"}]}, None)
    assert isinstance(other, Task)
    assert other.task_id != task.task_id


def test_our_columns_come_along_in_extra_info(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    extra = {
        "task_id": "t1",
        "files": ["a.csv"],
        "level": None,
        "image": None,
        "limits": {"max_steps": 3, "step_timeout": None},
        "metadata": {"tags": ["x"]},
    }
    task = task_of({**ROW, "extra_info": extra}, tmp_path)
    assert isinstance(task, Task)
    assert (task.task_id, task.level, dict(task.limits)) == ("t1", None, {"max_steps": 3})
    assert [file.name for file in task.attachments] == ["a.csv"]
    assert task.metadata == {"tags": ["x"]}


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        [],
        [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
        [{"role": "assistant", "content": "x"}],
        [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "user"}],
    ],
    ids=str,
)
def test_a_prompt_that_is_more_than_a_question_is_no_task(prompt: Any) -> None:
    task = task_of({**ROW, "raw_prompt": prompt}, None)
    assert isinstance(task, BadTask)
    assert "one text of the user" in task.reason


@pytest.mark.parametrize("model", [None, {}, {"ground_truth": None}, {"ground_truth": ["4", {}]}, "42"], ids=str)
def test_an_answer_that_is_none_is_no_task(model: Any) -> None:
    assert isinstance(task_of({**ROW, "reward_model": model}, None), BadTask)


def test_a_number_is_an_answer() -> None:
    task = task_of({**ROW, "reward_model": {"ground_truth": 42.0}}, None)
    assert isinstance(task, Task)
    assert task.answer == "42"


# ---------------------------------------------------------------- completions


@dataclass
class Output:
    token_ids: list[int]
    log_probs: list[float] | None = None
    stop_reason: str | None = "completed"
    extra_fields: dict[str, Any] = field(default_factory=dict)


def request(sampling: Sampling = PLAIN) -> CompletionRequest:
    return CompletionRequest((), ids_of([1, 2]), ("</code>",), sampling, "g0-r0-a0", "t", 0, 1)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_every_parameter_is_said(server: str) -> None:
    said = parameters_of(request(), 60, server)
    limit, seed = {"vllm": ("max_tokens", "seed"), "sglang": ("max_new_tokens", "sampling_seed")}[server]
    assert (said.pop(limit), said.pop(seed)) == (60, 7)
    expected = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "n": 1}
    assert expected.items() <= said.items()
    assert said["stop"] == ["</code>"]
    assert said["logprobs"] is True, "verl's servers make of it what their engine wants"


@pytest.mark.parametrize(
    ("temperature", "top_p", "raw"),
    [(1.0, 1.0, True), (0.0, 1.0, True), (0.6, 1.0, False), (1.0, 0.95, False), (0.0, 0.5, False)],
)
def test_log_probs_of_another_distribution_are_not_asked_for_and_not_kept(
    temperature: float, top_p: float, raw: bool
) -> None:
    sampling = replace(PLAIN, temperature=temperature, top_p=top_p)
    assert is_raw(sampling) is raw
    assert parameters_of(request(sampling), 60, "vllm")["logprobs"] is raw
    assert sampled_of(Output([5], [-0.5]), sampling).logprobs == ([-0.5] if raw else None)


@pytest.mark.parametrize(
    ("said", "reason"),
    [("completed", ""), (None, ""), ("stop", "stop"), ("length", "length"), ("aborted", "aborted")],
)
def test_why_it_ended(said: str | None, reason: str) -> None:
    assert sampled_of(Output([5], [-0.5], said), PLAIN).finish_reason == reason


def test_an_aborted_request_may_have_neither_ids_nor_log_probs() -> None:
    sampled = sampled_of(Output([], None, "aborted", {"global_steps": 3}), PLAIN)
    assert (sampled.ids, sampled.logprobs, sampled.spans) == ([], [], ())


def test_training_steps_are_versions() -> None:
    fields = {"min_global_steps": 3, "max_global_steps": 4}
    assert sampled_of(Output([5, 6], [-0.5, -1], extra_fields=fields), PLAIN).spans == (PolicySpan(2, "3", "4"),)
    only = {"min_global_steps": None, "max_global_steps": 4}
    assert sampled_of(Output([5], [-0.5], extra_fields=only), PLAIN).spans == (PolicySpan(1, "4", "4"),)
    assert sampled_of(Output([5], [-0.5]), PLAIN).spans == ()
    assert steps_of(("10", "9", "11")) == (9, 11)
    assert steps_of(()) == (None, None)


def test_samplers_of_one_call_are_checked_too() -> None:
    demand_unfiltered({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True})
    with pytest.raises(ConfigError, match="top_k 20: only"):
        demand_unfiltered({"top_k": 20})
