"""`orchestrator export RUN_DIR --format NAME`: rollouts of a record as a folder for trainers, or for Harbor."""

import asyncio
import hashlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from orchestrator import __version__
from orchestrator.completion.base import Tokenizer
from orchestrator.completion.tokenizer import load_tokenizer, tokenizer_here
from orchestrator.engine.group import GroupPolicy
from orchestrator.errors import ConfigError, OutputError, os_error_as
from orchestrator.exporting.choice import Choice, Chooser, Pair
from orchestrator.exporting.folder import CARD_FILE, PROVENANCE_FILE, card, open_rows
from orchestrator.exporting.formats import FORMATS, Format, line
from orchestrator.exporting.harbor import HARBOR, HarborJob
from orchestrator.exporting.record import LeftOut, Survey
from orchestrator.rules.forks import BranchRule
from orchestrator.rules.text import printable
from orchestrator.run.files import ROLLOUTS_FILE, RUN_FILE, is_going_on, read_recorded, saved_env, saved_tokenizer
from orchestrator.run.groups import GroupFormat
from orchestrator.run.line import read_attempt
from orchestrator.run.lines import text_at, write_whole
from orchestrator.run.new_folder import demand_free, new_folder
from orchestrator.run.rows import Row
from orchestrator.settings.config import Config
from orchestrator.settings.rollouts import RolloutSettings
from orchestrator.terminal.closing import print_rows
from orchestrator.terminal.signals import Stopped, stoppable

EXIT_INCOMPLETE = 1
ASKED = "output"
_WAY_ON = {
    LeftOut.NO_SCORE: "`orchestrator rescore` scores what ended, `orchestrator view` says what broke",
    LeftOut.UNSOLVED: "--solved false takes them",
    LeftOut.BELOW: "set a lower --threshold",
    LeftOut.UNTRAINED: "see --env.untrained_outcomes and --env.train_mixed_versions",
    LeftOut.TOO_LONG: "set a higher --max-tokens",
    LeftOut.ALIKE: "--solved false makes pairs by scores alone",
    LeftOut.NO_PAIR: "set a smaller --margin; equal scores are never a pair",
}


def run(
    config: Config,
    run_dir: Path,
    format: str,
    output: Path | None,
    best: int | None,
    solved: bool | None,
    threshold: float | None,
    margin: float | None,
    max_tokens: int | None,
) -> int:
    """0: the folder is written and every line was read; 1: not so; 128 + n after a signal. Raises ConfigError,
    OutputError: without a single row nothing is written."""
    if format == HARBOR:
        chosen = {
            "best": best,
            "solved": solved,
            "threshold": threshold,
            "margin": margin,
            "max-tokens": max_tokens,
        }
        if named := next((name for name, value in chosen.items() if value is not None), None):
            raise ConfigError(f"--{named}: harbor has all attempts of the run; leave it out")
        form, choice = None, Choice(exact=False)
    else:
        form = FORMATS[format]
        if margin is not None and not form.pairs:
            raise ConfigError(f"--margin: only dpo makes pairs; {format} takes --threshold and --best")
        margin = form.margin if margin is None else margin
        solved = form.solved and threshold is None if solved is None else solved  # a threshold says what is right
        choice = Choice(best or form.best, threshold, margin, max_tokens, bool(form.as_text), solved)
    path = output or run_dir / f"export-{format}"
    try:
        work = _exported(config, run_dir, format, form, choice, path)
        return asyncio.run(stoppable(work, drain=lambda: None, drain_timeout_s=0))
    except Stopped as stopped:
        print(f"stopped by {stopped}; nothing was written", flush=True)
        return stopped.exit_code


