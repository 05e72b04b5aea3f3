"""An agent of the OpenAI Agents SDK with the run's host tools, those of MCP servers among them.

orchestrator process --env.agent program:examples/agents/openai_agents_mcp.py --env.sandbox_image IMAGE \
    --env.mcp_servers '[{"name": "clock", "command": "mcp-server-time"}]' ...
"""

import asyncio
import os
import sys

from agents import Agent, Runner, set_tracing_disabled
from agents.mcp import MCPServerStreamableHttp

set_tracing_disabled(True)  # it would send traces to OpenAI, and try for seconds before the program ends
MINUTES = 600.0  # its own limit is five seconds; the run has one for each call (env.tool_timeout)


async def main() -> None:
    params = {"url": os.environ["ORCHESTRATOR_MCP_URL"], "timeout": MINUTES}
    async with MCPServerStreamableHttp(params, client_session_timeout_seconds=MINUTES) as tools:
        agent = Agent(
            name="solver",
            instructions="Use your tools to solve the task. Then say the answer and nothing else.",
            mcp_servers=[tools],
            model=os.environ["OPENAI_MODEL"],
        )
        ended = await Runner.run(agent, sys.stdin.read())
    print(ended.final_output)


asyncio.run(main())
