"""The operator's functions and objects as host tools: arguments are checked, time and size bounded, errors told.

A function that is no coroutine runs in a thread of its own. Threads cannot be stopped: one that exceeds its time
keeps its slot until it ends, at the latest with the process.
"""

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.errors import ToolError
from orchestrator.rules.redact import redact
from orchestrator.rules.waits import running_timeout
from orchestrator.tools.arguments import check_names
from orchestrator.tools.signatures import Signature

log = logging.getLogger(__name__)

MAX_RESULT_CHARS = 200_000
MAX_ERROR_CHARS = 2_000
_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class Workers:
    """At most `max_calls` calls at a time over all rollouts, each within `timeout_s`, waiting included."""

    def __init__(self, timeout_s: float, max_calls: int) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(max_calls)

    async def run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """The function's result. Raises TimeoutError, and what the function raises."""
        async with running_timeout(self.timeout_s):
            await self._slots.acquire()
            if not inspect.iscoroutinefunction(function):
                return await self._in_thread(function, arguments)
            try:
                return await function(**arguments)
            finally:
                self._slots.release()

    async def _in_thread(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        result_future: asyncio.Future[Any] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            self._slots.release()
            if result_future.done():  # the caller has stopped waiting
                return
            if error is None:
                result_future.set_result(result)
            else:
                result_future.set_exception(_plain(error))

        def work() -> None:
            result, error = None, None
            try:
                result = function(**arguments)
            except BaseException as raised:  # raised in the caller
                error = raised
            try:
                loop.call_soon_threadsafe(finish, result, error)
            except RuntimeError:
                log.debug("a tool came to its end after the run")

        # Daemon threads, unlike a pool's: one that hangs must not keep the process from ending.
        try:
            threading.Thread(target=work, name="host tool", daemon=True).start()
        except RuntimeError:  # no more threads
            self._slots.release()
            raise
        return await result_future


class FunctionTool:
    """A `HostTool` made of a function. `gives_text`: its results are the texts that are passed on, JSON included.

    Whatever the function raises is an observation: its arguments are the policy's, and no control is known of it.
    """

    def __init__(
        self, function: Callable[..., Any], signature: Signature, workers: Workers, *, gives_text: bool = False
    ) -> None:
        self.description = signature.description
        self.inputs = signature.inputs
        self.output_type = signature.output_type
        self._function = function
        self._workers = workers
        self._gives_text = gives_text or signature.output_type in ("string", "any")

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The result as text, or as JSON, depending on the output type. Raises ToolError."""
        check_arguments(arguments, self.inputs)
        try:
            result = await self._workers.run(self._function, arguments)
        except ToolError:
            raise
        except TimeoutError:
            raise ToolError(f"the tool did not answer within {self._workers.timeout_s:g} seconds") from None
        except Exception as error:
            # HTTP clients name the address that they asked, with the key in it.
            raise ToolError(redact(f"{type(error).__name__}: {error}")[:MAX_ERROR_CHARS]) from error
        return self._text(result)

    def _text(self, result: object) -> str:
        if self._gives_text:
            text = result if isinstance(result, str) else str(result)
            if len(text) > MAX_RESULT_CHARS:
                text = f"{text[:MAX_RESULT_CHARS]}\n[cut: {len(text) - MAX_RESULT_CHARS} more characters]"
            return text.encode("utf-8", "replace").decode()
        try:
            text = json.dumps(result, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise ToolError("the tool gave a result that cannot be told as JSON") from None
        if len(text) > MAX_RESULT_CHARS:
            raise ToolError(f"the tool gave a result of more than {MAX_RESULT_CHARS} characters")
        return text


def check_arguments(arguments: Mapping[str, Any], inputs: Mapping[str, Mapping[str, Any]]) -> None:
    """Checks names and types of the arguments. Raises ToolError."""
    check_names(arguments, inputs)
    for name, shape in inputs.items():
        value = arguments.get(name)
        if value is None:
            if name not in arguments and not shape.get("nullable"):
                raise ToolError(f"{name} is missing")
            if name in arguments and not shape.get("nullable") and shape["type"] != "any":
                raise ToolError(f"{name} must be of type {shape['type']}, not null")
            continue
        kinds = _KINDS.get(str(shape["type"]))
        fits = kinds is None or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)))
        if not fits:
            raise ToolError(f"{name} must be of type {shape['type']}, not {type(value).__name__}")


def _plain(error: BaseException) -> Exception:
    """The error as one a future can hold: SystemExit and the like must not end the run, and StopIteration is not
    allowed there."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
