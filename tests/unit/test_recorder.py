"""Recorded turns become one trajectory, or are refused: whatever does not add up is no training data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.completion.tokenizer import HubTokenizer, load_tokenizer
from orchestrator.completion.trajectory import UNTEMPLATED_NOTE, main_line, main_segment, trajectory
from orchestrator.errors import RecordError
from orchestrator.scorers.grade import grade
from orchestrator.types import (
    Attempt,
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    FailedName,
    Member,
    Message,
    Record,
    Trajectory,
    Turn,
    conversations,
)
from tests.fakes.plans import TALK, a_plan, an_agent
from tests.fakes.scorers import DirectScorer
from tests.fakes.tokenizer import tokenizer_folder

TAG = "</code>"
ACTION, PLAN = CompletionKind.ACTION, CompletionKind.PLAN


@pytest.fixture(scope="module")
def tokenizer() -> HubTokenizer:
    return load_tokenizer(str(tokenizer_folder()))


def sampled(tokenizer: HubTokenizer, text: str, logprob: float = -0.5) -> Completion:
    ids = tuple(tokenizer.encode(text))
    visible = text.removesuffix("<|im_end|>").partition(TAG)[0]
    return Completion(text, visible, "stop", ids, (logprob,) * len(ids), 1, len(ids))


def said(text: str) -> Completion:
    """What a chat endpoint gives."""
    return Completion(text, text, "stop", None, None, 1, 1)


def turn(completion: Completion, **changes: object) -> Turn:
    ids = None if completion.tokens_T is None else (1, 2, 3)
    base = Turn(1, ACTION, 0, TALK, 0, ids, "", completion, 0.0, 1.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def record(*turns: Turn) -> Record:
    return Record(0.0, turns=turns)


ANSWERED = (Message("assistant", f"one{TAG}"), Message("user", "Observation:\n1"))


def test_ids_log_probs_and_masks_are_those_that_went_in_and_came_out(tokenizer: HubTokenizer) -> None:
    first, second = sampled(tokenizer, f"one{TAG}", -0.25), sampled(tokenizer, "two<|im_end|>", -0.75)
    line = trajectory(
        record(turn(first), turn(second, sequence=2, kept=2, messages=ANSWERED, prompt_ids=(9,))), tokenizer, TAG
    )
    one, two = first.tokens_T or (), second.tokens_T or ()
    assert line.tokens_T == (1, 2, 3, *one, 9, *two)
    assert line.trained_T == (False,) * 3 + (True,) * len(one) + (False,) + (True,) * len(two)
    assert line.logprobs_T == (1.0,) * 3 + (-0.25,) * len(one) + (1.0,) + (-0.75,) * len(two)
    assert line.token_source == "sampled"
    # The end token is no part of what the assistant says.
    assert [m.content for m in line.messages] == [
        TALK[0].content,
        TALK[1].content,
        f"one{TAG}",
        "Observation:\n1",
        "two",
    ]


@pytest.mark.parametrize("logprob", [0.001, math.nan, -math.inf, math.inf])
def test_a_number_that_is_no_log_probability_is_refused(tokenizer: HubTokenizer, logprob: float) -> None:
    with pytest.raises(RecordError, match="no log-probability"):
        trajectory(record(turn(sampled(tokenizer, "one", logprob))), tokenizer, TAG)


def test_ids_that_do_not_decode_to_the_text_are_refused(tokenizer: HubTokenizer) -> None:
    other = replace(sampled(tokenizer, "one"), text="two")
    with pytest.raises(RecordError, match="do not decode"):
        trajectory(record(turn(other)), tokenizer, TAG)


def test_as_many_log_probs_as_ids_or_no_completion() -> None:
    with pytest.raises(ValueError, match="2 tokens but 1 log-probs"):
        Completion("x", "x", "stop", (1, 2), (-0.1,), 1, 2)


def test_nothing_served_is_no_trajectory(tokenizer: HubTokenizer) -> None:
    with pytest.raises(RecordError, match="no completion"):
        trajectory(record(), tokenizer, TAG)
    with pytest.raises(RecordError, match="no segment 3"):
        trajectory(record(turn(said("one"))), tokenizer, TAG, 3)


def test_ids_without_log_probs_are_trained_on_without(tokenizer: HubTokenizer) -> None:
    bare = replace(sampled(tokenizer, "one"), logprobs_T=None)
    line = trajectory(record(turn(bare)), tokenizer, TAG)
    assert (line.token_source, line.logprobs_T) == ("sampled", None)


QUESTION = TALK[1].content


def asked(text: str) -> tuple[Message, ...]:
    return (TALK[0], Message("user", text))


def test_the_main_line_is_the_one_that_begins_with_the_task(tokenizer: HubTokenizer) -> None:
    turns = (
        turn(said("plan"), segment=0, kind=PLAN),
        turn(said("warm-up"), segment=1, messages=asked("Are you there?")),
        turn(said("managed"), segment=2, agent="helper"),
        turn(said("first"), segment=3),
        turn(said("again"), segment=4),
        turn(said("aside"), segment=5, messages=asked("Say yes.")),
        turn(said("new plan"), segment=6, kind=PLAN),
    )
    assert main_segment(turns, QUESTION) == 3
    assert main_segment(turns, "another question") == 1
    assert main_segment(turns) == 1
    assert main_segment((turns[0], turns[2], turns[6]), QUESTION) == 0


def test_an_answer_that_says_the_question_begins_no_line() -> None:
    forged = (*asked("Go on."), Message("assistant", QUESTION), Message("user", "Well?"))
    turns = (turn(said("a"), segment=0, messages=forged), turn(said("b"), segment=1))
    assert main_segment(turns, QUESTION) == 1


def test_a_side_line_is_what_its_own_turns_are(tokenizer: HubTokenizer) -> None:
    turns = (turn(said("a"), segment=0), turn(said("b"), segment=1), turn(said("plan"), segment=2, kind=PLAN))
    side = trajectory(record(*turns), tokenizer, TAG, 2)
    assert side.segment == 2
    assert side.messages[-1] == Message("assistant", "plan")


def test_conversations_are_rebuilt_from_what_was_new_in_each() -> None:
    turns = (
        turn(said("a")),
        turn(said("b"), kept=2, messages=ANSWERED),
        turn(said("c"), kept=1, messages=ANSWERED[1:]),
    )
    assert list(conversations(turns)) == [TALK, (*TALK, *ANSWERED), (TALK[0], ANSWERED[1])]


def test_text_becomes_ids_whose_masks_cover_what_the_assistant_said(tokenizer: HubTokenizer) -> None:
    line = trajectory(record(turn(said("one")), turn(said("two"), kept=2, messages=ANSWERED)), tokenizer, TAG)
    learned = [t for t, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn]
    assert line.token_source == "retokenized"
    assert line.logprobs_T is None
    assert tokenizer.decode(learned) == "onetwo"
    assert tokenizer.decode(line.tokens_T) == tokenizer.render(line.messages, generation_prompt=False)


@pytest.mark.parametrize("text", ["one", f"one{TAG}", f"one{TAG}\n"])
def test_the_last_answer_has_one_closing_tag(tokenizer: HubTokenizer, text: str) -> None:
    line = trajectory(record(turn(said(text))), tokenizer, TAG)
    assert line.messages[-1].content.strip() == f"one{TAG}"


def test_an_observation_cannot_pass_for_the_assistant(tokenizer: HubTokenizer) -> None:
    """Whatever stands for the assistant's words while the template is rendered, a sandbox may print it too."""
    forged = "".join(f"{'1' * n}{i:06}" for n in range(18, 22) for i in range(6))
    talk = (ANSWERED[0], Message("user", f"Observation:\n{forged}"))
    line = trajectory(record(turn(said("one")), turn(said("two"), kept=2, messages=talk)), tokenizer, TAG)
    learned = [t for t, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn]
    assert tokenizer.decode(learned) == "onetwo"
    assert forged in tokenizer.decode(line.tokens_T)
    assert tokenizer.decode(line.tokens_T) == tokenizer.render(line.messages, generation_prompt=False)


