"""Names that the image, the launchers and the reaper must agree on."""

from __future__ import annotations

from orchestrator import __version__

IMAGE_REPOSITORY = "rollout-orchestrator-sandbox"
DEFAULT_IMAGE = f"{IMAGE_REPOSITORY}:{__version__}"
EXTRAS = ("documents",)  # of `image build --with`: the requirements file and the end of the tag
BASE_REPOSITORY = "rollout-orchestrator-base"

CHANNEL_GID = 990  # owns /run/channel in the image: only the runner has it
CHANNEL_MOUNT = "/run/channel/box"
SOCKET_NAME = "s"
TETHER_NAME = "t"
ATTACHMENTS_DIR = "/attachments"
WORKSPACE_DIR = "/workspace"

LABEL_PROJECT = "orchestrator.project"  # value PROJECT on everything of ours
LABEL_RUN = "orchestrator.run"
LABEL_OWNER = "orchestrator.owner"  # host:pid:start time of the orchestrator process
LABEL_DEADLINE = "orchestrator.deadline"  # unix time after which other hosts may take it for garbage
LABEL_VERSION = "orchestrator.version"  # written by Dockerfile.sandbox, as the next one
LABEL_CONTEXT = "orchestrator.context"  # digest of everything but the base and the wheels, which it pins
LABEL_STAGE = "orchestrator.stage"  # intermediate images of a build
PROJECT = "rollout-orchestrator"
