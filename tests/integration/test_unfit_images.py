"""Rows whose images no sandbox can be made of: one bad task each, before a rollout begins, and the run goes on."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch.image.facts import MOST_LAYERS
from tests.fakes import oci_images
from tests.fakes.archives import configured, file, folder, layer, saved
from tests.fakes.foreign_images import ARCHITECTURE, loaded
from tests.fakes.inference import ScriptedServer, always
from tests.fakes.runs import Ended, flags, lines, outcomes, place, printed_outcomes, run

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

_WHY_NOT = oci_images.why_not()
needs_oci = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")
ANSWERS = "Thought.\n<code>\nfinal_answer(1)\n</code>"
LAYER = layer(folder("etc"), file("etc/passwd", b"root:x:0:0::/:/bin/sh\napp:x:7:8::/:/bin/sh\n"))
LARGE = [f"A{n}={'x' * 1000}" for n in range(70)]


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        yield directory


def archive(path: Path, config: dict[str, Any] | None = None, **more: Any) -> Path:
    """An image of one layer. `more`: in the place of what is told of it."""
    whole = {"architecture": ARCHITECTURE[os.uname().machine], "os": "linux", "config": config or {}}
    told = json.loads(configured(LAYER, config=whole)) | more
    return saved(path, LAYER, told=json.dumps(told).encode())


def write(home: Path, rows: dict[str, dict[str, Any]]) -> None:
    text = [
        json.dumps({"task_id": name, "question": f"{name}?", "answer": "1", **row}) for name, row in rows.items()
    ]
    (home / "tasks.jsonl").write_text("\n".join(text) + "\n")


def bad(home: Path) -> dict[str, str]:
    """The reasons, by task; each has one line."""
    found = [line for line in lines(home / "run" / "rollouts.jsonl") if line["outcome"] == "bad_task"]
    assert len({line["task_id"] for line in found}) == len(found)
    return {line["task_id"]: line["reason"] for line in found}


async def a_run(home: Path, server: ScriptedServer, **env: object) -> Ended:
    ended = await run(*flags(home, server.base_url, **env), directory=home, environ=oci_images.CACHE)
    assert not ended.traceback, ended.stderr
    assert list((home / "t").iterdir()) == []
    return ended


@pytest.mark.slow
async def test_docker_makes_no_rollout_of_images_that_it_cannot_use(home: Path) -> None:
    word, good = uuid.uuid4().hex[:8], {"q0": {}, "q1": {}}
    odd = {
        "foreign": {"path": archive(home / "foreign.tar", architecture="s390x")},
        "env": {"path": archive(home / "env.tar", {"Env": LARGE})},
        "volume": {"path": archive(home / "volume.tar", {"Volumes": {"/opt/sandbox/app": {}}})},
    }
    names = {name: f"orchestrator-test-{name}:{word}" for name in (*odd, "absent")}
    write(home, {**{name: {"image": image} for name, image in names.items()}, **good})
    with ExitStack() as stack:
        for name, how in odd.items():
            stack.enter_context(loaded(how["path"], names[name]))
        async with ScriptedServer("vllm", always(ANSWERS)) as server:
            ended = await a_run(home, server, launcher="docker", total_steps=2, max_concurrent_sandboxes=1)
            before = lines(home / "run" / "rollouts.jsonl")
            again = await run("--env.resume", "run", directory=home)
    assert ended.code == 0, ended.stderr
    assert printed_outcomes(ended) == outcomes(home / "run") == {"finished": 4, "bad_task": 4}
    reasons = bad(home)
    assert f"the image {names['foreign']} is for linux/s390x, this machine is linux/" in reasons["foreign"]
    assert f"the ENV of the image {names['env']} takes" in reasons["env"]
    assert "has a VOLUME /opt/sandbox/app, where sandboxes have their own files" in reasons["volume"]
    assert reasons["absent"] == f"the sandbox image {names['absent']} is not here: pull or build it"
    # Resumed after they are gone, or could be had: it stays as it was.
    assert (again.code, again.traceback) == (0, False), again.stderr
    assert lines(home / "run" / "rollouts.jsonl") == before


@needs_oci
async def test_without_an_engine_neither_does_the_launcher_oci(home: Path) -> None:
    oci_images.stored_image()
    (home / "torn.tar").write_bytes(b"no image")
    archive(home / "fine.tar", {"User": "app"})
    archive(home / "ghost.tar", {"User": "ghost"})
    archive(home / "foreign.tar", architecture="s390x")
    archive(home / "empty.tar", rootfs={"diff_ids": []})
    archive(home / "layers.tar", rootfs={"diff_ids": ["sha256:1"] * (MOST_LAYERS + 1)})
    archive(home / "env.tar", {"Env": LARGE})
    files = ("torn", "foreign", "empty", "layers", "env")
    rows: dict[str, dict[str, Any]] = {name: {"image": f"./{name}.tar"} for name in files}
    rows |= {
        "absent": {"image": "orchestrator-test-nowhere:1"},
        "image's user": {"image": "./ghost.tar", "root": "writable"},
        "task's user": {"user": "nobody-here", "root": "writable"},
        "user of the file": {"image": "./fine.tar", "user": "ghost", "root": "writable"},
    }
    good = {
        "q0": {},
        "read-only": {"image": "./ghost.tar"},
        "q2": {"image": "./fine.tar", "root": "writable", "answer": "7"},
    }
    write(home, {**rows, **good})
    who = "Thought.\n<code>\nimport os\nfinal_answer(os.getuid())\n</code>"
    async with ScriptedServer("vllm", lambda call: who if "q2" in call.task else ANSWERS) as server:
        ended = await a_run(home, server, launcher="oci", group_size=1, max_concurrent_sandboxes=1)
    assert ended.code == 0, ended.stderr
    assert outcomes(home / "run") == {"finished": 3, "bad_task": len(rows)}
    reasons = bad(home)
    assert {name: words for name, words in WORDS.items() if words not in reasons[name]} == {}
    assert set(reasons) == set(rows) == set(WORDS)
    assert {line["score"] for line in lines(home / "run" / "rollouts.jsonl") if line["task_id"] in good} == {1.0}


WORDS = {
    "torn": "torn.tar: it is neither what `docker save` writes nor an OCI layout",
    "foreign": "foreign.tar is for linux/s390x, this machine is linux/",
    "empty": "empty.tar has no root file system",
    "layers": f"layers.tar has {MOST_LAYERS + 1} layers, at most {MOST_LAYERS} can be had",
    "env": "env.tar takes",
    "absent": "the sandbox image orchestrator-test-nowhere:1 is not in the store of images",
    "image's user": "the image has no user 'ghost', whom the agent is to run as",
    "task's user": "the image has no user 'nobody-here', whom the agent is to run as",
    "user of the file": "the image has no user 'ghost', whom the agent is to run as",
}


@pytest.mark.parametrize("command", ["process", "evaluate"])
async def test_unfit_images_alone_end_a_run_as_bad_tasks_alone_do(home: Path, command: str) -> None:
    (other := home / "other").mkdir()
    write(home, {name: {"image": "orchestrator-test-nowhere:1"} for name in ("a", "b")})
    write(other, {name: {"user": "app"} for name in ("a", "b")})  # whom Docker's sandboxes do not have
    ends = []
    async with ScriptedServer("vllm", always(ANSWERS)) as server:
        for directory in (home, other):
            given = flags(directory, server.base_url, launcher="docker", group_size=None)
            ends.append(await run(*given, directory=directory, command=command))
    assert [ended.traceback for ended in ends] == [False, False], ends
    assert ends[0].code == ends[1].code == 1, ends
    assert outcomes(home / "run") == outcomes(other / "run") == {"bad_task": 2}
    assert server.log.completed == []


async def test_the_run_s_own_image_is_refused_before_it_begins(home: Path) -> None:
    write(home, {"a": {}})
    name = f"orchestrator-test-foreign:{uuid.uuid4().hex[:8]}"
    with loaded(archive(home / "foreign.tar", architecture="s390x"), name):
        async with ScriptedServer("vllm", always(ANSWERS)) as server:
            ended = await run(*flags(home, server.base_url, launcher="docker", sandbox_image=name), directory=home)
    assert (ended.code, ended.traceback) == (3, False), ended.stderr
    assert "is for linux/s390x" in ended.stderr


@pytest.mark.parametrize("launcher", ["docker", pytest.param("oci", marks=needs_oci)])
async def test_a_working_directory_that_cannot_be_had_is_the_task_s_fault(home: Path, launcher: str) -> None:
    rows: dict[str, dict[str, Any]] = {"file": {"cwd": "/etc/passwd"}, "nowhere": {"cwd": "/nowhere/at/all"}}
    words = {"file": "/etc/passwd: File exists", "nowhere": "/nowhere/at/all: Read-only file system"}
    good: dict[str, dict[str, Any]] = {"q0": {"cwd": "/tmp/made"}}
    if launcher == "oci":
        oci_images.stored_image()
        rows["behind a file"] = {"cwd": "/etc/passwd/x", "root": "writable"}
        rows["of root"] = {"cwd": "/root/x", "root": "writable", "user": "nobody"}
        words |= {"behind a file": "/etc/passwd/x: Not a directory", "of root": "/root/x: Permission denied"}
        good["q1"] = {"cwd": "/srv/made", "root": "writable"}
    write(home, {**rows, **good})
    async with ScriptedServer("vllm", always(ANSWERS)) as server:
        ended = await a_run(home, server, launcher=launcher, group_size=1)
    assert ended.code == 1, ended.stderr
    assert outcomes(home / "run") == {"finished": len(good), "bad_task": len(rows)}
    why = "the task's working directory cannot be used: "
    assert bad(home) == {name: why + told for name, told in words.items()}
