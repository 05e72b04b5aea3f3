"""Where settings come from, what wins, and that no key gets out again."""

from __future__ import annotations

import ast
import json
import shlex
import typing
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands.table import COMMANDS
from orchestrator.errors import ConfigError
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.kinds import Only
from orchestrator.settings.row import Setting
from orchestrator.settings.section import Settings
from orchestrator.settings.sources import load_config
from orchestrator.settings.table import SECTIONS, EnvSettings
from orchestrator.types import AgentSpec, Limits, Sampling, SandboxSpec

ROOT = Path(__file__).parents[2]
URL = "http://localhost:8000/v1"

PREDECESSOR = [
    """--env.data_path_to_save_groups output/gaia/smolagents_output.jsonl --env.total_steps 1
    --env.group_size 2 --env.include_messages true --env.max_concurrent_processes 8
    --env.use_chat_completion true --openai.model_name "gpt-4o"
    --openai.base_url "https://api.openai.com/v1" --openai.api_key x""",
    """--env.data_path_to_save_groups output/gaia/smolagents_output.jsonl --env.total_steps 10
    --env.group_size 2 --env.include_messages true --env.max_concurrent_processes 8
    --env.use_chat_completion true --openai.model_name "gpt-4o"
    --openai.base_url "https://api.openai.com/v1" --openai.api_key x""",
    """--env.data_path_to_save_groups output/gaia/smolagents_output.jsonl --env.total_steps 10
    --env.group_size 2 --env.include_messages true --env.max_concurrent_processes 8
    --env.use_chat_completion true --openai.model_name "your-model-name"
    --openai.base_url "http://localhost:8000/v1" """,
    """--env.rollout_server_url "http://localhost:8000" --env.use_chat_completion true
    --env.max_concurrent_processes 5 --env.group_size 8 --openai.model_name "your-model-name"
    --openai.base_url "http://localhost:8000/v1" """,
    "--env.max_concurrent_processes=8 --env.process_timeout=240 --api-key your_api_key",
]


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """load_config in an empty working directory and an empty environment."""

    def load(*argv: str, environ: dict[str, str] | None = None, yaml: str | None = None, **named: Any) -> Config:
        if yaml is not None:
            (tmp_path / "config.yaml").write_text(yaml)
            argv = (*argv, "--config", "config.yaml")
        return load_config(argv, environ=environ or {}, cwd=tmp_path, **named)

    return load


def refusal(load: Any, *argv: str, **more: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **more)
    text = str(caught.value)
    assert "\n" not in text
    return text


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("section", SECTIONS)
def test_every_default_is_valid_and_reads_to_itself(section: str) -> None:
    for row in SECTIONS[section].rows().values():
        assert row.read(row.default) == row.default
        assert row.text
        assert row.valid
        assert row.group


@pytest.mark.parametrize("cls", SECTIONS.values())
def test_every_value_has_the_type_its_field_declares(cls: type[Settings]) -> None:
    hints = typing.get_type_hints(cls)
    made = cls()
    for name, row in cls.rows().items():
        declared = hints[name]
        allowed = typing.get_args(declared) or (declared,)
        value = getattr(made, name)
        if typing.get_origin(declared) is typing.Literal:
            assert row.kind.metavar.split("|") == list(allowed)
        elif typing.get_origin(declared) is tuple:
            assert isinstance(value, tuple)
        else:
            assert any(type(value) is kind or (kind is Path and isinstance(value, Path)) for kind in allowed), name
            assert (type(None) in allowed) == (row.unset is not None), name


def all_rows() -> list[Setting]:
    return [row for cls in SECTIONS.values() for row in cls.rows().values()]


def test_every_row_says_what_resuming_does_with_it_and_which_commands_take_it() -> None:
    names = {command.name for command in COMMANDS}
    for row in all_rows():
        assert row.resume is not None, row.key
        assert row.commands, row.key
        assert {*row.commands, *row.from_run} <= names, row.key