async def _exported(
    config: Config, run_dir: Path, format: str, form: Format | None, choice: Choice, path: Path
) -> int:
    """`form`: None: Harbor's job folder, which has trials and no rows."""
    described, record = read_recorded(run_dir, "RUN_DIR")
    demand_free(path, ASKED)
    growing, notes = is_going_on(run_dir), []
    if growing:
        notes.append(f"{run_dir.name} is still running; its finished rollouts were exported")
    tokenizer = await asyncio.to_thread(_tokenizer, config, described, notes) if form else None
    with os_error_as(ConfigError, f"cannot read {record}"):
        survey = await asyncio.to_thread(Survey.of, record, growing=growing)
    wrong = None
    with new_folder(path, ASKED) as folder:
        if form is None:
            count = await _write_trials(folder / _name(run_dir), record, survey, described)
        else:
            policy = GroupPolicy.parse(config.env.group_policy, config.env.zero_variance)
            trained = GroupFormat.of(config.env, tokenizer, include_messages=config.env.include_messages)
            trained = replace(trained, trunk_masked=_masks_trunks(described))
            chooser = Chooser(record, survey, policy, config.env.group_size, trained, choice)
            count = await _write(form, chooser, folder)
            wrong = chooser.wrong
        if form is not None and (bare := survey.left_out[LeftOut.RETOKENIZED]):
            notes.append(f"{bare} have no sampled ids, as the endpoint gave text: {_as_text(form)}")
        for note in notes:
            print(printable(f"note: {note}"), flush=True)
        _print(form, count, wrong, survey)
        if not count:
            raise OutputError(f"nothing to export: {_why_nothing(form, survey)}")
        facts = _provenance(format, count, wrong, survey, choice, config, described, run_dir, notes)
        write_whole(folder / PROVENANCE_FILE, facts, indent=True)
        if form is not None:
            (folder / CARD_FILE).write_bytes(card(format, form, facts))
    print_rows([("folder", path)], sys.stdout)
    return EXIT_INCOMPLETE if survey.left_out[LeftOut.UNREADABLE] else 0


def _as_text(form: Format) -> str:
    return f"--format {form.as_text} has them as conversations"


def _why_nothing(form: Format | None, survey: Survey) -> str:
    """By the last thing that was asked of any rollout: it passed all others."""
    reasons = [reason for reason in LeftOut if survey.left_out[reason]]
    if not reasons:
        return "the record holds no rollout"
    last = reasons[-1]
    on = _as_text(form) if form and last is LeftOut.RETOKENIZED else _WAY_ON.get(last)
    return f"{survey.left_out[last]} {last}" + (f"; {on}" if on else "")


async def _write(form: Format, chooser: Chooser, folder: Path) -> int:
    """Writes the data file, group by group. Gives the number of rows."""
    groups: Iterator[list[Row] | list[Pair]] = chooser.pairs() if form.pairs else chooser.rollouts()
    count = 0
    with closing(open_rows(folder, form)) as file:
        while (group := await asyncio.to_thread(next, groups, None)) is not None:
            await asyncio.to_thread(file.write, [line(form.columns, entry) for entry in group])
            count += len(group)
    return count


async def _write_trials(folder: Path, record: Path, survey: Survey, described: Mapping[str, Any]) -> int:
    """Writes every attempt, in the order of the record, as a trial of the job `folder`. Gives their number."""
    del survey.left_out[LeftOut.NO_SCORE]  # they are there, as failures
    models = _models(described)
    job = HarborJob(folder, str(described.get("version")), models[0] if len(models) == 1 else None)

    def write(offset: int) -> None:
        try:
            job.write(read_attempt(text_at(record, offset)))
        except ValueError as error:
            survey.refuse(f"{record}, byte {offset}", str(error))

    for offset in survey.offsets():
        await asyncio.to_thread(write, offset)
    if job.trials:
        await asyncio.to_thread(job.close)
    return job.trials


