"""A run directory as `process` leaves it, made without a model or a sandbox, for tests of what reads one.

The ids come from the real token lines and the real recorder; only what was "sampled" is made up.
`python -m tests.fakes.synthetic_run DIRECTORY` writes one and its report.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.completion.base import Span, Tokenizer
from orchestrator.completion.line import TokenLine
from orchestrator.completion.trajectory import trajectory
from orchestrator.run import lines as jsonl
from orchestrator.run.groups import scored_data_group
from orchestrator.types import (
    Attempt,
    BadTask,
    Change,
    Completion,
    CompletionKind,
    Difference,
    Ended,
    EndedName,
    Failed,
    FailedName,
    Grade,
    Group,
    Member,
    Message,
    Outcome,
    Record,
    RolloutPlan,
    Sampling,
    SandboxExit,
    Score,
    Step,
    Task,
    TestResult,
    ToolCall,
    Tools,
    Turn,
)
from tests.fakes.plans import a_sandbox, an_agent, some_limits
from tests.fakes.written import write_run

CLOSING = "</code>"
SYSTEM = (
    "You are an expert assistant who can solve any task using code blobs.\n"
    "Write the code between <code> and </code>; print what you need; call final_answer at the end.\n"
) * 12
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"alert(1)\">"
    "<svg onload=alert(2)><!--<script>]]>&lt;\u2028\u2029 \x1b[31mred\x1b[0m \x00 nul "
    "\u202egnp.exe\u202c \u2066isolate\u2069 \u200bzero \ufeffbom \U000e0041tag \x07 \r\n"
    "Z\u0351\u0363\u0343a\u0316\u0317l\u0334\u0335g\u0321\u0322o שלום عالم 😀 {data}{script}"
)
CHANGES = Difference(
    (
        Change("/workspace/new.txt", "added", 6, 0o644, "@@ -0,0 +1,1 @@\n+hello"),
        Change(
            "/etc/hosts", "changed", 30, 0o600, "@@ -1,2 +1,2 @@\n 127.0.0.1 localhost\n-::1 localhost\n+::1 me"
        ),
        Change("/usr/bin/cc", "removed"),
    ),
    count=12,
    size_bytes=4036,
    left_out={"pipe": 2, "link": 1},
)
GRADE = Grade(
    {"reward": 0.5},
    source="reward.json",
    kept=("/",),
    tests=(TestResult("test_a", "passed"), TestResult("test_b", "failed", "assert 1 == 2")),
    flags=("2 processes were left running",),
    stdout="1 failed, 1 passed",
    duration_s=1.5,
    cpu_s=0.4,
)
ODD_GRADE = Grade(
    {HOSTILE: 1.0},
    HOSTILE,
    HOSTILE,
    kept=(HOSTILE,),
    tests=(TestResult(HOSTILE, "passed", HOSTILE),),
    flags=(HOSTILE,),
    stdout=HOSTILE,
    stderr=HOSTILE,
)
ODD_CHANGES = Difference((Change(HOSTILE, "added", 1, 0o777, HOSTILE + "\n" + HOSTILE),), 1, 1)
WORDS = re.compile(r"<\|\w+\|>| ?\w+|\s+|[^\w\s]")


class WordTokenizer:
    """Ids below 256 are bytes of UTF-8, the others ASCII words in the order they were first seen."""

    def __init__(self) -> None:
        self._words: list[str] = []
        self._ids: dict[str, int] = {}

    def encode(self, text: str, plain: Sequence[Span] = ()) -> list[int]:
        ids: list[int] = []
        for word in WORDS.findall(text):
            if not word.isascii():
                ids += word.encode("utf-8", "replace")
                continue
            if word not in self._ids:
                self._ids[word] = 256 + len(self._words)
                self._words.append(word)
            ids.append(self._ids[word])
        return ids

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        parts = (bytes([i]) if i < 256 else self._words[i - 256].encode() for i in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def spells_control(self, text: str) -> bool:
        return False

    def may_hold_control(self, text: str) -> bool:
        return False

    def controls(self, text: str) -> list[int]:
        return []

    def is_end(self, token_id: int) -> bool:
        return token_id >= 256 and self._words[token_id - 256] == "<|im_end|>"

    stops = is_end

    def learn_end(self, token_id: int) -> bool:
        return False

    def said(self, ids: tuple[int, ...], text: str) -> str:
        return self.decode(ids[:-1]) if ids and self.is_end(ids[-1]) else text

    def behind_end(self, text: str, end: int) -> str:
        return text.removeprefix(self.decode((end,)))

    def dated(self, at: float) -> WordTokenizer:
        return self

    call_format = None

    def render(self, messages: tuple[Message, ...], *, generation_prompt: bool, tools: Tools = ()) -> str:
        text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
        return text + ("<|im_start|>assistant\n" if generation_prompt else "")


class Rollouts:
    """Makes attempts that look lived."""

    def __init__(self, seed: int = 7, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer or WordTokenizer()
        self._random = random.Random(seed)
        self._clock = 1_770_000_000.0

    def plan(self, task: Task, group: int, index: int, attempt: int = 0) -> RolloutPlan:
        return RolloutPlan(
            rollout_id=f"g{group:06d}-r{index:02d}-a{attempt}",
            task=task,
            group=group,
            index=index,
            attempt=attempt,
            sampling=Sampling(temperature=1.0, top_p=1.0, max_tokens=1024, seed=self._random.getrandbits(31)),
            agent=an_agent(),
            sandbox=a_sandbox("rollout-orchestrator-sandbox:0.1.0"),
            limits=some_limits(),
        )

    def attempt(
        self,
        plan: RolloutPlan,
        steps: Iterable[tuple[str, str, str]],
        outcome: Outcome,
        answer: str | None,
        *,
        exact: bool = True,
        tool_calls: tuple[ToolCall, ...] = (),
    ) -> Attempt:
        """`steps` are (completion, observation, error)."""
        line = TokenLine(self.tokenizer, CLOSING)
        turns: list[Turn] = []
        told: list[Step] = []
        messages: tuple[Message, ...] = (
            Message("system", SYSTEM),
            Message("user", f"New task:\n{plan.task.question}"),
        )
        seen = 0
        clock = 0.1
        for number, (text, observation, error) in enumerate(steps, 1):
            ids = tuple(self.tokenizer.encode(text))
            sampled = Completion(
                text=self.tokenizer.decode(ids),
                visible=text.partition(CLOSING)[0],
                finish_reason="stop" if CLOSING in text else "length",
                tokens_T=ids if exact else None,
                logprobs_T=tuple(-(self._random.expovariate(1.5) ** 2) for _ in ids) if exact else None,
                prompt_tokens=len(SYSTEM) // 4 + 90 * number,
                completion_tokens=len(ids),
                retries=1 if number == 2 else 0,
            )
            prompt = line.prompt(messages) if exact else None
            took = self._random.uniform(0.4, 2.5)
            turns.append(
                Turn(
                    sequence=number,
                    kind=CompletionKind.ACTION,
                    kept=seen,
                    messages=messages[seen:],
                    segment=prompt.segment if prompt else 0,
                    prompt_ids=prompt.added if prompt else None,
                    closing=prompt.closing if prompt else "",
                    completion=sampled,
                    started_s=clock,
                    ended_s=clock + took,
                )
            )
            if prompt:
                line.append(prompt, messages, sampled)
            ran = self._random.uniform(0.02, 0.6)
            clock += took + ran
            code = text.partition("<code>")[2].partition(CLOSING)[0].strip()
            told.append(
                Step(number, text, code, observation, error.partition(":")[0], error, "final_answer(" in code, ran)
            )
            seen = len(messages)
            said = text if text.endswith(CLOSING) else text + CLOSING
            messages = (
                *messages,
                Message("assistant", said),
                Message("user", f"Observation:\n{observation or error}"),
            )
        self._clock += 3
        record = Record(
            started_at=self._clock,
            turns=tuple(turns),
            tool_calls=tool_calls,
            steps=tuple(told),
            answer=answer,
            sandbox_id="0f3c",
            exit=SandboxExit(0 if isinstance(outcome, Ended) else 137, oom_killed=False),
            launch_s=self._random.uniform(0.05, 0.4),
            duration_s=clock / 3,
            waiting_s=clock * 2 / 3,
            cpu_s=self._random.uniform(0.1, 0.9) if isinstance(outcome, Ended) else None,
            changes=ODD_CHANGES if answer == HOSTILE else CHANGES if plan.index == 1 else None,
            grade=ODD_GRADE if answer == HOSTILE else GRADE if plan.index == 1 else None,
        )
        return Attempt(plan, record, outcome)

    def member(self, attempt: Attempt, parts: dict[str, float]) -> Member:
        line = trajectory(attempt.record, self.tokenizer, CLOSING)
        value = min(1.0, parts["correctness"] * 0.5 + sum(v for n, v in parts.items() if n != "correctness"))
        return Member(attempt, line, Score(value, parts))

    def solved(self, task: Task, group: int, index: int, correct: bool, *, exact: bool = True) -> Member:
        """A rollout of two or three steps."""
        number = task.answer if correct else str(self._random.randrange(10, 99))
        steps = [
            (
                "Thought: I will read the attached file and look at its columns first.\n<code>\nimport csv\n\n"
                "with open('/attachments/sales.csv') as file:\n    rows = list(csv.DictReader(file))\n"
                "print(len(rows), 'rows', rows[0])  # a first look\n</code>",
                "Execution logs:\n24 rows {'region': 'north', 'amount': '17'}\nLast output from code snippet:\n",
                "",
            ),
            (
                "Thought: Now the total per region, then the largest — über alles 😀.\n<code>\n"
                "total = sum(int(row['amount']) for row in rows if row['region'] == 'north')\n"
                f"print(total)\nfinal_answer({number!r})\n</code>",
                f"Execution logs:\n{number}\nLast output from code snippet:\n{number}",
                "",
            ),
        ]
        if index % 2:
            steps.insert(
                1,
                (
                    "Thought: I add them up.\n<code>\ntotal = sum(row['amount'] for row in rows)\n</code>",
                    "",
                    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
                ),
            )
        calls = (
            ToolCall(
                1, "web_search", {"query": "sales of the north", "count": 3}, "1. Sales\n2. North", None, 2.9, 3.3
            ),
            ToolCall(2, "visit_webpage", {"url": "https://example.org"}, None, "404: not found", 3.3, 3.4),
        )
        attempt = self.attempt(
            self.plan(task, group, index),
            steps,
            Ended(EndedName.FINISHED),
            number,
            exact=exact,
            tool_calls=calls if index == 0 else (),
        )
        parts = {
            "correctness": 1.0 if correct else 0.0,
            "format": 0.2,
            "final_answer": 0.1,
            "execution": 0.05 if index % 2 else 0.1,
            "efficiency": round(self._random.uniform(0.04, 0.1), 3),
        }
        return self.member(attempt, parts)

    def stuck(self, task: Task, group: int, index: int, name: EndedName, detail: str = "") -> Member:
        """A rollout that ended without an answer: the policy's own doing."""
        step = (
            "Thought: one more look.\n<code>\nprint(rows[:3])\n</code>",
            "Execution logs:\n[]",
            "",
        )
        attempt = self.attempt(self.plan(task, group, index), [step] * 3, Ended(name, detail), None)
        parts = {"correctness": 0.0, "format": 0.2, "final_answer": 0.0, "execution": 0.1, "efficiency": 0.0}
        return self.member(attempt, parts)

    def broken(self, task: Task, group: int, index: int, name: FailedName, reason: str, tried: int = 0) -> Attempt:
        """An attempt the infrastructure lost."""
        step = ("Thought: let me see.\n<code>\nprint(1)\n</code>", "", "")
        return self.attempt(self.plan(task, group, index, tried), [step], Failed(name, reason), None)

    def hostile(self, group: int) -> Group:
        """Everything a model, sandbox or data set may write, written everywhere."""
        task = Task(HOSTILE, HOSTILE, "x", level=HOSTILE, source="surrogate \ud800" + HOSTILE)
        members = []
        for index in range(4):
            text = f"{HOSTILE} thought\n<code>\n'''{HOSTILE}\n{'A' * (1_000_000 if index == 0 else 10)}\n</code>"
            call = ToolCall(1, HOSTILE, {HOSTILE: HOSTILE}, HOSTILE, None, 0.0, 99.0)
            attempt = self.attempt(
                self.plan(task, group, index),
                [(text, HOSTILE * 3 + "B" * (1_000_000 if index == 1 else 0), f"{HOSTILE}: {HOSTILE}")],
                Ended(EndedName.FINISHED, HOSTILE),
                HOSTILE,
                tool_calls=(call,),
            )
            parts = {"correctness": float(index == 0), HOSTILE: 0.1}
            members.append(self.member(attempt, parts))
        lost = self.broken(task, group, 0, FailedName.LLM_ERROR, HOSTILE, tried=0)
        return _group(group, task, members, [replace(lost, plan=replace(lost.plan, rollout_id=HOSTILE))])


