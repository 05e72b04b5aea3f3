"""What a task.toml may say, in versions 1.0 to 1.4 of its format: types and bounds, and which keys are unknown."""

import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from orchestrator.tasks.base import BadRow
from orchestrator.tasks.harbor.refusal import Refusal

VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MAX_TOML_BYTES = 64 << 10
MAX_STEPS = 50
_MAX_DEPTH = 64
_MAX_DOTS = 64
# tomllib takes seconds for a name of many parts: its time grows with their square.
_LONG_NAME = re.compile(rf"(?<![\w\"'.-])(?:[\w\"'-]++[ \t]*+\.[ \t]*+){{{_MAX_DOTS}}}")
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([GMK])", re.IGNORECASE)
_STEP_NAME = re.compile(r'(?! )[^<>:"/\\|?*\x00-\x1f\x7f]{1,100}')
_MEBIBYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}

Text = Annotated[str, Field(max_length=4096)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)]
Reward = Annotated[float, Field(allow_inf_nan=False)]
Mebibytes = Annotated[int, Field(ge=1, le=1 << 24)]
User = Annotated[str, Field(max_length=64)] | Annotated[int, Field(ge=0, le=65_535)]
Network = Literal["public", "no-network", "allowlist"]


class _Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class _Phase(_Section):
    timeout_sec: Seconds | None = None
    user: User | None = None
    network_mode: Network | None = None
    allowed_hosts: list[Text] | None = None


class Collect(_Section):
    """A command that is run where the agent worked, when it has ended."""

    command: Annotated[str, Field(min_length=1, max_length=32 << 10)]
    service: Text = "main"
    timeout_sec: Seconds = 60.0
    user: User | None = None


class Artifact(_Section):
    """A path of the agent's sandbox that a separate verifier gets."""

    source: Text
    destination: Text | None = None
    exclude: list[Text] = []
    service: Text = "main"


class Healthcheck(_Section):
    """A command that has to succeed before the agent begins."""

    command: Annotated[str, Field(min_length=1, max_length=32 << 10, pattern=r"^[^\x00]*$")]
    interval_sec: Pause = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Pause = 0.0
    start_interval_sec: Pause = 5.0
    retries: Annotated[int, Field(ge=0, le=10_000)] = 3


class McpServer(_Section):
    """A server that the agent is to have. Where it is, or what runs it, the operator says here."""

    name: Text
    transport: Text | None = None
    url: Text | None = None
    command: Text | None = None
    args: list[str] = []


class Environment(_Section):
    """A sandbox: the agent's, or a separate verifier's."""

    build_timeout_sec: Seconds = 600.0
    docker_image: Text | None = None
    os: Text = "linux"
    cpus: Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)] | None = None
    memory_mb: Mebibytes | None = None
    storage_mb: Mebibytes | None = None
    memory: Text | None = None
    storage: Text | None = None
    gpus: Annotated[int, Field(ge=0, le=1 << 16)] | None = None
    gpu_types: list[Text] | None = None
    tpu: Mapping[str, Any] | None = None
    mcp_servers: list[McpServer] = []
    env: dict[str, str] = {}
    skills_dir: Text | None = None
    healthcheck: Healthcheck | None = None
    workdir: Text | None = None
    allow_internet: bool | None = None
    network_mode: Network | None = None
    allowed_hosts: list[Text] | None = None

    @property
    def memory_bytes(self) -> int | None:
        """None: it does not say. Raises BadRow."""
        return _size_bytes("memory", self.memory_mb, self.memory)

    @property
    def storage_bytes(self) -> int | None:
        """None: it does not say. Raises BadRow."""
        return _size_bytes("storage", self.storage_mb, self.storage)

    @property
    def network(self) -> Network:
        """What Harbor gives it."""
        if self.network_mode is None and self.allow_internet is False:
            return "no-network"
        return self.network_mode or ("public" if self.allowed_hosts is None else "allowlist")


class Verifier(_Phase):
    """What grades."""

    env: dict[str, str] = {}
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[Collect] = []

    @property
    def is_separate(self) -> bool:
        """Whether Harbor gives it a sandbox of its own."""
        return (self.environment_mode or ("separate" if self.environment else "shared")) == "separate"


class Solution(_Section):
    """What solves the task, to try it."""

    env: dict[str, str] = {}


