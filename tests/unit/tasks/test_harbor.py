"""Harbor's tasks: what becomes of each field, which are refused by name, and what a hostile folder can do."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConfigError
from orchestrator.settings.sources import load_config
from orchestrator.tasks import open_tasks
from orchestrator.tasks.base import Source
from orchestrator.tasks.harbor.task import read_folder
from orchestrator.tasks.no_tasks import tasks_to_evaluate, tasks_to_train
from orchestrator.types import BadTask, Call, Collect, ContextMessage, Healthcheck, Task, TaskFile
from tests.fakes.harbor import TOML, a_task


def source(path: Path, split: str = "validation") -> Source:
    return open_tasks(f"harbor:{path}", dataset_path=path, split=split)


def only(folder: Path) -> Task:
    [task] = source(folder)
    assert isinstance(task, Task), task
    return task


def refusal(folder: Path) -> tuple[str, str]:
    """(what it needs, why)"""
    reading = read_folder(folder, "test")
    assert isinstance(reading.task, BadTask), reading.task
    return reading.need, reading.task.reason


# ---------------------------------------------------------------- fields

WHOLE = """
version = "1.0"
artifacts = ["/app//out.json", {source = "/var/log/x", exclude = ["*.tmp"]}]

[task]
name = "org/fix-it"
keywords = ["python", "bug"]

[metadata]
difficulty = "hard"
category = "debugging"
tags = ["bug", "tests"]
born = 2024-03-05

[agent]
timeout_sec = 900
user = "dev"

[verifier]
timeout_sec = 120.5
environment_mode = "separate"
user = 0
env = {MODE = "${MODE:-strict}", A = "verifier"}

[[verifier.collect]]
command = "pg_dump > /logs/artifacts/db.sql"
timeout_sec = 5
user = "postgres"

[environment]
workdir = "/app"
cpus = 2
memory = "2G"
storage_mb = 10240
allow_internet = true
env = {LANG = "C", A = "${NOT_SET:-}", PRICE = "5 ${X} 6"}

