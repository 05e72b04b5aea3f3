"""Images of tasks' Dockerfiles: each made once for a run, and not at all where an earlier run has made it.

An image's tag is the digest of all that it is made of: the Dockerfile, its folder, and the ids of the images it
begins with. A `Builder` does what Docker and buildah do differently.
"""

import asyncio
import hashlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Literal, Protocol

from orchestrator.errors import BuildError, EnvironmentUnusable
from orchestrator.launch.image.dockerfile import Dockerfile, replacement
from orchestrator.launch.image.task_context import TaskContext
from orchestrator.launch.names import LABEL_PROJECT, LABEL_TASK, PROJECT, TASK_REPOSITORY
from orchestrator.rules.redact import redact
from orchestrator.rules.text import printable
from orchestrator.rules.waits import uninterrupted

Network = Literal["default", "host", "none"]
OURS = f"LABEL {LABEL_PROJECT}={PROJECT}"  # in every stage, so that what a cancelled build leaves can be told
_RECIPE = "2"  # another number: other images of the same Dockerfiles
_FROM = "FROM "  # paths begin with a slash
_REASON_CHARS, _LAST_LINES = 600, 5


class Builder(Protocol):
    """Makes images where sandboxes find them. Its coroutines raise BuildError for what is the Dockerfile's doing,
    EnvironmentUnusable for what is not; cancelled, they leave nothing but what `orchestrator cleanup` removes."""

    @property
    def first(self) -> str:
        """The instructions that stages begin with, behind FROM."""

    async def base(self, image: str) -> str:
        """The id of an image to begin with, which is fetched if need be."""

    def name_in_build(self, image: str) -> str:
        """What the image to begin with is called in a build."""

    async def find(self, tag: str) -> str | None:
        """The id of an image that was made before, and is now used again; None: there is none."""

    async def build(self, context: IO[bytes], bases: tuple[str, ...], tag: str, labels: Mapping[str, str]) -> str:
        """Carries out `task_context.REWRITTEN` of the context, a tar. Returns the image's id."""


class TaskImages:
    """`base_images`: names in Dockerfiles → images in their places. `say` gets a line when a build begins."""

    def __init__(
        self, builder: Builder, base_images: Mapping[str, str], timeout_s: float, say: Callable[[str], None]
    ) -> None:
        self._builder = builder
        self._base_images = base_images
        self._timeout_s = timeout_s
        self._say = say
        self._one_at_a_time: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by image or tag
        self._bases: dict[str, str] = {}  # ids, by name

    async def image(self, dockerfile: str | Path) -> str:
        """The id of the image of a Dockerfile, given by its path or as the line `FROM IMAGE`. Raises BuildError,
        EnvironmentUnusable."""
        if not str(dockerfile).startswith(_FROM):
            return await self._built(Path(dockerfile), str(dockerfile))
        with tempfile.TemporaryDirectory(prefix="orchestrator-context-") as folder:
            path = Path(folder) / "Dockerfile"
            path.write_text(f"{dockerfile}\n")
            return await self._built(path, str(dockerfile).removeprefix(_FROM))

    async def _built(self, path: Path, name: str) -> str:
        try:
            with tempfile.TemporaryFile(prefix="orchestrator-context-") as tar:
                context = await uninterrupted(asyncio.to_thread(TaskContext.pack, path, tar, self._rewritten))
                async with asyncio.timeout(self._timeout_s):
                    return await self._image(name, context, tar)
        except TimeoutError:
            limit = f"{self._timeout_s:g} s (env.build_timeout)"
            raise BuildError(f"its Dockerfile was not built within {limit}") from None
        except OSError as error:
            place = tempfile.gettempdir()
            raise EnvironmentUnusable(f"{error.strerror} in {place}: make room, or set TMPDIR") from error

    async def _image(self, name: str, context: TaskContext, tar: IO[bytes]) -> str:
        bases = tuple(dict.fromkeys(self._base(image) for image in context.dockerfile.images))
        ids = [await self._base_id(base) for base in bases]
        recipe = "\0".join((_RECIPE, context.digest, *ids))
        tag = f"{TASK_REPOSITORY}:{hashlib.sha256(recipe.encode()).hexdigest()[:32]}"
        async with self._one_at_a_time[tag]:
            if (found := await self._builder.find(tag)) is not None:
                return found
            self._say(f"building {printable(name)}")
            return await self._builder.build(tar, bases, tag, {LABEL_TASK: tag.rpartition(":")[2]})

    def _base(self, image: str) -> str:
        return replacement(image, self._base_images)

    async def _base_id(self, image: str) -> str:
        async with self._one_at_a_time[image]:
            if image not in self._bases:
                self._bases[image] = await self._builder.base(image)
            return self._bases[image]

    def _rewritten(self, dockerfile: Dockerfile) -> str:
        named = {image: self._builder.name_in_build(self._base(image)) for image in dockerfile.images}
        return dockerfile.on(named, self._builder.first)


def no_base(image: str, why: str) -> BuildError:
    """What to tell where an image to begin with cannot be had."""
    cure = f"--env.base_images {image}=IMAGE names another in its place"
    return BuildError(
        _line(f"its Dockerfile begins with {image}, which is not here and cannot be pulled: {why}; {cure}")
    )


def failed_step(step: str, why: str, output: list[str]) -> BuildError:
    """What to tell of a step that failed: which one, and the last lines it printed. All of it is untrusted."""
    last = [" ".join(redact(printable(line)).split())[:200] for line in output if line.strip()][-_LAST_LINES:]
    said = f": {' | '.join(last)}" if last else ""
    return BuildError(_line(f"its Dockerfile fails at `{' '.join(step.split())[:120]}` ({why}){said}"))


def _line(text: str) -> str:
    """One line; of a long one the end is what counts."""
    plain = redact(printable(" ".join(text.split())))
    return plain if len(plain) <= _REASON_CHARS else f"{plain[:200]} … {plain[-(_REASON_CHARS - 203) :]}"
