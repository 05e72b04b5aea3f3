"""The two losses. T is the trained tokens of some rollouts, one rollout after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CLIP = 0.2


@dataclass(frozen=True)
class Loss:
    """A loss to minimise, and what is worth a look. `clipped`: the share of tokens whose gradient was cut off."""

    value: Tensor
    clipped: float


def grpo(new_T: Tensor, sampled_T: Tensor, advantages_T: Tensor, tokens: int, clip: float = CLIP) -> Loss:
    """The clipped policy gradient, over `tokens`: all that are trained in the step. So long rollouts weigh no
    less, and a step may be made of several pieces.

    new_T: log-probs under the policy in training. sampled_T: under the policy that sampled, as recorded. The ratio
    of the two corrects for a policy older than this one, and for the sampler's arithmetic.
    """
    ratio_T = torch.exp(new_T - sampled_T)
    bounded_T = ratio_T.clamp(1 - clip, 1 + clip)
    gain_T = torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T)
    cut_T = (ratio_T * advantages_T) > (bounded_T * advantages_T)
    return Loss(-gain_T.sum() / tokens, cut_T.float().mean().item())


def imitation(new_T: Tensor, tokens: int) -> Loss:
    """Expert iteration: rollouts that were right become likelier. The others are not in the batch."""
    return Loss(-new_T.sum() / tokens, 0.0)
