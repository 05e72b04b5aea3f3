"""`python -m sandbox` as a whole, as a process, against a scripted orchestrator on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from sandbox.pid1.supervisor import EXIT_NO_ORCHESTRATOR
from tests.fakes.sandbox_process import DEADLINE_S, ROOT, Places, Uids, ended, run, started
from tests.fakes.scripted_orchestrator import ENDED, Script, ScriptedOrchestrator, action
from tests.integration.plain_python import CASES


@pytest.fixture
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("b"))


def processes_with(marker: str) -> list[int]:
    """Process ids of this machine whose command line or environment names the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                seen = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if marker.encode() in seen:
                found.append(int(entry.name))
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something the kernel does in its own time."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------- a whole episode


async def test_an_agent_finishes_and_submits_one_result(places: Places) -> None:
    end = await run(places, Script([action("x = 6 * 7\nprint('working')"), action("final_answer(x)")]))
    assert (end.code, end.stderr) == (0, "")
    assert end.served.answer == b"42"
    assert end.served.stop_reason == "FINAL_ANSWER"
    assert [step.code for step in end.served.steps] == ["x = 6 * 7\nprint('working')", "final_answer(x)"]
    assert [step.is_final_answer for step in end.served.steps] == [False, True]
    assert end.served.steps[0].observations == "Execution logs:\nworking\nLast output from code snippet:\nNone"
    assert end.served.results[0].episode_duration.ToNanoseconds() > 0


async def test_the_conversation_is_text_in_alternating_roles_without_echoes(places: Places) -> None:
    script = Script(
        [action("print(1)"), "no code at all, sorry", action("1 / 0"), action("final_answer('done')")],
        instructions="Answer in one word.",
        tools={"web_search": lambda arguments: "nothing"},
    )
    end = await run(places, script)
    conversation = end.served.completions[-1].messages
    roles = [pb.Role.Name(message.role).removeprefix("ROLE_").lower() for message in conversation]
    assert roles == ["system", "user", *["assistant", "user"] * 3]
    system = conversation[0].content
    assert "Answer in one word." in system
    for signature in (
        "def read_file(path: string) -> string:",
        "def web_search(query: string, limit: integer) -> string:",
        "def final_answer(answer: any) -> any:",
        "You can import from any package you want.",
    ):
        assert signature in system
    assert conversation[1].content == "New task:\nWhat is it?"
    assert conversation[2].content == "Thought: I run this.\n<code>\nprint(1)\n</code>"
    assert "regex pattern <code>(.*?)</code> was not found" in end.served.observations[1]
    assert "ZeroDivisionError: division by zero" in end.served.observations[2]
    assert not any("Calling tools:" in message.content for message in conversation[2:])


async def test_attachments_are_named_by_their_path_and_cannot_be_changed(places: Places) -> None:
    content = "größe;1\n".encode("cp1252") * 100_000
    script = Script(
        [
            action(f"read_file({str(places.attachments / 'a b.csv')!r})[:7]"),
            action("import os\nos.listdir('.')"),
            action(f"final_answer(len(open({str(places.attachments / 'empty')!r}).read()))"),
        ],
        attachments={"a b.csv": content, "empty": b""},
    )
    end = await run(places, script)
    task = end.served.completions[0].messages[-1].content
    assert f"- {places.attachments}/a b.csv\n- {places.attachments}/empty" in task
    assert end.served.observations[0].endswith("größe;1")
    assert end.served.observations[1].endswith("[]")
    assert end.served.answer == b"0"
    assert (places.attachments / "a b.csv").read_bytes() == content
    assert stat.S_IMODE((places.attachments / "a b.csv").stat().st_mode) == 0o444


