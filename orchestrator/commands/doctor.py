"""`orchestrator doctor`: checks one by one what a run needs, and says what to do about what is missing."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cluster.doctor import check_cluster
from orchestrator.doctor.finding import Finding
from orchestrator.doctor.host import check_host
from orchestrator.doctor.machine import check_run_directory
from orchestrator.doctor.services import check_keys, check_tokenizer
from orchestrator.rules.text import printable

if TYPE_CHECKING:
    from orchestrator.settings.config import Config

UNUSABLE = 3
WIDTH = 10


def run(config: Config, ray_address: str | None) -> int:
    """0: a run can work; 3: something must be fixed first. `ray_address`: of the cluster to look at."""
    if ray_address is not None:
        config = replace(config, env=replace(config.env, cluster="ray", ray_address=ray_address))
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
    for finding in check_keys(config):
        yield finding
    if config.env.cluster == "none":
        async for finding in check_host(config):
            yield finding
    else:  # this machine needs nothing of what only rollouts need
        finding, tokenizer = await check_tokenizer(config)
        yield finding
        async for finding in check_cluster(config, tokenizer):
            yield finding
