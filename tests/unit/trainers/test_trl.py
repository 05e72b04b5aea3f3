"""The pure parts of the connection to TRL: without TRL, torch or a sandbox."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import BadTask, ConfigError, Row, SyncOrchestrator, Task, load_config
from orchestrator.errors import RecordError
from orchestrator.trainers.trl import Prompts, answer, dataset, delivered, prompt_of, reward, rollout_func
from orchestrator.trainers.trl_async import (
    RolloutBuffer,
    RolloutWorker,
    advantages,
    metrics,
    oldest_version,
    samples,
)
from orchestrator.types import Message, PolicySpan

END, PAD = 2, 0
TASKS = [
    Task("sum", "What is 17 plus 25?", "42"),
    Task("file-1", "What is in the file?", "a"),
    Task("file-2", "What is in the file?", "b"),
]


def row(**more: Any) -> Row:
    """Two turns: sampled, observed, sampled."""
    given: dict[str, Any] = {
        "rollout_id": "g000000-r00-a0",
        "task_id": "sum",
        "group": 0,
        "index": 0,
        "outcome": "finished",
        "score": 1.0,
        "prompt_ids": (5, 6),
        "completion_ids": (7, 8, 9, 10),
        "env_mask": (1, 1, 0, 1),
        "logprobs": (-0.5, -0.25, None, 0.0),
        "policy_spans": (PolicySpan(2, "3", "3"), PolicySpan(1, "4", "5")),
        "policy_version": "5",
        "token_source": "sampled",
        "finish_reason": "stop",
        "messages": (
            Message("system", "s"),
            Message("user", "q"),
            Message("assistant", "a"),
            Message("user", "o"),
        ),
        **more,
    }
    return Row(**given)


# ---------------------------------------------------------------- prompts


def test_a_prompt_of_ours_names_its_task_also_where_questions_are_the_same() -> None:
    prompts = Prompts(TASKS)
    assert [prompts.task(prompt_of(task)) for task in TASKS] == TASKS


def test_prompts_of_another_dataset_are_found_by_their_question() -> None:
    prompts = Prompts(TASKS)
    said = "What is 17 plus 25?"
    asked = [said, [{"role": "user", "content": said}], [{"role": "system", "content": "x"}, {"content": said}]]
    assert {prompts.task(prompt).task_id for prompt in asked} == {"sum"}


@pytest.mark.parametrize(
    ("prompt", "refusal"),
    [
        (
            "What is 18 plus 25?",
            r"a prompt matches no task: 'What is 18 plus 25\?'; give rollout_func all tasks",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "a prompt matches no task"),
        ([], "a prompt matches no task"),
        (None, "a prompt matches no task"),
        ("What is in the file?", r"2 tasks have the question 'What is in the file\?'; make .*dataset"),
        ([{"role": "user", "content": "?", "task_id": "gone"}], "has the task_id 'gone', which none of the tasks"),
        ("x" * 500, "'x{80}…'"),
    ],
)
def test_a_prompt_that_is_not_one_of_the_tasks_is_refused(prompt: Any, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        Prompts(TASKS).task(prompt)


def test_two_tasks_of_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="two of the id 'sum'"):
        Prompts([*TASKS, TASKS[0]])


def test_groups_are_those_of_the_trainer() -> None:
    prompts = Prompts([*TASKS, BadTask("torn", "no question")])
    one, other = prompt_of(TASKS[0]), prompt_of(TASKS[1])
    assert prompts.groups([one, one, other, other], 2) == [TASKS[0], TASKS[1]]
    assert prompts.groups([one, one, one, one], 2) == [TASKS[0], TASKS[0]]
    assert prompts.groups([one, other], 1) == [TASKS[0], TASKS[1]]
    for torn in ([one, one, one], [one, other, other, other]):
        with pytest.raises(ConfigError, match="no groups of 2 of the same prompt; set batch sizes"):
            prompts.groups(torn, 2)


def test_the_dataset_has_a_prompt_for_each_task_and_says_what_it_leaves_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = dataset([*TASKS, BadTask("torn", "no question")])
    assert rows["task_id"] == ["sum", "file-1", "file-2"]
    assert [Prompts(TASKS).task(prompt) for prompt in rows["prompt"]] == TASKS
    assert caplog.messages == ["task torn is left out: no question"]


# ---------------------------------------------------------------- rows


def test_a_completion_that_ends_on_a_stop_string_gets_a_masked_end() -> None:
    assert delivered(row(), [END, PAD], PAD) == (
        [5, 6],
        [7, 8, 9, 10, END],
        [1, 1, 0, 1, 0],
        [-0.5, -0.25, 0, 0, 0],
    )


@pytest.mark.parametrize("end", [END, PAD])
def test_a_completion_that_ends_by_itself_is_left_as_it_is(end: int) -> None:
    ended = row(completion_ids=(7, 8, 9, end))
    assert delivered(ended, [END, PAD], PAD)[1:3] == ([7, 8, 9, end], [1, 1, 0, 1])


def test_a_completion_that_was_cut_stays_truncated() -> None:
    assert delivered(row(finish_reason="length"), [END, PAD], PAD)[1] == [7, 8, 9, 10]


def test_a_row_without_ids_has_one_masked_token() -> None:
    lost = Row("g000000-r01-a0", "sum", 0, 1, "launch_error", None)
    assert delivered(lost, [END, PAD], PAD) == ([PAD], [PAD], [0], [0.0])
    prompted = row(completion_ids=(), env_mask=(), logprobs=(), score=None)
    assert delivered(prompted, [END, PAD], PAD) == ([5, 6], [PAD], [0], [0.0])


def test_a_log_prob_that_nobody_knows_is_none_and_never_certainty() -> None:
    assert delivered(row(logprobs=None), [END, PAD], PAD)[3] == [None, None, 0.0, None, 0.0]


def test_what_has_no_score_or_is_no_training_data_has_no_reward() -> None:
    rows = [row(), row(score=None), row(score=0.0), row(dropped="equal scores")]
    told = answer(rows, [END, PAD], PAD, with_logprobs=True)
    extra = {key: told[key] for key in told if key not in ("prompt_ids", "completion_ids", "env_mask", "logprobs")}
    rewards = reward(prompts=[], completions=[], completion_ids=[], trainer_state=None, **extra)
    assert rewards == [1.0, None, 0.0, None]
    assert {len(values) for values in told.values()} == {4}
    assert answer(rows, [END, PAD], PAD, with_logprobs=False)["logprobs"] is None


# ---------------------------------------------------------------- both sides' settings


def orchestrator(**env: Any) -> SyncOrchestrator:
    return SyncOrchestrator(load_config(env=env, openai={"base_url": "http://localhost:1/v1", "model_name": "m"}))


def trainer(**more: Any) -> Any:
    """What is looked at of a GRPOTrainer before anything is rolled out."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
    sampling["num_generations"] = 8
    args = SimpleNamespace(**{name: more.pop(name, value) for name, value in sampling.items()})
    given = {
        "args": args,
        "tools": [],
        "environment_factories": None,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_importance_sampling_correction": True,
        "off_policy_mask_threshold": None,
        **more,
    }
    return SimpleNamespace(**given)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"use_vllm": False}, 'TRL does not update an endpoint.* set use_vllm=True and vllm_mode="server"'),
        ({"vllm_mode": "colocate"}, "sandboxes cannot reach a vLLM inside the trainer"),
        ({"tools": [print]}, "tools, environment_factory"),
        ({"environment_factories": {None: object}}, "tools, environment_factory"),
        ({"temperature": 0.7}, r"env\.temperature is 1 and TRL's temperature 0\.7; set both alike"),
        ({"num_generations": 4}, r"env\.group_size is 8 and TRL's num_generations 4; set both alike"),
        ({"top_p": 0.9}, r"env\.top_p is 1 and TRL's top_p 0\.9; set both alike"),
        ({"top_k": 50}, "TRL's top_k 50: rollouts are sampled without it"),
        ({"min_p": 0.1}, r"TRL's min_p 0\.1: rollouts"),
        ({"repetition_penalty": 1.1}, r"TRL's repetition_penalty 1\.1: rollouts"),
    ],
)
def test_a_trainer_that_would_train_on_something_else_is_refused(settings: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        rollout_func(orchestrator(), TASKS)([prompt_of(TASKS[0])], trainer(**settings))


def test_two_that_update_the_endpoint_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="TRL updates its server itself"):
        rollout_func(orchestrator(), TASKS, update=print)([], trainer())


