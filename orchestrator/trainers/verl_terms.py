"""What verl says, in our words: its rows as tasks, its configuration as settings, its servers' answers. Pure.

No library of verl's is needed here: configurations are mappings, answers have the attributes of its TokenOutput.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.sampled import UNTOLD, RawSample
from orchestrator.completion.sglang import SglangDialect
from orchestrator.completion.vllm import sampling_params
from orchestrator.errors import ConfigError
from orchestrator.settings.config import Config
from orchestrator.settings.sources import load_config
from orchestrator.tasks.rows import make_task
from orchestrator.types import BadTask, PolicySpan, Sampling, Task

ROLLOUT = "actor_rollout_ref.rollout"
# Columns of our rows that an `extra_info` may have; the question and the answer have places of their own.
_EXTRA = ("task_id", "files", "level", "metadata", "scorer", "image", "limits")
# Settings that are verl's to make, and where it has them.
_VERLS = {
    "temperature": f"{ROLLOUT}.temperature",
    "top_p": f"{ROLLOUT}.top_p",
    "max_token_length": f"{ROLLOUT}.prompt_length and response_length",
    "tokenizer_name": "actor_rollout_ref.model",
    "token_source": "its servers give ids",
    "chat_template_kwargs": "data.apply_chat_template_kwargs",
    "group_size": f"{ROLLOUT}.n",
    "branch": "a sample is one whole rollout",
    "zero_variance": "algorithm.filter_groups",
    "curriculum": "its data loader chooses the rows",
    "total_steps": "trainer.total_training_steps",
    "seed": "it chooses the worker of a sample, so every worker has a seed of its own",
    "resume": "trainer.resume_mode; a worker begins a new run",
    "trained_segments": "a sample is one line",
}
_LOGPROBS = ("processed_logprobs", "raw_logprobs")  # the others are logits
_UNFILTERED = {"top_k": (-1, 0, None), "repetition_penalty": (1.0, None)}


class TokenOutput(Protocol):
    """What verl's server client returns."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    stop_reason: str | None
    extra_fields: Mapping[str, Any]


# ---------------------------------------------------------------- configuration


def config_of(
    trainer: Mapping[str, Any], env: Mapping[str, Any], *, tokenizer_name: str, run_dir: Path | None
) -> Config:
    """The settings of one worker. `trainer`: verl's whole configuration; `env`: the user's `env.*` settings.

    Raises ConfigError, also for what verl is configured to do and its rollouts here cannot.
    """
    for name in env:
        if name in _VERLS:
            raise ConfigError(f"env.{name}: verl decides that ({_VERLS[name]}); leave it out")
    rollout, model = trainer["actor_rollout_ref"]["rollout"], trainer["actor_rollout_ref"]["model"]
    _check_rollout(rollout)
    if model.get("custom_chat_template") is not None:
        raise ConfigError(
            "actor_rollout_ref.model.custom_chat_template: the template is read from the tokenizer's folder; save "
            "it there, name the folder in actor_rollout_ref.model.tokenizer_path and leave this out"
        )
    template = trainer["data"].get("apply_chat_template_kwargs")
    verls: dict[str, Any] = {
        "temperature": float(rollout["temperature"]),
        "top_p": float(rollout["top_p"]),
        "max_token_length": _longest(rollout),
        "tokenizer_name": tokenizer_name,
        "token_source": "exact",
        "group_size": 1,
        **({"chat_template_kwargs": dict(template)} if template else {}),
        **({} if run_dir is None else {"run_dir": str(run_dir)}),
    }
    return load_config(env={**env, **verls}, openai={"model_name": str(model["path"])})


def _check_rollout(rollout: Mapping[str, Any]) -> None:
    """Raises ConfigError for a configuration whose completions could not be recorded as what they are."""
    name = rollout.get("name")
    if name not in ("vllm", "sglang"):
        raise ConfigError(f"{ROLLOUT}.name {name}: agents need stop strings and log-probs; use vllm or sglang")
    if name == "sglang" and rollout.get("skip_tokenizer_init", True):
        raise ConfigError(
            f"{ROLLOUT}.skip_tokenizer_init: SGLang needs a tokenizer to find stop strings; set false"
        )
    if name == "vllm" and (mode := rollout.get("logprobs_mode", _LOGPROBS[0])) not in _LOGPROBS:
        raise ConfigError(f"{ROLLOUT}.logprobs_mode {mode}: set {' or '.join(_LOGPROBS)}")
    if rollout.get("full_determinism"):
        raise ConfigError(f"{ROLLOUT}.full_determinism: programs in sandboxes are not deterministic; set false")
    demand_unfiltered(rollout, f"{ROLLOUT}.")
    demand_unfiltered(rollout.get("val_kwargs") or {}, f"{ROLLOUT}.val_kwargs.")
    trained = Sampling(float(rollout["temperature"]), float(rollout["top_p"]), 1, 0)
    if rollout.get("calculate_log_probs") and not is_raw(trained):
        raise ConfigError(
            f"{ROLLOUT}.calculate_log_probs: log-probs are recorded of the model's own distribution only; set "
            "temperature 1 and top_p 1, or this to false"
        )


