"""The Engine's calls as coroutines: a few named ones, in threads of their own, each with a deadline.

They return what the Engine answered. `launcher`, `sandbox` and `reaper` decide what that means.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import requests
from docker import APIClient
from docker.errors import APIError, DockerException, NotFound
from urllib3.exceptions import HTTPError

from orchestrator.errors import DockerError, EngineUnfitError, LaunchError, RolloutError
from orchestrator.launch.docker.client import (
    connect,
    engine_info,
    is_lasting,
    one_line,
    why_refused,
    why_unreachable,
)
from orchestrator.rules.waits import uninterrupted

T = TypeVar("T")

CALL_TIMEOUT_S = 30  # longer than any silence of an Engine that is merely busy
_SETTLE_S = 5.0
# The SDK's own exceptions, and those of lower layers that it lets through.
UNREACHABLE = (DockerException, requests.RequestException, HTTPError, OSError)


class Engine:
    """A connection to the Engine, made at the first call. Calls raise DockerError.

    When a cancelled call raises CancelledError, it has ended or never begun, so that cleanup knows what exists.
    Only for an Engine that hangs it does not wait longer than _SETTLE_S.
    """

    def __init__(self, *, threads: int, timeout_s: int = CALL_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="engine")
        self._client: APIClient | None = None
        self._connecting = asyncio.Lock()

    async def open(self) -> None:
        """Connects. Raises EnvironmentUnusable, which says what to do."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._in_thread("connect", lambda: connect(self._timeout_s), self._timeout_s)

    async def info(self) -> dict[str, Any]:
        """Facts about the Engine itself; `Podman`: its version, if it is Podman that answers, else None."""
        return await self._call("info", engine_info)

    async def image(self, name: str) -> dict[str, Any] | None:
        """The Engine's description of an image; None: there is no such image."""
        return await self.read_image(name, dict)

    async def read_image(self, name: str, read: Callable[[dict[str, Any]], T]) -> T | None:
        """What `read` makes of the Engine's description of an image; None: there is no such image."""
        return await self._find("image", lambda client: read(client.inspect_image(name)))

    async def create(self, config: Mapping[str, Any], name: str) -> str:
        """Creates a container and returns its id. LaunchError: the Engine refused.

        After a DockerError the container may exist all the same, or be created later: look for its name.
        """
        return await self._call(
            "create",
            lambda client: str(client.create_container_from_config(dict(config), name)["Id"]),
            refusal=LaunchError,
        )

    async def start(self, container: str) -> None:
        """Starts a container. LaunchError: the Engine or its runtime refused."""
        await self._call("start", lambda client: client.start(container), refusal=LaunchError)

    async def inspect(self, container: str, read: Callable[[dict[str, Any]], T]) -> T | None:
        """What `read` makes of the Engine's answer; None: there is no such container."""
        return await self._find("inspect", lambda client: read(client.inspect_container(container)))

    async def remove(self, container: str) -> bool:
        """Kills a container and removes it with everything it wrote. False: there was none."""

        def delete(client: APIClient) -> bool:
            client.remove_container(container, v=True, force=True)
            return True

        return bool(await self._find("remove", delete))

    async def containers(self, label: str) -> list[dict[str, Any]]:
        """All containers with a label, running or not."""
        return await self._call(
            "list containers", lambda client: client.containers(all=True, filters={"label": label})
        )

    async def images(self, label: str, *, nameless: bool = False) -> list[dict[str, Any]]:
        """All images with a label, intermediate ones too. `nameless`: only unnamed ones that no image is
        built on."""
        filters: dict[str, Any] = {"label": label, **({"dangling": True} if nameless else {})}
        return await self._call("list images", lambda client: client.images(all=not nameless, filters=filters))

    async def remove_image(self, image: str) -> None:
        """Removes an image. DockerError: another image or a container needs it."""
        await self._find("remove image", lambda client: client.remove_image(image))

    async def remove_volumes(self, label: str) -> None:
        """Removes all volumes with a label that no container uses."""

        def remove(client: APIClient) -> None:
            for volume in client.volumes(filters={"label": label})["Volumes"] or ():
                with suppress(APIError):  # a container uses it
                    client.remove_volume(volume["Name"])

        await self._call("remove volumes", remove)

    async def log_tail(self, container: str) -> str:
        """The end of what a container printed. Untrusted, for diagnosis."""
        output = await self._find("logs", lambda client: client.logs(container, tail=10))
        return (output or b"").decode("utf-8", "replace")

    async def cpu_ns(self, container: str, timeout_s: float) -> int:
        """CPU time used so far by a running container."""

        def used(client: APIClient) -> int:
            stats = client.stats(container, stream=False, one_shot=True)
            return int(stats["cpu_stats"]["cpu_usage"]["total_usage"])

        return await self._call("stats", used, timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Waits for the calls under way, at most their timeout. Idempotent."""
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
        if self._client is not None:
            self._client.close()
            self._client = None

    async def _find(self, what: str, function: Callable[[Any], T]) -> T | None:
        """As `_call`; None for what the Engine does not have."""

        def find(client: APIClient) -> T | None:
            with suppress(NotFound):
                return function(client)
            return None

        return await self._call(what, find)

    async def _call(
        self,
        what: str,
        function: Callable[[Any], T],
        *,
        timeout_s: float | None = None,
        refusal: type[RolloutError] = DockerError,
    ) -> T:
        """The answer. A refusal of the Engine raises `refusal`; where that is LaunchError and waiting does not
        help, EngineUnfitError.

        `function` also reads the answer: an answer of another shape is the Engine's failure, not a bug of ours.
        """
        await self.open()
        client = self._client
        assert client is not None
        timeout_s = timeout_s or self._timeout_s
        try:
            return await self._in_thread(what, lambda: function(client), timeout_s)
        except APIError as error:
            reason = error.explanation or error
            unfit = refusal is LaunchError and is_lasting(reason)
            raise (EngineUnfitError if unfit else refusal)(why_refused(reason)) from None
        except requests.Timeout:
            raise DockerError(_no_answer(what, self._timeout_s)) from None
        except UNREACHABLE as error:
            raise DockerError(why_unreachable(error)) from None
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            odd = one_line(repr(error))
            raise DockerError(f"the Docker Engine's answer has an unexpected shape ({what}: {odd})") from error

    async def _in_thread(self, what: str, function: Callable[[], T], timeout_s: float) -> T:
        job = self._pool.submit(function)
        answer = asyncio.wrap_future(job)
        answer.add_done_callback(lambda future: future.cancelled() or future.exception())
        try:
            await asyncio.wait([answer], timeout=timeout_s)
            if not answer.done():  # this process may have stood still, and the answer is there
                await asyncio.wait([answer], timeout=min(1.0, timeout_s / 10))
        except asyncio.CancelledError:
            if not job.cancel():
                with suppress(asyncio.CancelledError):
                    await uninterrupted(asyncio.wait([answer], timeout=_SETTLE_S))
            raise
        if not answer.done():
            job.cancel()
            raise DockerError(_no_answer(what, timeout_s))
        return answer.result()


def _no_answer(what: str, timeout_s: float) -> str:
    return f"the Docker Engine did not answer within {timeout_s:g} s ({what})"
