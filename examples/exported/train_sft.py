"""Sampled ids, with labels that mask all else."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rows = load_dataset("sft", split="train")
args = SFTConfig("out-sft", max_length=None, max_steps=2, report_to="none", use_cpu=True, bf16=False)
SFTTrainer("my-model", args=args, train_dataset=rows).train()
