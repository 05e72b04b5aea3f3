"""Settings of how answers are scored."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.errors import ConfigError
from orchestrator.scorers.weights import COMBINED_WEIGHTS
from orchestrator.settings.json_kinds import Table
from orchestrator.settings.kinds import MAX_TOKENS, OBJECT, URL, Flag, Integer, Number, Text, forms, seconds
from orchestrator.settings.row import PLAYS, RUNS, Resume, row
from orchestrator.settings.section import Settings

_SCORING = re.compile(rf"basic|correctness|combined|judge|grader|python:{OBJECT}")


@dataclass(frozen=True, kw_only=True, repr=False)
class ScoringSettings(Settings, group="Scoring", resume=Resume.DATA, commands=(*RUNS, *PLAYS, "rescore")):
    """How answers are scored."""

    scoring_strategy: str = row(
        "correctness",
        forms(
            *("STRATEGY", _SCORING.fullmatch),
            *("basic", "correctness", "combined", "judge", "grader", "python:MODULE:SCORER"),
        ),
        "how answers are scored; correctness: 1 for the right answer, else 0",
        resume=Resume.CODE,
        from_run=("demo", *PLAYS, "rescore"),
        first_run=RUNS,
    )
    reward_key: str | None = row(
        None,
        Text("a name", "NAME"),
        "with `grader`: which of the grader's rewards is the score; the others are parts of it",
        unset="none: `reward`, or the only one",
        commands=(*RUNS, *PLAYS, "rescore", "check-tasks"),
        from_run=(*PLAYS, "rescore"),
    )
    combined_weights: Mapping[str, float] | None = row(
        None,
        Table(tuple(COMBINED_WEIGHTS), Number(at_least=0, at_most=1)),
        "weights of `combined`, together at most 1; a missing one is 0",
        unset=f"none: {json.dumps(dict(COMBINED_WEIGHTS))}",
        from_run=(*PLAYS, "rescore"),
    )
    scorer_timeout: float = row(
        120.0,
        seconds(above=0),
        "grading one rollout; one reply of the judge, retries included",
        from_run=(*PLAYS, "rescore"),
    )
    judge_base_url: str | None = row(
        None, URL, "the judge's endpoint; its key: JUDGE_API_KEY", resume=Resume.CONFIRM
    )
    judge_model_name: str | None = row(
        None, Text("a name", "NAME"), "the model that judges", from_run=("branch", "rescore")
    )
    judge_max_tokens: int = row(
        1024, Integer(16, MAX_TOKENS), "tokens of one reply of the judge", from_run=("branch", "rescore")
    )
    length_penalty_weight: float = row(
        0.1, Number(at_least=0), "weight of the length penalty", from_run=(*PLAYS, "rescore")
    )
    debug_scoring: bool = row(False, Flag(), "log every part of each score", resume=Resume.FREE)

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.combined_weights
        if weights is not None and not (weights.get("correctness", 0) > 0 and sum(weights.values()) <= 1 + 1e-9):
            raise ConfigError(
                "env.combined_weights: correctness must weigh something, and all together at most 1; "
                f"not {json.dumps(dict(weights))}"
            )