[solution]
env = {HINT = "${HINT:-7}"}
"""


def test_each_field_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE", "secret of the host")
    task = only(a_task(tmp_path / "t", WHOLE))
    assert (task.task_id, task.question, task.level) == ("org/fix-it", "Make it work.\n", "hard")
    assert task.metadata["tags"] == ["bug", "tests", "debugging", "python"]
    assert task.metadata["born"] == "2024-03-05"
    assert task.dockerfile == f"{tmp_path}/t/environment/Dockerfile"
    assert (task.root, task.cwd, task.user) == ("writable", "/app", "dev")
    assert task.environment == {"LANG": "C", "A": "", "PRICE": "5 ${X} 6"}
    assert (task.cpus, task.memory_bytes, task.storage_bytes) == (2.0, 2 << 30, 10 << 30)
    assert task.limits == {"rollout_timeout": 900.0, "rollout_deadline": 900.0}
    assert task.notes == ("its task asks for a network (public): it had what env.egress gave it",)
    assert (task.source, task.answer) == (f"harbor:{tmp_path}/t", None)
    grader = task.grader
    assert grader is not None
    assert (grader.kind, grader.tests, grader.solution) == (
        "harbor",
        f"{tmp_path}/t/tests",
        f"{tmp_path}/t/solution",
    )
    assert (grader.timeout_s, grader.user, grader.cwd) == (120.5, "0", "/app")
    assert grader.environment == {"LANG": "C", "A": "verifier", "PRICE": "5 ${X} 6", "MODE": "strict"}
    assert grader.collect == (Collect("pg_dump > /logs/artifacts/db.sql", 5.0, "postgres"),)
    assert grader.declared == ("/logs/artifacts", "/app/out.json", "/var/log/x")
    assert grader.solution_environment == {"HINT": "7"}


def test_a_task_that_says_nothing_takes_what_the_run_has(tmp_path: Path) -> None:
    task = only(a_task(tmp_path / "a-name", ""))
    assert (task.task_id, task.level, task.user, task.limits) == ("a-name", None, None, {})
    assert (task.cpus, task.memory_bytes, task.storage_bytes) == (None, None, None)
    assert task.cwd == "", "the image's"
    assert task.grader is not None
    assert (task.grader.timeout_s, task.grader.user, task.grader.cwd) == (600.0, None, None)
    assert task.grader.declared is None


def test_without_a_solution_there_is_none(tmp_path: Path) -> None:
    task = only(a_task(tmp_path / "t", solution__solve_sh=None))
    assert task.grader is not None
    assert task.grader.solution is None


def test_artifacts_are_what_is_graded_where_the_verifier_gets_no_more_or_needs_none(tmp_path: Path) -> None:
    text = 'artifacts = ["/app/log"]\n'
    shared, separate = (
        only(a_task(tmp_path / "s", text + more)).grader
        for more in ("", '[verifier]\nenvironment_mode="separate"')
    )
    assert shared is not None
    assert separate is not None
    assert (shared.declared, shared.named) == (None, ("/logs/artifacts", "/app/log"))
    assert (separate.declared, separate.named) == (("/logs/artifacts", "/app/log"), ())
    nothing = only(a_task(tmp_path / "n")).grader
    assert nothing is not None
    assert (nothing.declared, nothing.named) == (None, ())


def test_a_verifier_has_its_own_image_tests_and_environment(tmp_path: Path) -> None:
    text = '[environment]\nworkdir = "/app"\nenv = {A = "1"}\n[verifier]\nenvironment_mode = "separate"\n'
    built = only(a_task(tmp_path / "built", text, tests__Dockerfile="FROM busybox\n", tests__test_sh=None)).grader
    assert built is not None
    assert built.dockerfile == f"{tmp_path}/built/tests/Dockerfile"
    assert (built.tests, built.cwd, built.environment) == (None, "/app", {"A": "1"})
    text = '[environment]\nworkdir = "/app"\nenv = {A = "1"}\n[verifier.environment]\ndocker_image = "checks:1"\n'
    named = only(a_task(tmp_path / "named", text, tests__test_sh=None)).grader
    assert named is not None
    assert (named.dockerfile, named.tests, named.cwd, named.environment) == ("FROM checks:1", None, "", {})


CHECK = '[environment.healthcheck]\ncommand = "pg_ctl start"\n'


def test_a_healthcheck_has_harbors_defaults(tmp_path: Path) -> None:
    task = only(a_task(tmp_path / "t", CHECK))
    usual = Healthcheck("pg_ctl start", 5.0, 30.0, 0.0, 5.0, 3, as_root=False)
    assert task.healthcheck == usual
    assert task.grader is not None
    assert task.grader.healthcheck == usual, "where Harbor grades, what it started still runs"


def test_a_healthcheck_is_not_run_as_an_agent_with_a_user_of_its_own(tmp_path: Path) -> None:
    more = "interval_sec = 1\ntimeout_sec = 2.5\nstart_period_sec = 9\nstart_interval_sec = 0\nretries = 0\n"
    task = only(a_task(tmp_path / "t", f'{CHECK}{more}[agent]\nuser = "dev"\n'))
    assert task.healthcheck == Healthcheck("pg_ctl start", 1.0, 2.5, 9.0, 0.0, 1, as_root=True)


def test_a_verifier_of_its_own_runs_no_healthcheck(tmp_path: Path) -> None:
    """As in Harbor, whatever it says of one."""
    text = f'{CHECK}[verifier]\nenvironment_mode = "separate"\n{CHECK.replace("[", "[verifier.")}'
    task = only(a_task(tmp_path / "t", text))
    assert task.healthcheck is not None
    assert task.grader is not None
    assert task.grader.healthcheck is None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("retries = 9999\n", "environment.healthcheck may take 350000 s, at most 14400 are waited for"),
        ("interval_sec = -1\n", "task.toml: environment.healthcheck.interval_sec: "),
        ('command = "a\\u0000b"\n', "task.toml: environment.healthcheck.command: "),
    ],
)
def test_a_healthcheck_has_bounds(tmp_path: Path, more: str, why: str) -> None:
    text = CHECK if not more.startswith("command") else "[environment.healthcheck]\n"
    _, reason = refusal(a_task(tmp_path / "t", text + more))
    assert reason.startswith(why)


def test_the_grader_is_not_the_agent_s_user(tmp_path: Path) -> None:
    grader = only(a_task(tmp_path / "t", '[agent]\nuser = "dev"\n')).grader
    assert grader is not None
    assert grader.user == "root"


def test_an_image_comes_before_a_dockerfile(tmp_path: Path) -> None:
    task = only(a_task(tmp_path / "t", '[environment]\ndocker_image = "ghcr.io/a/b:1@sha256:00"\n'))
    assert task.dockerfile == "FROM ghcr.io/a/b:1@sha256:00"


def test_marks_of_benchmarks_are_not_the_question(tmp_path: Path) -> None:
    text = "<!-- harbor-canary GUID 1 -->\n# Canary: do not train\n\n# Title\n# canary below\n"
    assert only(a_task(tmp_path / "t", instruction_md=text)).question == "# Title\n# canary below\n"


def test_a_line_of_marks_without_end_is_read_at_once(tmp_path: Path) -> None:
    begun = time.process_time()
    for text in ("<!--" + "canary" * 100_000, "#canary\n" * 100_000 + "Do it."):
        assert only(a_task(tmp_path / "t", instruction_md=text)).question in (text, "Do it.")
    assert time.process_time() - begun < 2.0


@pytest.mark.parametrize(
    ("toml", "network"),
    [
        ("", "public"),
        ('[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n', "allowlist"),
        ("[environment]\nallow_internet = false\n", None),
        ('[environment]\nnetwork_mode = "public"\n[agent]\nnetwork_mode = "no-network"\n', None),
    ],
)
def test_a_network_that_a_task_asks_for_is_on_record(tmp_path: Path, toml: str, network: str | None) -> None:
    notes = (f"its task asks for a network ({network}): it had what env.egress gave it",) if network else ()
    assert only(a_task(tmp_path / "t", toml)).notes == notes


@pytest.mark.parametrize(
    "compose",
    [
        "services: {main: }",
        "services: {main: {build: {context: '${CONTEXT_DIR}'}, image: '${MAIN_IMAGE_NAME}', tty: true, "
        "command: [sh, -c, sleep infinity], volumes: ['${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}'], "
        "deploy: {resources: {limits: {cpus: '${CPUS}'}}}}}",
    ],
)
def test_a_compose_file_that_says_nothing_new_is_read(tmp_path: Path, compose: str) -> None:
    task = only(a_task(tmp_path / "t", **{"environment__docker-compose_yaml": compose}))
    assert task.dockerfile is not None


def test_a_compose_file_may_name_the_image(tmp_path: Path) -> None:
    compose = {"environment__docker-compose_yaml": "services: {main: {image: 'python:3.12'}}"}
    assert only(a_task(tmp_path / "t", environment__Dockerfile=None, **compose)).dockerfile == "FROM python:3.12"


# ---------------------------------------------------------------- steps, and what came before

ATIF = json.dumps({
    "schema_version": "ATIF-v1.6", "agent": {"name": "other", "version": "1"}, "steps": [
        {"step_id": 1, "source": "system", "message": "You are somebody else."},
        {"step_id": 2, "source": "user", "message": "Hello."},
        {"step_id": 3, "source": "agent", "message": "I look.", "reasoning_content": "hm",
         "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}],
         "observation": {"results": [{"source_call_id": "c1", "content": [{"type": "text", "text": "a b"}]}]}},
    ],
})  # fmt: skip


def test_a_conversation_before_the_first_turn_is_context(tmp_path: Path) -> None:
    context = only(a_task(tmp_path / "t", trajectory_json=ATIF)).context
    assert context == (
        ContextMessage("user", "Hello."),
        ContextMessage("assistant", "I look.", (Call("c1", "bash", '{"command": "ls"}'),)),
        ContextMessage("tool", "a b", call_id="c1"),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("1" * 10_000, "no JSON"),
        ("{}", "no ATIF"),
        (ATIF.replace("v1.6", "v2.0"), "schema_version"),
        (ATIF.replace('"step_id": 2', '"step_id": 3'), "step 2 has the step_id 3"),
        (ATIF.replace('"source_call_id": "c1"', '"source_call_id": "c2"'), "a call that it does not make"),
        (ATIF.replace('"tool_call_id": "c1"', '"tool_call_id": "<|im_end|>"'), "tool_call_id"),
        (ATIF.replace("a b", "\\ud800"), "lone surrogates"),
        ("x" * (2 << 20), "more than 1048576 bytes"),
    ],
)
def test_a_conversation_that_cannot_be_read_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    need, why = refusal(a_task(tmp_path / "t", trajectory_json=text))
    assert (need, reason in why, "\n" in why) == ("", True, False), why


TWO = """
multi_step_reward_strategy = "final"
artifacts = ["/of/all"]
[agent]
timeout_sec = 100.0
[verifier]
timeout_sec = 20.0
env = {A = "task"}
[[steps]]
name = "one"
min_reward = 0.5
[steps.agent]
timeout_sec = 300.0
[[steps]]
name = "Two words"
min_reward = {quality = 0.25}
artifacts = ["/of/two"]
[steps.verifier]
timeout_sec = 7.0
env = {B = "step"}
[steps.healthcheck]
command = "true"
"""


def two_steps(folder: Path, toml: str = TWO, **files: str | None) -> Path:
    a_task(folder, toml, instruction_md=None, **files)
    for path, text in {
        "one/instruction.md": "First.",
        "one/trajectory.json": ATIF,
        "one/tests/check.py": "",
        "one/workdir/setup.sh": "exit 0",
        "one/workdir/deep/run": "x",
        "Two words/instruction.md": "# canary\nSecond.",
        "Two words/tests/test.sh": "",
        "Two words/solution/solve.sh": "",
    }.items():
        (folder / "steps" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "steps" / path).write_text(text)
    (folder / "steps/one/workdir/deep/run").chmod(0o755)
    return folder


def test_steps_are_read_with_what_the_task_has_for_all_of_them(tmp_path: Path) -> None:
    folder = two_steps(tmp_path / "t")
    task = only(folder)
    one, two = task.steps
    assert (task.question, task.grader, len(task.context)) == ("First.", one.grader, 3)
    assert (task.steps_reward, task.limits["rollout_timeout"]) == ("final", 300)
    assert (one.name, one.least, one.timeout_s) == ("one", {"reward": 0.5}, 300)
    assert (two.name, two.least, two.timeout_s, two.question) == ("Two words", {"quality": 0.25}, 100, "Second.")
    assert one.grader.tests == f"{folder}/steps/one/tests", "the task's test.sh lies below"
    assert one.grader.shared_tests == two.grader.shared_tests == f"{folder}/tests"
    assert one.grader.solution == f"{folder}/solution"
    assert two.grader.solution == f"{folder}/steps/Two words/solution"
    assert (one.grader.timeout_s, two.grader.timeout_s) == (20, 7)
    assert (one.grader.environment, two.grader.environment) == ({"A": "task"}, {"B": "step"})
    assert {"/of/all"} == {*one.grader.named} - {"/logs/artifacts"}
    assert {"/of/all", "/of/two"} == {*two.grader.named} - {"/logs/artifacts"}
    assert one.files == (TaskFile("setup.sh", b"exit 0"), TaskFile("deep/run", b"x", executable=True))
    assert one.setup is not None
    assert two.setup is None
    assert two.grader.healthcheck == two.healthcheck == Healthcheck("true")


@pytest.mark.parametrize(
    ("toml", "reason"),
    [
        ('[[steps]]\nname = "../one"', "no name of a step"),
        ('[[steps]]\nname = ".."', "no name of a step"),
        ('[[steps]]\nname = "one"\n[[steps]]\nname = "ONE"', "the same name"),
        ('[[steps]]\nname = "one"\nmin_reward = nan', "min_reward"),
        ('[[steps]]\nname = "three"', "it has no steps/three/"),
        ("[[steps]]\n" * 60, "steps"),
        ('multi_step_reward_strategy = "best"\n', "multi_step_reward_strategy"),
    ],
)
def test_steps_that_cannot_be_read_are_refused(tmp_path: Path, toml: str, reason: str) -> None:
    need, why = refusal(two_steps(tmp_path / "t", toml, tests__test_sh=None))
    assert (need, reason in why, "\n" in why) == ("", True, False), why


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "large", "way"])
def test_hostile_files_of_a_step_are_refused(tmp_path: Path, what: str) -> None:
    folder = two_steps(tmp_path / "t")
    workdir, secret = folder / "steps/one/workdir", tmp_path / "secret"
    secret.mkdir()
    (secret / "instruction.md").write_text("The secret.")
    match what:
        case "link":
            (workdir / "x").symlink_to("/etc/passwd")
        case "folder":
            (workdir / "x").symlink_to(secret)
        case "pipe":
            os.mkfifo(workdir / "x")
        case "large":
            (workdir / "x").write_bytes(b"x" * (3 << 20))
        case "way":
            (folder / "steps/one").rename(folder / "aside")
            (folder / "steps/one").symlink_to(secret)
    need, why = refusal(folder)
    assert need == ""
    assert "secret" not in why.replace("steps/one", "")


# ---------------------------------------------------------------- refusals

HUGE = "9" * 5_000
# Ten of ten of ten ...: of what an alias stands for, and of what a merge copies.
ALIASES = "\n".join(["a0: &a0 x", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))])
MERGES = "\n".join(
    ["m0: &m0 {k: v}", *(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in range(1, 9))]
)
DEVICES = "{resources: {reservations: {devices: [{driver: nvidia}]}}}"
COMPOSE = "environment__docker-compose_yaml"
REFUSED = [
    ('[environment]\nos = "Windows"\n', {}, "Windows"),
    ("[environment]\ngpus = 1\n", {}, "a GPU"),
    ('[verifier.environment]\ngpus = 1\n', {}, "a GPU"),
    ('[environment.tpu]\ntype = "v4"\ntopology = "2x2"\n', {}, "a TPU"),
    ('[[environment.mcp_servers]]\nname = "m"\nurl = "http://127.0.0.1:1"\n', {}, "an MCP server"),
    ('[[steps]]\nname = "one"\n[steps.agent]\nuser = "x"\n', {}, "another user in a step"),
    ('[[steps]]\nname = "one"\n[steps.verifier.environment]\ngpus = 1\n', {}, "a GPU"),
    ('[[steps]]\nname = "one"\n[[steps.verifier.collect]]\ncommand = "x"\nservice = "db"\n', {}, "compose"),
    ("", {"trajectory_json": ATIF.replace('"Hello."', '[{"type": "image"}]')}, "pictures or sounds"),
    ('[environment]\nenv = {KEY = "${KEY}"}\n', {}, "a variable of the host"),
    ('[verifier]\nenv = {KEY = "${KEY}"}\n', {}, "a variable of the host"),
    ('[solution]\nenv = {KEY = "${KEY}"}\n', {}, "a variable of the host"),
    ("", {"environment__Dockerfile": None}, "an image"),
    ("", {COMPOSE: "services: {main: {}, db: {image: d, privileged: true}}"}, "privileged in compose"),
    ("", {COMPOSE: "services: {main: {privileged: true}}"}, "privileged in compose"),
    ("", {COMPOSE: "services: {main: {volumes: ['/:/host']}}"}, "a host mount in compose"),
    ("", {COMPOSE: "services: {main: {command: nginx}}"}, "command of main in compose"),
    ("", {COMPOSE: f"services: {{main: {{deploy: {DEVICES}}}}}"}, "a GPU in compose"),
    ("", {COMPOSE: f"{ALIASES}\nservices: {{main: {{command: *a11}}}}"}, "a0 in compose"),
    ("", {COMPOSE: f"{ALIASES}\nservices: {{main: {{build: *a11}}}}"}, "a0 in compose"),
    ("", {COMPOSE: "services: {main: {build: {context: .., target: x}}}"}, "build target in compose"),
    ('artifacts = [{source = "/x", service = "db"}]\n', {}, "compose"),
    ('[[verifier.collect]]\ncommand = "x"\nservice = "db"\n', {}, "compose"),
    ('[verifier]\nenvironment_mode = "separate"\n', {"tests__docker-compose_yaml": "x"}, "compose"),
]  # fmt: skip


@pytest.mark.parametrize(("toml", "files", "need"), REFUSED)
def test_what_is_not_had_here_is_refused_by_name(
    tmp_path: Path, toml: str, files: dict[str, str | None], need: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "secret of the host")
    found, reason = refusal(a_task(tmp_path / "t", toml, **files))
    assert found == need
    assert "secret" not in reason
    assert "\n" not in reason


def test_an_mcp_server_of_the_operators_stands_for_one_of_that_name_that_a_task_wants(tmp_path: Path) -> None:
    both = "".join(
        f'[[environment.mcp_servers]]\nname = "{name}"\ncommand = "rm"\nargs = ["/"]\n' for name in "ab"
    )
    folder = a_task(tmp_path / "t", both)
    for known, other in (([], "a"), (["a"], "b")):
        reading = read_folder(folder, "test", known)
        assert isinstance(reading.task, BadTask)
        assert reading.need == "an MCP server"
        assert f"names the MCP server '{other}': name one so in env.mcp_servers" in reading.task.reason
    [task] = open_tasks(f"harbor:{folder}", dataset_path=folder, split="", mcp_servers=["b", "a"])
    assert isinstance(task, Task)


def test_an_mcp_server_at_a_service_of_the_task_is_told_to_the_agent(tmp_path: Path) -> None:
    server = '[[environment.mcp_servers]]\nname = "m"\ntransport = "streamable-http"\nurl = "http://{}/mcp"\n'
    services = {COMPOSE: "services: {main: {}, tools: {image: d, hostname: words}}"}
    folder = a_task(tmp_path / "t", server.format("words:8000"), **services)
    task = read_folder(folder, "test").task
    assert isinstance(task, Task)
    assert [one.ports for one in task.services] == [(8000,)]
    assert task.question.endswith("\n- m (streamable-http): http://words:8000/mcp\n")
    operators = read_folder(folder, "test", ["m"]).task
    assert isinstance(operators, Task)
    assert "words" not in operators.question
    elsewhere = read_folder(a_task(tmp_path / "e", server.format("far.example"), **services), "test")
    assert elsewhere.need == "an MCP server"


def test_refused_tasks_are_counted_in_one_line(tmp_path: Path) -> None:
    compose = {"environment__docker-compose_yaml": "services: {main: {}, db: {image: d, privileged: true}}"}
    for number, (toml, files) in enumerate([
        (TOML, {}), (TOML, {}), (TOML, compose), (TOML, compose), ("[environment]\ngpus = 2\n", {}), ("=", {}),
        ('[task]\nname = "task-0"\n[environment]\ncolour = "red"\nnetwork_mode = "no-network"', {}),
    ]):  # fmt: skip
        a_task(tmp_path / f"task-{number}", toml, **files)
    found = source(tmp_path)
    assert found.notes() == (
        "of 7 tasks 2 can run: 2 need privileged in compose, 1 needs a GPU, 2 cannot be read",
        "2 of these tasks ask for a network: they have what env.egress gives",
        "keys of task.toml that are not read: environment.colour (1 tasks)",
    )
    assert [isinstance(task, Task) for task in found] == [True, True, False, False, False, False, False]


def test_a_run_without_a_task_that_can_run_is_told_why(tmp_path: Path) -> None:
    a_task(tmp_path / "t", "[environment]\ngpus = 1\n")
    config = load_config(["--env.dataset", f"harbor:{tmp_path}"], environ={})
    with pytest.raises(ConfigError, match=r"needs 1 GPUs.*; of 1 tasks 0 can run: 1 needs a GPU"):
        tasks_to_train(config.env)


# ---------------------------------------------------------------- hostile folders

WRONG = [
    ("= 1", "no TOML"),
    ("\0", "no TOML"),
    ("a = " + "[" * 30_000, "nests deeper"),
    ("metadata.x = " + "{a=" * 100 + "1" + "}" * 100, "nests deeper"),
    (".".join(["a"] * 30_000) + " = 1", "more than 64 parts"),
    (f"a = {HUGE}", "no TOML"),
    ("#" * (65 << 10), "more than 65536 bytes"),
    ("environment = 3", "environment"),
    ('[environment]\ncpus = "two"', "environment.cpus"),
    ("[environment]\ncpus = nan", "environment.cpus"),
    ("[environment]\ncpus = true", "environment.cpus"),
    ("[environment]\nmemory_mb = 0", "environment.memory_mb"),
    (f"[environment]\nmemory_mb = {HUGE[:300]}", "environment.memory_mb"),
    ('[environment]\nmemory = "lots"', "no size like 2G"),
    ('[environment]\nmemory = "2G"\nmemory_mb = 1', "or not memory_mb"),
    ("[environment]\ngpus = -1", "environment.gpus"),
    ("[environment]\ngpus = 0x" + "f" * 9_000, "environment.gpus"),
    ("[metadata]\nx = 0x" + "f" * 9_000, "more than 300 digits"),
    ('[environment]\nworkdir = "../x"', "absolute path"),
    ('[environment]\nenv = {LD_PRELOAD = "/x"}', "needs for itself"),
    ('[environment]\nenv = {"A=B" = "x"}', "no name of a variable"),
    ('[environment]\ndocker_image = "--privileged"', "no image name"),
    ("[agent]\ntimeout_sec = inf", "agent.timeout_sec"),
    ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
    ("[agent]\ntimeout_sec = 1e300", "agent.timeout_sec"),
    ('[agent]\nuser = "a b"', "no name and no UID"),
    ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec"),
    ('artifacts = ["/app/../etc"]\n[verifier]\nenvironment_mode = "separate"', "without `..`"),
    ('schema_version = "2.0"', "'2.0' is unknown: 1.0 to 1.4"),
    ('version = "0.9"', "'0.9' is unknown"),
    ("schema_version = 1.4", "schema_version"),
    ("[metadata]\nx = inf", "no number"),
    ('[metadata]\ndifficulty = "' + "x" * 70 + '"', "70 characters"),
    ("[metadata]\ndifficulty = []", "metadata.difficulty"),
    ('[task]\nname = "a\\nb"', "printable"),
    ('[task]\nname = ""', "task.name"),
]  # fmt: skip


@pytest.mark.parametrize(("toml", "why"), WRONG)
def test_a_task_toml_may_hold_anything(tmp_path: Path, toml: str, why: str) -> None:
    begun = time.monotonic()
    need, reason = refusal(a_task(tmp_path / "t", toml))
    assert need == ""
    assert why in reason
    assert "\n" not in reason
    assert len(reason) < 400
    assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"instruction_md": None}, "no instruction.md"),
        ({"instruction_md": " \n"}, "blank"),
        ({"instruction_md": "x" * ((1 << 20) + 1)}, "more than 1048576 bytes"),
        ({"instruction_md": "version https://git-lfs.github.com/spec/v1\n"}, "Git LFS pointer"),
        ({"tests__test_sh": None}, "no tests/test.sh"),
        ({"environment__docker-compose_yaml": "a: [b"}, "no YAML"),
        ({"environment__docker-compose_yaml": "- " * 30_000}, "no YAML"),
        ({"environment__docker-compose_yaml": "services: [main]"}, "no services"),
        ({"environment__docker-compose_yaml": "services:\n ? 0x" + "f" * 9_000}, "no services"),
        ({"environment__docker-compose_yaml": MERGES}, "merges mappings"),
    ],
)  # fmt: skip
def test_a_file_may_be_missing_or_wrong(tmp_path: Path, files: dict[str, Any], why: str) -> None:
    need, reason = refusal(a_task(tmp_path / "t", **files))
    assert (need, why in reason) == ("", True), reason


def test_no_link_is_followed_and_no_pipe_is_waited_for(tmp_path: Path) -> None:
    outside = a_task(tmp_path / "outside")
    for name in ("task.toml", "instruction.md"):
        for kind in ("link", "pipe", "folder"):
            folder = a_task(tmp_path / f"{name}-{kind}")
            (folder / name).unlink()
            if kind == "link":
                (folder / name).symlink_to(outside / name)
            elif kind == "pipe":
                os.mkfifo(folder / name)
            else:
                (folder / name).mkdir()
            need, reason = refusal(folder)
            assert need == ""
            assert ("is a link" if kind == "link" else "no regular file") in reason
    for name in ("environment", "tests", "solution"):
        folder = a_task(tmp_path / f"{name}-linked")
        (folder / name).rename(tmp_path / f"{name}-moved")
        (folder / name).symlink_to(tmp_path / f"{name}-moved")
        assert "is no folder, or a link to one" in refusal(folder)[1]
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "t").symlink_to(outside)
    [task] = source(tmp_path / "all")
    assert isinstance(task, BadTask)


@pytest.mark.parametrize("place", ["tests", "solution"])
def test_tests_and_solution_hold_only_their_own(tmp_path: Path, place: str) -> None:
    def why(name: str, target: str | None) -> str:
        folder = a_task(tmp_path / name)
        way = folder / place / "deep" / name
        way.parent.mkdir()
        if target is None:
            os.mkfifo(way)
        else:
            way.symlink_to(target)
        task = read_folder(folder, "test").task
        return task.reason if isinstance(task, BadTask) else ""

    assert "leads out of it" in why("absolute", "/etc/passwd")
    assert "leads out of it" in why("up", "../../instruction.md")
    assert "no file, folder or link" in why("pipe", None)
    assert why("inside", "../deep/../x") == ""
    assert why("dangling", "nothing") == ""


def test_names_of_every_encoding_are_read(tmp_path: Path) -> None:
    folder = os.fsencode(a_task(tmp_path / "t"))
    os.rename(folder, odd := os.fsencode(tmp_path) + b"/\xff\xfe-\xe6\x97\xa5")
    Path(os.fsdecode(odd), "tests", os.fsdecode(b"\xc3\x28")).write_text("x")
    [task] = source(tmp_path)
    assert isinstance(task, Task), task
    assert task.task_id == "\\udcff\\udcfe-日"
    assert task.grader is not None
    assert Path(task.grader.tests or "", "test.sh").is_file()


def test_too_many_files_are_refused_before_they_are_all_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.tasks.harbor.folder.MAX_FILES", 100)
    folder = a_task(tmp_path / "t")
    for number in range(101):
        os.mknod(folder / "tests" / f"{number}")
    assert "more than 100 files" in refusal(folder)[1]


def test_deep_folders_are_refused(tmp_path: Path) -> None:
    folder = a_task(tmp_path / "t")
    (folder / "tests").joinpath(*["d"] * 80).mkdir(parents=True)
    assert "64 folders deep" in refusal(folder)[1]


# ---------------------------------------------------------------- where tasks are


def ids(found: Source) -> list[str]:
    return [task.task_id if isinstance(task, Task) else f"bad {task.task_id}" for task in found]


def test_a_folder_of_tasks_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        a_task(tmp_path / name)
    (tmp_path / "shared").mkdir()
    (tmp_path / "README.md").write_text("no task")
    assert ids(source(tmp_path)) == ["a", "b", "c"]
    assert ids(source(tmp_path / "b")) == ["b"]
    assert ids(source(tmp_path)) == ids(source(tmp_path)), "a resumed run knows its tasks by their places"


def test_a_name_that_is_there_twice_is_one_task(tmp_path: Path) -> None:
    for name in ("a", "b"):
        a_task(tmp_path / name, '[task]\nname = "x/y"\n')
    assert ids(source(tmp_path)) == ["x/y", "bad x/y"]


@pytest.mark.parametrize("name", ["none", "file", "empty"])
def test_where_there_is_no_task_the_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty" / "no-task").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"env\.dataset"):
        source(tmp_path / name)


def a_registry(folder: Path) -> Path:
    for name in ("train-0", "train-1", "val-0"):
        a_task(folder / "tasks" / name)
    datasets = [
        {"name": f"x-{split}", "version": "1", "tasks": [{"name": n, "path": f"tasks/{n}"} for n in names]}
        for split, names in (("train", ["train-1", "train-0"]), ("val", ["val-0"]), ("all", ["val-0", "train-1"]))
    ]
    (folder / "registry.json").write_text(json.dumps(datasets))
    return folder


def test_a_registry_s_data_sets_are_splits(tmp_path: Path) -> None:
    folder = a_registry(tmp_path)
    assert ids(source(folder)) == ["train-1", "train-0", "val-0"]
    assert ids(source(folder / "registry.json", "x-train")) == ["train-1", "train-0"]
    with pytest.raises(ConfigError, match=r"x-test is no data set of .*it has x-train, x-val, x-all"):
        source(folder, "x-test")
    flags = ["--env.dataset", f"harbor:{folder}", "--env.split", "x-train", "--env.eval_split", "x-val"]
    env = load_config(flags, environ={}).env
    assert (ids(tasks_to_train(env)), ids(tasks_to_evaluate(env))) == (["train-1", "train-0"], ["val-0"])


def test_a_registry_names_nothing_outside_its_folder(tmp_path: Path) -> None:
    a_task(tmp_path / "outside")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path)
    git = {"git_url": "https://example.org/x.git", "path": "tasks/there"}
    paths = ["../outside", str(tmp_path / "outside"), "link/outside", "", "a\0b", 3, "tasks/here", "long" * 100]
    tasks = [*({"name": "t", "path": path} for path in paths), git, "text"]
    (tmp_path / "in" / "registry.json").write_text(json.dumps([{"name": "x", "tasks": tasks}]))
    bad = list(source(tmp_path / "in"))
    reasons = " ".join(task.reason for task in bad if isinstance(task, BadTask))
    assert reasons.count("leads out of its folder") == 3
    assert "clone https://example.org/x.git there" in reasons
    assert "longlong" in reasons
    assert not any(isinstance(task, Task) for task in bad)


@pytest.mark.parametrize(
    "text", ["", "{}", "3", '[{"name": 3}]', "[[]]", "[" * 100_000, '[{"name": 1, "tasks": 2}]']
)
def test_a_registry_may_hold_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / "registry.json").write_text(text)
    with pytest.raises(ConfigError, match=r"env\.dataset"):
        source(tmp_path)


@pytest.mark.timeout(20)
def test_a_registry_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "registry.json")
    with pytest.raises(ConfigError, match="no regular file"):
        source(tmp_path)


def test_selection_works_as_for_other_sources(tmp_path: Path) -> None:
    for number, level in enumerate(("easy", "hard", "easy", "hard")):
        a_task(tmp_path / f"t{number}", f'[metadata]\ndifficulty = "{level}"\ntags = ["n{number}"]\n')
    flags = ["--env.dataset", f"harbor:{tmp_path}", "--env.levels", '["hard"]']
    tasks = tasks_to_train(load_config(flags, environ={}).env)
    assert ids(tasks) == ["t1", "t3"]
    assert tasks.notes()[0] == "of 4 tasks 4 can run"
    assert ids(tasks_to_train(load_config([*flags, "--env.tags", '["n3"]'], environ={}).env)) == ["t3"]
    assert len(ids(tasks_to_train(load_config([*flags, "--env.max_tasks", "1"], environ={}).env))) == 1


def test_columns_are_not_for_it(tmp_path: Path) -> None:
    a_task(tmp_path / "t")
    with pytest.raises(ConfigError, match="harbor has our columns already"):
        open_tasks(f"harbor:{tmp_path}", dataset_path=tmp_path, split="x", columns={"question": "q"})


def test_services_of_a_compose_file_are_the_tasks(tmp_path: Path) -> None:
    compose = """
