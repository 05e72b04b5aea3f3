"""All checks of a machine that carries out rollouts: this one, or a node of a cluster, which makes them itself."""

import asyncio
from collections.abc import AsyncIterator

from orchestrator.doctor.finding import Finding
from orchestrator.doctor.machine import check_temporary
from orchestrator.doctor.sandboxes import check_sandboxes
from orchestrator.doctor.services import check_mcp_servers, check_services, check_web_tools
from orchestrator.host.setup import completion_needs
from orchestrator.settings.config import Config


async def check_host(
    config: Config, *, image_comes: bool = False, tokenizer_digest: str | None = None
) -> AsyncIterator[Finding]:
    """`image_comes`: the machine gets the image when a run begins, so that no sandbox can be started now.
    `tokenizer_digest`: of the run's tokenizer, which this machine's must be; None: any will do."""
    for finding in await asyncio.to_thread(lambda: tuple(check_temporary())):
        yield finding
    async for finding in check_sandboxes(
        config.env, config.sandbox_spec(), localhost_tcp=config.env.needs_localhost_tcp, image_comes=image_comes
    ):
        yield finding
    async for finding in check_services(completion_needs(config), tokenizer_digest):
        yield finding
    async for finding in check_web_tools(config.env, config.tavily_api_key):
        yield finding
    async for finding in check_mcp_servers(config.env.mcp_servers):
        yield finding