class Package(_Section):
    """The task, as a registry names it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    version: Text | None = None
    description: str = ""
    authors: list[Any] = []
    keywords: list[Text] = []


class Step(_Section):
    """One of several instructions. What it does not say, the task does."""

    name: str
    agent: _Phase = _Phase()
    verifier: Verifier = Verifier()
    min_reward: Reward | dict[str, Reward] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[Text | Artifact] = []

    @field_validator("name")
    @classmethod
    def _portable(cls, value: str) -> str:
        """As Harbor has it: it is the name of a folder, and here of a part of the score."""
        if not _STEP_NAME.fullmatch(value) or value.endswith((".", " ")) or not value.isprintable():
            raise ValueError(f"{ascii(value)[:40]} is no name of a step: a folder's, of at most 100 characters")
        return value

    @property
    def least(self) -> dict[str, float]:
        """The rewards that it has to reach, by name."""
        least = self.min_reward
        return {} if least is None else dict(least) if isinstance(least, dict) else {"reward": least}


class TaskConfig(_Section):
    """A whole task.toml."""

    schema_version: str = VERSIONS[-1]
    version: str | None = None  # the old name of the one above
    task: Package | None = None
    metadata: dict[str, Any] = {}
    verifier: Verifier = Verifier()
    agent: _Phase = _Phase()
    environment: Environment = Environment()
    solution: Solution = Solution()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: Annotated[list[Step], Field(max_length=MAX_STEPS)] = []
    artifacts: list[Text | Artifact] = []

    @field_validator("schema_version", "version")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in VERSIONS:
            raise ValueError(f"{ascii(value)[:20]} is unknown: {VERSIONS[0]} to {VERSIONS[-1]} are read")
        return value

    @field_validator("steps")
    @classmethod
    def _apart(cls, value: list[Step]) -> list[Step]:
        if len({unicodedata.normalize("NFC", step.name).casefold() for step in value}) < len(value):
            raise ValueError("two steps have the same name")
        return value

    @property
    def unknown(self) -> list[str]:
        """The keys that this reader does not know, like `environment.colour`."""
        return sorted(_unknown(self, ""))


def parse(text: str) -> TaskConfig:
    """Raises BadRow."""
    if _LONG_NAME.search(text):
        raise BadRow(f"task.toml has a name of more than {_MAX_DOTS} parts")
    try:
        values = tomllib.loads(text)
        if _depth(values) > _MAX_DEPTH:
            raise BadRow(f"task.toml nests deeper than {_MAX_DEPTH} levels")
        return TaskConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadRow(f"task.toml: {ascii(place)[1:81].rstrip(chr(39))}: {first['msg']}") from None
    except RecursionError:
        raise BadRow(f"task.toml nests deeper than {_MAX_DEPTH} levels") from None
    except ValueError as error:
        raise BadRow(f"task.toml is no TOML: {ascii(str(error))[1:-1][:200]}") from None


def variables(env: Mapping[str, str], where: str) -> dict[str, str]:
    """With the default of each `${VAR:-default}` in its place: no variable of this machine reaches a sandbox.
    Raises Refusal for one without."""
    texts = {}
    for name, text in env.items():
        template = _TEMPLATE.fullmatch(text)
        if template is not None and template[2] is None:
            raise Refusal(
                "a variable of the host",
                f"{where} takes {ascii(text)[1:-1][:60]} from the host, whose variables no sandbox gets",
            )
        texts[name] = text if template is None else template[2]
    return texts


def _size_bytes(name: str, mebibytes: int | None, old: str | None) -> int | None:
    if old is not None:
        match = _SIZE.fullmatch(old.strip())
        if match is None:
            raise BadRow(f"task.toml: environment.{name}: {ascii(old)[:40]} is no size like 2G or 512M")
        value = int(float(match[1]) * _MEBIBYTES[match[2].upper()])
        if value < 1 or value > 1 << 24 or mebibytes not in (None, value):
            raise BadRow(f"task.toml: environment.{name}: {ascii(old)[:40]} is out of bounds, or not {name}_mb")
        mebibytes = value
    return None if mebibytes is None else mebibytes << 20


def _unknown(section: BaseModel, prefix: str) -> Iterator[str]:
    yield from (prefix + ascii(name)[1:-1][:60] for name in section.model_extra or ())
    for name in type(section).model_fields:
        value = getattr(section, name)
        for inner in value if isinstance(value, list) else (value,):
            if isinstance(inner, BaseModel):
                yield from _unknown(inner, f"{prefix}{name}.")


def _depth(values: dict[str, Any]) -> int:
    """How deep the values nest, as far as it matters. Without recursion."""
    level: list[Any] = [values]
    for depth in range(_MAX_DEPTH + 1):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [one for values in inner for one in values if isinstance(one, dict | list)]
        if not level:
            return depth
    return _MAX_DEPTH + 1