async def test_host_tools_are_called_through_the_orchestrator(places: Places) -> None:
    def search(arguments: dict[str, object]) -> str:
        if arguments["query"] == "bad":
            raise RuntimeError("refused")
        return f"results for {arguments}"

    script = Script(
        [
            action("first = search('a', limit=2)\nfirst"),
            action("search('bad')"),
            action("final_answer(first)"),
        ],
        tools={"search": search},
    )
    end = await run(places, script)
    assert [(c.sequence, json.loads(c.arguments_json)) for c in end.served.tool_calls] == [
        (1, {"query": "a", "limit": 2}),
        (2, {"query": "bad"}),
    ]
    assert "ToolError: refused" in end.served.observations[1]
    assert end.served.answer == b"results for {'query': 'a', 'limit': 2}"


async def test_plans_are_asked_for_when_wanted_and_everything_can_be_logged(places: Places) -> None:
    script = Script(
        ["Facts, then a plan.", action("1"), "A new plan.", action("final_answer(1)")],
        planning_interval=1,
        verbosity=3,
    )
    end = await run(places, script)
    kinds = [
        pb.CompletionKind.Name(request.kind).removeprefix("COMPLETION_KIND_") for request in end.served.completions
    ]
    assert kinds == ["PLAN", "ACTION", "PLAN", "ACTION"]
    assert end.code == 0
    assert "Final answer: 1" in end.stderr


# ---------------------------------------------------------------- how it ends


async def test_steps_used_up_ask_for_no_further_completion(places: Places) -> None:
    end = await run(places, Script([action("1")] * 3, max_steps=3))
    assert end.served.stop_reason == "MAX_STEPS"
    assert end.served.answer is None
    assert len(end.served.completions) == 3


async def test_the_extra_completion_comes_back_where_it_is_wanted(places: Places) -> None:
    end = await run(places, Script([action("1"), "It is 1."], max_steps=1, final_answer_at_max_steps=True))
    assert end.served.completions[-1].kind == pb.COMPLETION_KIND_FINAL
    assert (end.served.stop_reason, end.served.answer) == ("FINAL_ANSWER", b"It is 1.")


async def test_none_is_no_answer(places: Places) -> None:
    end = await run(places, Script([action("final_answer(None)")]))
    assert (end.served.stop_reason, end.served.answer) == ("NO_ANSWER", None)


async def test_an_answer_that_is_no_utf8_arrives_as_it_is(places: Places) -> None:
    end = await run(places, Script([action("print('\\udfff')\n'\\udfff'"), action("final_answer('\\udfff')")]))
    assert end.served.answer == b"\xed\xbf\xbf"


async def test_a_step_does_what_plain_python_does(places: Places) -> None:
    steps = [action(code) for code, _ in CASES]
    end = await run(places, Script([*steps, action("final_answer('done')")], max_steps=len(steps) + 1))
    for (code, expected), observed in zip(CASES, end.served.observations, strict=True):
        assert expected in observed, f"{code}\n--> {observed}"


async def test_no_signal_is_ignored_or_blocked_because_whoever_started_the_sandbox_ignores_it(
    places: Places,
) -> None:
    code = """
import signal
kinds = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)
found = [signal.getsignal(kind) for kind in kinds]
names = [getattr(each, "__name__", None) or each.name for each in found]
final_answer(f"{names} {signal.pthread_sigmask(signal.SIG_BLOCK, [])}")
"""
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        end = await run(places, Script([action(code)]))
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
    assert end.served.answer == b"['default_int_handler', 'SIG_DFL', 'SIG_DFL', 'SIG_DFL'] set()"


async def test_files_come_behind_the_result_they_must_not_cost(places: Places) -> None:
    code = "import os\nos.mkdir('output')\nopen('output/x', 'w').write('made')\nfinal_answer('done')"
    script = Script([action(code)], output=pb.OutputLimits(max_files=9, max_bytes=999))
    end = await run(places, script)
    assert (end.code, end.served.answer) == (0, b"done")
    assert end.served.result_came_first
    assert end.served.output == b"F\0\1x" + (4).to_bytes(8, "big") + b"made" + b"E" + bytes(4)


