"""Harbor's tasks of several steps in real sandboxes: one conversation, and each step is graded while nothing
runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch.image.build import ensure_image
from tests.fakes import oci_images
from tests.fakes.harbor import a_task
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.runs import flags, lines, place, run, running, until

_WHY_NOT = oci_images.why_not() or ("needs root" if os.geteuid() else None)
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(900),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
DOCKERFILE = "FROM far.example/base:1\nRUN mkdir /app\nWORKDIR /app\n"
STEPS = """
multi_step_reward_strategy = "{strategy}"
artifacts = []
[[steps]]
name = "first"
min_reward = {least}
[[steps]]
name = "second"
[steps.healthcheck]
command = "test -e from-setup"
[[steps]]
name = "third"
"""
# 1 if the file named after the step says so; slow enough that a process which still ran would be seen.
TEST = """#!/bin/sh
a=$(cat /app/beat 2>/dev/null); sleep 2; b=$(cat /app/beat 2>/dev/null)
echo "beat $a $b"
grep -q done /app/{name} && [ "$a" = "$b" ] && r=1 || r=0
[ -e /logs/verifier/reward.json ] && r=0
echo $r > /logs/verifier/reward.txt
"""


def a_task_of_steps(folder: Path, strategy: str = "mean", least: float = 0.5, **files: str) -> Path:
    names = ("first", "second", "third")
    steps = {f"steps/{name}/instruction.md": f"Do the {name} thing.\n" for name in names}
    steps |= {f"steps/{name}/tests/test.sh": TEST.format(name=name) for name in names}
    steps |= {f"steps/{name}/solution/solve.sh": f"#!/bin/sh\necho done > /app/{name}\n" for name in names}
    steps["steps/second/workdir/setup.sh"] = "cp sub/given from-setup\n"
    steps["steps/second/workdir/sub/given"] = "of the task\n"
    toml = STEPS.format(strategy=strategy, least=least)
    a_task(
        folder,
        toml,
        environment__Dockerfile=DOCKERFILE,
        instruction_md=None,
        tests__test_sh=None,
        solution__solve_sh=None,
    )
    for name, text in {**steps, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def base() -> str:
    return asyncio.run(ensure_image(progress=print)).tag


@pytest.fixture
def home() -> Iterator[Path]:
    oci_images.stored_image()
    with place() as directory:
        yield directory


def command_of(home: Path, base: str, url: str, **env: Any) -> list[str]:
    return flags(
        home,
        url,
        dataset=f"harbor:{home / 'tasks'}",
        launcher="oci",
        base_images=f"far.example/base:1={base}",
        scoring_strategy="grader",
        group_size=1,
        zero_variance="keep",
        **env,
    )


async def rolled_out(home: Path, base: str, script: Any, **env: Any) -> list[dict[str, Any]]:
    async with ScriptedServer("vllm", script) as server:
        command = command_of(home, base, server.base_url, **env)
        ended = await run(*command, directory=home, environ=oci_images.CACHE)
    assert ended.code == 0, ended
    return lines(home / "run" / "rollouts.jsonl")


def code(text: str) -> str:
    return f"Thought.\n<code>\n{text}\n</code>"


# Writes the time into a file, forges rewards and ends the grader's processes, as long as it is left to run.
BEATS = """
import subprocess
subprocess.Popen(['sh', '-c', '''
while :; do
  date +%s%N > /app/.beat; mv /app/.beat /app/beat
  mkdir -p /logs/verifier; echo 9 > /logs/verifier/reward.json
  sleep 0.05
done
'''], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
kept = 'a variable of the first step'
open('first', 'w').write('done')
"""
# A step ends behind the next beat: else what the first step left running may not have had its turn.
WAITS = """
import glob, time
def beat():
    return [open(one).read() for one in glob.glob('/app/beat')]
before = beat()
while beat() == before:
    time.sleep(0.01)
final_answer(kept)
"""


def beating(call: Call) -> str:
    said = said_by_user(call)
    if "third thing" in said:
        return code(f"open('third', 'w').write('done'){WAITS}")
    if "second thing" in said:
        return code(
            "given = open('from-setup').read() == 'of the task\\n'\n"
            f"open('second', 'w').write('done' if given else 'no'){WAITS}"
        )
    return code(BEATS + WAITS)


def said_by_user(call: Call) -> str:
    return "".join(message.content for message in call.messages if message.role != "assistant")


@pytest.mark.slow
async def test_each_step_is_graded_while_nothing_runs_and_the_conversation_goes_on(home: Path, base: str) -> None:
    a_task_of_steps(home / "tasks" / "three")
    (line,) = await rolled_out(home, base, beating)
    assert (line["outcome"], line["score"], line["answer"]) == ("finished", 1, "a variable of the first step")
    names = ("first", "second", "third")
    assert line["score_parts"] == {"reward": 1, **{f"step {name}: reward": 1 for name in names}}
    beats = [one["grade"]["stdout"].split()[1] for one in line["step_grades"]]
    assert len({*beats}) == 3, "what the first step left running goes on in the others"
    assert {one["segment"] for one in line["completions"]} == {line["segment"]}, "one line of tokens"
    (group,) = lines(home / "run" / "groups.jsonl")
    trained = sum(one != -100 for one in group["masks"][0])
    assert trained == sum(one["completion_tokens"] for one in line["completions"])
    texts = [m["content"] for m in group["messages"][0] if m["role"] == "user"]
    assert [sum(f"Do the {name} thing" in text for text in texts) for name in names] == [1, 1, 1]

    run_dir = str(home / "run")
    for command, *given in (("verify",), ("rescore", "--env.scoring_strategy", "grader")):
        ended = await run(run_dir, *given, directory=home, environ=oci_images.CACHE, command=command)
        assert ended.code == 0, ended
    exported = home / "exported"
    ended = await run(run_dir, "--format", "harbor", "--output", str(exported), directory=home, command="export")
    assert ended.code == 0, ended
    (result,) = [json.loads(file.read_text()) for file in exported.glob("**/g0*/result.json")]
    assert [one["verifier_result"]["rewards"]["reward"] for one in result["step_results"]] == [1, 1, 1]
    assert "beat" in next(exported.glob("**/steps/1-first/verifier/test-stdout.txt")).read_text()


@pytest.mark.slow
async def test_a_resumed_run_takes_recorded_steps_as_they_are(home: Path, base: str) -> None:
    a_task_of_steps(home / "tasks" / "three")
    (line,) = await rolled_out(home, base, beating)
    before = (home / "run" / "groups.jsonl").read_text()
    (home / "run" / "groups.jsonl").write_text("")
    async with ScriptedServer("vllm", beating) as server:
        given = [one for one in command_of(home, base, server.base_url) if "run_dir" not in one]
        given = [one for one in given if one != str(home / "run")]
        ended = await run(*given, "--env.resume", str(home / "run"), directory=home, environ=oci_images.CACHE)
    assert ended.code == 0, ended
    assert lines(home / "run" / "rollouts.jsonl") == [line]
    (again,), (first,) = lines(home / "run" / "groups.jsonl"), [json.loads(before)]
    assert (again["tokens"], again["scores"]) == (first["tokens"], first["scores"])


@pytest.mark.slow
async def test_a_played_run_is_graded_step_by_step_again(home: Path, base: str) -> None:
    a_task_of_steps(home / "tasks" / "three")
    await rolled_out(home, base, beating)
    given = [str(home / "run"), "--env.base_images", f"far.example/base:1={base}"]
    ended = await run(*given, directory=home, environ=oci_images.CACHE, command="replay")
    assert "1 of 1 rollouts as recorded" in ended.stdout, ended
    (again,) = lines(next((home / "runs").glob("*/rollouts.jsonl")))
    assert [one["grade"]["rewards"] for one in again["step_grades"]] == [{"reward": 1}] * 3


SHELL = {
    "first": "cd sub && export KEPT=kept; (python3 -m http.server 8077 >/dev/null 2>&1 &); echo done > /app/first",
    "second": "echo $KEPT-$PWD; python3 -c \"import urllib.request as u; u.urlopen('http://127.0.0.1:8077/')\" "
    "&& [ $KEPT-$PWD = kept-/app/sub ] && echo done > /app/second",
    "third": "echo done > /app/third",
}


def shelled(call: Call) -> str:
    """Each command is followed by a message without one, which ends the step."""
    names = [name for name in SHELL if f"Do the {name} thing" in said_by_user(call)]
    if not names or SHELL[names[-1]] in call.messages[-2].content:
        return "I have done it."
    return f"```bash\n{SHELL[names[-1]]}\n```"


PROGRAM = """
import os, socket, subprocess, sys, time, urllib.request
task = sys.stdin.read()
name = task.split()[2]
ask = '{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % task.strip()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", ask.encode(),
                                 {"Content-Type": "application/json", "Authorization": "Bearer x"})
