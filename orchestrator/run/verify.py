"""Checks finished training data: every group by itself, against the run's settings and against its record.

Pure over parsed lines; `commands/verify.py` reads the files and prints the table. Each check has a name and counts
how often it was applied, so that one shows that never was.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from orchestrator.completion.base import Tokenizer, content_ids
from orchestrator.completion.trajectory import (
    TurnTalk,
    in_lines,
    main_segment,
    one_system,
    trajectory,
    untrained_share,
)
from orchestrator.errors import RecordError
from orchestrator.rules.forks import BranchRule
from orchestrator.run import verify_trees as trees
from orchestrator.run.groups import MASKED, MASKED_LOGPROB
from orchestrator.run.line import RecordedAttempt, read_attempt
from orchestrator.run.trees import own_from
from orchestrator.types import EndedName, Message

CHECKS: dict[str, str] = {
    "shape": "strict JSON; every field has one entry per rollout, every list one per token",
    "mask": "masks are -100 or the token's own id",
    "trained": "every trajectory has something to train on",
    "logprob": "log-probs are finite and at most 0 where trained, 1.0 where masked",
    "score": "scores are finite and in [0, 1]",
    "outcome": "only outcomes that are scored; each rollout once in the file",
    "messages": "one system message first, roles and texts as they must be and as served (against rollouts.jsonl)",
    "size": "every group has the size that it states and that was asked for (against the record, or run.json)",
    "record": "each rollout is on record once, with its task, outcome and score (against rollouts.jsonl)",
    "sampled ids": "trained ids are those sampled, or of the text sampled, in place (against rollouts.jsonl)",
    "sampled log-probs": "trained log-probs are the endpoint's (against rollouts.jsonl)",
    "lines": "weights and untrained shares are what was sampled in each line; the main one is the record's",
    "egress": "answers of the outside are on record, and their bodies are in egress/ by their hashes",
    "branch": "a branch's parent is there, its inherited turns are the parent's, and trained there alone",
    "advantages": "of groups with branches: those of the scores in the group, token by token",
    "one line": "prompts and samples make the tokens, nothing between (against rollouts.jsonl)",
}
_SCORED = tuple(str(name) for name in EndedName)  # no set: values looked up may be unhashable
_SOURCES = ("sampled", "retokenized", "none")
_ROLES = ("system", "user", "assistant", "tool")
_ROUNDING = 1e-9
_MOST = sys.float_info.max  # whole numbers in JSON may be larger than any float
_PER_ROLLOUT = ("masks", "scores", "inference_logprobs", "overrides", "messages")
_OPTIONAL = ("inference_logprobs", "messages")
Line = Mapping[str, Any]


SHOWN = 5  # places, of each check that failed


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the run's settings ask for, as far as they are known. `size`: of groups whose record does not say it;
    `least`: what is enough, if that is not the whole size."""

    size: int | None = None
    least: int | None = None
    untrained: frozenset[str] = frozenset()
    mixed_versions: bool = True
    trunk_masked: bool = False

    @classmethod
    def of(cls, env: Line) -> Wanted:
        """From the settings in run.json. Raises KeyError, TypeError, ValueError if they are invalid."""
        size = int(env["group_size"])
        kind, _, least = str(env["group_policy"]).partition(":")
        return cls(
            size=size,
            least=int(least) if kind == "partial" else None,
            untrained=frozenset(env["untrained_outcomes"]),
            mixed_versions=bool(env["train_mixed_versions"]),
            trunk_masked=BranchRule.masks_trunks(env),
        )

    def masks_all(self, facts: Line) -> bool:
        """Whether the whole rollout is to be masked."""
        mixed = not self.mixed_versions and facts.get("mixed_policy_versions") is True
        return mixed or str(facts.get("outcome")) in self.untrained


@dataclass(slots=True)
class Findings:
    """How often each check was applied, how often it failed, and where it failed first.

    `tokenizer` returns the run's, or None; called if ids were made from text. `body`: whether the run directory
    has the body of this hash, whole. `unread`: rollouts whose ids were
    not compared with their text, as there is no tokenizer.
    """

    wanted: Wanted = Wanted()
    checked: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, list[str]] = field(default_factory=dict)  # the first places
    groups: int = 0
    rollouts: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    seen: set[tuple[str, str]] = field(default_factory=set)
    tokenizer: Callable[[], Tokenizer | None] = lambda: None
    body: Callable[[str], bool] = lambda digest: False
    unread: int = 0

    def check(self, name: str, good: bool, where: str) -> bool:
        """Counts one check; `where` is kept if it failed."""
        self.checked[name] += 1
        if not good:
            self.failed[name] += 1
            places = self.wrong.setdefault(name, [])
            if len(places) < SHOWN:
                places.append(where)
        return good

    @property
    def violations(self) -> int:
        """How many checks failed."""
        return self.failed.total()


