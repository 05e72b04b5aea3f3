"""All commands: their names, settings, options and one line of help each. Imports little: help must be quick."""

import re
from dataclasses import replace
from pathlib import Path

from orchestrator.launch.names import EXTRAS
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.flags import OPTIONS, Command
from orchestrator.settings.kinds import Choice, File, Files, Flag, Integer, Kind, Number, Size, Text, seconds
from orchestrator.settings.output import OutputSettings
from orchestrator.settings.rollouts import RolloutSettings
from orchestrator.settings.row import Setting
from orchestrator.settings.sandbox import SandboxSettings
from orchestrator.settings.tasks import DEMO_TASKS, TaskSettings

_LEVELS = re.compile(r"[123](, ?[123])*").fullmatch
_SCORE = Number(at_least=0, at_most=1)
_SOURCE = TaskSettings.rows()["dataset"].kind
_REVISION = re.compile(r"\w[\w./-]{0,249}", re.ASCII).fullmatch


def _option(
    name: str,
    kind: Kind,
    text: str,
    *,
    default: object = None,
    unset: str | None = None,
    also: tuple[str, ...] = (),
) -> Setting:
    return Setting(default, kind, OPTIONS, text, unset, also, name=name)


_JSON = _option(
    "json", Flag(), "one JSON object on stdout, all else on stderr; its fields: docs/runs.md", default=False
)
_PRICES = tuple(
    replace(row, group=OPTIONS, text=f"{row.text}; for runs that have none")
    for row in (
        OpenAISettings.rows()["prompt_price"],
        OpenAISettings.rows()["completion_price"],
        RolloutSettings.rows()["price_table"],
        RolloutSettings.rows()["request_price"],
    )
)
_NO_ANSWERS = _option(
    "no_answers",
    Flag(),
    "for sharing: its page has no reference answers, and nothing that tells them: no answers, no steps",
    default=False,
)
COMMANDS = (
    Command(
        "demo",
        "plays a recorded run of a real model through live sandboxes; needs no model, key or GPU",
        options=(
            _option(
                "tasks",
                Choice(tuple(DEMO_TASKS)),
                "what is played; code: some of examples/code-tasks, graded in sandboxes of their own; needs the "
                "launcher oci",
                default="questions",
            ),
            _option("live", Flag(), "run the model itself, on this machine's CPU", default=False),
        ),
    ),
    Command(
        "init",
        "makes a folder to begin with: settings, three tasks, a scorer, and a README of commands that run at once",
        arguments=(_option("folder", File(), "the folder to make"),),
    ),
    Command("process", "runs tasks and writes groups of scored rollouts to a JSONL file, with an HTML report"),
    Command(
        "evaluate",
        "measures a model on tasks, the held-out ones where there are any: accuracy, pass@k, intervals; "
        "writes a page of them",
        options=(_JSON, _NO_ANSWERS),
    ),
    Command("serve", "feeds a trainer with groups of scored rollouts, through Atropos' run-api"),
    Command(
        "image build",
        "builds the image that sandboxes are made from",
        options=(
            _option("base_image", Text("an image", "IMAGE"), "what to build on", unset="chosen"),
            _option("force", Flag(), "build even if the image is up to date", default=False),
            _option(
                "with_",
                Choice(tuple(EXTRAS)),
                "more packages, in an image of its own; documents: pandas, openpyxl, pypdf, python-docx, "
                "python-pptx and pillow",
                unset="none: the slim image",
            ),
            _option("oci", Flag(), "for the launcher oci; works without a Docker Engine too", default=False),
        ),
    ),
    Command(
        "image check",
        "says whether an image can serve as sandbox image, and if not, why",
        arguments=(_option("image", Text("the name of an image", "IMAGE"), "an image that is here"),),
    ),
    Command(
        "verify",
        "checks whether a groups file or a whole run is what it must be",
        arguments=(_option("path", File(), "a groups file or a run directory"),),
        options=(
            _option(
                "model",
                File(),
                "also recompute the log-probs of trained tokens with this model, on the CPU: a folder with "
                "safetensors or a GGUF file; needs the extra torch",
                unset="none",
            ),
            _option("adapter", File(), "a LoRA folder, as PEFT saves it, to put on the model", unset="none"),
            _option("max_rollouts", Integer(1), "recompute only so many, chosen evenly", unset="all"),
            _JSON,
        ),
    ),
    Command(
        "doctor",
        "checks what a run needs: Docker, image, tokenizer, endpoint, disk, keys; says what to do",
        options=(
            _JSON,
            _option(
                "ray_address",
                SandboxSettings.rows()["ray_address"].kind,
                "look at all nodes of this Ray cluster that carry out rollouts; short for --env.cluster ray "
                "--env.ray_address ADDRESS",
                unset="none: this machine",
                also=("ray_address",),
            ),
        ),
        without_endpoint=True,
        lenient=True,
    ),
    Command(
        "check-tasks",
        "checks tasks that have graders: their solutions get 1, doing nothing gets 0, and cheats no more",
        arguments=(_option("source", _SOURCE, "harbor:PATH, jsonl:PATH or csv:PATH"),),
        options=(
            _option("again", Flag(), "also tasks that are as they were when they were checked", default=False),
            _JSON,
        ),
    ),
    Command(
        "download-gaia",
        "fetches the GAIA benchmark from the hub with your account, and checks it",
        options=(
            _option("output_dir", File(), "where to put it", default=Path("data/gaia")),
            _option("use_raw", Flag(), "take gaia-benchmark/GAIA, not smolagents/GAIA-annotated", default=False),
            _option(
                "level",
                Text("levels like 1 or 1,2", "LEVELS", _LEVELS),
                "keep only these levels' rows and files",
                unset="all",
            ),
            _option(
                "revision",
                Text("a branch, tag or commit", "REV", _REVISION),
                "which version",
                unset="the newest, or the one that is there",
            ),
        ),
    ),
    Command(
        "view",
        "writes the report of a run anew, finished or not, and sums it up",
        arguments=(_option("path", File(), "a run directory or a groups file"),),
        options=(
            _option("output", File(), "where to write the report", unset="in the run, or beside the file"),
            _option(
                "tokenizer",
                Text("a folder, a hub id or none", "NAME"),
                "the tokenizer that makes ids readable",
                unset="the run's own, where it is on this machine",
            ),
            _option("browser", Flag(), "open it in a browser", default=False),
            _option(
                "rollout",
                Text("the id of a rollout, like g000003-r01-a0", "ID"),
                "only this one, in a small file of its own",
                unset="all",
            ),
            _option("group", Integer(0), "only this one, in a small file of its own", unset="all"),
            _option(
                "outcome", Text("an outcome, like max_steps", "NAME"), "only rollouts that ended so", unset="all"
            ),
            _NO_ANSWERS,
            _option(
                "serve",
                Flag(),
                "serve a page with every rollout, however many, in place of a file",
                default=False,
            ),
            _option("port", OutputSettings.rows()["view_port"].kind, "where it is served", unset="a free port"),
            *_PRICES,
        ),
    ),
    Command(
        "runs",
        "lists runs: when, command, model, groups, solved rollouts, cost, and whether they are over",
        arguments=(_option("folder", File(), "the folder that holds the run directories", default=Path("runs")),),
        options=(_JSON, *_PRICES),
    ),
    Command(
        "compare",
        "shows runs side by side: outcomes, solved tasks with intervals, tokens, money, and which tasks changed",
        arguments=(_option("runs", Files(2), "run directories; the others are compared with the first"),),
        repeats=True,
        options=(_JSON, _option("html", File(), "also write it as a page", unset="none"), *_PRICES),
    ),
    Command(
        "replay",
        "plays a recorded run through live sandboxes again, with its settings, and says what differs",
        arguments=(_option("run_dir", File(), "the run's directory"),),
        options=(
            _option(
                "rollout", Text("the id of a rollout, like g000003-r01-a0", "ID"), "this one alone", unset="all"
            ),
            _option(
                "report",
                Flag(),
                "ends with a table: how many prompts were the recorded ones, turn by turn; docs/branching.md",
                default=False,
            ),
        ),
        settings_of="run_dir",
    ),
    Command(
        "branch",
        "samples other continuations of a recorded rollout, from any turn of it, into a run of their own",
        arguments=(_option("run_dir", File(), "the run's directory"),),
        options=(
            _option(
                "rollout",
                Text("the id of a rollout, like g000003-r01-a0", "ID"),
                "which one",
                unset="must be given",
            ),
            _option(
                "turn",
                Integer(-10_000, 10_000),
                "the first completion to sample anew; negative: from the end",
                default=-1,
            ),
            _option("n", Integer(1, 1024), "how many continuations, which are one group", default=8),
            _option("say", Text("words"), "what a user says behind the prompt of that turn", unset="nothing"),
        ),
        settings_of="run_dir",
    ),
    Command(
        "rescore",
        "scores a recorded run again, without sandboxes or a model, and writes its groups anew",
        arguments=(_option("run_dir", File(), "the run's directory"),),
        settings_of="run_dir",
    ),
    Command(
        "export",
        "writes rollouts of a recorded run as a folder for trainers and data sets' tools",
        arguments=(_option("run_dir", File(), "the run's directory"),),
        options=(
            _option(
                "format",
                Choice(("sft", "dpo", "trl", "hf", "messages", "harbor")),
                "sft: ids with labels; dpo: pairs; trl: ids with masks, log-probs and scores; hf: these and the "
                "messages, as parquet for the hub; messages: conversations; harbor: every attempt, for Harbor's "
                "viewer",
                default="hf",
            ),
            _option("output", File(), "the folder to write", unset="RUN_DIR/export-FORMAT"),
            _option(
                "best",
                Integer(1),
                "only so many rollouts, or pairs, of a group",
                unset="sft, messages: 1; else all",
            ),
            _option(
                "solved",
                Flag(),
                "only solved rollouts; of pairs the chosen one is solved, the rejected one is not",
                unset="sft, messages, dpo: true without --threshold; else false",
            ),
            _option(
                "threshold", _SCORE, "only rollouts, or chosen ones of pairs, of at least this score", unset="all"
            ),
            _option("margin", _SCORE, "only pairs whose scores differ by at least this", unset="0.5"),
            _option("max_tokens", Integer(1), "only rollouts that are no longer", unset="all"),
        ),
        settings_of="run_dir",
    ),
    Command(
        "completion",
        "prints a script that completes commands and flags in your shell",
        arguments=(_option("shell", Choice(("bash", "zsh", "fish")), "which shell"),),
    ),
    Command(
        "cleanup",
        "removes what killed runs left: containers, sockets, temporary files; with --images, images of tasks too",
        options=(
            _option(
                "images",
                Flag(),
                "also remove images of tasks' Dockerfiles that were not used for long, never those in use",
                default=False,
            ),
            _option(
                "older_than",
                seconds(at_least=0),
                "with --images: those not used for so long, like 12h or 30d",
                unset="7d",
            ),
            _option(
                "keep_bytes",
                Size(0),
                "with --images: after that the longest unused ones, until so much is left; the bases of images "
                "count with each",
                unset="all",
            ),
        ),
        without_endpoint=True,
    ),
)
