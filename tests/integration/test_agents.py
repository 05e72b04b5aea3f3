"""Agents other than the plain code agent: `python -m sandbox` as a process, against a scripted orchestrator."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from rollout_api.v1 import sandbox_pb2 as pb

from tests.fakes.sandbox_process import ROOT, Places, run
from tests.fakes.scripted_orchestrator import ENDED, Script, action

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("b"))


def call(name: str, arguments: object) -> str:
    """A completion that calls a tool."""
    return f"I call a tool.\nAction:\n{json.dumps({'name': name, 'arguments': arguments})}"


async def test_a_tool_calling_agent_works_in_the_worker_and_answers(places: Places) -> None:
    script = Script(
        [
            call("python_interpreter", {"code": "x = 6 * 7\nprint('working')\nx"}),
            call("write_file", {"path": "note.txt", "content": "größer"}),
            call("python_interpreter", "open('note.txt').read(), x"),
            call("search", {"query": "a"}),
            "There is no call in this.",
            call("unknown", {}),
            call("read_file", {"file": "x"}),
            call("python_interpreter", {"code": "print('so far')\nfinal_answer(1)"}),
            call("final_answer", {"answer": [42, "ü"]}),
        ],
        kind="tool_calling",
        max_steps=12,
        tools={"search": lambda arguments: f"results for {arguments['query']}"},
    )
    end = await run(places, script)
    assert (end.code, end.served.answer) == (0, "[42, 'ü']".encode())
    seen = end.served.observations
    assert seen[0] == "Observation:\nStdout:\nworking\n\nOutput: 42"
    assert seen[1] == f"Observation:\nWrote 6 characters to {places.workspace}/note.txt"
    assert seen[2] == "Observation:\nStdout:\n\nOutput: ('größer', 42)"
    assert seen[3] == "Observation:\nresults for a"
    assert "does not contain any JSON blob" in seen[4]
    assert "Unknown tool unknown, should be one of: python_interpreter, read_file" in seen[5]
    assert "Argument file is not in the tool's input schema" in seen[6]
    assert "so far" in seen[7]
    assert "NameError: name 'final_answer' is not defined" in seen[7]
    conversation = end.served.completions[-1].messages
    assert [pb.Role.Name(m.role) for m in conversation[:3]] == ["ROLE_SYSTEM", "ROLE_USER", "ROLE_ASSISTANT"]
    assert "- search: The tool search." in conversation[0].content
    # What the model said comes back word for word, so that its tokens can stay.
    assert [m.content for m in conversation if m.role == pb.ROLE_ASSISTANT] == list(script.completions[:-1])
    assert end.served.steps[0].code == "python_interpreter(**{'code': \"x = 6 * 7\\nprint('working')\\nx\"})"
    assert end.served.steps[-1].is_final_answer


async def test_prompts_tags_and_imports_are_as_asked_for(places: Places) -> None:
    script = Script(
        ["Thought: so.\n```python\nprint(40 + 2)\n```", "```python\nfinal_answer('done')\n```"],
        code_tags=("```python", "```"),
        authorized_imports=["numpy", "pandas.*"],
        instructions="Be brief.",
        prompt_templates_json=json.dumps(
            {"system_prompt": "Write {{code_block_opening_tag}}. {{authorized_imports}} {{custom_instructions}}"}
        ),
    )
    end = await run(places, script)
    assert end.served.answer == b"done"
    system = end.served.completions[0].messages[0].content
    assert system.startswith("Write ```python. [")
    assert "'numpy', 'pandas.*'" in system
    assert system.endswith("Be brief.")
    assert end.served.observations[0].startswith("Observation:\nExecution logs:\n42\n")


GREET = '''
import json

def greet(name: str, times: int = 1) -> str:
    """Greets somebody."""
    return " ".join([f"Hello, {name}!"] * times)
'''


def sandbox_tool(name: str, source: str) -> pb.SandboxTool:
    inputs = {"name": {"type": "string", "description": "Who."}}
    told = pb.HostTool(name=name, description="Greets.", inputs_json=json.dumps(inputs), output_type="string")
    return pb.SandboxTool(tool=told, module="greetings", source=source)


async def test_a_sandbox_tool_is_a_function_in_the_worker(places: Places) -> None:
    script = Script(
        [action("import os\nprint(greet('Ada', times=2))\nos._exit(3)"), action("final_answer(greet('Bob'))")],
        sandbox_tools=[sandbox_tool("greet", GREET)],
    )
    end = await run(places, script)
    assert "def greet(name: string) -> string:" in end.served.completions[0].messages[0].content
    assert "Hello, Ada! Hello, Ada!" in end.served.observations[0]
    assert end.served.answer == b"Hello, Bob!"


async def test_a_sandbox_tool_that_cannot_be_imported_is_no_fault_of_the_agent(places: Places) -> None:
    script = Script([], sandbox_tools=[sandbox_tool("greet", "import no_such_package_at_all")])
    end = await run(places, script)
    [result] = end.served.results
    assert end.served.stop_reason == "CRASHED"
    assert "greetings: ModuleNotFoundError: No module named 'no_such_package_at_all'" in result.detail


HELPER = pb.ManagedAgent(
    name="helper", description="Counts things.", tools=["search"], max_steps=2, kind=pb.AGENT_KIND_CODE
)


async def test_a_managed_agent_works_in_the_middle_of_a_step_with_variables_of_its_own(places: Places) -> None:
    script = Script(
        [
            action(
                "x = 'mine'\nprint('before', end='')\ntold = helper('Count to three.')\nprint('after', x)\ntold"
            ),
            action("x = search('three')\nprint('inside')"),
            action("final_answer(x + ', ' + str('read_file' in globals()))"),
            action("helper(task='Again.', additional_args={'n': 5})"),
            action("n + 1"),
            action("import os\nos._exit(9)"),
            action("helper('And again.', 1, 2)"),
            action("final_answer(x)"),
            action("final_answer('lost')"),
        ],
        tools={"search": lambda arguments: f"<{arguments['query']}>"},
        managed_agents=[HELPER],
        max_steps=8,
    )
    end = await run(places, script)
    asked = [(request.agent, request.messages[-1].content) for request in end.served.completions]
    assert [agent for agent, _ in asked] == ["", "helper", "helper", "", "helper", "helper", "", "", ""]
    assert "Count to three." in asked[1][1]
    assert asked[2][1].startswith("Observation:\nExecution logs:\ninside\n")
    # The main agent's step goes on where it called, its prints and variables kept.
    assert "Execution logs:\nbeforeafter mine\n" in asked[3][1]
    assert "final answer from your managed agent 'helper':\n<three>, False" in asked[3][1]
    assert asked[5][1].endswith("6")
    # Its code ended the process both run in: the one that called learns it, and the episode goes on.
    assert "Code of the agent that was called broke the Python process both run in." in asked[6][1]
    assert "helper() takes 2 arguments (task, additional_args), 3 were given" in asked[7][1]
    assert "NameError: name 'x' is not defined" in asked[8][1]
    assert end.served.answer == b"lost"
    assert [step.agent for step in end.served.steps][:3] == ["helper", "helper", ""]


# Model-written code owns the worker: it need not use the harness as it is meant to send a frame.
FORGE = """
import json, os, sys
frame = sys._getframe()
while not hasattr(frame.f_locals.get("self"), "_await_reply"):
    frame = frame.f_back
