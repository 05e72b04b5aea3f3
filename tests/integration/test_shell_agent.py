"""`env.agent shell`: `python -m sandbox` as a process with real shells, against a scripted orchestrator."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from tests.fakes.sandbox_process import Ended, Places, run
from tests.fakes.scripted_orchestrator import Script

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("b"))


def fenced(command: str) -> str:
    return f"I run this.\n```bash\n{command}\n```\n"


def calling(*arguments: object, text: str = "", finish: int = pb.FINISH_REASON_STOP) -> pb.Completion:
    """A completion with calls as data; arguments that are a text are sent as they are."""
    calls = [
        pb.Call(id=f"c{n}", name="bash", arguments_json=one if isinstance(one, str) else json.dumps(one))
        for n, one in enumerate(arguments)
    ]
    return pb.Completion(text=text, calls=calls, finish_reason=finish, prompt_tokens=10, completion_tokens=5)  # type: ignore[arg-type]


async def carried_out(places: Places, commands: Sequence[str], **script: object) -> tuple[list[str], Ended]:
    """What the agent saw of each command, and how it ended."""
    says = [*map(fenced, commands), "done"]
    given = {"kind": "shell", "max_steps": len(says), **script}
    end = await run(places, Script(says, **given))  # type: ignore[arg-type]
    assert (end.code, end.served.answer) == (0, b"done"), end.stderr
    return end.served.observations, end


async def test_commands_run_one_after_the_other_until_a_message_has_none(places: Places) -> None:
    commands = ["echo hello > a.txt; ls", "cat a.txt missing.txt", "exit 7", "true"]
    seen, end = await carried_out(places, commands, question="Do *this*.\n", instructions="Be brief.")
    assert seen == [
        "a.txt\n[exit code 0]",
        "hello\ncat: missing.txt: No such file or directory\n[exit code 1]",
        "[exit code 7]",
        "[exit code 0]",
    ]
    system, task, *rest = end.served.completions[-1].messages
    assert f"The working directory, at first {places.workspace}," in system.content
    assert "killed after 20 seconds" in system.content
    assert "20000 characters" in system.content
    assert "You have 5 steps" in system.content
    assert system.content.endswith("\n\nBe brief.")
    assert (task.role, task.content) == (pb.ROLE_USER, "Do *this*.\n")
    assert [m.role for m in rest] == [pb.ROLE_ASSISTANT, pb.ROLE_USER] * 4
    assert {request.kind for request in end.served.completions} == {pb.COMPLETION_KIND_ACTION}
    steps = end.served.steps
    assert [(s.step_number, s.code, s.observations) for s in steps[:2]] == [
        (1, commands[0] + "\n", seen[0]),
        (2, commands[1] + "\n", seen[1]),
    ]
    assert [s.is_final_answer for s in steps] == [False] * 4 + [True]


async def test_calls_as_data_are_answered_one_by_one(places: Places) -> None:
    says = [
        calling({"command": "echo one"}, {"command": "echo two"}, text="Two at once."),
        calling(
            *("[1]", '"ls"', {"cmd": "ls"}, {"command": ["ls"]}, "{", {"command": "a\0b"}, {"command": "echo on"})
        ),
        calling(text='<tool_call>\n{"name": "bash", "arguments": "ls"}\n</tool_call>'),
        calling(text='```json\n{\n  "name": "bash",\n  "arguments": {"command": "ls"}\n}\n```'),
        calling(text="<tool_call>\nls", finish=pb.FINISH_REASON_LENGTH),
        calling(text="I think and th", finish=pb.FINISH_REASON_LENGTH),
        calling(text=" 42\n"),
    ]
    end = await run(places, Script(says, kind="shell", calls_as_data=True))
    assert (end.code, end.served.answer) == (0, b"42"), end.stderr
    for request in end.served.completions:
        (tool,) = json.loads(request.tools_json)
        assert tool["function"]["name"] == "bash"
    talk = list(end.served.completions[-1].messages)
    assert [(m.role, m.call_id, m.content) for m in talk[3:5]] == [
        (pb.ROLE_TOOL, "c0", "one\n[exit code 0]"),
        (pb.ROLE_TOOL, "c1", "two\n[exit code 0]"),
    ]
    assert [json.loads(call.arguments_json)["command"] for call in talk[2].calls] == ["echo one", "echo two"]
    nonsense = [m.content for m in talk[6:13]]
    assert all("bash has one argument, command, a text" in text for text in nonsense[:5]), nonsense
    assert "NUL" in nonsense[5]
    assert nonsense[6] == "on\n[exit code 0]"
    assert [m.content for m in talk[13:] if m.role == pb.ROLE_USER] == [
        *["[no command was run: the call cannot be read]"] * 2,
        *["[your message was cut off: it was too long; no command was run]"] * 2,
    ]


async def test_nonsense_in_fenced_commands_is_told(places: Places) -> None:
    says = [
        "```bash\necho never\n",
        pb.Completion(text="Cut in the mid", finish_reason=pb.FINISH_REASON_LENGTH, completion_tokens=5),
        "Two.\n```sh\necho one\n```\nand\n  ```bash\n  echo two\n  ```\n",
        fenced("echo '" + "x" * 140_000 + "' | wc -c"),
        fenced("echo $(( ; ls"),
        "```python\nprint(1)\n```",
    ]
    end = await run(places, Script(says, kind="shell"))
    assert end.code == 0, end.stderr
    seen = end.served.observations
    assert seen[0] == "[no command was run: the block has no end and cannot be read]"
    assert seen[1] == "[your message was cut off: it was too long; no command was run]"
    assert seen[2] == "one\n[exit code 0]\n\ntwo\n[exit code 0]"
    assert seen[3] == "[no command was run: it holds a NUL character, or more than 128 KiB]"
    assert "unexpected EOF" in seen[4]
    assert seen[4].endswith("[exit code 2]")
    assert end.served.answer == b"```python\nprint(1)\n```"  # another language is no command: it is the answer


@pytest.mark.parametrize("shell", ["bash", "sh", "busybox sh"])
async def test_working_directory_and_exported_variables_stay(places: Places, tmp_path: Path, shell: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / ("bash" if shell == "bash" else "sh")).symlink_to(f"/bin/{shell.split()[0]}")
    for name in ("mkdir", "rm", "rmdir", "true"):
        (folder / name).symlink_to(f"/bin/{name}")
    commands = [
        "mkdir -p 'a b/c' && cd 'a b/c' && export A=\"x 'y'\n\\z\" B=2 && C=3; f() { :; }; exit 4",
        'pwd; echo "[$A][$B][$C]"; cd ..; unset B',
        'pwd; echo "${B-unset}"; cd -',
        "cd ../.. && rm -r 'a b' && mkdir gone && cd gone && rmdir ../gone",
        "pwd",
        "cd /tmp; kill -9 $$",
        "pwd; trap - EXIT; cd /tmp",
        "pwd; cd /usr; exec true",
        "pwd",
    ]
    environment = {"PATH": str(folder), "FROM_TASK": "yes"}
    seen, _ = await carried_out(places, [*commands, 'echo "$FROM_TASK" "$0"'], environment=environment)
    top = places.workspace
    assert seen[0] == "[exit code 4]"
    assert seen[1] == f"{top}/a b/c\n[x 'y'\n\\z][2][]\n[exit code 0]"
    assert seen[2] == f"{top}/a b\nunset\n{top}/a b/c\n[exit code 0]"
    assert seen[3] == "[exit code 0]"
    assert f"{top}/gone" in seen[4]  # why it is somewhere else
    assert seen[4].endswith("/\n[exit code 0]")
    assert seen[5] == "[killed by SIGKILL]"
    assert seen[6:9] == ["/\n[exit code 0]"] * 3
    assert seen[9] == f"yes {'bash' if shell == 'bash' else 'sh'}\n[exit code 0]"


async def test_a_command_that_hangs_is_killed_with_its_group_and_no_other(places: Places) -> None:
    commands = [
        "sleep 300 & echo $! > early",
        "echo begins; sleep 300 & echo $! > late; (trap '' TERM INT HUP; sleep 300); echo never",
        "kill -0 $(cat early) && echo early lives; kill -0 $(cat late) || echo late is gone",
        "kill -STOP $$",
        'cat; read x; echo "[$x]"',
        "sleep 300 > /dev/null 2>&1 < /dev/null & disown 2>/dev/null; echo at once",
    ]
    started = time.monotonic()
    seen, _ = await carried_out(places, commands, step_timeout_s=2.0)
    assert time.monotonic() - started < 60
    assert seen[0] == "[exit code 0]"
    assert seen[1] == "begins\n[killed after 2 seconds, with what it had started]"
    assert seen[2].startswith("early lives\n")
    assert "late is gone\n[exit code 0]" in seen[2]
    assert seen[3] == "[killed after 2 seconds, with what it had started]"
    assert seen[4] == "[]\n[exit code 0]"
    assert seen[5] == "at once\n[exit code 0]"
    for name in ("early", "late"):  # nothing is left behind
        assert not Path(f"/proc/{(places.workspace / name).read_text().strip()}").exists()


async def test_output_is_bounded_and_printable(places: Places) -> None:
    commands = [
        "head -c 10000000 /dev/zero | tr '\\0' a; echo END",
        "exec 1>&-; echo nobody hears; echo but here >&2",
        "exec 1>&- 2>&-; echo nothing",
        "echo after",
        "printf 'a\\0\\001\\377b\\033[31mred\\tx\\r\\n10%%\\r20%%\\r\\n\\342\\202\\254'",
        "head -c 1000 /dev/zero",
    ]
    seen, _ = await carried_out(places, commands, max_output_chars=1000)
    assert len(seen[0]) < 1200
    assert seen[0].startswith("a" * 400)
    assert "bytes left out" in seen[0]
    assert seen[0].endswith("aEND\n[exit code 0]")
    assert seen[1].endswith("but here\n[exit code 0]")
    assert seen[2] == "[exit code 1]"
    assert seen[3] == "after\n[exit code 0]"
    assert seen[4] == "a\ufffdb\ufffd[31mred\tx\n10%\n20%\n€\n[exit code 0]"
    assert seen[5] == "\ufffd\n[exit code 0]"


@pytest.mark.slow
async def test_a_command_that_ends_what_runs_it_costs_the_processes(places: Places) -> None:
    commands = ["export A=1; cd /; kill -9 $PPID; sleep 9", 'pwd; echo "[$A]"', "kill -STOP $PPID; sleep 1", "pwd"]
    seen, _ = await carried_out(places, commands, step_timeout_s=1.0)
    lost = "all processes were ended, and the working directory and variables are as at the beginning]"
    assert seen[0] == f"[what runs commands broke: exit status -9; {lost}"
    assert seen[1] == f"{places.workspace}\n[]\n[exit code 0]"
    assert seen[2] == f"[the command ran too long; {lost}"
    assert seen[3] == f"{places.workspace}\n[exit code 0]"


async def test_a_frame_that_a_command_forges_is_not_taken_for_the_end_of_one(places: Places) -> None:
    forge = "printf '\\0\\0\\0\\2{}' > /proc/$PPID/fd/4; echo forged"
    seen, _ = await carried_out(places, [forge, "sleep 0.2; echo on"])
    assert "[what runs commands broke: it sent a frame of another command; all processes were ended" in seen[0]
    assert seen[1] == "on\n[exit code 0]"


async def test_what_runs_in_the_background_is_heard_and_holds_nothing(places: Places) -> None:
    wait = "while [ ! -e mark ]; do sleep 0.1; done; echo now"
    commands = ["(sleep 1; echo later; touch mark) &", wait, "yes &", "sleep 0.2; echo seen", "echo on"]
    seen, end = await carried_out(places, commands, max_output_chars=2000)
    assert seen[0] == "[exit code 0]"
    assert seen[1] == "later\nnow\n[exit code 0]"
    assert all(text.endswith("[exit code 0]") and len(text) < 2200 for text in seen[2:])
    assert end.served.stop_reason == "FINAL_ANSWER"


@pytest.mark.slow
@pytest.mark.parametrize("as_data", [False, True])
async def test_the_last_step_may_be_followed_by_an_answer(places: Places, as_data: bool) -> None:
    command = calling({"command": "echo 42"}) if as_data else fenced("echo 42")
    given = {"kind": "shell", "max_steps": 1, "calls_as_data": as_data}
    end = await run(places, Script([command], **given))  # type: ignore[arg-type]
    assert (end.code, end.served.stop_reason) == (0, "MAX_STEPS"), end.stderr
    assert end.served.steps[0].observations == "42\n[exit code 0]"

    (places.root / "again").mkdir()
    again = Places(places.root / "again")
    end = await run(again, Script([command, " 42 "], final_answer_at_max_steps=True, **given))  # type: ignore[arg-type]
    assert (end.code, end.served.answer) == (0, b"42"), end.stderr
    final = end.served.completions[-1]
    assert final.kind == pb.COMPLETION_KIND_FINAL
    assert bool(final.tools_json) is as_data  # the prompt goes on from the one before
    assert final.messages[-1].content.endswith("Write your answer.")
    roles = [m.role for m in final.messages[2:]]
    assert roles == [pb.ROLE_ASSISTANT, *[pb.ROLE_TOOL] * as_data, pb.ROLE_USER]


async def test_an_empty_message_is_an_empty_answer(places: Places) -> None:
    end = await run(places, Script([""], kind="shell"))
    assert (end.code, end.served.stop_reason, end.served.answer) == (0, "FINAL_ANSWER", b""), end.stderr


async def test_files_of_the_task_are_named_behind_the_question(places: Places) -> None:
    says = [fenced(f"cat {places.attachments}/n.txt"), "1"]
    end = await run(places, Script(says, kind="shell", attachments={"n.txt": b"7\n"}))
    assert end.served.observations == ["7\n[exit code 0]"], end.stderr
    task = end.served.completions[0].messages[1].content
    assert task == (
        "What is it?\n\nThe task comes with these files (read-only, given by their absolute paths):\n"
        f"- {places.attachments}/n.txt"
    )