@pytest.mark.parametrize(
    ("spec", "made_otherwise"),
    [
        (AgentSpec, {"kind", "call_format", "main_line"}),
        (SandboxSpec, {"runtime", "storage_bytes", "storage_inodes", "layers", "user"}),
        (Limits, {"completions", "stream_bytes"}),
        (Sampling, {"max_tokens", "seed"}),
    ],
)
def test_every_field_of_a_spec_comes_from_one_row(spec: type[Any], made_otherwise: set[str]) -> None:
    copied = [row.to[1] for row in all_rows() if row.to is not None and row.to[0] is spec]
    assert sorted([*copied, *made_otherwise]) == sorted(field.name for field in fields(spec))


@cache
def _code() -> tuple[list[tuple[str, int, tuple[Any, ...]]], frozenset[str]]:
    """(file, line, values of each display of more than two constants; names of the attributes that are read)."""
    displays, read = [], set()
    for file in (ROOT / "orchestrator").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Tuple | ast.List | ast.Set) and len(node.elts) > 2:
                values = tuple(item.value for item in node.elts if isinstance(item, ast.Constant))
                if len(values) == len(node.elts):
                    displays.append((file.name, node.lineno, values))
    return displays, frozenset(read)


def test_no_module_lists_names_of_settings() -> None:
    """What is to be known of a setting stands in its row: a list elsewhere would have to change with it."""
    names = {name for row in all_rows() for name in (row.name, row.key)}
    displays, _ = _code()
    assert [f"{file}:{line}" for file, line, values in displays if {*values} <= names] == []


def test_every_setting_is_read_somewhere() -> None:
    """One that is accepted and decides nothing is a promise broken: it must say what it takes, and why."""
    _, read = _code()
    for cls in SECTIONS.values():
        copied = {n for n, row in cls.rows().items() if row.to is not None and row.to[1] in read}
        unread = [n for n, row in cls.rows().items() if n not in read | copied and not isinstance(row.kind, Only)]
        assert unread == []


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        (["--env.use_chat_completion", "false"], "never as plain text"),
        (["--env.custom_thinking_prompt", "Think!"], "env.instructions"),
        (["--openai.health_check", "true"], "when rollouts fail"),
    ],
)
def test_what_is_not_offered_is_refused_with_a_reason(load: Any, flag: list[str], why: str) -> None:
    assert why in refusal(load, *flag)


def test_defaults_are_the_documented_ones() -> None:
    env, openai = EnvSettings(), OpenAISettings()
    assert (env.dataset, str(env.dataset_path), env.split) == ("gaia", "data/gaia", "validation")
    assert (env.group_size, env.total_steps, env.max_steps, env.step_timeout) == (8, -1, 12, 60)
    assert (env.rollout_timeout, env.rollout_deadline, env.max_concurrent_sandboxes) == (240, 3600, 8)
    assert (env.launcher, env.sandbox_memory, env.sandbox_cpus, env.sandbox_pids) == ("auto", 1 << 30, 1, 128)
    assert (env.temperature, env.top_p, env.max_completion_tokens, env.max_token_length) == (1, 1, 1024, 16384)
    assert (env.seed, env.token_source, env.group_policy, env.max_retries) == (None, "auto", "backfill", 2)
    assert (env.scoring_strategy, env.length_penalty_weight) == ("correctness", 0.1)
    assert (env.use_wandb, env.planning_interval, env.final_answer_at_max_steps) == (False, None, False)
    assert (openai.timeout, openai.server_type, openai.health_check) == (1200, "auto", False)


def test_invalid_settings_cannot_be_built() -> None:
    with pytest.raises(ConfigError, match=r"^env.group_size: must be a whole number from 1 to 1024; not 0$"):
        EnvSettings(group_size=0)
    with pytest.raises(ConfigError, match=r"env\.group_policy"):
        EnvSettings(group_size=4, group_policy="partial:5")
    with pytest.raises(ConfigError, match="at least one server"):
        Config(openai=())


# ---------------------------------------------------------------- precedence


@pytest.mark.parametrize("line", PREDECESSOR)
def test_command_lines_of_the_predecessor_are_valid(load: Any, line: str) -> None:
    load(*shlex.split(line))


