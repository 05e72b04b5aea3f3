"""OpenEnv's sessions over live sandboxes, and OpenEnv's own checks over what they leave: real sockets and
sandboxes, a scripted endpoint."""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv", reason="needs the extra openenv")

from openenv.core.harness import ResourceSession, TrainableSession, TrainingTrace
from openenv.core.harness.capture.graph import RolloutGraph, TrainingSequence, TurnNode
from openenv.core.harness.capture.validate import check_sequence

from orchestrator import BadTask, Config, ConfigError, EnvironmentUnusable, Task, load_config
from orchestrator.run.groups import MASKED
from orchestrator.trainers.openenv import RolloutSession, RolloutSessionFactory, traces
from tests.e2e.endpoint import ScriptedEndpoint, answers, says, scripted_endpoint
from tests.fakes.runs import DEADLINE_S, lines, place
from tests.fakes.tokenizer import tokenizer_folder

pytestmark = pytest.mark.trainers

TASKS = [Task(f"q{n}", f"What is number {n} (of q{n}!)?", str(n)) for n in range(3)]
BROKEN = Task("broken", "What is it (of broken!)?", "1")
SLOW = Task("slow", "What is slow (of slow!)?", "1")
SCRIPT = {
    **{
        f"of q{n}!": [
            [says("Look.", f"x = {n}\nprint(x)"), answers("x")],
            [answers("-1")],
            [says("Look.", f"x = {n}\nprint(x)"), says("Again.", "print(x + 1)"), answers("x")],
        ]
        for n in range(3)
    },
    "of broken!": [[answers("1")]],
    "of slow!": [[says("Wait.", "import time\ntime.sleep(9_000)"), answers("1")]],
}
LONG = {"step_timeout": 9_000, "rollout_timeout": 9_000, "rollout_deadline": 9_000}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[ScriptedEndpoint]:
    fault = {"kind": "500", "pattern": "of broken!"}
    with scripted_endpoint(SCRIPT, "--dialect", "vllm", by="seed", faults=[fault]) as scripted:
        yield scripted


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with place() as home:
        monkeypatch.setattr("tempfile.tempdir", str(home))
        yield home


def config(endpoint: ScriptedEndpoint, **env: Any) -> Config:
    settings = {
        "launcher": "process",
        "group_size": 1,
        "max_concurrent_sandboxes": 4,
        "tokenizer_name": str(tokenizer_folder()),
        "token_source": "exact",
        "scoring_strategy": "correctness",
        "seed": 7,
        **env,
    }
    return load_config(env=settings, openai={"base_url": endpoint.base_url, "model_name": "scripted"})


def ended(session: RolloutSession) -> RolloutSession:
    session.wait_for_completion(DEADLINE_S)
    return session


def attempts(run: Path) -> dict[str, dict[str, Any]]:
    return {line["rollout_id"]: line for line in lines(run / "rollouts.jsonl") if "index" in line}


def trained(run: Path) -> dict[tuple[str, int], tuple[list[int], list[int], list[float]]]:
    """Rollout and segment → tokens, masks as 0 and 1, log-probs (0.0 where masked), of the groups file."""
    found = {}
    for group in lines(run / "groups.jsonl"):
        columns = (group[name] for name in ("overrides", "tokens", "masks", "inference_logprobs"))
        for facts, tokens, masks, logprobs in zip(*columns, strict=True):
            mask = [int(m != MASKED) for m in masks]
            kept = [p if m else 0.0 for p, m in zip(logprobs, mask, strict=True)]
            found[facts["rollout_id"], facts["segment"]] = (tokens, mask, kept)
    return found


def told(line: Mapping[str, Any]) -> list[tuple[list[int], list[int], list[float]]]:
    """(whole prompt, sampled ids, log-probs) of each completion of a line of rollouts.jsonl."""
    before: dict[int, list[int]] = {}
    found = []
    for said in line["completions"]:
        prompt = before.get(said["segment"], []) + said["prompt_ids"]
        found.append((prompt, said["token_ids"], said["logprobs"]))
        before[said["segment"]] = prompt + said["token_ids"]
    return found


def in_trace(trace: TrainingTrace) -> list[tuple[list[int], list[int], list[float]]]:
    turns = sorted(trace.turns, key=lambda turn: turn.metadata["sequence"])
    return [(turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps) for turn in turns]


def flattened(trace: TrainingTrace) -> list[TrainingSequence]:
    """The trace as OpenEnv's capture links and flattens it, by its prompts alone."""
    graph = RolloutGraph()
    for turn in trace.turns:
        graph.add_turn(
            TurnNode(turn.node_id, turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps)
        )
    return graph.sequences()


