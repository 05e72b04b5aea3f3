"""Whatever an operator gets wrong: one line that says what to do, the right exit code, and nothing half done."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.launch.names import IMAGE_REPOSITORY
from tests.e2e.endpoint import ScriptedEndpoint, answers, scripted_endpoint
from tests.e2e.leftovers import run_cleanly
from tests.fakes.runs import flags, place

KEY = "sk-canary-0123456789abcdef"


@dataclass(frozen=True)
class Bad:
    """`given` replaces or adds settings of a command that would work; None leaves one out."""

    code: int
    says: str
    given: Mapping[str, str | None] = field(default_factory=dict)
    more: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


NOBODY = "http://127.0.0.1:9/v1"  # the discard port: nobody listens
USAGE = {
    "dataset missing": Bad(2, "absent.jsonl", {"dataset": "jsonl:absent.jsonl"}),
    "dataset is a folder": Bad(2, "dataset", {"dataset": "jsonl:."}),
    "gaia not downloaded": Bad(2, "download-gaia", {"dataset": "gaia"}),
    "dataset of no kind": Bad(2, "env.dataset", {"dataset": "tsv:tasks.tsv"}),
    "run directory below a file": Bad(2, "tasks.jsonl is a file", {"run_dir": "tasks.jsonl/run"}),
    "run directory where nobody can write": Bad(2, "/proc", {"run_dir": "/proc/run"}),
    "groups file below a file": Bad(2, "tasks.jsonl", {"data_path_to_save_groups": "tasks.jsonl/out.jsonl"}),
    "unknown flag": Bad(2, "env.group_size", more=("--env.group_sizes", "4")),
    "abbreviated flag": Bad(2, "env.group", more=("--env.group", "4")),
    "flag without section": Bad(2, "group_size", more=("--group_size", "4")),
    "no number": Bad(2, "env.group_size", {"group_size": "many"}),
    "number out of range": Bad(2, "env.group_size", {"group_size": "0"}),
    "no truth value": Bad(2, "env.include_messages", {"include_messages": "perhaps"}),
    "unknown variable": Bad(2, "GROUP_SIZE", environ={"ORCHESTRATOR_ENV__GROUP_SIZES": "4"}),
    "configuration missing": Bad(2, "absent.yaml", more=("--config", "absent.yaml")),
    "no endpoint": Bad(2, "orchestrator demo", {"base_url": None}),
    "endpoint that is no URL": Bad(2, "base_url", {"base_url": "localhost:8000"}),
    "nothing to resume": Bad(2, "resume", more=("--env.resume", "absent")),
}
NO_DOCKER = {
    name: Bad(3, "Docker", environ={"DOCKER_HOST": host})
    for name, host in {
        "docker socket missing": "unix:///nowhere/docker.sock",
        "docker host refuses": "tcp://127.0.0.1:9",
    }.items()
}
UNUSABLE = {
    "image not built": Bad(3, "orchestrator image build", {"sandbox_image": f"{IMAGE_REPOSITORY}:0.0.0-absent"}),
    "image not pulled": Bad(3, "docker pull", {"sandbox_image": "nobody/has-this:1"}),
    "tokenizer folder missing": Bad(3, "env.tokenizer_name", {"tokenizer_name": "./absent"}),
    "folder without tokenizer": Bad(3, "env.tokenizer_name", {"tokenizer_name": "."}),
    "tokenizer not on this machine": Bad(
        3, "env.tokenizer_name", {"tokenizer_name": "nobody/nothing"}, environ={"HF_HUB_OFFLINE": "1"}
    ),
    "hub out of reach": Bad(
        3,
        "env.tokenizer_name",
        {"tokenizer_name": "nobody/nothing"},
        environ={"HF_ENDPOINT": "http://127.0.0.1:9"},
    ),
    "endpoint down": Bad(3, "openai.base_url", {"base_url": NOBODY}, ("--openai.startup_timeout=0",)),
    "wrong key": Bad(3, "OPENAI_API_KEY", environ={"OPENAI_API_KEY": "sk-wrong-abcdef0123"}),
    "no key": Bad(3, "OPENAI_API_KEY", environ={"OPENAI_API_KEY": ""}),
    "exact ids of a chat endpoint": Bad(3, "env.token_source", {"token_source": "exact", "server_type": "openai"}),
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ScriptedEndpoint]:
    with scripted_endpoint({"": [[answers("4")]]}, "--dialect", "vllm", "--api-key", KEY) as running:
        yield running


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        (directory / "tasks.jsonl").write_text(json.dumps({"question": "two and two?", "answer": "4"}) + "\n")
        yield directory


async def refused(home: Path, endpoint: ScriptedEndpoint, bad: Bad) -> None:
    given = dict(bad.given)
    base_url = given.pop("base_url", endpoint.base_url)
    more = [*bad.more]
    if server_type := given.pop("server_type", None):
        more += ["--openai.server_type", server_type]
    arguments = flags(home, base_url or "", **{"launcher": "docker"} | given)
    if base_url is None:
        arguments = [a for a in arguments if not a.startswith("--openai.base_url")]
    before = sorted(home.rglob("*"))
    asked = len(endpoint.completions())
    ended = await run_cleanly(
        *arguments, *more, directory=home, environ={"OPENAI_API_KEY": KEY} | dict(bad.environ)
    )
    assert ended.code == bad.code, ended.stderr
    assert ended.stderr.startswith("orchestrator: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert bad.says in ended.stderr
    assert ended.stdout == ""
    assert "sk-" not in ended.stderr
    assert [p for p in sorted(home.rglob("*")) if p not in before and p.name != "t"] == []
    assert len(endpoint.completions()) == asked


@pytest.mark.slow
@pytest.mark.parametrize("bad", USAGE.values(), ids=USAGE)
async def test_wrong_usage_is_refused_before_anything_starts(
    home: Path, endpoint: ScriptedEndpoint, bad: Bad
) -> None:
    await refused(home, endpoint, bad)


@pytest.mark.slow
@pytest.mark.docker
@pytest.mark.parametrize("bad", (UNUSABLE | NO_DOCKER).values(), ids=UNUSABLE | NO_DOCKER)
async def test_unusable_environment_is_told_before_any_task_is_touched(
    home: Path, endpoint: ScriptedEndpoint, bad: Bad
) -> None:
    await refused(home, endpoint, bad)


@pytest.mark.slow
@pytest.mark.docker
async def test_locked_run_directory_is_left_alone(home: Path, endpoint: ScriptedEndpoint) -> None:
    (home / "run").mkdir()
    with (home / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        await refused(home, endpoint, Bad(1, "env.run_dir"))
    assert [p.name for p in (home / "run").iterdir()] == ["lock"]


@pytest.mark.docker
async def test_run_directory_of_another_run_is_left_alone(home: Path, endpoint: ScriptedEndpoint) -> None:
    (home / "run").mkdir()
    (home / "run" / "rollouts.jsonl").write_text("{}\n")
    (home / "run" / "lock").touch()
    await refused(home, endpoint, Bad(2, "--env.resume"))
    assert (home / "run" / "rollouts.jsonl").read_text() == "{}\n"
