"""A problem and what grades it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from orchestrator.types.grading import Grader
from orchestrator.types.healthcheck import Healthcheck


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file of a task. `name`: as the agent sees it, one safe path component."""

    name: str
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Task:
    """A problem and what grades it. `answer`, `other_answers` (as right as that one) and `metadata` never reach a
    sandbox. `dockerfile`: what `image` is made of, the absolute path of a Dockerfile, with its folder; or `FROM`
    and the name of an image that is fetched.

    `workspace`: absolute path of a folder or archive; when its rollouts begin, of the folder that is a
    layer of the sandbox. `root`: the sandbox's, in place of the run's. `cwd`, `environment`: working directory
    (empty: the image's) and variables of the agent's processes. `user`: whom these run as; needs a writable root.
    `cpus`, `memory_bytes`, `storage_bytes`: of the sandbox, in place of the run's. `grader`: of what the agent
    leaves. `healthcheck`: what has to succeed before the agent begins. `notes`: what the record
    of each of its rollouts is to say.
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

    @property
    def has_own_sandbox(self) -> bool:
        """Whether its sandbox may be made of something else than those of other tasks."""
        return any((self.image, self.dockerfile, self.workspace, self.root, self.user))

    @property
    def reference(self) -> str | None:
        """Every right answer, for people and judges."""
        return None if self.answer is None else "\nOR\n".join((self.answer, *self.other_answers))


@dataclass(frozen=True, slots=True)
class BadTask:
    """A row that no task could be made of. It is reported as outcome `bad_task`, and the run goes on."""

    task_id: str
    reason: str
