"""The model that learns: the weights of a GGUF file, fixed, and a LoRA adapter on some of its matrices."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import gguf
import peft
import torch
import transformers
from torch import Tensor

from examples.trainer import MASKED, Line
from orchestrator.local_model.gguf import read_metadata

RANK, ALPHA = 8, 16
# The trained matrices: their names in transformers, and in a GGUF file.
MATRICES = {"q_proj": "attn_q", "v_proj": "attn_v", "o_proj": "attn_output"}
HIDDEN = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Pack:
    """Rollouts of one task behind their common beginning, as one sequence of S tokens. A token sees the beginning
    and what comes before it in its own rollout. `places_T` are the trained tokens, `rollouts_T` whose they are."""

    tokens_S: Tensor
    positions_S: Tensor
    sees_SS: Tensor  # 0 where a token (row) sees another one (column), else a number that hides it
    places_T: Tensor
    rollouts_T: Tensor
    sampled_T: Tensor  # the log-probs that were recorded


def pack(lines: Sequence[Line]) -> Pack:
    """A group's rollouts have the same prompt, many times longer than an answer. So it is computed once."""
    columns = zip(*(line.tokens_T for line in lines), strict=False)
    same = list(takewhile(lambda column: len(set(column)) == 1, columns))
    trained = [[at for at, label in enumerate(line.labels_T) if label != MASKED] for line in lines]
    # The token before a trained one belongs to its rollout: it is where the prediction is made.
    common = min([len(same), *(places[0] - 1 for places in trained if places)])
    tokens, positions = list(lines[0].tokens_T[:common]), list(range(common))
    owner = [-1] * common
    places_T, rollouts_T, sampled_T = [], [], []
    for number, (line, places) in enumerate(zip(lines, trained, strict=True)):
        shift = len(tokens) - common
        places_T += [place + shift for place in places]
        rollouts_T += [number] * len(places)
        # NaN where none are on record: a loss over them is NaN too, and not wrong in silence.
        sampled_T += [line.logprobs_T[place] for place in places] if line.logprobs_T else [math.nan] * len(places)
        tokens += line.tokens_T[common:]
        positions += range(common, len(line.tokens_T))
        owner += [number] * (len(line.tokens_T) - common)
    owner_S = torch.tensor(owner)
    visible_SS = ((owner_S[None] == owner_S[:, None]) | (owner_S[None] == -1)).tril()
    sees_SS = torch.zeros(visible_SS.shape).masked_fill(~visible_SS, HIDDEN)
    return Pack(
        *(torch.tensor(tokens), torch.tensor(positions), sees_SS),
        *(torch.tensor(places_T), torch.tensor(rollouts_T), torch.tensor(sampled_T)),
    )


class Policy:
    """`version` counts training steps; 0 is the model as it came, with an adapter that changes nothing."""

    def __init__(self, weights: Path, seed: int) -> None:
        torch.manual_seed(seed)
        with _quiet():
            base = transformers.AutoModelForCausalLM.from_pretrained(
                str(weights.parent), gguf_file=weights.name, dtype=torch.float32, local_files_only=True
            )
        self._architecture = read_metadata(weights)["general.architecture"]
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(MATRICES), lora_dropout=0.0)
        self.model: Any = peft.get_peft_model(base, config).eval()  # eval: nothing in it is random
        self.version = 0

    def logprobs(self, pack: Pack) -> Tensor:
        """Of the trained tokens, T of them, at temperature 1 as the record has them."""
        logits_TV = self.model(
            input_ids=pack.tokens_S[None],
            position_ids=pack.positions_S[None],
            attention_mask=pack.sees_SS[None, None],
            logits_to_keep=pack.places_T - 1,
            use_cache=False,
        ).logits[0]
        rows_TV = torch.log_softmax(logits_TV, -1)
        return rows_TV.gather(-1, pack.tokens_S[pack.places_T][:, None])[:, 0]

    def parameters(self) -> list[Tensor]:
        """What is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def write_adapter(self, path: Path) -> None:
        """As llama.cpp loads it. The file is there whole or not at all."""
        config = self.model.config
        unfinished = path.with_suffix(".part")
        writer = gguf.GGUFWriter(unfinished, self._architecture)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", ALPHA)
        for name, module in self.model.named_modules():
            if (matrix := MATRICES.get(name.rpartition(".")[2])) is not None and hasattr(module, "lora_A"):
                block = name.split(".layers.")[1].split(".")[0]
                a, b = module.lora_A["default"].weight.detach(), module.lora_B["default"].weight.detach()
                if (
                    self._architecture == "llama" and matrix == "attn_q"
                ):  # its GGUF files pair the rows in another way
                    b = b.reshape(config.num_attention_heads, 2, -1, RANK).transpose(1, 2).reshape(b.shape)
                writer.add_tensor(f"blk.{block}.{matrix}.weight.lora_a", a.contiguous().numpy())
                writer.add_tensor(f"blk.{block}.{matrix}.weight.lora_b", b.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(unfinished, path)

    def state(self) -> dict[str, Any]:
        """To go on from later."""
        return {"version": self.version, "adapter": peft.get_peft_model_state_dict(self.model)}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from `state`."""
        self.version = state["version"]
        peft.set_peft_model_state_dict(self.model, state["adapter"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()):
        yield
