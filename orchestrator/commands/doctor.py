"""`orchestrator doctor`: checks one by one what a run needs, and says what to do about what is missing."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.doctor.finding import Finding
from orchestrator.doctor.machine import check_run_directory, check_temporary
from orchestrator.doctor.sandboxes import check_sandboxes
from orchestrator.doctor.services import check_keys, check_services, check_web_tools
from orchestrator.text import printable

if TYPE_CHECKING:
    from orchestrator.settings.config import Config

UNUSABLE = 3
WIDTH = 10


def run(config: Config) -> int:
    """0: a run can work; 3: something must be fixed first."""
    return asyncio.run(_run(config))


async def _run(config: Config) -> int:
    counts: Counter[str] = Counter()
    async for finding in _findings(config):
        counts[finding.level] += 1
        text = printable(" ".join(finding.text.split()))
        print(f"{finding.level:<4}  {finding.what:<{WIDTH}}  {text}", flush=True)
    print(f"{counts['ok']} ok, {counts['warn']} to know, {counts['fail']} to mend", file=sys.stderr)
    return UNUSABLE if counts["fail"] else 0


async def _findings(config: Config) -> AsyncIterator[Finding]:
    for finding in check_run_directory(config.env.run_dir or Path("runs")):
        yield finding
    for finding in check_temporary():
        yield finding
    async for finding in check_sandboxes(config):
        yield finding
    for finding in check_keys(config):
        yield finding
    async for finding in check_services(config):
        yield finding
    async for finding in check_web_tools(config):
        yield finding
