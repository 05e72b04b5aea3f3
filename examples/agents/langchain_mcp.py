"""An agent of LangChain with the run's host tools, those of MCP servers among them.

orchestrator process --env.agent program:examples/agents/langchain_mcp.py --env.sandbox_image IMAGE \
    --env.mcp_servers '[{"name": "clock", "command": "mcp-server-time"}]' ...
"""

import asyncio
import os
import sys

from langchain.agents import create_agent
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_openai import ChatOpenAI


async def main() -> None:
    client = MultiServerMCPClient({"run": {"transport": "http", "url": os.environ["ORCHESTRATOR_MCP_URL"]}})
    agent = create_agent(
        ChatOpenAI(model=os.environ["OPENAI_MODEL"]),
        tools=await client.get_tools(),
        system_prompt="Use your tools to solve the task. Then say the answer and nothing else.",
    )
    ended = await agent.ainvoke({"messages": [{"role": "user", "content": sys.stdin.read()}]})
    print(ended["messages"][-1].text)


asyncio.run(main())
