"""Opens what a run writes to: its directory and its groups file, new or those of a resumed run."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.run.directory import RunDirectory, new_run_directory
from orchestrator.run.earlier import Earlier, read_earlier, repair_groups
from orchestrator.run.files import GROUPS_FILE, groups_file_of, packed_name, read_run
from orchestrator.run.groups import GroupFormat, GroupsFile, check_writable, fresh_path
from orchestrator.run.tally import Tally
from orchestrator.settings.output import OutputSettings

NO_MORE: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class OpenRun:
    """Run directory and groups file, and what they already hold. `more`: what the command adds to run.json."""

    run: RunDirectory
    groups: GroupsFile
    earlier: Earlier
    more: Mapping[str, object] = field(default_factory=dict)

    @property
    def about(self) -> Mapping[str, object]:
        """What is added to run.json: where the groups file is, relative if the run directory holds it."""
        run_path, groups_path = self.run.path.absolute(), self.groups.path.absolute()
        inside = groups_path.is_relative_to(run_path)
        return {**self.more, "groups_file": str(groups_path.relative_to(run_path) if inside else groups_path)}


@contextmanager
def open_run(
    env: OutputSettings, run_path: Path, tally: Tally, form: GroupFormat, more: Mapping[str, object] = NO_MORE
) -> Iterator[OpenRun]:
    """Opens the run directory and the groups file, new ones or those of the run that is resumed."""
    packed = env.compress == "zstd"
    named = env.data_path_to_save_groups if env.resume is None else None
    named = packed_name(named) if named is not None and packed else named
    groups_path = fresh_path(named) if named is not None else None  # before the run directory, as it may fail
    try:
        directory = open_directory(env, run_path, resume=env.resume is not None)
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
            yield OpenRun(run, groups, earlier, more)


def open_directory(env: OutputSettings, path: Path, *, resume: bool) -> RunDirectory:
    """The run directory in `path`, to be closed. Raises ConfigError, RunLocked."""
    packed = env.compress == "zstd"
    return RunDirectory(path, resume=resume, fsync=env.fsync, full_traces=env.save_full_traces, compress=packed)


def program_run_path(env: OutputSettings) -> Path | None:
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
    _check_writable(env, env.run_dir)
    return env.run_dir


def run_directory_path(env: OutputSettings) -> Path:
    """The directory of the run: the one resumed, the one asked for, or a new one. Raises ConfigError, also
    where nothing can be written."""
    path = env.resume or env.run_dir or new_run_directory()
    if env.resume and env.run_dir and env.run_dir.resolve() != env.resume.resolve():
        raise ConfigError("env.run_dir: a run is continued in its own directory; leave this out")
    _check_writable(env, path)
    return path


def _check_writable(env: OutputSettings, run_path: Path) -> None:
    check_writable(run_path)
    if env.data_path_to_save_groups is not None:
        check_writable(env.data_path_to_save_groups.parent)


def groups_path_of(run_path: Path) -> Path:
    """The groups file of the run in `run_path`, also if that was moved and holds it. Raises ConfigError."""
    named = groups_file_of(read_run(run_path))
    if named is None:
        raise ConfigError(f"env.resume: run.json in {run_path} names no groups file")
    return run_path / named
