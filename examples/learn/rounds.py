"""A run: measure, roll out, train, measure again. It can be stopped at any time: all that is done is on disk."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from examples.learn.batches import write_whole
from examples.learn.measured import Measured
from examples.learn.processes import MOST_STARTS, Broken, Patience, Process, end_with_parent
from examples.learn.tasks import SETS, SHARE, write_tasks
from examples.trainer import NO_ANSWER, RunApi

PLAN = "learn.json"
PROMPTS = Path(__file__).with_name("prompts.yaml")
WAITS_S = 0.3
LATE_S = 10.0  # after the end of `serve`, before a batch counts as one that does not come
MISSING = 1  # the exit code of a run that is whole but for some rollouts
MOST_RESUMES = 2  # of an evaluation for samples that broke


def _told(default: Any, text: str) -> Any:
    """A setting, and what `--help` says of it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Plan:
    """What a run is. Kept in its folder: a run that is gone on with has the plan it began with."""

    model: str = _told("qwen2.5-coder-0.5b", "one that local_model knows, or a GGUF file")
    algorithm: str = _told("grpo", "grpo, or expert for expert iteration")
    seed: int = _told(1, "of training tasks, sampling and the adapter")
    control: bool = _told(False, "shuffle the scores before they are learned from: nothing must be learned")
    rounds: int = _told(4, "batches to train on, at most")
    tokens: int = _told(0, "sampled tokens to train on in all: the last round is smaller; 0: all rounds are made")
    groups: int = _told(12, "groups of a round")
    group_size: int = _told(8, "rollouts of a group")
    steps: int = _told(1, "that a rollout may take: with 2, an answer that is no working code may be mended")
    branch: str = _told("none", "as env.branch; group_size is a multiple of a tree's")
    curriculum: str = _told("none", "pools, or none; as env.curriculum")
    training: int = _told(0, "training tasks of each set, which come again; 0: so many that none does")
    sets: tuple[str, ...] = _told(SETS, "data sets of reasoning_gym")
    scoring: str = _told("correctness", "as env.scoring_strategy")
    held_out: int = _told(12, "tasks of each set that are measured and never trained on")
    measured: str = _told("rounds", "when held-out tasks are: after all rounds, or at both ends alone")
    samples: int = _told(1, "rollouts of each held-out task")
    learning_rate: float = _told(1e-3, "of AdamW")
    epochs: int = _told(2, "how often a batch is gone through")
    longest: int = _told(768, "tokens of a rollout")
    completion: int = _told(64, "tokens of an answer")
    sandboxes: int = _told(8, "at a time")


