"""The rows of the page: what it shows of each attempt and each group without their details. Pure."""

import re
from itertools import islice

from orchestrator.report.outside import outside_counts
from orchestrator.report.totals import MOST_ERRORS, Row
from orchestrator.run.lenient import count, mapping, number, numbers, objects, text
from orchestrator.types import is_solved

MAX_PARTS = 100  # of a score, that are shown
MAX_CONTINUED = 20  # sandboxes of one rollout that were lost
MAX_WAITS = 100  # of one kind and rollout, shown in the time line
_MOST_ERROR_CHARS = 4000
_OF_CODE = "AgentExecutionError"  # smolagents' name for whatever the model's code raised
_EXCEPTION = re.compile(
    r"^[ \t]*(?:[\w.]+\.)?(\w*(?:Error|Exception|Warning|Interrupt|Exit|Iteration))\b:?[ \t]*(.*)", re.M
)
_MODULE = re.compile(r"No module named '([\w.]{1,60})'")
_TIMES = ("started_at", "launch_s", "duration_s", "waiting_s", "cpu_s")


def group_row(line: Row, place: int) -> Row:
    """Of the group of that number, by a line of one of its attempts: what is known at first."""
    return {
        "number": place,
        "task": text(line.get("task_id"), 300),
        "level": text(line.get("level"), 40),
        "source": text(line.get("source"), 80),
        "question": "",
        "reference": None,
        "dropped": "",
        "written": False,
        "mixed": False,
        "divided": False,
    }


def rollout_row(line: Row, rollout_id: str, group: int) -> Row:
    """Of an attempt."""
    completions = objects(line.get("completions"))
    own = [completion for completion in completions if completion.get("inherited") is not True]
    branch = mapping(line.get("branch"))
    of_run = text(branch.get("run"), 200)
    score, parts = number(line.get("score")), numbers(line.get("score_parts"))
    failure = mapping(line.get("score_evidence")).get("failure")
    return {
        "id": rollout_id,
        "group": group,
        "index": count(line.get("index")),
        "attempt": count(line.get("attempt")),
        "outcome": text(line.get("outcome"), 60),
        "reason": text(line.get("reason") or failure, 500),
        "unscorable": failure is not None,
        "answer": None if line.get("answer") is None else text(line.get("answer"), 500),
        "score": score,
        "solved": score is not None and is_solved(score, parts),
        "parts": dict(islice(parts.items(), MAX_PARTS)),
        "token_source": text(line.get("token_source"), 20),
        **{name: number(line.get(name)) for name in _TIMES},
        "steps": sum(c.get("kind") == "action" and not c.get("agent") for c in completions),
        "tokens": _sum(own, "completion_tokens"),
        "prompt_tokens": _sum(own, "prompt_tokens"),
        "untrained": number(line.get("untrained_share")),
        "ungraded": bool(line.get("ungraded")),
        "counts": True,  # False: it is an attempt that lacked its score, graded: what it took was counted then
        "retries": _sum(own, "retries"),
        "calls": len(objects(line.get("tool_calls"))),
        "outside": outside_counts(line),
        "continued": [
            (
                *(count(one.get(name)) for name in ("turn", "tokens")),
                *(text(one.get(name), 300) for name in ("reason", "refused")),
            )
            for one in objects(line.get("continued"))[:MAX_CONTINUED]
        ],
        "node": text(line.get("node"), 80),
        "policy": _policy(own),
        "parent": "" if of_run else text(branch.get("parent"), 40),  # empty: not of its group
        "begun_in": f"{text(branch.get('parent'), 40)} of {of_run}" if of_run else "",
        "turn": count(branch.get("turn")),
        "errors": _errors(objects(line.get("steps"))),
        "waits": _waits(own, objects(line.get("tool_calls")), objects(line.get("crossings"))),
    }


def _policy(completions: list[Row]) -> str:
    """The newest weights that sampled for it; empty: unknown."""
    last = completions[-1] if completions else {}
    spans = objects(last.get("policy_spans"))
    return text(spans[-1].get("newest") if spans else last.get("policy_version"), 80)


def _errors(steps: list[Row]) -> dict[str, tuple[int, str]]:
    """Errors of steps by their kind, an exception's type and for imports its module: (in how many steps, the first
    text)."""
    errors: dict[str, tuple[int, str]] = {}
    for step in steps:
        whole, kind = text(step.get("error"), _MOST_ERROR_CHARS), text(step.get("error_type"), 80)
        example = whole.lstrip().partition("\n")[0]
        if kind == _OF_CODE and (raised := _EXCEPTION.findall(whole)):
            kind, example = raised[-1]
        if not kind:
            continue
        if kind == "ModuleNotFoundError" and (module := _MODULE.search(example)):
            kind += f" {module[1]}"
        times, first = errors.get(kind, (0, example[:200]))
        if times or len(errors) < MOST_ERRORS:
            errors[kind] = times + 1, first
    return errors


def _sum(completions: list[Row], name: str) -> int:
    return sum(count(c.get(name)) for c in completions)


def _waits(*kinds: list[Row]) -> list[tuple[int, int, int]]:
    """When the agent waited: (0 for a completion, 1 for a tool, 2 for the outside; begin, end in hundredths of a
    second)."""
    waits = []
    for kind, requests in enumerate(kinds):
        for one in requests[:MAX_WAITS]:
            begin, end = number(one.get("started_s")), number(one.get("ended_s"))
            if begin is not None and end is not None and 0 <= begin <= end:
                waits.append((kind, round(begin * 100), round(end * 100)))
    return sorted(waits, key=lambda wait: wait[1])


def question_of(line: Row) -> str:
    """The task as the agent got it: the first user message, without smolagents' first line."""
    for completion in objects(line.get("completions")):
        for message in objects(completion.get("messages")):
            if message.get("role") == "user":
                return text(message.get("content"), 2000).removeprefix("New task:\n")
    return ""
