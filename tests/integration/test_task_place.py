"""Code works in the task's directory and with its variables, in every kind of agent and after every accident."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.worker import worker
from tests.fakes.sandbox_process import Places, run
from tests.fakes.scripted_orchestrator import Script, action

VARIABLES = {"GREETING": "héllo\nworld", "TZ": "UTC-3", "HOME": "/nowhere", "PWD": "/elsewhere"}
SHOWS = """
import os, subprocess, time
print(os.getcwd(), os.environ['PWD'], ascii(os.environ['GREETING']), time.strftime('%z'), os.environ['HOME'])
print(subprocess.run('pwd; echo "$GREETING" | wc -l', shell=True, capture_output=True, text=True).stdout.split())
"""
PROGRAM = f"""
{SHOWS}
import json, sys, urllib.request
body = json.dumps({{"messages": [{{"role": "user", "content": sys.stdin.read()}}]}}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
facts = {{"cwd": os.getcwd(), "said": said, "beside": os.path.exists("here")}}
json.dump(facts, open(os.environ["ANSWER_FILE"], "w"))
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path)


def shown(cwd: Path) -> str:
    return f"{cwd} {cwd} 'h\\xe9llo\\nworld' +0300 /nowhere\n{[str(cwd), '2']}"


async def test_steps_work_there_and_so_they_do_in_a_worker_that_replaces_another(places: Places) -> None:
    cwd = places.root / "made/on-the-way"
    script = Script(
        [
            action(SHOWS),
            action("os.chdir('/'); open('/proc/self/mem', 'rb').close()"),
            action("print(os.getcwd())"),  # as a step left it
            action("os._exit(3)"),
            action(SHOWS),
            action(f"write_file('note', 'x'); final_answer(os.listdir({str(cwd)!r}))"),
        ],
        cwd=str(cwd),
        environment=VARIABLES,
    )
    end = await run(places, script)
    first, _, moved, gone, again = end.served.observations
    assert shown(cwd) in first
    assert "\n/\n" in moved
    assert "ended with exit code 3" in gone
    assert shown(cwd) in again
    assert end.served.answer == b"['note']"


@pytest.mark.parametrize("preload", [(), ("json", "decimal")], ids=["started", "preloaded"])
async def test_programs_work_there_and_still_find_their_endpoint(tmp_path: Path, preload: tuple[str, ...]) -> None:
    places = Places(tmp_path, preload=preload)
    cwd = places.root / "app"
    cwd.mkdir()
    for folder in (cwd, places.workspace):  # of the task, and no answer
        (folder / "answer.txt").write_text("not the answer")
    (cwd / "here").touch()
    script = Script(
        ["forty-two"],
        kind="program",
        program={"__main__.py": PROGRAM.encode()},
        cwd=str(cwd),
        environment={**VARIABLES, "OPENAI_BASE_URL": "http://127.0.0.1:1", "ANSWER_FILE": "/dev/null"},
    )
    end = await run(places, script)
    assert json.loads(end.served.answer or b"{}") == {"cwd": str(cwd), "said": "forty-two", "beside": True}, end
    assert shown(cwd) in end.served.steps[-1].observations


@pytest.mark.parametrize("kind", ["code", "program"])
async def test_a_place_that_cannot_be_had_is_said(places: Places, kind: str) -> None:
    (places.root / "file").touch()
    program = {"__main__.py": b"print(1)"} if kind == "program" else {}
    script = Script([action("final_answer(1)")], cwd=str(places.root / "file/x"), kind=kind, program=program)
    end = await run(places, script)
    assert end.served.completions == []
    (result,) = end.served.results
    assert result.stop_reason == pb.STOP_REASON_BAD_TASK
    words = f"the task's working directory cannot be used: {places.root}/file/x: Not a directory"
    assert result.detail == words


async def test_a_place_that_a_step_takes_away_is_said_too(places: Places) -> None:
    cwd = places.root / "app"
    script = Script(
        [
            action(
                f"import os\nos.chdir('/')\nos.rmdir({str(cwd)!r})\nopen({str(cwd)!r}, 'w').close()\nos._exit(3)"
            ),
            action("final_answer(1)"),
        ],
        cwd=str(cwd),
    )
    end = await run(places, script)
    assert len(end.served.completions) == 1
    (result,) = end.served.results
    assert (
        result.stop_reason == pb.STOP_REASON_BAD_TASK
    )  # the orchestrator, which served a completion, knows better


@pytest.mark.parametrize(("number", "whose"), [(errno.EROFS, "task"), (errno.ENOSPC, "machine")])
def test_only_what_the_machine_lacks_is_no_word_on_the_place(
    monkeypatch: pytest.MonkeyPatch, number: int, whose: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "makedirs", fails)
    if whose == "task":
        assert worker.settle("/app", {}) == "/app: Read-only file system"
    else:
        with pytest.raises(OSError, match="No space left"):
            worker.settle("/app", {})