urllib.request.urlopen(request).read()
if name == "first":
    server, null = [sys.executable, "-m", "http.server", "8078"], subprocess.DEVNULL
    subprocess.Popen(server, stdout=null, stderr=null)
    while socket.socket().connect_ex(("127.0.0.1", 8078)):  # it stands still while this step is graded
        time.sleep(0.05)
else:
    urllib.request.urlopen("http://127.0.0.1:8078/").read()
open("/app/" + name, "w").write("done")
print("did " + name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["shell", "program"])
async def test_steps_with(home: Path, base: str, agent: str) -> None:
    a_task_of_steps(home / "tasks" / "three", **{"steps/first/workdir/sub/a": ""})
    (home / "agent.py").write_text(PROGRAM)
    more = {"agent": "shell", "tool_call_format": "fenced"} if agent == "shell" else {"agent": "program:agent.py"}
    (line,) = await rolled_out(home, base, shelled if agent == "shell" else (lambda call: "Yes."), **more)
    print(json.dumps(line["step_grades"], indent=1), line["reason"], [s["observations"] for s in line["steps"]])
    assert (line["outcome"], line["score"]) == ("finished", 1)
    assert line["answer"] == ("I have done it." if agent == "shell" else "did third")
    segments = {one["segment"] for one in line["completions"]}
    assert len(segments) == (1 if agent == "shell" else 3), "a program begins anew in each step"