# ---------------------------------------------------------------- rows, bit by bit


def test_sessions_of_several_threads_are_the_record_bit_by_bit(endpoint: ScriptedEndpoint, home: Path) -> None:
    run = home / "run"
    asked = [(task, number) for task in TASKS for number in range(4)]
    with RolloutSessionFactory(config(endpoint, run_dir=str(run)), TASKS) as factory:

        def one(task: Task, number: int) -> tuple[TrainingTrace, Any]:
            session = factory.create(task.task_id, seed=3, episode_id=f"{task.task_id}/{number}")
            try:
                assert isinstance(session, ResourceSession)
                assert isinstance(session, TrainableSession)
                assert session.wait_for_completion(DEADLINE_S) == 0
                return session.fetch_training_trace(), session.verify([])
            finally:
                session.close()

        with ThreadPoolExecutor(len(asked)) as pool:
            given = list(pool.map(one, *zip(*asked, strict=True)))

    record, served = attempts(run), endpoint.completions()
    by_prompt = {(tuple(s["prompt_ids"]), tuple(s["sampled_ids"])): s["logprobs"] for s in served}
    for (task, _), (trace, verdict) in zip(asked, given, strict=True):
        line = record.pop(verdict.artifacts["rollout_id"])
        assert line["task_id"] == verdict.artifacts["task_id"] == task.task_id
        assert (verdict.env_reward, verdict.metrics) == (line["score"], line["score_parts"])
        assert verdict.done
        assert in_trace(trace) == told(line)
        for turn in trace.turns:
            sent = by_prompt[tuple(turn.prompt_token_ids), tuple(turn.completion_token_ids)]
            assert turn.per_token_logps == sent, "what the server itself says it sampled"
            mask = [0] * len(turn.prompt_token_ids) + [1] * len(turn.completion_token_ids)
            assert turn.loss_mask == mask
        assert dict(traces(run))[verdict.artifacts["rollout_id"]] == trace
    assert record == {}
    scores = {verdict.env_reward for _, verdict in given}
    assert scores == {0.0, 1.0}
    assert len({len(trace.turns) for trace, _ in given}) > 1
    assert list(home.glob("orchestrator-*")) == []


def test_openenv_flattens_a_trace_to_what_is_in_the_groups_file(endpoint: ScriptedEndpoint, home: Path) -> None:
    """Its graph finds by the prompts alone which turn continues which; plans are lines of their own."""
    run = home / "run"
    planning = {"planning_interval": 1, "trained_segments": "all_segments", "max_steps": 3}
    with scripted_endpoint(SCRIPT, "--dialect", "vllm", by="seed") as own:
        with RolloutSessionFactory(config(own, run_dir=str(run), **planning)) as factory:
            for session in [factory.create(task, seed=n) for task in TASKS for n in range(2)]:
                ended(session)
    compared, groups = 0, trained(run)
    for rollout_id, trace in traces(run):
        sequences = flattened(trace)
        assert len(sequences) == len({turn.metadata["segment"] for turn in trace.turns}) > 1
        segments = {turn.node_id: turn.metadata["segment"] for turn in trace.turns}
        for sequence in sequences:
            assert check_sequence(sequence).ok
            key = (rollout_id, segments[sequence.node_ids[0]])
            assert (sequence.input_ids, sequence.loss_mask, sequence.logprobs) == groups.pop(key)
            compared += 1
    assert groups == {}
    assert compared >= 12


def test_side_lines_are_context_unless_the_run_trains_on_them(endpoint: ScriptedEndpoint, home: Path) -> None:
    with RolloutSessionFactory(config(endpoint, planning_interval=1), TASKS) as factory:
        trace = ended(factory.create("q0", seed=1)).fetch_training_trace()
    segments = [turn.metadata["segment"] for turn in trace.turns]
    main = trace.turns[-1].metadata["segment"]
    assert len(set(segments)) > 1
    assert segments == sorted(segments, key=lambda segment: (segment == main, segment))
    for turn in trace.turns:
        assert any(turn.loss_mask) == (turn.metadata["segment"] == main)


# ---------------------------------------------------------------- seeds