def test_predecessors_command_line_means_what_it_meant(load: Any) -> None:
    config = load(*shlex.split(PREDECESSOR[0]), environ={"OPENAI_API_KEY": "sk-real"})
    assert config.env.max_concurrent_sandboxes == 8
    assert config.env.data_path_to_save_groups == Path("output/gaia/smolagents_output.jsonl")
    assert config.openai[0].key() == "sk-real"


def test_command_line_over_environment_over_yaml_over_default(load: Any) -> None:
    yaml = "env: {group_size: 2, max_steps: 2, seed: 2}"
    environ = {"ORCHESTRATOR_ENV__GROUP_SIZE": "3", "ORCHESTRATOR_ENV__MAX_STEPS": "3"}
    env = load("--env.group_size", "4", environ=environ, yaml=yaml).env
    assert (env.group_size, env.max_steps, env.seed, env.max_retries) == (4, 3, 2, 2)


def test_alias_on_the_command_line_beats_the_name_in_yaml(load: Any) -> None:
    assert load("--env.process_timeout", "10", yaml="env: {rollout_timeout: 20}").env.rollout_timeout == 10


@pytest.mark.parametrize(
    ("flag", "environ", "yaml", "key"),
    [
        (["--api-key", "cli"], {"OPENAI_API_KEY": "env"}, "openai: {api_key: yaml}", "cli"),
        (["--openai.api_key", "x"], {"OPENAI_API_KEY": "env"}, "openai: {api_key: yaml}", "env"),
        ([], {"OPENAI_API_KEY": "env"}, None, "env"),
        ([], {"OPENAI_API_KEY": "env", "ORCHESTRATOR_OPENAI__API_KEY": "own"}, None, "own"),
        ([], {"OPENAI_API_KEY": ""}, "openai: {api_key: yaml}", "yaml"),
        ([], {"OPENAI_API_KEY": "x"}, "openai: {api_key: ''}", ""),
        ([], {"OPENAI_API_KEY": "env\n"}, None, "env"),
    ],
)
def test_which_key_is_used(
    load: Any, flag: list[str], environ: dict[str, str], yaml: str | None, key: str
) -> None:
    assert load(*flag, environ=environ, yaml=yaml).openai[0].key() == key


def test_tavily_key_comes_from_flag_or_environment(load: Any) -> None:
    environ = {"TAVILY_API_KEY": "env"}
    assert load("--tavily-api-key", "cli", environ=environ).tavily_api_key.reveal() == "cli"
    assert load(environ=environ).tavily_api_key.reveal() == "env"
    assert not load().tavily_api_key


def test_dotenv_file_is_read_and_overrides_nothing(load: Any, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OPENAI_API_KEY=file\nTAVILY_API_KEY=file\nORCHESTRATOR_ENV__SEED=5\n")
    config = load(environ={"OPENAI_API_KEY": "real"})
    assert (config.openai[0].key(), config.tavily_api_key.reveal(), config.env.seed) == ("real", "file", 5)


def test_unreadable_dotenv_file_is_refused(load: Any, tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"OPENAI_API_KEY=\xff\xfe\n")
    assert refusal(load).endswith(".env: not UTF-8 text")


def test_unknown_environment_variable_of_ours_is_refused(load: Any) -> None:
    assert refusal(load, environ={"ORCHESTRATOR_ENV__GROUPSIZE": "3"}) == (
        "unknown environment variable ORCHESTRATOR_ENV__GROUPSIZE; did you mean ORCHESTRATOR_ENV__GROUP_SIZE?"
    )


def test_bad_value_in_the_environment_names_the_variable(load: Any) -> None:
    assert refusal(load, environ={"ORCHESTRATOR_ENV__SEED": "-1"}).startswith("ORCHESTRATOR_ENV__SEED: must be")


def test_arguments_by_name_win(load: Any) -> None:
    config = load(
        "--env.group_size", "4", env={"group_size": 5, "dataset_path": Path("d")}, openai={"base_url": URL}
    )
    assert (config.env.group_size, config.env.dataset_path, config.openai[0].base_url) == (5, Path("d"), URL)
    assert "env.grop_size; did you mean group_size?" in refusal(load, env={"grop_size": 5})


# ---------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    ("yaml", "text"),
    [
        ("env: {group_siz: 3}", "unknown key env.group_siz; did you mean group_size?"),
        ("environment: {}", "unknown key 'environment'; did you mean env?"),
        ("env: [1]", "env: must be a mapping"),
        ("[]", "must hold the keys env and openai"),
        ("openai: []", "openai: an empty list"),
        ("openai: [3]", "openai: must be a mapping"),
        ("env: {group_size: true}", "env.group_size: must be a whole number from 1 to 1024; not True"),
        ("env: {group_size: 2.0}", "env.group_size: must be"),
        ("env: {temperature: .nan}", "env.temperature: must be a number of at least 0; not nan"),
        ("env: {temperature: .inf}", "env.temperature: must be"),
        ("env: {split: 3}", "env.split: must be a name; not 3"),
        ('openai: {base_url: "http://a..b/v1"}', "openai.base_url: must be a URL"),
        ("env: {max_steps: null}", "env.max_steps: must be"),
        ("env: {process_timeout: 1, rollout_timeout: 2}", "are the same setting, with different values"),
        ("env: {true: 1}", "unknown key env.True"),
        ("env:\n  seed: [1", "not valid YAML at line 2"),
        ("env: !!python/object/apply:os.getpid []", "not valid YAML at line 1"),
        ("a\0b", "not valid YAML"),
        ("[" * 1000, "not valid YAML"),
    ],
)
def test_bad_yaml_is_one_line(load: Any, yaml: str, text: str) -> None:
    refused = refusal(load, yaml=yaml)
    assert text in refused
    assert "config.yaml" in refused


