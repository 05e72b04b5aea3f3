"""One attempt as an ATIF trajectory, the form in which Harbor keeps what an agent did. Pure.

Each completion is one step of the source `agent`; its metrics hold the ids of its whole prompt, the sampled ids
and their log-probs, where the endpoint gave them. What the next prompt adds behind it is its observation.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import orjson

from orchestrator.calls.parsed import ParsedText, parsed
from orchestrator.completion.trajectory import TurnTalk, in_lines, main_segment
from orchestrator.run.line import RecordedAttempt
from orchestrator.types import AgentSpec, Message, Turn

SCHEMA = "ATIF-v1.7"  # the first with trajectories in a trajectory; what 1.8 adds is audio
_SOURCES = {"system": "system", "user": "user", "assistant": "agent", "tool": "user"}
_NOTES = (
    "Observations are what the next prompt has behind a completion; `extra.role` says as whose words. Lines "
    "besides the main one are in subagent_trajectories."
)


_MOST_IDS = 10_000_000  # of all prompts together: each has all that came before it, and their sum is quadratic
_NO_PROMPTS = " The prompts' ids are left out: with each prompt as a whole they are too many."


def agent_name(attempt: RecordedAttempt) -> str:
    """Of the kind of agent that the rollout had."""
    return f"rollout-orchestrator-{attempt.agent.kind}"


def moment(unix_s: float) -> str | None:
    """In ISO 8601, UTC. None: it is in no year that a date has."""
    try:
        return datetime.fromtimestamp(unix_s, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None


def atif(attempt: RecordedAttempt, version: str, model: str | None) -> dict[str, Any] | None:
    """The trajectory of the main line, and in it those of the others. None: no completion was served, and a
    trajectory without a step is none. `version`: of what made the record."""
    turns = attempt.record.turns
    if not turns:
        return None
    main = main_segment(turns, rule=attempt.agent.main_line) if attempt.segment is None else attempt.segment
    lines: dict[int, list[TurnTalk]] = {main: []}
    for turn, talk in in_lines(turns):
        lines.setdefault(turn.segment, []).append((turn, talk))
    whole = sum(map(_prompt_ids, lines.values())) <= _MOST_IDS
    made = (_line(attempt, pairs, version, model, whole) for pairs in lines.values() if pairs)
    first, *others = made
    record = attempt.record
    return {
        **first,
        "notes": _NOTES if whole else _NOTES + _NO_PROMPTS,
        "final_metrics": {
            "total_prompt_tokens": record.prompt_tokens,
            "total_completion_tokens": record.sampled_tokens,
            "total_steps": len(first["steps"]),
        },
        **({"subagent_trajectories": others} if others else {}),
    }


def _prompt_ids(pairs: Iterable[TurnTalk]) -> int:
    """How many ids the prompts of a line have, each as a whole."""
    total = length = 0
    for turn, _ in pairs:
        length += len(turn.prompt_ids or ())
        total += length
        length += turn.completion.sampled_tokens
    return total


def _line(
    attempt: RecordedAttempt, pairs: Sequence[TurnTalk], version: str, model: str | None, whole: bool
) -> dict[str, Any]:
    """`whole`: whether prompts are given as ids."""
    segment, tools = pairs[0][0].segment, pairs[0][0].tools
    steps = [_context(message) for message in pairs[0][1]]
    steps += _answers(attempt.agent, attempt.record.started_at, pairs, whole)
    agent = {
        "name": agent_name(attempt),
        "version": version,
        **({"model_name": model} if model else {}),
        **({"tool_definitions": list(tools)} if tools else {}),
    }
    return {
        "schema_version": SCHEMA,
        "session_id": attempt.rollout_id,
        "trajectory_id": f"{attempt.rollout_id}-line-{segment}",
        "agent": agent,
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
    }


def _context(message: Message) -> dict[str, Any]:
    """A message of the first prompt. What is there of the assistant's was not sampled in this rollout."""
    source = _SOURCES[message.role]
    return {
        "source": source,
        "message": message.content,
        **({"llm_call_count": 0, "is_copied_context": True} if source == "agent" else {}),
        **({"extra": {"role": message.role}} if message.role == "tool" else {}),
    }


def _answers(
    agent: AgentSpec, started_at: float, pairs: Sequence[TurnTalk], whole: bool
) -> Iterator[dict[str, Any]]:
    """A step for each completion of a line."""
    line: list[int] | None = [] if whole else None
    behind = [following[len(talk) + 1 :] for (_, talk), (_, following) in pairwise(pairs)]
    for (turn, _), results in zip(pairs, [*behind, ()], strict=True):
        completion = turn.completion
        said = _said(turn, agent)
        at = moment(started_at + turn.ended_s)
        line = None if line is None or turn.prompt_ids is None else [*line, *turn.prompt_ids]
        metrics: dict[str, Any] = {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": completion.completion_tokens,
            "extra": {
                "sequence": turn.sequence,
                "kind": turn.kind,
                "finish_reason": completion.finish_reason,
                **({"policy_version": completion.policy_version} if completion.policy_version else {}),
            },
        }
        if completion.tokens_T is None:
            line = None
        else:
            metrics["completion_token_ids"] = completion.tokens_T
            if line is not None:
                metrics["prompt_token_ids"] = line
                line = [*line, *completion.tokens_T]
        if completion.logprobs_T is not None:
            metrics["logprobs"] = completion.logprobs_T
        yield {
            **({"timestamp": at} if at else {}),
            "source": "agent",
            "message": turn.opening + said.content,
            **({"reasoning_content": completion.reasoning} if completion.reasoning else {}),
            **(
                {"tool_calls": [_call(call.id, call.name, call.arguments) for call in said.calls]}
                if said.calls
                else {}
            ),
            **({"observation": {"results": _results(results, said)}} if results else {}),
            # Another rollout sampled what is inherited: it has its metrics.
            **({"is_copied_context": True} if turn.inherited else {"metrics": metrics}),
            "llm_call_count": int(not turn.inherited),
        }


def _said(turn: Turn, agent: AgentSpec) -> ParsedText:
    """What the agent got of a completion: text, and the calls in it."""
    text = turn.completion.visible
    if agent.call_format is None or not turn.tools:
        return ParsedText(text, ())
    return parsed(text, agent.call_format, turn.tools, turn.sequence)


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {"tool_call_id": identity, "function_name": name, "arguments": orjson.loads(arguments)}


def _results(messages: Sequence[Message], said: ParsedText) -> list[dict[str, Any]]:
    """Whose result a message is, is known only where there is one call and one result."""
    of_tools = [message for message in messages if message.role == "tool"]
    known = {"source_call_id": said.calls[0].id} if len(said.calls) == len(of_tools) == 1 else {}
    return [
        {**(known if message.role == "tool" else {}), "content": message.content, "extra": {"role": message.role}}
        for message in messages
    ]
