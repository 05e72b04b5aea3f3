"""The files that say where a run is in its stream of tasks.

`position.json` in the run directory says what was delivered: `--env.resume` goes on behind it. The trainer's
checkpoint directory, where Atropos keeps its own files, has `latest.json`, the same for a new `serve` of that
trainer, and `step-N.json`, which says what had been taken when the trainer saved its step N: a trainer that goes
back there gets the rest again.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import orjson
from pydantic import TypeAdapter

from orchestrator.atropos.position import SCHEMA, Position
from orchestrator.errors import ConfigError, OutputError, os_error_as
from orchestrator.rules.waits import uninterrupted
from orchestrator.run.lines import write_whole

_POSITION = TypeAdapter(Position)


def write_position(path: Path, position: Position, *, fsync: bool = False) -> None:
    """Writes the file whole or not at all; with `fsync` it survives a power loss. Raises OutputError."""
    with os_error_as(OutputError, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, position.as_json(), fsync=fsync)


def read_position(path: Path) -> Position | None:
    """None: there is no such file. Raises ConfigError."""
    try:
        content = {"sending": None, **orjson.loads(path.read_bytes())}
        if content["schema"] != SCHEMA:
            raise ConfigError(f"{path} was written by another version; remove it to begin anew")
        return _POSITION.validate_python({row.name: content[row.name] for row in fields(Position)})
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} holds no position of a run; remove it to begin anew") from error


class Checkpoints:
    """The files of one environment in the trainer's checkpoint directory."""

    LATEST = "latest.json"

    def __init__(self, checkpoint_dir: str, name: str, *, fsync: bool = False) -> None:
        self.name, self.folder = name, Path(checkpoint_dir) / "env_checkpoints" / name
        self._fsync = fsync

    def save(self, step: int, taken: Position, delivered: Position) -> None:
        """Raises OutputError."""
        write_position(self.folder / f"step-{step}.json", taken, fsync=self._fsync)
        self.save_latest(delivered)

    def save_latest(self, delivered: Position) -> None:
        """Writes the position behind which a new `serve` for the same trainer goes on. Raises OutputError."""
        write_position(self.folder / self.LATEST, delivered, fsync=self._fsync)

    def load(self, step: int, *, same_trainer: bool) -> Position | None:
        """Where to go on for a trainer that is at `step`; None: no file tells. Raises ConfigError.

        `same_trainer`: groups delivered to it still wait in the run-api.
        """
        if step <= 0:
            return None
        latest = read_position(self.folder / self.LATEST)
        if latest is not None and (latest.step < step or (same_trainer and latest.step == step)):
            return latest
        steps = [number for number in self._steps() if number <= step]
        return read_position(self.folder / f"step-{max(steps)}.json") if steps else None

    async def load_fitting(
        self, step: int, dataset: str, seed: int | None, *, same_trainer: bool, chooses: bool
    ) -> Position | None:
        """As `load`, off the event loop. `seed`, `dataset`: as they are set now; `chooses`: tasks by results.
        Raises ConfigError where these do not go with the checkpoint."""
        position = await asyncio.to_thread(self.load, step, same_trainer=same_trainer)
        if position is None:
            return None
        if chooses:
            raise ConfigError(
                f"env.curriculum: the checkpoint in {self.folder} has no results to choose by: go on with "
                "--env.resume RUN_DIR, or leave the curriculum out"
            )
        if position.dataset != dataset or (seed is not None and seed != position.seed):
            raise ConfigError(
                f"the checkpoint in {self.folder} is of {position.dataset} with seed {position.seed}; set "
                f"these, or another --env.wandb_name than {self.name}"
            )
        return position

    def _steps(self) -> Iterable[int]:
        for path in self.folder.glob("step-*.json"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal():
                yield int(number)


class PositionFiles:
    """All that one `serve` writes. `run`: its run directory, once there is one. `checkpoints`: of its trainer;
    None: that keeps none."""

    NAME = "position.json"

    def __init__(self, *, fsync: bool) -> None:
        self.run: Path | None = None
        self.checkpoints: Checkpoints | None = None
        self._fsync = fsync
        self._saving = asyncio.Lock()

    async def save(self, position: Callable[[], Position]) -> None:
        """Writes what was delivered. Raises OutputError."""
        async with self._saving:
            await uninterrupted(asyncio.to_thread(self._write, position()))

    def _write(self, position: Position) -> None:
        if self.run is not None:
            write_position(self.run / self.NAME, position, fsync=self._fsync)
        if self.checkpoints is not None:
            self.checkpoints.save_latest(position)

    async def checkpoint(self, step: int, positions: Callable[[], tuple[Position, Position]]) -> None:
        """Writes the trainer's checkpoint. `positions`: what it has taken, and what was delivered. Raises
        OutputError."""
        if self.checkpoints is not None:
            async with self._saving:
                await uninterrupted(asyncio.to_thread(self.checkpoints.save, step, *positions()))