def check_group(group: Line, where: str, findings: Findings, rollouts: Mapping[str, bytes] | None) -> None:
    """Checks one line of a groups file.

    `rollouts`: the lines of rollouts.jsonl by rollout_id. None: there is no such file.
    """
    findings.groups += 1
    tokens = group.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        findings.check("shape", False, f"{where}: no tokens")
        return
    size = len(tokens)
    for name in _PER_ROLLOUT:
        values = group.get(name)
        fits = isinstance(values, list) and len(values) == size
        if not findings.check("shape", fits or (values is None and name in _OPTIONAL), f"{where}: {name}"):
            return
    wanted, shared = findings.wanted.size, trees.last_forks_in(group)
    members: dict[str, RecordedAttempt] = {}
    for index in range(size):
        member = {name: group[name][index] for name in _PER_ROLLOUT if group.get(name) is not None}
        facts = member["overrides"]
        if not isinstance(facts, Mapping):
            findings.check("shape", False, f"{where}, {index}: no facts")
            continue
        place = f"{where}, {facts.get('rollout_id', index)}"
        if not _check_member(tokens[index], member, facts, place, findings) or rollouts is None:
            continue
        text = rollouts.get(str(facts.get("rollout_id")))
        if not findings.check("record", text is not None, f"{place}: not in rollouts.jsonl") or text is None:
            continue
        try:
            recorded = read_attempt(text)
        except ValueError as error:
            findings.check("record", False, f"{place}: its line is not a rollout ({error})")
            continue
        wanted = recorded.group_size or wanted
        members[recorded.rollout_id] = recorded
        last_fork = shared.get(recorded.rollout_id, 1) if findings.wanted.trunk_masked else 1
        _check_record(tokens[index], member, facts, recorded, place, last_fork, findings)
        _check_crossings(recorded, place, findings)
        trees.check_branch(facts, recorded, rollouts, place, findings.check)
    _check_size(group, size, wanted, where, findings)
    if rollouts is not None:
        trees.check_advantages(group, members, where, findings.check, findings.tokenizer)


def _check_size(group: Line, size: int, wanted: int | None, where: str, findings: Findings) -> None:
    about = group.get("group_overrides")
    declared = about.get("group_size", size) if isinstance(about, Mapping) else size
    findings.check("size", declared == size, f"{where}: {size} rollouts, it says {declared}")
    if wanted is not None:
        least = findings.wanted.least or wanted
        findings.check("size", least <= size <= wanted, f"{where}: {size} rollouts, {wanted} were asked for")


def _check_member(tokens: Any, member: Line, facts: Line, where: str, findings: Findings) -> bool:
    """Checks one member by itself. Returns whether its lists can be compared with a record."""
    findings.rollouts += 1
    findings.sources[str(facts.get("token_source"))] += 1
    mask, score = member["masks"], member["scores"]
    ids = isinstance(tokens, list) and all(type(t) is int and t >= 0 for t in tokens)
    fits = ids and isinstance(mask, list) and len(mask) == len(tokens)
    if findings.check("shape", fits, f"{where}: ids and mask"):
        findings.check("mask", all(m in (MASKED, t) for t, m in zip(tokens, mask, strict=True)), where)
        if facts.get("token_source") != "none":
            learns = any(m != MASKED for m in mask)
            # A filtered or empty completion ended the rollout; it may have been the only one.
            empty = not learns and facts.get("outcome") == "no_answer"
            findings.check("trained", empty or learns != findings.wanted.masks_all(facts), where)
        if "inference_logprobs" in member:
            logprobs = member["inference_logprobs"]
            complete = isinstance(logprobs, list) and len(logprobs) == len(tokens)
            if findings.check("shape", complete, f"{where}: log-probs"):
                findings.check("logprob", all(map(_logprob_fits, logprobs, mask)), where)
            fits = fits and complete
    findings.check("score", _is_number(score) and 0 <= score <= 1, f"{where}: {score}")
    key = (str(facts.get("rollout_id")), str(facts.get("segment", 0)))
    fresh = key not in findings.seen
    findings.seen.add(key)
    outcome = facts.get("outcome")
    findings.check("outcome", fresh and outcome in _SCORED, f"{where}: {outcome if fresh else 'a second time'}")
    if "messages" in member:
        side = facts.get("segment", 0) != facts.get("main_segment", facts.get("segment", 0))
        findings.check("messages", _messages_fit(member["messages"], side=side), where)
    return fits


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST


