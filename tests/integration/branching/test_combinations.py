"""Trees that lose their sandboxes: of teams, with tools of the host, of tasks with steps, on nodes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch.image.build import ensure_image
from tests.fakes import oci_images, ray_cluster
from tests.fakes.harbor import a_task
from tests.fakes.inference import Call, Reply, Script, ScriptedServer, by_task
from tests.fakes.ray_cluster import RayCluster
from tests.fakes.runs import essence, flags, lines, run, running, until, write_tasks
from tests.integration.test_oci_run import containers

_WHY_NOT = oci_images.why_not()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or ""),
]
PRICES = '''\
def price(article: str) -> float:
    """Looks up what an article costs.

    Args:
        article: Its name.
    """
    with open("asked", "a") as asked:
        asked.write(article + "\\n")
    return {"pen": 1.5, "ink": 12.0}[article]
'''
TEAM = [
    {"name": "counter", "description": "Counts words.", "agent": "tool_calling", "max_steps": 3},
    {"name": "coder", "description": "Writes code.", "agent": "code", "max_steps": 3},
]
SLEEP = "__import__('time').sleep(0.5)"


def code(text: str) -> str:
    return f"Thought.\n<code>\n{text}\n</code>"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


COUNTER = [call("python_interpreter", code=f"{SLEEP}; len('a b c'.split())"), call("final_answer", answer="three")]
CODER = [code(f"n = 3\n{SLEEP}\nprint(n)"), code("final_answer(n)")]
CALLING = [
    f"{call('price', article='pen')}\n{call('price', article='ink')}",
    call("python_interpreter", code=f"n = 6; {SLEEP}; print(n * 7)"),
    call("counter", task="Count the words: a b c"),
    call("coder", task="Count by code: a b c"),
    call("python_interpreter", code="print(n)"),
    call("final_answer", answer="0"),
]
CODING = [
    code(f"cost = price('pen')\n{SLEEP}\nprint(cost)"),
    code("said = counter(task='Count the words: a b c')\nprint(said)"),
    code("cost += price('ink') + 3 * ('3' in coder(task='Count by code: a b c'))\nprint(cost)"),
    code("final_answer(0 if cost == 16.5 else 'lost')"),
]


# ---------------------------------------------------------------- several steps, behind a conversation

DOCKERFILE = "FROM far.example/base:1\nRUN mkdir /app\nWORKDIR /app\n"
NAMES = ("first", "second", "third")
STEPS = "artifacts = []\n" + "".join(f'[[steps]]\nname = "{name}"\n' for name in NAMES)
TEST = "#!/bin/sh\ngrep -q green /app/{name} && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
SAID = {
    "schema_version": "ATIF-v1.7",
    "session_id": "s",
    "agent": {"name": "a", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "What is the colour?"},
        {"step_id": 2, "source": "agent", "message": "It is green."},
    ],
}


def with_steps(home: Path) -> None:
    files = {"steps/first/trajectory.json": json.dumps(SAID)}
    for name in NAMES:
        files[f"steps/{name}/instruction.md"] = f"Do the {name} thing.\n"
        files[f"steps/{name}/tests/test.sh"] = TEST.format(name=name)
        files[f"steps/{name}/solution/solve.sh"] = "true\n"
    task = a_task(
        home / "tasks" / "t",
        STEPS,
        environment__Dockerfile=DOCKERFILE,
        instruction_md=None,
        tests__test_sh=None,
        solution__solve_sh=None,
    )
    for path, text in files.items():
        (task / path).parent.mkdir(parents=True, exist_ok=True)
        (task / path).write_text(text)


def stepwise(call: Call) -> str:
    """Each step needs what the one before left in the worker, the file system, and the conversation."""
    talk = "".join(message.content for message in call.messages)
    done = sum(f"Do the {name} thing" in talk for name in NAMES)
    name, before = NAMES[done - 1], NAMES[done - 2]
    colour = "green" if "It is green." in talk else "unknown"
    if f"wrote {name}" in talk:
        return code("final_answer(colour)")
    seen = f"colour = '{colour}'"
    if done > 1:
        seen = f"colour = open('{before}').read() if colour == '{colour}' else 'lost'"
    return code(f"{seen}\nopen('{name}', 'w').write(colour)\n{SLEEP}\nprint('wrote', '{name}', flush=True)")


@dataclass(frozen=True)
class Combination:
    script: Callable[[], Script]
    rollout: int  # completions of one
    fork: int
    kills: tuple[int, int]  # behind so many completions of all, in the trunk and in its branch
    settings: dict[str, Any]
    prepare: Callable[[Path], None]


def with_tools(home: Path) -> None:
    (home / "prices.py").write_text(PRICES)


def team_of(main: list[str]) -> Callable[[], Script]:
    return lambda: by_task({"Count the words": [COUNTER], "Count by code": [CODER], "of q0!": [main]})


EQUIPPED = {"managed_agents": json.dumps(TEAM), "host_tools": '["python:prices:price"]'}
COMBINATIONS = {
    "calling": Combination(team_of(CALLING), 10, 7, (4, 11), {"agent": "tool_calling", **EQUIPPED}, with_tools),
    "steps": Combination(lambda: stepwise, 6, 5, (3, 7), {"scoring_strategy": "grader"}, with_steps),
    "coding": Combination(team_of(CODING), 8, 6, (3, 9), EQUIPPED, with_tools),
}


@pytest.mark.long
@pytest.mark.parametrize("name", COMBINATIONS)
async def test_a_tree_whose_sandboxes_are_lost_is_whole(home: Path, name: str) -> None:
    """What its trunk and its branch sample is the same, and each loses its sandbox in the midst of a step."""
    how = COMBINATIONS[name]
    write_tasks(home / "tasks.jsonl", 1)
    how.prepare(home)
    settings = {
        "group_size": 2,
        "branch": f"turns:{how.fork} width:1",
        "warm_sandboxes": 0,
        "max_concurrent_sandboxes": 1,
        "launcher": "oci",
        "zero_variance": "keep",
        **how.settings,
    }
    if (home / "tasks").exists():
        image = await ensure_image(progress=print)
        settings |= {"dataset": f"harbor:{home / 'tasks'}", "base_images": f"far.example/base:1={image.tag}"}
    async with ScriptedServer("vllm", how.script()) as server:
        given = flags(home, server.base_url, **settings)
        async with running(*given, directory=home, environ=oci_images.CACHE) as started:
            for server.at_most in how.kills:
                await until(lambda: len(server.log.completed) == server.at_most, "it works")
                (pid,) = containers(home).values()
                os.kill(pid, signal.SIGTERM)
            server.at_most = None
            ended = await started.ended()
        assert ended.code == 0, ended.stderr
        assert len(server.log.completed) == 2 * how.rollout - how.fork + 1, "nothing is sampled twice"
    trunk, branch = lines(home / "run/rollouts.jsonl")
    assert branch["branch"]["parent"] == trunk["rollout_id"]
    for line in trunk, branch:
        (continued,) = line["continued"]
        assert not continued["refused"]
        assert line["score"] == 1.0
    assert [turn["token_ids"] for turn in trunk["completions"]] == [
        turn["token_ids"] for turn in branch["completions"]
    ]
    (group,) = lines(home / "run/groups.jsonl")
    assert group["tokens"][0] == group["tokens"][1]
    if how.prepare is with_tools:
        assert (home / "asked").read_text() == "pen\nink\n", "else the record answers"
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, checked.stdout + checked.stderr


@pytest.mark.long
@pytest.mark.parametrize("whose", ["agent", "grader"])
async def test_a_sandbox_that_is_lost_while_a_step_is_graded_costs_no_token(home: Path, whose: str) -> None:
    """The agent's stands still then, and ends when it would go on: behind the first of three steps."""
    with_steps(home)
    test = home / "tasks/t/steps/first/tests/test.sh"
    test.write_text(test.read_text().replace("#!/bin/sh\n", "#!/bin/sh\nsleep 2\n"))
    image = await ensure_image(progress=print)
    settings = {
        "dataset": f"harbor:{home / 'tasks'}",
        "base_images": f"far.example/base:1={image.tag}",
        "group_size": 1,
        "warm_sandboxes": 0,
        "launcher": "oci",
        "scoring_strategy": "grader",
        "zero_variance": "keep",
    }
    async with ScriptedServer("vllm", stepwise) as server:
        given = flags(home, server.base_url, **settings)
        async with running(*given, directory=home, environ=oci_images.CACHE) as started:
            await until(lambda: len(server.log.completed) >= 1, "it works")
            agents = containers(home)
            await until(lambda: len(containers(home)) == 2, "its first step is graded")
            found = {name in agents: pid for name, pid in containers(home).items()}
            os.kill(found[whose == "agent"], signal.SIGTERM)
            ended = await started.ended()
        assert ended.code == 0, ended.stderr
        assert len(server.log.completed) == 6, "nothing is sampled twice"
    (line,) = lines(home / "run/rollouts.jsonl")
    assert (line["outcome"], line["score"]) == ("finished", 1.0), line["reason"]
    assert [one["grade"]["rewards"]["reward"] for one in line["step_grades"]] == [1.0] * 3
    assert [one["refused"] for one in line.get("continued", ())] == ([""] if whose == "agent" else [])
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, checked.stdout + checked.stderr


