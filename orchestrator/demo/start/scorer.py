"""Full marks for the right answer, a tenth for any answer."""

from orchestrator.types import Ended, Record, RolloutPlan, Score


def score(plan: RolloutPlan, record: Record, ended: Ended) -> Score:
    answer, reference = (record.answer or "").strip(), (plan.task.answer or "").strip()
    right = answer.casefold() == reference.casefold()
    return Score(1.0 if right else 0.1 if answer else 0.0, {"correctness": float(right)})
