"""How well an episode went, apart from its answer: measured from the turns the proxy served.

    q = max(0, .20 format + .10 final_answer + .10 execution + .10 efficiency − length_penalty)

or by the weights of `env.combined_weights`:

    format          share of action turns in the agent's own form (`manners`): one code block, one tool call, or
                    calls in the model's own format
    final_answer    1 when the episode finished and its last action turn calls `final_answer`
    execution       share of action turns whose code or call ran without an error, a shell's last command with
                    exit code 0
    efficiency      1 − (steps − 1) / (max_steps − 1) for a finished episode, else 0
    length_penalty  weight × (characters − 2000) / 1000 for a longer answer, at most .30

The weights and the penalty are the predecessor's. `record.steps` is not used: the sandbox reports it, and must not
be able to raise its score.
"""

import re
from collections.abc import Mapping

from orchestrator.scorers.manners import gives_answer, well_formed
from orchestrator.scorers.weights import COMBINED_WEIGHTS
from orchestrator.types import (
    AgentSpec,
    CompletionKind,
    Ended,
    EndedName,
    Message,
    Record,
    RolloutPlan,
    conversations,
    shared,
)

WEIGHTS: Mapping[str, float] = {k: v for k, v in COMBINED_WEIGHTS.items() if k != "correctness"}
FREE_ANSWER_CHARS = 2000
MAX_LENGTH_PENALTY = 0.3

# smolagents writes an error after the call's id, if there was a call, and ends it with this advice. Printed output
# comes after "Observation:", so it cannot stand in the place of an error.
_ERROR = re.compile(r"(?:Call id: \S+\n)?Error:\n")
_ERROR_BELOW = re.compile(r"\n(?:Call id: \S+\n)?Error:\n")
_SUCCEEDED = re.compile(r"(?:^|\n)\[exit code 0\]\Z")
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
    # Turns of managed agents do not count; their success shows in the main agent's turns.
    turns = [turn for turn in record.turns if turn.is_step]
    parts = dict.fromkeys(WEIGHTS, 0.0)
    if turns:
        parts["format"] = sum(well_formed(plan.agent, turn) for turn in turns) / len(turns)
        parts["final_answer"] = float(finished and gives_answer(plan.agent, turns[-1]))
        parts["execution"] = _ran_well(plan.agent, record, finished) / len(turns)
        parts["efficiency"] = _efficiency(len(turns), plan.agent.max_steps) if finished else 0.0
    parts["length_penalty"] = length_penalty(record.answer, length_penalty_weight)
    weighted = sum(weights.get(name, 0.0) * parts[name] for name in WEIGHTS)
    parts["quality"] = max(0.0, weighted - parts["length_penalty"])
    return parts


def length_penalty(answer: str | None, weight: float) -> float:
    """The penalty for an answer of more than FREE_ANSWER_CHARS characters."""
    excess = len(answer or "") - FREE_ANSWER_CHARS
    return min(MAX_LENGTH_PENALTY, weight * excess / 1000) if excess > 0 else 0.0


def _efficiency(steps: int, max_steps: int) -> float:
    return 1.0 if max_steps <= 1 else min(1.0, max(0.0, 1.0 - (steps - 1) / (max_steps - 1)))


def _ran_well(agent: AgentSpec, record: Record, finished: bool) -> int:
    """How many action turns were followed, in a later request, by an observation without an error.

    The last turn has no observation. In a finished episode it gave the answer and counts; in any other its result
    is unknown, and it does not count.
    """
    is_error = _is_failure if agent.kind == "shell" else _is_error
    talks = conversations(record.turns)
    main = [(turn, talk) for turn, talk in zip(record.turns, talks, strict=True) if not turn.agent]
    good = 0
    for index, (turn, talk) in enumerate(main):
        if turn.kind is not CompletionKind.ACTION:
            continue
        if following := _messages_after(talk, [later for _, later in main[index + 1 :]]):
            good += not any(is_error(m) for m in following if m.role in ("user", "tool"))
        else:
            good += finished
    return good


def _messages_after(talk_so_far: tuple[Message, ...], later: list[tuple[Message, ...]]) -> tuple[Message, ...]:
    """The messages after a turn; none after the last one.

    They are taken from the next request that continues the turn's conversation (a plan in between has one of its
    own); if there is none, they are what the next request has in addition.
    """
    for talk in later:
        if talk[: len(talk_so_far)] == talk_so_far:
            return talk[len(talk_so_far) :]
    return later[0][shared(talk_so_far, later[0]) :] if later else ()


def _is_failure(message: Message) -> bool:
    """Whether a command of a shell agent failed, or could not be run."""
    return not _SUCCEEDED.search(message.content)


def _is_error(message: Message) -> bool:
    text = message.content
    if _ERROR.match(text):
        return True
    # Output was printed before the error, and both were joined into one message.
    return text.startswith("Observation:") and text.rstrip().endswith(_ADVICE) and bool(_ERROR_BELOW.search(text))