@pytest.mark.parametrize(
    "uses", [{}, {"use_vllm": False, "off_policy_mask_threshold": 0.5}, {"off_policy_mask_threshold": 0.5}]
)
def test_log_probs_of_another_temperature_than_trl_s_are_refused_where_it_uses_them(uses: dict[str, Any]) -> None:
    cold, update = orchestrator(temperature=0.6), None if uses.get("use_vllm", True) else print
    raw = rollout_func(cold, TASKS, update=update)
    with pytest.raises(ConfigError, match="start vLLM with --logprobs-mode processed_logprobs"):
        raw([], trainer(temperature=0.6, **uses))


@pytest.mark.parametrize(
    ("env", "mode", "correction", "delivered_at_all"),
    [
        ({}, "raw", True, True),  # at temperature 1 both are the same
        ({}, "processed", True, True),
        ({"temperature": 0.6}, "processed", True, True),
        ({"temperature": 0.6}, "raw", False, False),  # TRL does not use them, and shall not by chance
    ],
)
def test_both_of_trl_s_conventions_for_log_probs(
    env: dict[str, Any], mode: Any, correction: bool, delivered_at_all: bool
) -> None:
    ours: Any = rollout_func(orchestrator(**env), TASKS, logprobs_mode=mode)
    asked = trainer(vllm_importance_sampling_correction=correction, **env)
    assert ours._demand(asked) is delivered_at_all


