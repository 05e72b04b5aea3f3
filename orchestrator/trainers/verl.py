"""verl: an agent loop whose rollouts run in our sandboxes, with completions from verl's own servers.

- name: orchestrator
  _target_: orchestrator.trainers.verl.OrchestratorAgentLoop
  env: {scoring_strategy: correctness, run_dir: runs/verl}

verl makes a loop for each sample, in several worker processes. Those of a process share one orchestrator, which
lives in a thread of its own. Completions go back to the event loop of the sample that they are for.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import secrets
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from omegaconf import DictConfig, OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from orchestrator.completion.base import CompletionRequest, Ids
from orchestrator.completion.retry import Retryable
from orchestrator.completion.sampled import RawSample
from orchestrator.completion.statuses import is_context_length
from orchestrator.engine.orchestrator import Orchestrator
from orchestrator.engine.sync import SyncOrchestrator
from orchestrator.errors import CompletionError, ContextLengthError, OrchestratorError
from orchestrator.rules.observer import Listener, Observer
from orchestrator.run.rows import Row
from orchestrator.settings.config import Config
from orchestrator.trainers.verl_terms import (
    ROLLOUT,
    config_of,
    demand_unfiltered,
    parameters_of,
    sampled_of,
    steps_of,
    task_of,
)
from orchestrator.types import BadTask, RolloutPlan, Sampling, Task

T = TypeVar("T")
_Key = tuple[str, float, float]  # a rollout's id, temperature, top_p
ERROR_STATUS = 500  # an error of verl's servers says no more than its text


class RolloutLost(OrchestratorError):
    """A sample that has no score. verl has no place for one: what is raised is no sample, a 0 would be one."""


class OrchestratorAgentLoop(AgentLoopBase):
    """One sample: a task rolled out once. `env`: settings of ours, `env.*`, without those that are verl's to make.
    `files`: the folder of the files that tasks name."""

    def __init__(self, *args: Any, env: Mapping[str, Any] | None = None, files: str | None = None, **named: Any):
        super().__init__(*args, **named)
        settings = OmegaConf.to_container(env, resolve=True) if isinstance(env, DictConfig) else dict(env or {})
        assert isinstance(settings, dict)
        self._files = None if files is None else Path(files)
        self._worker = _worker(self.config, settings, str(self.tokenizer.name_or_path))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """The sample of this row of verl's data set, as it was recorded.

        Raises RolloutLost if it has no score, and ConfigError, EnvironmentUnusable, RunUnhealthy.
        """
        demand_unfiltered(sampling_params)
        task = task_of(row, self._files)
        began = time.monotonic()
        sample = _Sample(
            self.server_manager, self.rollout_config, asyncio.get_running_loop(), int(row.get("priority") or 0)
        )
        main = await self._worker.rolled(
            task, sample, float(sampling_params["temperature"]), float(sampling_params["top_p"])
        )
        metrics = AgentLoopMetrics(
            generate_sequences=sample.generating_s,
            tool_calls=max(0.0, time.monotonic() - began - sample.generating_s),
            num_preempted=sample.preempted,
        )
        return self._output(main, metrics, logprobs=bool(sampling_params.get("logprobs")))

    def _output(self, row: Row, metrics: AgentLoopMetrics, *, logprobs: bool) -> AgentLoopOutput:
        """The row as verl wants it. `logprobs`: it wants them. Raises RolloutLost."""
        if row.score is None or row.dropped is not None:
            why = row.reason if row.score is None else row.dropped
            raise RolloutLost(f"rollout {row.rollout_id} of {row.task_id}: {row.outcome}: {why}")
        for name, ids in (("prompt_length", row.prompt_ids), ("response_length", row.completion_ids)):
            if len(ids) > self.rollout_config[name]:
                raise RolloutLost(
                    f"rollout {row.rollout_id} of {row.task_id}: {len(ids)} tokens, and {ROLLOUT}.{name} is "
                    f"{self.rollout_config[name]}: set it to {len(ids)} or more"
                )
        oldest, newest = steps_of(row.policy_versions)
        has_logprobs = logprobs and row.logprobs is not None
        return AgentLoopOutput(
            prompt_ids=list(row.prompt_ids),
            response_ids=list(row.completion_ids),
            response_mask=list(row.env_mask),
            response_logprobs=[p or 0.0 for p in row.logprobs or ()] if has_logprobs else None,
            reward_score=row.score,
            num_turns=sum(message.role != "system" for message in row.messages),
            metrics=metrics,
            extra_fields={
                "turn_scores": [],  # as verl's own loops have them, so that batches of several loops fit
                "tool_rewards": [],
                "min_global_steps": oldest,
                "max_global_steps": newest,
                "extras": {
                    "run_dir": self._worker.run_dir,
                    "rollout_id": row.rollout_id,
                    "task_id": row.task_id,
                    "outcome": row.outcome,
                },
            },
        )


# ---------------------------------------------------------------- one sample


@dataclass(eq=False)
class _Sample:
    """Asks verl's servers for the completions of one call of `run`, on that call's event loop and in its context,
    where verl traces it. One request id: so all completions go to the server that has the line in its cache."""

    server_manager: Any
    rollout: Mapping[str, Any]
    loop: asyncio.AbstractEventLoop
    priority: int
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    request_id: str = field(default_factory=lambda: uuid4().hex)
    generating_s: float = 0.0
    preempted: int = -1  # verl's word for unknown
    rollouts: list[_Key] = field(default_factory=list)  # its attempts
    _begun: list[Ids] = field(default_factory=list)  # the prompts with which lines began

    async def sampled(self, request: CompletionRequest) -> RawSample:
        """Raises Retryable, ContextLengthError, CompletionError."""
        prompt = request.prompt_ids
        assert prompt is not None
        max_tokens = min(request.sampling.max_tokens, self._room(prompt))
        parameters = parameters_of(request, max_tokens, self.rollout["name"])
        began = time.monotonic()
        try:
            output = await self._there(
                self.server_manager.generate(
                    request_id=self.request_id,
                    prompt_ids=prompt.tolist(),
                    sampling_params=parameters,
                    priority=self.priority,
                )
            )
        except OrchestratorError:
            raise
        except Exception as error:  # through Ray any of a server's errors may come
            text = _last_line(error)
            if is_context_length(ERROR_STATUS, text):
                raise ContextLengthError(text) from error
            raise Retryable(f"verl's server: {text}") from error
        finally:
            self.generating_s += time.monotonic() - began
        if output.num_preempted is not None:
            self.preempted = max(0, self.preempted) + output.num_preempted
        return sampled_of(output, request.sampling)

    def _room(self, prompt: Ids) -> int:
        """How many tokens the response may still get: what does not fit verl's tensors is not sampled."""
        begun = next((ids for ids in self._begun if prompt[: len(ids)] == ids), None)
        if begun is None:
            begun = prompt
            self._begun.append(prompt)
        response = len(prompt) - len(begun)
        room = int(self.rollout["response_length"]) - response
        if room < 1:
            limit = self.rollout["response_length"]
            raise ContextLengthError(f"a response of {response} tokens, and {ROLLOUT}.response_length is {limit}")
        return room

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run on the sample's event loop. Cancelled with it."""
        if self.loop.is_closed():
            work.close()
            raise CompletionError("verl's event loop is closed")
        future = self.context.run(asyncio.run_coroutine_threadsafe, work, self.loop)
        return await asyncio.wrap_future(future)


