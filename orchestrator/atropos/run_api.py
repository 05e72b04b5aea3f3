"""Atropos' run-api as an environment uses it: its calls, and what can go wrong with each.

The server is one process that remembers nothing across restarts. It knows an environment by the place of its
registration in a list, so after a restart or a `/reset_data` the same number may mean no environment, or another.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import orjson

from orchestrator.atropos.terms import Terms
from orchestrator.errors import OrchestratorError

T = TypeVar("T")

TIMEOUT_S = 30.0
GZIP_FROM_BYTES = 1024
MAX_ANSWER_BYTES = 1 << 20  # of numbers and names; a 422 quotes the groups it refuses: their beginning is enough
MAX_GROUP_BYTES = 1 << 30  # of the latest example: a whole group, of any environment
_REASON_BYTES = 2000
_REASON_CHARS = 300
_LATER = frozenset({408, 425, 429})  # a gateway's answers: too slow, too early, too many; the call is repeated


class RunApiAway(OrchestratorError):
    """No answer, or a failure of the server or of a gateway in front of it. `arrived`: the run-api may have taken
    the request, or take it a little later."""

    def __init__(self, reason: str, *, arrived: bool, status: int | None = None) -> None:
        super().__init__(reason)
        self.arrived = arrived
        self.status = status


class RunApiRefused(OrchestratorError):
    """The run-api refused: asking again would give the same answer."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What an environment is answer when it registers. `step`: where the trainer is."""

    env_id: int
    name: str
    step: int
    checkpoint_dir: str
    checkpoint_interval: int


@dataclass(frozen=True, slots=True)
class Trainer:
    """What the trainer asked for; None: it did not say."""

    batch_size: int | None
    max_token_len: int | None


@dataclass(frozen=True, slots=True)
class Status:
    """Queue sizes in groups of this environment's size. `queued` also counts other environments' rollouts."""

    step: int
    queued: int
    own_queued: int
    unallocated: float


