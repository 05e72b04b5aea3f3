"""Checks of finished training data: every group against itself and against the run's own record.

Pure over parsed lines; `commands/verify.py` reads the files and prints the table. Each check has a
name and counts what it looked at, so that a check that never applied is seen as such.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.types import EndedName
from orchestrator.writers import MASKED, MASKED_LOGPROB

CHECKS: dict[str, str] = {
    "shape": "every field has one entry per rollout, every list one per token",
    "mask": "masks are -100 or the token's own id",
    "trained": "every trajectory has something to train on",
    "logprob": "log-probs are finite and at most 0 where trained, 1.0 where masked",
    "score": "scores are finite and in [0, 1]",
    "outcome": "only outcomes that are scored; each rollout once in the file",
    "messages": "one system message first, roles and texts as they must be",
    "size": "all groups have the size they say",
    "sampled ids": "trained ids are the sampled ids, in order (against rollouts.jsonl)",
    "sampled log-probs": "trained log-probs are the endpoint's (against rollouts.jsonl)",
    "one line": "prompts and samples make the tokens, nothing between (against rollouts.jsonl)",
}
_SCORED = frozenset(str(name) for name in EndedName)
_ROLES = frozenset(("system", "user", "assistant", "tool"))


@dataclass(slots=True)
class Findings:
    """What was looked at and what was wrong, by check."""

    checked: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    groups: int = 0
    rollouts: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)

    def check(self, name: str, good: bool, where: str) -> bool:
        """Counts one look; `where` is kept when it was wrong."""
        self.checked[name] += 1
        if not good:
            self.wrong.setdefault(name, []).append(where)
        return good

    @property
    def violations(self) -> int:
        """How many looks were wrong."""
        return sum(len(places) for places in self.wrong.values())


def check_group(
    group: Mapping[str, Any], where: str, findings: Findings, rollouts: Mapping[str, Mapping[str, Any]]
) -> None:
    """One line of a groups file. `rollouts`: lines of rollouts.jsonl by rollout_id, empty without them."""
    findings.groups += 1
    tokens = group.get("tokens")
    if not findings.check("shape", isinstance(tokens, list) and bool(tokens), f"{where}: no tokens"):
        return
    assert isinstance(tokens, list)
    size = len(tokens)
    per_rollout = {
        name: group.get(name) for name in ("masks", "scores", "inference_logprobs", "overrides", "messages")
    }
    for name, values in per_rollout.items():
        optional = values is None and name in ("inference_logprobs", "messages")
        if not findings.check(
            "shape", optional or (isinstance(values, list) and len(values) == size), f"{where}: {name}"
        ):
            return
    said = (group.get("group_overrides") or {}).get("group_size", size)
    findings.check("size", said == size, f"{where}: {size} rollouts, it says {said}")
    for index in range(size):
        facts = per_rollout["overrides"][index] or {}  # type: ignore[index]
        place = f"{where}, {facts.get('rollout_id', index)}"
        member = {name: values[index] if values is not None else None for name, values in per_rollout.items()}
        _check_member(tokens[index], member, facts, place, findings)
        record = rollouts.get(str(facts.get("rollout_id")))
        if record is not None and facts.get("token_source") == "sampled":
            _check_record(tokens[index], member, record, place, findings)


def _check_member(
    tokens: Any, member: Mapping[str, Any], facts: Mapping[str, Any], where: str, findings: Findings
) -> None:
    findings.rollouts += 1
    findings.sources[str(facts.get("token_source"))] += 1
    mask, logprobs, score = member["masks"], member["inference_logprobs"], member["scores"]
    ids = isinstance(tokens, list) and all(type(t) is int and t >= 0 for t in tokens)
    same = ids and isinstance(mask, list) and len(mask) == len(tokens)
    if findings.check("shape", same, f"{where}: ids and mask"):
        findings.check("mask", all(m in (MASKED, t) for t, m in zip(tokens, mask, strict=True)), where)
        if facts.get("token_source") != "none":
            findings.check("trained", any(m != MASKED for m in mask), where)
        if logprobs is not None and findings.check("shape", len(logprobs) == len(tokens), f"{where}: log-probs"):
            findings.check("logprob", all(map(_logprob_fits, logprobs, mask)), where)
    number = isinstance(score, int | float) and math.isfinite(score) and 0 <= score <= 1
    findings.check("score", number, f"{where}: {score}")
    rollout_id = f"{facts.get('rollout_id')} {facts.get('segment', 0)}"
    fresh = rollout_id not in findings.seen
    findings.seen.add(rollout_id)
    findings.check("outcome", fresh and facts.get("outcome") in _SCORED, f"{where}: {facts.get('outcome')}")
    if member["messages"] is not None:
        findings.check("messages", _messages_fit(member["messages"]), where)


def _logprob_fits(logprob: Any, mask: Any) -> bool:
    if not isinstance(logprob, int | float) or not math.isfinite(logprob):
        return False
    return logprob == MASKED_LOGPROB if mask == MASKED else logprob <= 0.0


def _messages_fit(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    if not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") in _ROLES for m in messages
    ):
        return False
    return [m["role"] for m in messages].count("system") == 1 and messages[0]["role"] == "system"


def _check_record(
    tokens: Sequence[int], member: Mapping[str, Any], record: Mapping[str, Any], where: str, findings: Findings
) -> None:
    """Against what the proxy served: every completion of the one segment these tokens are."""
    mask, logprobs = member["masks"], member["inference_logprobs"]
    trained = [m for m in mask if m != MASKED]
    for segment in sorted({c["segment"] for c in record["completions"]}):
        turns = [c for c in record["completions"] if c["segment"] == segment]
        line = [i for c in turns for i in (*(c["prompt_ids"] or ()), *(c["token_ids"] or ()))]
        if line != list(tokens):
            continue
        findings.check("one line", True, where)
        sampled = [i for c in turns for i in c["token_ids"]]
        # All masked: an outcome the operator asked not to train on.
        findings.check("sampled ids", not trained or trained == sampled, where)
        if logprobs is not None and trained:
            theirs = [p for c in turns for p in c["logprobs"]]
            ours = [p for p, m in zip(logprobs, mask, strict=True) if m != MASKED]
            findings.check("sampled log-probs", ours == theirs, where)
        return
    findings.check("one line", False, f"{where}: no segment of the record gives these tokens")
