"""Runs whose model has another chat template: what is refused, left out or dated there, from start to `verify`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from orchestrator.completion.tokenizer import load_tokenizer
from tests.fakes.inference import Call, ScriptedServer
from tests.fakes.inference.model import Model
from tests.fakes.runs import flags, lines, place, run
from tests.fakes.tokenizer import tokenizer_folder

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "refuses system messages": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + PLAIN,
    "repeats the system message": "{% set system = '' if messages[0].role == 'user' else messages[0].content %}"
    + PLAIN.replace("m in messages", "m in messages if m.role != 'system'").replace(
        "m.content", "(system if loop.last else '') + m.content"
    ),
    "takes parts alone": PLAIN.replace("m.content", "(m.content | map(attribute='text') | join)"),
    "says the date": "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %B %Y') + '.<|im_end|>\n' }}" + PLAIN,
}


def model_folder(home: Path, template: str) -> Path:
    folder = home / "model"
    shutil.copytree(tokenizer_folder(), folder)
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder


def two_turns(call: Call) -> str:
    """A step, then the answer."""
    said = sum(message.role == "assistant" for message in call.messages)
    return f"I add.\n<code>\n{'final_answer(42)' if said else 'print(6 * 7)'}\n</code>"


@pytest.mark.slow
@pytest.mark.parametrize("how", TEMPLATES)
async def test_a_run_with_such_a_template_is_trained_in_one_line_each(how: str) -> None:
    with place() as home:
        (home / "tasks.jsonl").write_text(json.dumps({"task_id": "t", "question": "6 * 7?", "answer": "42"}))
        folder = model_folder(home, TEMPLATES[how])
        async with ScriptedServer("vllm", two_turns, model=Model(folder)) as server:
            told = flags(home, server.base_url, tokenizer_name=folder, token_source="exact")
            ended = await run(*told, directory=home)
        assert ended.code == 0, ended.stderr
        checked = await run(str(home / "run"), directory=home, command="verify")
        assert checked.code == 0, checked.stdout
        (group,) = lines(home / "run" / "groups.jsonl")
        tokenizer = load_tokenizer(str(folder))
        assert min(group["scores"]) > 0.9
        for tokens, rollout in zip(group["tokens"], lines(home / "run" / "rollouts.jsonl"), strict=True):
            assert [turn["segment"] for turn in rollout["completions"]] == [0, 0]
            text = tokenizer.decode(tokens)
            assert text.count("You are an expert assistant") == text.count("New task:") == 1
            assert ("Today is" in text) == (how == "says the date")


SPEAKERS = """\
import json, os, urllib.request

talk = [{"role": "system", "content": "You two talk."}, {"role": "user", "content": "6 * 7?", "name": "Ann"}]
for speaker in ("Bob", None):
    body = json.dumps({"model": "any", "messages": talk}).encode()
    address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    talk += [{"role": "assistant", "content": said, "name": "solver"}]
    talk += [{"role": "user", "content": "Sure?", "name": speaker}]
open(os.environ["ANSWER_FILE"], "w").write("42")
"""


@pytest.mark.slow
@pytest.mark.parametrize("prints", [True, False])
@pytest.mark.parametrize("dialect", ["vllm", "openai"])
async def test_who_speaks_is_in_prompt_and_record_where_prompts_are_ours_and_the_template_says_it(
    prints: bool, dialect: str
) -> None:
    with place() as home:
        (home / "tasks.jsonl").write_text(json.dumps({"task_id": "t", "question": "6 * 7?", "answer": "42"}))
        (home / "program.py").write_text(SPEAKERS)
        template = PLAIN.replace("m.role +", "m.role + (' name=' + m.name if m.name else '') +")
        folder = model_folder(home, template if prints else PLAIN)
        async with ScriptedServer(dialect, lambda call: "42", model=Model(folder)) as server:
            told = flags(home, server.base_url, tokenizer_name=folder, agent="program:program.py")
            ended = await run(*told, directory=home)
        assert ended.code == 0, ended.stderr
        checked = await run(str(home / "run"), directory=home, command="verify")
        assert checked.code == 0, checked.stdout
        names = ["Ann", "Bob"] if prints and dialect == "vllm" else []
        tokenizer = load_tokenizer(str(folder))
        (group,) = lines(home / "run" / "groups.jsonl")
        for tokens, talk in zip(group["tokens"], group["messages"], strict=True):
            assert [message["name"] for message in talk if "name" in message] == names
            assert re.findall("name=([a-zA-Z]+)", tokenizer.decode(tokens)) == names
        for rollout in lines(home / "run" / "rollouts.jsonl"):
            assert rollout["unused_fields"] == ["messages[].name"]  # the assistant's at least
            assert [turn["segment"] for turn in rollout["completions"]] == [0, 0]
            talk = [message for turn in rollout["completions"] for message in turn["messages"]]
            assert [message["name"] for message in talk if "name" in message] == names


async def test_a_template_that_prints_nothing_of_a_text_ends_a_run_at_its_start() -> None:
    with place() as home:
        (home / "tasks.jsonl").write_text(json.dumps({"task_id": "t", "question": "6 * 7?", "answer": "42"}))
        folder = model_folder(home, PLAIN.replace("m.content", "m.text | default('')"))
        async with ScriptedServer("vllm", two_turns) as server:
            ended = await run(*flags(home, server.base_url, tokenizer_name=folder), directory=home)
            assert not server.log.completions
        assert ended.code == 3
        assert "prints nothing of a message of the role system; set --env.tokenizer_name" in ended.stderr
