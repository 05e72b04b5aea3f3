"""The heavy part of the report: one rollout step by step, and its tokens."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, get_args

from orchestrator.completion.base import Tokenizer
from orchestrator.report.outside import requests_shown, services_shown
from orchestrator.run.groups import MASKED
from orchestrator.run.lenient import count, mapping, number, numbers, objects, text, texts
from orchestrator.types import LeftOut

MAX_TOKENS = 32_768
MAX_GROWN = 100_000
LEFT_OUT = get_args(LeftOut)


def rollout_details(line: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of one line of rollouts.jsonl besides its row, without tokens."""
    plan = mapping(line.get("plan"))
    return {
        "code_tags": _code_tags(mapping(plan.get("agent"))),
        "sampling": numbers(plan.get("sampling")),
        "exit": _exit(mapping(mapping(line.get("sandbox")).get("exit"))),
        "notes": texts(line.get("notes")),
        "completions": [_completion(c, line.get("segment")) for c in objects(line.get("completions"))],
        "tool_calls": [_tool_call(c) for c in objects(line.get("tool_calls"))],
        "steps": [_step(s) for s in objects(line.get("steps"))],
        "requests": requests_shown(line.get("crossings")),
        "services": services_shown(line.get("services")),
        "changes": _changes(line.get("changes")),
        "grade": _grade(line.get("grade")),
        "step_grades": [
            {"name": text(one.get("name"), 200), "grade": grade}
            for one in objects(line.get("step_grades"))
            if (grade := _grade(one.get("grade"))) is not None
        ],
    }


def _grade(grade: object) -> dict[str, Any] | None:
    """What its grader found; None: it was not graded."""
    if not isinstance(grade, dict):
        return None
    return {
        "rewards": numbers(grade.get("rewards")),
        **{name: text(grade.get(name), 2000) for name in ("fault", "source", "scope")},
        "kept": texts(grade.get("kept")),
        "flags": texts(grade.get("flags")),
        "tests": [
            {"name": text(test.get("name"), 300), "outcome": text(test.get("outcome"), 20)}
            | {"detail": text(test.get("detail"), 1000)}
            for test in objects(grade.get("tests"))
        ],
        "stdout": text(grade.get("stdout")),
        "stderr": text(grade.get("stderr")),
        "duration_s": number(grade.get("duration_s")),
        "cpu_s": number(grade.get("cpu_s")),
    }


def _code_tags(agent: dict[str, Any]) -> list[str]:
    """Between which tags the model wrote code. Empty: its commands are calls, and the page shows the steps'."""
    if agent.get("kind") == "shell":
        return [] if agent.get("call_format") else ["```bash", "```"]
    tags = texts(agent.get("code_tags"), 40)
    return tags if len(tags) == 2 and all(tags) else ["<code>", "</code>"]


def _changes(changes: object) -> dict[str, Any] | None:
    """What it changed of its root; None: nothing was kept of that."""
    if not isinstance(changes, dict):
        return None
    return {
        "count": count(changes.get("count")),
        "size_bytes": count(changes.get("size_bytes")),
        "left_out": {why: count(n) for why, n in mapping(changes.get("left_out")).items() if why in LEFT_OUT},
        "files": [
            {
                "path": text(change.get("path"), 4096),
                "kind": text(change.get("kind"), 20),
                "size_bytes": count(change.get("size_bytes")),
                "mode": f"{count(change.get('mode')) & 0o777:o}",
                "diff": None if change.get("diff") is None else text(change["diff"]),
            }
            for change in objects(changes.get("changes"))
        ],
    }


def _exit(exit: dict[str, Any]) -> str:
    parts = [
        f"code {count(exit['exit_code'])}" if number(exit.get("exit_code")) is not None else "",
        "killed for memory" if exit.get("oom_killed") is True else "",
        text(exit.get("reason"), 300),
    ]
    return ", ".join(part for part in parts if part)


def _completion(completion: dict[str, Any], main: object) -> dict[str, Any]:
    """`main`: the rollout's main segment; None: unknown."""
    sampled, thought = text(completion.get("text")), count(completion.get("reasoning_chars"))
    return {
        "kind": text(completion.get("kind"), 20),
        "messages": [
            {"role": text(m.get("role"), 20), "content": text(m.get("content"))}
            for m in objects(completion.get("messages"))
        ],
        "segment": count(completion.get("segment")),
        "aside": main is not None and completion.get("segment") != main,
        "abandoned": completion.get("abandoned") is True,
        "inherited": completion.get("inherited") is True,
        "reasoning": sampled[:thought],
        "text": sampled[thought:],
        "finish_reason": text(completion.get("finish_reason"), 20),
        "tokens": count(completion.get("completion_tokens")),
        "prompt_tokens": count(completion.get("prompt_tokens")),
        "policy_version": _policies(completion),
        "started_s": number(completion.get("started_s")),
        "ended_s": number(completion.get("ended_s")),
        "retries": count(completion.get("retries")),
    }


