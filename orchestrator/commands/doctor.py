"""`orchestrator doctor`: checks one by one what a run needs, and says what to do about what is missing."""

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from json import dumps
from pathlib import Path

from orchestrator.cluster.doctor import check_cluster
from orchestrator.doctor.finding import Finding
from orchestrator.doctor.host import check_host
from orchestrator.doctor.machine import check_run_directory
from orchestrator.doctor.services import check_keys, check_tokenizer
from orchestrator.host.setup import completion_needs
from orchestrator.rules.text import printable
from orchestrator.settings.config import Config

UNUSABLE = 3
WIDTH = 10
_COUNTED = (("warn", "warning"), ("fail", "failure"))


def run(config: Config, ray_address: str | None, json: bool = False) -> int:
    """0: a run can work; 3: something must be fixed first. `ray_address`: of the cluster to look at."""
    if ray_address is not None:
        config = replace(config, env=replace(config.env, cluster="ray", ray_address=ray_address))
    return asyncio.run(_run(config, json))


async def _run(config: Config, json: bool) -> int:
    counts: Counter[str] = Counter()
    findings = []
    async for finding in _findings(config):
        counts[finding.level] += 1
        text = printable(" ".join(finding.text.split()))
        findings.append({"level": finding.level, "what": finding.what, "text": text})
        print(
            f"{finding.level:<4}  {finding.what:<{WIDTH}}  {text}",
            file=sys.stderr if json else sys.stdout,
            flush=True,
        )
    warnings, failures = (f"{counts[level]} {word}{'s' * (counts[level] != 1)}" for level, word in _COUNTED)
    print(f"{counts['ok']} ok, {warnings}, {failures}", file=sys.stderr)
    if json:
        levels = {level: counts[level] for level in ("ok", "warn", "fail")}
        print(dumps({"usable": not counts["fail"], "counts": levels, "findings": findings}, indent=2))
    return UNUSABLE if counts["fail"] else 0


async def _findings(config: Config) -> AsyncIterator[Finding]:
    for finding in check_run_directory(config.env.run_dir or Path("runs")):
        yield finding
    for finding in check_keys(completion_needs(config)):
        yield finding
    if config.env.cluster == "none":
        async for finding in check_host(config):
            yield finding
    else:  # this machine needs nothing of what only rollouts need
        finding, tokenizer = await check_tokenizer(completion_needs(config))
        yield finding
        async for finding in check_cluster(config, tokenizer):
            yield finding
