"""The whole path for each family of chat templates: what the agent gets, the next prompt, the line, its checks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.line import visible_text
from orchestrator.completion.reasoning import opened_by
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.trajectory import main_line
from orchestrator.proxy.lease import Lease
from orchestrator.proxy.requests import AgentRequest
from orchestrator.run.groups import scored_data_group
from orchestrator.run.line import attempt_line
from orchestrator.run.verify import Findings, check_group
from orchestrator.types import Completion, CompletionKind, Group, Member, Message, Record, Score
from tests.fakes.chat_templates import FAMILIES, family
from tests.fakes.plans import TALK, a_plan, an_attempt, some_limits
from tests.unit.test_verify import plain, written

TAG = "</code>"
STARTED = 1_700_000_000.0  # 14 November 2023


class Sampler:
    """Samples what it is told to."""

    guides = True

    def __init__(self, tokenizer: HubTokenizer, texts: list[str], *, takes_ids: bool) -> None:
        self.takes_ids = takes_ids
        self._tokenizer = tokenizer
        self._texts = texts

    async def sample(self, request: CompletionRequest) -> Completion:
        ids = tuple(self._tokenizer.encode(self._texts.pop(0)))
        opened = opened_by(self._tokenizer.decode(tuple(request.prompt_ids or ())[-20:]))
        text, visible, thought = visible_text(self._tokenizer, ids, request.stop, opened)
        if not self.takes_ids:
            text = text[:thought] + visible
            return Completion(text, visible, "stop", None, None, 9, len(ids), reasoning_chars=thought)
        logprobs = (-0.5,) * len(ids)
        return Completion(text, visible, "stop", ids, logprobs, 9, len(ids), reasoning_chars=thought)

    async def aclose(self) -> None:
        """Nothing is open."""


async def conversation(
    tokenizer: HubTokenizer, texts: list[str], *, takes_ids: bool = True
) -> tuple[Lease, list[str], tuple[Message, ...]]:
    """An episode of smolagents' code agent: (its lease, what the agent got of each text, the conversation)."""
    sampler = Sampler(tokenizer, [*texts], takes_ids=takes_ids)
    lease = Lease(a_plan(limits=some_limits(completions=99)), sampler, tokenizer.dated(STARTED), {})
    talk, got = TALK, []
    for number in range(len(texts)):
        asked = AgentRequest(number + 1, CompletionKind.ACTION, talk)
        reply = await lease.complete(asked, str(number).encode())
        assert reply.completion is not None, reply
        got.append(reply.completion.visible)
        said = reply.completion.visible.strip()
        if "<code>" in said:
            said += TAG
        talk = (*talk, Message("assistant", said), Message("user", f"Observation:\n{number}"))
    return lease, got, talk


def checked(lease: Lease, tokenizer: HubTokenizer) -> tuple[str, str]:
    """(the line, what of it is trained), if `verify` finds nothing wrong."""
    attempt = replace(an_attempt(), record=Record(STARTED, turns=tuple(lease.turns), answer="42"))
    line = main_line(attempt.plan, attempt.record, tokenizer)
    member = Member(attempt, line, Score(1.0))
    group = plain(scored_data_group(Group(0, attempt.plan.task, (member,), (attempt,))))
    findings = Findings(tokenizer=lambda: tokenizer)
    rollouts = {attempt.plan.rollout_id: plain(attempt_line(member))}
    check_group(group, "line 1", findings, written(rollouts))
    assert findings.wrong == {}
    trained = [token for token, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn]
    return tokenizer.decode(line.tokens_T), tokenizer.decode(trained)


def printed(tokenizer: HubTokenizer, name: str, talk: tuple[Message, ...]) -> str:
    """The conversation as the family's template prints it, by itself."""
    told = FAMILIES[name]
    if told.folds:
        talk = (Message("user", f"{talk[0].content}\n\n{talk[1].content}"), *talk[2:])
    shown: list[dict[str, Any]] = [
        {"role": m.role, "content": [{"type": "text", "text": m.content}] if told.parts else m.content}
        for m in talk
    ]
    template = re.sub(r"strftime_now\(.(%[^)]*).\)", lambda call: dated(call[1]), told.template)
    text = tokenizer._tokenizer.apply_chat_template(
        shown, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return str(text)


def dated(format: str) -> str:
    return {"%Y-%m-%d": "'2023-11-14'", "%d %b %Y": "'14 Nov 2023'", "%d %B %Y": "'14 November 2023'"}[format]


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_conversation_is_one_line_as_the_template_prints_it(name: str) -> None:
    told, tokenizer = FAMILIES[name], family(name)
    tokenizer.demand_usable()
    end = told.ends or told.eos
    begins = told.begins
    sampled = [f"{begins}I add.\n<code>\nx = 1</code>", f"{begins}It is 42{end}", f"{begins}So 42{end}"]
    lease, got, talk = await conversation(tokenizer, sampled)
    assert [text.strip() for text in got] == ["I add.\n<code>\nx = 1", "It is 42", "So 42"]
    assert {turn.segment for turn in lease.turns} == {0}
    line, trained = checked(lease, tokenizer)
    assert trained == "".join(sampled)
    asked, expected = line.removesuffix(sampled[-1]), printed(tokenizer, name, talk[:-2])
    if told.printed or end not in expected:  # the model's own end stands where the template has another, or none
        asked = asked.replace(end, told.printed)
    assert asked == expected
    assert line.count(TALK[0].content) == 1


@pytest.mark.parametrize("name", FAMILIES)
async def test_ids_made_from_text_are_checked_on_another_day(name: str) -> None:
    told, tokenizer = FAMILIES[name], family(name)
    end = told.ends or told.eos
    sampled = [f"{told.begins}I add.\n<code>\nx = 1</code>", f"{told.begins}It is 42{end}"]
    lease, _, _ = await conversation(tokenizer, sampled, takes_ids=False)
    line, trained = checked(lease, tokenizer)
    assert "42" in trained
    assert line.count(TALK[0].content) == 1