def test_without_a_tokenizer_there_are_messages_and_nothing_to_train_on() -> None:
    line = trajectory(record(turn(said("one"))), None, TAG)
    assert (line.tokens_T, line.trained_T, line.token_source) == ((), (), "none")
    assert line.messages[-1] == Message("assistant", f"one{TAG}")


def trained(line: Trajectory, tokenizer: HubTokenizer) -> list[str]:
    """The text of each run of trained ids."""
    runs = itertools.groupby(zip(line.tokens_T, line.trained_T, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for learn, run in runs if learn]


FEW_SHOTS = (
    TALK[0],
    Message("user", "How much is 1 + 1?"),
    Message("assistant", "It is two."),
    Message("user", "How much is 6 × 7?"),
)


@pytest.mark.parametrize(
    ("first", "rest", "expected"),
    [
        # What a program wrote into its first request is nobody's sample.
        (FEW_SHOTS, (Message("assistant", "one"), Message("user", "go on")), ["one", "two"]),
        # Nor is what it puts in the place of what was sampled, or around it.
        (TALK, (Message("assistant", "forged"), Message("user", "go on")), ["two"]),
        (TALK, (Message("assistant", "I said: one"), Message("user", "go on")), ["two"]),
        (TALK, (Message("assistant", "one and more"), Message("user", "go on")), ["one", "two"]),
        (TALK, (Message("user", "one"), Message("assistant", "one"), Message("user", "go on")), ["two"]),
        # smolagents puts a plan into its own words, and asks for it on a line of its own.
        (
            (
                *TALK,
                Message("assistant", "Here are the facts I know:\n```\nplan\n```"),
                Message("user", "Proceed."),
            ),
            (Message("assistant", "one"), Message("user", "Observation:\n1")),
            ["one", "two"],
        ),
    ],
)
def test_only_what_was_sampled_is_trained_where_ids_are_made_from_text(
    tokenizer: HubTokenizer, first: tuple[Message, ...], rest: tuple[Message, ...], expected: list[str]
) -> None:
    turns = (turn(said("one"), messages=first), turn(said("two"), kept=len(first), messages=rest))
    line = trajectory(record(*turns), tokenizer, TAG)
    assert trained(line, tokenizer) == expected
    assert tokenizer.decode(line.tokens_T) == tokenizer.render(line.messages, generation_prompt=False)


def test_what_an_agent_stripped_is_trained_as_far_as_it_stands_there(tokenizer: HubTokenizer) -> None:
    talk = (Message("assistant", f"one\n{TAG}"), ANSWERED[1])
    line = trajectory(record(turn(said("\n one\n")), turn(said("two"), kept=2, messages=talk)), tokenizer, TAG)
    assert trained(line, tokenizer) == ["one\n", "two"]


def test_an_empty_answer_trains_nothing(tokenizer: HubTokenizer) -> None:
    talk = (Message("assistant", TAG), ANSWERED[1])
    line = trajectory(record(turn(said("")), turn(said("two"), kept=2, messages=talk)), tokenizer, TAG)
    assert trained(line, tokenizer) == ["two"]


def test_a_program_whose_code_asks_last_is_trained_on_its_task(tokenizer: HubTokenizer) -> None:
    """Model-written code shares the program's endpoint. Whatever it asks, the task's line carries the score."""
    plan = a_plan(agent=an_agent(kind="program"))
    first, aside = sampled(tokenizer, "one<|im_end|>"), sampled(tokenizer, "yes<|im_end|>")
    asides = (asked("Say yes."), asked("Say it again."), asked(f"And: {plan.task.question}"))
    turns = (turn(first), *(turn(aside, segment=n, messages=talk) for n, talk in enumerate(asides, 1)))
    line = main_line(plan, record(*turns), tokenizer)
    assert line.segment == 0
    assert line.messages == (*TALK, Message("assistant", "one"))
    with pytest.raises(RecordError, match="no completion"):
        main_line(plan, record(), tokenizer)


class Refusing:
    """A real tokenizer whose template refuses what `refuses` says, as a model's own may by `raise_exception`."""

    def __init__(self, tokenizer: HubTokenizer, refuses: Callable[[tuple[Message, ...]], bool]) -> None:
        self._tokenizer = tokenizer
        self._refuses = refuses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def dated(self, at: float) -> Refusing:
        return self

    def render(self, messages: tuple[Message, ...], *, generation_prompt: bool, tools: object = ()) -> str:
        if self._refuses(messages):
            raise RecordError("the model's chat template refuses the conversation: roles must alternate")
        return self._tokenizer.render(messages, generation_prompt=generation_prompt)


def printed(messages: tuple[Message, ...]) -> bool:
    return any("Observation" in message.content for message in messages)


async def test_a_conversation_the_template_refuses_is_scored_with_what_was_sampled_trained(
    tokenizer: HubTokenizer,
) -> None:
    refusing = Refusing(tokenizer, printed)
    odd = record(turn(said("one")), turn(said("two"), sequence=2, kept=2, messages=ANSWERED))
    line = trajectory(odd, refusing, TAG)
    learned = [t for t, learn in zip(line.tokens_T, line.trained_T, strict=True) if learn]
    assert (tokenizer.decode(learned), line.token_source, line.logprobs_T) == ("onetwo", "retokenized", None)
    whole = "".join(m.content for m in TALK) + f"one{TAG}Observation:\n1two"
    assert tokenizer.decode(line.tokens_T) == whole
    finished = Attempt(a_plan(), replace(odd, answer="42"), Ended(EndedName.FINISHED))
    member = await grade(finished, refusing, DirectScorer("correctness"))
    assert isinstance(member, Member)
    assert member.score.value == 1.0
    assert member.attempt.record.notes == (UNTEMPLATED_NOTE,)
    plain = await grade(finished, tokenizer, DirectScorer("correctness"))
    assert isinstance(plain, Member)
    assert plain.attempt.record.notes == ()


async def test_where_the_template_refuses_everything_it_is_the_template(tokenizer: HubTokenizer) -> None:
    refusing = Refusing(tokenizer, lambda messages: True)
    odd = Attempt(a_plan(), record(turn(said("one"))), Ended(EndedName.FINISHED))
    result = await grade(odd, refusing, DirectScorer("correctness"))
    assert isinstance(result, Attempt)
    assert result.outcome.name is FailedName.RECORD_ERROR
    assert "roles must alternate" in str(result.outcome)


async def test_an_error_nobody_thought_of_ends_one_rollout_and_not_the_run(tokenizer: HubTokenizer) -> None:
    def decode(ids: object) -> str:
        raise OverflowError("out of\nrange")

    broken = Refusing(tokenizer, printed)
    broken.decode = decode  # type: ignore[assignment]
    odd = Attempt(a_plan(), record(turn(sampled(tokenizer, "one"))), Ended(EndedName.FINISHED))
    result = await grade(odd, broken, DirectScorer("correctness"))
    assert isinstance(result, Attempt)
    assert "OverflowError: out of range" in str(result.outcome)
