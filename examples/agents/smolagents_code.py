"""smolagents' CodeAgent as a program: its model is OpenAI's client, its code runs in this process.

orchestrator process --env.agent program:examples/agents/smolagents_code.py --env.sandbox_image IMAGE ...
"""

import os
import sys

from smolagents import CodeAgent, OpenAIModel
from smolagents.models import MessageRole

# smolagents repeats the code of each step behind what the model said, as the model's own words. As the user's they
# leave the line of sampled tokens whole.
roles = {MessageRole.TOOL_CALL: MessageRole.USER, MessageRole.TOOL_RESPONSE: MessageRole.USER}
agent = CodeAgent(tools=[], model=OpenAIModel(os.environ["OPENAI_MODEL"], custom_role_conversions=roles))
print(agent.run(sys.stdin.read()))
