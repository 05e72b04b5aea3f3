"""Every scored rollout: KTO learns from right and wrong ones without pairs."""

from datasets import load_dataset
from trl import KTOConfig, KTOTrainer


def judged(row):
    """The messages before the first answer, those from there on, and whether they are right."""
    first = next(n for n, message in enumerate(row["messages"]) if message["role"] == "assistant")
    return {"prompt": row["messages"][:first], "completion": row["messages"][first:], "label": row["score"] == 1}


rows = load_dataset("hf", split="train")
rows = rows.map(judged, remove_columns=rows.column_names)
args = KTOConfig("out-kto", max_length=None, max_steps=2, report_to="none", use_cpu=True, bf16=False)
KTOTrainer("my-model", args=args, train_dataset=rows).train()
