"""Recorded turns to one token-level trajectory. Pure.

Its only input is what the proxy was asked and what it served. Served completions are trained, in their place in
the line. Prompts are context, whatever the sandbox says about who wrote them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from orchestrator.completion.base import Tokenizer, all_finite, content_ids
from orchestrator.completion.line import learn_end
from orchestrator.completion.prompt_text import pieces
from orchestrator.completion.reasoning import reasoning_chars, without_empty
from orchestrator.completion.shape import implied_system
from orchestrator.errors import RecordError
from orchestrator.rules.policy import joined
from orchestrator.types import (
    CompletionKind,
    MainLine,
    Message,
    PolicySpan,
    Record,
    RolloutPlan,
    Tools,
    Trajectory,
    Turn,
    conversations,
    shared,
)

# A model may say what its template refuses to print (a turn of the end token alone, where empty turns are
# refused). The rollout is scored all the same, so that such a turn earns no second draw. What it sampled is
# trained.
UNTEMPLATED_NOTE = "the model's chat template refuses the conversation: its ids are those of its texts alone"
_PLAIN_TALK = (Message("user", "What is 1 + 1?"), Message("assistant", "2"))
TurnTalk = tuple[Turn, tuple[Message, ...]]  # a completion, and the whole conversation of its prompt


def in_lines(turns: Sequence[Turn]) -> list[TurnTalk]:
    """The completions that lines are made of: those that were given up only if there is no other."""
    pairs = list(zip(turns, conversations(turns), strict=True))
    return [one for one in pairs if not one[0].abandoned] or pairs


def main_segment(turns: Sequence[Turn], question: str = "", rule: MainLine = "question") -> int:
    """The segment that stands for the rollout where one line is wanted.

    By the rule `question` it is the segment of the main agent's first action turn that has the question in its
    conversation, else of its first action turn, else of the first turn.
    """
    pairs = in_lines(turns)
    pairs = [one for one in pairs if not one[0].inherited] or pairs
    own = [one for one in pairs if one[0].kind is CompletionKind.ACTION and not one[0].agent] or pairs
    match rule:
        case "longest":
            tokens = sampled_tokens([turn for turn, _ in own])
            return max(tokens, key=tokens.__getitem__)  # of equal ones the first
        case "first":
            return own[0][0].segment
        case "last":
            return own[-1][0].segment
        case "question":
            text = question.strip()
            begins = (t for t, talk in own if any(text in m.content for m in talk if m.role != "assistant"))
            return next(begins, own[0][0]).segment


def main_line(
    plan: RolloutPlan, record: Record, tokenizer: Tokenizer | None, segment: int | None = None
) -> Trajectory:
    """The main line's trajectory. `segment`: which line that is, if it is on record; None: the plan's rule
    decides. Raises RecordError for an inconsistent record."""
    if segment is None and record.turns:
        segment = main_segment(record.turns, plan.task.question, plan.agent.main_line)
    line = trajectory(record, tokenizer, plan.agent.closing_tag, segment)
    if line.messages and line.messages[0].role != "system":
        # A group's messages begin with one, and what the template printed is a part of the line.
        system = Message("system", implied_system(tokenizer.dated(record.started_at)) if tokenizer else "")
        line = replace(line, messages=(system, *line.messages))
    return line


def trajectory(
    record: Record, tokenizer: Tokenizer | None, closing_tag: str, segment: int | None = None
) -> Trajectory:
    """The trajectory of one segment (default: the main line). Raises RecordError for an inconsistent record."""
    turns = record.turns
    if not turns:
        raise RecordError("no completion was served")
    tokenizer = _of_then(tokenizer, record)
    chosen = main_segment(turns) if segment is None else segment
    pairs = [pairs for pairs in in_lines(turns) if pairs[0].segment == chosen]
    if not pairs:
        raise RecordError(f"the record has no segment {chosen}")
    return _trajectory(pairs, tokenizer, closing_tag)


def _of_then(tokenizer: Tokenizer | None, record: Record) -> Tokenizer | None:
    """The tokenizer with the date and the ends of turns that the rollout had."""
    if tokenizer is not None:
        for turn in record.turns:
            learn_end(tokenizer, turn.completion)
        tokenizer = tokenizer.dated(record.started_at)
    return tokenizer


def side_lines(
    record: Record, tokenizer: Tokenizer | None, closing_tag: str, main: int
) -> Iterator[tuple[int, Trajectory | RecordError]]:
    """(segment, trajectory, or why there is none) of all lines but the main one, by their numbers; without those
    that are all inherited."""
    tokenizer = _of_then(tokenizer, record)
    sides: dict[int, list[TurnTalk]] = {}
    for turn, talk in in_lines(record.turns):
        if turn.segment != main:
            sides.setdefault(turn.segment, []).append((turn, talk))
    for segment, pairs in sorted(sides.items()):
        if all(turn.inherited for turn, _ in pairs):
            continue
        try:
            yield segment, _trajectory(pairs, tokenizer, closing_tag)
        except RecordError as error:
            yield segment, error


def _trajectory(pairs: list[TurnTalk], tokenizer: Tokenizer | None, closing_tag: str) -> Trajectory:
    """The trajectory of one segment's turns."""
    chosen = pairs[0][0].segment
    if all(turn.prompt_ids is not None and turn.completion.tokens_T is not None for turn, _ in pairs):
        line = _sampled(pairs, tokenizer)
        return replace(line, segment=chosen, messages=one_system(line.messages))
    messages, spoken = _spoken(pairs, _said(pairs, closing_tag))
    if tokenizer is None:
        return Trajectory((), (), None, one_system(messages), "none", chosen)
    try:
        line = _retokenized(messages, spoken, tokenizer, pairs[-1][0].tools)
    except Exception:  # the template is a program that comes with the model: it may raise anything
        demand_plain(tokenizer)
        line = _untemplated(pairs, messages, tokenizer)
    return replace(line, segment=chosen, messages=one_system(line.messages))