class RunApi:
    """A client for one run-api. Every call raises RunApiAway or RunApiRefused."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def register(self, terms: Terms) -> Registration | None:
        """None: there is no trainer yet."""
        return await self._call(
            "POST",
            "/register-env",
            {
                "max_token_length": terms.max_token_length,
                "desired_name": terms.name,
                "weight": terms.weight,
                "group_size": terms.group_size,
                "min_batch_allocation": terms.allocation,
            },
            read=_registration,
        )

    async def trainer(self) -> Trainer:
        """What the trainer registered with."""
        return await self._call(
            "GET",
            "/info",
            read=lambda info: Trainer(_above_zero(info["batch_size"]), _above_zero(info["max_token_len"])),
        )

    async def status(self, env_id: int) -> Status:
        """A server that does not know the number answers 500."""
        return await self._call("GET", "/status-env", {"env_id": env_id}, read=_status)

    async def send(self, groups: Sequence[Mapping[str, Any]], env_id: int) -> None:
        """Hands the groups over: one, or several together."""
        lines = [{**group, "env_id": env_id} for group in groups]
        if len(lines) == 1:
            await self._call("POST", "/scored_data", lines[0], read=_nothing)
        else:
            await self._call("POST", "/scored_data_list", lines, read=_nothing)

    async def latest(self) -> tuple[int | None, str]:
        """(env_id, fingerprint) of the group that the run-api took last. A reset does not clear it."""
        return await self._call(
            "GET",
            "/latest_example",
            read=lambda answer: (answer.get("env_id"), fingerprint(answer)),
            most=MAX_GROUP_BYTES,
        )

    async def waiting(self) -> int:
        """Groups in its queue, of all environments."""
        return await self._call("GET", "/status", read=lambda answer: int(answer["queue_size"]))

    async def wandb(self) -> tuple[str | None, str | None]:
        """The trainer's group and project."""
        return await self._call(
            "GET", "/wandb_info", read=lambda answer: (answer.get("group"), answer.get("project"))
        )

    async def disconnect(self, env_id: int) -> None:
        """Says that nothing more will come."""
        await self._call("POST", "/disconnect-env", {"env_id": env_id}, read=_nothing)

    async def _call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        read: Callable[[Any], T],
        most: int = MAX_ANSWER_BYTES,
    ) -> T:
        """What `read` makes of the answer. Raises RunApiRefused for one of another shape, or of more than `most`
        bytes."""
        data, headers = (None, {}) if body is None else await asyncio.to_thread(_encoded, body)
        headers["Accept-Encoding"] = "identity"  # packed, a small answer could be a gigabyte
        what = f"{self.url}{path}"
        try:
            async with self._session.request(
                method,
                what,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(TIMEOUT_S),
                auto_decompress=False,
            ) as answer:
                text = await _beginning(answer, most)
                encoding = answer.headers.get("Content-Encoding", "identity")
                if answer.status >= 500 or answer.status in _LATER:
                    # A gateway may answer this while the run-api has taken the request and is only slow.
                    raise RunApiAway(
                        f"{what} answers {answer.status}: {_reason(text)}", arrived=True, status=answer.status
                    )
                if answer.status >= 400:
                    raise RunApiRefused(f"{what} answers {answer.status}: {_reason(text)}")
        except aiohttp.ClientConnectorError as error:
            raise RunApiAway(f"no answer from {self.url}: {error.strerror or error}", arrived=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RunApiAway(f"{what} broke off: {type(error).__name__}", arrived=True) from error
        if len(text) > most:
            raise RunApiRefused(f"{what} is no run-api: it answers more than {most} bytes")
        if encoding != "identity":
            raise RunApiRefused(
                f"{what} answers in {_reason(encoding.encode())}, though asked not to: is a proxy there?"
            )
        try:
            return await asyncio.to_thread(lambda: read(orjson.loads(text)))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise RunApiRefused(f"{what} is no run-api: it answers {_reason(text)!r}") from error


async def _beginning(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """All of the answer, or more than `most` bytes of it."""
    text = bytearray()
    async for chunk in answer.content.iter_any():
        text += chunk
        if len(text) > most:
            break
    return bytes(text)


def _registration(answer: Any) -> Registration | None:
    if answer["status"] != "success":
        return None
    return Registration(
        env_id=int(answer["env_id"]),
        name=str(answer["wandb_name"]),
        step=int(answer["starting_step"]),
        checkpoint_dir=str(answer.get("checkpoint_dir") or ""),
        checkpoint_interval=int(answer.get("checkpoint_interval") or 0),
    )


def _status(answer: Any) -> Status:
    return Status(
        step=int(answer["current_step"]),
        queued=int(answer["queue_size"]),
        own_queued=int(answer.get("self_queue_size", 0)),
        unallocated=float(answer.get("unallocated_fraction", 1.0)),
    )


def fingerprint(group: Mapping[str, Any]) -> str:
    """A hash of the group's tokens, and of its rollout ids where it has some. The run-api does not change it."""
    names_G = [str(facts.get("rollout_id")) for facts in group.get("overrides") or () if facts]
    return hashlib.sha256(orjson.dumps([group["tokens"], names_G])).hexdigest()


def _nothing(answer: Any) -> None:
    """Ignores what an answer says."""


def _encoded(body: object) -> tuple[bytes, dict[str, str]]:
    """JSON, compressed where that pays: groups are long lists of small numbers."""
    import gzip

    text = orjson.dumps(body)
    headers = {"Content-Type": "application/json"}
    if len(text) < GZIP_FROM_BYTES:
        return text, headers
    return gzip.compress(text, compresslevel=3), {**headers, "Content-Encoding": "gzip"}


def _above_zero(value: object) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


def _reason(text: bytes) -> str:
    return " ".join(text[:_REASON_BYTES].decode("utf-8", "replace").split())[:_REASON_CHARS]
