"""`orchestrator check-tasks` over live sandboxes: tasks of an image of busybox alone, one fault in each."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import oci_images
from tests.fakes.archives import file, folder, layer, link, saved
from tests.fakes.foreign_images import ARCHITECTURE
from tests.fakes.runs import place, run, running, until

_WHY_NOT = oci_images.why_not()
_BUSYBOX = Path("/bin/busybox")
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
    pytest.mark.skipif(not _BUSYBOX.exists(), reason="there is no busybox: see tests/system-packages.sh"),
]
_APPLETS = (
    *(
        "sh",
        "cat",
        "cp",
        "mv",
        "rm",
        "mkdir",
        "mkfifo",
        "chmod",
        "dirname",
        "ln",
        "setsid",
        "sleep",
        "grep",
        "test",
    ),
    *("true", "["),
)
WRITES = "#!/bin/sh\necho right > /app/answer\n"
READS = '[ "$(cat /app/answer)" = right ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n'
MISSING = "cat: can't open '/app/answer': No such file or directory"
SOLVED: dict[str, tuple[str, str]] = {
    "honest": (WRITES, READS),
    "fooled": (WRITES, "[ -e /app/answer ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"),
    "unsolved": ("#!/bin/sh\necho wrong > /app/answer\n", READS),
    "free": (WRITES, "echo 1 > /logs/verifier/reward.txt\n"),
    "service": (
        "#!/bin/sh\nsleep 600 &\nuntil grep -qs sleep /proc/$!/comm; do :; done\n",  # until then it is a shell
        "grep -qs sleep /proc/[0-9]*/comm && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
    ),
    "network": (WRITES, "echo 'curl: (6) Could not resolve host: x' >&2\necho 0 > /logs/verifier/reward.txt\n"),
    "failing": ("#!/bin/sh\necho no such thing >&2; exit 3\n", READS),
    "exit code": (
        "#!/bin/sh\nprintf '#!/bin/sh\\nexit 0\\n' > /app/run.sh; chmod 755 /app/run.sh\n",
        "[ -s /app/run.sh ] && /app/run.sh && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n",
    ),
    "delivered": (
        "#!/bin/sh\nprintf '#!/bin/sh\\necho right\\n' > /app/answer.sh; chmod 755 /app/answer.sh\n",
        '[ "$(/app/answer.sh)" = right ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n',
    ),
}


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    links = [link(f"bin/{name}", "busybox") for name in _APPLETS]
    entries = [folder("app"), folder("bin"), folder("etc"), folder("tmp", 0o1777), folder("root"), folder("usr")]
    entries += [file("bin/busybox", _BUSYBOX.read_bytes(), mode=0o755), *links]
    config = {"architecture": ARCHITECTURE[os.uname().machine], "os": "linux", "config": {"Env": ["PATH=/bin"]}}
    with place() as directory:
        saved(directory / "busybox.tar", layer(*entries), config=config)
        yield directory


def write(home: Path, *names: str) -> Path:
    rows = []
    for name in names:
        solve, test = SOLVED[name]
        for kind, script, text in (("tests", "test.sh", f"#!/bin/sh\n{test}"), ("solution", "solve.sh", solve)):
            (home / name / kind).mkdir(parents=True, exist_ok=True)
            (home / name / kind / script).write_text(text)
        grader = {"kind": "harbor", "tests": f"{name}/tests", "solution": f"{name}/solution", "timeout": 60}
        rows.append(
            {"task_id": name, "question": "Do it.", "image": "./busybox.tar", "cwd": "/app", "grader": grader}
        )
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home / "tasks.jsonl"


async def checked(home: Path, tasks: Path, *more: str, code: int = 0) -> dict[str, Any]:
    ended = await run(
        f"jsonl:{tasks}", "--json", *more, directory=home, environ=oci_images.CACHE, command="check-tasks"
    )
    assert ended.code == code, ended.stderr
    assert not ended.traceback, ended.stderr
    assert list((home / "t").iterdir()) == []
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


@pytest.mark.slow
async def test_each_fault_of_a_task_is_found_and_named(home: Path) -> None:
    answer = await checked(home, write(home, *SOLVED), code=1)
    tasks = {task["task_id"]: task for task in answer["tasks"]}
    assert {name: task["failures"] for name, task in tasks.items()} == {
        "honest": [],
        "fooled": ["empty answer gets 1, and must get 0", "pipe as output gets 1, and must get 0"],
        "unsolved": ["its own solution gets 0, and must get 1"],
        "free": ["an untouched sandbox gets 1, and must get 0"],
        "service": ["it needs a service left running: its own solution gets 1 only where that still runs"],
        "network": [
            "it needs a network, to be solved or graded (Could not resolve): its own solution gets 0, "
            "and must get 1; curl: (6) Could not resolve host: x; --env.grader_network lets its tests fetch once "
            "what they need"
        ],
        "failing": [f"its own solution gets 0, and must get 1; solve.sh ended with 3: no such thing; {MISSING}"],
        "exit code": [
            "os._exit gets 1, and must get 0: its tests take an exit code for a pass, "
            "and should judge by what was printed or reported"
        ],
        "delivered": [],
    }
    assert (answer["passed"], answer["failed"], answer["unchecked"]) == (2, 7, 0)
    honest = tasks["honest"]
    assert (honest["solution"], honest["no_op"]) == ([1, 1, 1], [0, 0, 0])
    assert (honest["checked"]["scope"], honest["checked"]["source"]) == (["/app"], "reward.txt")
    assert set(honest["panel"].values()) == {0}
    assert len(honest["panel"]) >= 15
    assert not honest["runs_delivered"]
    assert honest["checks"]["statistical.adversarial_floor"] == {"status": "pass", "measured": 0}
    assert tasks["fooled"]["checks"]["statistical.adversarial_floor"] == {"status": "fail", "measured": 1}
    assert tasks["service"]["live"] == 1
    assert tasks["delivered"]["runs_delivered"]
    assert any("delivered code runs beside the tests" in line for line in tasks["delivered"]["warnings"])


@pytest.mark.full
async def test_only_what_has_changed_is_checked_anew(home: Path) -> None:
    tasks = write(home, "honest", "unsolved")
    first = await checked(home, tasks, code=1)
    seconds = {task["task_id"]: task["duration_s"] for task in first["tasks"]}
    again = await checked(home, tasks, code=1)
    assert {task["task_id"]: task["duration_s"] for task in again["tasks"]} == seconds
    (home / "unsolved/solution/solve.sh").write_text(WRITES)
    mended = await checked(home, tasks)
    assert [task["passed"] for task in mended["tasks"]] == [True, True]
    assert mended["tasks"][0]["duration_s"] == seconds["honest"]


@pytest.mark.slow
async def test_a_check_that_was_stopped_keeps_what_it_found_and_goes_on(home: Path) -> None:
    tasks, kept = write(home, "honest", "fooled", "unsolved"), home / "tasks.jsonl.checks.json"
    flags = (f"jsonl:{tasks}", "--env.max_concurrent_sandboxes=1")
    async with running(*flags, directory=home, environ=oci_images.CACHE, command="check-tasks") as started:
        await until(kept.exists, "a task is checked")
        started.signal(signal.SIGINT)
        ended = await started.ended()
    assert ended.code == 128 + signal.SIGINT, ended.stderr
    assert "the same command goes on" in ended.stderr
    assert list((home / "t").iterdir()) == []
    before = json.loads(kept.read_text())["tasks"]
    assert 0 < len(before) < 3
    answer = await checked(home, tasks, code=1)
    assert len(answer["tasks"]) == 3
    for task in answer["tasks"]:
        if task["task_id"] in before:
            assert task["duration_s"] == before[task["task_id"]]["duration_s"]


@pytest.mark.slow
async def test_a_working_directory_that_the_image_lacks_is_made(home: Path) -> None:
    tasks = write(home, "honest")
    (row,) = map(json.loads, tasks.read_text().splitlines())
    tasks.write_text(json.dumps({**row, "cwd": "/place/new"}) + "\n")
    (home / "honest" / "solution" / "solve.sh").write_text(
        "#!/bin/sh\n[ $PWD = /place/new ] && echo right > answer\n"
    )
    test = "[ $PWD = /place/new ] || exit 1\n" + READS.replace("/app/answer", "/place/new/answer")
    (home / "honest" / "tests" / "test.sh").write_text(f"#!/bin/sh\n{test}")
    (task,) = (await checked(home, tasks))["tasks"]
    assert (task["solution"], task["no_op"]) == ([1, 1, 1], [0, 0, 0])
