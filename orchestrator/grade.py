"""An ended attempt → trajectory and score, or the failure that is ours."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.recorder import main_line
from orchestrator.errors import RecordError, ScorerError
from orchestrator.scorers.base import Scorer
from orchestrator.types import Attempt, Ended, Failed, FailedName, Member


async def grade(attempt: Attempt, tokenizer: Tokenizer | None, scorer: Scorer) -> Member | Attempt:
    """A Member where the attempt is scored; else the attempt, its outcome saying why not."""
    if not isinstance(attempt.outcome, Ended):
        return attempt
    try:
        line = await asyncio.to_thread(main_line, attempt.plan, attempt.record, tokenizer)
        score = await scorer.score(attempt.plan, attempt.record, attempt.outcome)
    except RecordError as error:
        return replace(attempt, outcome=Failed(FailedName.RECORD_ERROR, str(error)))
    except ScorerError as error:
        return replace(attempt, outcome=Failed(FailedName.SCORER_ERROR, str(error)))
    return Member(attempt, line, score)
