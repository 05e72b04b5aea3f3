"""A clipped policy gradient on the columns that `GRPOTrainer` gets from a rollout."""

from collections import defaultdict
from statistics import mean

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM

rows = load_dataset("trl", split="train")
scores = defaultdict(list)
for row in rows:
    if row["main"]:
        scores[row["group"]].append(row["score"])
model = AutoModelForCausalLM.from_pretrained("my-model", dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
for row in rows:
    ids, begin = torch.tensor(row["prompt_ids"] + row["completion_ids"]), len(row["prompt_ids"])
    logprobs = model(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[begin - 1 :, 0]
    sampled = torch.tensor(row["env_mask"], dtype=torch.bool)
    old = torch.tensor([p or 0.0 for p in row["logprobs"]])
    ratio = (logprobs - old)[sampled].exp()
    advantage = row["score"] - mean(scores[row["group"]])
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    (-row["weight"] * gain / len(rows)).backward()
optimizer.step()
model.save_pretrained("out-offline")
