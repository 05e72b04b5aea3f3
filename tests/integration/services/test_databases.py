"""Debian's PostgreSQL and Redis beside agents: a database that is migrated and a queue that is drained, graded by
their state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.endpoint import says, scripted_endpoint
from tests.fakes import oci_images, service_images
from tests.fakes.runs import flags, lines, place, run

_WHY_NOT = oci_images.why_not() or ("needs root" if os.geteuid() else None)
pytestmark = [
    pytest.mark.docker,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
AT_A_TIME = 16
SCHEMA = "CREATE TABLE people (name text); INSERT INTO people VALUES ('Ada Lovelace'), ('Alan Turing')"
SH = """
import os, subprocess
def sh(line, **given):
    done = subprocess.run(line, shell=True, text=True, stdout=-1, stderr=-2, env={**os.environ, **given})
    return f"{done.returncode} {done.stdout.strip()}"
"""
MIGRATE = f"""{SH}
os.environ["PGPASSWORD"] = "secret"
refused = sh("psql -h db -U postgres -d app -c 'SELECT 1'", PGPASSWORD="wrong")
print(refused)
assert "password authentication failed" in refused, refused
done = sh('''psql -h db -U postgres -d app -v ON_ERROR_STOP=1 -c "ALTER TABLE people ADD COLUMN family text;
UPDATE people SET family = split_part(name, ' ', 2), name = split_part(name, ' ', 1)" ''')
print(done)
final_answer(done)
"""
DRAIN = f"""{SH}
total = 0
while (popped := sh("redis-cli --raw -h queue LPOP jobs").split()[1:]):
    total += int(popped[0])
sh(f"redis-cli -h queue SET total {{total}}")
final_answer(total)
"""
QUESTIONS = {"migrate": "Migrate the database. (migrate!)", "drain": "Drain the queue. (drain!)"}
IDLE = says("I do nothing", "final_answer('nothing')")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return service_images.databases(tmp_path_factory.mktemp("databases"))


@pytest.fixture
def home(image: Path) -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        os.link(image, directory / "databases.tar")
        yield directory


def write(home: Path) -> None:
    of = "./databases.tar"
    filled = 'redis-cli ping && (redis-cli EXISTS jobs total | grep -qv "^0$" || redis-cli RPUSH jobs 1 2 3 4 5)'
    queue = service_images.redis(of, healthcheck={"test": filled, "interval": "1s", "retries": 60})
    migrated = "psql -h /tmp -U postgres -d app -At -c 'SELECT family, name FROM people ORDER BY 1'"
    rows: list[dict[str, Any]] = [
        {
            "task_id": "migrate",
            "question": QUESTIONS["migrate"],
            "image": of,
            "services": {"db": service_images.postgresql(of, SCHEMA)},
            "grader": {
                "kind": "command",
                "collect": [{"service": "db", "command": migrated}],
                "command": "printf 'Lovelace|Ada\\nTuring|Alan\\n' | cmp - /logs/services/db/0.txt",
            },
        },
        {
            "task_id": "drain",
            "question": QUESTIONS["drain"],
            "image": of,
            "services": {"queue": queue},
            "grader": {
                "kind": "command",
                "command": "test $(redis-cli -h queue GET total) = 15 && test $(redis-cli -h queue LLEN jobs) = 0",
            },
        },
    ]
    (home / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


async def test_databases_and_queues_are_worked_on_and_graded_by_their_state(home: Path) -> None:
    write(home)
    right = {"migrate!": says("I migrate", MIGRATE), "drain!": says("I drain", DRAIN)}
    half = AT_A_TIME // 2
    scripts = {name: [[turn]] * (half // 2) + [[IDLE]] * (half // 2) for name, turn in right.items()}
    with scripted_endpoint(scripts, "--dialect", "vllm") as endpoint:
        command = flags(
            home,
            endpoint.base_url,
            dataset=f"jsonl:{home / 'tasks.jsonl'}",
            launcher="oci",
            group_size=half,
            total_steps=2,
            max_concurrent_sandboxes=AT_A_TIME,
            scoring_strategy="grader",
        )
        ended = await run(*command, directory=home)
    assert ended.code == 0, ended
    attempts = lines(home / "run" / "rollouts.jsonl")
    for name in QUESTIONS:
        of = [one for one in attempts if one["task_id"] == name]
        assert sorted(one["score"] for one in of) == [0.0] * (half // 2) + [1.0] * (half // 2), of
        for one in of:
            assert one["outcome"] == "finished", one
            (service,) = one["services"]
            assert service["healthy_s"] is not None
            assert not service["ended"]
            assert service["log"]