def _longest(rollout: Mapping[str, Any]) -> int:
    """Tokens of a line, prompt and response."""
    longest = int(rollout["prompt_length"]) + int(rollout["response_length"])
    model = rollout.get("max_model_len")
    return longest if model is None else min(longest, int(model))


def demand_unfiltered(parameters: Mapping[str, Any], where: str = "") -> None:
    """Raises ConfigError for samplers besides temperature and top_p."""
    for name, off in _UNFILTERED.items():
        if (value := parameters.get(name)) not in off:
            raise ConfigError(f"{where}{name} {value}: only temperature and top_p are sampled with; set {off[0]}")


def is_raw(sampling: Sampling) -> bool:
    """Whether servers give log-probs of the model's own distribution: they scale logits by the temperature, except
    for 0, and some cut the distribution by top_p."""
    return sampling.temperature in (0.0, 1.0) and sampling.top_p == 1.0


# ---------------------------------------------------------------- tasks


def task_of(row: Mapping[str, Any], files: Path | None) -> Task | BadTask:
    """The task of a row of verl's data set. `files`: the folder of the files that rows name.

    `raw_prompt` is one message of the user, as the agent has a system prompt of its own; the answer is
    `reward_model.ground_truth`. `extra_info` may hold the other columns of our rows.
    """
    source = str(row.get("data_source") or "verl")
    extra = _mapping(row.get("extra_info"))
    # A parquet file gives every row all keys that some row has.
    extras = {name: _without_nulls(extra[name]) for name in _EXTRA if extra.get(name) is not None}
    messages = list(row.get("raw_prompt") or ())
    if len(messages) != 1 or messages[0].get("role") != "user" or not isinstance(messages[0].get("content"), str):
        reason = "raw_prompt must be one text of the user: the agent brings its own system prompt"
        return BadTask(str(extras.get("task_id", source)), reason)
    columns = {
        "question": messages[0]["content"],
        "answer": _plain(_mapping(row.get("reward_model")).get("ground_truth")),
        **extras,
    }
    return make_task(columns, source=source, place=source, root=files)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return _plain(value)


def _plain(value: Any) -> Any:
    """A numpy value as Python's own."""
    return value.tolist() if hasattr(value, "tolist") else value


# ---------------------------------------------------------------- completions


def parameters_of(request: CompletionRequest, max_tokens: int, server: str) -> dict[str, Any]:
    """The `sampling_params` of verl's `generate`, for a `server` of this name; every parameter is in it."""
    if server == "sglang":
        parameters: dict[str, Any] = SglangDialect().body(request, "")["sampling_params"]
        parameters["max_new_tokens"] = max_tokens
    else:
        parameters = {**sampling_params(request), "max_tokens": max_tokens}
    return {**parameters, "logprobs": is_raw(request.sampling)}


def sampled_of(output: TokenOutput, sampling: Sampling) -> RawSample:
    """The answer of verl's servers. "completed" is a stop or a length."""
    ids, reason = list(output.token_ids), output.stop_reason
    return RawSample(
        ids=ids,
        logprobs=list(output.log_probs or ()) if is_raw(sampling) else None,
        finish_reason="" if reason in (None, "completed") else str(reason),
        prompt_tokens=UNTOLD,
        spans=_spans(output.extra_fields, len(ids)),
    )


def _spans(fields: Mapping[str, Any], tokens: int) -> tuple[PolicySpan, ...]:
    """The versions of the weights, which verl numbers by its training steps."""
    steps = [fields.get("min_global_steps"), fields.get("max_global_steps")]
    versions = [str(int(step)) for step in steps if step is not None]
    return (PolicySpan(tokens, versions[0], versions[-1]),) if versions and tokens else ()


def steps_of(versions: Sequence[str]) -> tuple[int | None, int | None]:
    """(the oldest, the newest) training step among these versions."""
    steps = [int(version) for version in versions]
    return (min(steps), max(steps)) if steps else (None, None)