services:
  main: {depends_on: [db], working_dir: /srv/app, environment: {A: "1", B: "2"}, mem_limit: 1g, user: "7"}
  db: {build: ./db, expose: [5432]}
"""
    toml = """
artifacts = ["/srv/app/out", {source = "/tmp/dump.sql", service = "db"}]
[environment]
env = {B = "3"}
[verifier]
environment_mode = "separate"
[[verifier.collect]]
command = "pg_dump app > /tmp/dump.sql"
service = "db"
"""
    files = {"environment__docker-compose_yaml": compose, "environment__db__Dockerfile": "FROM postgres:16\n"}
    task = only(a_task(tmp_path / "t", toml, tests__Dockerfile="FROM x\n", **files))
    (db,) = task.services
    assert db.dockerfile == str(tmp_path / "t" / "environment" / "db" / "Dockerfile")
    assert (task.cwd, task.environment, task.memory_bytes, task.user) == (
        "/srv/app", {"A": "1", "B": "3"}, 1 << 30, "7",
    )  # fmt: skip
    assert task.grader is not None
    assert [one.service for one in task.grader.collect] == ["db"]
    assert task.grader.of_services == (("db", "/tmp/dump.sql"),)
    assert task.grader.declared == ("/logs/artifacts", "/srv/app/out")
