"""What follows from the settings: groups at a time, how long one may take, when the feed ends."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.atropos.terms import Terms, check_batch_size, check_servable, terms_of
from orchestrator.errors import ConfigError
from orchestrator.settings.table import EnvSettings
from orchestrator.types import Task


def terms(*, evaluates: bool = False, **env: Any) -> Terms:
    settings = EnvSettings(**env)
    return terms_of(settings, servers=1, sandboxes=settings.max_concurrent_sandboxes, evaluates=evaluates)


@pytest.mark.parametrize(
    ("sandboxes", "group_size", "asked", "workers"),
    [(8, 8, -1, None), (64, 8, 5, 5), (8, 8, 50, 50)],
)
def test_as_many_groups_may_be_under_way_as_are_asked_for(
    sandboxes: int, group_size: int, asked: int, workers: int | None
) -> None:
    made = terms(max_concurrent_sandboxes=sandboxes, group_size=group_size, max_num_workers=asked)
    assert made.workers == workers


def test_a_group_may_take_as_long_as_all_its_rollouts_may() -> None:
    env = EnvSettings()
    assert terms().worker_timeout_s > env.rollout_deadline * (env.max_retries + 1)
    # It bounds each rollout; the group lasts as long as its rollouts need to come to their ends.
    assert 77 * (env.max_retries + 1) < terms(worker_timeout=77).worker_timeout_s < terms().worker_timeout_s


def test_a_cluster_whose_nodes_are_all_away_at_the_start_has_terms() -> None:
    env = EnvSettings()
    assert terms_of(env, servers=1, sandboxes=0, evaluates=False).worker_timeout_s > env.rollout_deadline


def test_evaluations_take_place_where_something_is_held_out() -> None:
    assert terms(steps_per_eval=10).steps_per_eval == 0
    made = terms(evaluates=True, steps_per_eval=10, eval_handling="LIMIT_TRAIN", max_concurrent_sandboxes=24)
    assert (made.steps_per_eval, made.stop_for_eval, made.share_in_eval) == (10, False, 0.5)
    assert terms(evaluates=True).stop_for_eval
    assert terms(evaluates=True, eval_handling="NONE").share_in_eval == 1


def test_total_steps_are_groups_and_none_means_no_end() -> None:
    assert terms().total is None
    assert terms(total_steps=12).total == 12
    assert terms(batch_size=16).batch_size == 16
    assert terms().batch_size is None
    assert terms(inference_weight=-1).weight == 1.0, "-1 is Atropos' word for ignoring it"


def test_batches_of_whole_groups_only() -> None:
    check_batch_size(16, 8)
    with pytest.raises(ConfigError, match=r"--env\.group_size 6, .* multiple of 8"):
        check_batch_size(12, 8)


@pytest.mark.parametrize(
    "env", [{"group_policy": "partial:2"}, {"tokenizer_name": "none"}, {"inference_weight": 0}]
)
def test_what_cannot_be_served_is_refused_before_anything_opens(env: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(env))):
        check_servable(EnvSettings(**{"group_size": 2, **env}))


def test_a_task_with_a_longer_deadline_gives_its_group_more_time() -> None:
    made, longer = terms(rollout_deadline=100), Task("q", "?", limits={"rollout_deadline": 1000.0})
    assert made.time_limit_s(Task("q", "?")) == made.worker_timeout_s
    assert made.time_limit_s(longer) >= 10 * made.worker_timeout_s
    bounded = terms(rollout_deadline=100, worker_timeout=200)  # no rollout takes longer than that
    assert bounded.time_limit_s(longer) == 2 * bounded.worker_timeout_s
