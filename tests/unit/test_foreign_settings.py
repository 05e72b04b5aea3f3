"""What a run.json may say of a run: all of it for the user who wrote it, about data alone for anybody else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.settings.config import Config
from orchestrator.settings.flags import dotted_flags, parse
from orchestrator.settings.sources import load_config, resolve
from tests.fakes.written import write_run

ADDRESS = "http://127.0.0.1:9/v1"
DATASET = "jsonl:tasks.jsonl"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(home: Path, env: Mapping[str, Any] | None = None, **facts: Any) -> Path:
    """The directory of a run that this user began."""
    config = load_config(env={"dataset": DATASET, **(env or {})}, openai={"base_url": ADDRESS}, environ={})
    told = {"config": config.public(), "seed": 5, "groups_file": "groups.jsonl", **facts}
    return write_run(home / "run", facts=told)


def foreign(home: Path, env: Mapping[str, Any] | None = None, **facts: Any) -> Path:
    """The same, from another machine."""
    run = begun(home, env, **facts)
    (home / "state" / "rollout-orchestrator" / "run-key").unlink()
    return run


def resumed(run: Path, *flags: str) -> Config:
    return load_config(["--env.resume", str(run), *flags], environ={})


HOSTILE = {
    "agent": "program:hostile.py",
    "allow_localhost_tcp": True,
    "dataset": "python:hostile:thing",
    "host_tools": ["python:hostile:thing"],
    "judge_base_url": ADDRESS,
    "launcher": "process",
    "max_proxy_bytes": 1 << 50,
    "prompt_templates": "hostile.yaml",
    "rollout_server_url": ADDRESS,
    "sandbox_cpus": 64,
    "sandbox_image": "hostile:latest",
    "sandbox_memory": 1 << 40,
    "sandbox_pids": 100_000,
    "sandbox_tools": ["python:hostile:thing"],
    "scoring_strategy": "python:hostile:thing",
    "use_wandb": True,
}
LEFT_OUT = {"docker_runtime": "hostile", "tavily_base_url": ADDRESS, "waive_hardening": ["seccomp"]}
DATA = {"group_size": 3, "max_steps": 5, "sandbox_memory": 1 << 29, "scoring_strategy": "basic", "total_steps": 9}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_somebody_elses_run_names_is_asked_for_in_one_line_to_copy(home: Path, name: str) -> None:
    run = foreign(home, {name: HOSTILE[name]})
    said = f"--openai.base_url={ADDRESS}"
    with pytest.raises(ConfigError, match=rf"add: --env\.{name} ") as caught:
        resumed(run, said)
    config = resumed(run, said, *shlex.split(str(caught.value).partition("add: ")[2]))
    assert config.public()["env"][name] == HOSTILE[name]


@pytest.mark.parametrize("name", HOSTILE | LEFT_OUT | DATA)
def test_the_users_own_run_needs_nothing_said_again(home: Path, name: str) -> None:
    value = {**HOSTILE, **LEFT_OUT, **DATA}[name]
    config = resumed(begun(home, {name: value}))
    assert config.public()["env"][name] == value
    assert (config.openai[0].base_url, config.env.seed) == (ADDRESS, 5)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_free_to_change_is_of_now(home: Path, name: str) -> None:
    config = resumed(foreign(home, LEFT_OUT), f"--openai.base_url={ADDRESS}")
    assert getattr(config.env, name) == load_config(environ={}).env.rows()[name].default


@pytest.mark.parametrize("name", DATA)
def test_what_decides_about_data_is_taken_over_from_anybody(home: Path, name: str) -> None:
    config = resumed(foreign(home, {name: DATA[name]}), f"--openai.base_url={ADDRESS}")
    assert config.public()["env"][name] == DATA[name]
    with pytest.raises(ConfigError, match="continued as it began"):
        resumed(foreign(home, {"group_size": 3}), f"--openai.base_url={ADDRESS}", "--env.group_size=4")


def test_any_edit_makes_it_somebody_elses(home: Path) -> None:
    run = begun(home)
    told = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(told))  # another layout says the same
    assert resumed(run).openai[0].base_url == ADDRESS
    for edited in (
        {**told, "groups_file": str(home / "mine.jsonl")},
        {**told, "config": {**told["config"], "openai": [{"base_url": "http://127.0.0.1:10"}]}},
        {**told, "proof": told["proof"][:-1] + "0f"},
        {**told, "proof": None},
        {name: value for name, value in told.items() if name != "proof"},
    ):
        (run / "run.json").write_text(json.dumps(edited))
        with pytest.raises(ConfigError, match=r"add: .*--openai\.base_url"):
            resumed(run)


def test_a_moved_run_is_still_the_users_own(home: Path) -> None:
    begun(home).rename(home / "moved")
    assert resumed(home / "moved").openai[0].base_url == ADDRESS


def test_several_servers_of_somebody_elses_are_asked_for(home: Path) -> None:
    servers = [{"base_url": ADDRESS}, {"base_url": "http://127.0.0.1:10"}]
    config = load_config(env={"dataset": DATASET}, openai=servers, environ={})
    run = foreign(home, config=config.public())
    with pytest.raises(ConfigError, match=r"--config FILE.yaml with its servers \(http://127.0.0.1:9/v1, http"):
        resumed(run)
    again = load_config(["--env.resume", str(run)], openai=servers, environ={})
    assert [server.base_url for server in again.openai] == [server["base_url"] for server in servers]


def test_no_key_is_taken_from_a_run(home: Path) -> None:
    run = foreign(home, config={"env": {"dataset": DATASET}, "openai": [{"api_key": "sk-theirs-12345678"}]})
    assert not resumed(run).openai[0].key()


def test_a_replay_gives_somebody_elses_run_no_more_of_the_machine_than_the_default(home: Path) -> None:
    run = foreign(home, {"sandbox_memory": 1 << 40})
    with pytest.raises(ConfigError, match=r"env\.sandbox_memory"):
        resolve({}, environ={}, run=run)
    said = resolve(parse(["--env.sandbox_memory=2GiB"], dotted_flags()), environ={}, run=run)
    assert said.env.sandbox_memory == 2 << 30
    (home / "run" / "run.json").unlink()
    own = resolve({}, environ={}, run=begun(home, {"sandbox_memory": 1 << 40}))
    assert own.env.sandbox_memory == 1 << 40


def test_a_data_set_whose_rows_may_bring_images_is_named_by_the_operator(home: Path) -> None:
    address = f"--openai.base_url={ADDRESS}"
    run = foreign(home, {"launcher": "oci"})
    for given in ([], ["--env.launcher=oci"]):
        with pytest.raises(ConfigError, match="not written by you") as caught:
            resumed(run, address, *given)
        assert f"--env.dataset {DATASET}" in str(caught.value)
    assert resumed(run, address, "--env.launcher=oci", f"--env.dataset={DATASET}").env.dataset == DATASET
    assert resumed(foreign(home), address).env.dataset == DATASET  # Docker takes no files

    oci = parse(["--env.launcher=oci"], dotted_flags())
    with pytest.raises(ConfigError, match=r"give --env\.dataset yourself"):
        resolve(oci, environ={}, run=run)
    named = parse(["--env.launcher=oci", f"--env.dataset={DATASET}"], dotted_flags())
    assert resolve(named, environ={}, run=run).env.dataset == DATASET
    (home / "run" / "run.json").unlink()
    assert resolve(oci, environ={}, run=begun(home)).env.dataset == DATASET


def test_dockerfiles_are_built_of_data_sets_that_the_operator_names(home: Path) -> None:
    address, named = f"--openai.base_url={ADDRESS}", f"--env.dataset={DATASET}"
    run = foreign(home)
    assert not resumed(run, address).env.dockerfiles
    assert not resolve({}, environ={}, run=run).env.dockerfiles
    assert resumed(run, address, named).env.dockerfiles
    assert resumed(run, address, "--env.dockerfiles").env.dockerfiles
    assert resolve(parse([named], dotted_flags()), environ={}, run=run).env.dockerfiles
    (home / "run" / "run.json").unlink()
    own = begun(home)
    assert resumed(own).env.dockerfiles
    assert resolve({}, environ={}, run=own).env.dockerfiles


def test_a_run_of_an_account_without_a_place_for_a_key_is_written_all_the_same(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    run = begun(home)
    assert "proof" not in json.loads((run / "run.json").read_text())
    with pytest.raises(ConfigError, match="add: "):
        resumed(run)
