"""`orchestrator verify PATH`: whether a groups file or a whole run is what it must be."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.tokenizer import tokenizer_here
from orchestrator.errors import ConfigError, os_error_as
from orchestrator.rules.egress import EGRESS_FOLDER
from orchestrator.rules.text import printable
from orchestrator.run.files import (
    RUN_FILE,
    groups_file_of,
    groups_in,
    is_going_on,
    read_description,
    read_run,
    record_of,
    saved_tokenizer,
)
from orchestrator.run.frames import UNCLOSED
from orchestrator.run.lines import LinesById, demand_modest, demand_short_talks, texts
from orchestrator.run.verify import CHECKS, Findings, Wanted, check_group
from orchestrator.terminal.console import Console, plain_table

if TYPE_CHECKING:
    from orchestrator.forward.check import Against


def run(
    path: Path,
    model: Path | None = None,
    adapter: Path | None = None,
    max_rollouts: int | None = None,
    json: bool = False,
) -> int:
    """0: everything holds; 1: something does not, or there is no group. Raises ConfigError for another path, and
    what `forward.check` raises where a model is named."""
    against = _against(model, adapter, max_rollouts)
    findings = Findings()
    findings.tokenizer = functools.cache(functools.partial(_tokenizer, path))
    # run.json may name any path.
    with os_error_as(ConfigError, f"{path}: its groups file cannot be looked for", "; name it"):
        groups_file, rollouts_file = _files(path, findings)
    folder = (path if path.is_dir() else path.parent) / EGRESS_FOLDER
    findings.body = functools.cache(functools.partial(_is_whole, folder))
    rollouts = _rollouts(rollouts_file, findings) if rollouts_file is not None else None
    for where, _, group in _lines(groups_file, findings):
        if isinstance(group, dict):
            check_group(group, where, findings, rollouts)
        else:
            findings.check("shape", False, f"{where}: no object")
    good = findings.violations == 0 and findings.groups > 0
    with redirect_stdout(sys.stderr) if json else nullcontext():
        _print(groups_file, rollouts_file, findings)
        logprobs_hold = None
        if against is not None:
            from orchestrator.forward.check import Data, check

            logprobs_hold = check(Data(groups_file, rollouts, findings.tokenizer), against)
    if json:
        print(dumps({**_as_json(groups_file, rollouts_file, findings), "logprobs_hold": logprobs_hold}, indent=2))
    return 0 if good and logprobs_hold is not False else 1


def _is_whole(folder: Path, digest: str) -> bool:
    """Whether the file of this name has this hash."""
    if digest == hashlib.sha256().hexdigest():
        return True
    try:
        if not re.fullmatch("[0-9a-f]{64}", digest) or not (folder / digest).is_file():
            return False
        with (folder / digest).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
    except OSError:
        return False


def _as_json(groups_file: Path, rollouts_file: Path | None, findings: Findings) -> dict[str, Any]:
    return {
        "groups_file": str(groups_file),
        "record": None if rollouts_file is None else str(rollouts_file),
        "groups": findings.groups,
        "rollouts": findings.rollouts,
        "token_sources": dict(findings.sources),
        "violations": findings.violations,
        "checks": [
            {"check": name, "looked_at": findings.checked[name], "wrong": findings.failed[name], "holds": meaning}
            | {"first_wrong": findings.wrong.get(name, [])}
            for name, meaning in CHECKS.items()
        ],
    }


def _against(model: Path | None, adapter: Path | None, max_rollouts: int | None) -> Against | None:
    """What to recompute with, looked at before the first line is checked: its files may be missing."""
    if model is None:
        if adapter is not None or max_rollouts is not None:
            raise ConfigError("--adapter and --max-rollouts go with --model, which names the weights")
        return None
    from orchestrator.forward.check import Against

    return Against.of(model, adapter, max_rollouts)


def _tokenizer(path: Path) -> Tokenizer | None:
    """The run's tokenizer, where it is on this machine."""
    return tokenizer_here(*saved_tokenizer(read_description(path if path.is_dir() else path.parent)))


