"""What services hand on to who grades: files that they wrote, as layers of the grader's sandbox."""

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from orchestrator.errors import LaunchError, SandboxLostError
from orchestrator.launch.base import ServingSandbox, TooMuch
from orchestrator.launch.oci.tree import remove
from orchestrator.services.life import PRINTED, Services
from orchestrator.types import Grader

_ALL = "/"  # folders that hide nothing


async def handed_on(
    grader: Grader, beside: Services, place: Path, stack: AsyncExitStack
) -> tuple[tuple[str, ...], list[str]]:
    """(layers, what went wrong, for people): what services printed and wrote when the grader's commands had been
    run in them, one after the other, while all of them went on. `place`: a folder of the disk where layers are;
    `stack` removes what is made there. Raises RolloutError."""
    commands = [one for one in grader.collect if one.service]
    trouble = await beside.collect(commands)
    names = dict.fromkeys((*(one.service for one in commands), *(name for name, _ in grader.of_services)))
    layers = []
    for name in names:
        kept = [f"{PRINTED}/{name}", *(path for service, path in grader.of_services if service == name)]
        folder = place / f"state-{secrets.token_hex(8)}"
        try:
            await asyncio.to_thread(folder.mkdir, parents=True)
            stack.callback(remove, folder)
            async with _quiet(beside.sandbox(name)):
                await asyncio.to_thread(beside.save, name, folder, all_but(kept), _ALL)
        except TooMuch as error:
            trouble.append(f"the state of {name} cannot be had: {error}")
            continue
        except OSError as error:
            raise LaunchError(f"no room for the state of a service in {place}: {error.strerror}") from error
        layers.append(str(folder))
    return tuple(layers), trouble


def all_but(kept: Sequence[str]) -> str:
    """A pattern of all paths that are none of these, nor below nor above them."""
    ways = []
    for path in kept:
        parts = path.strip("/").split("/")
        ways += ["/" + "/".join(map(re.escape, parts[:count])) + "/$" for count in range(1, len(parts))]
        ways.append("/" + "/".join(map(re.escape, parts)) + "(?:/|$)")
    return f"(?!{'|'.join(ways)})"


@asynccontextmanager
async def _quiet(sandbox: ServingSandbox) -> AsyncIterator[None]:
    """Nothing runs in it within the block. Where it cannot stand still it is ended for good."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(sandbox.still())
        except SandboxLostError:
            await sandbox.kill()
        yield