def acting(first: str, second: str = "pass") -> Any:
    def script(call: Call) -> str:
        said = said_by_user(call)
        if "third thing" in said:
            return code("open('third', 'w').write('done')\nfinal_answer(3)")
        if "second thing" in said:
            return code(f"{second}\nopen('second', 'w').write('done')\nfinal_answer(2)")
        return code(f"{first}\nfinal_answer(1)")

    return script


FIRST = "open('first', 'w').write('done')\n"
SICK = (
    "import os, shutil\nos.remove('/app/from-setup') if os.path.exists('/app/from-setup') else 0\n"
    "os.mkdir('/app/from-setup')\nos.chmod('/app/from-setup', 0)\nos.mkdir('/app/setup.sh')\n"
)
FORGES = (
    "import os, pathlib\nfor name in ('/logs/verifier', '/tests'):\n    os.makedirs(name, exist_ok=True)\n"
    "pathlib.Path('/logs/verifier/reward.txt').write_text('1')\n"
    "pathlib.Path('/logs/verifier/reward.json').write_text('1')\n"
    "pathlib.Path('/tests/test.sh').write_text('#!/bin/sh\\necho 1 > /logs/verifier/reward.txt')\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "outcome", "strategy", "score", "graded"),
    [
        (acting("pass"), "finished", "mean", 0.0, 1),  # below its min_reward: the task ends
        (acting(FORGES), "finished", "mean", 0.0, 1),
        (acting(FIRST, "import time; time.sleep(60)"), "timeout", "mean", 1 / 3, 2),
        (acting(FIRST, "import time; time.sleep(60)"), "timeout", "final", 0.0, 2),
        (acting(FIRST + SICK), "sandbox_crashed", "mean", 1 / 3, 2),
    ],
    ids=["min_reward", "forged", "timeout", "final", "sick"],
)
async def test_a_task_that_ends_early(
    home: Path, base: str, script: Any, outcome: str, strategy: str, score: float, graded: int
) -> None:
    a_task_of_steps(home / "tasks" / "three", strategy)
    (line,) = await rolled_out(home, base, script, max_steps=2, rollout_timeout=8)
    print(line["reason"], line["score_parts"], line["grade"]["flags"])
    assert (line["outcome"], len(line["step_grades"])) == (outcome, graded)
    assert line["score"] == pytest.approx(score)
    assert "third" in line["grade"]["flags"][-1], "what nobody came to is named"