def _files(path: Path, findings: Findings) -> tuple[Path, Path | None]:
    """(groups file, rollouts.jsonl beside it or in the run directory)."""
    directory = path if path.is_dir() else path.parent
    named = _read_settings(directory, findings)
    if path.is_file():
        return path, record_of(directory)
    if not path.is_dir():
        raise ConfigError(f"{path} is neither a groups file nor a run directory")
    groups = groups_in(path, named and Path(named).name) or groups_in(path, named)
    if groups is None:
        if read_description(path).get("command") == "evaluate":
            raise ConfigError(f"{path} holds an evaluation, which has no groups; `orchestrator view` shows it")
        raise ConfigError(f"{path} holds no groups.jsonl; name the groups file itself")
    return groups, record_of(directory)


def _read_settings(directory: Path, findings: Findings) -> str | None:
    """Notes what the run was asked for. Returns the groups file that run.json names."""
    if not (directory / RUN_FILE).is_file():
        return None
    try:
        description = read_run(directory, RUN_FILE)
        findings.wanted = Wanted.of(description["config"]["env"])
        return groups_file_of(description)
    except (ConfigError, ValueError, KeyError, TypeError, OverflowError) as error:
        findings.check("shape", False, f"{RUN_FILE}: not as this version writes it ({type(error).__name__})")
        return None


def _rollouts(path: Path, findings: Findings) -> LinesById:
    """The lines of rollouts.jsonl by rollout id."""
    lines = LinesById(path)
    for where, place, line in _lines(path, findings):
        if not isinstance(line, dict) or not isinstance(line.get("rollout_id"), str):
            findings.check("record", False, f"{where}: no rollout")
            continue
        fresh = line["rollout_id"] not in lines.offsets
        findings.check("record", fresh, f"{where}: {line['rollout_id']} a second time")
        lines.offsets[line["rollout_id"]] = place
    return lines


def _lines(path: Path, findings: Findings) -> Iterator[tuple[str, int, Any]]:
    """(file and line number, offset, value) of each line that is JSON, strict or not."""
    with os_error_as(ConfigError, f"{path} cannot be read"):
        under_way = is_going_on(path.parent)
        for line in texts(path):
            if under_way and line.text == UNCLOSED:
                continue
            where = f"{path.name}:{line.number}"
            try:
                value = _loads(line.text, where, findings)
            except (ValueError, RecursionError) as error:
                findings.check("shape", False, f"{where}: no JSON ({error})")
            else:
                yield where, line.offset, value


def _loads(text: bytes, where: str, findings: Findings) -> Any:
    """NaN and the infinities are no JSON: they are noted, and the rest of their line is checked all the same."""
    demand_modest(text)
    constants: list[str] = []

    def note(name: str) -> float:
        constants.append(name)
        return float(name)

    value = loads(text, parse_constant=note)
    findings.check("shape", not constants, f"{where}: no strict JSON ({constants[0]})" if constants else where)
    demand_short_talks(value)
    return value


def _print(groups_file: Path, rollouts_file: Path | None, findings: Findings) -> None:
    console = Console(sys.stdout, soft_wrap=True)
    table = plain_table(("check", "looked at", "wrong", "what holds"), ("looked at", "wrong"))
    for name, meaning in CHECKS.items():
        looked, wrong = findings.checked[name], findings.failed[name]
        table.add_row(name, str(looked) if looked else "-", str(wrong) if looked else "-", meaning)
    console.print(table)
    for name, places in findings.wrong.items():
        for place in places:
            console.print(printable(f"{name}: {place}"), markup=False)
        if more := findings.failed[name] - len(places):
            console.print(f"{name}: {more} more")
    sources = printable(", ".join(f"{name} {count}" for name, count in findings.sources.most_common())) or "none"
    record = "" if rollouts_file else "; no rollouts.jsonl beside it, so nothing was compared with the record"
    if findings.unread:
        console.print(
            f"{findings.unread} rollouts have ids made from text, and their tokenizer is not on this machine: "
            "only how many texts are trained there was compared with the record",
            markup=False,
        )
    console.print(
        f"{groups_file}: {findings.groups} groups, {findings.rollouts} rollouts (tokens: {sources}), "
        f"{findings.violations} violations{record}",
        markup=False,
    )
