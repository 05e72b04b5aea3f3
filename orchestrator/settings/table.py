"""All settings: the one table from which flags, environment variables, YAML keys, help and checks derive.

`sources` says where values come from and which one wins; `row` defines a row, `kinds` how values are read.
"""
# ruff: noqa: RUF009 - `setting` makes dataclass fields, and their defaults are immutable

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from orchestrator.errors import ConfigError
from orchestrator.launch.hardening import MEASURE_NAMES
from orchestrator.launch.names import DEFAULT_IMAGE, is_path
from orchestrator.rules.redact import Secret
from orchestrator.rules.text import path_of
from orchestrator.scorers.base import COMBINED_WEIGHTS
from orchestrator.settings.agents import ManagedAgents, Tags
from orchestrator.settings.kinds import (
    Choice,
    File,
    Flag,
    Headers,
    Key,
    Number,
    Only,
    Options,
    Size,
    Table,
    Text,
    Texts,
    Whole,
    Words,
    forms,
    seconds,
)
from orchestrator.settings.row import AUTO, Setting, Settings, setting
from orchestrator.tasks.base import COLUMNS
from orchestrator.tools.rules import DENIED_HOSTS, DENIED_WORDS, HOST_RULE
from orchestrator.types import MAX_PARALLEL_COMPLETIONS, AgentKind, CallFormat, EndedName, MainLine, ManagedAgent

TASKS = "Tasks"
ROLLOUTS = "Rollouts and groups"
AGENT = "Agent"
LIMITS = "Limits of one rollout"
SANDBOX = "Sandbox"
TOOLS = "Web tools"
SAMPLING = "Sampling and tokens"
SCORING = "Scoring"
EVALUATION = "Evaluation"
OUTPUT = "Output"
ENDPOINT = "Endpoint"
ATROPOS = "Atropos"  # Atropos' names: accepted everywhere; most have an effect in `serve` only
GROUPS = (
    TASKS, ROLLOUTS, AGENT, LIMITS, SANDBOX, TOOLS, SAMPLING, SCORING, EVALUATION, OUTPUT, ENDPOINT, ATROPOS
)  # fmt: skip

_MEBIBYTE = 1 << 20
_TOKENS = 100_000_000
_OBJECT = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
_DATASET = re.compile(rf"gaia|(?:jsonl|csv|hf|reasoning_gym):\S.*|python:{_OBJECT}")
_SCORING = re.compile(rf"basic|correctness|combined|judge|python:{_OBJECT}")
_GROUP_POLICY = re.compile(r"backfill|drop|partial:[1-9][0-9]{0,5}")
_AGENT = re.compile(r"code|tool_calling|program:\S.*")
_BROUGHT = re.compile(rf"python:{_OBJECT}")
_RAY_ADDRESS = re.compile(r"auto|[A-Za-z0-9][\w.-]*:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")
_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9][\w.-]*|\[[0-9a-fA-F:]+\]):[1-9][0-9]{0,4}")
_PORT = re.compile(r"(?:(?:[A-Za-z0-9][\w.-]*|\[[0-9a-fA-F:]+\]):)?[0-9]{1,5}")
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*|(?:~|\.{1,2})?/[^\n]*")  # a name, or a path
_PROGRAM = re.compile(r"[A-Za-z0-9~./][\w.+/ -]*")
_MODULE = re.compile(r"\*|[A-Za-z_]\w*(?:\.\w+)*(?:\.\*)?")
_IMPORTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_PROGRAMS_ONLY = ("main_line", "program_preload")
_SMOLAGENTS_ONLY = (
    "planning_interval",
    "final_answer_at_max_steps",
    "instructions",
    "prompt_templates",
    "code_block_tags",
    "authorized_imports",
    "managed_agents",
    "sandbox_tools",
    "host_tools",
)
_HAS_WORD = re.compile(r"[^\W_]")
_EVAL_SPLIT = re.compile(r"hash:0?\.(?!0+$)[0-9]{1,9}|[A-Za-z0-9][\w.-]*")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        (parts.hostname or "").encode("idna")  # as a resolver does: it refuses an empty label
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_endpoint(text: str) -> bool:
    if text.startswith("replay:"):
        return text != "replay:" and bool(path_of(text.removeprefix("replay:")))
    return not text or _is_url(text)


def _is_agent(text: str) -> bool:
    return bool(_AGENT.fullmatch(text) and path_of(text.removeprefix("program:")))


