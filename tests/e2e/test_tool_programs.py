"""Programs that call tools, with the clients that they come with: exact ids from endpoint to groups file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.completion.tokenizer import load_tokenizer
from tests.e2e.endpoint import scripted_endpoint
from tests.fakes.runs import flags, lines, place, run
from tests.fakes.tokenizer import tokenizer_folder

ROOT = Path(__file__).parents[2]
QUESTION = "How warm is it in Rome and in Oslo?"
CALLS = "I look.\n" + "\n".join(
    f'<tool_call>\n{{"name": "weather",  "arguments": {{"city": "{city}", "unit": "C"}}}}\n</tool_call>'
    for city in ("Rome", "Oslo")
)
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
        "required": ["city"],
    },
}
CHAT = """\
import json, sys
from openai import OpenAI

tools = [{"type": "function", "function": TOOL}]
talk = [{"role": "user", "content": sys.stdin.read()}]
while True:
    said = OpenAI().chat.completions.create(model="any", messages=talk, tools=tools).choices[0]
    if said.finish_reason != "tool_calls":
        break
    # As many frameworks do: arguments parsed and printed again, ids of their own, the text left out.
    talk.append({"role": "assistant", "content": None, "tool_calls": [
        {"id": f"mine-{n}", "type": "function", "function": {
            "name": call.function.name,
            "arguments": json.dumps(json.loads(call.function.arguments), separators=(",", ":"), sort_keys=True)}}
        for n, call in enumerate(said.message.tool_calls)]})
    for n, call in reversed(list(enumerate(said.message.tool_calls))):
        city = json.loads(call.function.arguments)["city"]
        talk.append({"role": "tool", "tool_call_id": f"mine-{n}", "content": f"{city}: {len(city) * 5} degrees"})
print(said.message.content)
"""
RESPONSES = """\
import json, sys
from openai import OpenAI

tools = [{"type": "function", **TOOL}]
talk = [{"role": "user", "content": sys.stdin.read()}]
while True:
    with OpenAI().responses.stream(model="any", input=talk, tools=tools, instructions="Be short.") as stream:
        said = stream.get_final_response()
    calls = [item for item in said.output if item.type == "function_call"]
    if not calls:
        break
    talk += [item.model_dump(exclude={"id", "status", "parsed_arguments"}) for item in said.output]
    for call in calls:
        city = json.loads(call.arguments)["city"]
        talk.append({"type": "function_call_output", "call_id": call.call_id, "output": f"{city}: 20 degrees"})
print(said.output_text)
"""
MESSAGES = """\
import sys
from anthropic import Anthropic

tools = [{"name": "weather", "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
talk = [{"role": "user", "content": sys.stdin.read()}]
while True:
    said = Anthropic().messages.create(model="any", max_tokens=500, system="Be short.", messages=talk, tools=tools)
    if said.stop_reason != "tool_use":
        break
    talk.append({"role": "assistant", "content": said.content})
    talk.append({"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"{block.input['city']}: 20 degrees"}
        for block in said.content if block.type == "tool_use"]})
print(said.content[0].text)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with place() as directory:
        task = {"task_id": "t", "question": QUESTION, "answer": "20 and 20"}
        (directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        yield directory


def group_of(home: Path) -> dict[str, Any]:
    (group,) = lines(home / "run" / "groups.jsonl")
    return group


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(CHAT, id="chat", marks=pytest.mark.long),
        pytest.param(RESPONSES, id="responses", marks=pytest.mark.long),
        pytest.param(MESSAGES, id="messages"),
    ],
)
async def test_a_program_that_calls_tools_keeps_one_line_of_sampled_ids(home: Path, program: str) -> None:
    (home / "program.py").write_text(f"TOOL = {TOOL!r}\n{program}")
    with scripted_endpoint({QUESTION: [[CALLS, "20 and 20"]]}, "--dialect", "vllm") as endpoint:
        ended = await run(*flags(home, endpoint.base_url, agent="program:program.py"), directory=home)
    assert ended.code == 0, ended.stderr
    group, tokenizer = group_of(home), load_tokenizer(str(tokenizer_folder()))
    for tokens, mask, messages, facts in zip(
        group["tokens"], group["masks"], group["messages"], group["overrides"], strict=True
    ):
        assert (facts["outcome"], facts["answer"], facts["token_source"]) == ("finished", "20 and 20", "sampled")
        assert facts["segments"] == 1
        trained = tokenizer.decode([token for token in mask if token != -100])
        assert trained.replace("<|im_end|>", "") == CALLS + "20 and 20"
        assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "tool", "assistant"]
        assert messages[2]["content"] == CALLS
        assert messages[3]["content"].startswith("Rome")
        assert tokenizer.decode(tokens).count("<tool_response>") == 2
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, checked.stdout


@pytest.mark.docker
async def test_the_example_calls_its_tool_in_a_container(home: Path) -> None:
    agent = ROOT / "examples" / "agents" / "tools.py"
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'
    said = [call.replace('"code"', '"program"'), call, "It is\n20 and 20"]
    with scripted_endpoint({QUESTION: [said]}, "--dialect", "vllm") as endpoint:
        given = flags(home, endpoint.base_url, launcher="docker", agent=f"program:{agent}")
        ended = await run(*given, directory=home)
    assert ended.code == 0, ended.stderr
    for facts, messages in zip(group_of(home)["overrides"], group_of(home)["messages"], strict=True):
        assert (facts["answer"], facts["segments"], facts["steps"]) == ("20 and 20", 1, 3)
        seen = [message["content"] for message in messages if message["role"] == "tool"]
        assert seen == ['Call python with {"code": "..."}.', "42\n"]
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, checked.stdout


async def test_calls_of_an_endpoint_without_ids_are_text_of_the_model_s_format(home: Path) -> None:
    (home / "program.py").write_text(f"TOOL = {TOOL!r}\n{CHAT}")
    with scripted_endpoint({QUESTION: [[CALLS, "20 and 20"]]}, "--dialect", "openai") as endpoint:
        ended = await run(*flags(home, endpoint.base_url, agent="program:program.py"), directory=home)
    assert ended.code == 0, ended.stderr
    for mask, facts in zip(group_of(home)["masks"], group_of(home)["overrides"], strict=True):
        assert (facts["outcome"], facts["token_source"]) == ("finished", "retokenized")
        tokenizer = load_tokenizer(str(tokenizer_folder()))
        trained = tokenizer.decode([token for token in mask if token != -100])
        assert trained == CALLS.replace("  ", " ") + "20 and 20"  # the endpoint told what it read of the calls
    checked = await run(str(home / "run"), directory=home, command="verify")
    assert checked.code == 0, checked.stdout


async def test_what_an_endpoint_cannot_do_is_a_400_that_says_so(home: Path) -> None:
    (home / "program.py").write_text(
        "from openai import OpenAI, BadRequestError\n"
        "client = OpenAI()\n"
        "try:\n"
        "    client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}],\n"
        "        response_format={'type': 'json_object'})\n"
        "except BadRequestError as error:\n"
        "    said = error.body['message']\n"
        "client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'x'}])\n"
        "print(said)\n"
    )
    with scripted_endpoint({}, "--dialect", "atropos", default="yes") as endpoint:
        ended = await run(*flags(home, endpoint.base_url, agent="program:program.py"), directory=home)
    assert ended.code == 0, ended.stderr
    (answer,) = {facts["answer"] for facts in group_of(home)["overrides"]}
    assert "cannot keep to a json_object" in answer
