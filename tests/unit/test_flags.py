"""The command line: what is taken for a value, what is refused, and how the refusal reads."""

from __future__ import annotations

import pytest

from orchestrator.commands.table import COMMANDS
from orchestrator.errors import ConfigError
from orchestrator.rules.redact import Secret
from orchestrator.settings.flags import dotted_flags, parse
from orchestrator.settings.kinds import File, Integer, Kind, Number, Size, seconds
from orchestrator.settings.row import Setting


def given(*argv: str) -> dict[str, object]:
    return {key: value.value for key, value in parse(argv, dotted_flags()).items()}


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        given(*argv)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_values_follow_their_flag_or_an_equals_sign() -> None:
    assert given("--env.group_size", "4", "--openai.model_name=gpt-4o") == {
        "env.group_size": 4,
        "openai.model_name": "gpt-4o",
    }


def test_value_may_contain_equals_signs() -> None:
    dataset = "reasoning_gym:chain_sum?seed=1&size=20"
    assert given(f"--env.dataset={dataset}") == {"env.dataset": dataset}


@pytest.mark.parametrize("argv", [("--env.total_steps", "-1"), ("--env.total_steps=-1",)])
def test_negative_number_is_a_value(argv: tuple[str, ...]) -> None:
    assert given(*argv) == {"env.total_steps": -1}


@pytest.mark.parametrize(
    ("word", "value"),
    [("true", True), ("YES", True), ("1", True), ("false", False), ("no", False), ("0", False)],
)
def test_boolean_words(word: str, value: bool) -> None:
    assert given("--env.include_messages", word) == {"env.include_messages": value}
    assert given(f"--env.include_messages={word}") == {"env.include_messages": value}


def test_bare_boolean_is_true_and_leaves_the_next_flag_alone() -> None:
    assert given("--env.debug_scoring", "--env.group_size", "2") == {
        "env.debug_scoring": True,
        "env.group_size": 2,
    }


def test_bare_boolean_does_not_swallow_an_argument() -> None:
    path = Setting(None, File(), "", "a file", name="path")
    layer = parse(["--env.debug_scoring", "some/file"], dotted_flags(), [path])
    assert layer["env.debug_scoring"].value is True
    assert str(layer["path"].value) == "some/file"


def test_other_word_after_a_boolean_is_refused_with_what_it_takes() -> None:
    assert refused("--env.debug_scoring", "maybe") == (
        "unexpected 'maybe' after --env.debug_scoring, which takes true, false, yes, no, 1 or 0"
    )


def test_missing_argument_is_named() -> None:
    path = Setting(None, File(), "", "a run directory", name="path")
    with pytest.raises(ConfigError, match=r"^PATH is missing: a run directory$"):
        parse([], {}, [path])


def test_lists_are_json() -> None:
    argv = ("--env.untrained_outcomes", '["timeout", "budget"]')
    assert given(*argv) == {"env.untrained_outcomes": ("timeout", "budget")}


@pytest.mark.parametrize("text", ["timeout", '["cancelled"]', '{"timeout": 1}', '"timeout"', "[NaN]", "[" * 9999])
def test_what_is_no_list_of_outcomes_is_refused(text: str) -> None:
    assert "must be a JSON list like" in refused("--env.untrained_outcomes", text)


@pytest.mark.parametrize("word", ["none", "null", "None"])
def test_none_leaves_an_optional_setting_open(word: str) -> None:
    assert given("--env.seed", word) == {"env.seed": None}


def test_none_is_a_value_where_it_means_something() -> None:
    assert given("--env.tokenizer_name", "none", "--env.reasoning_effort", "none") == {
        "env.tokenizer_name": "none",
        "env.reasoning_effort": "none",
    }
    assert given("--env.tokenizer_name", "auto", "--env.reasoning_effort", "null") == {
        "env.tokenizer_name": None,
        "env.reasoning_effort": None,
    }


def test_none_for_a_setting_that_needs_a_value_is_refused() -> None:
    assert refused("--env.group_size", "none") == (
        "--env.group_size: must be a whole number from 1 to 1024; not 'none'"
    )


def test_unknown_flag_is_refused_with_the_nearest_name() -> None:
    assert refused("--env.grup_size", "4") == "unknown flag --env.grup_size; did you mean --env.group_size?"


def test_abbreviation_is_refused() -> None:
    assert "did you mean --env.group_size?" in refused("--env.group", "3")


def test_flag_without_its_section_is_refused() -> None:
    assert "did you mean --env.group_size?" in refused("--group_size", "3")


def test_flag_without_value_is_refused() -> None:
    assert refused("--env.split", "--env.seed", "1") == "--env.split needs a value: a name"
    assert "needs a value" in refused("--env.split")


@pytest.mark.parametrize("junk", ["junk", "-", "-5", "--", "", "—env.seed"])
def test_junk_is_refused(junk: str) -> None:
    assert refused(junk)


def test_same_flag_twice_must_agree() -> None:
    assert given("--env.seed", "1", "--env.seed=01") == {"env.seed": 1}
    assert refused("--env.seed", "1", "--env.seed", "2") == ("--env.seed is given twice, with different values")


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("max_concurrent_processes", "max_concurrent_sandboxes"),
        ("process_timeout", "rollout_timeout"),
    ],
)
def test_alias_is_the_same_setting_and_must_agree_with_it(alias: str, name: str) -> None:
    assert given(f"--env.{alias}", "7") == {f"env.{name}": 7}
    assert given(f"--env.{alias}", "7", f"--env.{name}", "7") == {f"env.{name}": 7}
    assert "are the same setting, with different values" in refused(f"--env.{alias}", "7", f"--env.{name}", "8")


