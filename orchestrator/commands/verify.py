"""`orchestrator verify PATH`: whether a groups file or a whole run is what it must be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.errors import ConfigError
from orchestrator.verify import CHECKS, Findings, check_group

SHOWN = 5  # places printed per check


def run(path: Path) -> int:
    """0: everything holds; 1: something does not. Raises ConfigError for a path that is neither."""
    groups_file, rollouts_file = _files(path)
    findings = Findings()
    rollouts = _rollouts(rollouts_file, findings) if rollouts_file is not None else {}
    for where, group in _lines(groups_file, findings):
        if isinstance(group, dict):
            check_group(group, where, findings, rollouts)
        else:
            findings.check("shape", False, f"{where}: no object")
    _print(groups_file, rollouts_file, findings)
    return 1 if findings.violations or not findings.groups else 0


def _files(path: Path) -> tuple[Path, Path | None]:
    """(groups file, rollouts.jsonl beside it or in the run directory)."""
    if path.is_dir():
        groups = path / "groups.jsonl"
        description = path / "run.json"
        if not groups.is_file() and description.is_file():
            told = json.loads(description.read_text()).get("groups_file")
            groups = path / told if told else groups
        if not groups.is_file():
            raise ConfigError(f"{path} holds no groups.jsonl; name the groups file itself")
        rollouts = path / "rollouts.jsonl"
        return groups, rollouts if rollouts.is_file() else None
    if not path.is_file():
        raise ConfigError(f"{path} is no groups file and no run directory")
    rollouts = path.with_name("rollouts.jsonl")
    return path, rollouts if rollouts.is_file() else None


def _rollouts(path: Path, findings: Findings) -> dict[str, dict[str, Any]]:
    """What was sampled, by rollout: only what the comparison needs is kept."""
    kept = ("segment", "prompt_ids", "token_ids", "logprobs")
    found: dict[str, dict[str, Any]] = {}
    for _, line in _lines(path, findings):
        if isinstance(line, dict) and line.get("score") is not None:
            completions = [{k: c.get(k) for k in kept} for c in line.get("completions", ())]
            found[str(line.get("rollout_id"))] = {"completions": completions}
    return found


def _lines(path: Path, findings: Findings) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                where = f"{path.name}:{number}"
                try:
                    yield where, json.loads(text, parse_constant=_refuse)
                except (ValueError, RecursionError) as error:
                    findings.check("shape", False, f"{where}: no strict JSON ({error})")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _print(groups_file: Path, rollouts_file: Path | None, findings: Findings) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("check", "looked at", "wrong", "what holds"):
        table.add_column(column, justify="right" if column in ("looked at", "wrong") else "left")
    for name, meaning in CHECKS.items():
        looked, wrong = findings.checked[name], len(findings.wrong.get(name, ()))
        table.add_row(name, str(looked) if looked else "-", str(wrong) if looked else "-", meaning)
    console.print(table)
    for name, places in findings.wrong.items():
        for place in places[:SHOWN]:
            console.print(f"{name}: {place}", markup=False)
        if len(places) > SHOWN:
            console.print(f"{name}: {len(places) - SHOWN} more")
    sources = ", ".join(f"{name} {count}" for name, count in findings.sources.most_common()) or "none"
    record = "" if rollouts_file else "; no rollouts.jsonl beside it, so nothing was compared with the record"
    console.print(
        f"{groups_file}: {findings.groups} groups, {findings.rollouts} rollouts (tokens: {sources}), "
        f"{findings.violations} violations{record}"
    )
