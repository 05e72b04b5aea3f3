"""What grades the state in which an agent left its sandbox, and what that found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.types.healthcheck import Healthcheck

# A command whose exit code says it; the agent's program, run once for each case; Harbor's tests/test.sh.
GraderKind = Literal["command", "io", "harbor"]
# Which part of the agent's state is graded: what the task declares; the folders in which the solution leaves its
# own; all of it.
Scope = Literal["declared", "solution", "whole"]
TestOutcome = Literal["passed", "failed", "skipped", "error"]


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the agent's program. `expected`: what it is to print; it never lies in the sandbox."""

    arguments: tuple[str, ...] = ()
    stdin: str = ""
    expected: str = ""


@dataclass(frozen=True, slots=True)
class Collect:
    """A command that is run when the agent has ended its work, before its state is graded: in the agent's sandbox,
    or in that of a `service`, which goes on meanwhile. `user`: None: the sandbox's."""

    command: str
    timeout_s: float
    user: str | None = None
    service: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """What was seen when the task's own solution was graded, and the untouched image.

    `named_suffice`: whether it gets its reward where nothing but the grader's `named` is graded. `scope`: folders,
    as absolute paths, in which the solution leaves its own; None: not known. `takeovers`: files
    among these that could take the tests over, as /etc/profile. `source`: where its rewards are, as of a `Grade`;
    empty: it gets none. `rewards`: the names of those that are from 0 to 1 each time. `duration_s`: the longest of
    its grades. `layer`: the name of a layer that lies over the agent's state, with what the tests had fetched when
    they could; when rollouts begin, its absolute path.
    """

    scope: tuple[str, ...] | None = None
    takeovers: tuple[str, ...] = ()
    source: str = ""
    rewards: tuple[str, ...] = ()
    duration_s: float | None = None
    layer: str | None = None
    named_suffice: bool = False


@dataclass(frozen=True, slots=True)
class Grader:
    """What grades a task's end state, in a sandbox of its own. Nothing of it reaches the agent's sandbox.

    `tests`, `solution`: absolute paths of folders of this machine, which lie at /tests while it grades (None: its
    image has them), and at /solution where the task's own solution is tried. `shared_tests`: as `tests`, below
    them: a folder of all steps of a task. `command`: of `command`, what is run; of `io`, the agent's program.
    `image`, `dockerfile`: as a Task's, of a grader that has one of its own; None: the task's. `declared`: absolute
    paths of the agent's state that are graded, without others; None: the task does not say it. `named`: paths that
    the task names as the agent's work, although its tests see all; they are graded without others if the task's
    own solution is known to need no more. `of_services`: (service, absolute path) of what their sandboxes hand on,
    besides what `collect` prints there. `user`, `cwd`, `environment`: of its processes; None: the task's; an
    empty `cwd`: its image's. `healthcheck`: what is run first in its sandbox too; whether it succeeds is for the
    tests to find. `checked`: what is known of it; None: nothing.
    """

    kind: GraderKind
    tests: str | None = None
    shared_tests: str | None = None
    command: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()
    timeout_s: float = 600.0
    image: str | None = None
    dockerfile: str | None = None
    declared: tuple[str, ...] | None = None
    named: tuple[str, ...] = ()
    collect: tuple[Collect, ...] = ()
    of_services: tuple[tuple[str, str], ...] = ()
    user: str | None = None
    cwd: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    solution: str | None = None
    solution_environment: Mapping[str, str] = field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    checked: Checked | None = None


@dataclass(frozen=True, slots=True)
class DryRun:
    """The one run of a task's tests that had a network, on the untouched image. `allowed`: the hosts that it could
    ask; `reached`, `refused`: those that it did ask, and asked in vain. `layer`: the name of the layer with what
    it left, of `size_bytes`; None: there is none, `error` says why.
    """

    allowed: tuple[str, ...]
    reached: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    layer: str | None = None
    size_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What `check-tasks` found of a task. `content`: the digest of the task as it was then. `failures`: why nobody
    should train on it; empty: it passed. `warnings`: what else its owner should know.

    `no_op`, `solution`: the reward of each try; None: there was none, which was nobody's doing. `live`: that of
    the solution where the tests ran beside what it left running; None: not tried. `panel`: by the cheating policy;
    of those in `unseen` nothing was in scope, so they have the untouched sandbox's reward without being graded.
    `delivered`: of delivered programs that write the reward when they are run; None: there were none. `steps`:
    what was seen of each step's grader, where the task has several; `checked` is of the first then.
    """

    content: str
    failures: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    checked: Checked = Checked()
    no_op: tuple[float | None, ...] = ()
    solution: tuple[float | None, ...] = ()
    live: float | None = None
    panel: Mapping[str, float | None] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    delivered: float | None = None
    runs_delivered: bool = False
    dry_run: DryRun | None = None
    duration_s: float = 0.0
    steps: tuple[Checked, ...] = ()

    @property
    def floor(self) -> float:
        """The most that doing nothing gets."""
        return max((reward for reward in self.no_op if reward is not None), default=0.0)

    @property
    def winners(self) -> tuple[str, ...]:
        """Policies of the panel that get more."""
        return tuple(name for name, reward in self.panel.items() if reward is not None and reward > self.floor)


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test of several, as a report of JUnit, CTRF or pytest names it."""

    __test__ = False  # for pytest

    name: str
    outcome: TestOutcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Grade:
    """What a grader found. `rewards`: by name; a task with one calls it `reward`. `fault`: why there is none,
    which is not the policy's doing; empty: there is one.

    `source`: the name of the file that the rewards were read from, or `exit`, or `cases`; empty: there are none,
    and if there is no fault, all rewards are 0 by the policy's own doing. `kept`: the paths of the agent's state
    that were graded. `flags`: what a reader should know, such as processes that were left running.
    `stdout`, `stderr`: their ends, bounded. Times in seconds.
    """

    rewards: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""
    source: str = ""
    scope: Scope = "whole"
    kept: tuple[str, ...] = ()
    tests: tuple[TestResult, ...] = ()
    flags: tuple[str, ...] = ()
    stdout: str = ""
    stderr: str = ""
    duration_s: float = 0.0
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepGrade:
    """What the grader of one step of a task found."""

    name: str
    grade: Grade