def test_side_lines_have_no_place_in_a_synchronous_batch() -> None:
    with pytest.raises(ConfigError, match=r"env\.trained_segments all_segments: GRPOTrainer takes one line"):
        rollout_func(orchestrator(trained_segments="all_segments"), TASKS)


def test_an_asynchronous_trainer_updates_one_server() -> None:
    args = SimpleNamespace(**vars(trainer().args), queue_maxsize=8)
    servers = [{"base_url": f"http://localhost:{port}/v1", "model_name": "m"} for port in (8000, 8001)]
    two = SyncOrchestrator(load_config(openai=servers))
    with pytest.raises(ConfigError, match="TRL updates one server"):
        RolloutWorker(two, TASKS, args)


# ---------------------------------------------------------------- samples


def test_a_sample_is_the_whole_line_with_the_mask_of_the_record() -> None:
    rows = [row(), row(rollout_id="g000000-r01-a0", index=1, score=0.0), row(rollout_id="b", score=None)]
    first, second = samples(rows)
    assert first["input_ids"].tolist() == [5, 6, 7, 8, 9, 10]
    assert first["completion_mask"].tolist() == [0, 0, 1, 1, 0, 1]
    assert first["old_log_probs"].tolist() == [0, 0, -0.5, -0.25, 0, 0]
    assert [first["advantage"], second["advantage"]] == pytest.approx([1.0, -1.0])
    assert [message["content"] for message in first["prompt"]] == ["s", "q"]
    assert [message["content"] for message in first["completion"]] == ["a", "o"]
    assert first["metrics"] == {"reward": 1.0, "reward_std": 0.5, "rewards/score": 1.0}


def test_what_is_masked_or_dropped_or_has_no_score_gives_no_sample() -> None:
    assert samples([row(env_mask=(0, 0, 0, 0))]) == []
    assert samples([row(score=None), row(rollout_id="b", dropped="equal scores")]) == []
    assert advantages({}) == {}