def test_the_same_names_sample_the_same_and_nothing_else_does(endpoint: ScriptedEndpoint, home: Path) -> None:
    run = home / "run"
    named: list[tuple[int | None, str | None]] = [(1, "a"), (1, "b"), (2, "a"), (1, None), (None, "a"), (0, None)]
    with RolloutSessionFactory(config(endpoint, run_dir=str(run))) as factory:

        def seeds(asked: list[tuple[int | None, str | None]]) -> list[int]:
            sessions = [factory.create(TASKS[0], seed, episode_id) for seed, episode_id in asked]
            ids = [ended(session).verify([]).artifacts["rollout_id"] for session in sessions]
            return [attempts(run)[rollout_id]["plan"]["sampling"]["seed"] for rollout_id in ids]

        first, again, unnamed = seeds(named), seeds(named), seeds([(None, None)] * 3)
    assert first == again
    assert len({*first, *unnamed}) == len(named) + 3


# ---------------------------------------------------------------- what is no reward


def test_infrastructure_has_no_reward_and_nothing_to_train_on(endpoint: ScriptedEndpoint, home: Path) -> None:
    """At the first completion nobody can have chosen a failure; it is no 0."""
    run = home / "run"
    with RolloutSessionFactory(config(endpoint, run_dir=str(run), max_retries=0, group_policy="drop")) as factory:
        session = factory.create(BROKEN, seed=1)
        assert session.wait_for_completion(DEADLINE_S) == 1
        verdict, trace = session.verify([]), session.fetch_training_trace()
        assert ended(factory.create(TASKS[0], seed=1)).verify([]).env_reward is not None
    assert verdict.env_reward is None
    assert not verdict.done
    assert verdict.artifacts["outcome"] == "llm_error"
    assert trace.turns == []
    assert attempts(run)[verdict.artifacts["rollout_id"]]["score"] is None


def test_a_rollout_that_is_no_training_data_is_masked_and_has_no_reward(
    endpoint: ScriptedEndpoint, home: Path
) -> None:
    with RolloutSessionFactory(config(endpoint, max_steps=1, untrained_outcomes=["max_steps"])) as factory:
        sessions = [ended(factory.create(TASKS[0], seed=n)) for n in range(6)]
        cut = [s for s in sessions if s.verify([]).artifacts["outcome"] == "max_steps"]
        whole = [s for s in sessions if s.verify([]).artifacts["outcome"] == "finished"]
    assert cut
    assert whole
    for session in cut:
        assert session.verify([]).env_reward == 0.0, "the policy's own end"
        assert not any(any(turn.loss_mask) for turn in session.fetch_training_trace().turns)
    for session in whole:
        assert all(any(turn.loss_mask) for turn in session.fetch_training_trace().turns)


def test_a_bad_task_is_told_and_an_unknown_one_refused(endpoint: ScriptedEndpoint, home: Path) -> None:
    twins = [Task("one", "What?", "1"), Task("other", "What?", "2")]
    known = [*TASKS, BadTask("torn", "no question"), *twins]
    with RolloutSessionFactory(config(endpoint), known) as factory:
        session = factory.create("torn")
        assert session.wait_for_completion(DEADLINE_S) == 1
        verdict = session.verify([])
        assert (verdict.env_reward, verdict.artifacts["outcome"]) == (None, "bad_task")
        assert verdict.artifacts["reason"] == "no question"
        assert session.fetch_training_trace().turns == []
        with pytest.raises(
            ConfigError, match=r"no task of the factory has the id or question 'nobody'; give a Task"
        ):
            factory.create("nobody")
        with pytest.raises(ConfigError, match=r"several tasks have the id or question 'What\?'"):
            factory.create("What?")
        with pytest.raises(ConfigError, match="task: a dict names no task; give a Task"):
            factory.create({"task": "q0"})
        conversation = [{"role": "system", "content": "Be good."}, {"role": "user", "content": TASKS[1].question}]
        session = factory.create(conversation, seed=1)
        assert session.initial_messages() == conversation[1:]
        assert ended(session).verify([]).artifacts["task_id"] == "q1"
        assert session.list_tools() == []
        with pytest.raises(KeyError, match="the agent in the sandbox calls its tools itself"):
            session.call_tool("python", {})


# ---------------------------------------------------------------- sessions that are not over


def test_a_session_that_is_not_over_says_so_and_goes_on(endpoint: ScriptedEndpoint, home: Path) -> None:
    run = home / "run"
    with RolloutSessionFactory(config(endpoint, run_dir=str(run), **LONG)) as factory:
        session = factory.create(SLOW)
        with pytest.raises(TimeoutError, match=r"not over after 0\.1 s"):
            session.wait_for_completion(0.1)
        for asked in (session.fetch_training_trace, lambda: session.verify([])):
            with pytest.raises(RuntimeError, match="call wait_for_completion first"):
                asked()
        assert ended(factory.create(TASKS[0])).verify([]).done, "others go on meanwhile"
        session.close()
        session.close()
        assert [line["outcome"] for line in attempts(run).values()].count("cancelled") == 1
        for asked in (session.wait_for_completion, session.fetch_training_trace, lambda: session.verify([])):
            with pytest.raises(RuntimeError, match="closed before its rollout was over"):
                asked()
    assert list(home.glob("orchestrator-*")) == []


