"""Hand-made records, in the form the proxy writes them."""

from orchestrator.types import (
    Completion,
    CompletionKind,
    Ended,
    EndedName,
    Message,
    Record,
    RolloutPlan,
    Sampling,
    Task,
    Turn,
)
from tests.fakes.plans import a_sandbox, an_agent, some_limits

FINISHED = Ended(EndedName.FINISHED)
ADVICE = (
    "\nNow let's retry: take care not to repeat previous errors! If you have retried several times, "
    "try a completely different approach.\n"
)
PRINTED = "Observation:\nExecution logs:\n4\nLast output from code snippet:\nNone"
FAILED = "Call id: call_2\nError:\nZeroDivisionError: division by zero" + ADVICE


def plan(
    answer: str | None = "42", *, max_steps: int = 11, scorer: str | None = None, **task: object
) -> RolloutPlan:
    return RolloutPlan(
        rollout_id="g000000-r00-a0",
        task=Task("t1", "What?", answer, scorer=scorer, **task),  # type: ignore[arg-type]
        group=0,
        index=0,
        attempt=0,
        sampling=Sampling(1.0, 1.0, 100, 1),
        agent=an_agent(max_steps=max_steps),
        sandbox=a_sandbox("image"),
        limits=some_limits(),
    )


def code(body: str, thought: str = "Thought: let me see.\n") -> Completion:
    """A completion as endpoints without ids give it: ended by the closing tag, which is cut off."""
    return said(f"{thought}<code>\n{body}\n")


def said(visible: str, text: str | None = None, *, reason: str = "stop", ids: bool = False) -> Completion:
    return Completion(
        text=visible if text is None else text,
        visible=visible,
        finish_reason=reason,  # type: ignore[arg-type]
        tokens_T=(1, 2) if ids else None,
        logprobs_T=(-0.1, -0.2) if ids else None,
        prompt_tokens=10,
        completion_tokens=2,
    )


def record(*steps: tuple[Completion, str], answer: str | None = "42") -> Record:
    """Steps with what was observed after each; the last observation is never asked with."""
    turns: list[Turn] = []
    new: tuple[Message, ...] = (Message("system", "You solve tasks."), Message("user", "What?"))
    kept = 0
    for number, (completion, observation) in enumerate(steps):
        turns.append(Turn(number, CompletionKind.ACTION, kept, new, 0, None, "", completion, number, number + 0.5))
        kept += len(new)
        new = (Message("assistant", completion.visible + "</code>"), Message("user", observation))
    return Record(started_at=0.0, turns=tuple(turns), answer=answer)


PERFECT = record((code("print(2 + 2)"), PRINTED), (code("final_answer(42)"), ""))
