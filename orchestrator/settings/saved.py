"""The settings of a run that is resumed, replayed or scored again: what run.json says, and what may differ.

On resume, settings that decide about the data must stay the same. Where things run, how many at once and how long
to wait may change. A run directory may be somebody else's: then only settings about data are taken from it, and
the operator has to name addresses, code, confinement and files to write again. `proof` tells the user's own runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.run.files import RUN_FILE, groups_file_of, read_run
from orchestrator.run.proof import is_own
from orchestrator.settings.row import Given, Layer, Setting, give
from orchestrator.settings.table import ATROPOS, SECTIONS

MODEL = "openai.model_name"
ADDRESS = "openai.base_url"
GROUPS_PATH = "env.data_path_to_save_groups"
LAUNCHER = "env.launcher"
DEMO_TASKS = "python:orchestrator.demo.recording:tasks"  # comes with this package, so any run may name it
_KEY_MARK = "[key]"
_SHOWN_CHARACTERS = 300
# Settings that decide about the data and nothing else. Only these are taken from somebody else's run.json; the
# operator has to give all others.
_DATA = frozenset(
    {
        "agent", "authorized_imports", "batch_size", "chat_template_kwargs", "code_block_tags", "columns",
        "combined_weights", "custom_thinking_prompt", "dataset", "dataset_path",
        "ensure_scores_are_not_same", "eval_handling", "eval_limit_ratio", "eval_samples", "eval_split",
        "eval_temperature", "fail_on_tool_error", "final_answer_at_max_steps", "group_policy",
        "group_size", "include_messages", "inference_weight", "instructions", "judge_max_tokens",
        "judge_model_name", "length_penalty_weight", "levels", "main_line", "managed_agents",
        "max_completion_tokens", "max_completions", "max_cpu_seconds", "max_output_chars",
        "max_parallel_completions", "max_prompt_tokens",
        "max_reasoning_tokens", "max_sampled_tokens", "max_staleness", "max_steps", "max_tasks",
        "max_token_length", "max_tool_calls", "min_batch_allocation", "planning_interval", "reasoning_effort",
        "rollout_deadline", "rollout_timeout", "scorer_timeout", "scoring_strategy", "seed",
        "shuffle_seed", "split", "step_timeout", "steps_per_eval", "tags", "temperature", "thinking_mode",
        "token_source", "tokenizer_name", "tool_call_format",
        "tool_timeout", "top_p", "total_steps", "train_mixed_versions",
        "trained_segments", "untrained_outcomes", "use_chat_completion", "web_deny_hosts",
        "web_deny_words", "worker_timeout", "zero_variance",
    }
)  # fmt: skip
# They decide about the data too (what is killed for memory). But only the operator may set more than the default.
_SIZES = frozenset(
    {"max_proxy_bytes", "output_bytes", "output_files", "sandbox_cpus", "sandbox_memory", "sandbox_pids"}
)
# Settings that a command takes from a run, whoever made it.
_SCORING = frozenset(
    {
        "chat_template_kwargs", "columns", "combined_weights", "dataset", "dataset_path", "eval_split",
        "length_penalty_weight", "scorer_timeout", "scoring_strategy", "seed", "split", "tokenizer_name",
    }
)  # fmt: skip
_GROUPING = frozenset(
    {
        "group_policy", "group_size", "include_messages", "train_mixed_versions", "trained_segments",
        "untrained_outcomes", "zero_variance",
    }
)  # fmt: skip
TAKEN: Mapping[str, frozenset[str]] = {
    "replay": _SCORING | {"agent", "sandbox_cpus", "sandbox_memory", "sandbox_pids", "token_source"},
    "export": _GROUPING | {"chat_template_kwargs", "tokenizer_name"},
    "rescore": _SCORING | _GROUPING | {"judge_max_tokens", "judge_model_name"},
}
_OWN = {"replay": frozenset({"host_tools", "prompt_templates", "sandbox_tools"})}  # the operator's files and code
_FREE = frozenset(
    {
        "agent_verbosity", "cluster", "data_dir_to_save_evals", "debug_scoring", "docker_runtime", "drain_timeout",
        "fsync", "max_concurrent_sandboxes", "max_concurrent_tool_calls", "max_cost", "max_open_groups",
        "max_retries", "metrics_port", "oci_runtime", "price_table", "program_preload", "ray_address", "resume",
        "run_dir", "save_full_traces", "tavily_base_url", "total_steps", "view_port", "waive_hardening",
        "warm_sandboxes",
    }
)  # fmt: skip
_CONTACTED = frozenset(
    {"policy_address", "rollout_server_url", "use_wandb"}
)  # Atropos' settings are free, except these


@dataclass(frozen=True, slots=True)
class SavedSettings:
    """The settings that a run was begun with, its seed included.

    `own`: this user wrote the run.json on this machine, and it was not edited. `groups`: the run's groups file.
    """

    directory: Path
    env: Layer
    servers: list[Layer]
    own: bool
    groups: Path | None

    @classmethod
    def read(cls, directory: Path, asked: str = "env.resume") -> SavedSettings:
        """From run.json. Raises ConfigError, which names the setting `asked`."""
        told = read_run(directory, asked)
        config, where = told["config"], f"{directory / RUN_FILE}: "
        env = {k: v for k, v in _mapping(config.get("env"), where).items() if k not in ("resume", "run_dir")}
        servers = config.get("openai")
        if not isinstance(servers, list) or not servers:
            raise ConfigError(f"{where}it names no server")
        return cls(
            directory,
            _layer("env", {**env, "seed": told.get("seed")}, where),
            [_layer("openai", _mapping(server, where), where) for server in servers],
            is_own(told),
            directory / named if (named := groups_file_of(told)) else None,
        )

    def unless_own(self, given: Layer, *, servers_given: bool) -> SavedSettings:
        """All settings of the user's own run; of another one only those that decide about data.

        Addresses, code, confinement and files outside the run directory must be `given` then. Raises ConfigError,
        with the flags to add, if the run had one that is not.
        """
        if self.own:
            return self
        rows = SECTIONS["env"].rows()
        told = [(rows[key.removeprefix("env.")], had.value) for key, had in self.env.items() if key != GROUPS_PATH]
        kept = {row.key: self.env[row.key] for row, _ in told if row.name in _DATA or not _is_free(row)}
        wanted = [
            (row, value)
            for row, value in told
            if row.key in kept and (_is_operators(row, value) or _brings_images(row.name, value, self.env))
        ]
        if self.groups is not None:
            kept[GROUPS_PATH] = Given(self.groups, RUN_FILE)
            if not _is_inside(self.groups, self.directory):
                wanted.append((rows[GROUPS_PATH.removeprefix("env.")], self.groups.absolute()))
        addresses = [server[ADDRESS].value for server in self.servers if ADDRESS in server and not servers_given]
        if len(self.servers) == 1 and any(addresses):
            wanted.append((SECTIONS["openai"].rows()["base_url"], addresses[0]))
        flags = [_flag(row, value) for row, value in wanted if row.key not in given]
        if len(self.servers) > 1 and any(addresses):
            flags.append(f"--config FILE.yaml with its servers ({', '.join(map(_short, addresses))})")
        if flags:
            raise ConfigError(
                f"env.resume: {self.directory / RUN_FILE} was not written by you on this machine, or was edited: "
                "what is contacted, what code runs, how it is confined and what files are written is not taken "
                f"from it; if you trust it, add: {' '.join(flags)}"
            )
        return replace(self, env=kept)

    def below(self, env: Layer) -> Layer:
        """The given `env` settings, and the run's where none is given. Raises ConfigError for a given one that
        would change the data."""
        for name, row in SECTIONS["env"].rows().items():
            given, known = env.get(row.key), self.env.get(row.key)
            if given is None or known is None or name in _FREE or row.group == ATROPOS:
                continue
            if _absolute(given.value) != _absolute(known.value):
                raise ConfigError(
                    f"{given.label}: the run in {self.directory} has {_short(known.value)}, and a run is "
                    "continued as it began; leave this out, or start a new run"
                )
        return self.env | env

    def taken(self, command: str, env: Layer) -> Layer:
        """The given `env` settings, and the run's that the command needs if none is given. Raises
        ConfigError if the run names code, services or large sizes that are not given again."""
        rows = SECTIONS["env"].rows()
        wanted, own = TAKEN[command], _OWN.get(command, frozenset())
        kept: Layer = {}
        for key, told in self.env.items():
            name, value = key.removeprefix("env."), told.value
            named_again = name in own and value != rows[name].default
            if name in wanted:
                kept[key] = told
                code = _is_code(name, value) and value != DEMO_TASKS
                large = _is_large(rows[name], value)
                images = command == "replay" and _brings_images(name, value, env)
                named_again = code or (not self.own and (large or images))
            if named_again and key not in env:
                raise ConfigError(
                    f"the run in {self.directory} has {key} {_short(value)}: say --{key} yourself, that one or "
                    "another; a recording decides neither what code is called nor who is asked"
                )
        return kept | env

    def demand_models(self, servers: Sequence[Layer]) -> None:
        """Raises ConfigError unless the models are the run's. The servers' addresses may differ."""
        usual = Given(SECTIONS["openai"].rows()["model_name"].default, MODEL)
        saved, given = ({server.get(MODEL, usual).value for server in some} for some in (self.servers, servers))
        if saved != given:
            raise ConfigError(
                f"{MODEL}: the run in {self.directory} samples from {', '.join(sorted(saved))}, not from "
                f"{', '.join(sorted(given))}; start a new run for another model"
            )


def _is_free(row: Setting) -> bool:
    """Whether the setting may differ on resume, so that it need not be taken over."""
    return row.name in _FREE or (row.group == ATROPOS and row.name not in _DATA | _CONTACTED)


def _is_operators(row: Setting, value: object) -> bool:
    """Whether only the operator may set this value, not somebody else's run.json."""
    if row.name in _SIZES:
        return _is_large(row, value)
    return _is_code(row.name, value) or (row.name not in _DATA and value != row.default)


