"""The commands that README and the manual show, run as they stand: in a folder of `orchestrator init`, with the
examples beside it. Only what stands for something of the reader's is put in: an address, a name, a run."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.cli import main
from tests.e2e.endpoint import answers, scripted_endpoint
from tests.e2e.guide import run, serve
from tests.fakes.runs import ROOT, place
from tests.fakes.tokenizer import tokenizer_folder

pytestmark = [pytest.mark.full, pytest.mark.docker, pytest.mark.timeout(1800)]

PROGRAM = r"(?:orchestrator|python|run-api|make|pip|curl|harbor|source|OTEL_\w+=\S+) "
SHOWN = re.compile(rf"^    ({PROGRAM}.*)$", re.M)
PAGES = (
    "README.md",
    "docs/evaluation.md",
    "docs/runs.md",
    "docs/output.md",
    "docs/metrics.md",
    "docs/configuration.md",
)
# What is shown there and not run here, and why.
NOT_HERE = {
    "make demo": "followed by tests/e2e/test_demo.py",
    "harbor view jobs": "Harbor's own program",
    "pip install": "from a package index",
    "verify RUN_DIR --model": "needs a model: tests/integration/test_forward.py",
    "curl": "tests/integration/test_metrics.py asks while a run goes on",
    "completion zsh": "another shell",
    "completion fish": "another shell",
    "run-api": "docs/tutorials/rl.md has the same three, with fewer batches",
    "examples/trainer.py": "docs/tutorials/rl.md",
    "orchestrator serve": "docs/tutorials/rl.md",
}
TIME = "2026-01-31T10-00-00"
PRICES = "qwen2.5-coder-1.5b: {prompt: 0.2, completion: 0.2}\n"


def shown(page: str) -> list[str]:
    """The commands of a page, each on one line, without those that are not run here."""
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    return [command for command in SHOWN.findall(text) if not any(name in command for name in NOT_HERE)]


@pytest.fixture(scope="module")
def start() -> Iterator[Path]:
    """A folder to begin with, two runs in it, and the examples."""
    with place() as home:
        folder = home / "start"
        assert main(["init", str(folder)]) == 0
        shutil.copytree(ROOT / "examples", folder / "examples")
        for name in ("base", "new"):
            given = f"--config run.yaml --env.scoring_strategy correctness --env.run_dir runs/{name}"
            run(f"orchestrator process {given}", folder)
        shutil.copytree(folder / "runs" / "base", folder / "runs" / TIME)
        shutil.copy(folder / "runs" / "base" / "groups.jsonl", folder)
        (folder / "prices.yaml").write_text(PRICES)
        yield folder


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(start: Path, page: str) -> None:
    commands = shown(page)
    assert commands
    with scripted_endpoint({" ": [[answers("1")], [answers("2")]]}, "--dialect", "vllm", by="seed") as endpoint:
        readers = {
            "http://localhost:9001/v1": endpoint.base_url,
            "NAME": f"scripted --env.tokenizer_name {tokenizer_folder()}",
            "RUN_DIR": "runs/base",
            "g000003-r01-a0": "g000001-r01-a0",
            " --browser": "",
            "jsonl:tasks.jsonl": "jsonl:examples/tasks.jsonl",
        }
        for command in commands:
            for told, here in readers.items():
                command = command.replace(told, here)
            if " --serve" in command:
                serve(command, start)
            else:
                run(f"bash -c {shlex.quote(command)}", start)


def test_what_is_not_run_here_is_still_shown() -> None:
    everything = "\n".join((ROOT / page).read_text("utf-8") for page in PAGES)
    assert [name for name in NOT_HERE if name not in everything] == []
