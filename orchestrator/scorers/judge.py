"""`judge`: a language model says whether an answer says the same as the reference answer.

The rubric is fixed (`rubric.txt`). The policy wrote the answer, so the judge must not follow it: it stands between
lines with a mark drawn at random for this grading, and a verdict counts only with that mark, alone on the last
line. Prompts and replies are kept as the score's evidence.

If the judge gives no verdict for any reason (an off-topic reply, a refusal, a filter, no text, too much time), a
control decides who is at fault: the reference answer in place of the given one. If the control gets a verdict, the
given answer is wrong; it is not drawn again. If not, the judge is broken: a ScorerError, never a reward. A judge
that did not answer may have come back in between: after a control it is asked once more, and then another control.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.completion.base import Completer, CompletionRequest
from orchestrator.errors import (
    AuthenticationError,
    CompletionError,
    ContextLengthError,
    OrchestratorError,
    ParameterError,
    QuotaError,
    RecordError,
    ScorerError,
)
from orchestrator.rules.control import ControlAnswer
from orchestrator.rules.waits import first_of, standstill
from orchestrator.scorers.base import Scorer
from orchestrator.scorers.control import FRESH_S, Controls, evidence
from orchestrator.types import Ended, EndedName, Message, Record, RolloutPlan, Sampling, Score, Task

RUBRIC = Path(__file__).with_name("rubric.txt")
MAX_ANSWER_CHARS = 8_000  # a longer answer is incorrect without being judged: no reference answer is so long
MAX_TASK_CHARS = 100_000  # of question and reference answer together
VERDICTS = 3  # replies asked for per answer until one has a verdict
_ROUNDS = 3
STANDSTILL_S = 5.0  # a reply may be limited to seconds (env.scorer_timeout)
_BY_RULES = "by_rules"
_MAX_REASON = 400
_VERDICT = re.compile(r"VERDICT ([0-9a-f]{16}): (CORRECT|INCORRECT)")


@dataclass(eq=False, slots=True)
class JudgeScorer:
    """A `Scorer`: 1 for an answer that the judge calls correct, else 0.

    The parts are those that `rules` measures; its `correctness` is named `by_rules` here, to be compared with the
    judge's verdict.
    """

    judge: Completer
    rules: Scorer
    _: KW_ONLY
    model: str
    max_tokens: int
    seed: int = 0
    mark: Callable[[], str] = lambda: secrets.token_hex(8)
    _rubric: str = field(default_factory=lambda: RUBRIC.read_text("utf-8"))
    # The completion has a time limit itself.
    _controls: Controls = field(default_factory=lambda: Controls(math.inf))

    async def score(self, plan: RolloutPlan, record: Record, ended: Ended) -> Score:
        """Raises ScorerError, and AuthenticationError, which stops the run."""
        measured = await self.rules.score(plan, record, ended)
        parts = {_BY_RULES if name == "correctness" else name: part for name, part in measured.parts.items()}
        if ended.name is not EndedName.FINISHED or record.answer is None:
            return Score(0.0, {**parts, "judge": 0.0}, measured.evidence)
        if len(record.answer) > MAX_ANSWER_CHARS:
            reason: Mapping[str, Any] = {"reason": f"an answer of more than {MAX_ANSWER_CHARS} characters"}
            return Score(
                0.0, {**parts, "judge": 0.0}, {**measured.evidence, "judge": {"verdict": "incorrect", **reason}}
            )
        judging = await self._ask(plan, record.answer, 1)
        if isinstance(judging.error, CompletionError):
            await self._control(plan, judging, age_s=FRESH_S)
            judging = await self._ask(plan, record.answer, 1 + 2 * VERDICTS)
        if judging.verdict is None:
            age_s = 0.0 if isinstance(judging.error, CompletionError) else FRESH_S
            return _wrong(plan, parts, judging, await self._control(plan, judging, age_s=age_s))
        value = 1.0 if judging.verdict == "correct" else 0.0
        return Score(value, {**parts, "judge": value}, {**measured.evidence, "judge": judging.evidence()})

    async def try_out(self, plan: RolloutPlan, record: Record) -> bool:
        """Judges the task's reference answer. False: there is nothing to judge in this task. Raises ScorerError
        without a verdict, and AuthenticationError."""
        if unjudgeable(plan.task):
            return False
        judging = await self._ask(plan, str(plan.task.answer), 1)
        if judging.verdict is None:
            _demand_key(judging.error)
            raise ScorerError(judging.failure()) from judging.error
        return True

    async def _control(self, plan: RolloutPlan, judging: _Judging, *, age_s: float) -> ControlAnswer:
        """The judge's reply on the reference answer, after it gave no verdict on another one. Raises ScorerError
        if it gives none on this either, and AuthenticationError."""
        reference = str(plan.task.answer)

        async def ask() -> str:
            control = await self._ask(plan, reference, 1 + VERDICTS)
            if control.verdict is None:
                raise control.error or ScorerError(control.failure())
            return control.replies[-1]

        control = await self._controls.answer(plan.task.task_id, ask, age_s=age_s)
        _demand_key(control.failure)
        if control.failure is not None:
            raise ScorerError(judging.failure()) from control.failure
        return control

    async def _ask(self, plan: RolloutPlan, answer: str, sequence: int) -> _Judging:
        """Asks until there is a verdict, an error, or no try left. If this process stood still meanwhile, it asks
        anew: a reply may have been late for that alone."""
        for _ in range(_ROUNDS):
            judging = await first_of(standstill(STANDSTILL_S), self._attempt(plan, answer, sequence))
            if isinstance(judging, _Judging):
                return judging
        raise ScorerError(f"while the judge was asked, this process stood still {_ROUNDS} times in a row")

    async def _attempt(self, plan: RolloutPlan, answer: str, sequence: int) -> _Judging:
        mark = self.mark()
        messages = conversation(self._rubric, plan.task, answer, mark)
        judging = _Judging(self.model, messages)
        for number in range(VERDICTS):
            seed = self.seed + number
            request = CompletionRequest(
                messages=messages,
                prompt_ids=None,
                stop=(),
                sampling=Sampling(temperature=0.0, top_p=1.0, max_tokens=self.max_tokens, seed=seed),
                rollout_id=plan.rollout_id,
                task_id=plan.task.task_id,
                index=plan.index,
                sequence=sequence + number,
            )
            try:
                completion = await self.judge.sample(request)
            except (CompletionError, ContextLengthError, RecordError) as error:
                judging.error = error
                break
            judging.replies.append(completion.text)
            judging.seed = seed
            if completion.finish_reason == "stop":
                judging.verdict = verdict(completion.visible, mark)
            if judging.verdict is not None:
                break
        return judging


@dataclass(slots=True)
class _Judging:
    """The judging of one answer. `error`: why it was broken off."""

    model: str
    messages: tuple[Message, ...]
    replies: list[str] = field(default_factory=list)
    verdict: str | None = None
    seed: int | None = None
    error: OrchestratorError | None = None

    def evidence(self) -> dict[str, Any]:
        """The evidence."""
        return {
            "model": self.model,
            "temperature": 0.0,
            "messages": [{"role": m.role, "content": m.content} for m in self.messages],
            "replies": self.replies + ([str(self.error)] if self.error is not None else []),
            "verdict": self.verdict,
            **({} if self.seed is None else {"seed": self.seed}),
        }

    def failure(self) -> str:
        """Why there is no verdict, on one line."""
        if self.error is not None:
            return f"the judge does not answer: {' '.join(str(self.error).split())[:_MAX_REASON]}"
        last = " ".join(self.replies[-1].split())[-200:]
        return f"the judge gave no verdict in {VERDICTS} replies, last: {last!r}"


def _wrong(plan: RolloutPlan, parts: Mapping[str, float], judging: _Judging, control: ControlAnswer) -> Score:
    """Of an answer without a verdict, where the reference answer in its place gets one: it is wrong."""
    verdict_evidence = {
        **judging.evidence(),
        "verdict": "incorrect",
        "reason": "the judge gives no verdict on this answer, and one on the reference answer",
        "control": [control.reply],
    }
    failure_evidence = evidence(judging.failure(), str(plan.task.answer), control)
    return Score(0.0, {**parts, "judge": 0.0}, {**failure_evidence, "judge": verdict_evidence})


def unjudgeable(task: Task) -> str:
    """What the task has that no answer to it can be judged with; empty: nothing."""
    if task.answer is None:
        return "no reference answer to judge by"
    if len(task.question) + len(task.reference or "") > MAX_TASK_CHARS:
        return f"more than {MAX_TASK_CHARS} characters: too long to judge"
    return ""


def _demand_key(failure: BaseException | None) -> None:
    """Raises AuthenticationError, which ends the run, if the judge failed for its key."""
    if isinstance(failure, QuotaError | ParameterError):
        raise AuthenticationError(f"the judge: {failure}") from failure
    if isinstance(failure, AuthenticationError):
        raise AuthenticationError("the judge's endpoint refuses the key: set JUDGE_API_KEY") from failure


def conversation(rubric: str, task: Task, answer: str, mark: str) -> tuple[Message, ...]:
    """The prompt for the judge. Raises ScorerError for a task that cannot be judged."""
    if why := unjudgeable(task):
        raise ScorerError(f"task {task.task_id!r} has {why}")
    fenced = "\n\n".join(
        f"{what} {mark}\n{text}\nEND OF {what} {mark}"
        for what, text in (
            ("QUESTION", task.question),
            ("REFERENCE ANSWER", task.reference),
            ("GIVEN ANSWER", answer),
        )
    )
    return (Message("system", rubric.replace("{mark}", mark)), Message("user", fenced))


def verdict(reply: str, mark: str) -> str | None:
    """`correct` or `incorrect`, if the last line is the reply's only verdict and has this grading's mark; else
    None."""
    lines = [line.strip() for line in reply.strip().splitlines()]
    match = _VERDICT.fullmatch(lines[-1]) if lines else None
    if match is None or match[1] != mark or reply.count("VERDICT") != 1:
        return None
    return match[2].lower()