def test_a_side_line_has_its_rollout_s_advantage_if_it_is_trained() -> None:
    rows = [row(), row(main=False, segment=1, weight=0.2), row(rollout_id="b", score=0.5)]
    assert [sample["advantage"] for sample in samples(rows)] == pytest.approx([1.0, 1.0, -1.0])
    untrained = row(main=False, score=None, weight=0.0, segment=2, env_mask=(0, 0, 0, 0), logprobs=(None,) * 4)
    assert len(samples([*rows, untrained])) == 3


def test_log_probs_that_the_trainer_divides_by_must_be_there() -> None:
    with pytest.raises(RecordError, match="gives no log-probs"):
        samples([row(logprobs=None)])


def test_a_sample_is_as_old_as_its_oldest_token() -> None:
    assert oldest_version(row()) == 3


@pytest.mark.parametrize("spans", [(), (PolicySpan(1, None, "3"),), (PolicySpan(1, "step-3", "step-3"),)])
def test_a_version_that_is_not_the_trainer_s_is_no_number(spans: tuple[PolicySpan, ...]) -> None:
    with pytest.raises(RecordError, match="which is no version of the trainer's"):
        oldest_version(row(policy_spans=spans))


def test_the_log_hears_what_became_of_a_group() -> None:
    rows = [row(), row(score=None, env_mask=(0, 0, 0, 0)), row(main=False), row(finish_reason="length")]
    assert metrics(rows) == {
        "completions/mean_length": (6.0, 3.0),
        "completions/max_length": 3.0,
        "completions/clipped_ratio": (1.0, 3.0),
        "rollout/unscored_total": 1.0,
        "rollout/groups_dropped_total": 0.0,
    }


# ---------------------------------------------------------------- how far ahead


def waiting(buffer: RolloutBuffer, rollouts: int) -> tuple[threading.Thread, list[bool]]:
    """A thread that wants to begin a group, and what it was answered."""
    answered: list[bool] = []
    thread = threading.Thread(target=lambda: answered.append(buffer.begin(rollouts)))
    thread.start()
    return thread, answered


def filled(buffer: RolloutBuffer, samples: int, begun: int) -> None:
    buffer.deliver([SimpleNamespace(enqueued_at=None) for _ in range(samples)], begun)


def test_a_group_begins_when_the_trainer_has_taken_enough() -> None:
    buffer = RolloutBuffer(8)
    assert buffer.begin(4)
    assert buffer.begin(4)
    thread, answered = waiting(buffer, 4)
    filled(buffer, 4, 4)
    for _ in range(3):
        buffer.get(timeout=60)
    assert answered == []
    buffer.get(timeout=60)
    thread.join(60)
    assert answered == [True]


def test_rollouts_without_a_sample_make_room_at_once() -> None:
    buffer = RolloutBuffer(4)
    assert buffer.begin(4)
    thread, answered = waiting(buffer, 4)
    filled(buffer, 0, 4)
    thread.join(60)
    assert answered == [True]


def test_one_group_always_has_room_and_no_bound_is_none() -> None:
    assert RolloutBuffer(1).begin(4)
    free = RolloutBuffer(0)
    assert all(free.begin(4) for _ in range(100))


def test_side_lines_count_too() -> None:
    buffer = RolloutBuffer(8)
    assert buffer.begin(4)
    filled(buffer, 8, 4)
    thread, answered = waiting(buffer, 4)
    for _ in range(4):
        buffer.get(timeout=60)
    thread.join(60)
    assert answered == [True]


def test_whoever_waits_for_room_hears_that_the_buffer_is_closed() -> None:
    buffer = RolloutBuffer(4)
    assert buffer.begin(4)
    thread, answered = waiting(buffer, 4)
    buffer.close()
    thread.join(60)
    assert answered == [False]
    assert not buffer.begin(4)
