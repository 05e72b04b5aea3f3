"""Programs as agents that never get to a completion: said at the first, tried again once, and three groups of them
end the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.inference import Call, Fault, Reply, ScriptedServer, always
from tests.fakes.runs import Ended, flags, lines, outcomes, printed_outcomes, run
from tests.fakes.trainers import Trainer, run_api

TASKS = 5
ASK = """
import json, os, sys, urllib.request

def ask(path="/chat/completions", timeout=None, **more):
    body = json.dumps({"messages": [{"role": "user", "content": sys.stdin.read() or "x"}], **more}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, headers)
    return json.load(urllib.request.urlopen(request, timeout=timeout))["choices"][0]["message"]["content"]
"""
ON_SOME_TASKS = f"""{ASK}
task = sys.stdin.read()
sys.stdin = open("/dev/null")
assert "of q1!" not in task and "of q3!" not in task
print(ask())
"""
# A program, and what people are told of it.
FAILING = {
    "import": ("import no_such_package_at_all", "exit code 1: ModuleNotFoundError: No module named"),
    "nothing": ("print('4.5')", "the program ended with exit code 0: 4.5"),
    "silent": ("", "the program ended with exit code 0"),
    "signal": ("import os\nos.kill(os.getpid(), 6)", "the program ended with exit code -6"),
    "refused": (
        ASK + "ask('/embeddings')",
        "POST /v1/embeddings got HTTP 404: there are no embeddings here",
    ),
    "tools": (
        ASK + "try: ask(tools=[{}])\nexcept Exception: print('give up')",
        "POST /v1/chat/completions got HTTP 400: ",
    ),
    # Standard output is flushed behind the traceback, which is not to be lost in it.
    "buried": ("print('noise\\n' * 1000)\nraise SystemExit('the\x1b[31m reason')", "exit code 1: the [31m reason"),
    "key": ("raise SystemExit('key sk-abcdefgh12345678 refused')", "exit code 1: key [key] refused"),
}


async def ran(
    home: Path,
    program: str,
    *more: str,
    command: str = "process",
    server: ScriptedServer | None = None,
    **env: object,
) -> tuple[Ended, int]:
    """(how the run ended, how many completions were asked for)."""
    (home / "agent.py").write_text(program)
    async with server or ScriptedServer("vllm", always("4.5")) as endpoint:
        given = flags(home, endpoint.base_url, agent="program:agent.py", **env)
        ended = await run(*given, *more, directory=home, command=command)
        asked = sum(not served.probe for served in endpoint.log.all)
    assert not ended.traceback or "  | " in ended.stderr, ended.stderr
    return ended, asked


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
async def test_a_program_without_a_completion_is_said_at_once_and_tried_again_once(home: Path, name: str) -> None:
    program, told = FAILING[name]
    ended, asked = await ran(home, program, total_steps=1, max_retries=5)
    assert (ended.code, asked) == (1, 0), ended.stderr
    assert outcomes(home / "run") == printed_outcomes(ended) == {"agent_error": 4}  # two rollouts, twice each
    first = next(line for line in ended.stderr.splitlines() if line.startswith("agent_error, the first: "))
    assert first.startswith("agent_error, the first: no completion: the program ended with exit code ")
    assert told in first
    assert ended.stderr.count("the first: no completion") == 1
    assert "\x1b" not in ended.stderr + ended.stdout
    for line in lines(home / "run" / "rollouts.jsonl"):
        assert line["score"] is None
        assert line["reason"].startswith("no completion: the program ended")
        assert len(line["reason"]) < 4096
        assert "sk-abcd" not in str(line["reason"])
    assert f"mostly agent_error: {first.partition('first: ')[2]}"[:100] in ended.stderr


async def test_what_the_orchestrator_or_the_endpoint_refuses_is_the_program_s_too(home: Path) -> None:
    program = ASK + "try: ask(response_format={'type': 'json_object'})\nexcept Exception: print('give up')"
    server = ScriptedServer("atropos", always("4.5"))  # it keeps to no form
    ended, asked = await ran(home, program, server=server, total_steps=1)
    assert (ended.code, asked) == (1, 0), ended.stderr
    assert outcomes(home / "run") == {"agent_error": 4}
    assert "HTTP 400: this endpoint cannot keep to a json_object" in ended.stderr


async def test_the_traceback_is_told_whole_and_marked_as_the_program_s_words(home: Path) -> None:
    program = "def deep(n):\n    return 1 / n\n\n\ndeep(0)\n"
    ended, _ = await ran(home, program, total_steps=1)
    quoted = [line for line in ended.stderr.splitlines() if line.startswith("  | ")]
    assert quoted[0] == "  | Traceback (most recent call last):"
    assert quoted[-1] == "  | ZeroDivisionError: division by zero"


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_it_is_drawn_again_once_at_most_and_never_without_retries(home: Path, retries: int) -> None:
    ended, _ = await ran(home, "1 / 0", total_steps=1, group_size=3, max_retries=retries)
    assert ended.code == 1, ended.stderr
    assert outcomes(home / "run") == {"agent_error": 3 * (1 + min(retries, 1))}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["process", "evaluate"])
async def test_three_groups_in_a_row_end_the_run_with_the_reason(home: Path, command: str) -> None:
    size = {"group_size": None, "eval_samples": 2} if command == "evaluate" else {}
    ended, asked = await ran(home, "1 / 0", command=command, max_concurrent_sandboxes=2, warm_sandboxes=0, **size)
    assert (ended.code, asked) == (3, 0), ended.stderr
    *_, last = ended.stderr.splitlines()
    assert last == (
        "orchestrator: env.agent: no rollout of 3 groups in a row got a completion; the last one ended with: "
        "no completion: the program ended with exit code 1: ZeroDivisionError: division by zero"
    )
    counted = outcomes(home / "run")
    assert 12 <= counted["agent_error"] < 20
    assert counted.keys() <= {"agent_error", "cancelled"}


@pytest.mark.slow
async def test_three_groups_in_a_row_end_serve_too(home: Path) -> None:
    async with run_api() as api:
        await Trainer.registered(api.url, batch_size=2)
        ended, asked = await ran(home, "1 / 0", command="serve", rollout_server_url=api.url)
    assert (ended.code, asked) == (3, 0), ended.stderr
    assert "env.agent: no rollout of 3 groups in a row got a completion" in ended.stderr.splitlines()[-1]
    assert ended.stderr.count("agent_error, the first: ") == 1


@pytest.mark.slow
async def test_a_program_that_fails_on_some_tasks_alone_ends_no_run(home: Path) -> None:
    ended, asked = await ran(home, ON_SOME_TASKS, group_size=1, max_concurrent_sandboxes=1, warm_sandboxes=0)
    assert (ended.code, asked) == (1, 3), ended.stderr
    assert outcomes(home / "run") == {"agent_error": 4, "finished": 3}


async def test_a_policy_that_was_asked_is_to_blame_for_what_follows(home: Path) -> None:
    """One completion is enough: a program that breaks after it is scored, and not drawn again."""
    ended, asked = await ran(home, ASK + "ask()\n1 / 0", total_steps=1)
    assert (ended.code, asked) == (0, 2), ended.stderr
    assert outcomes(home / "run") == {"no_answer": 2}


async def test_a_request_refused_after_a_completion_is_said_at_once_and_counted(home: Path) -> None:
    """It costs the rollout its answer and nothing else would say so."""
    program = f"""{ASK}