class Run:
    """One run in one folder. `say` gets lines for people."""

    def __init__(self, plan: Plan, folder: Path, threads: int | None, say: Callable[[str], None]) -> None:
        self.plan, self.folder, self.say = plan, folder.resolve(), say
        self._threads: list[object] = [] if threads is None else ["--threads", threads]
        self._policy, self._prompts = self.folder / "policy", self.folder / "prompts.yaml"
        self._name, self._weights, self._tokenizer = "", Path(), ""
        self._api_port, self._model_port = _free_ports()
        self._api_url = f"http://127.0.0.1:{self._api_port}"
        self._groups = plan.groups  # of the round that is under way
        self._trainer: Process | None = None
        self._server: Process | None = None
        self._served = -1  # the version that the server has

    def go(self, until: float, page: Callable[[], object]) -> bool:
        """Whether all rounds are done. Begins no round that would end after `until` (monotonic seconds). Raises
        Broken, and ConfigError for task sets that reasoning_gym does not have."""
        self._prepare()
        took: list[float] = []
        with ExitStack() as ends:
            ends.callback(self._stop)
            for done in range(self.plan.rounds + 1):
                began = time.monotonic()
                groups = self._due(done + 1)
                if self.plan.measured == "rounds" or done == 0 or not groups:
                    self._measure(done)
                page()
                if not groups:
                    break
                if took and time.monotonic() + max(took) > until:
                    self.say(f"stopped after round {done}: the next one would end too late; run it again to go on")
                    return False
                fresh = not self._step(done + 1).exists()
                self._round(done + 1, groups)
                if fresh:
                    took.append(time.monotonic() - began)
                    self._tell_next(done + 1, took)
        return True

    # ------------------------------------------------------------ its parts

    def _prepare(self) -> None:
        fetch = [sys.executable, "-m", "orchestrator.local_model", "fetch", *self._model()]
        fetched = subprocess.run(  # noqa: S603 - fixed words
            fetch, stdout=subprocess.PIPE, text=True, check=False, preexec_fn=end_with_parent()
        )
        if fetched.returncode:
            raise Broken("the model's weights cannot be had, for the reason above")
        told = json.loads(fetched.stdout)
        self._name, self._weights, self._tokenizer = told["model"], Path(told["weights"]), told["tokenizer"]
        tasks = self.folder / "tasks.jsonl"
        if not tasks.exists():
            plan = self.plan
            each = plan.training or -(-plan.rounds * plan.groups // len(plan.sets)) + plan.groups
            left_out = write_tasks(tasks.with_suffix(".part"), plan.sets, plan.held_out, each, plan.seed)
            tasks.with_suffix(".part").replace(tasks)
            self.say(f"tasks: {plan.held_out} held out and {each} to train on, of each of {', '.join(plan.sets)}")
            if left_out:
                self.say(f"{left_out} training tasks were left out: a held-out one has the same words")
        if not self._prompts.exists():  # a copy: a run keeps what it began with, whatever becomes of the file
            write_whole(self._prompts, PROMPTS.read_text("utf-8"))
        # Last: a plan that cannot be carried out is not kept.
        write_whole(self.folder / PLAN, json.dumps(asdict(self.plan), indent=2))

    def _measure(self, version: int) -> None:
        """The held-out tasks, solved by the policy of that version."""
        folder = self.folder / f"eval-{version}"
        if not (folder / "metrics.json").exists():
            self._evaluate(version, folder)
        measured = Measured(folder)
        name = "base model" if version == 0 else f"after round {version}"
        broke = f"; {measured.missing} of {len(measured.samples)} samples broke and count as wrong"
        self.say(
            f"{name}: {measured.share()} of {len(measured.right())} held-out tasks solved"
            + (broke if measured.missing else "")
        )

    def _evaluate(self, version: int, folder: Path) -> None:
        """Until metrics.json is there: first without samples that broke, which a new start makes again, and then
        with what there is."""
        patience, broke = Patience(folder / "rollouts.jsonl"), 0
        for _ in range(MOST_STARTS):
            self._serve_model(version)
            evaluate = self._orchestrator("evaluate", folder, "--env.eval_samples", self.plan.samples)
            try:
                while (code := evaluate.code()) is None and not patience.is_over(evaluate):
                    self._serve_model(version)
                    time.sleep(WAITS_S)
            finally:
                evaluate.stop()
            if code is None:
                self.say("nothing has changed on disk for long: the evaluation and the model's server start again")
                self._stop_model()
            elif code in (0, MISSING) and (folder / "metrics.json").exists():
                broke += code == MISSING
                if code == 0 or broke > MOST_RESUMES:
                    return
            elif code > 0:
                break
        raise Broken(evaluate.why("gave up"))

    def _due(self, number: int) -> int:
        """How many groups that round has, 0 if the run is done. The last one gets so many as are likely to use the
        budget of tokens up, by those of the round before."""
        plan = self.plan
        if number > plan.rounds or not plan.tokens or number == 1:
            return plan.groups * (number <= plan.rounds)
        steps = [self._told(done) for done in range(1, number)]
        left: float = plan.tokens - sum(told["check"]["tokens"] for told in steps)
        each: float = steps[-1]["check"]["tokens"] / steps[-1]["groups"]
        return max(0, min(plan.groups, round(left / max(1.0, each))))  # a group may have sampled nothing

    def _round(self, number: int, groups: int) -> None:
        """Rollouts by the policy before, and a training step on them."""
        if not self._step(number).exists():
            self.say(f"round {number} of {self.plan.rounds}: {groups} groups of {self.plan.group_size}")
            if groups != self._groups and self._trainer is not None:
                self._trainer.stop()
                self._trainer = None  # the next one asks for batches of the new size
            self._groups = groups
            self._serve_model(number - 1)
            self._trained(number)
        told = self._told(number)
        losses = told["losses"]
        loss = f"loss {losses[0]:+.4f} to {losses[-1]:+.4f}" if losses else "nothing to learn from"
        self.say(
            f"round {number}: reward {told['reward']:.3f}, {told['groups_learned_from']} of {told['groups']} "
            f"groups teach something, {loss}; log-probs are {told['check']['mean']:.4f} off"
        )

    def _trained(self, number: int) -> None:
        """Until the step is done: the trainer runs, and `serve` gives it groups while it has too few."""
        batch = self._policy / f"batch-{number - 1}.json"
        api, trainer, serve = self._run_api(), self._ensure_trainer(), None
        patience = Patience(self.folder / "train" / "rollouts.jsonl", self._policy, trainer.log)
        again, idle_s = 0, 0.0
        with ExitStack() as ends:
            ends.callback(api.stop)  # what is left in it is of this round's policy
            while not self._step(number).exists():
                trainer.keep()
                if batch.exists():
                    self._stop_model()  # training takes all cores
                else:
                    self._serve_model(number - 1)
                    missing, code = self._missing(api), None if serve is None else serve.code()
                    # All groups were delivered, and no batch comes: what a killed process had taken is lost.
                    idle_s = idle_s + WAITS_S if code == 0 and missing else 0.0
                    if missing and (serve is None or code not in (None, 0) or idle_s > LATE_S):
                        again += serve is not None
                        if serve is not None and (again == MOST_STARTS or (code or 0) > MISSING):
                            raise Broken(
                                serve.why("gave up") if code else trainer.why("got no batch that it takes")
                            )
                        serve, idle_s = self._serve(missing), 0.0
                        ends.callback(serve.stop)
                if patience.is_over(trainer if batch.exists() or serve is None else serve):
                    self.say("nothing has changed on disk for long: the round's processes start again")
                    self._stop_model()
                    for process in (serve, trainer, api):
                        if process is not None:
                            process.stop()
                    serve = None
                time.sleep(WAITS_S)
        trainer.starts = 0  # a step is done: it may be killed as often again

    def _missing(self, api: Process) -> int:
        """How many groups the trainer's batch lacks; 0 also while the run-api or the trainer is away."""
        api.keep()
        run_api = RunApi(self._api_url)
        try:
            return max(0, self._groups - run_api.waiting()) if run_api.registered() else 0
        except NO_ANSWER:
            return 0

    def _serve(self, groups: int) -> Process:
        """So many groups more than were delivered before. All rounds are one run, in one run directory."""
        folder = self.folder / "train"
        position = folder / "position.json"
        delivered = json.loads(position.read_text("utf-8"))["groups"] if position.exists() else 0
        words: list[object] = ["--env.rollout_server_url", self._api_url, "--env.group_size", self.plan.group_size]
        words += ["--env.max_batches_offpolicy", 1, "--env.total_steps", delivered + groups]
        words += ["--env.curriculum", self.plan.curriculum, "--env.branch", self.plan.branch]
        return self._orchestrator("serve", folder, *words)

    def _ensure_trainer(self) -> Process:
        if self._trainer is None:
            plan = self.plan
            words: list[object] = ["--url", self._api_url, "--weights", self._weights, "--folder", self._policy]
            words += ["--algorithm", plan.algorithm, "--batch-size", self._groups * plan.group_size]
            words += ["--steps", plan.rounds, "--learning-rate", plan.learning_rate, "--epochs", plan.epochs]
            words += ["--longest", plan.longest, "--seed", plan.seed, *(["--shuffled"] if plan.control else [])]
            self._trainer = self._process("trainer", "examples.learn.trainer", *words)
        return self._trainer

    def _run_api(self) -> Process:
        return self._process(
            "run-api", "uvicorn", "atroposlib.api.server:app", "--host", "127.0.0.1", "--port", self._api_port
        )

    def _serve_model(self, version: int) -> None:
        """The policy of that version is served, with nothing in its cache of another one. Raises Broken."""
        adapter = self._policy / f"policy-{version}.gguf"
        trainer = self._ensure_trainer()
        patience = Patience(self._policy, trainer.log)
        while not adapter.exists():  # the trainer writes the first one at its start
            trainer.keep()
            if patience.is_over(trainer):
                trainer.stop()
            time.sleep(WAITS_S)
        if self._server is None or self._served != version:
            self._stop_model()
            words: list[object] = ["serve", *self._model(), "--adapter", adapter, *self._threads]
            words += ["--port", self._model_port, "--parallel", self.plan.sandboxes]
            words += ["--context", self.plan.longest]
            self._server = self._process("model", "orchestrator.local_model", *words)
            self._served = version
        self._server.keep()

    def _stop_model(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server = None

    def _orchestrator(self, command: str, folder: Path, *words: object) -> Process:
        """The command in its run directory; where that is there already, the run is gone on with."""
        plan = self.plan
        place = "--env.resume" if (folder / "run.json").exists() else "--env.run_dir"
        process = self._process(
            folder.name,
            "orchestrator",
            command,
            *(place, folder, "--env.dataset", f"jsonl:{self.folder / 'tasks.jsonl'}"),
            *("--env.eval_split", f"hash:{SHARE}", "--env.tokenizer_name", self._tokenizer),
            *("--openai.base_url", f"http://127.0.0.1:{self._model_port}/v1", "--openai.model_name", self._name),
            *("--env.prompt_templates", self._prompts, "--env.max_steps", plan.steps),
            *("--env.scoring_strategy", plan.scoring),
            *("--env.max_completion_tokens", plan.completion, "--env.max_token_length", plan.longest),
            *("--env.temperature", 1, "--env.seed", plan.seed, "--env.max_concurrent_sandboxes", plan.sandboxes),
            *words,
        )
        process.start()
        return process

    def _process(self, name: str, module: str, *words: object) -> Process:
        (self.folder / "log").mkdir(parents=True, exist_ok=True)
        return Process(self.folder / "log" / f"{name}.log", module, *words)

    def _model(self) -> list[str]:
        given = self.plan.model
        return ["--weights", given] if given.endswith(".gguf") else ["--model", given]

    def _step(self, number: int) -> Path:
        return self._policy / f"step-{number}.json"

    def _told(self, number: int) -> Any:
        """What the trainer told of that round."""
        return json.loads(self._step(number).read_text("utf-8"))

    def _stop(self) -> None:
        for process in (self._trainer, self._server):
            if process is not None:
                process.stop()

    def _tell_next(self, done: int, took: list[float]) -> None:
        """When the next round will be done, and all of them."""
        now, each = datetime.now(), timedelta(seconds=sum(took) / len(took))
        left = self.plan.rounds - done
        if left:
            ends = f"round {done + 1} will be trained at about {now + each:%H:%M}"
            whole = f", all {self.plan.rounds} at about {now + left * each:%H:%M}"
            self.say(ends + whole * (not self.plan.tokens))


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