harness = frame.f_locals["self"]
def forged(arguments):
    harness._calls += 1
    call = {"kind": "call", "step": harness._step, "call": harness._calls, "name": "helper"}
    body = json.dumps({**call, "arguments": arguments}).encode()
    os.write(4, len(body).to_bytes(4, "big") + body)
    reply = harness._await_reply(harness._calls)
    return reply["output"] or reply["error"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"task": "Count.", "max_steps": 50},
        {"task": "Count.", "reset": False},
        {"task": "Count.", "images": ["x"]},
        {"task": "Count.", "return_full_result": True},
        {"task": "Count.", "stream": True},
        {"task": ["Count."]},
        {"task": "Count.", "additional_args": ["n"]},
        {"additional_args": {"n": 1}},
        ["Count."],
        "Count.",
        None,
    ],
    ids=repr,
)
async def test_a_forged_call_can_say_no_more_to_a_managed_agent_than_an_honest_one(
    places: Places, arguments: object
) -> None:
    script = Script(
        [
            action(f"{FORGE}\nprint(forged({json.dumps(arguments)!r}))"),
            action("final_answer('done')"),
            *[action("print('more')")] * 9,
        ],
        managed_agents=[pb.ManagedAgent(name="helper", description="x", max_steps=2, kind=pb.AGENT_KIND_CODE)],
    )
    end = await run(places, script)
    assert [request.agent for request in end.served.completions] == ["", ""]
    assert "Error: " in end.served.observations[0]
    assert end.served.answer == b"done"


