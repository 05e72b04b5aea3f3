"""All settings: the one table from which flags, environment variables, YAML keys, help and checks derive.

The rows are in the modules of their sections. `row` says what a row is, `kinds` how values are read, `sources`
where values come from and which one wins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from orchestrator.atropos.rows import AtroposSettings
from orchestrator.errors import ConfigError
from orchestrator.rules.redact import Secret
from orchestrator.settings.agent import SMOLAGENTS, AgentSettings
from orchestrator.settings.egress import EgressSettings
from orchestrator.settings.endpoint import OpenAISettings
from orchestrator.settings.evaluation import EvaluationSettings
from orchestrator.settings.kinds import Key
from orchestrator.settings.limits import LimitSettings
from orchestrator.settings.output import OutputSettings
from orchestrator.settings.rollouts import RolloutSettings
from orchestrator.settings.row import ENDPOINT, Setting
from orchestrator.settings.sampling import ReasoningSettings, SamplingSettings
from orchestrator.settings.sandbox import SandboxSettings
from orchestrator.settings.scoring import ScoringSettings
from orchestrator.settings.section import Settings
from orchestrator.settings.tasks import TaskSettings
from orchestrator.settings.tools import ToolSettings
from orchestrator.types import AgentKind

_TEXT_CALLS: Mapping[str, tuple[AgentKind, ...]] = {"json": SMOLAGENTS, "fenced": ("shell",)}


def _shown(agents: tuple[AgentKind, ...]) -> str:
    return " or ".join("program:PATH" if agent == "program" else agent for agent in agents)


@dataclass(frozen=True, kw_only=True, repr=False)
class EnvSettings(
    # In the reverse order of help: fields of the last base come first.
    ReasoningSettings,
    AtroposSettings,
    OutputSettings,
    EvaluationSettings,
    ScoringSettings,
    SamplingSettings,
    ToolSettings,
    EgressSettings,
    SandboxSettings,
    LimitSettings,
    AgentSettings,
    RolloutSettings,
    TaskSettings,
):
    """What is rolled out and how, and where results go: `env.*`.

    It is each of its sections: a room takes the one that it reads.
    """

    @property
    def needs_localhost_tcp(self) -> bool:
        """A program finds its completions, and any agent's processes what is outside, at a port of the loopback
        device."""
        return self.allow_localhost_tcp or self.program is not None or bool(self.egress)

    @property
    def mcp_server_names(self) -> frozenset[str]:
        """See TaskSettings."""
        return frozenset(server.name for server in self.mcp_servers)

    @property
    def most_grading(self) -> int:
        """How many sandboxes may grade in addition to those that rollouts have."""
        if self.grading_sandboxes is not None:
            return self.grading_sandboxes
        return -(-self.max_concurrent_sandboxes // 4) if self.scoring_strategy == "grader" else 0

    def for_evaluation(self) -> Self:
        """The settings of an evaluation: a group is the task's samples, at the evaluation's temperature, and a
        sample that broke is not replaced by another draw. Nothing is too old or too equal to be counted. The
        scorer stays. Applying this twice changes nothing more."""
        return replace(
            self,
            group_size=self.eval_samples,
            temperature=self.temperature if self.eval_temperature is None else self.eval_temperature,
            branch=None,
            group_policy="partial:1",
            zero_variance="keep",
            max_staleness=None,
            curriculum="none",
            start_at=None,
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, row in self.rows().items():
            if getattr(self, name) == row.default:
                continue
            if row.only_for and self.agent_kind not in row.only_for:
                raise ConfigError(f"env.{name}: is for env.agent {_shown(row.only_for)}, not {self.agent}")
        for format, agents in _TEXT_CALLS.items():
            if self.tool_call_format == format and self.agent_kind not in agents:
                raise ConfigError(
                    f"env.tool_call_format: {format} is for env.agent {_shown(agents)}, not {self.agent}"
                )
        # What decides where a task's rollouts begin, or which tasks come by how they were solved: one at a time.
        if self.start_at is not None and self.curriculum != "none":
            raise ConfigError(
                "env.start_at: not with env.curriculum: what is solved from a later turn says little of the task"
            )
        if self.start_at is not None and self.branch is not None:
            raise ConfigError("env.start_at: not with env.branch: a tree grows from a trunk that is begun whole")
        if self.cluster == "ray" and self.egress_replay is not None:
            raise ConfigError("env.cluster: not with env.egress replay:RUN_DIR, which nodes do not have")
        if self.max_cpu_seconds is not None and self.launcher == "process":
            raise ConfigError("env.max_cpu_seconds: the process launcher does not count CPU time; leave it open")


SECTIONS: Mapping[str, type[Settings]] = {"env": EnvSettings, "openai": OpenAISettings}
TAVILY_KEY = Setting(
    Secret(), Key(), ENDPOINT, "for web search and page visits; or TAVILY_API_KEY", name="tavily_api_key"
)
JUDGE_KEY = Setting(Secret(), Key(), ENDPOINT, "for the judge; JUDGE_API_KEY only", name="judge_api_key")


def section_rows(section: str) -> dict[str, Setting]:
    """Name → row of one section, aliases included."""
    rows = SECTIONS[section].rows()
    return {**rows, **{alias: row for row in rows.values() for alias in row.aliases}}
