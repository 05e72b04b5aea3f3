"""Recorded turns to one token-level trajectory. Pure.

Only what the proxy served comes in here: nothing a sandbox says can add a trained token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.line import absent_marker
from orchestrator.completion.untemplated import demand_plain, untemplated
from orchestrator.errors import RecordError
from orchestrator.types import CompletionKind, Message, Record, Trajectory, Turn


def conversations(turns: tuple[Turn, ...]) -> list[tuple[Message, ...]]:
    """The whole conversation each turn was asked with, rebuilt from the differences recorded."""
    result: list[tuple[Message, ...]] = []
    previous: tuple[Message, ...] = ()
    for turn in turns:
        previous = (*previous[: turn.kept], *turn.messages)
        result.append(previous)
    return result


def main_segment(turns: tuple[Turn, ...]) -> int:
    """The segment that is trained on: the one of the main agent's last action turn, else of the last turn."""
    for turn in reversed(turns):
        if turn.kind is CompletionKind.ACTION and not turn.agent:
            return turn.segment
    return turns[-1].segment


def trajectory(
    record: Record, tokenizer: Tokenizer | None, closing_tag: str, segment: int | None = None
) -> Trajectory:
    """The trajectory of one segment (default: the main line). Raises RecordError when it does not add up."""
    turns = record.turns
    if not turns:
        raise RecordError("no completion was served")
    chosen = main_segment(turns) if segment is None else segment
    pairs = [
        (turn, talk) for turn, talk in zip(turns, conversations(turns), strict=True) if turn.segment == chosen
    ]
    if not pairs:
        raise RecordError(f"the record has no segment {chosen}")
    if all(turn.prompt_ids is not None and turn.completion.tokens_T is not None for turn, _ in pairs):
        return replace(_sampled(pairs, tokenizer), segment=chosen)
    messages = _said(pairs, closing_tag)
    if tokenizer is None:
        return Trajectory((), (), None, messages, "none", chosen)
    try:
        line = _retokenized(messages, tokenizer)
    except Exception:  # the template is a program that comes with the model: anything can come out of it
        demand_plain(tokenizer)
        line = untemplated(pairs, messages, tokenizer)
    return replace(line, segment=chosen)


def _sampled(pairs: list[tuple[Turn, tuple[Message, ...]]], tokenizer: Tokenizer | None) -> Trajectory:
    """Ids exactly as they went in and came out."""
    tokens: list[int] = []
    trained: list[bool] = []
    logprobs: list[float] = []
    exact = True
    for turn, _ in pairs:
        prompt, completion = turn.prompt_ids or (), turn.completion
        sampled = completion.tokens_T or ()
        if completion.logprobs_T is None:
            exact = False
        elif len(completion.logprobs_T) != len(sampled):
            raise RecordError(
                f"turn {turn.sequence}: {len(sampled)} ids but {len(completion.logprobs_T)} log-probs"
            )
        elif not all(map(math.isfinite, completion.logprobs_T)) or max(completion.logprobs_T, default=0.0) > 0.0:
            bad = [p for p in completion.logprobs_T if not math.isfinite(p) or p > 0.0]
            raise RecordError(f"turn {turn.sequence}: {bad[0]} is no log-probability")
        if tokenizer is not None and tokenizer.decode(sampled) != completion.text:
            raise RecordError(f"turn {turn.sequence}: the sampled ids do not decode to the sampled text")
        tokens += [*prompt, *sampled]
        trained += [False] * len(prompt) + [True] * len(sampled)
        logprobs += [1.0] * len(prompt) + list(completion.logprobs_T or (0.0,) * len(sampled))
    messages = _line_messages(pairs, tokenizer)
    return Trajectory(tuple(tokens), tuple(trained), tuple(logprobs) if exact else None, messages, "sampled")


def _line_messages(
    pairs: list[tuple[Turn, tuple[Message, ...]]], tokenizer: Tokenizer | None
) -> tuple[Message, ...]:
    """The line role by role: assistant messages hold what was sampled, not what the agent made of it."""
    last_turn, last_talk = pairs[-1]
    messages = list(last_talk)
    for (turn, talk), (following, _) in pairwise(pairs):
        messages[len(talk)] = Message("assistant", _without_end(turn, tokenizer) + following.closing)
    return (*messages, Message("assistant", _without_end(last_turn, tokenizer)))


def _without_end(turn: Turn, tokenizer: Tokenizer | None) -> str:
    tokens = turn.completion.tokens_T or ()
    if tokenizer is not None and tokens and tokenizer.is_end(tokens[-1]):
        return tokenizer.decode(tokens[:-1])
    return turn.completion.text


def _said(pairs: list[tuple[Turn, tuple[Message, ...]]], closing_tag: str) -> tuple[Message, ...]:
    """The last conversation and its answer, the code tag closed as the agent closes it in the others."""
    turn, talk = pairs[-1]
    text = turn.completion.visible
    if turn.kind is CompletionKind.ACTION and text and not text.strip().endswith(closing_tag):
        text += closing_tag
    return (*talk, Message("assistant", text))


def _retokenized(messages: tuple[Message, ...], tokenizer: Tokenizer) -> Trajectory:
    """Ids made from text: a marker stands for each assistant message, so masks are right by construction."""
    absent = absent_marker(messages)
    markers = {i: f"{absent}{i}end" for i, m in enumerate(messages) if m.role == "assistant"}
    marked = tuple(Message(m.role, markers.get(i, m.content)) for i, m in enumerate(messages))
    whole = tokenizer.render(marked, generation_prompt=False)
    start = 0
    tokens: list[int] = []
    trained: list[bool] = []
    for index, marker in markers.items():
        if (at := whole.find(marker, start)) < 0:
            raise RecordError("the chat template leaves an assistant message out")
        for text, learn in ((whole[start:at], False), (messages[index].content, True)):
            ids = tokenizer.encode(text)
            tokens += ids
            trained += [learn] * len(ids)
        start = at + len(marker)
    ids = tokenizer.encode(whole[start:])
    return Trajectory((*tokens, *ids), (*trained, *([False] * len(ids))), None, messages, "retokenized")