async def test_a_worker_that_is_broken_when_it_calls_a_managed_agent_costs_the_step_alone(places: Places) -> None:
    script = Script(
        [
            action(f"{FORGE}\nos.close(3)\nforged(json.dumps({{'task': 'Count.'}}))"),
            action("final_answer('done')"),
        ],
        managed_agents=[pb.ManagedAgent(name="helper", description="x", max_steps=2, kind=pb.AGENT_KIND_CODE)],
    )
    end = await run(places, script)
    assert [request.agent for request in end.served.completions] == ["", ""]
    assert "A fresh Python process takes its place" in end.served.observations[0]
    assert (end.served.stop_reason, end.served.answer) == ("FINAL_ANSWER", b"done")


async def test_a_tool_calling_agent_can_manage_a_code_agent(places: Places) -> None:
    script = Script(
        [
            call("helper", {"task": "Count."}),
            action("final_answer(len('abc'))"),
            call("final_answer", "3"),
        ],
        kind="tool_calling",
        tools={"search": lambda arguments: ""},
        managed_agents=[HELPER],
    )
    end = await run(places, script)
    assert [request.agent for request in end.served.completions] == ["", "helper", ""]
    assert "final answer from your managed agent 'helper':\n3" in end.served.observations[1]
    assert end.served.answer == b"3"


# ---------------------------------------------------------------- calls as data


def calling(*calls: tuple[str, object], text: str = "", number: int = 1) -> pb.Completion:
    """The completion with this number, which makes these calls."""
    told = [
        pb.Call(id=f"c{number:06x}{place:02x}", name=name, arguments_json=json.dumps(arguments))
        for place, (name, arguments) in enumerate(calls)
    ]
    return pb.Completion(text=text, finish_reason=pb.FINISH_REASON_STOP, calls=told)


def results(request: pb.CompleteRequest) -> list[tuple[str, str]]:
    """(call's id, result) behind the last message of the assistant."""
    found: list[tuple[str, str]] = []
    for message in request.messages:
        found = [*found, (message.call_id, message.content)] if message.role == pb.ROLE_TOOL else []
    return found


