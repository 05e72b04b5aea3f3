"""A problem and what grades it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from orchestrator.types.grading import Grader
from orchestrator.types.healthcheck import Healthcheck
from orchestrator.types.messages import Call, Role
from orchestrator.types.services import Service


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a task. `name`: as the agent sees it, one safe path component."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ContextMessage:
    """A message of a conversation that came before the question. `calls`: the tools that an assistant called,
    besides what it said. `call_id`: the call that a tool's result answers."""

    role: Role
    content: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A file of a step. `path`: relative, of safe components."""

    path: str
    content: bytes
    executable: bool = False


@dataclass(frozen=True, slots=True)
class TaskStep:
    """One of the instructions that a task gives one after the other, in one sandbox and one conversation.

    `grader`: of what the agent has left when the step has ended. `least`: rewards that it has to reach, by name;
    else the task ends with it. `files` are laid into the working directory before the step; `setup`: a command
    that is run then, once; `healthcheck`: what has to succeed after it. `timeout_s`: the agent's time for it;
    None: the rollout's.
    """

    name: str
    question: str
    grader: Grader
    least: Mapping[str, float] = field(default_factory=dict)
    files: tuple[TaskFile, ...] = ()
    setup: Healthcheck | None = None
    healthcheck: Healthcheck | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A problem and what grades it. `answer`, `other_answers` (as right as that one) and `metadata` never reach a
    sandbox. `dockerfile`: what `image` is made of, the absolute path of a Dockerfile, with its folder; or `FROM`
    and the name of an image that is fetched.

    `workspace`: absolute path of a folder or archive; when its rollouts begin, of the folder that is a
    layer of the sandbox. `root`: the sandbox's, in place of the run's. `cwd`, `environment`: working directory
    (empty: the image's) and variables of the agent's processes. `user`: whom these run as; needs a writable root.
    `cpus`, `memory_bytes`, `storage_bytes`: of the sandbox, in place of the run's. `grader`: of what the agent
    leaves. `healthcheck`: what has to succeed before the agent begins. `context`: a conversation that came before
    the question; it is never trained on. `steps`: where it gives several instructions, all of them: `question` and
    `grader` are the first one's. `steps_reward`: of which of their rewards its own is made. `services`: what runs
    beside the agent, in any order; `hosts`: when rollouts begin, the absolute path of a layer that says where they
    are; `extra_hosts`: as a Service's, of the agent. `network`: hosts that it asks for, as of `env.egress`; it has
    them only if the operator says so. `notes`: what the record of each of its rollouts is to say.
    """

    task_id: str
    question: str
    answer: str | None = None
    attachments: tuple[Attachment, ...] = ()
    level: str | None = None
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    scorer: str | None = None
    image: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    other_answers: tuple[str, ...] = ()
    workspace: str | None = None
    root: Literal["read-only", "writable"] | None = None
    cwd: str | None = None
    user: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    dockerfile: str | None = None
    cpus: float | None = None
    memory_bytes: int | None = None
    storage_bytes: int | None = None
    grader: Grader | None = None
    notes: tuple[str, ...] = ()
    healthcheck: Healthcheck | None = None
    context: tuple[ContextMessage, ...] = ()
    steps: tuple[TaskStep, ...] = ()
    steps_reward: Literal["mean", "final"] = "mean"
    services: tuple[Service, ...] = ()
    hosts: str | None = None
    extra_hosts: tuple[tuple[str, str], ...] = ()
    network: tuple[str, ...] = ()

    def at(self, step: int) -> "Task":
        """The task as it is in one of its steps, counted from 0."""
        if not self.steps:
            return self
        return replace(self, question=self.steps[step].question, grader=self.steps[step].grader)

    @property
    def graders(self) -> tuple[Grader, ...]:
        """One for each step; none: what the agent leaves is not graded."""
        if self.steps:
            return tuple(step.grader for step in self.steps)
        return () if self.grader is None else (self.grader,)

    def with_graders(self, change: Callable[[Grader], Grader]) -> "Task":
        """The task with each of its graders changed."""
        if not self.steps:
            return self if self.grader is None else replace(self, grader=change(self.grader))
        steps = tuple(replace(step, grader=change(step.grader)) for step in self.steps)
        return replace(self, steps=steps, grader=steps[0].grader)

    @property
    def has_own_sandbox(self) -> bool:
        """Whether its sandbox may be made of something else than those of other tasks."""
        return any((self.image, self.dockerfile, self.workspace, self.root, self.user, self.services))

    @property
    def reference(self) -> str | None:
        """Every right answer, for people and judges."""
        return None if self.answer is None else "\nOR\n".join((self.answer, *self.other_answers))


@dataclass(frozen=True, slots=True)
class BadTask:
    """A row that no task could be made of. It is reported as outcome `bad_task`, and the run goes on."""

    task_id: str
    reason: str
