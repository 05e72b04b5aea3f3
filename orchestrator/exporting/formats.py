"""The formats: which columns there are, and what one rollout or pair is in them. Pure.

Columns are named as their readers want them: TRL's SFTTrainer takes `input_ids` and `labels`, its DPOTrainer
`prompt`, `chosen` and `rejected` as messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from orchestrator.exporting.choice import Pair
from orchestrator.run.groups import MASKED
from orchestrator.run.rows import Row
from orchestrator.types import Message

TEXT, NUMBER, WHOLE, YES = "string", "float64", "int64", "bool"
IDS, REALS, TALK = "list of int64", "list of float64", "list of messages"
_FACTS = {"rollout_id": TEXT, "task_id": TEXT, "group": WHOLE, "index": WHOLE, "score": NUMBER, "outcome": TEXT}
_SIDE = {"segment": WHOLE, "main": YES, "weight": NUMBER}
_POLICY = {"policy_version": TEXT, **_SIDE}
_LINE = {"prompt_ids": IDS, "completion_ids": IDS, "env_mask": IDS, "logprobs": REALS, "advantages": REALS}
_ADVANTAGES = (
    "`advantages`, one for each id of the completion, are those of groups with branches, and null in others. "
)
_LINES = (
    "A rollout may have several rows, one for each of its lines, all with its score; one of them is `main`, and "
    "their `weight`s sum to 1."
)
_PAIR = {"rollout_id": TEXT, "score": NUMBER, "outcome": TEXT, "ids": IDS, "mask": IDS}


@dataclass(frozen=True, slots=True)
class Format:
    """`columns`: name → type. `as_text`: the format for rollouts without the ids that were sampled; empty: this
    one. `best`, `solved`, `margin`: of `Choice`, unless that is said. `parquet`: or JSON lines."""

    columns: Mapping[str, str]
    about: str
    as_text: str = ""
    best: int | None = None
    solved: bool = False
    margin: float | None = None
    pairs: bool = False
    parquet: bool = False

    @property
    def path(self) -> str:
        """Where in the folder the data are."""
        return "data/train-00000-of-00001.parquet" if self.parquet else "train.jsonl"


FORMATS: Mapping[str, Format] = {
    "sft": Format(
        {"input_ids": IDS, "labels": IDS, **_FACTS, **_SIDE},
        "`input_ids` are the ids that were sent and sampled; `labels` are the same where the model sampled, -100 "
        "elsewhere (prompt, observations). TRL's SFTTrainer takes them as they are; set its `max_length`. "
        + _LINES,
        as_text="messages",
        best=1,
        solved=True,
    ),
    "dpo": Format(
        {
            "prompt": TALK,
            "chosen": TALK,
            "rejected": TALK,
            "tools": TEXT,
            "task_id": TEXT,
            "group": WHOLE,
            "prompt_ids": IDS,
            **{f"{side}_{name}": kind for side in ("chosen", "rejected") for name, kind in _PAIR.items()},
        },
        "`prompt`, `chosen` and `rejected` are messages, as TRL's DPOTrainer takes them: it makes ids of them "
        "with its tokenizer's template, and counts observations in the answers as answers. For trainers that take "
        "ids, those that were sent and sampled are in `prompt_ids`, `chosen_ids` and `rejected_ids` (empty if the "
        "endpoint gave none), and the masks are 1 where the model sampled.",
        solved=True,
        margin=0.5,
        pairs=True,
    ),
    "trl": Format(
        {**_LINE, **_FACTS, **_POLICY},
        "`env_mask` is 1 where the model sampled. `logprobs` are natural logs of the raw distribution, null where "
        "masked, null as a whole if the endpoint gave none. Rollouts of a `group` are compared with each other. "
        + _ADVANTAGES
        + _LINES,
        as_text="hf",
    ),
    "hf": Format(
        {**_LINE, "messages": TALK, "tools": TEXT, **_FACTS, **_POLICY},
        "`env_mask` is 1 where the model sampled. `logprobs` are natural logs of the raw distribution, null where "
        "masked, null as a whole if the endpoint gave none; `messages` are the same conversation as text. Ids are "
        "empty if the endpoint gave none. " + _ADVANTAGES + _LINES,
        parquet=True,
    ),
    "messages": Format(
        {"messages": TALK, "tools": TEXT, **_FACTS, **_SIDE},
        "`messages` are the conversation with what was sampled in its assistant messages; an agent's own program "
        "may have put others there. Trainers make ids of them with their tokenizer's template, which need not be "
        "those that were sampled; `sft` has those. Set `assistant_only_loss`, or they learn the observations too. "
        + _LINES,
        best=1,
        solved=True,
    ),
}


def line(columns: Mapping[str, str], entry: Row | Pair) -> dict[str, Any]:
    """One line: the entry's columns."""
    values = _pair_values(entry) if isinstance(entry, Pair) else _row_values(entry)
    return {name: values[name] for name in columns}


def _row_values(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(row, name) for name in (*_LINE, *_FACTS, *_POLICY)}
    trained = (i if m else MASKED for i, m in zip(row.completion_ids, row.env_mask, strict=True))
    return {
        **values,
        # Ids made from text are no sampled ones.
        **(
            {} if row.token_source == "sampled" else {name: None if _LINE[name] == REALS else () for name in _LINE}
        ),
        "input_ids": [*row.prompt_ids, *row.completion_ids],
        "labels": [*[MASKED] * len(row.prompt_ids), *trained],
        "messages": _talk(row.messages),
        "tools": _tools(row),
    }


def _pair_values(pair: Pair) -> dict[str, Any]:
    values: dict[str, Any] = {
        "prompt": _talk(pair.prompt),
        "tools": _tools(pair.chosen),
        "task_id": pair.chosen.task_id,
        "group": pair.chosen.group,
    }
    sides = {"chosen": pair.chosen, "rejected": pair.rejected}
    same_ids = pair.chosen.prompt_ids == pair.rejected.prompt_ids
    exact = same_ids and all(row.token_source == "sampled" for row in sides.values())
    values["prompt_ids"] = pair.chosen.prompt_ids if exact else ()
    for side, row in sides.items():
        values[side] = _talk(row.messages[len(pair.prompt) :])
        values[f"{side}_rollout_id"], values[f"{side}_score"] = row.rollout_id, row.score
        values[f"{side}_outcome"] = row.outcome
        values[f"{side}_ids"] = row.completion_ids if exact else ()
        values[f"{side}_mask"] = row.env_mask if exact else ()
    return values


def _talk(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _tools(row: Row) -> str | None:
    """As JSON text, as TRL reads it too: a column has one type, and the schemas of tools differ."""
    return orjson.dumps(row.tools).decode() if row.tools else None