async def test_an_ended_lease_ends_the_sandbox_quietly(places: Places) -> None:
    end = await run(places, Script([action("1"), ENDED]))
    assert (end.code, end.stderr) == (0, "")
    assert end.served.results == []
    assert len(end.served.completions) == 2


async def test_what_breaks_in_the_runner_is_submitted_as_a_crash(places: Places) -> None:
    end = await run(places, Script([], tools={"search": str}, inputs=["not", "an", "object"]))  # type: ignore[arg-type]
    assert end.code == 1
    assert end.served.stop_reason == "CRASHED"
    assert "the inputs of tool 'search' must be a JSON object" in end.served.results[0].detail


async def test_a_cut_completion_is_asked_for_again_under_the_same_number(places: Places) -> None:
    end = await run(places, Script([action("x = 5"), action("final_answer(x)")], unavailable={1, 2}))
    assert [request.sequence for request in end.served.completions] == [1, 2]
    assert end.served.answer == b"5"


async def test_a_parked_sandbox_ends_when_its_orchestrator_dies(places: Places) -> None:
    async with ScriptedOrchestrator(places.channel, Script([])) as served, started(places) as process:
        served.go.clear()
        async with asyncio.timeout(DEADLINE_S):
            await served.parked.wait()
        await served.stop()
        end = await ended(process, served)
    assert end.code == 1
    assert "the orchestrator is gone" in end.stderr


async def test_a_sandbox_of_another_contract_says_so_and_ends(places: Places) -> None:
    end = await run(places, Script([], refuse_parking="rebuild the image"))
    assert end.code == 1
    assert end.stderr == "the orchestrator refused a call: INVALID_ARGUMENT: rebuild the image\n"


@pytest.mark.long
async def test_a_working_sandbox_ends_when_its_orchestrator_stays_away(places: Places) -> None:
    script = Script([action("import time\ntime.sleep(1)"), action("final_answer(1)")])
    async with ScriptedOrchestrator(places.channel, script) as served, started(places) as process:
        await until(lambda: bool(served.completions))
        await served.stop()
        stopped = time.monotonic()
        end = await ended(process, served)
    assert end.code == 1
    assert "the orchestrator is gone" in end.stderr
    assert time.monotonic() - stopped > 9
    assert len(served.completions) == 1


async def test_a_sandbox_in_a_step_without_end_ends_with_its_orchestrator(places: Places) -> None:
    """Nothing inside calls anybody: only pid 1 can notice."""
    marker = f"29{os.getpid()}"
    code = f"import subprocess\nsubprocess.Popen(['sleep', '{marker}'], start_new_session=True)\nwhile True: pass"
    script = Script([action(code)], step_timeout_s=3600.0)
    async with ScriptedOrchestrator(places.channel, script) as served, started(places) as process:
        await until(lambda: bool(processes_with(marker)))
        served.let_go()
        end = await ended(process, served)
    assert end.code == EXIT_NO_ORCHESTRATOR
    assert end.stderr.startswith("the orchestrator is gone\n")
    await until(lambda: not processes_with(marker))
    await until(lambda: not processes_with(str(places.workspace)))


async def test_a_sandbox_that_nobody_holds_does_not_begin(places: Places) -> None:
    async with ScriptedOrchestrator(places.channel, Script([])) as served:
        served.let_go()
        async with started(places) as process:
            end = await ended(process, served)
    assert end.code == EXIT_NO_ORCHESTRATOR
    assert end.stderr.startswith("no orchestrator holds this sandbox")


async def test_a_dead_runner_takes_the_sandbox_with_it(places: Places) -> None:
    async with ScriptedOrchestrator(places.channel, Script([])) as served, started(places) as process:
        served.go.clear()
        async with asyncio.timeout(DEADLINE_S):
            await served.parked.wait()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        end = await ended(process, served)
    assert end.code == 128 + signal.SIGKILL


