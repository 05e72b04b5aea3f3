"""Opens what a run writes to: its directory and its groups file, new or those of a resumed run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import __version__
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.run.directory import RunDirectory, new_run_directory
from orchestrator.run.earlier import Earlier, read_earlier, repair_groups
from orchestrator.run.files import GROUPS_FILE, groups_file_of, packed_name, read_run
from orchestrator.run.groups import GroupFormat, GroupsFile, check_writable, fresh_path
from orchestrator.run.tally import Tally

if TYPE_CHECKING:
    from orchestrator.engine.orchestrator import Orchestrator
    from orchestrator.settings.config import Config
    from orchestrator.settings.table import EnvSettings


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Run directory and groups file, and what they already hold."""

    run: RunDirectory
    groups: GroupsFile
    earlier: Earlier


@contextmanager
def open_run(config: Config, run_path: Path, tally: Tally, form: GroupFormat) -> Iterator[OpenRun]:
    """Opens the run directory and the groups file, new ones or those of the run that is resumed."""
    env = config.env
    packed = env.compress == "zstd"
    asked = env.data_path_to_save_groups if env.resume is None else None
    asked = packed_name(asked) if asked is not None and packed else asked
    groups_path = fresh_path(asked) if asked is not None else None  # before the run directory, as it may fail
    try:
        directory = RunDirectory(
            run_path,
            resume=env.resume is not None,
            fsync=env.fsync,
            full_traces=env.save_full_traces,
            compress=packed,
        )
    except OrchestratorError:
        if groups_path is not None:
            groups_path.unlink()
        raise
    with closing(directory) as run:
        if env.resume is None:
            default = run_path / GROUPS_FILE
            default = packed_name(default) if packed else default
            groups_path, earlier = groups_path or fresh_path(default), Earlier()
        else:
            groups_path = groups_path_of(run_path)
            repair_groups(groups_path, several_lines=bool(form.all_segments))
            earlier = read_earlier(run.rollouts, groups_path, tally.earlier_attempt)
            for written in earlier.written.values():
                tally.earlier_group(written)
        with closing(GroupsFile(groups_path, form=form, fsync=env.fsync)) as groups:
            yield OpenRun(run, groups, earlier)


def program_run_path(env: EnvSettings) -> Path | None:
    """The run directory that a program which embeds the orchestrator asks for; None: it asks for no record. Raises
    ConfigError."""
    if env.resume is not None:
        raise ConfigError(
            "env.resume: a program hands its tasks over itself; leave this out, name a new env.run_dir"
        )
    if env.run_dir is None:
        if env.data_path_to_save_groups is not None:
            raise ConfigError(
                "env.data_path_to_save_groups: groups are written with the record; set env.run_dir too"
            )
        return None
    check_writable(env.run_dir)
    if env.data_path_to_save_groups is not None:
        check_writable(env.data_path_to_save_groups.parent)
    return env.run_dir


async def open_program_run(orchestrator: Orchestrator, path: Path, files: ExitStack) -> OpenRun:
    """Opens and describes the run of a program; `files` closes it. Raises ConfigError, RunLocked."""
    output = files.enter_context(open_run(orchestrator.config, path, Tally(), orchestrator.group_format))
    await describe(output, orchestrator, "tasks of a program")
    return output


async def describe(output: OpenRun, orchestrator: Orchestrator, tasks: str) -> None:
    """Writes run.json. `tasks`: where they come from, for display. Raises ConfigError if the agent, or the way
    token ids are made, is not that of the resumed run."""
    facts = await orchestrator.facts()
    if orchestrator.config.env.resume is not None:
        earlier = read_run(output.run.path)
        if "agent" in earlier and earlier["agent"] != facts["agent"]:
            raise ConfigError(
                "env.resume: the agent's program, prompts or tools are not what the run began with; "
                "bring those back, or start a new run"
            )
        before = earlier.get("token_ids")
        if before != facts["token_ids"]:
            raise ConfigError(
                f"env.resume: the run's token ids are {before}, this endpoint's {facts['token_ids']}; "
                "set --openai.base_url to an endpoint of the same kind"
            )
    run_path, groups_path = output.run.path.absolute(), output.groups.path.absolute()
    inside = groups_path.is_relative_to(run_path)
    await output.run.describe(
        {
            "version": __version__,
            "config": orchestrator.config.public(),
            "seed": orchestrator.seed,
            "tasks": tasks,
            "groups_file": str(groups_path.relative_to(run_path) if inside else groups_path),
            "notes": orchestrator.observer.notes,
            **facts,
        }
    )


def run_directory_path(env: EnvSettings) -> Path:
    """The directory of the run: the one resumed, the one asked for, a new one. Raises ConfigError."""
    if env.resume is None:
        return Path(env.run_dir) if env.run_dir else new_run_directory()
    if env.run_dir is not None and Path(env.run_dir).resolve() != Path(env.resume).resolve():
        raise ConfigError("env.run_dir: a run is continued in its own directory; leave this out")
    return Path(env.resume)


def groups_path_of(run_path: Path) -> Path:
    """The groups file of the run in `run_path`, also if that was moved and holds it. Raises ConfigError."""
    named = groups_file_of(read_run(run_path))
    if named is None:
        raise ConfigError(f"env.resume: run.json in {run_path} names no groups file")
    return run_path / named
