"""Groups of rollouts as OpenEnv sessions: prints what a trainer takes of each, then the traces of the record."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean

from orchestrator import Task, load_config
from orchestrator.trainers.openenv import RolloutSessionFactory, traces

config = load_config(
    env={
        "group_size": 1,
        "token_source": "exact",
        "tokenizer_name": "my-model",
        "run_dir": "runs/openenv",
    },
    openai={"base_url": "http://localhost:9001/v1", "model_name": "my-model"},
)
tasks = [Task("sum", "What is 17 plus 25?", answer="42"), Task("product", "What is 6 times 8?", answer="48")]

with RolloutSessionFactory(config, tasks) as factory, ThreadPoolExecutor(4) as pool:

    def rollout(task_id: str, step: int, number: int) -> tuple[int, float | None]:
        """(tokens to train on, reward)"""
        session = factory.create(task_id, seed=step, episode_id=f"{step}/{number}")
        try:
            session.wait_for_completion()
            trace, verdict = session.fetch_training_trace(), session.verify([])
            return sum(sum(turn.loss_mask) for turn in trace.turns), verdict.env_reward
        finally:
            session.close()

    for step in range(2):
        for task in tasks:
            group = list(pool.map(partial(rollout, task.task_id, step), range(4)))
            rewards = [reward for _, reward in group if reward is not None]
            for tokens, reward in group:
                if reward is not None:
                    print(step, task.task_id, tokens, reward - mean(rewards))

for rollout_id, trace in traces(Path("runs/openenv")):
    print(rollout_id, len(trace.turns))
