"""Makes lines of rollouts.jsonl from a groups file, for the report of a groups file alone.

What a groups file does not hold (failed attempts, tool calls, times of single completions) is missing there.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.run.lenient import json_lines, mapping, objects, text
from orchestrator.run.lines import dumps


def write_rollouts(groups_file: Path, rollouts: Path) -> None:
    """Writes `rollouts` from `groups_file`. Blocks. Raises OSError on writing."""
    with rollouts.open("wb") as file:
        for number, (_, group) in enumerate(json_lines(groups_file)):
            file.writelines(_dumped(line) + b"\n" for line in rollout_lines(group or {}, number))


def _dumped(line: dict[str, Any]) -> bytes:
    try:
        return dumps(line)
    except TypeError:  # it is read deeper than it is written: counted as unreadable
        return b"{}"


def rollout_lines(group: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """One line per member of a group. `number`: the group's place in its file."""
    scores, talks = group.get("scores"), group.get("messages")
    for place, facts in enumerate(objects(group.get("overrides"))):
        if (facts.get("segment") or 0) != (facts.get("main_segment") or 0):
            continue  # a side line of a rollout whose main line is a member too
        talk = talks[place] if isinstance(talks, list) and place < len(talks) else None
        yield {
            **{name: facts.get(name) for name in ("task_id", "outcome", "answer", "score_parts", "token_source")},
            **{name: facts.get(name) for name in ("duration_s", "waiting_s")},
            "rollout_id": text(facts.get("rollout_id"), 200) or f"g{number:06d}-r{place:02d}",
            "group": number,
            "index": place,
            "attempt": 0,
            "score": scores[place] if isinstance(scores, list) and place < len(scores) else None,
            "plan": {"sampling": mapping(group.get("generation_params"))},
            "branch": {"parent": facts.get("parent"), "turn": facts.get("turn")},
            "completions": list(_completions(objects(talk), facts)),
        }


def _completions(talk: list[dict[str, Any]], facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One completion per assistant message. Token counts are known only in total; the first one gets them."""
    prompt: list[dict[str, Any]] = []
    answers = 0
    for message in talk:
        if message.get("role") != "assistant":
            prompt.append(message)
            continue
        counts = {"completion_tokens": facts.get("completion_tokens"), "prompt_tokens": facts.get("prompt_tokens")}
        yield {
            "kind": "action",
            "messages": prompt,
            "text": message.get("content"),
            **(counts if answers == 0 else {}),
        }
        answers += 1
        prompt = [message]
