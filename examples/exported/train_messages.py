"""Conversations as text. `assistant_only_loss`: observations are not learned."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

rows = load_dataset("messages", split="train")
args = SFTConfig(
    "out-messages",
    assistant_only_loss=True,
    max_length=None,
    max_steps=2,
    report_to="none",
    use_cpu=True,
    bf16=False,
)
SFTTrainer("my-model", args=args, train_dataset=rows).train()