def _tokenizer(config: Config, described: Mapping[str, Any], notes: list[str]) -> Tokenizer | None:
    """The tokenizer asked for, else the run's own where it is on this machine. It finds the end of messages."""
    name, own = config.env.tokenizer_name, saved_env(dict(described)).get("tokenizer_name")
    if name is not None and name != own:
        return None if name.lower() == "none" else load_tokenizer(name, config.env.chat_template_kwargs)
    used, template_arguments = saved_tokenizer(dict(described))
    tokenizer = tokenizer_here(used, template_arguments)
    if tokenizer is None:
        missing = (
            "the run had no tokenizer" if used in (None, "none") else "the run's tokenizer is not on this machine"
        )
        notes.append(f"{missing}: messages keep the tokens that end a turn; --env.tokenizer_name names one")
    return tokenizer


def _masks_trunks(described: Mapping[str, Any]) -> bool:
    """Raises ConfigError."""
    try:
        return BranchRule.masks_trunks(saved_env(dict(described)))
    except ValueError as error:
        raise ConfigError(f"RUN_DIR: its env.branch: {error}") from error


def _provenance(
    format: str,
    rows: int,
    wrong: int | None,
    survey: Survey,
    choice: Choice,
    config: Config,
    described: Mapping[str, Any],
    run_dir: Path,
    notes: list[str],
) -> dict[str, Any]:
    """Where the rows come from, and by which settings. No path of this machine: the folder is made to be handed
    on."""
    chosen: dict[str, object] = {} if format == HARBOR else {"solved": str(choice.solved).lower()}
    chosen |= {name: getattr(choice, name) for name in ("best", "threshold", "margin", "max_tokens")}
    options = [f"--{name.replace('_', '-')} {value}" for name, value in chosen.items() if value is not None]
    env, now = saved_env(dict(described)), config.public()["env"]
    return {
        "schema": 1,
        "version": __version__,
        "format": format,
        "command": " ".join(["orchestrator export", shlex.quote(run_dir.name), f"--format {format}", *options]),
        "settings": {name: now[name] for name, row in RolloutSettings.rows().items() if "export" in row.from_run},
        "rows": rows,
        "not_solved": wrong,
        "run": {
            "name": _name(run_dir),
            "version": described.get("version"),
            "models": _models(described),
            "tokenizer": _tokenizer_name(described),
            "token_ids": described.get("token_ids"),
            "seed": described.get("seed"),
            "scoring_strategy": env.get("scoring_strategy"),
            "group_size": env.get("group_size"),
            "files": {
                RUN_FILE: {"sha256": hashlib.sha256((run_dir / RUN_FILE).read_bytes()).hexdigest()},
                ROLLOUTS_FILE: {"sha256": survey.sha256, "bytes": survey.size_bytes, "lines": survey.lines},
            },
        },
        "left_out": {str(reason): count for reason, count in survey.left_out.items() if count},
        "notes": notes,
    }


def _name(run_dir: Path) -> str:
    return run_dir.resolve().name


def _models(described: Mapping[str, Any]) -> list[Any]:
    servers = described["config"].get("openai")
    names = [server.get("model_name") for server in servers or () if isinstance(server, dict)]
    return list(dict.fromkeys(_handed_on(name) for name in names))


def _tokenizer_name(described: Mapping[str, Any]) -> str | None:
    name = saved_tokenizer(dict(described))[0]
    return None if name is None else _handed_on(name)


def _handed_on(name: object) -> str:
    """The name of a model or tokenizer; of a folder on this machine only the last part."""
    path = PurePath(str(name))
    return path.name if path.is_absolute() or str(name).startswith("~") else str(name)


def _print(form: Format | None, rows: int, wrong: int | None, survey: Survey) -> None:
    for place, reason in survey.unreadable:
        print(printable(f"left out: {place}: {reason}"), flush=True)
    what = "trials" if form is None else "pairs" if form.pairs else "rows"
    table: list[tuple[str, object]] = [(what, f"{rows} from {survey.lines} lines, {len(survey.groups)} groups")]
    if wrong:
        pairs = ": they are no solved rollout with one that is not" if what == "pairs" else ""
        table.append(("not solved", f"{wrong} of the {what}{pairs}"))
    table += [("left out", f"{count} {reason}") for reason, count in survey.left_out.most_common() if count]
    print_rows(table, sys.stdout)