def _group(
    number: int, task: Task, members: list[Member], lost: list[Attempt], dropped: str | None = None
) -> Group:
    return Group(number, task, tuple(members), (*lost, *(m.attempt for m in members)), dropped)


def synthetic_groups(made: Rollouts, *, plain: int = 8) -> list[Group]:
    """One group of each kind there is, and `plain` ordinary ones."""
    chance = random.Random(3)
    ends = [EndedName.MAX_STEPS, EndedName.TIMEOUT, EndedName.BUDGET, EndedName.OUT_OF_MEMORY]
    groups = []
    for number in range(plain):
        task = Task(
            f"sales-{number:03d}",
            f"Attached is sales.csv. What is the total of the northern region in week {number + 1}? A number.",
            str(100 + number),
            level=str(1 + number % 3),
            source=("tables", "archives", "arithmetic")[number % 3],
        )
        share = (0.0, 0.5, 1.0, 0.75, 0.25)[number % 5]
        members = [made.solved(task, number, i, chance.random() < share, exact=number != 2) for i in range(4)]
        lost = []
        if number % 4 == 1:
            members[3] = made.stuck(task, number, 3, ends[number % 3], "completions" if number % 3 == 2 else "")
        if number % 4 == 3:
            lost.append(
                made.broken(task, number, 1, FailedName.LLM_ERROR, "the endpoint answered 503 three times")
            )
            retried = members[1].attempt
            plan = replace(retried.plan, attempt=1, rollout_id=f"g{number:06d}-r01-a1")
            members[1] = replace(members[1], attempt=replace(retried, plan=plan))
        groups.append(_group(number, task, members, lost))
    task = Task("dropped-task", "Which file of the archive is the largest?", "b.txt", level="2", source="archives")
    lost = [made.broken(task, plain, 0, FailedName.SANDBOX_LOST, "the container vanished", t) for t in range(3)]
    rest = [made.solved(task, plain, i, i == 1) for i in (1, 2, 3)]
    groups.append(_group(plain, task, rest, lost, "3 of 4 rollouts usable, mostly sandbox_lost"))
    return [*groups, made.hostile(plain + 1)]


