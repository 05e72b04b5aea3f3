"""How well an episode went, whatever its answer: measured from the turns the proxy served.

    q = max(0, .20 format + .10 final_answer + .10 execution + .10 efficiency − length_penalty)

or by the weights of `env.combined_weights`:

    format          share of action turns in the agent's own form (`manners`): one code block, one tool call
    final_answer    1 when the episode finished and its last action turn calls `final_answer`
    execution       share of action turns whose code or call ran without an error
    efficiency      1 − (steps − 1) / (max_steps − 1) for a finished episode, else 0
    length_penalty  weight × (characters − 2000) / 1000 for a longer answer, at most .30

The weights and the penalty are the predecessor's. `record.steps` is not looked at: it is what the
sandbox tells, and a sandbox must not be able to raise its score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from orchestrator.scorers.base import COMBINED_WEIGHTS
from orchestrator.scorers.manners import gives_answer, well_formed
from orchestrator.types import CompletionKind, Ended, EndedName, Message, Record, RolloutPlan, conversations

WEIGHTS: Mapping[str, float] = {k: v for k, v in COMBINED_WEIGHTS.items() if k != "correctness"}
FREE_ANSWER_CHARS = 2000
MAX_LENGTH_PENALTY = 0.3

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
    # A managed agent's turns are its own; how well they went shows in what the main one makes of them.
    turns = [turn for turn in record.turns if turn.is_step]
    parts = dict.fromkeys(WEIGHTS, 0.0)
    if turns:
        parts["format"] = sum(well_formed(plan.agent, turn.completion) for turn in turns) / len(turns)
        parts["final_answer"] = float(finished and gives_answer(plan.agent, turns[-1].completion))
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


def _efficiency(steps: int, max_steps: int) -> float:
    return 1.0 if max_steps <= 1 else min(1.0, max(0.0, 1.0 - (steps - 1) / (max_steps - 1)))


def _ran_well(record: Record, finished: bool) -> int:
    """Action turns after which a later request brought an observation without an error.

    The last turn of a finished episode gave the answer and has no observation; of any other episode
    it is a step whose end nobody saw.
    """
    talks = conversations(record.turns)
    main = [(turn, talk) for turn, talk in zip(record.turns, talks, strict=True) if not turn.agent]
    good = 0
    for index, (turn, talk) in enumerate(main):
        if turn.kind is not CompletionKind.ACTION:
            continue
        if following := _messages_after(talk, [later for _, later in main[index + 1 :]]):
            good += not any(_is_error(m) for m in following if m.role in ("user", "tool"))
        else:
            good += finished
    return good


def _messages_after(seen: tuple[Message, ...], later: list[tuple[Message, ...]]) -> tuple[Message, ...]:
    """What the conversation got behind a turn; nothing behind the last one.

    Read off the next request that continues it (a plan in between asks with a conversation of its
    own), else off what the next request brought.
    """
    for talk in later:
        if talk[: len(seen)] == seen:
            return talk[len(seen) :]
    if not later:
        return ()
    pairs = enumerate(zip(seen, later[0], strict=False))
    kept = next((at for at, (one, other) in pairs if one != other), min(len(seen), len(later[0])))
    return later[0][kept:]


def _is_error(message: Message) -> bool:
    text = message.content
    if _ERROR.match(text):
        return True
    # Output printed before the error: both in one message where messages of one role are joined.
    return text.startswith("Observation:") and text.rstrip().endswith(_ADVICE) and bool(_ERROR_BELOW.search(text))