async def test_calls_as_data_get_a_result_each_whatever_becomes_of_the_others(places: Places) -> None:
    both = calling(
        ("python_interpreter", {"code": "x = 6 * 7\nx"}), ("search", {"query": "a"}), text="Both.", number=1
    )
    script = Script(
        [
            both,
            calling(("search", {"wrong": 1}), ("write_file", {"path": "n.txt", "content": "x"}), number=2),
            calling(("search", {"query": "fails"}), number=3),
            "There is no call in this.",
            'Text: {"name": "python_interpreter", "arguments": {"code": "x + 1"}}',
            calling(("final_answer", {"answer": "early"}), ("search", {"query": "b"}), number=6),
            calling(("helper", {"task": "Count."}), number=7),
            action("final_answer(len('abc'))"),
            calling(("final_answer", {"answer": "3"}), number=9),
        ],
        kind="tool_calling",
        calls_as_data=True,
        max_steps=12,
        tools={
            "search": lambda arguments: (
                f"results for {arguments['query']}" if len(arguments["query"]) < 2 else 1 / 0
            )
        },
        managed_agents=[HELPER],
    )
    end = await run(places, script)
    assert (end.code, end.served.answer) == (0, b"3")
    asked = end.served.completions
    names = [tool["function"]["name"] for tool in json.loads(asked[0].tools_json)]
    assert names == [
        "python_interpreter",
        "read_file",
        "write_file",
        "append_to_file",
        "search",
        "final_answer",
        "helper",
    ]
    assert [request.agent for request in asked if not request.tools_json] == ["helper"]  # it writes code
    system = asked[0].messages[0].content
    assert '"arguments"' not in system
    assert "- helper: " in system
    # What the model said comes back as it was given, so that its tokens are found again.
    assert asked[1].messages[-3] == pb.Message(role=pb.ROLE_ASSISTANT, content="Both.", calls=both.calls)
    assert results(asked[1]) == [("c00000100", "Stdout:\n\nOutput: 42"), ("c00000101", "results for a")]
    (wrong, told), (wrote, done) = results(asked[2])
    assert (wrong, wrote) == ("c00000200", "c00000201")
    assert told.startswith("Error:\nArgument wrong is not in the tool's input schema\nNow let's retry")
    assert done == f"Wrote 1 characters to {places.workspace}/n.txt"
    assert "division by zero" in results(asked[3])[0][1]
    assert "does not contain any JSON blob" in asked[4].messages[-1].content
    assert (asked[4].messages[-1].role, asked[4].messages[-2].content) == (
        pb.ROLE_USER,
        "There is no call in this.",
    )
    assert asked[5].messages[-1].content == "Observation:\nStdout:\n\nOutput: 43"
    (_, refused), (_, found) = results(asked[6])
    assert refused.startswith(
        "Error:\nIf you want to return an answer, please do not perform any other tool calls"
    )
    assert found == "results for b"
    assert "final answer from your managed agent 'helper':\n3" in results(asked[8])[0][1]
    conversation = asked[8].messages
    assert all(not message.call_id or message.role == pb.ROLE_TOOL for message in conversation)
    for before, after in pairwise(request for request in asked if not request.agent):
        assert list(after.messages)[: len(before.messages)] == list(before.messages)
    assert end.served.steps[0].code.startswith("python_interpreter(**{'code': ")


async def test_an_answer_that_was_refused_is_none(places: Places) -> None:
    script = Script(
        [calling(("final_answer", {"answer": "early"}), ("search", {"query": "b"})), "What do I know?"],
        kind="tool_calling",
        calls_as_data=True,
        max_steps=1,
        final_answer_at_max_steps=True,
        tools={"search": lambda arguments: "found"},
    )
    end = await run(places, script)
    assert end.served.answer == b"What do I know?"
    assert [request.tools_json != "" for request in end.served.completions] == [True, False]
    told = "".join(message.content for message in end.served.completions[1].messages)
    assert "Calling tools:" in told
    assert "Observation:\nfound" in told


async def test_a_plan_has_no_tools_and_sees_what_was_called(places: Places) -> None:
    script = Script(
        [
            "A plan.",
            calling(("search", {"query": "a"}), number=2),
            "A plan.",
            calling(("final_answer", {"answer": 1})),
        ],
        kind="tool_calling",
        calls_as_data=True,
        planning_interval=1,
        tools={"search": lambda arguments: "found"},
    )
    end = await run(places, script)
    assert end.served.answer == b"1"
    plan = end.served.completions[2]
    assert plan.tools_json == ""
    assert {message.role for message in plan.messages} == {pb.ROLE_SYSTEM, pb.ROLE_USER, pb.ROLE_ASSISTANT}
    assert "'name': 'search'" in "".join(message.content for message in plan.messages)
    first, last = end.served.completions[1], end.served.completions[3]
    assert list(last.messages)[: len(first.messages)] == list(first.messages)
    assert [pb.Role.Name(m.role) for m in last.messages[len(first.messages) :]] == [
        *("ROLE_ASSISTANT", "ROLE_TOOL", "ROLE_ASSISTANT", "ROLE_USER"),
    ]