def test_a_close_ends_the_wait_of_another_thread(endpoint: ScriptedEndpoint, home: Path) -> None:
    """As TRL does when it stops: its sessions are waited for in one thread and closed in another."""
    with RolloutSessionFactory(config(endpoint, **LONG)) as factory:
        session, waits, errors = factory.create(SLOW), threading.Event(), list[BaseException]()

        def wait() -> None:
            waits.set()
            try:
                session.wait_for_completion()
            except RuntimeError as error:
                errors.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        assert waits.wait(DEADLINE_S)
        session.close()
        waiter.join(DEADLINE_S)
    assert [str(error) for error in errors] == ["the session was closed before its rollout was over"]


def test_a_closed_factory_cancels_its_sessions_and_keeps_what_is_over(
    endpoint: ScriptedEndpoint, home: Path
) -> None:
    factory = RolloutSessionFactory(config(endpoint, **LONG))
    over, going_on = ended(factory.create(TASKS[0], seed=1)), factory.create(SLOW)
    factory.close()
    factory.close()
    assert over.verify([]).done
    assert over.fetch_training_trace().turns
    with pytest.raises(RuntimeError, match="the orchestrator was closed"):
        going_on.wait_for_completion()
    with pytest.raises(RuntimeError, match="closed: make a new one"):
        factory.create(TASKS[0])
    assert list(home.glob("orchestrator-*")) == []


@pytest.mark.docker
def test_a_session_closed_early_leaves_no_container(endpoint: ScriptedEndpoint, home: Path) -> None:
    from tests.e2e.leftovers import containers_of

    own = config(endpoint, launcher="docker", warm_sandboxes=0, max_concurrent_sandboxes=1, **LONG)
    before = len(endpoint.completions_of("of slow!"))
    with RolloutSessionFactory(own) as factory:
        session = factory.create(SLOW)
        while len(endpoint.completions_of("of slow!")) == before:
            with pytest.raises(TimeoutError):
                session.wait_for_completion(0.1)
        (container,) = containers_of(os.getpid())
        session.close()
        # There is room for one container, those that are being removed included.
        assert ended(factory.create(TASKS[0], seed=1)).fetch_training_trace().turns
        assert container not in containers_of(os.getpid())
    assert containers_of(os.getpid()) == []


# ---------------------------------------------------------------- what is refused at the start


@pytest.mark.parametrize(
    ("env", "refusal"),
    [
        ({"group_size": 4}, r"env\.group_size: it is 4, OpenEnv's sessions need 1: a session is one rollout"),
        ({"total_steps": 3}, r"env\.total_steps: it is 3, .* need -1"),
        ({"curriculum": "pools"}, r"env\.curriculum: it is pools"),
        ({"zero_variance": "drop"}, r"env\.zero_variance: it is drop"),
        ({"token_source": "auto"}, r"env\.token_source: it is auto, .* need exact"),
        ({"temperature": 0.7}, r"env\.temperature: it is 0\.7, .* log-probs"),
        ({"top_p": 0.9}, r"env\.top_p: it is 0\.9"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_under_which_a_trace_would_be_wrong_are_refused(
    env: dict[str, Any], refusal: str, endpoint: ScriptedEndpoint
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        RolloutSessionFactory(config(endpoint, **env))


def test_an_endpoint_without_ids_is_refused(home: Path) -> None:
    with scripted_endpoint(SCRIPT, "--dialect", "openai") as chat:
        with pytest.raises(EnvironmentUnusable, match=r"env\.token_source"):
            RolloutSessionFactory(config(chat)).create(TASKS[0])


def test_a_trainers_sampling_must_be_the_runs(endpoint: ScriptedEndpoint, home: Path) -> None:
    """As TRL makes it: pickled into the process of its worker, and called there with its own sampling."""
    make = pickle.loads(pickle.dumps(functools.partial(RolloutSessionFactory, config(endpoint), TASKS)))
    policy = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    with make(sampling=policy) as factory:
        assert ended(factory.create(TASKS[0].question, seed=1)).verify([]).done
    with pytest.raises(ConfigError, match=r"sampling: the trainer's temperature is 0\.5, the sandboxes' 1\.0"):
        make(sampling={**policy, "temperature": 0.5})
