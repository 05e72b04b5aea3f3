"""Measuring: what counts as wrong and what as missing, what is written, and the budget shared with training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from orchestrator.atropos.tracking import Metrics
from orchestrator.cli import main
from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.route import LimitedCompleter
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.shared import Opened
from orchestrator.errors import ConfigError, RecordError
from orchestrator.evaluation.evaluate import evaluate
from orchestrator.evaluation.files import EvaluationFiles, sample_line
from orchestrator.evaluation.measured import Evaluation
from orchestrator.evaluation.table import print_evaluation
from orchestrator.host.local import LocalHost
from orchestrator.host.resources import Resources
from orchestrator.rules.observer import Observer
from orchestrator.rules.plan import server_of
from orchestrator.run.prices import Prices
from orchestrator.run.tally import Tally
from orchestrator.settings.config import Config
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.table import EnvSettings
from orchestrator.tasks.base import Source
from orchestrator.types import BadTask, Completion, Failed, FailedName, Group, Score, Task
from tests.fakes.completers import FunctionCompleter
from tests.fakes.fake_launcher import FakeLauncher
from tests.fakes.plans import a_member, an_attempt
from tests.fakes.runs import lines
from tests.fakes.scorers import DirectScorer
from tests.unit.test_executor import answering

PRICED = OpenAISettings(base_url="http://localhost:1/v1", prompt_price=2.0, completion_price=8.0)


def a_group(correct: list[bool | None], **task: Any) -> Group:
    """A task with such samples; None: it broke, once before too."""
    broken = Failed(FailedName.LLM_ERROR, "HTTP 500")
    members = tuple(a_member(index, float(right)) for index, right in enumerate(correct) if right is not None)
    lost = [
        an_attempt(broken, index, attempt)
        for index, right in enumerate(correct)
        if right is None
        for attempt in (0, 1)
    ]
    return Group(0, Task("t", "What?", "4", **task), members, (*(m.attempt for m in members), *lost))


def measured(*groups: Group, **more: Any) -> Evaluation:
    evaluation = Evaluation(2, **more)
    for group in groups:
        evaluation.take(group)
    return evaluation


def test_a_sample_that_broke_is_no_wrong_answer() -> None:
    evaluation = measured(a_group([True, False]), a_group([True, None]), a_group([None, None]))
    assert (evaluation.samples, evaluation.missing, evaluation.retries) == (3, 3, 3)
    first, second = evaluation.pass_at(1), evaluation.pass_at(2)
    assert first is not None
    assert second is not None
    assert (first.value, first.tasks) == (0.75, 2)
    assert (second.value, second.tasks) == (1.0, 1)
    assert evaluation.outcomes == {"finished": 3, "llm_error": 3}
    assert not evaluation.complete
    assert measured(a_group([False, False])).complete
    assert not measured().complete


def test_a_task_that_cannot_be_asked_is_a_bad_task() -> None:
    attempt = an_attempt(Failed(FailedName.BAD_TASK, "the task does not fit"))
    evaluation = measured(Group(0, Task("t", "What?"), (), (attempt,)), a_group([True, True]))
    assert (evaluation.bad_tasks, evaluation.missing, len(evaluation.tasks)) == (1, 0, 1)
    assert evaluation.complete


@pytest.mark.parametrize(
    ("score", "solved"),
    [
        (Score(1.0), True),
        (Score(0.99), False),
        (Score(0.5, {"style": 1.0}), False),
        (Score(1.0, {"judge": 1.0, "by_rules": 0.0}), True),
        (Score(0.0, {"judge": 0.0, "by_rules": 1.0}), False),
        (Score(0.45, {"correctness": 1.0}), True),
        (Score(0.9, {"correctness": 0.0}), False),
    ],
)
def test_what_the_scorer_calls_solved_is_solved_and_its_mean_is_told(score: Score, solved: bool) -> None:
    group = a_group([True, False])
    evaluation = measured(replace(group, members_G=tuple(replace(m, score=score) for m in group.members_G)))
    assert (evaluation.samples, evaluation.missing) == (2, 0)
    metrics = evaluation.metrics()
    assert (metrics["eval/accuracy"], metrics["eval/score_mean"]) == (float(solved), score.value)
    tally, trained = Tally(), Metrics()
    for member in group.members_G:
        tally.attempt(replace(member, score=score))
        trained.attempt(replace(member, score=score))
    assert (tally.correct, tally.mean_score) == (2 * solved, score.value)
    assert trained.taken()["train/correct"] == float(solved)
    sample = sample_line(replace(group.members_G[0], score=score), messages=False)
    assert (sample["correct"], sample["score"]) == (solved, score.value)


def test_what_is_missing_never_makes_a_model_look_better_unseen() -> None:
    evaluation = measured(a_group([True, True]), a_group([None, None]), a_group([True, None]))
    metrics = evaluation.metrics()
    assert (metrics["eval/accuracy"], metrics["eval/accuracy_missing_wrong"]) == (1.0, 0.5)
    stream = StringIO()
    print_evaluation(evaluation, Tally(), [], stream)
    assert "counted as wrong, pass@1 were 50.0%" in stream.getvalue()
    assert "eval/accuracy_missing_wrong" not in measured(a_group([True, False])).metrics()
    # What the policy brought about itself is no sample that is missing: it is scored.
    group = a_group([True, False])
    ended = replace(group.members_G[1], score=Score(0.0, {}, {"failure": "it raised"}))
    assert measured(replace(group, members_G=(group.members_G[0], ended))).metrics()["eval/accuracy"] == 0.5


def test_metrics_have_accuracy_by_level_and_source_and_are_plain_numbers() -> None:
    evaluation = measured(
        a_group([True, True], level="1", source="gaia"), a_group([False, False], level="2", source="gaia")
    )
    metrics = evaluation.metrics()
    assert metrics["eval/accuracy"] == metrics["eval/pass@1"] == metrics["eval/accuracy_source_gaia"] == 0.5
    assert (metrics["eval/accuracy_level_1"], metrics["eval/accuracy_level_2"]) == (1.0, 0.0)
    assert 0 < metrics["eval/accuracy_low"] < 0.5 < metrics["eval/accuracy_high"] < 1
    assert metrics["eval/pass@2"] == 0.5
    assert metrics["eval/steps"] == 1.0
    assert "eval/cost" not in metrics
    assert all(isinstance(value, int | float) for value in metrics.values())
    empty = measured().metrics()
    assert "eval/accuracy" not in empty
    assert empty["eval/samples"] == 0


def test_cost_is_of_every_attempt_at_its_server_s_price() -> None:
    group = a_group([True, None])
    sampled = group.attempts[0].record.sampled_tokens
    evaluation = measured(group, prices=Prices.of((PRICED,), EnvSettings()))
    assert evaluation.cost == pytest.approx(3 * (10 * 2.0 + sampled * 8.0) / 1e6)
    dear = replace(PRICED, prompt_price=0.0, completion_price=1000.0, weight=3.0)
    two = Prices.of((PRICED, dear), EnvSettings())
    assert two is not None
    ids = [f"g{n:06d}-r00-a0" for n in range(50)]
    places = [server_of(rollout_id, two.weights) for rollout_id in ids]
    assert 25 < sum(places) < 50
    attempt = group.attempts[0]
    for rollout_id, place in zip(ids, places, strict=True):
        cost = two.cost_of(replace(attempt, plan=replace(attempt.plan, rollout_id=rollout_id)))
        assert cost == pytest.approx(sampled * 1e-3 if place else (20 + sampled * 8) / 1e6)


def test_half_a_price_is_refused() -> None:
    assert Prices.of(Config().openai, EnvSettings()) is None
    for servers in ([replace(PRICED, prompt_price=None)], [PRICED, OpenAISettings()]):
        with pytest.raises(ConfigError, match="give both, for every server, or none"):
            Prices.of(servers, EnvSettings())


def test_the_table_shows_labels_as_text_and_what_is_missing() -> None:
    prices = Prices.of((PRICED,), EnvSettings())
    evaluation = measured(a_group([True, None], level="[red]\x1b[31m"), prices=prices)
    stream, tally = StringIO(), Tally(prices)
    tally.attempt(an_attempt(Failed(FailedName.SCORER_ERROR, "mine raised\n\x1b[31mKeyError")))
    print_evaluation(evaluation, tally, [("metrics", "m.json")], stream)
    printed = stream.getvalue()
    assert "\x1b" not in printed
    assert "level [red]" in printed
    assert "100.0% (20.7% to 100.0%)" in printed
    assert "scorer_error   1, the first: mine raised [31mKeyError\n" in printed
    for label in ("outcomes", "missing", "per sample", "cost", "metrics"):
        assert f"\n{label} " in printed


def test_evaluation_settings_are_its_own_and_stay_when_applied_again() -> None:
    env = EnvSettings(
        eval_samples=3, eval_temperature=0.2, group_policy="partial:5", zero_variance="resample", max_staleness=0
    ).for_evaluation()
    assert (env.group_size, env.temperature, env.group_policy, env.zero_variance) == (3, 0.2, "partial:1", "keep")
    assert env.max_staleness is None
    assert env.for_evaluation() == env
    assert EnvSettings().for_evaluation().temperature == 1.0
    for strategy in ("basic", "combined", "judge", "python:m:f"):
        assert EnvSettings(scoring_strategy=strategy).for_evaluation().scoring_strategy == strategy


def test_training_and_evaluation_score_correctness_unless_another_strategy_is_named(tmp_path: Path) -> None:
    seen = []

    def carried_out(config: Config, **own: object) -> int:
        seen.append(config.env.scoring_strategy)
        return 0

    where = ["--openai.base_url", "http://localhost:1/v1"]
    named = ["--env.scoring_strategy", "combined"]
    for argv in (["evaluate"], ["evaluate", *named], ["process"], ["process", "--env.scoring_strategy=basic"]):
        assert main([*argv, *where], {"evaluate": carried_out, "process": carried_out}) == 0
    assert seen == ["correctness", "combined", "correctness", "basic"]


async def test_requests_for_evaluation_have_a_limit_of_their_own() -> None:
    running: dict[str, int] = {"train": 0, "eval": 0}
    most: dict[str, int] = {"train": 0, "eval": 0}

    class Counting(FunctionCompleter):
        async def sample(self, request: CompletionRequest) -> Completion:
            running[request.split] += 1
            most[request.split] = max(most[request.split], running[request.split])
            for _ in range(3):
                await asyncio.sleep(0)
            running[request.split] -= 1
            return await super().sample(request)

    counting = Counting(lambda request: "42")
    limited = LimitedCompleter(counting, training=5, evaluation=2)
    plan = a_member().attempt.plan
    request = CompletionRequest((), None, (), plan.sampling, "r", "t", 0, 1)
    both = [request, replace(request, split="eval")] * 10
    await asyncio.gather(*(limited.sample(each) for each in both))
    assert most == {"train": 5, "eval": 2}
    assert len(counting.requests) == 20


class Home:
    """An open orchestrator over a fake launcher: model says what `answer` says."""

    def __init__(self, answer: Callable[[CompletionRequest], str], **env: Any) -> None:
        self.launcher = FakeLauncher(answering, max_sandboxes=100)
        self.completer = FunctionCompleter(answer)
        self._directory = TemporaryDirectory(prefix="x")
        self.config = Config(env=EnvSettings(seed=5, **env), openai=(PRICED,))
        self.orchestrator = Orchestrator(self.config, Observer())
        around = Resources(self.launcher, self.completer, None, self._channel)
        most = self.config.env.max_concurrent_sandboxes
        hosts = LocalHost(around, self.config.sandbox_spec(), max_sandboxes=most)
        self.orchestrator.shared.opened = Opened(hosts, DirectScorer("combined"))

    @contextmanager
    def _channel(self) -> Any:
        with TemporaryDirectory(dir=self._directory.name) as path:
            yield Path(path)


def tasks(*names: str) -> Source:
    return Source("some tasks", lambda: iter([Task(n, "What is 6 times 7?", "42") for n in names]))


def right_on_even_seeds(request: CompletionRequest) -> str:
    return "42" if request.sampling.seed % 2 else "41"


async def test_an_evaluation_of_a_resumed_run_begins_in_a_directory_of_its_own(tmp_path: Path) -> None:
    home = Home(right_on_even_seeds, resume=tmp_path, eval_samples=2)
    directory = tmp_path / "evals" / "step-000007"
    async with asyncio.timeout(120):
        evaluation = await evaluate(home.orchestrator, tasks("e1"), directory)
    assert evaluation is not None
    assert evaluation.complete
    assert (directory / "metrics.json").exists()


async def test_an_evaluation_beside_training_keeps_to_its_budget(tmp_path: Path) -> None:
    home = Home(
        right_on_even_seeds,
        group_size=3,
        max_concurrent_sandboxes=3,
        total_steps=4,
        eval_samples=2,
        eval_temperature=0.25,
        max_eval_workers=1,
        scoring_strategy="combined",
    )
    trained = []

    async def training() -> None:
        async with aclosing(home.orchestrator.groups(tasks("a", "b"))) as groups:
            async for group in groups:
                trained.append(group)

    directory = tmp_path / "evals" / "step-000100"
    async with asyncio.timeout(120):
        _, evaluation = await asyncio.gather(
            training(), evaluate(home.orchestrator, tasks("e1", "e2", "e3"), directory)
        )
    assert evaluation is not None
    assert evaluation.complete
    assert len(trained) == 4  # `total_steps` is about training
    assert (len(evaluation.tasks), evaluation.samples) == (3, 6)
    assert 1 < home.launcher.most_at_once <= 3
    asked = {split: [r for r in home.completer.requests if r.split == split] for split in ("train", "eval")}
    assert {r.sampling.temperature for r in asked["eval"]} == {0.25}
    assert {r.sampling.temperature for r in asked["train"]} == {1.0}
    assert {r.task_id for r in asked["eval"]} == {"e1", "e2", "e3"}
    told = json.loads((directory / "metrics.json").read_text())
    assert told["results"]["all"] == told["results"]["atropos|smolagents_eval|0"] == evaluation.metrics()
    assert told["config_general"]["generation_parameters"]["temperature"] == 0.25
    float(told["config_general"]["total_evaluation_time_seconds"])
    samples = lines(directory / "samples.jsonl")
    assert len(samples) == 6
    for sample in samples:
        assert sample["correct"] == (sample["answer"] == "42") == (sample["score"] > 0.45)
    assert evaluation.metrics()["eval/score_mean"] == pytest.approx(sum(s["score"] for s in samples) / 6)
    assert not (directory / "samples.jsonl.part").exists()


async def test_what_was_drained_is_gone_on_with_and_nothing_is_asked_twice(tmp_path: Path) -> None:
    asked = 0

    def answer(request: CompletionRequest) -> str:
        nonlocal asked
        asked += 1
        if asked == 3:
            home.orchestrator.drain()
        return right_on_even_seeds(request)

    settings: dict[str, Any] = {"eval_samples": 2, "max_concurrent_sandboxes": 2}
    home = Home(answer, **settings)
    source = Source("s", lambda: iter([BadTask("b", "torn"), *tasks("a", "b", "c", "d")]))
    directory = tmp_path / "run"
    async with asyncio.timeout(120):
        assert await evaluate(home.orchestrator, source, directory) is None
        assert not (directory / "metrics.json").exists()
        first = len(home.completer.requests)
        assert 3 <= first < 8
        again = Home(right_on_even_seeds, **settings)
        evaluation = await evaluate(again.orchestrator, source, directory)
        undisturbed = await evaluate(
            Home(right_on_even_seeds, **settings).orchestrator, source, tmp_path / "other"
        )
    assert evaluation is not None
    assert undisturbed is not None
    assert first + len(again.completer.requests) == 8
    assert sorted(t.correct for t in evaluation.tasks) == sorted(t.correct for t in undisturbed.tasks)
    assert (evaluation.samples, evaluation.bad_tasks) == (8, 1)
    assert len(lines(directory / "samples.jsonl")) == 8


async def test_our_own_failures_are_written_as_missing(tmp_path: Path) -> None:
    def answer(request: CompletionRequest) -> str:
        if request.task_id == "broken":
            raise RecordError("the recording ends")
        return "42"

    home = Home(answer, eval_samples=2, max_retries=0, include_messages=False)
    async with asyncio.timeout(120):
        evaluation = await evaluate(home.orchestrator, tasks("fine", "broken"), tmp_path / "run")
    assert evaluation is not None
    assert (evaluation.samples, evaluation.missing) == (2, 2)
    assert evaluation.metrics()["eval/accuracy"] == 1.0
    samples = {line["task_id"]: line for line in lines(tmp_path / "run" / "samples.jsonl")}
    assert samples["broken"]["correct"] is None
    assert samples["broken"]["score"] is None
    assert samples["broken"]["outcome"] == "record_error"
    assert samples["fine"]["correct"] is True
    assert samples["fine"]["messages"] is None


async def test_files_go_where_asked_over_older_ones_and_not_into_another_kind_of_run(tmp_path: Path) -> None:
    env = EnvSettings()
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "metrics.json").write_text("older")
    with closing(EvaluationFiles(tmp_path / "run", env, tmp_path / "evals", resume=False)) as files:
        await files.finish(measured(), "m", Config().sampling())
    assert json.loads((tmp_path / "evals" / "metrics.json").read_text())["results"]["all"]["eval/tasks"] == 0
    assert (tmp_path / "evals" / "samples.jsonl").read_text() == ""
    (tmp_path / "run" / "run.json").write_text(json.dumps({"config": {}, "command": "process"}))
    with pytest.raises(ConfigError, match="holds no evaluation"):
        EvaluationFiles(tmp_path / "run", env, None, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        EvaluationFiles(tmp_path / "run2", env, tmp_path / "file", resume=False)