async def test_prompts_of_the_operator_replace_those_for_calls_as_data(places: Places) -> None:
    script = Script(
        [calling(("final_answer", {"answer": "x"}))],
        kind="tool_calling",
        calls_as_data=True,
        prompt_templates_json=json.dumps({"system_prompt": "Call. {{custom_instructions}}"}),
        instructions="Be brief.",
    )
    end = await run(places, script)
    assert end.served.completions[0].messages[0].content == "Call. Be brief."


# ---------------------------------------------------------------- a program as agent

PROBE = r"""
import json, os, sys, urllib.error, urllib.request

base = os.environ["OPENAI_BASE_URL"]

def post(body, path="/chat/completions"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer x"}
    try:
        with urllib.request.urlopen(urllib.request.Request(base + path, data, headers)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

task = sys.stdin.read()
with urllib.request.urlopen(base + "/models") as models:
    assert [m["id"] for m in json.load(models)["data"]] == [os.environ["OPENAI_MODEL"]]
bad = [
    b"{", b"[]", b"[" * 100000, {"messages": []}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "robot", "content": "x"}]},
    {"messages": [{"role": "user", "content": "x"}], "n": 2},
    {"messages": [{"role": "user", "content": "x"}], "tools": [{}]},
    {"messages": [{"role": "user", "content": "x"}], "stop": ["x" * 65]},
]
for body in bad:
    status, text = post(body)
    assert status == 400, (body, status)
    assert json.loads(text)["error"]["type"] == "invalid_request_error", text
assert post({}, "/edits")[0] == 404
status, text = post({"messages": [{"role": "user", "content": "long"}]})
assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded"), text
tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
talk = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": task}]},
]
status, text = post({"model": "gpt-9", "messages": talk, "temperature": 0, "stop": ["END"], "tools": [tool]})
first = json.loads(text)["choices"][0]
assert first["finish_reason"] == "tool_calls", first
talk += [first["message"], {"role": "tool", "tool_call_id": "c1", "content": "seen"}]
talk += [{"role": "user", "content": "go on"}]
status, text = post({"messages": talk, "stream": True, "stream_options": {"include_usage": True}})
events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
assert text.endswith("data: [DONE]\n\n")
said = "".join(c["delta"].get("content", "") for e in events for c in e["choices"])
assert events[-1]["usage"]["total_tokens"] == 15
from extra import shout
print(shout(said))
"""


async def test_a_program_talks_to_the_endpoint_and_answers(places: Places) -> None:
    too_long = pb.RequestRefused(reason=pb.REFUSED_REASON_CONTEXT_LENGTH, message="4 tokens at most")
    calls = [pb.Call(id="c1", name="look", arguments_json="{}")]
    script = Script(
        [too_long, pb.Completion(text="I think", finish_reason=pb.FINISH_REASON_STOP, calls=calls), "forty-two"],
        kind="program",
        question="How many?",
        attachments={"a.txt": b"x"},
        program={"__main__.py": PROBE.encode(), "extra.py": b"def shout(text): return text.upper()"},
    )
    end = await run(places, script)
    assert (end.served.answer, end.served.stop_reason) == (b"FORTY-TWO", "FINAL_ANSWER"), end.served.results
    _, first, second = end.served.completions
    assert (first.messages[0].role, first.messages[0].content) == (pb.ROLE_SYSTEM, "Be brief.")
    assert first.messages[1].content.startswith("How many?\n\nThe task comes with these files")
    assert list(first.stop) == ["END"]
    assert json.loads(first.tools_json)[0]["function"]["name"] == "look"
    assert [m.content for m in second.messages[2:]] == ["I think", "seen", "go on"]
    assert (second.messages[2].calls, second.messages[3].call_id) == (calls, "c1")
    assert [step.model_output for step in end.served.steps] == ["I think", "forty-two", ""]


