"""Tasks with services, checked before anyone trains on them: by their own solutions, with fresh services each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.launch.image.build import ensure_image
from tests.fakes import oci_images
from tests.fakes.harbor import a_task
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.plans import WAIVED_WITHOUT_ROOT
from tests.fakes.runs import flags, lines, place, run
from tests.integration.services.test_life import ECHO

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
# Keeps the last line that it was asked in a file, and hands it on.
SOLVE = """#!/bin/sh
python3 -c "import socket; s = socket.create_connection(('db', 7000)); s.sendall(b'solved\\n'); s.recv(99)"
"""


async def test_solutions_are_played_beside_services(tmp_path: Path) -> None:
    oci_images.stored_image()
    with place() as home:
        solution = home / "solution"
        solution.mkdir()
        (solution / "solve.sh").write_text(SOLVE)
        keeps = ECHO.replace('print("asked", word, flush=True)', 'open("/srv/last", "w").write(word)')
        check = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 7000))'"
        row = {
            "task_id": "t",
            "question": "Tell the service that it is solved.",
            "services": {
                "db": {
                    "image": "rollout-orchestrator-sandbox:0.1.0",
                    "entrypoint": ["python3", "-c", keeps, "db", "7000"],
                    "expose": [7000],
                    "healthcheck": {"test": check, "interval": "1s", "retries": 60},
                    "mem_limit": "256m",
                }
            },
            "grader": {
                "kind": "command",
                "solution": "solution",
                "collect": [{"service": "db", "command": "cat /srv/last"}],
                "command": "grep -qx solved /logs/services/db/0.txt",
            },
        }
        (home / "tasks.jsonl").write_text(json.dumps(row) + "\n")
        waived = f"--env.waive_hardening={json.dumps(sorted(WAIVED_WITHOUT_ROOT))}"
        ended = await run(f"jsonl:{home / 'tasks.jsonl'}", waived, directory=home, command="check-tasks")
        assert ended.code == 0, ended


STEPS = """schema_version = "1.4"
[[environment.mcp_servers]]
name = "words"
url = "http://db:7000/mcp"
[[steps]]
name = "first"
[[steps]]
name = "second"
[[verifier.collect]]
service = "db"
command = "cat /srv/all"
"""
COMPOSE = """services:
  db:
    image: far.example/base:1
    entrypoint: ["python3", "-c", {keeps}, "db", "7000"]
    extra_hosts: ["db.example:127.0.0.1"]
    healthcheck: {{test: {check}, interval: 1s, retries: 60}}
    mem_limit: 256m
"""
# What the service was told in this step and in those before is what it has kept.
TEST = """#!/bin/sh
[ "$(cat /logs/services/db/0.txt)" = "{told}" ] && r=1 || r=0
echo $r > /logs/verifier/reward.txt
"""
TELL = (
    "python3 -c \"import socket; s = socket.create_connection(('db', 7000)); s.sendall(b'{word}\\n'); s.recv(9)\""
)


@pytest.mark.long
async def test_a_service_goes_on_from_step_to_step_where_it_is_named(tmp_path: Path) -> None:
    oci_images.stored_image()
    base = (await ensure_image(progress=print)).tag
    keeps = ECHO.replace('print("asked", word, flush=True)', 'open("/srv/all", "a").write(word + ";")')
    keeps = keeps.replace("1 << 30", "2**30")  # what looks like a merge of YAML is not read
    check = "python3 -c 'import socket; socket.create_connection((\"db.example\", 7000))'"
    with place() as home:
        task = a_task(
            home / "tasks" / "t",
            STEPS,
            environment__Dockerfile="FROM far.example/base:1\nRUN mkdir /app\nWORKDIR /app\n",
            instruction_md=None,
            tests__test_sh=None,
            solution__solve_sh=None,
            **{
                "environment/docker-compose.yaml": COMPOSE.format(keeps=json.dumps(keeps), check=json.dumps(check))
            },
        )
        for name, told in (("first", "first;"), ("second", "first;second;")):
            files = {
                "instruction.md": f"Tell db the word {name}.\n",
                "tests/test.sh": TEST.format(told=told),
                "solution/solve.sh": f"#!/bin/sh\n{TELL.format(word=name)}\n",
            }
            for file, text in files.items():
                (there := task / "steps" / name / file).parent.mkdir(parents=True, exist_ok=True)
                there.write_text(text)
        given = (f"--env.base_images=far.example/base:1={base}", "--env.dockerfiles")
        ended = await run(f"harbor:{home / 'tasks'}", *given, directory=home, command="check-tasks")
        assert ended.code == 0, ended

        def tells(call: Call) -> str:
            word = "second" if "word second" in str(call.messages) else "first"
            return f"Next.\n<code>\nimport os\nos.system({TELL.format(word=word)!r})\nfinal_answer(1)\n</code>"

        async with ScriptedServer("vllm", tells) as server:
            given += ("--env.scoring_strategy=grader", "--env.zero_variance=keep")
            own = flags(home, server.base_url, dataset=f"harbor:{home / 'tasks'}", launcher="oci", group_size=1)
            ended = await run(*own, *given, directory=home, environ=oci_images.CACHE)
        assert ended.code == 0, ended
        (line,) = lines(home / "run" / "rollouts.jsonl")
        assert (line["outcome"], line["score"]) == ("finished", 1), line["step_grades"]
        assert "- words (sse): http://db:7000/mcp" in str(line["completions"][0]["messages"])