def test_bad_yaml_does_not_show_its_keys(load: Any) -> None:
    assert "canary" not in refusal(load, yaml="openai:\n  api_key: canary\n  api_key canary\n")


@pytest.mark.parametrize("yaml", ["", "env:", "openai:", "env: {untrained_outcomes: [timeout], seed: ~}"])
def test_sparse_yaml_is_fine(load: Any, yaml: str) -> None:
    assert load(yaml=yaml).env.group_size == 8


def test_several_servers_come_from_a_list(load: Any) -> None:
    yaml = f"openai: [{{base_url: {URL}, api_key: a, weight: 2}}, {{base_url: {URL}}}]"
    servers = load(yaml=yaml, environ={"OPENAI_API_KEY": "shared"}).openai
    assert [(s.key(), s.weight) for s in servers] == [("a", 2.0), ("shared", 1.0)]


@pytest.mark.parametrize("source", ["flag", "environment"])
def test_setting_all_of_several_servers_at_once_is_refused(load: Any, source: str) -> None:
    yaml = f"openai: [{{base_url: {URL}}}, {{base_url: {URL}}}]"
    if source == "flag":
        text = refusal(load, "--openai.model_name", "m", yaml=yaml)
    else:
        text = refusal(load, yaml=yaml, environ={"ORCHESTRATOR_OPENAI__MODEL_NAME": "m"})
    assert text.endswith(": there are 2 servers; set it for each of them instead")


def test_list_of_one_server_takes_flags(load: Any) -> None:
    assert load("--openai.model_name", "m", yaml=f"openai: [{{base_url: {URL}}}]").openai[0].model_name == "m"


def test_missing_yaml_is_named(load: Any) -> None:
    assert "nowhere.yaml: No such file" in refusal(load, "--config", "nowhere.yaml")


# ---------------------------------------------------------------- endpoint, secrets, specs


def test_endpoint_is_required_with_a_way_out(load: Any) -> None:
    with pytest.raises(ConfigError, match=r"--openai.base_url .* --openai.model_name .*`orchestrator demo`"):
        load(environ={"OPENAI_API_KEY": "sk-1"}).require_endpoint()
    load("--openai.base_url", "replay:runs/x").require_endpoint()


def test_no_key_is_shown_or_written(load: Any) -> None:
    config = load(
        "--openai.base_url",
        "http://user:canary-a@host/v1?api_key=canary-b",
        "--env.instructions",
        "use canary-c and sk-canary-d12345 and canary-e",
        "--env.rollout_server_url",
        "https://canary-f@host",
        environ={"OPENAI_API_KEY": "canary-c", "TAVILY_API_KEY": "canary-e"},
    )
    text = json.dumps(config.public(), allow_nan=False) + repr(config) + str(config.openai) + f"{config.env}"
    for secret in "abdf":
        assert f"canary-{secret}" not in text
    assert "canary" not in json.dumps(config.public())
    assert config.openai[0].base_url == "http://user:canary-a@host/v1?api_key=canary-b"
    assert config.public()["openai"][0]["base_url"] == "http://host/v1?api_key=[key]"


