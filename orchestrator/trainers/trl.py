"""TRL's GRPOTrainer (1.16 or a later 1.x): prompts in, rollouts of agents out.

orchestrator = SyncOrchestrator(config)
rollouts = rollout_func(orchestrator, tasks)
trainer = GRPOTrainer(model, reward, args, train_dataset=dataset(tasks), rollout_func=rollouts)

With several processes, one of them rolls out for all, so that no group is torn, and the others wait. The worker of
AsyncGRPOTrainer is in `trl_async`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from orchestrator.completion.base import Tokenizer
from orchestrator.engine.run_json import no_sampled_ids
from orchestrator.engine.sync import SyncOrchestrator
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.rules.observer import Observer
from orchestrator.run.rows import Row
from orchestrator.settings.sampling import SamplingSettings
from orchestrator.types import BadTask, Message, Task

log = logging.getLogger(__name__)

LogprobsMode = Literal["raw", "processed"]
RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
CALLS_PER_STEP = 1 << 16  # each call within a training step has seeds of its own
_SHOWN_CHARS = 80


def reward(*, score: Sequence[float | None], **_: Any) -> list[float | None]:
    """The scores, as TRL's reward function. None: the rollout has none, and TRL leaves it out of its group's mean.

    A reward function of yours beside it must be None in the same places, or the rollout counts by that one alone.
    """
    return list(score)


def dataset(tasks: Iterable[Task | BadTask]) -> Any:
    """The tasks as a `datasets.Dataset` with the columns `prompt` and `task_id`, for training or evaluation. Rows
    that no task could be made of are logged and left out."""
    from datasets import Dataset

    rows = []
    for task in tasks:
        if isinstance(task, BadTask):
            log.warning("task %s is left out: %s", task.task_id, task.reason)
        else:
            rows.append({"prompt": prompt_of(task), "task_id": task.task_id})
    return Dataset.from_list(rows)


def rollout_func(
    orchestrator: SyncOrchestrator,
    tasks: Iterable[Task | BadTask],
    *,
    update: Callable[[Any], None] | None = None,
    logprobs_mode: LogprobsMode = "raw",
) -> RolloutFunc:
    """What GRPOTrainer takes as `rollout_func`. In evaluation a task gets `num_generations_eval` rollouts.

    `tasks`: those of the training and of the evaluation dataset. `update`: puts the trainer's weights into the
    endpoint; it is called with the trainer, in every process, before the first rollouts of a training step. It is
    needed unless TRL does that itself (`use_vllm=True, vllm_mode="server"`). `logprobs_mode`: the endpoint's
    log-probs are of the model's own distribution, or `processed` by the sampling temperature, as of a vLLM with
    `--logprobs-mode processed_logprobs`.

    Beside TRL's keys, the result has for reward functions: `score`, `outcome`, `task_id`, `rollout_id`,
    `policy_version`, each a value per row. Raises ConfigError, and what ends a run, in all processes.
    """
    return _Rollouts(orchestrator, Prompts(tasks), update, logprobs_mode)


# ---------------------------------------------------------------- prompts


def prompt_of(task: Task) -> list[dict[str, str]]:
    """The task as a prompt of TRL's. The chat template of the model does not see it: the agent has its own."""
    return [{"role": "user", "content": task.question, "task_id": task.task_id}]


class Prompts:
    """Finds the task of a prompt: by its `task_id`, else by its text, which is then a task's question."""

    def __init__(self, tasks: Iterable[Task | BadTask]) -> None:
        """Raises ConfigError for two tasks of one id."""
        self._by_id: dict[str, Task] = {}
        self._by_question: dict[str, list[Task]] = {}
        for task in tasks:
            if isinstance(task, BadTask):
                continue
            if task.task_id in self._by_id:
                raise ConfigError(f"tasks: there are two of the id {_shown(task.task_id)}; give each its own")
            self._by_id[task.task_id] = task
            self._by_question.setdefault(task.question, []).append(task)

    def task(self, prompt: Any) -> Task:
        """Raises ConfigError for a prompt that matches no task, or several."""
        last = prompt[-1] if isinstance(prompt, list) and prompt else {"content": prompt}
        named, text = (last.get("task_id"), last.get("content")) if isinstance(last, Mapping) else (None, None)
        if named is not None:
            if (task := self._by_id.get(named)) is None:
                raise ConfigError(f"a prompt has the task_id {_shown(named)}, which none of the tasks has")
            return task
        tasks = self._by_question.get(text, []) if isinstance(text, str) else []
        if not tasks:
            raise ConfigError(
                f"a prompt matches no task: {_shown(text)}; give rollout_func all tasks, and make the "
                "trainer's dataset with orchestrator.trainers.trl.dataset(tasks)"
            )
        if len(tasks) > 1:
            raise ConfigError(
                f"{len(tasks)} tasks have the question {_shown(text)}; make the trainer's dataset with "
                "orchestrator.trainers.trl.dataset(tasks), whose prompts tell them apart"
            )
        return tasks[0]

    def groups(self, prompts: Sequence[Any], size: int) -> list[Task]:
        """The task of each `size` prompts. Raises ConfigError unless each is repeated so often."""
        tasks = [self.task(prompt) for prompt in prompts]
        groups = [tasks[start : start + size] for start in range(0, len(tasks), size)]
        if any(len({task.task_id for task in group}) != 1 or len(group) != size for group in groups):
            raise ConfigError(
                f"TRL asked for {len(prompts)} rollouts that are no groups of {size} of the same prompt; set "
                "batch sizes that num_generations (in evaluation num_generations_eval) divides"
            )
        return [group[0] for group in groups]


