"""Names that the image, the launchers and the reaper must agree on."""

import re

from orchestrator import __version__

IMAGE_REPOSITORY = "rollout-orchestrator-sandbox"
DEFAULT_IMAGE = f"{IMAGE_REPOSITORY}:{__version__}"
EXTRAS = ("documents",)  # values of `image build --with`; in the names of requirements files and tags
TASK_REPOSITORY = "rollout-orchestrator-task"  # images of tasks' Dockerfiles, their digest as tag
BASE_REPOSITORY = "rollout-orchestrator-base"

RUNTIME_MOUNT = "/opt/sandbox"
PACKAGES = "/opt/packages"  # of an image, for the code in a sandbox; Dockerfile.sandbox says the same

CHANNEL_GID = 990  # owns /run/channel: only the runner has it
CHANNEL_FOLDER = "/run/channel"
CHANNEL_MOUNT = f"{CHANNEL_FOLDER}/box"
SOCKET_NAME = "s"
TETHER_NAME = "t"
ATTACHMENTS_DIR = "/attachments"
WORKSPACE_DIR = "/workspace"
# What a dry run may reach, with or without a port; `*` is any public host.
HOST = re.compile(r"\*|(?:[A-Za-z0-9](?:[\w.-]{0,252})|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?", re.ASCII)

LABEL_PROJECT = "orchestrator.project"  # value PROJECT, on all our containers and images
LABEL_RUN = "orchestrator.run"
LABEL_OWNER = "orchestrator.owner"  # host:pid:start time of the orchestrator process
LABEL_DEADLINE = "orchestrator.deadline"  # unix time after which reapers of other hosts may remove it
LABEL_VERSION = "orchestrator.version"  # this and the next one are written by Dockerfile.sandbox
LABEL_CONTEXT = "orchestrator.context"  # digest of the build context without wheels, which its requirements pin
LABEL_RUNTIME = (
    "orchestrator.runtime"  # as the last, of what the runtime is made of: without what was built --with
)
LABEL_STAGE = "orchestrator.stage"  # intermediate images of a build
LABEL_TASK = "orchestrator.task"  # digest of all that an image of a task's Dockerfile is made of
PROJECT = "rollout-orchestrator"


def is_path(image: str) -> bool:
    """Whether an image's name is the path of a file or folder."""
    return image.startswith(("/", "./", "../", "~/"))


def is_gvisor(runtime: str) -> bool:
    """Whether a runtime, by its name or path, is gVisor's: it must have a name that begins with `runsc`."""
    return runtime.rpartition("/")[2].startswith("runsc")