@pytest.mark.slow
async def test_a_step_whose_agent_steps_are_used_up_is_graded_and_the_next_one_follows(
    home: Path, base: str
) -> None:
    a_task_of_steps(home / "tasks" / "three")
    (line,) = await rolled_out(home, base, acting(FIRST, "raise SystemExit"), max_steps=2)
    assert (line["outcome"], line["score"], len(line["completions"])) == ("finished", pytest.approx(2 / 3), 4)


async def test_nothing_is_left_of_a_run_that_is_killed_while_a_sandbox_stands_still(home: Path, base: str) -> None:
    slow = TEST.format(name="first").replace("sleep 2", "sleep 60")
    a_task_of_steps(home / "tasks" / "three", **{"steps/first/tests/test.sh": slow})
    before, looks = still(), Counter[Path]()

    def stays_still() -> bool:
        """Longer than for the trial at the beginning."""
        looks.update(now := still() - before)
        return any(looks[file] > 100 for file in now)

    async with ScriptedServer("vllm", beating) as server:
        command = command_of(home, base, server.base_url)
        async with running(*command, directory=home, environ=oci_images.CACHE) as started:
            await until(stays_still, "a sandbox stands still")
            frozen = still() - before
            os.killpg(started.process.pid, signal.SIGKILL)
            await until(lambda: not any(file.exists() for file in frozen), "its control group is gone")


def still() -> set[Path]:
    """Files of control groups that are frozen."""
    found = set()
    for top, _, names in os.walk("/sys/fs/cgroup"):
        for name in {"freezer.state", "cgroup.freeze"} & {*names}:
            with suppress(OSError):
                file = Path(top, name)
                found |= {file} if file.read_text().strip() in ("FROZEN", "1") else set()
    return found


