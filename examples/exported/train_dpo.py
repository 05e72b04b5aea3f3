"""Pairs of a solved rollout and another."""

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

rows = load_dataset("dpo", split="train")
args = DPOConfig("out-dpo", max_length=None, max_steps=2, report_to="none", use_cpu=True, bf16=False)
DPOTrainer("my-model", args=args, train_dataset=rows).train()
