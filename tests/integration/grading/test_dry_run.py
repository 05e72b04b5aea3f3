"""Tests that install what they need when they grade: one dry run with a network makes a layer of it, and all later
grades have that and no network."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.commands import cleanup
from orchestrator.grading.dry_run import DryRuns
from orchestrator.grading.grade import with_tests
from orchestrator.grading.panel import policies
from orchestrator.launch.base import SavedLayer
from orchestrator.launch.image.site import Site
from orchestrator.launch.names import DEFAULT_IMAGE
from orchestrator.launch.oci.launcher import OciLauncher
from orchestrator.launch.workspaces import Workspaces
from orchestrator.settings.config import Config
from orchestrator.types import Checked, Grader, SandboxSpec, Task
from tests.fakes import oci_images
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.plans import a_writable_sandbox
from tests.fakes.runs import cleaning, flags, lines, place, run
from tests.fakes.wheel_index import Index, packages, serving
from tests.integration.grading.test_attacks import PATH, graded, launcher, spec, workspaces
from tests.integration.grading.test_check_tasks import checked

__all__ = ("launcher", "spec", "workspaces")  # fixtures
_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
FETCHES = """#!/bin/bash
[ -x /opt/tool/judge ] || python3 - <<'END'
import os, urllib.request
os.makedirs("/opt/tool/rules")
for name in ("judge", "rules/plain"):
    urllib.request.urlretrieve("http://{index}/" + name, "/opt/tool/" + name)
    os.chmod("/opt/tool/" + name, 0o755)
END
/opt/tool/judge > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
JUDGE = b"#!/bin/bash\nreward=0\nfor rule in /opt/tool/rules/*; do . $rule; done\necho $reward\n"
RULE = b'[ "$(cat answer 2> /dev/null)" = right ] && reward=1\n'


@pytest.fixture
def index() -> Iterator[Index]:
    with serving({"/judge": JUDGE, "/rules/plain": RULE, **packages()}) as made:
        yield made


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        yield directory


def write(home: Path, test_sh: str) -> Path:
    for kind, name, text in (
        ("tests", "test.sh", test_sh),
        ("solution", "solve.sh", "#!/bin/sh\nprintf right > answer\n"),
    ):
        (home / kind).mkdir()
        (home / kind / name).write_text(text)
    grader = {"kind": "harbor", "tests": "tests", "solution": "solution", "timeout": 120, "env": PATH}
    (home / "tasks.jsonl").write_text(json.dumps({"task_id": "q0", "question": "Do it.", "grader": grader}) + "\n")
    return home / "tasks.jsonl"


async def rolled_out(home: Path, run_dir: str) -> list[dict[str, Any]]:
    """The attempts of a group, the first of which does what it should."""
    asked: list[Call] = []

    def script(call: Call) -> str:
        asked.extend([call] if "Do it." in call.task else [])
        answer = "right" if len(asked) == 1 else "wrong"
        return f"T.\n<code>\nopen('answer', 'w').write({answer!r})\nfinal_answer('done')\n</code>"

    async with ScriptedServer("vllm", script) as server:
        given = flags(home, server.base_url, launcher="oci", scoring_strategy="grader", run_dir=run_dir)
        await run(*given, directory=home, environ=oci_images.CACHE)
    return lines(home / run_dir / "rollouts.jsonl")


@pytest.mark.full
async def test_what_tests_fetch_once_is_there_in_every_later_grade(home: Path, index: Index) -> None:
    tasks = write(home, FETCHES.replace("{index}", index.address))
    cache = Path(oci_images.CACHE["XDG_CACHE_HOME"]) / "rollout-orchestrator/workspaces/layers"
    without = (await checked(home, tasks, code=1))["tasks"][0]
    assert "its own solution gets 0" in without["failures"][0]
    assert without["dry_run"] is None
    # What is allowed now is reason enough to look again.
    task = (await checked(home, tasks, f"--env.grader_network={index.address}"))["tasks"][0]
    assert (task["solution"], task["no_op"], task["failures"]) == ([1, 1, 1], [0, 0, 0], [])
    assert set(task["panel"].values()) == {0}
    done = task["dry_run"]
    assert (done["allowed"], done["reached"], done["refused"]) == ([index.address], [index.address], [])
    assert task["checked"]["layer"] == done["layer"]
    assert index.asked == ["/judge", "/rules/plain"]
    layer = cache / done["layer"]
    assert sorted(str(path.relative_to(layer)) for path in layer.glob("opt/tool/*")) == [
        "opt/tool/judge",
        "opt/tool/rules",
    ]
    try:
        attempts = await rolled_out(home, "one")
        assert sorted(attempt["score"] for attempt in attempts) == [0, 1], attempts
        assert len(index.asked) == 2
    finally:
        shutil.rmtree(layer)
        (cache.parent / "kept" / layer.name).unlink()
    # Elsewhere nobody may know, and what has no layer has no score.
    attempts = await rolled_out(home, "two")
    assert {attempt["outcome"] for attempt in attempts} == {"bad_task"}
    assert "run check-tasks again here" in attempts[0]["reason"]
    again = (await checked(home, tasks, code=1))["tasks"][0]
    assert "its own solution gets 0" in again["failures"][0]