def test_key_flags_set_the_keys() -> None:
    assert given("--api-key", "sk-1", "--tavily-api-key", "tvly-1") == {
        "openai.api_key": Secret("sk-1"),
        "tavily_api_key": Secret("tvly-1"),
    }


@pytest.mark.parametrize("word", ["x", "", "none"])
def test_placeholder_key_is_no_key(word: str) -> None:
    assert given("--openai.api_key", word) == {}


@pytest.mark.parametrize(
    "argv",
    [
        ("--openai.api_key", "canary canary"),
        ("--openai.api_key", "canary\n"[:-1] + "é"),
        ("--openai.api_key", "other", "canary"),
        ("--openai.api_kee=canary",),
        ("--api-key", "canary", "--openai.api_key", "other"),
        ("--openai.base_url", "ftp://canary:canary@host/"),
        ("--openai.base_url", "ftp://host/?api_key=canary"),
        ("--env.group_size", "sk-canary123"),
    ],
)
def test_no_refusal_shows_a_key(argv: tuple[str, ...]) -> None:
    assert "canary" not in refused(*argv)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "NaN", "", "0x10", "1,5", "true"])
@pytest.mark.parametrize("name", ["temperature", "length_penalty_weight", "rollout_timeout", "sandbox_cpus"])
def test_what_is_no_finite_number_is_refused(name: str, text: str) -> None:
    assert f"--env.{name}: must be " in refused(f"--env.{name}", text)


@pytest.mark.parametrize("text", ["1.0", "1e3", "one", "9" * 5000, "٣", "1_0", ""])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    assert "must be a whole number" in refused("--env.group_size", text)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Size(1), "1073741824", 1 << 30),
        (Size(1), "1GiB", 1 << 30),
        (Size(1), "512m", 512 << 20),
        (Size(1), "512 MiB", 512 << 20),
        (Size(1), "1.5g", 3 << 29),
        (seconds(above=0), "90", 90.0),
        (seconds(above=0), "90s", 90.0),
        (seconds(above=0), "5m", 300.0),
        (seconds(above=0), "1.5h", 5400.0),
        (seconds(above=0), "250ms", 0.25),
        (Number(), "-1e-3", -0.001),
        (Integer(), " +12 ", 12),
    ],
)
def test_quantities_with_units(kind: Kind, text: str, value: float) -> None:
    assert kind.read(text) == value
    assert kind.read(kind.read(text)) == value


@pytest.mark.parametrize("text", ["255m", "1GB2", "-1g", "1e9g", "g", "1 p"])
def test_bad_sizes_are_refused(text: str) -> None:
    assert "at least 256MiB" in refused("--env.sandbox_memory", text)


@pytest.mark.parametrize("text", ["0", "-5", "5 minutes", "1..5s", "366d", "s"])
def test_bad_durations_are_refused(text: str) -> None:
    assert "must be seconds above 0" in refused("--env.step_timeout", text)


@pytest.mark.parametrize(
    "text",
    ["gaia", "jsonl:a b.jsonl", "csv:x.csv", "hf:org/name", "reasoning_gym:gcd?seed=1&size=2", "python:a.b:make"],
)
def test_known_dataset_schemes_are_taken(text: str) -> None:
    assert given("--env.dataset", text) == {"env.dataset": text}


@pytest.mark.parametrize("text", ["", "jsonl:", "json:x", "GAIA", "python:a", "gaia:x", "jsonl:a\0b"])
def test_other_datasets_are_refused(text: str) -> None:
    assert "must be one of gaia, harbor:PATH, jsonl:PATH" in refused("--env.dataset", text)


@pytest.mark.parametrize("url", ["http://h", "https://h:8000/v1", "http://[::1]:80/v1", "replay:runs/x"])
def test_endpoint_addresses(url: str) -> None:
    assert given("--openai.base_url", url) == {"openai.base_url": url}


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "http://h:99999", "http://[", "replay:", "file:///x"]
)
def test_other_addresses_are_refused(url: str) -> None:
    assert "must be a URL with http:// or https://, or replay:RUN_DIR" in refused("--openai.base_url", url)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("env.group_size", "0"),
        ("env.total_steps", "0"),
        ("env.total_steps", "-2"),
        ("env.temperature", "-0.1"),
        ("env.top_p", "0"),
        ("env.top_p", "1.01"),
        ("env.sandbox_pids", "63"),
        ("env.group_policy", "partial"),
        ("env.group_policy", "partial:0"),
        ("env.launcher", "podman"),
        ("env.token_source", "Exact"),
        ("env.scoring_strategy", "python:x"),
        ("env.rollout_server_url", "localhost"),
        ("env.sandbox_image", "--privileged"),
        ("openai.server_type", "tgi"),
        ("openai.timeout", "0"),
    ],
)
def test_values_out_of_bounds_are_refused(flag: str, value: str) -> None:
    assert refused(f"--{flag}={value}").startswith(f"--{flag}: must be ")


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("evaluate", "--env.group_size"),
        ("evaluate", "--env.data_path_to_save_groups"),
        ("evaluate", "--env.zero_variance"),
        ("process", "--env.eval_samples"),
        ("process", "--env.eval_temperature"),
    ],
)
def test_a_flag_without_effect_in_a_command_is_refused(command: str, flag: str) -> None:
    accepted = {one.name: one.flags() for one in COMMANDS}
    with pytest.raises(ConfigError, match=f"this command does not use {flag}"):
        parse([flag, "4"], accepted[command])
    assert flag in accepted["serve"]
    assert flag in accepted["doctor"], "which takes the command line of any run"
    assert "--env.use_wandb" in accepted[command], "Atropos' users bring their command lines"
