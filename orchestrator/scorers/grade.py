"""Makes trajectory and score of an ended attempt. If either breaks, the failure is the orchestrator's."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import main_line
from orchestrator.errors import RecordError, ScorerError
from orchestrator.rules.text import error_line
from orchestrator.scorers.base import Scorer
from orchestrator.types import Attempt, Ended, Failed, FailedName, Member, Output, Trajectory

# Linear in the length of the conversation, which may be megabytes: so it has a thread of its own.
_THREAD = ThreadPoolExecutor(1, "trajectory")


async def grade(
    attempt: Attempt, tokenizer: Tokenizer | None, scorer: Scorer, outputs: Path | None = None
) -> Member | Attempt:
    """A Member if the attempt could be scored; else the attempt, with an outcome that says why not. `outputs`:
    where the folders of files are that rollouts left."""
    end = attempt.outcome
    if not isinstance(end, Ended):
        return attempt
    if outputs is not None and attempt.record.output is not None:
        attempt = _with_folder(attempt, attempt.record.output, outputs / attempt.plan.rollout_id)
    try:
        line = await _trajectory(attempt, tokenizer)
        score = await scorer.score(attempt.plan, attempt.record, end)
    except RecordError as error:
        return replace(attempt, outcome=Failed(FailedName.RECORD_ERROR, str(error)))
    except ScorerError as error:
        return replace(attempt, outcome=Failed(FailedName.SCORER_ERROR, str(error)))
    if line.note:
        attempt = replace(attempt, record=replace(attempt.record, notes=(*attempt.record.notes, line.note)))
    return Member(attempt, line, score)


def _with_folder(attempt: Attempt, output: Output, folder: Path) -> Attempt:
    """The attempt, whose output says where its files are."""
    output_with_folder = replace(output, folder=str(folder.absolute()) if output.files else "")
    return replace(attempt, record=replace(attempt.record, output=output_with_folder))


async def _trajectory(attempt: Attempt, tokenizer: Tokenizer | None) -> Trajectory:
    """Raises RecordError, whatever went wrong: one rollout must not end the run."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_THREAD, main_line, attempt.plan, attempt.record, tokenizer)
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(f"no trajectory can be made of it: {error_line(error)}") from error