async def test_a_dry_run_reaches_no_host_that_is_not_named_and_nothing_but_by_its_proxy(
    home: Path, index: Index
) -> None:
    port = index.address.partition(":")[2]
    straight = f"import socket\nfor host in ('127.0.0.1', 'localhost'): socket.create_connection((host, {port}))"
    script = FETCHES.replace("{index}", "index.invalid")
    tasks = write(home, f'{script}python3 -c "{straight}"\n')
    failed = (await checked(home, tasks, "--env.grader_network=pypi.invalid", code=1))["tasks"][0]
    assert "its tests asked in vain for index.invalid (env.grader_network)" in failed["failures"][0]
    assert failed["dry_run"]["reached"] == []
    assert index.asked == []


PIP = """#!/bin/bash
python3 /tests/pip install --break-system-packages -i http://{index}/simple pytest
if python3 -m pytest -q /tests/test_outputs.py; then r=1; else r=0; fi
echo $r > /logs/verifier/reward.txt
"""
TEST_OUTPUTS = """def test_answer():
    with open("answer") as file: assert file.read() == "right"
"""


@pytest.mark.full
async def test_what_pip_installed_is_satisfied_and_cannot_be_patched_before_it_is_there(
    index: Index, launcher: OciLauncher, workspaces: Workspaces, tmp_path: Path
) -> None:
    (folder := tmp_path / "tests").mkdir()
    (folder / "test.sh").write_text(PIP.format(index=index.address))
    (folder / "test_outputs.py").write_text(TEST_OUTPUTS)
    pip = Path(sysconfig.get_path("purelib")) / "pip"
    shutil.copytree(pip, folder / "pip", ignore=shutil.ignore_patterns("__pycache__"))
    oci_images.stored_image()
    bare = a_writable_sandbox(DEFAULT_IMAGE, storage_bytes=256 << 20)
    grader = Grader("harbor", tests=str(folder), environment=PATH, timeout_s=120)
    task = with_tests(Task("pip", "Do it.", grader=grader, environment=PATH), workspaces)
    assert (await graded(launcher, bare, task, "printf right > /workspace/answer")).rewards == {"reward": 0}
    layered = await dry_run(task, index, bare, launcher, workspaces, tmp_path)
    asked = list(index.asked)
    assert len([path for path in asked if path.endswith(".whl")]) == 5
    right = await graded(launcher, bare, layered, "printf right > /workspace/answer")
    assert right.rewards == {"reward": 1}, right.stderr
    assert "Requirement already satisfied: pytest" in right.stdout
    # A pytest of its own where there is none yet wins without the layer, and not with it.
    patched = policies([], "/workspace", library=False)["patched pytest"]
    cheat = f"mkdir -p /usr/lib/python3/dist-packages; {patched}"
    assert (await graded(launcher, bare, layered, cheat)).rewards == {"reward": 0}
    assert index.asked == asked


PLANTED = {
    "the program itself": "mkdir -p /opt/tool; cd /opt/tool; echo 'echo 1' > judge; chmod 755 judge",
    "beside what it reads": "mkdir -p /opt/tool/rules; echo reward=1 > /opt/tool/rules/planted",
    "a link in its place": "mkdir -p /own/rules; echo reward=1 > /own/rules/planted; ln -s /own /opt/tool",
}


@pytest.fixture
def fetching(index: Index, workspaces: Workspaces, tmp_path: Path) -> Task:
    """Its tests fetch a program and its rules."""
    (tmp_path / "tests").mkdir()
    script = FETCHES.replace("{index}", index.address).replace(
        "/opt/tool/judge >", "cd /place/out; /opt/tool/judge >"
    )
    (tmp_path / "tests/test.sh").write_text(script.replace("\n", "\nmkdir -p /place/out\n", 1))
    grader = Grader("harbor", tests=str(tmp_path / "tests"), environment=PATH, timeout_s=60)
    return with_tests(Task("tool", "Do it.", grader=grader, environment=PATH), workspaces)


async def dry_run(
    task: Task, index: Index, spec: SandboxSpec, launcher: OciLauncher, workspaces: Workspaces, folder: Path
) -> Task:
    """The task with its layer."""
    (folder / "site").mkdir()
    site = Site({}, Path("/etc/ssl/certs/ca-certificates.crt"), ("SSL_CERT_FILE",))
    dry_runs = DryRuns([index.address], workspaces, site, folder / "site")
    done = await dry_runs.of(task, spec, launcher, ["/place/out/answer"])
    assert (done.error, done.reached) == ("", (index.address,))
    assert done.layer is not None
    assert task.grader is not None
    return replace(task, grader=replace(task.grader, checked=Checked(layer=dry_runs.place(done.layer))))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