def _last_line(error: Exception) -> str:
    """Ray puts a whole traceback into the text of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


# ---------------------------------------------------------------- what the samples of a process share


class _Worker(Listener):
    """The orchestrator of one process, and which sample each rollout is for."""

    def __init__(self, config: Config, rollout: Mapping[str, Any]) -> None:
        self.sync = SyncOrchestrator(config, sampler=self._sampled)
        self.sync.orchestrator.observer.listeners.append(self)
        self.run_dir = None if config.env.run_dir is None else str(config.env.run_dir)
        self._prompt_length = int(rollout["prompt_length"])
        self._checked = False
        self._others: dict[tuple[float, float], Orchestrator] = {}
        self._samples: dict[int, _Sample] = {}  # by their tasks, each of which is one object
        self._of_rollout: dict[_Key, _Sample] = {}

    async def rolled(self, task: Task | BadTask, sample: _Sample, temperature: float, top_p: float) -> Row:
        """The main row of one rollout."""
        self._samples[id(task)] = sample
        try:
            return await self.sync.awaited(lambda: self._rolled(task, temperature, top_p))
        finally:
            del self._samples[id(task)]
            for key in sample.rollouts:
                del self._of_rollout[key]

    async def _rolled(self, task: Task | BadTask, temperature: float, top_p: float) -> Row:
        if not self._checked:
            self._check_prompt()
            self._checked = True
        rows = await self._sampling(temperature, top_p).rollouts([task], group_size=1)
        return rows[0]

    def _sampling(self, temperature: float, top_p: float) -> Orchestrator:
        """The orchestrator that samples so. Only training's rollouts are recorded; verl validates with others."""
        orchestrator = self.sync.orchestrator
        env = orchestrator.config.env
        if (temperature, top_p) == (env.temperature, env.top_p):
            return orchestrator
        other = self._others.get((temperature, top_p))
        if other is None:
            config = replace(orchestrator.config, env=replace(env, temperature=temperature, top_p=top_p))
            other = orchestrator.beside(config, Observer(listeners=[self]), split="eval")
            self._others[temperature, top_p] = other
        return other

    def _check_prompt(self) -> None:
        """Raises ConfigError if verl's prompts have no room for the agent's."""
        from orchestrator.atropos.prompt_size import demand_prompt_room

        def advice(least: int) -> str:
            has = f"the agent's system prompt alone has {least} tokens"
            return f"{ROLLOUT}.prompt_length: {has}; set it to {least + 1024} or more (data.max_prompt_length too)"

        demand_prompt_room(self.sync.orchestrator, self._prompt_length, advice)

    # called in the orchestrator's thread

    def begun(self, plan: RolloutPlan, node: str) -> None:
        sample, key = self._samples[id(plan.task)], _key(plan.rollout_id, plan.sampling)
        self._of_rollout[key] = sample
        sample.rollouts.append(key)

    async def _sampled(self, request: CompletionRequest) -> RawSample:
        return await self._of_rollout[_key(request.rollout_id, request.sampling)].sampled(request)