def _logprob_fits(logprob: Any, mask: Any) -> bool:
    if not _is_number(logprob):
        return False
    return bool(logprob == MASKED_LOGPROB if mask == MASKED else logprob <= 0.0)


def _messages_fit(messages: Any, *, side: bool) -> bool:
    """Checks roles and texts. A `side` line need not begin with a system message: smolagents asks for a first plan
    without one."""
    if not isinstance(messages, list) or not messages:
        return False
    if not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and m.get("role") in _ROLES for m in messages
    ):
        return False
    roles = [m["role"] for m in messages]
    return "system" not in roles[1:] and (side or roles[0] == "system")


def _check_record(
    tokens: Sequence[int],
    member: Line,
    facts: Line,
    recorded: RecordedAttempt,
    where: str,
    last_fork: int,
    findings: Findings,
) -> None:
    """Checks one member against what the proxy served: every completion of the member's segment. Turns before
    `last_fork` are not trained."""
    written = (facts.get("task_id"), facts.get("outcome"), facts.get("answer"), member["scores"])
    score = recorded.score.value if recorded.score is not None else None
    expected = (recorded.task_id, str(recorded.outcome.name), recorded.record.answer, score)
    findings.check("record", written == expected, f"{where}: another task, outcome, answer or score")
    segment = facts.get("segment", 0)
    turns = [(turn, talk) for turn, talk in in_lines(recorded.record.turns) if turn.segment == segment]
    if not findings.check("record", bool(turns), f"{where}: no such segment"):
        return
    _check_lines(facts, recorded, where, findings)
    recorded = replace(recorded, record=own_from(recorded.record, last_fork))
    turns = [(turn, talk) for turn, talk in in_lines(recorded.record.turns) if turn.segment == segment]
    source = facts.get("token_source")  # decides what is compared
    own = recorded.token_source if segment == recorded.segment else None
    findings.check("record", source in _SOURCES and own in (None, source), f"{where}: another source of ids")
    sampled, masked = source == "sampled", findings.wanted.masks_all(facts)
    if "messages" in member:
        same_messages = _is_line if sampled else _is_last
        theirs = _as_messages(member["messages"])
        shown = [(turn, one_system(talk)) for turn, talk in turns]
        if theirs and theirs[0].role == "system" and shown[0][1] and shown[0][1][0].role != "system":
            theirs = theirs[1:]  # the template's own
        good = theirs is not None and same_messages(theirs, shown)
        findings.check("messages", good, f"{where}: not what was said")
    if source == "retokenized" and not masked:
        _check_text(tokens, member["masks"], turns, recorded, where, findings)
    if not sampled:
        return
    pairs = [(turn.prompt_ids or (), turn.completion.tokens_T or (), turn.inherited) for turn, _ in turns]
    findings.check("one line", [i for p, s, _ in pairs for i in (*p, *s)] == list(tokens), where)
    if masked:
        return
    trained = [m for p, s, theirs in pairs for m in (*[MASKED] * len(p), *([MASKED] * len(s) if theirs else s))]
    exact = findings.check("sampled ids", member["masks"] == trained, where)
    if exact and "inference_logprobs" in member:
        sampled_with = [p for turn, _ in turns if not turn.inherited for p in turn.completion.logprobs_T or ()]
        ours = [p for p, m in zip(member["inference_logprobs"], trained, strict=True) if m != MASKED]
        findings.check("sampled log-probs", ours == sampled_with, where)


def _check_crossings(recorded: RecordedAttempt, where: str, findings: Findings) -> None:
    """Checks what was asked of the outside: each has an answer or a reason, and kept bodies are there."""
    for one in recorded.record.crossings:
        place = f"{where}, request {one.sequence}"
        findings.check("egress", one.status is not None or bool(one.refusal), f"{place}: no answer and no reason")
        for digest in (one.sent_sha256, one.received_sha256) if one.kept else ():
            findings.check("egress", digest is not None and findings.body(digest), f"{place}: its body")


def _check_lines(facts: Line, recorded: RecordedAttempt, where: str, findings: Findings) -> None:
    """Checks which line is the main one, and how much of what was sampled is in this one. Groups files of earlier
    versions do not say how much."""
    turns, main, rule = recorded.record.turns, facts.get("main_segment"), recorded.agent.main_line
    right = recorded.segment is None or main in (None, recorded.segment)
    # Which request had the task's question is known to the data set alone.
    right = right and (rule == "question" or main == main_segment(turns, rule=rule))
    findings.check("lines", right, f"{where}: another main line")
    if "weight" not in facts:
        return
    weight, untrained = facts["weight"], facts.get("untrained_share", -1)
    fits = all(_is_number(part) and 0 <= part <= 1 for part in (weight, untrained))
    here = 1.0 - untrained_share(turns, facts.get("segment", 0))
    whole = any(turn.completion.sampled_tokens for turn in turns)
    fits = fits and (not whole or abs(weight * (1.0 - untrained) - here) < _ROUNDING)
    findings.check("lines", fits, f"{where}: weight and untrained share are not those of its tokens")


