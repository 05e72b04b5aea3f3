"""A model learns on this machine, from end to end.

python -m examples.learn                      # or: make learn
python -m examples.learn page runs/learn      # the page alone, of the runs that are there
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from examples.learn.processes import Broken, alone
from examples.learn.rounds import PLAN, Plan, Run
from orchestrator.errors import OrchestratorError

FOLDER = Path("runs/learn")
CHOICES = {"algorithm": ("grpo", "expert"), "curriculum": ("none", "pools"), "measured": ("rounds", "ends")}
TIME_IS_UP = 4  # above the exit codes of `orchestrator`


def main(argv: Sequence[str] | None = None) -> int:
    """0: the run is whole; 1: it broke; 4: the time is up, and rounds are left; 128 and the signal's number:
    stopped."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments[:1] == ["page"]:
        return _page(Path(arguments[1] if len(arguments) > 1 else FOLDER))
    options = _parser().parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{(time.monotonic() - began) / 60:5.1f} min] {text}", flush=True)

    given: dict[str, Any] = {
        field.name: getattr(options, field.name) for field in fields(Plan) if hasattr(options, field.name)
    }
    new = Plan(**given)
    kinds = [new.algorithm] * (new.algorithm != Plan.algorithm) + ["control"] * new.control
    if new.curriculum != "none" and not new.training:
        raise SystemExit(
            "learn: --curriculum pools chooses which tasks come again; set --training N too, such as 3"
        )
    if new.branch != Plan.branch and new.steps == Plan.steps:
        raise SystemExit("learn: --branch samples a later turn anew; set --steps 2 or more too")
    kinds += ["steps", str(new.steps)] * (new.steps != Plan.steps)
    kinds += ["branch"] * (new.branch != Plan.branch)
    kinds += [new.curriculum] * (new.curriculum != Plan.curriculum)
    folder = (options.folder or FOLDER / "-".join([*kinds, "seed", str(new.seed)])).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    plan = _plan(folder, given)
    say(f"{plan.model} learns by {plan.algorithm} in {plan.rounds} rounds; kept in {folder}")
    say("Ctrl-C stops it, and the same command goes on with it")
    try:
        with alone(folder):
            run = Run(plan, folder, options.threads, say)
            try:
                whole = run.go(began + options.minutes * 60, lambda: _page(folder.parent, quiet=True))
            finally:
                _page(folder.parent)
    except (Broken, OrchestratorError) as error:
        say(f"learn: {error}")
        return 1
    except Stopped as stopped:
        say("stopped; run it again to go on")
        return 128 + stopped.number
    return 0 if whole else TIME_IS_UP


class Stopped(BaseException):
    """By a signal. It may come anywhere, and nothing else is to catch it."""

    def __init__(self, number: int) -> None:
        self.number = number


def _stop(number: int, frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once: what is under way is being ended
    raise Stopped(number)


def _plan(folder: Path, given: dict[str, Any]) -> Plan:
    """What the folder says, or a new plan. A run does not change its plan on its way."""
    kept = folder / PLAN
    if not kept.exists():
        return Plan(**given)
    told = json.loads(kept.read_text("utf-8"))
    told["sets"] = tuple(told["sets"])
    plan = Plan(**told)
    if changed := [name for name, value in given.items() if getattr(plan, name) != value]:
        began = f"{changed[0]} {getattr(plan, changed[0])}"
        raise SystemExit(f"learn: {folder} began with {began}; name another --folder")
    return plan


def _page(folder: Path, *, quiet: bool = False) -> int:
    """1 and one line where it cannot be drawn: no run ends because of its page."""
    from examples.learn.page import write_page

    try:
        page = write_page(folder)
    except Exception as error:
        print(f"learn: the page of {folder} cannot be drawn: {type(error).__name__}: {error}", flush=True)
        return 1
    if not quiet:
        print(f"page  {page}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.learn", description="A model learns on this machine."
    )
    parser.add_argument("--folder", type=Path, help="where the run is kept; runs/learn/seed-N by default")
    parser.add_argument(
        "--minutes",
        type=_above(float, 0),
        default=60.0,
        help="after the first round, begins none that would end later, and exits with 4; default 60",
    )
    parser.add_argument(
        "--threads", type=_above(int, 0), help="cores of the model's server; by default all but one"
    )
    for field in fields(Plan):
        default, text = field.default, field.metadata["help"]
        how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f"{text}; default {default}"}
        if isinstance(default, bool):
            how |= {"action": "store_true", "help": text}
        elif isinstance(default, tuple):
            how |= {"type": lambda text: tuple(text.split("+")), "help": f"{text}; default {'+'.join(default)}"}
        elif field.name in CHOICES:
            how["choices"] = CHOICES[field.name]
        elif field.name == "model":
            how["type"] = _model
        elif isinstance(default, int | float):
            how["type"] = _above(type(default), 0 if field.name != "seed" else -1)
        else:
            how["type"] = str
        parser.add_argument("--" + field.name.replace("_", "-"), **how)
    return parser


def _model(text: str) -> str:
    """A file by its whole path: the run may be gone on with from another folder."""
    return str(Path(text).expanduser().resolve()) if text.endswith(".gguf") else text


def _above(kind: type[int] | type[float], least: int) -> Callable[[str], int | float]:
    def number(text: str) -> int | float:
        value = kind(text)
        if not value > least:
            raise argparse.ArgumentTypeError(f"{text} is not above {least}")
        return value

    return number


if __name__ == "__main__":
    raise SystemExit(main())