# ---------------------------------------------------------------- the nodes of a cluster


def by_seed(call: Call) -> Reply:
    """What is said, and whether it is right, follows from the seed; every step needs those before. The last one is
    waited for: whenever a node is killed, one of its rollouts has sampled something."""
    turn, seed = call.turn + 1, call.seed or 0
    step = f"seen = [{seed}]" if turn == 1 else f"seen.append({seed})\n{SLEEP}"
    last = f"final_answer({seed // 8 % 2} - (len(seen) != 4))" if turn == 4 else "print(len(seen), seen)"
    return Reply(code(f"{step}\n{last}"), delay_s=2.0 * (turn == 4))


@pytest.mark.full
@pytest.mark.skipif(ray_cluster.why_not() is not None, reason=ray_cluster.why_not() or "")
async def test_trees_and_late_beginnings_on_nodes_of_which_one_is_killed(home: Path) -> None:
    write_tasks(home / "tasks.jsonl", 4)
    here = {"group_size": 3, "warm_sandboxes": 0, "launcher": "oci", "max_concurrent_sandboxes": 2}
    tree = {**here, "branch": "turns:3 width:2"}
    late = {**here, "start_at": home / "plain", "total_steps": 4, "max_open_groups": 1}
    async with ScriptedServer("vllm", by_seed) as server, RayCluster(home / "c") as ray:

        async def made(name: str, settings: dict[str, Any]) -> list[str]:
            given = flags(home, server.base_url, run_dir=home / name, **settings)
            ended = await run(*given, directory=home, environ=oci_images.CACHE)
            assert ended.code == 0, ended.stdout + ended.stderr
            return essence(home / name / "groups.jsonl")

        expected = await made("plain", tree)
        expected_late = await made("plain-late", late)
        for node in ("a", "b"):
            await ray.join(node, environ=oci_images.CACHE)
        where = {"cluster": "ray", "ray_address": ray.address}
        assert await made("late", late | where) == expected_late
        before = len(server.log.completed)
        given = flags(home, server.base_url, run_dir=home / "run", **tree, **where)
        async with running(*given, directory=home, environ=oci_images.CACHE) as started:
            await until(lambda: len(server.log.completed) >= before + 18, "branches are under way")
            await ray.nodes["a"].kill()
            ended = await started.ended()
        assert ended.code == 0, ended.stdout + ended.stderr
    assert essence(home / "run/groups.jsonl") == expected
    continued = [one for line in lines(home / "run/rollouts.jsonl") for one in line.get("continued", ())]
    assert continued
    assert not any(one["refused"] for one in continued)
    for name in ("run", "late"):
        checked = await run(str(home / name), directory=home, command="verify")
        assert checked.code == 0, checked.stdout + checked.stderr
