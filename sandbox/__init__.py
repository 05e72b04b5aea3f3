"""The program inside one sandbox: runs one agent for one rollout and knows nothing of scores or keys."""