def _shown(text: object) -> str:
    shown = " ".join(str(text).split())
    return repr(shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "…")


# ---------------------------------------------------------------- rows


def delivered(
    row: Row, ends: Sequence[int], pad: int
) -> tuple[list[int], list[int], list[int], Sequence[float | None]]:
    """(prompt ids, completion ids, mask, log-probs) as TRL takes a row; log-probs are 0.0 where the mask is 0.

    TRL calls a completion truncated unless its last id is one of `ends`. Ours may end on a stop string, so one
    that was not cut gets the first of `ends` behind it, masked. A row without ids gets `pad`, masked, as TRL reads
    the last id of every row. Where the endpoint tells no log-prob it is None, and TRL corrects nothing.
    """
    prompt, ids, mask = list(row.prompt_ids) or [pad], list(row.completion_ids), list(row.env_mask)
    if not ids:
        return prompt, [pad], [0], [0.0]
    sampled = row.logprobs or [None] * len(ids)
    logprobs = [p if m else 0.0 for p, m in zip(sampled, mask, strict=True)]
    if row.finish_reason != "length" and ids[-1] not in ends:
        return prompt, [*ids, ends[0]], [*mask, 0], [*logprobs, 0.0]
    return prompt, ids, mask, logprobs


def trained_score(row: Row) -> float | None:
    """The row's reward; None for a rollout without a score, and in a group that is no training data."""
    return row.score if row.dropped is None else None


def answer(rows: Sequence[Row], ends: Sequence[int], pad: int, *, with_logprobs: bool) -> dict[str, Any]:
    """What a rollout function returns: lists with a value for each row."""
    lines = [delivered(row, ends, pad) for row in rows]
    return {
        "prompt_ids": [line[0] for line in lines],
        "completion_ids": [line[1] for line in lines],
        "env_mask": [line[2] for line in lines],
        "logprobs": [line[3] for line in lines] if with_logprobs else None,
        "score": [trained_score(row) for row in rows],
        "outcome": [row.outcome for row in rows],
        "task_id": [row.task_id for row in rows],
        "rollout_id": [row.rollout_id for row in rows],
        "policy_version": [row.policy_version for row in rows],
    }


# ---------------------------------------------------------------- settings of both sides


def demand_agreement(
    group_size: int, sampling: SamplingSettings, args: Any, mode: LogprobsMode, *, uses_logprobs: bool
) -> bool:
    """Whether the endpoint's log-probs are what TRL calls so: of logits divided by the sampling temperature.

    `args`: TRL's arguments. Raises ConfigError where the policy that is trained is not the one that is sampled
    from, and for log-probs that TRL uses and that are not what it calls so.
    """
    both = (
        ("group_size", group_size, "num_generations"),
        ("temperature", sampling.temperature, "temperature"),
        ("top_p", sampling.top_p, "top_p"),
    )
    for ours, one, theirs in both:
        if one != (other := getattr(args, theirs)):
            raise ConfigError(f"env.{ours} is {one:g} and TRL's {theirs} {other:g}; set both alike")
    for name, neutral in (("top_k", (0, -1, None)), ("min_p", (0, None)), ("repetition_penalty", (1,))):
        if (other := getattr(args, name)) not in neutral:
            raise ConfigError(f"TRL's {name} {other:g}: rollouts are sampled without it; leave it out")
    fits = mode == "processed" or sampling.temperature == 1.0
    if uses_logprobs and not fits:
        raise ConfigError(
            f'env.temperature {sampling.temperature:g} with logprobs_mode "raw": TRL compares with log-probs at '
            "that temperature; sample at temperature 1, or start vLLM with --logprobs-mode processed_logprobs "
            'and set logprobs_mode "processed"'
        )
    return fits


def demand_ids(orchestrator: SyncOrchestrator) -> None:
    """Raises ConfigError for an endpoint that does not give the ids it sampled."""
    if other := no_sampled_ids(orchestrator.orchestrator.hosts):
        raise ConfigError(f"TRL trains on sampled token ids, and the endpoint's are {other}")


