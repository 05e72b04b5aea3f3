"""The program of a grading process, which `processes` starts. The scorer is ours or the operator's.

Standard input, from the orchestrator: pickles, each after its length; first the scorer (a `StrategyScorer`, or the
text `python:MODULE:NAME`), then lists of rollouts to score, each the pickle of (plan, record, ended). Standard
output: one JSON object per line; `at`, where the scorer is defined (empty for ours), once it is loaded, then value
and parts, or an `error`, for each rollout. What the scorer prints goes to standard error.
"""

import ctypes
import inspect
import json
import math
import os
import pickle
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import ConfigError, ScorerError
from orchestrator.rules.plugins import defined_at, load_object, raised_at
from orchestrator.rules.text import error_line
from orchestrator.scorers.strategies import StrategyScorer
from orchestrator.types import Ended, Record, RolloutPlan, Score

FLAG = "env.scoring_strategy"
LENGTH = struct.Struct(">Q")
_PR_SET_PDEATHSIG = 1

Function = Callable[[RolloutPlan, Record, Ended], object]


def main() -> int:
    """Serves until standard input ends. Returns the exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a scorer that hangs must not outlive the run
    with suppress(OSError):  # if memory runs out, this process is killed first
        Path("/proc/self/oom_score_adj").write_text("1000")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    first = _read(requests)
    if first is None:
        return 1
    scorer = pickle.loads(first)  # noqa: S301 - our own parent's
    try:
        function = scorer.measure if isinstance(scorer, StrategyScorer) else load_scorer(scorer)
    except ConfigError as error:
        _say(replies, {"error": str(error)})
        return 1
    theirs = isinstance(scorer, str)
    name, at = (scorer, defined_at(function)) if theirs else (scorer.strategy, "")
    _say(replies, {"at": at})
    while (request := _read(requests)) is not None:
        for rollout in pickle.loads(request):  # noqa: S301 - our own parent's
            _say(replies, _reply(name, at, function, rollout))
    return 0


def load_scorer(spec: str) -> Function:
    """A function `(plan, record, ended)`, an object with such a `score`, or a class of such objects.

    Raises ConfigError.
    """
    plugin: Any = load_object(spec, FLAG)
    if inspect.isclass(plugin):
        try:
            plugin = plugin()
        except Exception as error:  # the operator's code
            raise ConfigError(f"{FLAG}: {spec} cannot be made: {' '.join(str(error).split())[:300]}") from error
    function: Function = getattr(plugin, "score", plugin)
    try:
        inspect.signature(function).bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FLAG}: {spec} cannot be called as score(plan, record, ended)") from error
    return function


def _reply(name: str, at: str, function: Function, rollout: bytes) -> dict[str, Any]:
    try:
        plan, record, ended = pickle.loads(rollout)  # noqa: S301 - our own parent's
        result = function(plan, record, ended)
        if isinstance(result, Score):
            parts = {str(part): _number(value, f"part {part}") for part, value in result.parts.items()}
            return {"value": float(result.value), "parts": parts}
        return {"value": _number(result, "score", 0.0, 1.0), "parts": {}}
    except ScorerError as error:
        return {"error": str(error)}
    except _Refused as error:
        return {"error": f"{name} gave {error}{at}"}
    except BaseException as error:  # the scorer's code may raise anything, SystemExit too
        return {"error": f"{name} raised {_error_text(error)}{raised_at(error)}"}


def _error_text(error: BaseException) -> str:
    """The exception on one line. Its text is made by its own code, which may fail too."""
    try:
        return error_line(error)
    except BaseException:
        return type(error).__name__


class _Refused(Exception):
    """The scorer returned something that is no score."""


def _number(value: object, what: str, lowest: float = -math.inf, highest: float = math.inf) -> float:
    # numbers.Real: numpy's numbers are neither int nor float. bool is allowed: True for "correct".
    if isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and lowest <= number <= highest:
            return number
    expected = "a finite number" if highest == math.inf else f"a number in [{lowest:g}, {highest:g}]"
    raise _Refused(f"the {what} {ascii(value)[:80]}, not {expected}")


def _read(requests: IO[bytes]) -> bytes | None:
    header = requests.read(LENGTH.size)
    return requests.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def _say(replies: IO[str], reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()
