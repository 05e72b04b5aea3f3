"""What runs in a sandbox, whatever its image is: the program of the runtime, in an environment of its own. Pure.

The image's ENV is for the agent's processes. Pid 1 gets it as arguments, because as variables LD_PRELOAD,
PYTHONHOME and the like would end or change it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from orchestrator.errors import ImageUnusable
from orchestrator.launch.names import RUNTIME_MOUNT

PYTHON = f"{RUNTIME_MOUNT}/bin/python"
APP = f"{RUNTIME_MOUNT}/app"
PROGRAM = (PYTHON, "-P", f"{APP}/sandbox/__main__.py")
ENVIRONMENT = MappingProxyType(
    {
        "PATH": f"{RUNTIME_MOUNT}/bin:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": APP,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
    }
)
# They would end the sandbox's own Python where the agent's code starts it again, as `sys.executable`.
WITHHELD = frozenset({"LD_PRELOAD", "LD_AUDIT", "PYTHONHOME"})
_USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # Docker's for images that name none
_ENV_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Contents:
    """`runtime`: the folder of the runtime, on the machine that makes the sandbox. `environment`: the image's.
    `volumes`: places of the image that a launcher has to mount, read-only, and the volumes' names."""

    runtime: str
    environment: Mapping[str, str]
    program: tuple[str, ...] = PROGRAM
    volumes: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> tuple[str, ...]:
        """What is started as pid 1, but for the arguments that `hardening` adds."""
        given = (f"{name}={value}" for name, value in self.for_programs.items())
        return (*self.program, *(text for entry in given for text in ("--env", entry)))

    @property
    def for_programs(self) -> dict[str, str]:
        """The variables of the image's programs."""
        environment = {"PATH": _USUAL_PATH, **self.environment}
        return {name: value for name, value in environment.items() if name not in WITHHELD}


def image_environment(image: str, entries: Iterable[str]) -> dict[str, str]:
    """The ENV of an image. Raises ImageUnusable: it is too large for a command line."""
    parts = [entry.partition("=") for entry in entries]
    environment = {name: value for name, equals, value in parts if name and equals and "\0" not in name + value}
    if (
        size := sum(len(f"{name}={value}".encode("utf-8", "replace")) for name, value in environment.items())
    ) > _ENV_BYTES:
        raise ImageUnusable(f"the ENV of the image {image} takes {size} bytes, at most {_ENV_BYTES} can be had")
    return environment