FACTS = {
    "version": "0.1.0",
    "config": {
        "env": {"group_size": 4, "temperature": 1.0, "max_steps": 12, "scoring_strategy": "combined"},
        "openai": [
            {
                "model_name": "Qwen2.5-Coder-1.5B-Instruct",
                "base_url": "http://user:hunter2@127.0.0.1:8080/v1?key=hunter2",
            }
        ],
    },
    "seed": 7,
    "tasks": "jsonl: examples/tasks.jsonl",
    "notes": ["the endpoint does not know min_p; it was left out"],
    "token_ids": "exact",
    "tokenizer": "words",
    "agent": {"sandbox_tools": {}, "prompt_templates": None, "program": {}},
    "sandbox": {"docker": "28.5.1", "runtime": "runc", "image": "rollout-orchestrator-sandbox:0.1.0"},
}


def write_synthetic_run(directory: Path, *, plain: int = 8) -> WordTokenizer:
    """run.json, rollouts.jsonl and groups.jsonl, a torn last line included. Gives the tokenizer used."""
    words = WordTokenizer()
    groups = synthetic_groups(Rollouts(tokenizer=words), plain=plain)
    results: list[Member | Attempt | tuple[BadTask, int]] = []
    for group in groups:
        members = {m.attempt.plan.rollout_id: m for m in group.members_G}
        results += [members.get(attempt.plan.rollout_id, attempt) for attempt in group.attempts]
    bad = BadTask("row 14", f"the attachment is missing {HOSTILE}")
    write_run(directory, *results, (bad, plain + 2), facts=FACTS)
    with (directory / "groups.jsonl").open("wb") as file:
        for group in groups:
            if group.dropped is None:
                file.write(jsonl.dumps(scored_data_group(group)) + b"\n")
    with (directory / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"schema": 1, "rollout_id": "g0000')
    return words


if __name__ == "__main__":
    from orchestrator.report import write_report

    target = Path(sys.argv[1])
    words = write_synthetic_run(target, plain=int(sys.argv[2]) if len(sys.argv) > 2 else 8)
    write_report(target, target / "groups.jsonl", target / "groups.html", tokenizer=words)
    print(json.dumps({"report": str(target / "groups.html")}))