_URL = Text("a URL with http:// or https://", "URL", _is_url)
_NAMED = Text("a name", "NAME", _NAME.fullmatch)
_OBJECTS = Texts(Text("of the form python:MODULE:TOOL", "TOOL", _BROUGHT.fullmatch))
_SCALE = Number(at_least=0, at_most=1)


@dataclass(frozen=True, kw_only=True, repr=False)
class EnvSettings(Settings):
    """What is rolled out and how, and where results go: `env.*`."""

    section: ClassVar[str] = "env"

    # Tasks
    dataset: str = setting(
        "gaia",
        forms(
            *("SOURCE", _DATASET.fullmatch, "gaia", "jsonl:PATH", "csv:PATH", "hf:NAME"),
            *("reasoning_gym:NAME?seed=..&size=..", "python:MODULE:FACTORY"),
        ),
        TASKS,
        "where tasks come from",
    )
    dataset_path: Path = setting(
        Path("data/gaia"), File(), TASKS, "the GAIA folder, metadata.jsonl or parquet layout"
    )
    split: str = setting("validation", _NAMED, TASKS, "which part of the dataset")
    eval_split: str | None = setting(
        None,
        Text("the name of a split, or hash:SHARE like hash:0.1", "NAME", _EVAL_SPLIT.fullmatch),
        TASKS,
        "the part for `evaluate`; `process` and `serve` then leave it out. hash: a share of env.split, by task_id",
        unset="none: nothing is held out, all of env.split is evaluated",
    )
    columns: Mapping[str, str] | None = setting(
        None,
        Table(COLUMNS, Text("the dataset's own name for it")),
        TASKS,
        "what the dataset calls our columns, of jsonl:, csv: and hf:",
    )
    levels: tuple[str, ...] = setting((), Texts(Text("a level", "LEVEL")), TASKS, "only tasks of these levels")
    tags: tuple[str, ...] = setting(
        (), Texts(Text("a tag", "TAG")), TASKS, 'only tasks with one of these in metadata["tags"]'
    )
    shuffle_seed: int | None = setting(
        None,
        Whole(0, 2**63 - 1),
        TASKS,
        "shuffles the tasks; the same seed gives the same order",
        unset="none: as they come",
    )
    max_tasks: int | None = setting(None, Whole(1), TASKS, "no more tasks than these", unset="none: all of them")
    total_steps: int = setting(
        -1,
        Whole(1, special=(-1,)),
        TASKS,
        "groups to make (`evaluate`: tasks); -1: every task once (`serve`: without end); if there are fewer "
        "tasks, they come again with new seeds (`evaluate`: each once)",
    )

    # Rollouts and groups
    group_size: int = setting(8, Whole(1, 1024), ROLLOUTS, "rollouts per task, compared with each other")
    max_steps: int = setting(12, Whole(1, 10_000), ROLLOUTS, "agent steps")
    max_cost: float | None = setting(
        None,
        Number(above=0),
        ROLLOUTS,
        "the run ends in order before its completions cost more; needs prices; docs/runs.md",
        unset="none",
    )
    price_table: Path | None = setting(
        None,
        File(),
        ROLLOUTS,
        "YAML with lines `MODEL: {prompt: 2.5, completion: 10}`, per million tokens",
        unset="none",
    )
    max_retries: int = setting(2, Whole(0, 100), ROLLOUTS, "new attempts after a failure of the infrastructure")
    group_policy: str = setting(
        "backfill",
        forms("POLICY", _GROUP_POLICY.fullmatch, "backfill", "drop", "partial:K", rest=" (K up to group_size)"),
        ROLLOUTS,
        "for a rollout that failed for good: draw another, drop its group, or keep a group of at least K",
    )
    zero_variance: Literal["keep", "drop", "resample"] = setting(
        "keep",
        Choice(("keep", "drop", "resample")),
        ROLLOUTS,
        "a group of equal scores is kept, dropped, or drawn once more",
    )
    max_open_groups: int | None = setting(
        None,
        Whole(1, 100_000),
        ROLLOUTS,
        "groups begun and not ended; auto: max_concurrent_sandboxes + 1, so that no sandbox idles while a group "
        "waits for its last rollouts. The price: finished rollouts stay in memory until their group ends, and "
        "in `serve` are of an older policy by then",
        unset=AUTO,
    )
    untrained_outcomes: tuple[str, ...] = setting(
        (), Words(tuple(EndedName)), ROLLOUTS, "outcomes masked in training instead of scored 0"
    )
    trained_segments: Literal["main_line", "all_segments"] | None = setting(
        None,
        Choice(("main_line", "all_segments")),
        ROLLOUTS,
        "main_line: one line of ids per rollout; all_segments: plans, rewritten histories and what was asked "
        "aside too, in groups files as groups of their own; auto: every line of a program where a trainer takes "
        "several lines of a rollout, otherwise the main line",
        unset=AUTO,
    )
    main_line: MainLine | None = setting(
        None,
        Choice(get_args(MainLine)),
        ROLLOUTS,
        "of a program: which line is trained where a rollout has one: the one with the most sampled tokens, that "
        "of the first or last completion, or the first whose request has the task's question; auto: longest",
        unset=AUTO,
    )
    train_mixed_versions: bool = setting(
        True, Flag(), ROLLOUTS, "train on rollouts that several policy versions sampled; no: they are masked"
    )
    max_staleness: int | None = setting(
        None,
        Whole(0, 1_000_000),
        ROLLOUTS,
        "groups with a rollout that is more policy versions behind are dropped when they are whole",
        unset="none: the trainer decides",
    )
    drain_timeout: float = setting(
        5.0, seconds(at_least=0), ROLLOUTS, "how long running rollouts may go on after a signal"
    )

    # Agent
    agent: str = setting(
        "code",
        forms("AGENT", _is_agent, "code", "tool_calling", "program:PATH"),
        AGENT,
        "what solves the task: smolagents' CodeAgent or ToolCallingAgent, or a program that calls OpenAI's or "
        "Anthropic's API",
    )
    program_preload: tuple[str, ...] = setting(
        (),
        Texts(Text("a module", "MODULE", _IMPORTED.fullmatch)),
        AGENT,
        "modules that a sandbox imports for the program before there is a task, so that no rollout waits for it",
    )
    planning_interval: int | None = setting(None, Whole(1, 10_000), AGENT, "steps between two plans")
    final_answer_at_max_steps: bool = setting(
        False, Flag(), AGENT, "one more completion for an answer when the steps are used up"
    )
    instructions: str | None = setting(None, Text(), AGENT, "added to the agent's system prompt")
    prompt_templates: Path | None = setting(
        None, File(), AGENT, "a YAML file of smolagents' prompt templates, all or some", unset="smolagents' own"
    )
    authorized_imports: tuple[str, ...] = setting(
        ("*",),
        Texts(Text("a module, or * for any", "MODULE", _MODULE.fullmatch)),
        AGENT,
        "modules that the prompt names as importable; the sandbox itself forbids none",
    )
    code_block_tags: tuple[str, str] = setting(
        ("<code>", "</code>"), Tags(), AGENT, "what a code agent writes its code between"
    )
    managed_agents: tuple[ManagedAgent, ...] = setting(
        (), ManagedAgents(), AGENT, "agents that the main one can call, each with steps of its own"
    )
    sandbox_tools: tuple[str, ...] = setting(
        (), _OBJECTS, AGENT, "functions of yours that run in the sandbox; their modules are sent there"
    )
    host_tools: tuple[str, ...] = setting(
        (), _OBJECTS, AGENT, "functions or tools of yours that run here, under the limits of the web tools"
    )

    # Limits of one rollout
    rollout_timeout: float = setting(
        240.0,
        seconds(above=0),
        LIMITS,
        "its own clock: time in the sandbox, not waiting for completions or host tools",
        also=("process_timeout",),
    )
    rollout_deadline: float = setting(
        3600.0, seconds(above=0), LIMITS, "wall clock from the assignment of the task"
    )
    step_timeout: float = setting(60.0, seconds(above=0), LIMITS, "one code step")
    max_output_chars: int = setting(
        20_000, Whole(100, 1_000_000), LIMITS, "printed output of a step, in characters"
    )
    max_completions: int | None = setting(
        None,
        Whole(1, 100_000),
        LIMITS,
        "completions; auto: 4 x max_steps + 16, a task's own max_steps where it has them",
        unset=AUTO,
    )
    max_parallel_completions: int = setting(
        16,
        Whole(1, MAX_PARALLEL_COMPLETIONS),
        LIMITS,
        "completions at a time of an agent that is a program; more requests of it wait",
    )
    max_tool_calls: int = setting(64, Whole(0, 100_000), LIMITS, "calls of host tools")
    max_prompt_tokens: int = setting(2_000_000, Whole(1, _TOKENS), LIMITS, "prompt tokens of all its completions")
    max_sampled_tokens: int = setting(200_000, Whole(1, _TOKENS), LIMITS, "tokens sampled in all its completions")
    max_proxy_bytes: int = setting(
        64 * _MEBIBYTE, Size(64 * 1024), LIMITS, "bytes its sandbox may send and receive, without attachments"
    )
    max_cpu_seconds: float | None = setting(
        None, Number(above=0), LIMITS, "CPU time of its sandbox, start included; checked at each request"
    )

    # Sandbox
    max_concurrent_sandboxes: int = setting(
        8,
        Whole(1, 10_000),
        SANDBOX,
        "rollouts at a time; each has a sandbox of its own",
        also=("max_concurrent_processes",),
    )
    warm_sandboxes: int | None = setting(
        None,
        Whole(0, 10_000),
        SANDBOX,
        "sandboxes kept ready on top; auto: up to a quarter of max_concurrent_sandboxes",
        unset=AUTO,
    )
    launcher: Literal["docker", "oci", "process"] = setting(
        "docker",
        Choice(("docker", "oci", "process")),
        SANDBOX,
        "what makes sandboxes; oci: runc or the like itself, without Docker; process: no isolation, model-written "
        "code runs as you",
    )
    cluster: Literal["none", "ray"] = setting(
        "none",
        Choice(("none", "ray")),
        SANDBOX,
        "where rollouts run; none: on this machine; ray: on the nodes of a Ray cluster that have the resource "
        "`sandbox`, each with as many sandboxes as said above",
    )
    ray_address: str = setting(
        "auto",
        Text("auto, or HOST:PORT of the head", "ADDRESS", _RAY_ADDRESS.fullmatch),
        SANDBOX,
        "the Ray cluster; auto: the one this machine is a node of",
    )
    sandbox_image: str = setting(
        DEFAULT_IMAGE,
        Text("the name of an image, or a path that begins with /, ./ or ~/", "IMAGE", _IMAGE.fullmatch),
        SANDBOX,
        "made by `orchestrator image build`; with oci also what `docker save` wrote, or an OCI layout",
    )
    sandbox_memory: int = setting(1 << 30, Size(256 * _MEBIBYTE), SANDBOX, "memory, swap included")
    sandbox_cpus: float = setting(1.0, Number(at_least=0.01, at_most=1024), SANDBOX, "CPU cores")
    sandbox_pids: int = setting(128, Whole(64, 4_194_304), SANDBOX, "processes and threads")
    docker_runtime: str | None = setting(
        None, _NAMED, SANDBOX, "a container runtime Docker knows, like runsc", unset="none: Docker's own"
    )
    oci_runtime: str = setting(
        "runc",
        Text("the name or path of a program", "PROGRAM", _PROGRAM.fullmatch),
        SANDBOX,
        "with the launcher oci: the OCI runtime",
    )

    allow_localhost_tcp: bool = setting(
        False, Flag(), SANDBOX, "TCP inside a sandbox, for tasks that start a server; still no network"
    )
    waive_hardening: tuple[str, ...] = setting(
        (),
        Words(tuple(sorted(MEASURE_NAMES))),
        SANDBOX,
        "measures not demanded, for an Engine that cannot give them; all others are",
    )

    output_files: int = setting(
        64, Whole(0, 10_000), SANDBOX, "most files to keep of those a rollout leaves in output/; 0: none"
    )
    output_bytes: int = setting(32 * _MEBIBYTE, Size(1), SANDBOX, "most bytes of these files together")

    # Web tools
    tool_timeout: float = setting(
        30.0, seconds(at_least=1), TOOLS, "one call of web_search or visit_page, retries included"
    )
    max_concurrent_tool_calls: int = setting(
        16, Whole(1, 10_000), TOOLS, "calls of web tools at a time over all rollouts, and as many of host tools"
    )
    web_deny_hosts: tuple[str, ...] = setting(
        DENIED_HOSTS,
        Texts(Text("a host, or a host with the beginning of a path", "HOST", HOST_RULE.fullmatch)),
        TOOLS,
        "denied hosts, subdomains included: never visited, nor shown in results",
    )
    web_deny_words: tuple[str, ...] = setting(
        DENIED_WORDS,
        Texts(Text("a word or phrase", "WORDS", _HAS_WORD.search)),
        TOOLS,
        "denied phrases: queries, results and pages that hold one are refused",
    )
    fail_on_tool_error: bool = setting(
        False,
        Flag(),
        TOOLS,
        "end the rollout as `tool_error` when the web service fails; no: the agent gets an error",
    )
    tavily_base_url: str = setting(
        "https://api.tavily.com",
        _URL,
        TOOLS,
        "Tavily's address, or that of a gateway to it",
    )

    # Sampling and tokens
    temperature: float = setting(1.0, Number(at_least=0), SAMPLING, "of sampling; 0: always the likeliest token")
    top_p: float = setting(1.0, Number(above=0, at_most=1), SAMPLING, "nucleus sampling; 1: off")
    max_completion_tokens: int = setting(1024, Whole(1, _TOKENS), SAMPLING, "tokens of one completion")
    max_token_length: int = setting(
        16_384, Whole(16, _TOKENS), SAMPLING, "tokens of a whole rollout's line, prompts included"
    )
    seed: int | None = setting(
        None,
        Whole(0, 2**63 - 1),
        SAMPLING,
        "each rollout's own seed is a hash of it, the task and the rollout's place",
        unset="none: drawn at the start and kept in run.json",
    )
    tokenizer_name: str | None = setting(
        None,
        Text("a folder, a hub id or none (`process` without token ids)", "NAME"),
        SAMPLING,
        "the tokenizer; auto: openai.model_name where that loads, else a default",
        unset=AUTO,
    )
    token_source: Literal["auto", "exact", "retokenize"] = setting(
        "auto",
        Choice(("auto", "exact", "retokenize")),
        SAMPLING,
        "where token ids come from; auto: exact ones where the endpoint can; exact: refuse otherwise",
    )
    chat_template_kwargs: Mapping[str, Any] | None = setting(
        None,
        Options(),
        SAMPLING,
        'arguments of the chat template besides the conversation, like {"enable_thinking": false}; sent to '
        "endpoints that render it themselves",
    )
    tool_call_format: Literal["auto", "json", CallFormat] = setting(
        "auto",
        Choice(("auto", "json", *get_args(CallFormat))),
        SAMPLING,
        "how the model writes calls of tools; auto: as its chat template shows; json: tool_calling agents write "
        "them as JSON in their text, as they do with auto where the template shows no format",
    )
    use_chat_completion: bool = setting(
        True,
        Only(Flag(), True, "prompts go out as token ids or as chat, never as plain text"),
        SAMPLING,
        "chat where the endpoint takes no token ids",
    )

    # Scoring
    scoring_strategy: str = setting(
        "correctness",
        forms(
            *("STRATEGY", _SCORING.fullmatch),
            *("basic", "correctness", "combined", "judge", "python:MODULE:SCORER"),
        ),
        SCORING,
        "how answers are scored; correctness: 1 for the right answer, else 0",
    )
    combined_weights: Mapping[str, float] | None = setting(
        None,
        Table(tuple(COMBINED_WEIGHTS), Number(at_least=0, at_most=1)),
        SCORING,
        "weights of `combined`, together at most 1; a missing one is 0",
        unset=f"none: {json.dumps(dict(COMBINED_WEIGHTS))}",
    )
    scorer_timeout: float = setting(
        120.0, seconds(above=0), SCORING, "grading one rollout; one reply of the judge, retries included"
    )
    judge_base_url: str | None = setting(
        None,
        _URL,
        SCORING,
        "the judge's endpoint; its key: JUDGE_API_KEY",
    )
    judge_model_name: str | None = setting(None, Text("a name", "NAME"), SCORING, "the model that judges")
    judge_max_tokens: int = setting(1024, Whole(16, _TOKENS), SCORING, "tokens of one reply of the judge")
    length_penalty_weight: float = setting(0.1, Number(at_least=0), SCORING, "weight of the length penalty")
    debug_scoring: bool = setting(False, Flag(), SCORING, "log every part of each score")

    # Evaluation
    eval_samples: int = setting(1, Whole(1, 1024), EVALUATION, "rollouts per task: the k of pass@k")
    eval_temperature: float | None = setting(
        None, Number(at_least=0), EVALUATION, "of sampling in evaluations", unset="none: env.temperature"
    )
    data_dir_to_save_evals: Path | None = setting(
        None,
        File(),
        EVALUATION,
        "where metrics.json and samples.jsonl go; older ones are replaced",
        unset="RUN_DIR",
    )

    # Output
    data_path_to_save_groups: Path | None = setting(
        None,
        File(),
        OUTPUT,
        "the groups file, with an HTML report beside it; an existing file gets a fresh name",
        unset="RUN_DIR/groups.jsonl",
    )
    run_dir: Path | None = setting(
        None, File(), OUTPUT, "the run directory: settings, and a record of all that happened", unset="runs/TIME"
    )
    resume: Path | None = setting(None, File(), OUTPUT, "a run directory, to continue its run with its settings")
    fsync: bool = setting(False, Flag(), OUTPUT, "wait until each line is safe from a power loss before it counts")
    include_messages: bool = setting(True, Flag(), OUTPUT, "messages in the groups file")
    save_full_traces: bool = setting(True, Flag(), OUTPUT, "the agent's steps in rollouts.jsonl")
    agent_verbosity: int = setting(0, Whole(0, 3), OUTPUT, "how much the agent logs in its sandbox")
    metrics_port: str | None = setting(
        None,
        Text("a port, or HOST:PORT for others than this machine", "[HOST:]PORT", _PORT.fullmatch),
        OUTPUT,
        "Prometheus metrics at http://127.0.0.1:PORT/metrics; 0: a free port; docs/metrics.md",
        unset="none",
    )
    view_port: str | None = setting(
        None,
        Text("a port, or HOST:PORT for others than this machine", "[HOST:]PORT", _PORT.fullmatch),
        OUTPUT,
        "the report of the run under way, at an address with a token that is told at the start; 0: a free port",
        unset="none",
    )
    compress: Literal["none", "zstd"] = setting(
        "none",
        Choice(("none", "zstd")),
        OUTPUT,
        "zstd: rollouts.jsonl.zst and groups.jsonl.zst, a tenth of the size; all commands read both",
    )

    # Atropos' own names (BaseEnvConfig); a test compares them with the installed version's
    rollout_server_url: str = setting(
        "http://localhost:8000",
        _URL,
        ATROPOS,
        "Atropos' run-api, which hands groups to the trainer",
    )
    policy_address: str | None = setting(
        None,
        Text("of the form HOST:PORT, as 127.0.0.1:8900", "HOST:PORT", _HOST_AND_PORT.fullmatch),
        ATROPOS,
        "`serve` listens here for the trainer's new policy versions: POST /policy; docs/training.md",
        unset="none",
    )
    max_num_workers: int = setting(
        -1, Whole(1, special=(-1,)), ATROPOS, "groups at a time; -1: max_num_workers_per_node for each endpoint"
    )
    max_num_workers_per_node: int = setting(
        -1, Whole(1, special=(-1,)), ATROPOS, "groups at a time per endpoint; -1: as many as the sandboxes allow"
    )
    max_eval_workers: int = setting(16, Whole(1), ATROPOS, "evaluation tasks at a time")
    max_batches_offpolicy: int = setting(3, Whole(1), ATROPOS, "batches that may wait for the trainer")
    batch_size: int = setting(-1, Whole(1, special=(-1,)), ATROPOS, "-1: the trainer says")
    min_batch_allocation: float | None = setting(None, _SCALE, ATROPOS, "least part of a batch from here")
    inference_weight: float = setting(1.0, Number(), ATROPOS, "of this environment; -1: ignored")
    worker_timeout: float = setting(
        -1.0,
        seconds(above=0, special=(-1.0,)),
        ATROPOS,
        "wall clock of each rollout of a group, if shorter than env.rollout_deadline; a slower one ends as "
        "`timeout`; -1: none",
    )
    steps_per_eval: int = setting(100, Whole(1), ATROPOS, "trainer steps between two evaluations")
    eval_handling: Literal["STOP_TRAIN", "LIMIT_TRAIN", "NONE"] = setting(
        "STOP_TRAIN",
        Choice(("STOP_TRAIN", "LIMIT_TRAIN", "NONE")),
        ATROPOS,
        "what an evaluation does to training rollouts",
    )
    eval_limit_ratio: float = setting(0.5, _SCALE, ATROPOS, "part of the sandboxes left by LIMIT_TRAIN")
    ensure_scores_are_not_same: bool = setting(False, Flag(), ATROPOS, "drop groups of equal scores")
    use_wandb: bool = setting(False, Flag(), ATROPOS, "report to Weights & Biases")
    wandb_name: str | None = setting("smolagents", Text(), ATROPOS, "name to be grouped by", unset="none")
    num_rollouts_to_keep: int = setting(32, Whole(0), ATROPOS, "rollouts shown in Weights & Biases")
    num_rollouts_per_group_for_logging: int = setting(
        1, Whole(1, special=(-1,)), ATROPOS, "rollouts of a group shown there; -1: all"
    )
    min_items_sent_before_logging: int = setting(2, Whole(), ATROPOS, "0 or less: log every time")
    thinking_mode: bool = setting(
        False, Flag(), ATROPOS, "ask a hosted service for reasoning; for your own model see chat_template_kwargs"
    )
    reasoning_effort: str | None = setting(
        None,
        Choice(("none", "minimal", "low", "medium", "high", "xhigh")),
        ATROPOS,
        "how much reasoning to ask a hosted service for",
        unset="null",
    )
    max_reasoning_tokens: int | None = setting(
        None, Whole(1024, 32_000), ATROPOS, "most tokens of reasoning to ask a hosted service for"
    )
    custom_thinking_prompt: str | None = setting(
        None,
        Only(Text(), None, "what an agent is told besides is env.instructions"),
        ATROPOS,
        "a prompt of Atropos' that Atropos does not send either",
    )

    def open_groups(self, sandboxes: int) -> int:
        """How many groups may be open. auto: one more than sandboxes, as each of these may run the last rollout of
        another group."""
        return sandboxes + 1 if self.max_open_groups is None else self.max_open_groups

    @property
    def most_warm(self) -> int:
        """How many sandboxes are kept ready in addition to those that rollouts have."""
        return self.max_concurrent_sandboxes // 4 if self.warm_sandboxes is None else self.warm_sandboxes

    @property
    def all_segments(self) -> bool | None:
        """`env.trained_segments` as groups and rows take it. None: it was left open."""
        return None if self.trained_segments is None else self.trained_segments == "all_segments"

    @property
    def agent_kind(self) -> AgentKind:
        """`env.agent` without the path of a program."""
        if self.agent.startswith("program:"):
            return "program"
        return "tool_calling" if self.agent == "tool_calling" else "code"

    @property
    def program(self) -> Path | None:
        """The path of the program, if the agent is one."""
        return path_of(self.agent.removeprefix("program:")) if self.agent_kind == "program" else None

    @property
    def named_call_format(self) -> CallFormat | None:
        """The format of the model's own calls, if it is named."""
        match self.tool_call_format:
            case "auto" | "json":
                return None
            case named:
                return named

    @property
    def needs_localhost_tcp(self) -> bool:
        """A program finds its completions at a port of its sandbox's loopback device."""
        return self.allow_localhost_tcp or self.program is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.program is not None:
            for name in _SMOLAGENTS_ONLY:
                if getattr(self, name) != self.rows()[name].default:
                    raise ConfigError(f"env.{name}: is for smolagents' agents, and env.agent is a program")
            if self.tool_call_format == "json":
                raise ConfigError(
                    "env.tool_call_format: json is for smolagents' agents, and env.agent is a program"
                )
        for name in _PROGRAMS_ONLY if self.program is None else ():
            if getattr(self, name):
                raise ConfigError(f"env.{name}: is for env.agent program:PATH, not {self.agent}")
        kept = self.group_policy.removeprefix("partial:")
        if kept.isdecimal() and int(kept) > self.group_size:
            raise ConfigError(
                f"env.group_policy: partial:{kept} asks for more rollouts than env.group_size "
                f"({self.group_size}) has"
            )
        weights = self.combined_weights
        if weights is not None and not (weights.get("correctness", 0) > 0 and sum(weights.values()) <= 1 + 1e-9):
            raise ConfigError(
                "env.combined_weights: correctness must weigh something, and all together at most 1; "
                f"not {json.dumps(dict(weights))}"
            )
        if self.reasoning_effort is not None and self.max_reasoning_tokens is not None:
            raise ConfigError("env.max_reasoning_tokens: services take it or env.reasoning_effort; leave one out")
        if self.launcher == "docker" and is_path(self.sandbox_image):
            raise ConfigError("env.sandbox_image: Docker takes the name of an image; only oci takes files")
        if self.docker_runtime is not None and self.launcher != "docker":
            raise ConfigError(
                f"env.docker_runtime: is for the launcher docker, not {self.launcher}; oci takes env.oci_runtime"
            )
        if self.max_cpu_seconds is not None and self.launcher == "process":
            raise ConfigError("env.max_cpu_seconds: the process launcher does not count CPU time; leave it open")


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenAISettings(Settings):
    """One inference endpoint: `openai.*`. All but `headers`, `startup_timeout`, `weight` and the prices are
    Atropos' names (APIServerConfig)."""

    section: ClassVar[str] = "openai"

    base_url: str = setting(
        "",
        Text("a URL with http:// or https://, or replay:RUN_DIR", "URL", _is_endpoint),
        ENDPOINT,
        "where completions come from, like http://localhost:8000/v1",
    )
    model_name: str = setting("default", Text("a name", "NAME"), ENDPOINT, "the model to ask for")
    api_key: Secret = setting(
        Secret(),
        Key(),
        ENDPOINT,
        "or --api-key; x or nothing: the environment's OPENAI_API_KEY, which other users cannot see",
    )
    headers: Secret = setting(
        Secret(),
        Headers(),
        ENDPOINT,
        'sent with every request, like {"api-key": "KEY"}; a secret, as the key is',
    )
    server_type: Literal["auto", "openai", "vllm", "sglang", "llamacpp", "atropos", "trl"] = setting(
        "auto",
        Choice(("auto", "openai", "vllm", "sglang", "llamacpp", "atropos", "trl")),
        ENDPOINT,
        "its protocol; auto: found out by asking it",
    )
    timeout: float = setting(1200.0, seconds(above=0), ENDPOINT, "for one completion")
    startup_timeout: float = setting(
        300.0,
        seconds(at_least=0),
        ENDPOINT,
        "how long an endpoint that is still loading is waited for at the start; 0: not at all",
    )
    weight: float = setting(
        1.0, Number(above=0), ENDPOINT, "its share of the rollouts, if a --config names several servers"
    )
    num_requests_for_eval: int = setting(64, Whole(1), ENDPOINT, "evaluation requests at a time")
    prompt_price: float | None = setting(
        None, Number(at_least=0), EVALUATION, "money per million prompt tokens, to tell the cost"
    )
    completion_price: float | None = setting(
        None, Number(at_least=0), EVALUATION, "money per million sampled tokens, to tell the cost"
    )

    num_max_requests_at_once: int = setting(512, Whole(1), ATROPOS, "requests at a time")
    tokenizer_name: str = setting("none", Text(), ATROPOS, "none: model_name; see env.tokenizer_name")
    rolling_buffer_length: int = setting(
        1000, Whole(1, 1_000_000), ATROPOS, "latest completions that count for request times in Weights & Biases"
    )
    n_kwarg_is_ignored: bool = setting(False, Flag(), ATROPOS, "the endpoint is not told `n`, which is 1")
    health_check: bool = setting(
        False,
        Only(Flag(), False, "an endpoint is asked when rollouts fail at it, not every second"),
        ATROPOS,
        "ask all the time whether the endpoint is alive",
    )

    def key(self) -> str:
        """The key to send; empty: none."""
        return self.api_key.reveal()

    def sent_headers(self) -> dict[str, str]:
        """The headers to send besides."""
        headers: dict[str, str] = json.loads(self.headers.reveal() or "{}")
        return headers

    def secrets(self) -> tuple[Secret, ...]:
        words = [word for value in self.sent_headers().values() for word in (value, *value.split())]
        return (*super().secrets(), *(Secret(word) for word in words if len(word) >= 6))  # others are in any text


SECTIONS: Mapping[str, type[Settings]] = {"env": EnvSettings, "openai": OpenAISettings}
TAVILY_KEY = Setting(
    Secret(), Key(), ENDPOINT, "for web search and page visits; or TAVILY_API_KEY", name="tavily_api_key"
)
JUDGE_KEY = Setting(Secret(), Key(), ENDPOINT, "for the judge; JUDGE_API_KEY only", name="judge_api_key")


def section_rows(section: str) -> dict[str, Setting]:
    """Name → row of one section, aliases included."""
    rows = SECTIONS[section].rows()
    return {**rows, **{alias: row for row in rows.values() for alias in row.aliases}}
