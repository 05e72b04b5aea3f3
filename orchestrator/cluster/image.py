"""The sandbox image on its way to nodes: saved once here, sent in pieces, loaded there. All of it blocks."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException

from orchestrator.errors import EnvironmentUnusable, LaunchError
from orchestrator.launch.docker.calls import CALL_TIMEOUT_S, UNREACHABLE
from orchestrator.launch.docker.client import connect, inspect_image, why_refused

ENGINE_TIMEOUT_S = 600  # to save or load an image
KEPT = 8  # saved images, more than are sent at a time: tasks may have thousands


def described(name: str) -> Mapping[str, Any] | None:
    """This machine's image of that name; None: there is none, or no Engine that answers."""
    try:
        with closing(connect(CALL_TIMEOUT_S)) as engine:
            return inspect_image(engine, name)
    except (EnvironmentUnusable, *UNREACHABLE):
        return None


def image_id(name: str) -> str | None:
    """The id of this machine's image of that name; None: as of `described`."""
    image = described(name)
    return None if image is None else str(image["Id"])


def nowhere(name: str) -> str:
    """What to tell of a node without the image, if this machine has none either."""
    return f"neither it nor this machine has the image {name}; run `orchestrator image build` on either"


def has_engine() -> bool:
    """Whether an Engine answers on this machine."""
    try:
        with closing(connect(CALL_TIMEOUT_S)):
            return True
    except (EnvironmentUnusable, *UNREACHABLE):
        return False


class SavedImages:
    """Images of this machine as files in `folder`, each saved when a node needs it. The longest unused go when
    there are KEPT."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[Path, None] = {}  # the longest unused first

    def path(self, name: str) -> Path:
        """The image as `docker save` writes it. Call it for one image at a time. Raises LaunchError."""
        saved = self._folder / name.replace("/", "%")
        self._kept.pop(saved, None)
        if not saved.exists():
            while len(self._kept) >= KEPT:
                (unused := next(iter(self._kept))).unlink(missing_ok=True)
                del self._kept[unused]
            _save(name, saved)
        self._kept[saved] = None
        return saved


def _save(name: str, saved: Path) -> None:
    draft = saved.with_name(f"{saved.name}.part")
    try:
        with _engine(f"the image {name} cannot be sent to nodes") as engine, draft.open("wb") as file:
            for piece in engine.get_image(name):
                file.write(piece)
    except LaunchError:
        draft.unlink(missing_ok=True)
        raise
    draft.rename(saved)


def load_image(path: Path) -> None:
    """Loads what `docker save` wrote into this machine's Engine. Raises LaunchError."""
    with _engine("the Engine did not take the image") as engine, path.open("rb") as file:
        for message in engine.load_image(file):  # type: ignore[no-untyped-call]
            if "error" in message:
                raise LaunchError(f"the Engine did not take the image: {message['error']}")


@contextmanager
def _engine(what: str) -> Iterator[docker.APIClient]:
    """Whatever goes wrong with the Engine or a file in this block is a LaunchError that begins with `what`."""
    try:
        with closing(connect(ENGINE_TIMEOUT_S)) as engine:
            yield engine
    except EnvironmentUnusable as error:
        raise LaunchError(f"{what}: {error}") from error
    except DockerException as error:
        raise LaunchError(f"{what}: {why_refused(error)}") from error
    except OSError as error:
        raise LaunchError(f"{what}: {error.strerror}; make room there") from error
