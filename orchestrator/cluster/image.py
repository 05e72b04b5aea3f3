"""The sandbox image on its way to nodes: saved once here, sent in pieces, loaded there. All of it blocks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import docker
from docker.errors import DockerException

from orchestrator.errors import EnvironmentUnusable, LaunchError
from orchestrator.launch.docker.client import connect, inspect_image, why_refused

ENGINE_TIMEOUT_S = 600


def image_id(name: str) -> str | None:
    """The id of this machine's image of that name; None: there is none, or no Engine."""
    try:
        engine = connect(ENGINE_TIMEOUT_S)
    except EnvironmentUnusable:
        return None
    try:
        found = inspect_image(engine, name)
        return None if found is None else str(found["Id"])
    except DockerException:
        return None
    finally:
        engine.close()


class SavedImages:
    """Images of this machine as files in `folder`, each saved when the first node needs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        """The image as `docker save` writes it. Call it for one image at a time. Raises LaunchError."""
        saved = self._folder / name.replace("/", "%")
        if saved.exists():
            return saved
        draft = saved.with_name(f"{saved.name}.part")
        try:
            engine = docker.APIClient(**docker.utils.kwargs_from_env(), timeout=ENGINE_TIMEOUT_S)
            try:
                with draft.open("wb") as file:
                    for piece in engine.get_image(name):
                        file.write(piece)
            finally:
                engine.close()
        except (DockerException, OSError) as error:
            draft.unlink(missing_ok=True)
            raise LaunchError(f"the image {name} cannot be sent to nodes: {_why(error)}") from error
        return draft.rename(saved)


def load_image(path: Path) -> None:
    """Loads what `docker save` wrote into this machine's Engine. Raises LaunchError."""
    try:
        engine = docker.APIClient(**docker.utils.kwargs_from_env(), timeout=ENGINE_TIMEOUT_S)
        try:
            with path.open("rb") as file:
                for told in engine.load_image(file):  # type: ignore[no-untyped-call]
                    if "error" in told:
                        raise LaunchError(f"the Engine did not take the image: {told['error']}")
        finally:
            engine.close()
    except (DockerException, OSError) as error:
        raise LaunchError(f"the Engine did not take the image: {_why(error)}") from error


def place_for_images() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="orchestrator-images-")


def _why(error: DockerException | OSError) -> str:
    return why_refused(error) if isinstance(error, DockerException) else error.strerror or str(error)