@pytest.mark.parametrize(
    ("program", "reason", "answer"),
    [
        ("import os\nopen(os.environ['ANSWER_FILE'], 'w').write('a file\\n')\nprint('no')", "FINAL_ANSWER", b"a file"),  # noqa: E501
        ("print('first')\nraise SystemExit('it broke')", "NO_ANSWER", None),
        ("import os\nos.mkfifo(os.environ['ANSWER_FILE'])", "NO_ANSWER", None),
        ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", "NO_ANSWER", None),
        ("import os\nos.write(1, b'\\xff\\xfe')", "FINAL_ANSWER", "\udcff\udcfe".encode("utf-8", "surrogatepass")),
    ],
)  # fmt: skip
async def test_how_a_program_ends(places: Places, program: str, reason: str, answer: bytes | None) -> None:
    end = await run(places, Script([], kind="program", program={"__main__.py": program.encode()}))
    [result] = end.served.results
    assert end.served.stop_reason == reason, result
    assert (result.answer if result.HasField("answer") else None) == answer
    assert "it broke" not in program or ("exit code 1: " in result.detail and "it broke" in result.detail)


FLOOD = """
import sys
sys.stderr.write("".join(f"line {n}\\n" for n in range(100_000)) + "\\xff\\x00 the reason")
print("noise\\n" * 100_000)
sys.exit(3)
"""
REFUSED = """
import os, urllib.request
for path in [*["/responses"] * 9, "/" + "x" * 999, "/chat/completions", "/embeddings"]:
    try:
        urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + path + "?key=secret", b"{")
    except OSError:
        pass
"""
LEFT_BEHIND = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
sys.exit("it broke")
"""


@pytest.mark.parametrize(
    ("program", "first", "rest"),
    [
        (FLOOD, "the program ended with exit code 3: \xff\x00 the reason", 12),
        (
            REFUSED,
            "the program ended with exit code 0: POST /v1/chat/completions got HTTP 400: the request is not",
            2,
        ),
        (LEFT_BEHIND, "the program ended with exit code 1: it broke", 1),
        ("import os\nos.kill(os.getpid(), 15)", "the program ended with exit code -15", 0),
    ],
    ids=["flood", "refused", "left behind", "signal"],
)
async def test_why_a_program_failed_is_told_in_few_words(
    places: Places, program: str, first: str, rest: int
) -> None:
    end = await run(places, Script([], kind="program", program={"__main__.py": program.encode()}))
    [result] = end.served.results
    said, *more = result.detail.split("\n")
    assert said.startswith(first)
    assert len(more) == rest
    assert len(result.detail) < 2600
    assert "secret" not in result.detail
    assert "noise" not in result.detail


async def test_the_end_of_the_lease_ends_a_program(places: Places) -> None:
    asks_for_ever = (ROOT / "examples" / "agents" / "loop.py").read_bytes()
    end = await run(
        places, Script(["```python\n1\n```", ENDED], kind="program", program={"__main__.py": asks_for_ever})
    )
    assert (end.code, end.served.results, len(end.served.completions)) == (0, [], 2)


async def test_the_example_program_solves_a_task(places: Places) -> None:
    loop = (ROOT / "examples" / "agents" / "loop.py").read_bytes()
    said = [
        "I look.\n```python\nprint(open('/dev/null').read() == '')\n```",
        "```python\n1 / 0\n```",
        "ANSWER: 42",
    ]
    end = await run(places, Script(said, kind="program", program={"__main__.py": loop}, question="What is it?"))
    assert end.served.answer == b"42", end.served.results
    assert end.served.observations[0] == "Output:\nTrue\n"
    assert "ZeroDivisionError" in end.served.observations[1]
