"""What operators bring for the agent: prompts, managed agents, tools, a whole program."""
