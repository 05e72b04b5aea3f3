"""Tasks with a healthcheck in real sandboxes: the agent finds what it set up and has no power over it, graders
have it too, and one that fails is the task's fault."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.launch.image.build import ensure_image
from tests.fakes import oci_images
from tests.fakes.harbor import a_task
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import flags, lines, place, run

_WHY_NOT = oci_images.why_not() or ("needs root" if os.geteuid() else None)
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
ASKS = "import urllib.request as u; u.urlopen('http://127.0.0.1:8099/who', timeout=5)"
HEALTHY = f"""
[environment]
workdir = "/app"
env = {{WHAT = "of the task"}}
[environment.healthcheck]
command = \"\"\"
echo "$(id -u) in $PWD, $WHAT" > /srv/who
echo once >> /srv/runs
chmod 600 /srv/runs
python3 -c "{ASKS}" || {{ python3 -m http.server 8099 -d /srv & exit 1; }}
\"\"\"
interval_sec = 0.5
retries = 60
[agent]
user = "1234"
[verifier]
user = "1234"
"""
SICK = '[environment.healthcheck]\ncommand = "echo no database >&2; exit 3"\ninterval_sec = 0\n'
DOCKERFILE = "FROM far.example/base:1\nRUN mkdir /app && chown 1234 /app\nWORKDIR /app\n"
TEST = f"""#!/bin/sh
grep -q done out && python3 -c "{ASKS}" && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
LOOK = """
import json, os, pathlib, signal, urllib.request as u
server = next(p for p in os.listdir('/proc') if p.isdecimal()
              and b'http.server' in pathlib.Path('/proc', p, 'cmdline').read_bytes())
seen = {'who': u.urlopen('http://127.0.0.1:8099/who').read().decode().strip(), 'as': os.getuid()}

def tried(what):
    try:
        return str(what())
    except OSError as error:
        return type(error).__name__

seen['kill'] = tried(lambda: os.kill(int(server), signal.SIGTERM))
seen['memory'] = tried(lambda: open(f'/proc/{server}/mem', 'rb'))
seen['descriptors'] = tried(lambda: os.listdir(f'/proc/{server}/fd'))
seen['runs'] = tried(lambda: open('/srv/runs').read())
open('out', 'w').write('done')
final_answer(json.dumps(seen))
"""
ROOT_LOOK = """
import json, os
seen = {}
for pid in filter(str.isdecimal, os.listdir('/proc')):
    try:
        seen[pid] = [os.readlink(f'/proc/{pid}/fd/{fd}') for fd in os.listdir(f'/proc/{pid}/fd')]
    except OSError:
        pass
seen.pop(str(os.getpid()), None)
final_answer(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def base() -> str:
    return asyncio.run(ensure_image(progress=print)).tag


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        yield directory


def write(home: Path) -> Path:
    tasks = home / "tasks"
    files = {"environment__Dockerfile": DOCKERFILE, "tests__test_sh": TEST}
    a_task(tasks / "healthy", HEALTHY, solution__solve_sh="#!/bin/sh\necho done > out\n", **files)
    a_task(tasks / "root", HEALTHY.replace('user = "1234"', ""), instruction_md="As root.\n", **files)
    a_task(tasks / "sick", SICK, **files)
    return tasks


def script(call: Call) -> str:
    return f"Thought.\n<code>\n{ROOT_LOOK if 'As root' in call.task else LOOK}\n</code>"


@pytest.mark.slow
async def test_the_agent_finds_what_it_set_up_and_has_no_power_over_it(home: Path, base: str) -> None:
    tasks = write(home)
    async with ScriptedServer("vllm", script) as server:
        command = flags(
            home,
            server.base_url,
            dataset=f"harbor:{tasks}",
            launcher="oci",
            base_images=f"far.example/base:1={base}",
            scoring_strategy="grader",
            group_size=1,
        )
        ended = await run(*command, directory=home, environ=oci_images.CACHE)
    assert not ended.traceback, ended
    attempts = {line["task_id"]: line for line in lines(home / "run" / "rollouts.jsonl")}
    healthy = attempts["healthy"]
    assert healthy["outcome"] == "finished", str([step["error"] for step in healthy["steps"]])[:900]
    assert json.loads(healthy["answer"]) == {
        "who": "0 in /app, of the task",
        "as": 1234,
        "kill": "PermissionError",
        "memory": "PermissionError",
        "descriptors": "PermissionError",
        "runs": "PermissionError",
    }
    assert (healthy["grade"]["rewards"], healthy["grade"]["flags"]) == ({"reward": 1.0}, [])
    assert attempts["root"]["outcome"] == "finished", str([step["error"] for step in attempts["root"]["steps"]])[
        :900
    ]
    assert any(note.startswith("its healthcheck took ") for note in healthy["notes"])
    of_others = json.loads(attempts["root"]["answer"])
    held = [target for targets in of_others.values() for target in targets]
    assert len(of_others) == 2, "the service, and what reads its output"
    assert not [target for target in held if target.startswith("/") and target != "/dev/null"], of_others
    assert [target for target in held if target.startswith("socket:")] != [], "where it listens"
    sick = attempts["sick"]
    why = "its healthcheck failed, 3 of 3 times; the last time it ended with 3 and printed: no database"
    assert (sick["outcome"], sick["reason"], sick.get("score")) == ("bad_task", why, None)


@pytest.mark.full
async def test_a_check_of_tasks_runs_it_too(home: Path, base: str) -> None:
    ended = await run(
        f"harbor:{write(home)}",
        "--json",
        f"--env.base_images=far.example/base:1={base}",
        directory=home,
        environ=oci_images.CACHE,
        command="check-tasks",
    )
    assert not ended.traceback, ended.stderr
    tasks = {task["task_id"]: task for task in json.loads(ended.stdout)["tasks"]}
    assert tasks["healthy"]["failures"] == [], tasks["healthy"]
    assert tasks["healthy"]["checked"]["scope"] == ["/app"], "what the healthcheck changes is not the solution's"
    why = "its healthcheck failed, 3 of 3 times; the last time it ended with 3 and printed: no database"
    assert tasks["sick"]["failures"] == [why]
