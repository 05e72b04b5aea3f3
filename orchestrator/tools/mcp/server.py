"""Keeps one MCP server of the operator's: begins it, calls its tools, begins it anew when it ended, and decides
whose fault a failure is.

All rollouts share the server. What fails while a call is under way may be that call's doing: a server that ends or
hangs then is begun anew, and nobody's rollout is drawn again for it. Only who had no call under way may end as
`tool_error`, and only if the server cannot be begun or reached either.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from orchestrator.errors import EnvironmentUnusable, OrchestratorError, ToolError, ToolServiceError
from orchestrator.rules.control import CACHE_S, Control
from orchestrator.rules.waits import running_timeout
from orchestrator.tools.base import CALLER
from orchestrator.tools.mcp.base import McpServer
from orchestrator.tools.mcp.http import asking
from orchestrator.tools.mcp.keys import keys_of, text_of
from orchestrator.tools.mcp.process import running
from orchestrator.tools.mcp.results import clean, text_of_result, without_keys
from orchestrator.tools.mcp.schemas import Listed
from orchestrator.tools.mcp.session import Conversation, ServerGone, ServerRefusal, conversation
from orchestrator.tools.mcp.wire import Dial

log = logging.getLogger(__name__)

BEGIN_S = 60.0  # to begin a server: some fetch packages first
PING_S = 10.0
_AGAIN_S = 5.0  # after a beginning that failed
_ENDS_S = 10.0
_MAX_ERROR_CHARS = 2_000


class Server:
    """One server, for all rollouts of a run on this machine."""

    def __init__(
        self, server: McpServer, *, timeout_s: float, max_calls: int, fail_rollouts: bool = False
    ) -> None:
        """`server`: with its keys looked up. `fail_rollouts`: a server that is away ends rollouts."""
        self.name = server.name
        self._server, self._timeout_s, self._fail_rollouts = server, timeout_s, fail_rollouts
        self._slots = asyncio.Semaphore(max_calls)
        self._keys = keys_of(server)
        self._life: _Life | None = None
        self._beginning: asyncio.Task[Conversation] | None = None
        self._failed_at = float("-inf")
        self._under_way: Counter[str] = Counter()  # calls by rollout
        self._suspects: set[str] = set()  # rollouts with a call under way when it ended or hung
        self._control = Control(self._plain)

    async def tools(self) -> list[dict[str, Any]]:
        """Begins the server and asks for its list. Raises EnvironmentUnusable."""
        try:
            async with asyncio.timeout(BEGIN_S):
                return await (await self._talk()).tools()
        except TimeoutError:
            raise EnvironmentUnusable(
                self._clean(f"it did not list its tools within {BEGIN_S:g} seconds")
            ) from None
        except (ServerGone, ServerRefusal) as error:
            raise EnvironmentUnusable(self._clean(str(error))) from None

    def untold(self, value: Any) -> Any:
        """What it says of its tools, without its keys."""
        return without_keys(value, self._keys)

    async def call(self, tool: Listed, arguments: Mapping[str, Any]) -> str:
        """The result as text. Raises ToolError, ToolServiceError."""
        caller = CALLER.get()
        try:
            async with running_timeout(self._timeout_s), self._slots:
                result = await self._asked(await self._talk(), tool, arguments, caller)
        except TimeoutError:
            raise await self._failure(f"did not answer within {self._timeout_s:g} seconds", caller) from None
        except ServerGone as gone:
            raise await self._failure(f"is away: {gone}", caller) from None
        except ServerRefusal as refusal:
            raise ToolError(self._clean(f"the server {self.name} refuses the call: {refusal}")) from None
        text = text_of_result(result, self._keys)
        if result.get("isError"):
            raise ToolError(text[:_MAX_ERROR_CHARS] or "the tool failed")
        return text

    async def _asked(
        self, talk: Conversation, tool: Listed, arguments: Mapping[str, Any], caller: str
    ) -> dict[str, Any]:
        """Raises ServerRefusal, ServerGone."""
        self._under_way[caller] += 1
        try:
            return await talk.call(tool.name, tool.arguments(arguments))
        except (ServerGone, asyncio.CancelledError):  # the second: it takes too long
            self._suspects.update(self._under_way)
            raise
        finally:
            self._under_way[caller] -= 1
            if not self._under_way[caller]:
                del self._under_way[caller]

    async def aclose(self) -> None:
        """Ends the server. Idempotent, bounded."""
        if self._beginning is not None and not self._beginning.done():
            self._beginning.cancel()
            await asyncio.wait([self._beginning])
        if self._life is not None:
            await self._life.end()

    async def _failure(self, what: str, caller: str) -> ToolError | ToolServiceError:
        text = self._clean(f"the server {self.name} {what}")
        control = await self._control.answer(age_s=CACHE_S)
        if control.served or not self._fail_rollouts or caller in self._suspects:
            return ToolError(text)
        return ToolServiceError(f"{text}; {self._clean(control.remark())}")

    async def _plain(self) -> str:
        """The control: the server answers a ping, if need be begun anew. Raises ServerGone, TimeoutError."""
        try:
            async with asyncio.timeout(PING_S):
                await (await self._talk()).ping()
        except TimeoutError:
            self._suspects.update(self._under_way)
            if self._life is not None:
                await self._life.end()
            async with asyncio.timeout(BEGIN_S):
                await (await self._talk()).ping()
        self._suspects.clear()
        return "pong"

    async def _talk(self) -> Conversation:
        """The conversation that goes on, or a new one; all who ask share one beginning. Raises ServerGone."""
        if self._life is not None and not self._life.ended:
            return self._life.talk
        loop = asyncio.get_running_loop()
        begun = self._beginning
        if begun is None or (begun.done() and loop.time() - self._failed_at > _AGAIN_S):
            self._beginning = asyncio.create_task(self._begin(), name=f"begin MCP server {self.name}")
            self._beginning.add_done_callback(_heard)  # those who waited may be gone
        assert self._beginning is not None
        return await asyncio.shield(self._beginning)

    async def _begin(self) -> Conversation:
        before, self._life = self._life, None
        if before is not None:
            await before.end()
        life = _Life(self._dial(), f"MCP server {self.name}")
        try:
            async with asyncio.timeout(BEGIN_S):
                await life.begun()
        except BaseException as error:
            self._failed_at = asyncio.get_running_loop().time()
            await life.end()
            if isinstance(error, TimeoutError):
                raise ServerGone(f"it did not begin within {BEGIN_S:g} seconds") from None
            if isinstance(error, OrchestratorError | ServerRefusal):
                raise ServerGone(str(error)) from None
            raise
        self._life = life
        return life.talk

    def _dial(self) -> Dial:
        server = self._server
        if server.url:
            headers = {name: text_of(value) for name, value in server.headers.items()}
            return asking(server.url, headers, self._timeout_s)
        return running(server.command, server.args, {name: text_of(value) for name, value in server.env.items()})

    def _clean(self, text: str) -> str:
        return clean(text, self._keys)[:_MAX_ERROR_CHARS]


def _heard(beginning: asyncio.Task[Conversation]) -> None:
    if not beginning.cancelled():
        beginning.exception()


class _Life:
    """One life of a server, in a task of its own: what is entered there has to be left there."""

    def __init__(self, dial: Dial, name: str) -> None:
        self._closing = asyncio.Event()
        self._begun: asyncio.Future[Conversation] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(dial), name=name)

    @property
    def talk(self) -> Conversation:
        return self._begun.result()

    @property
    def ended(self) -> bool:
        return self._task.done() or (self._begun.done() and self.talk.ended.is_set())

    async def begun(self) -> None:
        """Waits until it can be asked. Raises OrchestratorError, ServerGone, ServerRefusal."""
        await asyncio.shield(self._begun)

    async def end(self) -> None:
        """Idempotent."""
        self._closing.set()
        if not self._begun.done():
            self._task.cancel()
        done, _ = await asyncio.wait([self._task], timeout=_ENDS_S)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_ENDS_S)
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            log.debug("an MCP server's conversation broke off", exc_info=error)

    async def _live(self, dial: Dial) -> None:
        try:
            async with conversation(dial) as talk:
                self._begun.set_result(talk)
                waits = [asyncio.create_task(one.wait()) for one in (self._closing, talk.ended)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        except BaseException as error:
            if self._begun.done():
                raise
            if isinstance(error, asyncio.CancelledError):
                self._begun.cancel()
                raise
            self._begun.set_exception(error)
            with suppress(Exception):
                self._begun.exception()  # marked as retrieved
