"""Log-probs of what vLLM sampled, by a forward pass of our own in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from orchestrator.forward.lines import Place, TrainedLine
from orchestrator.forward.model import Model
from orchestrator.forward.weights import look_at


@dataclass(frozen=True, slots=True)
class Distance:
    """Mean distances in nats. `shifted`: to the token before, which is how far wrong places are.
    `tempered`: to the distribution at the sampling temperature."""

    own: float
    shifted: float
    tempered: float

    def __str__(self) -> str:
        return f"mean |Δ| {self.own:.4f} (at the wrong place {self.shifted:.3f}, tempered {self.tempered:.3f})"


class Reference:
    """One model's weights."""

    def __init__(self, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)  # beside the server's
        self._model = Model.load(look_at(folder))

    def distance(
        self, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], temperature: float = 1.0
    ) -> Distance:
        """How far the log-probs of these ids behind this prompt are from our own."""
        places = range(len(prompt), len(prompt) + len(ids))
        ones, kinds = [1] * len(ids), [Place.REST] * len(ids)
        line = TrainedLine(
            "", [*prompt, *ids], places, logprobs, ones, kinds, [None] * len(ids), temperature or 1.0
        )
        made = self._model.recompute(line)
        return Distance(
            *(
                fmean(abs(theirs - ours) for theirs, ours in zip(logprobs, column, strict=True))
                for column in (made.own_P, made.before_P, made.tempered_P)
            )
        )
