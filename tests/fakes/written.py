"""What a run leaves, written in one go for tests that read it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from orchestrator.run.directory import RunDirectory
from orchestrator.types import Attempt, BadTask, Member


def write_run(
    directory: Path,
    *results: Member | Attempt | tuple[BadTask, int],
    facts: dict[str, Any] | None = None,
    resume: bool = False,
) -> Path:
    """A run directory with these lines in rollouts.jsonl, and run.json where there are `facts`."""

    async def write() -> None:
        with closing(RunDirectory(directory, resume=resume)) as run:
            if facts is not None:
                await run.describe(facts)
            for result in results:
                if isinstance(result, tuple):
                    await run.record_bad_task(*result)
                else:
                    await run.record(result)

    with ThreadPoolExecutor(1) as elsewhere:  # a browser's loop may be running in this thread
        elsewhere.submit(asyncio.run, write()).result()
    return directory