def one_system(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages for those who take a system message as the first one only: later ones are the user's."""
    if all(message.role != "system" for message in messages[1:]):
        return messages
    later = (Message("user", m.content) if m.role == "system" else m for m in messages[1:])
    return (messages[0], *later)


def sampled_tokens(turns: Sequence[Turn]) -> Counter[int]:
    """How many tokens of each line were sampled; of lines that are all inherited nothing is said."""
    counts: Counter[int] = Counter()
    for turn, _ in in_lines(turns):
        if not turn.inherited:
            counts[turn.segment] += turn.completion.sampled_tokens
    return counts


def untrained_share(turns: Sequence[Turn], segment: int) -> float:
    """The share of the sampled tokens that is not in this line: untrained where it is the rollout's only one."""
    total = sum(turn.completion.sampled_tokens for turn in turns if not turn.inherited)
    return (total - sampled_tokens(turns)[segment]) / total if total else 0.0


def sampled_by(record: Record, line: Trajectory) -> tuple[PolicySpan, ...]:
    """Which policy versions sampled the line's completions, by their sampled tokens in order."""
    own = [turn for turn, _ in in_lines(record.turns) if not turn.inherited]
    turns = [turn for turn in own if turn.segment == line.segment]
    spans = [span for turn in turns for span in turn.completion.sampled_by]
    return joined(spans, sum(span.tokens for span in spans))


def _sampled(pairs: list[TurnTalk], tokenizer: Tokenizer | None) -> Trajectory:
    """The trajectory from the ids as they were sent and sampled."""
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
        elif not all_finite(completion.logprobs_T) or max(completion.logprobs_T, default=0.0) > 0.0:
            bad = [p for p in completion.logprobs_T if not math.isfinite(p) or p > 0.0]
            raise RecordError(f"turn {turn.sequence}: {bad[0]} is no log-probability")
        if tokenizer is not None and tokenizer.decode(sampled) != completion.text:
            raise RecordError(f"turn {turn.sequence}: the sampled ids do not decode to the sampled text")
        tokens += [*prompt, *sampled]
        trained += [False] * len(prompt) + [not turn.inherited] * len(sampled)
        of_sampled = [1.0] * len(sampled) if turn.inherited else completion.logprobs_T or (0.0,) * len(sampled)
        logprobs += [1.0] * len(prompt) + list(of_sampled)
    messages = _line_messages(pairs, tokenizer)
    return Trajectory(tuple(tokens), tuple(trained), tuple(logprobs) if exact else None, messages, "sampled")


def _line_messages(pairs: list[TurnTalk], tokenizer: Tokenizer | None) -> tuple[Message, ...]:
    """The line's messages. Assistant messages hold what was sampled, not what the agent made of it."""
    last_turn, last_talk = pairs[-1]
    messages = list(last_talk)
    for (turn, talk), (following, _) in pairwise(pairs):
        if len(talk) >= len(messages):
            raise RecordError(f"turn {turn.sequence}: the line's last conversation does not contain it")
        content = turn.opening + _without_end(turn, tokenizer) + following.closing
        messages[len(talk)] = Message("assistant", content)
    return (*messages, Message("assistant", last_turn.opening + _without_end(last_turn, tokenizer)))


def _without_end(turn: Turn, tokenizer: Tokenizer | None) -> str:
    completion = turn.completion
    said = completion.text
    if tokenizer is not None:
        said = tokenizer.said(completion.tokens_T or (), said)
    # An older version may have known fewer ends, and have given more to the agent.
    return said if len(said) >= completion.reasoning_chars + len(completion.visible) else completion.text


def _said(pairs: list[TurnTalk], closing_tag: str) -> tuple[Message, ...]:
    """The last conversation and its answer, with the closing code tag that the agent appends in earlier turns."""
    turn, talk = pairs[-1]
    text = turn.completion.visible
    codes = turn.kind is CompletionKind.ACTION and not turn.tools
    if codes and text and not text.strip().endswith(closing_tag):
        text += closing_tag
    return (*talk, Message("assistant", text))


def _spoken(
    pairs: list[TurnTalk], messages: tuple[Message, ...]
) -> tuple[tuple[Message, ...], dict[int, tuple[int, bool]]]:
    """(the messages with their reasoning; by its place, how many first characters of a message were sampled, and
    whether they are trained).

    Sampled is a message that begins with the completion given in its place, which the agent may have stripped.
    Text behind it is the agent's own. The reasoning, which the agent never got, is put back in front.
    """
    texts, sampled_chars = list(messages), {}
    for turn, talk in pairs:
        place, text = len(talk), turn.completion.visible
        if place < len(messages) and messages[place].role == "assistant":
            content, reasoning = messages[place].content, turn.completion.reasoning
            forms = [form for form in (text, text.lstrip(), text.strip()) if content.startswith(form)]
            if forms:
                texts[place] = Message("assistant", reasoning + content)
            chars = len(reasoning) + max(map(len, forms)) if forms else 0
            sampled_chars[place] = chars, not turn.inherited
    return tuple(texts), sampled_chars


def _retokenized(
    messages: tuple[Message, ...], spoken: Mapping[int, tuple[int, bool]], tokenizer: Tokenizer, tools: Tools
) -> Trajectory:
    """Ids made from text. `spoken`: as of `_spoken`. What was sampled is encoded apart also where it is inherited:
    all rows of a tree then have the same ids for it."""
    assistants = {i for i, message in enumerate(messages) if message.role == "assistant"}
    left = dict(spoken)
    tokens: list[int] = []
    trained: list[bool] = []
    printed = pieces(tokenizer, messages, assistants, generation_prompt=False, tools=tools)
    for place, piece in enumerate(printed):
        if piece.message is None:
            following = printed[place + 1].message if place + 1 < len(printed) else None
            reasons = following is not None and reasoning_chars(messages[following].content) > 0
            parts = [(tokenizer.encode(without_empty(piece.text) if reasons else piece.text), False)]
        else:
            end, learns = left.pop(piece.message, (0, False))
            texts = ((piece.text[:end], learns), (piece.text[end:], False))
            parts = [(content_ids(tokenizer, text), learn) for text, learn in texts if text]
        for ids, learn in parts:
            tokens += ids
            trained += [learn] * len(ids)
    if left:
        raise RecordError("the chat template leaves an assistant message out")
    return Trajectory(tuple(tokens), tuple(trained), None, messages, "retokenized")


def demand_plain(tokenizer: Tokenizer) -> None:
    """The control: raises RecordError where the template refuses a plain conversation too."""
    tokenizer.render(_PLAIN_TALK, generation_prompt=False)


def _untemplated(
    pairs: list[tuple[Turn, tuple[Message, ...]]], messages: tuple[Message, ...], tokenizer: Tokenizer
) -> Trajectory:
    """`pairs`: the line's turns, each with its conversation. `messages`: the trajectory's messages.

    Each turn gives the messages that the turn before did not have, then its sampled text, which alone is trained.
    Raises RecordError.
    """
    tokens: list[int] = []
    trained: list[bool] = []
    before: tuple[Message, ...] = ()
    answer = ""
    for turn, talk in pairs:
        new = [message.content for message in talk[shared(before, talk) :]]
        if answer and new:
            new[0] = new[0].removeprefix(answer)  # the agent sends back the completion it got
        before, answer = talk, turn.completion.visible
        said = turn.completion.reasoning + answer, not turn.inherited
        for text, learn in (*((text, False) for text in new), said):
            ids = content_ids(tokenizer, text)
            tokens += ids
            trained += [learn] * len(ids)
    return Trajectory(tuple(tokens), tuple(trained), None, messages, "retokenized", note=UNTEMPLATED_NOTE)