class _Rollouts:
    """A rollout function, with what it must remember between calls."""

    def __init__(
        self,
        orchestrator: SyncOrchestrator,
        prompts: Prompts,
        update: Callable[[Any], None] | None,
        logprobs_mode: LogprobsMode,
    ) -> None:
        if orchestrator.config.env.trained_segments == "all_segments":
            raise ConfigError(
                "env.trained_segments all_segments: GRPOTrainer takes one line of ids per rollout; leave it out, "
                "or use AsyncGRPOTrainer"
            )
        self._orchestrator = orchestrator
        self._prompts = prompts
        self._update = update
        self._mode: LogprobsMode = logprobs_mode
        self._step: int | None = None  # the training step of the last call, and which call of it that was
        self._calls = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        fits = self._demand(trainer)
        from accelerate.utils import broadcast_object_list, gather_object

        self._begin(trainer)
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        all_prompts = gather_object(list(prompts))
        reply: list[Any] = [None]
        if trainer.accelerator.is_main_process:
            try:
                reply = [self._answer(all_prompts, size, trainer, fits)]
            except Exception as error:  # the others wait for an answer
                if trainer.accelerator.num_processes == 1:
                    raise
                reply = [error if isinstance(error, OrchestratorError) else RuntimeError(repr(error))]
        broadcast_object_list(reply)
        if isinstance(reply[0], Exception):
            raise reply[0]
        first = trainer.accelerator.process_index * len(prompts)
        mine = slice(first, first + len(prompts))
        return {key: None if values is None else values[mine] for key, values in reply[0].items()}

    def _demand(self, trainer: Any) -> bool:
        """As `demand_agreement`. Raises ConfigError too for a trainer that would not train on what it is given."""
        args, uses = trainer.args, trainer.off_policy_mask_threshold is not None
        if trainer.tools or trainer.environment_factories is not None:
            raise ConfigError("tools, environment_factory: the agent has the orchestrator's; leave them out")
        if trainer.use_vllm:
            uses = uses or trainer.vllm_importance_sampling_correction
            if trainer.vllm_mode != "server":
                raise ConfigError(
                    f'vllm_mode "{trainer.vllm_mode}": sandboxes cannot reach a vLLM inside the trainer; use '
                    'vllm_mode="server", with its address as openai.base_url too'
                )
            if self._update is not None:
                raise ConfigError("update: with use_vllm=True TRL updates its server itself; leave it out")
        elif self._update is None:
            raise ConfigError(
                "use_vllm=False: TRL does not update an endpoint, so it would go on with its first weights; set "
                'use_vllm=True and vllm_mode="server", or give rollout_func an `update`'
            )
        env = self._orchestrator.config.env
        return demand_agreement(env.group_size, env, args, self._mode, uses_logprobs=uses)

    def _begin(self, trainer: Any) -> None:
        """A call of a training step begins; the first one updates the endpoint."""
        step = trainer.state.global_step
        if step == self._step:
            self._calls += 1
            return
        if self._update is not None:
            self._update(trainer)
        self._step, self._calls = step, 0

    def _answer(self, prompts: list[Any], size: int, trainer: Any, with_logprobs: bool) -> dict[str, Any]:
        """The answer for the prompts of all processes."""
        tasks = self._prompts.groups(prompts, size)
        self._orchestrator.serve(str(trainer.state.global_step))
        processing = trainer.processing_class
        tokenizer = getattr(processing, "tokenizer", processing)
        demand_ids(self._orchestrator)
        demand_same_tokenizer(self._orchestrator.orchestrator.hosts.tokenizer, tokenizer)
        rows = [row for row in self._rolled(tasks, size, evaluates=not trainer.model.training) if row.main]
        pad = tokenizer.pad_token_id
        return answer(rows, [*trainer.eos_token_ids, pad], pad, with_logprobs=with_logprobs)

    def _rolled(self, tasks: list[Task], size: int, *, evaluates: bool) -> list[Row]:
        """Rollouts of an evaluation are kept out of the record of what was trained on."""
        epoch = (self._step or 0) * CALLS_PER_STEP + self._calls
        engine = self._orchestrator.orchestrator
        if evaluates:
            engine = engine.beside(engine.config, Observer(say=engine.observer.say), split="eval")
        return self._orchestrator.run(lambda: engine.rollouts(tasks, epoch=epoch, group_size=size))


def demand_same_tokenizer(ours: Tokenizer | None, theirs: Any) -> None:
    """Raises ConfigError where the trainer's tokenizer makes other ids of a conversation than ours."""
    if ours is None:
        raise ConfigError("env.tokenizer_name none: TRL needs token ids; name the model's tokenizer")
    text = ours.render((Message("user", "What is 17 plus 25?"),), generation_prompt=True)
    if ours.encode(text) != theirs(text, add_special_tokens=False)["input_ids"]:
        raise ConfigError(
            "the trainer's tokenizer makes other ids than the orchestrator's; set env.tokenizer_name to the "
            "folder or hub id of the trainer's model"
        )
