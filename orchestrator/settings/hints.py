"""Words that other programs use, and what they are called here: for the refusal of an unknown command or flag."""

from collections.abc import Collection, Iterable

from orchestrator.settings.row import nearest

_COMMANDS = {
    "list": "runs", "ls": "runs", "history": "runs", "status": "runs",
    "run": "process", "start": "process", "generate": "process", "rollout": "process", "resume": "process",
    "train": "serve", "eval": "evaluate", "test": "evaluate", "bench": "evaluate", "benchmark": "evaluate",
    "new": "init", "create": "init", "check": "doctor", "build": "image build", "report": "view", "show": "view",
    "diff": "compare", "clean": "cleanup", "prune": "cleanup", "download": "download-gaia",
    "gaia": "download-gaia", "score": "rescore", "grade": "rescore", "version": "--version",
}  # fmt: skip
# The first flag that the command takes is named.
_FLAGS = {
    ("--env.max_tasks",): ("limit", "num_tasks", "max_samples"),
    ("--env.group_size", "--env.eval_samples"): (
        *("n", "k", "samples", "num_samples", "repeats", "num_generations", "group_size"),
    ),
    ("--env.total_steps",): ("steps", "epochs", "iterations", "num_steps"),
    ("--env.max_steps",): ("turns", "max_turns", "max_iterations"),
    ("--env.dataset",): ("data", "task", "tasks", "benchmark"),
    ("--openai.base_url",): ("endpoint", "url", "host", "api_base", "server"),
    ("--openai.model_name",): ("model", "m"),
    ("--api-key",): ("key", "token", "openai_api_key"),
    ("--env.max_completion_tokens",): ("max_tokens", "max_new_tokens"),
    ("--env.max_concurrent_sandboxes",): ("concurrency", "parallel", "workers", "num_workers", "jobs", "j"),
    ("--env.run_dir", "--output"): ("out", "output", "output_dir", "o", "save"),
    ("--env.rollout_timeout",): ("timeout",),
    ("--env.scoring_strategy",): ("scorer", "reward", "scoring", "metric"),
    ("--env.tokenizer_name",): ("tokenizer",),
    ("--env.instructions",): ("prompt", "system_prompt"),
    ("--env.sandbox_image",): ("image",),
    ("--env.max_cost",): ("cost", "budget"),
    ("--config",): ("yaml", "config_file", "c", "f"),
}
_SENTENCES = {
    "branch": "; only training draws trees: an evaluation measures whole rollouts",
    "start_at": "; only training begins near the end: an evaluation measures whole rollouts",
    "batch_size": "; the trainer chooses the batch size, --env.group_size the rollouts of a task",
    "dry_run": "; to check a setup without a run, give `orchestrator doctor` the same flags",
    "version": "; `orchestrator --version` prints the version",
    "verbose": "; --env.agent_verbosity is how much the agent logs",
}


def command_hint(word: str, names: Iterable[str]) -> str:
    """Which command is meant by an unknown first word, as the end of the refusal; may be empty."""
    return f"; did you mean {meant}?" if (meant := _COMMANDS.get(word)) else nearest(word, names)


def flag_hint(name: str, flags: Collection[str]) -> str:
    """Which of the command's `flags` is meant by another one, as the end of the refusal; may be empty."""
    word = name.lstrip("-").rpartition(".")[2].replace("-", "_")
    if word in _SENTENCES:
        return _SENTENCES[word]
    meant = [flag for named, words in _FLAGS.items() if word in words for flag in named]
    meant += [f"--env.{word}", f"--openai.{word}"]
    flag = next((flag for flag in meant if flag in flags), None)
    return f"; did you mean {flag}?" if flag is not None else nearest(name, flags, 0.75)
