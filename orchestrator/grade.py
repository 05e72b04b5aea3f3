"""Makes trajectory and score of an ended attempt. If either breaks, the failure is the orchestrator's."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import main_line
from orchestrator.errors import RecordError, ScorerError
from orchestrator.scorers.base import Scorer
from orchestrator.text import told
from orchestrator.types import Attempt, Ended, Failed, FailedName, Member, Trajectory

# Linear in the length of the conversation, which may be megabytes: so it has a thread of its own.
_THREAD = ThreadPoolExecutor(1, "trajectory")


async def grade(attempt: Attempt, tokenizer: Tokenizer | None, scorer: Scorer) -> Member | Attempt:
    """A Member if the attempt could be scored; else the attempt, with an outcome that says why not."""
    if not isinstance(attempt.outcome, Ended):
        return attempt
    try:
        line = await _trajectory(attempt, tokenizer)
        score = await scorer.score(attempt.plan, attempt.record, attempt.outcome)
    except RecordError as error:
        return replace(attempt, outcome=Failed(FailedName.RECORD_ERROR, str(error)))
    except ScorerError as error:
        return replace(attempt, outcome=Failed(FailedName.SCORER_ERROR, str(error)))
    if line.note:
        attempt = replace(attempt, record=replace(attempt.record, notes=(*attempt.record.notes, line.note)))
    return Member(attempt, line, score)


async def _trajectory(attempt: Attempt, tokenizer: Tokenizer | None) -> Trajectory:
    """Raises RecordError, whatever went wrong: one rollout must not end the run."""
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(_THREAD, main_line, attempt.plan, attempt.record, tokenizer)
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(f"no trajectory can be made of it: {told(error)}") from error
