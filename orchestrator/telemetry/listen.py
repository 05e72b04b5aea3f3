"""Small HTTP services of a run, on the event loop: one place that opens and closes them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from orchestrator.errors import EnvironmentUnusable

LOOPBACK = "127.0.0.1"
CLOSE_S = 1.0  # for requests under way, which may wait for something that is away


@asynccontextmanager
async def listening(application: web.Application, address: str, setting: str) -> AsyncIterator[str]:
    """Serves at [HOST:]PORT within this block, on the loopback device where no host is named. Yields HOST:PORT,
    with the port that was found for 0. Raises EnvironmentUnusable, which names the setting, where nothing can
    listen."""
    host, _, port = address.rpartition(":")
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host.strip("[]") or LOOPBACK, int(port))
        try:
            await site.start()
        except (OSError, OverflowError, ValueError) as error:  # ValueError: a name that no host has
            raise EnvironmentUnusable(f"{setting}: nothing can listen at {address}: {error}") from error
        yield f"{host or LOOPBACK}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