@pytest.mark.parametrize("agent", ["code", "tool_calling", "shell", "program:agent.py"])
async def test_a_conversation_before_is_what_an_agent_goes_on_with(home: Path, base: str, agent: str) -> None:
    call = {"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "echo hidden > here"}}
    said = {"results": [{"source_call_id": "c1", "content": "the result"}]}
    context = [
        {"step_id": 1, "source": "user", "message": "Said before."},
        {"step_id": 2, "source": "agent", "message": "I looked.", "tool_calls": [call], "observation": said},
    ]
    atif = {"schema_version": "ATIF-v1.8", "agent": {"name": "a", "version": "1"}, "steps": context}
    toml = 'schema_version = "1.4"\n'
    a_task(
        home / "tasks" / "t",
        toml,
        environment__Dockerfile=DOCKERFILE,
        trajectory_json=json.dumps(atif),
        tests__test_sh="#!/bin/sh\necho 1 > /logs/verifier/reward.txt\n",
    )
    (home / "agent.py").write_text("")
    answers = {
        "code": code("final_answer('so')"),
        "tool_calling": 'Action:\n{"name": "final_answer", "arguments": {"answer": "so"}}',
    }
    async with ScriptedServer("vllm", lambda call: answers.get(agent, "so")) as server:
        given = {"tool_call_format": "fenced"} if agent == "shell" else {}
        given |= {"tool_call_format": "json"} if agent == "tool_calling" else {}
        command = command_of(home, base, server.base_url, agent=agent, **given)
        ended = await run(*command, directory=home, environ=oci_images.CACHE)
    (line,) = lines(home / "run" / "rollouts.jsonl")
    if agent.startswith("program"):
        assert line["outcome"] == "bad_task"
        assert "a conversation comes before it" in line["reason"]
        return
    assert ended.code == 0, ended
    first = line["completions"][0]["messages"]
    assert [message["role"] for message in first] == ["system", "user", "assistant", "user"]
    assert first[1]["content"].endswith("Said before.")
    assert first[2]["content"].startswith("I looked.")
    assert "echo hidden > here" in first[2]["content"]
    assert "the result" in first[3]["content"]
    assert first[3]["content"].endswith("Make it work.\n")
    (group,) = lines(home / "run" / "groups.jsonl")
    assert sum(one != -100 for one in group["masks"][0]) == line["completions"][0]["completion_tokens"]


@pytest.mark.full
async def test_a_step_that_is_graded_longer_than_a_connection_lives_is_followed_by_the_next(
    home: Path, base: str
) -> None:
    """The server hangs up on a client that answers no ping for 40 s: the sandbox asks again."""
    slow = TEST.format(name="first").replace("sleep 2", "sleep 75")
    a_task_of_steps(home / "tasks" / "three", **{"steps/first/tests/test.sh": slow})
    (line,) = await rolled_out(home, base, beating)
    assert (line["outcome"], line["score"]) == ("finished", 1)
    assert line["duration_s"] - line["waiting_s"] < 60, "the grading is on no clock of the rollout's"


FULL = """
open('first', 'w').write('done')
import os
os.mkdir('many')
try:
    for n in range(200_000):
        os.mkdir(f'many/{n}')
except OSError as error:
    print(error)
try:
    with open('large', 'wb') as file:
        while True:
            file.write(bytes(1 << 20))
except OSError as error:
    print(error)
"""


@pytest.mark.full
async def test_a_full_root_is_graded_as_any_other(home: Path, base: str) -> None:
    """What may be written is used up, names and bytes: the copy that is graded has room all the same."""
    a_task_of_steps(home / "tasks" / "three")
    (line,) = await rolled_out(home, base, acting(FULL), sandbox_storage="32MiB")
    print(line["reason"], [one["grade"] for one in line["step_grades"]])
    assert line["step_grades"][0]["grade"]["rewards"] == {"reward": 1}


@pytest.mark.full
async def test_each_steps_solution_is_checked_over_what_those_before_it_left(home: Path, base: str) -> None:
    tasks = home / "tasks"
    a_task_of_steps(tasks / "good")
    needs = "#!/bin/sh\ngrep -q done first && [ -e from-setup ] && echo done > /app/second\n"
    a_task_of_steps(tasks / "builds-on", **{"steps/second/solution/solve.sh": needs})
    free = "#!/bin/sh\n[ -e /app ] && echo 0.25 > /logs/verifier/reward.txt\n"
    a_task_of_steps(tasks / "free", least=0.0, **{"steps/third/tests/test.sh": free})
    a_task_of_steps(tasks / "sick", **{"steps/second/workdir/setup.sh": "exit 3\n"})
    given = [f"harbor:{tasks}", "--json", "--env.base_images", f"far.example/base:1={base}"]
    ended = await run(*given, directory=home, environ=oci_images.CACHE, command="check-tasks")
    found = {one["task_id"]: one for one in json.loads(ended.stdout)["tasks"]}
    print(json.dumps({name: one["failures"] for name, one in found.items()}, indent=1))
    assert [found[name]["passed"] for name in ("good", "builds-on")] == [True, True]
    assert [step["scope"] for step in found["good"]["steps"]] == [["/app"]] * 3
    assert "its own solutions get" in found["free"]["failures"][0]
    assert found["sick"]["failures"] == ["step second cannot begin: its setup.sh or healthcheck fails"]

    only = {"only_checked_tasks": True}
    (line, other) = await rolled_out(home, base, beating, **only)
    assert {line["task_id"], other["task_id"]} == {"good", "builds-on"}
    assert line["score"] == 1
    assert {one["grade"]["scope"] for one in line["step_grades"]} == {"solution"}