def _check_text(
    tokens: Sequence[int],
    mask: Sequence[int],
    turns: Sequence[TurnTalk],
    recorded: RecordedAttempt,
    where: str,
    findings: Findings,
) -> None:
    """Checks ids that were made from text: exactly the sampled text must be trained on."""
    learns = [m != MASKED for m in mask]
    runs = groupby(zip(tokens, learns, strict=True), key=lambda pair: pair[1])
    trained = [[token for token, _ in run] for learn, run in runs if learn]
    sampled = _texts_sampled(turns)
    tokenizer = findings.tokenizer()
    if tokenizer is None:
        findings.unread += 1
        findings.check("sampled ids", len(trained) == len(sampled), f"{where}: {len(trained)} texts are trained")
        return
    expected = [ids for text in sampled if (ids := content_ids(tokenizer, text))]
    findings.check("sampled ids", trained == expected, f"{where}: what is trained is not the text sampled")
    try:
        again = trajectory(recorded.record, tokenizer, recorded.agent.closing_tag, turns[0][0].segment)
    except RecordError as error:
        findings.check("one line", False, f"{where}: {error}")
        return
    same = (list(again.tokens_T), list(again.trained_T)) == (list(tokens), learns)
    findings.check("one line", same, f"{where}: the record makes another line")


def _texts_sampled(turns: Sequence[TurnTalk]) -> list[str]:
    """The part of each completion of a line, inherited ones left out, that the last conversation holds at its
    place: an agent may strip it, append something to it, or put other words in its place."""
    *earlier, (last, talk) = turns
    texts = []
    for turn, talk_before in earlier:
        message, text = talk[len(talk_before)], turn.completion.visible
        if message.role == "assistant" and not turn.inherited:
            forms = [form for form in (text, text.lstrip(), text.strip()) if message.content.startswith(form)]
            texts += [turn.completion.reasoning + max(forms, key=len)] if forms else []
    own = [] if last.inherited else [last.completion.reasoning + last.completion.visible]
    return [text for text in (*texts, *own) if text]


def _as_messages(value: Any) -> list[Message] | None:
    """The messages; None if they are invalid or hold more than a role, a text and a name."""
    try:
        return [Message(**m) for m in value if isinstance(m["content"], str)]
    except (TypeError, KeyError, ValueError):
        return None


def _is_line(messages: Sequence[Message], turns: Sequence[TurnTalk]) -> bool:
    """Whether `messages` are the last conversation with the sampled texts as this line's assistant messages."""
    expected: list[Message | None] = [*turns[-1][1], None]
    closings = [following.closing for following, _ in turns[1:]] + [""]
    for (turn, before), closing in zip(turns, closings, strict=True):
        place, text = len(before), turn.completion.text
        if place >= len(messages) or place >= len(expected) or messages[place].role != "assistant":
            return False
        content = messages[place].content
        if not content.endswith(closing) or not content.startswith(turn.opening):
            return False
        body = content.removeprefix(turn.opening).removesuffix(closing)
        # The message may lack the token that ends a turn.
        if not text.startswith(body) or len(body) < turn.completion.reasoning_chars + len(turn.completion.visible):
            return False
        expected[place] = messages[place]
    return list(messages) == expected


def _is_last(messages: Sequence[Message], turns: Sequence[TurnTalk]) -> bool:
    """Whether `messages` are the last conversation and its answer, which may have a code tag appended."""
    turn, talk = turns[-1]
    if not messages:
        return False
    *before, answer = messages
    begins = answer.content.startswith(turn.completion.reasoning + turn.completion.visible)
    return _with_reasoning(talk, turns[:-1]) == before and answer.role == "assistant" and begins


def _with_reasoning(talk: Sequence[Message], turns: Sequence[TurnTalk]) -> list[Message]:
    """The conversation with the reasoning of each completion in front of the text that the agent got."""
    messages = list(talk)
    for turn, before in turns:
        place = len(before)
        if place < len(messages) and messages[place].content.startswith(turn.completion.visible.strip()):
            messages[place] = Message(messages[place].role, turn.completion.reasoning + messages[place].content)
    return messages
