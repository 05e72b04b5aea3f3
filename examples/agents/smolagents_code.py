"""smolagents' CodeAgent as a program: its model is OpenAI's client, its code runs in this process.

orchestrator process --env.agent program:examples/agents/smolagents_code.py --env.sandbox_image IMAGE ...
"""

import os
import sys

from smolagents import CodeAgent, OpenAIModel

agent = CodeAgent(tools=[], model=OpenAIModel(os.environ["OPENAI_MODEL"]))
print(agent.run(sys.stdin.read()))