async def test_a_terminated_sandbox_leaves_no_process_behind(places: Places) -> None:
    marker = f"27{os.getpid()}"
    code = f"import subprocess\nsubprocess.Popen(['sleep', '{marker}'], start_new_session=True)\nwhile True: pass"
    async with ScriptedOrchestrator(places.channel, Script([action(code)])) as served, started(places) as process:
        await until(lambda: bool(processes_with(marker)))
        process.terminate()
        end = await ended(process, served)
    assert end.code == 128 + signal.SIGTERM
    await until(lambda: not processes_with(marker))
    await until(lambda: not processes_with(str(places.workspace)))


async def test_broken_workers_are_observations_and_the_agent_goes_on(places: Places) -> None:
    script = Script(
        [
            action("x = 1\nwhile True: pass"),
            action("import os\nos._exit(7)"),
            action("print(x)"),
            action("import builtins\nbuiltins.print = builtins.len = None\n'ok'"),
            action("final_answer('through')"),
        ],
        step_timeout_s=4.0,
    )
    end = await run(places, script)
    seen = end.served.observations
    assert "longer than 4 seconds" in seen[0]
    assert "ended with exit code 7" in seen[1]
    assert "NameError: name 'x' is not defined" in seen[2]
    assert seen[3].endswith("ok")
    assert end.served.answer == b"through"


async def test_bad_arguments_are_one_line(places: Places) -> None:
    for extra, told in (
        (["--runner-uid", "5"], "come together or not at all"),
        (["--runner-uid", "5", "--worker-uid", "5", "--channel-gid", "6"], "two different uids"),
        (["--work", "x"], "unrecognized arguments"),
        (["--workspace"], "--workspace needs a value"),
        (["--worker-processes", "many"], "is not a whole number"),
    ):
        process = await asyncio.create_subprocess_exec(
            *places.command(), *extra, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await process.communicate()
        assert process.returncode == 2
        assert told in stderr.decode().splitlines()[-1]


# ---------------------------------------------------------------- two identities, without a container

UIDS = Uids(runner=59_990, worker=59_991, channel_gid=59_989)


def _readable_by_others() -> bool:
    paths = {Path(sys.executable), Path(sys.executable).resolve(), Path(json.__file__), ROOT}
    return all(parent.stat().st_mode & stat.S_IXOTH for path in paths for parent in path.parents)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give the runner and the worker uids of their own")
@pytest.mark.skipif(not _readable_by_others(), reason="other users cannot read this Python")
async def test_the_two_identities_are_apart_without_a_container_too(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    places = Places(tmp_path_factory.mktemp("u"), UIDS)
    for parent in places.root.parents:
        if not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)  # pytest makes them for itself alone
    script = Script(
        [
            action("import os\n(os.getuid(), os.getgid(), os.getgroups())"),
            action(f"import socket\nsocket.socket(socket.AF_UNIX).connect({str(places.channel / 's')!r})"),
            action(
                "import subprocess\nsubprocess.Popen(['sleep', '99'], start_new_session=True)\nwhile True: pass"
            ),
            action("final_answer(open('/proc/self/status').read())"),
        ],
        step_timeout_s=4.0,
    )
    end = await run(places, script)
    assert end.stderr == ""
    assert end.served.park is not None
    assert (end.served.park.confinement.runner_uid, end.served.park.confinement.worker_uid) == (59_990, 59_991)
    assert end.served.observations[0].endswith("(59991, 59991, [])")
    assert "PermissionError" in end.served.observations[1]
    assert "longer than 4 seconds" in end.served.observations[2]
    assert end.served.answer is not None
    assert b"CapEff:\t0000000000000000" in end.served.answer
    worker_left = [p for p in Path("/proc").iterdir() if p.name.isdecimal() and p.stat().st_uid == UIDS.worker]
    assert worker_left == []
