"""How well an episode went, whatever its answer: measured from the turns the proxy served.

    q = max(0, .20 format + .10 final_answer + .10 execution + .10 efficiency − length_penalty)

or by the weights of `env.combined_weights`:

    format          share of action turns that are one code block in the agent's own tags
    final_answer    1 when the episode finished and its last action turn calls `final_answer`
    execution       share of action turns whose code ran without an error
    efficiency      1 − (steps − 1) / (max_steps − 1) for a finished episode, else 0
    length_penalty  weight × (characters − 2000) / 1000 for a longer answer, at most .30

The weights and the penalty are the predecessor's. `record.steps` is not looked at: it is what the
sandbox tells, and a sandbox must not be able to raise its score.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Mapping

from orchestrator.completion.recorder import conversations
from orchestrator.scorers.base import COMBINED_WEIGHTS
from orchestrator.types import Completion, CompletionKind, Ended, EndedName, Message, Record, RolloutPlan, Turn

WEIGHTS: Mapping[str, float] = {k: v for k, v in COMBINED_WEIGHTS.items() if k != "correctness"}
FREE_ANSWER_CHARS = 2000
MAX_LENGTH_PENALTY = 0.3

_MAX_PARSED_CHARS = 64 << 10
_MARKDOWN = ("```python", "```py")
# smolagents puts an error behind the call's id, if there was one, and ends it with this advice. What
# code prints comes below "Observation:" and therefore cannot stand where an error does.
_ERROR = re.compile(r"(?:Call id: \S+\n)?Error:\n")
_ERROR_BELOW = re.compile(r"\n(?:Call id: \S+\n)?Error:\n")
_ADVICE = "If you have retried several times, try a completely different approach."


def quality(
    plan: RolloutPlan,
    record: Record,
    ended: Ended,
    length_penalty_weight: float,
    weights: Mapping[str, float] = WEIGHTS,
) -> dict[str, float]:
    """The parts, each in [0, 1], and `quality`, in [0, sum of the weights]."""
    finished = ended.name is EndedName.FINISHED
    turns = [turn for turn in record.turns if turn.kind is CompletionKind.ACTION]
    parts = dict.fromkeys(WEIGHTS, 0.0)
    if turns:
        tags = plan.agent.code_tags
        parts["format"] = sum(code_block(t.completion, tags) is not None for t in turns) / len(turns)
        parts["final_answer"] = float(
            finished and calls_final_answer(code_run(turns[-1].completion.visible, tags))
        )
        parts["execution"] = _ran_well(record, finished) / len(turns)
        parts["efficiency"] = _efficiency(len(turns), plan.agent.max_steps) if finished else 0.0
    parts["length_penalty"] = length_penalty(record.answer, length_penalty_weight)
    weighted = sum(weights.get(name, 0.0) * parts[name] for name in WEIGHTS)
    parts["quality"] = max(0.0, weighted - parts["length_penalty"])
    return parts


def length_penalty(answer: str | None, weight: float) -> float:
    """What an answer over FREE_ANSWER_CHARS characters costs."""
    excess = len(answer or "") - FREE_ANSWER_CHARS
    return min(MAX_LENGTH_PENALTY, weight * excess / 1000) if excess > 0 else 0.0


def code_block(completion: Completion, tags: tuple[str, str]) -> str | None:
    """The code of an action that is exactly one closed block; None for every other action."""
    opening, closing = tags
    _, opened, rest = completion.visible.partition(opening)
    code, closed, after = rest.partition(closing)
    if not opened or opening in code or opening in after or not code.strip():
        return None
    return code if closed or _closed_by_stop(completion, closing) else None


def _closed_by_stop(completion: Completion, closing: str) -> bool:
    """Whether sampling ended at the closing tag, which is then cut off what the agent gets."""
    if completion.finish_reason != "stop":
        return False
    behind = completion.text.removeprefix(completion.visible)
    if closing in behind:
        return True
    # An endpoint without ids may not tell at which stop string it ended: then the doubt is the policy's.
    return completion.tokens_T is None and not behind


def code_run(visible: str, tags: tuple[str, str]) -> str:
    """The code smolagents takes from an action: its blocks, else a Markdown block, else everything."""
    if blocks := _blocks(visible, *tags):
        return "\n\n".join(blocks)
    for opening in _MARKDOWN:
        if blocks := _blocks(visible, opening, "\n```"):
            return "\n\n".join(blocks)
    return visible


def _blocks(text: str, opening: str, closing: str) -> list[str]:
    pieces = text.split(opening)[1:]
    return [piece.partition(closing)[0].strip() for piece in pieces]


def calls_final_answer(code: str) -> bool:
    """Whether `code` calls `final_answer`: in the code itself, not in a comment or a string."""
    if len(code) <= _MAX_PARSED_CHARS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the model's escape sequences are not ours to warn of
                tree = ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return _final_answer_among_tokens(code)
        return any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "final_answer"
            for node in ast.walk(tree)
        )
    return _final_answer_among_tokens(code)


def _final_answer_among_tokens(code: str) -> bool:
    """For code that is no Python as a whole, such as one with a stray line in it."""
    previous = ""
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if previous == "final_answer" and token.string == "(":
                return True
            previous = token.string if token.type == tokenize.NAME else ""
    except (tokenize.TokenError, SyntaxError, ValueError):
        return False
    return False


def _efficiency(steps: int, max_steps: int) -> float:
    return 1.0 if max_steps <= 1 else min(1.0, max(0.0, 1.0 - (steps - 1) / (max_steps - 1)))


def _ran_well(record: Record, finished: bool) -> int:
    """Action turns after which a later request brought an observation without an error.

    The last turn of a finished episode gave the answer and has no observation; of any other episode
    it is a step whose end nobody saw.
    """
    talks = conversations(record.turns)
    good = 0
    for index, turn in enumerate(record.turns):
        if turn.kind is not CompletionKind.ACTION:
            continue
        if following := _messages_after(record.turns, talks, index):
            good += not any(_is_error(m) for m in following if m.role in ("user", "tool"))
        else:
            good += finished
    return good


def _messages_after(turns: tuple[Turn, ...], talks: list[tuple[Message, ...]], index: int) -> tuple[Message, ...]:
    """What the conversation got behind turn `index`; nothing behind the last one.

    Read off the next request that continues it (a plan in between asks with a conversation of its
    own), else off what the next request brought.
    """
    seen = talks[index]
    for talk in talks[index + 1 :]:
        if talk[: len(seen)] == seen:
            return talk[len(seen) :]
    return turns[index + 1].messages if index + 1 < len(turns) else ()


def _is_error(message: Message) -> bool:
    text = message.content
    if _ERROR.match(text):
        return True
    # Output printed before the error: both in one message where messages of one role are joined.
    return text.startswith("Observation:") and text.rstrip().endswith(_ADVICE) and bool(_ERROR_BELOW.search(text))