def _policies(completion: dict[str, Any]) -> str:
    """Its policy version, or those of its parts: `7 (12 tokens), 7 to 8 (3 tokens)`."""
    parts = []
    for span in objects(completion.get("policy_spans"))[:20]:
        ends = [text(span.get(end), 80) or "?" for end in ("oldest", "newest")]
        version = ends[0] if ends[0] == ends[1] else " to ".join(ends)
        parts.append(f"{version} ({count(span.get('tokens'))} tokens)")
    return ", ".join(parts) or text(completion.get("policy_version"), 80)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": text(call.get("name"), 80),
        "arguments": text(call.get("arguments"), 8000),
        "output": None if call.get("output") is None else text(call["output"]),
        "error": None if call.get("error") is None else text(call["error"]),
        "started_s": number(call.get("started_s")),
        "ended_s": number(call.get("ended_s")),
    }


def _step(step: dict[str, Any]) -> dict[str, Any]:
    return {
        "step_number": count(step.get("step_number")),
        "code": text(step.get("code")),
        "observations": text(step.get("observations")),
        "error_type": text(step.get("error_type"), 80),
        "error": text(step.get("error")),
        "is_final_answer": step.get("is_final_answer") is True,
        "duration_s": number(step.get("duration_s")),
    }


class TokenTable:
    """Holds every (id, text) of the report once; token lines are indices into it.

    A token's text depends on its neighbours (a character made of several tokens, a leading space that some
    tokenizers print only inside a line). So its text is what it adds to the text of the tokens before it.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.entries: list[tuple[int, str | None]] = []
        self._tokenizer = tokenizer
        self._places: dict[tuple[int, str | None], int] = {}
        self._grown: dict[tuple[tuple[int, ...], tuple[int, ...]], str] = {}

    def member(self, group: dict[str, Any], place: int) -> dict[str, Any] | None:
        """The tokens of one member of a line of the groups file; None if there are none or they are invalid.

        `runs` are lengths: not trained, trained, not trained …; `logprobs` in thousandths, negated,
        one per trained token.
        """
        ids, masks = _column(group, "tokens", place), _column(group, "masks", place)
        if not ids or len(ids) != len(masks) or not all(_is_id(i) for i in ids):
            return None
        total, ids, masks = len(ids), ids[:MAX_TOKENS], masks[:MAX_TOKENS]
        logprobs = _column(group, "inference_logprobs", place)[:MAX_TOKENS]
        trained = [mask != MASKED for mask in masks]
        return {
            "total": total,
            "tokens": [self._entry(i, piece) for i, piece in zip(ids, self._pieces(ids), strict=True)],
            "runs": _runs(trained),
            "logprobs": [_thousandths(p) for p, t in zip(logprobs, trained, strict=True) if t]
            if len(logprobs) == len(ids)
            else None,
        }

    def _entry(self, token: int, piece: str | None) -> int:
        place = self._places.setdefault((token, piece), len(self.entries))
        if place == len(self.entries):
            self.entries.append((token, piece))
        return place

    def _pieces(self, ids: Sequence[int]) -> list[str | None]:
        if self._tokenizer is None:
            return [None] * len(ids)
        pieces: list[str | None] = []
        before = read = 0
        for place in range(len(ids)):
            piece = self._growth(tuple(ids[before:read]), tuple(ids[read : place + 1]))
            if piece.endswith("�") and place - read < 3:
                pieces.append("")  # an incomplete character; UTF-8 has four bytes at most
            else:
                pieces.append(piece)
                before, read = read, place + 1
        return pieces

    def _growth(self, before: tuple[int, ...], added: tuple[int, ...]) -> str:
        assert self._tokenizer is not None
        if (grown := self._grown.get((before, added))) is None:
            start = self._tokenizer.decode(before) if before else ""
            grown = self._tokenizer.decode(before + added)[len(start) :]
            if len(self._grown) >= MAX_GROWN:  # only random ids fill it, and these do not come again
                self._grown.clear()
            self._grown[before, added] = grown
        return grown


def _column(group: dict[str, Any], name: str, place: int) -> list[Any]:
    column = group.get(name)
    values = column[place] if isinstance(column, list) and place < len(column) else None
    return values if isinstance(values, list) else []


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _runs(trained: list[bool]) -> list[int]:
    runs = [len(list(run)) for _, run in groupby(trained)]
    return [0, *runs] if trained[0] else runs


def _thousandths(logprob: object) -> int | None:
    value = number(logprob)
    return round(-value * 1000) if value is not None and value <= 0 else None