ask()
for n in (2, 3):
    try:
        ask(n=n, user="u", client_metadata={{"a": 1}})
    except urllib.error.HTTPError as error:
        print(error)
sys.exit(1)
"""
    ended, asked = await ran(home, program, total_steps=1)
    assert (ended.code, asked) == (0, 2), ended.stderr
    why = "n must be 1: send several requests, each is a completion of its own"
    refused = f"POST /v1/chat/completions got HTTP 400: {why}"
    told = [line for line in ended.stderr.splitlines() if "was refused after a completion" in line]
    assert told == [f"a request was refused after a completion, the rollout is scored: {refused}"]
    assert f"requests in 2 rollouts after a completion, the first: {refused}" in ended.stdout
    (group,) = lines(home / "run" / "groups.jsonl")
    for facts in (*group["overrides"], *lines(home / "run" / "rollouts.jsonl")):
        assert facts["refused_requests"] == [refused]
        assert set(facts["unused_fields"]) == set()


async def test_fields_without_an_effect_are_among_a_rollout_s_facts(home: Path) -> None:
    program = f"{ASK}print(ask(user='u', client_metadata={{'a': 1}}, temperature=0.5, wibble=[1]))"
    ended, _ = await ran(home, program, total_steps=1)
    assert ended.code == 0, ended.stderr
    (group,) = lines(home / "run" / "groups.jsonl")
    for facts in (*group["overrides"], *lines(home / "run" / "rollouts.jsonl")):
        assert facts["unused_fields"] == ["client_metadata", "temperature", "user", "wibble"]
    assert "refused" not in ended.stdout


async def test_a_program_that_loses_its_patience_is_no_agent_error(home: Path) -> None:
    """It asked, and the endpoint was slow: whoever is at fault, the endpoint is asked as after any llm_error."""
    slow = ScriptedServer("vllm", always(Reply("4.5", delay_s=30.0)))
    ended, _ = await ran(home, ASK + "ask(timeout=1)", server=slow, total_steps=1, group_size=1, max_retries=0)
    assert ended.code == 1, ended.stderr
    (line, *_) = lines(home / "run" / "rollouts.jsonl")
    assert line["outcome"] == "llm_error"
    assert line["reason"].startswith(
        "the first completion was still awaited: the program ended with exit code 1: "
    )


@pytest.mark.slow
@pytest.mark.parametrize(("away", "outcome"), [("Say hello", "llm_error"), ("x", "no_answer")])
async def test_a_program_that_loses_its_patience_later_is_excused_if_the_endpoint_is_away(
    home: Path, away: str, outcome: str
) -> None:
    """Whether it is away for everybody, a neutral prompt included, or slow for this program alone."""

    def script(call: Call) -> Reply:
        asked = call.messages[-1].content
        if asked == "x":
            return Reply("4.5", delay_s=20.0)
        return Reply("4.5", fault=Fault("500") if away in asked else None)

    program = ASK + "ask()\nask(timeout=1)"
    server = ScriptedServer("vllm", script)
    await ran(home, program, server=server, total_steps=1, group_size=1, max_retries=0)
    told = lines(home / "run" / "rollouts.jsonl")
    assert {line["outcome"] for line in told} == {outcome}
    for line in told if outcome == "llm_error" else ():
        assert line["reason"].startswith("a completion was still awaited: the program ended with exit code 1")
        assert "a neutral question fails too" in line["reason"]


async def test_a_program_that_hangs_before_its_first_request_is_one_too(home: Path) -> None:
    ended, _ = await ran(home, "import time\ntime.sleep(600)", total_steps=1, group_size=1, rollout_timeout=2)
    assert outcomes(home / "run") == {"agent_error": 2}
    assert "agent_error, the first: no completion: timeout, the rollout's own clock" in ended.stderr