def test_public_holds_every_setting_but_the_keys(load: Any) -> None:
    public = load().public()
    assert set(public["env"]) == {f.name for f in fields(EnvSettings)}
    assert set(public["openai"][0]) == {f.name for f in fields(OpenAISettings)} - {"api_key", "headers"}


def test_public_configuration_can_be_loaded_again(load: Any) -> None:
    config = load("--env.untrained_outcomes", '["timeout"]', "--env.run_dir", "r", "--openai.base_url", URL)
    again = load(**json.loads(json.dumps(config.public())))
    assert again == config


def test_specs_are_made_of_the_settings(load: Any) -> None:
    config = load(
        *shlex.split(
            "--env.max_steps 3 --env.step_timeout 5s --env.planning_interval 2 --env.sandbox_memory 512m "
            "--env.sandbox_cpus 0.5 --env.rollout_timeout 1m --env.rollout_deadline 2m --env.seed 9 "
            "--env.max_token_length 500 --env.final_answer_at_max_steps --env.docker_runtime runsc"
        )
    )
    agent, sandbox, limits, sampling = (
        config.agent_spec(),
        config.sandbox_spec(),
        config.limits(),
        config.sampling(),
    )
    assert (agent.max_steps, agent.step_timeout_s, agent.planning_interval) == (3, 5, 2)
    assert agent.final_answer_at_max_steps
    assert (sandbox.image, sandbox.memory_bytes, sandbox.cpus) == (DEFAULT_IMAGE, 512 << 20, 0.5)
    assert sandbox.runtime == "runsc"
    assert (limits.rollout_timeout_s, limits.deadline_s, limits.max_token_length) == (60, 120, 500)
    assert limits.completions == 4 * 3 + 16
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (1.0, 500, 9)


LONG = "x" * 300


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"env": {"run_dir": "~nosuchuser/x"}}, "env.run_dir: must be a path"),
        ({"env": {"run_dir": LONG}}, "env.run_dir: must be a path"),
        ({"env": {"run_dir": "x/" * 2500}}, "env.run_dir: must be a path"),
        ({"env": {"agent": "program:~nosuchuser/x"}}, "env.agent: must be one of"),
        ({"env": {"agent": f"program:{LONG}"}}, "env.agent: must be one of"),
        ({"openai": {"base_url": f"replay:{LONG}"}}, "openai.base_url: must be a URL"),
        ({"env": {"sandbox_memory": "9" * 400}}, "env.sandbox_memory: must be bytes"),
        ({"env": {"sandbox_memory": "9" * 400 + "g"}}, "env.sandbox_memory: must be bytes"),
        ({"env": {"group_size": 16**5000}}, "env.group_size: .*not a number of thousands of digits"),
        ({"env": {"combined_weights": {"correctness": 16**5000}}}, "not a number of thousands of digits"),
        ({"env": {16**5000: 1}}, "unknown key env.a number of thousands of digits"),
    ],
)
def test_paths_and_numbers_no_machine_has_are_refused_in_one_line(
    load: Any, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as refusal:
        load(**settings)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("value", ["2020-99-99", "9" * 5000, "!!int ''", "!!timestamp x", "!!bool x"])
def test_a_date_or_number_in_yaml_that_is_none_is_told_as_such(tmp_path: Path, value: str) -> None:
    (tmp_path / "c.yaml").write_text(f"env:\n  group_size: {value}\n")
    with pytest.raises(ConfigError, match="it holds an invalid date or number; put text in quotes"):
        load_config(["--config", "c.yaml"], environ={}, cwd=tmp_path)


def test_yaml_that_is_no_text_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"env: {instructions: '\xff'}")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(["--config", "c.yaml"], environ={}, cwd=tmp_path)


def test_a_current_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="the current directory is gone"):
        load_config([], environ={})
