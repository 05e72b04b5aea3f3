"""`judge`: a language model says whether an answer says the same as the reference answer.

The rubric is fixed (`rubric.txt`). The answer was written by the policy, so it is data: it stands between
lines with a mark drawn for this one grading, and a verdict counts only with that mark, alone on the last
line. What the judge was asked and said is kept as the score's evidence. A judge that fails, or gives no
verdict on the reference answer either, is a ScorerError and never a reward; an answer that leaves only the judge
of itself without a verdict is wrong, so that nobody earns another try by confusing it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.completion.base import Completer, CompletionRequest
from orchestrator.errors import AuthenticationError, CompletionError, ContextLengthError, RecordError, ScorerError
from orchestrator.scorers.correctness import correctness
from orchestrator.scorers.quality import quality
from orchestrator.types import Ended, EndedName, Message, Record, RolloutPlan, Sampling, Score, Task

RUBRIC = Path(__file__).with_name("rubric.txt")
MAX_ANSWER_CHARS = 8_000  # no reference answer is so long: incorrect without being shown to the judge
MAX_TASK_CHARS = 100_000  # of question and reference answer
VERDICTS = 3  # replies asked for, of each answer, before there is none
_VERDICT = re.compile(r"VERDICT ([0-9a-f]{16}): (CORRECT|INCORRECT)")


class JudgeScorer:
    """A `Scorer`: 1 for what the judge calls correct, else 0; everything measured is in the parts.

    `correctness` stays what the task's own rules say: evaluations by rules and by judge can be compared.
    """

    def __init__(
        self,
        judge: Completer,
        *,
        model: str,
        max_tokens: int,
        seed: int = 0,
        length_penalty_weight: float = 0.1,
        mark: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._judge = judge
        self._model = model
        self._max_tokens = max_tokens
        self._seed = seed
        self._length_penalty_weight = length_penalty_weight
        self._mark = mark
        self._rubric = RUBRIC.read_text("utf-8")

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises ScorerError, and AuthenticationError, which stops the run."""
        parts = await asyncio.to_thread(self._measured, plan, record, ended)
        if ended.name is not EndedName.FINISHED or record.answer is None:
            return Score(0.0, {**parts, "judge": 0.0})
        if len(record.answer) > MAX_ANSWER_CHARS:
            evidence = {"verdict": "incorrect", "reason": f"an answer of more than {MAX_ANSWER_CHARS} characters"}
            return Score(0.0, {**parts, "judge": 0.0}, {"judge": evidence})
        asked = await self._ask(plan, record.answer)
        value = 1.0 if asked["verdict"] == "correct" else 0.0
        return Score(value, {**parts, "judge": value}, {"judge": asked})

    def _measured(self, plan: RolloutPlan, record: Record, ended: Ended) -> dict[str, float]:
        right = correctness(plan.task, record, ended)
        return {"correctness": right, **quality(plan, record, ended, self._length_penalty_weight)}

    async def _ask(self, plan: RolloutPlan, answer: str) -> Mapping[str, Any]:
        """The verdict and how it came about. Without one, the reference answer in the given one's place tells who
        is at fault: where that gets a verdict it is the answer, which is then wrong and not graded anew."""
        asked = await self._verdict(plan, answer, 1)
        if asked["verdict"] is not None:
            return asked
        control = await self._verdict(plan, str(plan.task.answer), 1 + VERDICTS)
        if control["verdict"] is not None:
            reason = "the judge gives no verdict on this answer, and one on the reference answer"
            return {**asked, "verdict": "incorrect", "reason": reason, "control": control["replies"]}
        last = " ".join(control["replies"][-1].split())[-200:]
        raise ScorerError(f"the judge gave no verdict in {VERDICTS} replies, last: {last!r}")

    async def _verdict(self, plan: RolloutPlan, answer: str, sequence: int) -> dict[str, Any]:
        """What was asked, the replies, and the `verdict`: None where none of them has one."""
        mark = self._mark()
        messages = conversation(self._rubric, plan.task, answer, mark)
        asked: dict[str, Any] = {
            "model": self._model,
            "temperature": 0.0,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "replies": [],
            "verdict": None,
        }
        for number in range(VERDICTS):
            seed = self._seed + number
            request = CompletionRequest(
                messages=messages,
                prompt_ids=None,
                stop=(),
                sampling=Sampling(temperature=0.0, top_p=1.0, max_tokens=self._max_tokens, seed=seed),
                rollout_id=plan.rollout_id,
                task_id=plan.task.task_id,
                index=plan.index,
                sequence=sequence + number,
            )
            try:
                completion = await self._judge.sample(request)
            except AuthenticationError:
                raise AuthenticationError("the judge's endpoint refuses the key: set JUDGE_API_KEY") from None
            except ContextLengthError as error:
                asked["replies"].append(str(error))
                break
            except (CompletionError, RecordError) as error:
                raise ScorerError(f"the judge does not answer: {error}") from error
            asked["replies"].append(completion.text)
            asked["seed"] = seed
            if completion.finish_reason == "stop":
                asked["verdict"] = verdict(completion.text, mark)
            if asked["verdict"] is not None:
                break
        return asked


def conversation(rubric: str, task: Task, answer: str, mark: str) -> tuple[Message, ...]:
    """What the judge is asked. Raises ScorerError for a task it cannot be asked about."""
    if task.answer is None:
        raise ScorerError(f"task {task.task_id!r} has no reference answer to judge by")
    if len(task.question) + len(task.answer) > MAX_TASK_CHARS:
        raise ScorerError(f"task {task.task_id!r} has more than {MAX_TASK_CHARS} characters: too long to judge")
    fenced = "\n\n".join(
        f"{what} {mark}\n{text}\nEND OF {what} {mark}"
        for what, text in (
            ("QUESTION", task.question),
            ("REFERENCE ANSWER", task.answer),
            ("GIVEN ANSWER", answer),
        )
    )
    return (Message("system", rubric.replace("{mark}", mark)), Message("user", fenced))


def verdict(reply: str, mark: str) -> str | None:
    """`correct` or `incorrect`: the last line, the only verdict of the reply, with this grading's mark."""
    lines = [line.strip() for line in reply.strip().splitlines()]
    found = _VERDICT.fullmatch(lines[-1]) if lines else None
    if found is None or found[1] != mark or reply.count("VERDICT") != 1:
        return None
    return found[2].lower()