def _is_code(name: str, value: object) -> bool:
    """Whether the value names code to run or a service to ask."""
    chosen = isinstance(value, str) and name in ("agent", "dataset", "scoring_strategy")
    return chosen and (str(value).startswith(("python:", "program:")) or value == "judge")


def _brings_images(name: str, value: object, env: Layer) -> bool:
    """Whether the value names a data set whose rows may bring images as files: then it chooses what code runs."""
    files = isinstance(value, str) and value.startswith(("jsonl:", "csv:"))
    return name == "dataset" and files and LAUNCHER in env and env[LAUNCHER].value == "oci"


def _is_large(row: Setting, value: Any) -> bool:
    return row.name in _SIZES and bool(value > row.default)


def _is_inside(path: Path, directory: Path) -> bool:
    """Whether the path is inside, by its name. `directory` refuses links that lead out of a run directory."""
    below = path.absolute().parts[len(directory.absolute().parts) :]
    return path.absolute().is_relative_to(directory.absolute()) and ".." not in below


def _flag(row: Setting, value: Any) -> str:
    shown = "none" if value is None else row.kind.show(value)
    return f"{row.flag} {shlex.quote(shown[:_SHOWN_CHARACTERS])}"


def _absolute(value: Any) -> Any:
    return value.absolute() if isinstance(value, Path) else value


def _layer(section: str, values: Mapping[str, Any], where: str) -> Layer:
    layer: Layer = {}
    rows = SECTIONS[section].rows()
    for name, raw in values.items():
        if name not in rows:
            raise ConfigError(f"{where}{section}.{name} is unknown here: another version made this run")
        if rows[name].secret or (isinstance(raw, str) and _KEY_MARK in raw):
            continue  # run.json holds no keys; they have to be given again
        give(layer, rows[name], raw, f"{where}{section}.{name}")
    return layer


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}it describes no run")
    return value


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:60] + "..."
