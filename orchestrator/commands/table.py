"""All commands: their names, settings, options and one line of help each. Imports little: help must be quick."""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.launch.names import EXTRAS
from orchestrator.settings.flags import OPTIONS, Command
from orchestrator.settings.kinds import Choice, File, Flag, Text
from orchestrator.settings.row import Setting
from orchestrator.settings.table import (
    AGENT,
    ATROPOS,
    ENDPOINT,
    EVALUATION,
    LIMITS,
    OUTPUT,
    ROLLOUTS,
    SAMPLING,
    SANDBOX,
    SCORING,
    TASKS,
    TOOLS,
)

_LEVELS = re.compile(r"[123](, ?[123])*").fullmatch
_REVISION = re.compile(r"\w[\w./-]{0,249}", re.ASCII).fullmatch
COMMANDS = (
    Command(
        "demo",
        "plays a recorded run of a real model through live sandboxes; needs no model, key or GPU",
        uses=(
            "env.total_steps",
            "env.max_concurrent_sandboxes",
            "env.sandbox_image",
            "env.data_path_to_save_groups",
            "env.run_dir",
            "env.resume",
        ),
        options=(Setting(False, Flag(), OPTIONS, "run the model itself, on this machine's CPU", name="live"),),
    ),
    Command(
        "process",
        "runs tasks and writes groups of scored rollouts to a JSONL file, with an HTML report",
        uses=(TASKS, ROLLOUTS, AGENT, LIMITS, SANDBOX, TOOLS, SAMPLING, SCORING, OUTPUT, ENDPOINT),
    ),
    Command(
        "evaluate",
        "measures a model on tasks, the held-out ones where there are any: accuracy, pass@k, intervals",
        uses=(
            TASKS,
            EVALUATION,
            AGENT,
            "env.max_retries",
            "env.drain_timeout",
            LIMITS,
            SANDBOX,
            TOOLS,
            SAMPLING,
            "env.run_dir",
            "env.resume",
            "env.fsync",
            "env.include_messages",
            "env.save_full_traces",
            SCORING,
            ENDPOINT,
        ),
        defaults={"env.scoring_strategy": "correctness"},  # `combined` is meant for training
    ),
    Command(
        "serve",
        "feeds a trainer with groups of scored rollouts, through Atropos' run-api",
        uses=(
            *(TASKS, ROLLOUTS, AGENT, LIMITS, SANDBOX, TOOLS, SAMPLING),
            *(SCORING, EVALUATION, OUTPUT, ENDPOINT, ATROPOS),
        ),
    ),
    Command(
        "image build",
        "builds the image that sandboxes are made from",
        uses=("env.sandbox_image",),
        options=(
            Setting(None, Text("an image", "IMAGE"), OPTIONS, "what to build on", "chosen", name="base_image"),
            Setting(False, Flag(), OPTIONS, "build even if the image is up to date", name="force"),
            Setting(
                None,
                Choice(tuple(EXTRAS)),
                OPTIONS,
                "more packages, in an image of its own; documents: pandas, openpyxl, pypdf, python-docx, "
                "python-pptx and pillow",
                "none: the slim image",
                name="with_",
            ),
        ),
    ),
    Command(
        "image check",
        "says whether an image can serve as sandbox image, and if not, why",
        arguments=(
            Setting(None, Text("the name of an image", "IMAGE"), OPTIONS, "an image that is here", name="image"),
        ),
    ),
    Command(
        "verify",
        "checks whether a groups file or a whole run is what it must be",
        arguments=(Setting(None, File(), OPTIONS, "a groups file or a run directory", name="path"),),
    ),
    Command(
        "doctor",
        "checks what a run needs: Docker, image, tokenizer, endpoint, disk, keys; says what to do",
        uses=(
            SANDBOX,
            "env.tokenizer_name",
            "env.token_source",
            "env.tavily_base_url",
            "env.run_dir",
            ENDPOINT,
        ),
        without_endpoint=True,
    ),
    Command(
        "download-gaia",
        "fetches the GAIA benchmark from the hub with your account, and checks it",
        options=(
            Setting(Path("data/gaia"), File(), OPTIONS, "where to put it", name="output_dir"),
            Setting(
                False, Flag(), OPTIONS, "take gaia-benchmark/GAIA, not smolagents/GAIA-annotated", name="use_raw"
            ),
            Setting(
                None,
                Text("levels like 1 or 1,2", "LEVELS", _LEVELS),
                OPTIONS,
                "keep only these levels' rows and files",
                "all",
                name="level",
            ),
            Setting(
                None,
                Text("a branch, tag or commit", "REV", _REVISION),
                OPTIONS,
                "which version",
                "the newest, or the one that is there",
                name="revision",
            ),
        ),
    ),
    Command(
        "view",
        "writes the report of a run anew, finished or not, and sums it up",
        arguments=(Setting(None, File(), OPTIONS, "a run directory or a groups file", name="path"),),
        options=(
            Setting(
                None, File(), OPTIONS, "where to write the report", "in the run, or beside the file", name="output"
            ),
            Setting(
                None,
                Text("a folder, a hub id or none", "NAME"),
                OPTIONS,
                "the tokenizer that makes ids readable",
                "the run's own, where it is on this machine",
                name="tokenizer",
            ),
            Setting(False, Flag(), OPTIONS, "open it in a browser", name="browser"),
        ),
    ),
    Command(
        "replay",
        "plays a recorded run through live sandboxes again, with its settings, and says what differs",
        arguments=(Setting(None, File(), OPTIONS, "the run's directory", name="run_dir"),),
        options=(
            Setting(
                None,
                Text("the id of a rollout, like g000003-r01-a0", "ID"),
                OPTIONS,
                "this one alone",
                "all",
                name="rollout",
            ),
        ),
        uses=(
            "env.dataset",
            "env.dataset_path",
            SCORING,
            "env.agent",
            "env.prompt_templates",
            "env.sandbox_tools",
            "env.host_tools",
            "env.tokenizer_name",
            "env.run_dir",
            "env.fsync",
            "env.drain_timeout",
            "env.max_retries",
            SANDBOX,
        ),
        settings_of="run_dir",
    ),
    Command("cleanup", "removes what killed runs left: containers, sockets, temporary files"),
)