async def test_what_an_agent_plants_where_tests_install_gains_nothing(
    name: str,
    fetching: Task,
    index: Index,
    launcher: OciLauncher,
    spec: SandboxSpec,
    workspaces: Workspaces,
    tmp_path: Path,
) -> None:
    layered = await dry_run(fetching, index, spec, launcher, workspaces, tmp_path)
    honest = await graded(launcher, spec, layered, "mkdir -p /place/out; echo right > /place/out/answer")
    assert (honest.rewards, honest.fault) == ({"reward": 1}, ""), honest.stderr
    planted = await graded(launcher, spec, layered, PLANTED[name])
    assert (planted.rewards, planted.scope) == ({"reward": 0}, "whole"), planted.stderr
    if name == "the program itself":  # without the layer it wins
        assert (await graded(launcher, spec, fetching, PLANTED[name])).rewards == {"reward": 1}


LEAVES = """#!/bin/bash
mkdir -p /opt/tool/inner /output /tmp/x
echo one > /opt/tool/inner/one; ln /opt/tool/inner/one /opt/tool/two; ln -s /opt/tool/two /opt/tool/three
chown 33:33 /opt/tool/inner/one; chmod 4750 /opt/tool/inner/one; mkfifo /opt/tool/pipe
rm -rf /usr/share/doc /etc/issue
touch -d 2001-02-03 /opt/tool/dated
env > /opt/tool/environment; cat $SSL_CERT_FILE > /dev/null && echo it can be read > /opt/tool/authorities
touch /workspace/mine /tmp/x/y /root/.kept /tests/z; mkdir -p /place/out; touch /place/out/answer /place/beside
echo 0 > /logs/verifier/reward.txt
"""
SHOWS = """#!/bin/bash
stat -c '%n %u:%g %a %h' /opt/tool/inner/one; readlink /opt/tool/three; cat /opt/tool/three
[ -e /opt/tool/pipe ] && echo pipe; ls /usr/share/doc /etc/issue /workspace/mine /tmp/x /place/out 2> /dev/null
date -r /opt/tool/dated +%F; ls -A /root/.kept /place /opt/tool; ls -d /output /.orchestrator*
cat /opt/tool/authorities; env | grep -ci -e proxy -e ssl_cert
echo 1 > /logs/verifier/reward.txt
"""


async def test_a_layer_is_what_the_dry_run_left_without_its_surroundings(
    launcher: OciLauncher, spec: SandboxSpec, workspaces: Workspaces, tmp_path: Path
) -> None:
    with serving({}) as index:
        tasks = []
        for name, text in (("leaves", LEAVES), ("shows", SHOWS)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "test.sh").write_text(text)
            grader = Grader("harbor", tests=str(tmp_path / name), environment=PATH, timeout_s=60)
            tasks.append(with_tests(Task(name, "Do it.", grader=grader), workspaces))
        (tmp_path / "site").mkdir()
        site = Site({}, Path("/etc/ssl/certs/ca-certificates.crt"), ("SSL_CERT_FILE",))
        dry_runs = DryRuns([index.address], workspaces, site, tmp_path / "site")
        done = await dry_runs.of(tasks[0], spec, launcher, ["/place/out"])
    assert (done.error, done.reached) == ("", ())
    assert done.layer is not None
    assert tasks[1].grader is not None
    known = replace(tasks[1].grader, checked=Checked(layer=dry_runs.place(done.layer)))
    shown = await graded(launcher, spec, replace(tasks[1], grader=known), "true")
    assert shown.stdout.splitlines() == [
        *("/opt/tool/inner/one 33:33 750 2", "/opt/tool/two", "one", "2001-02-03"),
        *("/root/.kept", "", "/opt/tool:", "authorities", "dated", "environment", "inner", "three", "two", ""),
        *("/place:", "beside", "/output", "it can be read", "0"),
    ]
    environment = (workspaces.named(done.layer) / "opt/tool/environment").read_text()
    assert "http_proxy=http://127.0.0.1:" in environment  # of the dry run alone


def test_cleanup_removes_layers_with_images_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (store := Workspaces()).keep(lambda folder: SavedLayer("a" * 64, 1000))
    store.close()
    config = Config()
    config = replace(config, env=replace(config.env, launcher="oci"))
    with cleaning():
        for images, older_than, there in ((False, None, True), (True, None, True), (True, 0.0, False)):
            assert cleanup.run(config, images=images, older_than=older_than, keep_bytes=None) == 0
            assert (store.layers / ("a" * 64)).exists() == there
            assert (", 1 grader layers" in capsys.readouterr().out) != there
