"""Attention over packed sequences, as the GPU kernel that TRL fetches from the hub has it, in plain torch."""

from __future__ import annotations

from typing import Any

import torch


class FlashAttention:
    """The one function that TRL calls of it. `calls` counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def flash_attn_varlen_func(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        longest_q: int,
        longest_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        **_: Any,
    ) -> torch.Tensor:
        """Each query sees the keys of its own sequence up to its place; both end at the same place."""
        assert causal
        assert window_size == (-1, -1)
        self.calls += 1
        repeat = query.shape[1] // key.shape[1]
        parts = []
        bounds = zip(
            starts_q.tolist(), starts_q.tolist()[1:], starts_k.tolist(), starts_k.tolist()[1:], strict=False
        )
        for q0, q1, k0, k1 in bounds:
            q = query[q0:q1].transpose(0, 1)
            k, v = (x[k0:k1].transpose(0, 1).repeat_interleave(repeat, 0) for x in (key, value))
            places = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
            seen = places >= torch.arange(k1 - k0)[None]
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)