def _key(rollout_id: str, sampling: Sampling) -> _Key:
    """Rollout ids are unique among those that sample alike."""
    return rollout_id, sampling.temperature, sampling.top_p


_workers: dict[str, _Worker] = {}
_making = threading.Lock()


def _worker(trainer: Any, env: Mapping[str, Any], tokenizer_name: str) -> _Worker:
    """The worker with these settings, in this process. Raises ConfigError."""
    rollout = trainer.actor_rollout_ref.rollout
    settings = [env, tokenizer_name, str(trainer.actor_rollout_ref.model.path), OmegaConf.to_container(rollout)]
    key = json.dumps(settings, sort_keys=True, default=str)
    with _making:
        if key not in _workers:
            # Each worker begins a run of its own; one that verl starts again has perhaps the same process id.
            name = f"worker-{os.getpid()}-{secrets.token_hex(4)}"
            run_dir = Path(str(env["run_dir"])) / name if env.get("run_dir") else None
            config = config_of(trainer, env, tokenizer_name=tokenizer_name, run_dir=run_dir)
            _workers[key] = _Worker(config, rollout)
        return _workers[key]


def close() -> None:
    """Ends the orchestrators of this process and removes their sandboxes, as the end of the process does. A loop
    made later opens a new one."""
    with _making:
        workers = list(_workers.values())
        _workers.clear()
    for worker in workers:
        worker.sync.close()
