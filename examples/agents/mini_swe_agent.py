"""mini-swe-agent with its own prompts and its one tool, bash.

orchestrator process --env.agent program:examples/agents/mini_swe_agent.py --env.sandbox_image IMAGE ...
"""

import os
import sys

# As in litellm_tools.py.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import yaml
from minisweagent import package_dir
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

settings = yaml.safe_load((package_dir / "config" / "mini.yaml").read_text())
# Nobody knows what a token of this model costs.
model = LitellmModel(
    model_name="openai/" + os.environ["OPENAI_MODEL"], cost_tracking="ignore_errors", **settings["model"]
)
agent = DefaultAgent(model, LocalEnvironment(**settings["environment"]), **settings["agent"])
print(agent.run(sys.stdin.read())["submission"])
