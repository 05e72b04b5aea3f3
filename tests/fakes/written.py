"""What a run leaves, written in one go for tests that read it."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from docs.schemas.make import schema
from orchestrator.run.directory import RunDirectory
from orchestrator.types import Attempt, BadTask, Member


def demand_as_published(run_directory: Path) -> None:
    """Every line of the run's files is as the published schemas say, with no field that they do not name."""
    for file, lines in (
        ("run.json", False),
        ("rollouts.jsonl", True),
        ("groups.jsonl", True),
        ("dropped.jsonl", True),
        ("curriculum.jsonl", True),
    ):
        validator = Draft202012Validator(_closed(schema(file)))
        if file in ("dropped.jsonl", "curriculum.jsonl") and not (run_directory / file).exists():
            continue
        text = (run_directory / file).read_text("utf-8")
        values = text.splitlines() if lines else [text]
        assert values
        for value in values:
            validator.validate(json.loads(value))


def _closed(value: Any) -> Any:
    """The schema with no room for a field it does not name."""
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    closed = {key: _closed(item) for key, item in value.items()}
    if "properties" in closed and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


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
