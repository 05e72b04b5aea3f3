"""A server of one of the scripted server's dialects over a real model: it samples from it, and its log-probs are
the model's own.

The first tokens of a completion are sampled; then the model is led back to what the script says, so that an agent
has code to run and stop strings and end tokens are met. All log-probs are raw, whatever the temperature.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import torch
import transformers

from tests.fakes.inference.dialects.base import Answer, Ask
from tests.fakes.inference.log import Served
from tests.fakes.inference.script import Call, Reply, Script
from tests.fakes.inference.server import ScriptedServer

FREE_TOKENS = 12


class ModelServer(ScriptedServer):
    """`policy` is the model, `script` what it is led to say."""

    def __init__(self, dialect: str, policy: transformers.PreTrainedModel, script: Script, **more: Any) -> None:
        super().__init__(dialect, script, **more)
        self._policy = policy

    def _policy_of(self, ask: Ask) -> transformers.PreTrainedModel:
        return self._policy

    def _sample(self, ask: Ask, call: Call, reply: Reply, served: Served) -> Answer:
        prompt, model, policy = ask.prompt_ids, self.model, self._policy_of(ask)
        asked = ask.request[-1] if isinstance(ask.request, tuple) else ask.request  # SGLang's are apart
        temperature, top_p = asked.temperature, asked.top_p
        draw = torch.Generator().manual_seed(zlib.crc32(array("I", prompt).tobytes()) ^ (ask.seed or 0))
        most = max(1, min(call.max_tokens, model.context_length - len(prompt)))
        led: list[int] = []
        ids: list[int] = []
        logprobs: list[float] = []
        stopped_by: str | int | None = None
        with torch.inference_mode():
            cache = policy(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
            while len(ids) < most and stopped_by is None:
                fed = torch.tensor([[(prompt + ids)[-1]]])
                answer = policy(fed, past_key_values=cache, use_cache=True)
                cache, row = answer.past_key_values, answer.logits[0, -1]
                if len(ids) < FREE_TOKENS:
                    token = _drawn(row, temperature, top_p, draw)
                else:
                    led = led or [*model.encode(reply.text), model.end_id]
                    token = led.pop(0)
                ids.append(token)
                logprobs.append(row.log_softmax(-1)[token].item())
                text = model.decode(ids)
                found = [stop for stop in ask.stop if stop in text]
                stopped_by = found[0] if found else token if token in model.ends else None
        served.sampled_ids, served.sampled_text = ids, model.decode(ids)
        served.logprobs = logprobs
        visible = served.sampled_text
        if stopped_by is not None:
            visible = visible.split(stopped_by if isinstance(stopped_by, str) else model.decode([stopped_by]))[0]
        return Answer(
            ids=ids,
            logprobs=logprobs,
            finish="length" if stopped_by is None else "stop",
            stopped_by=stopped_by,
            visible=visible,
            prompt_ids=prompt,
            prompt_tokens=len(prompt),
            completion_tokens=len(ids),
            cached=0,
            number=len(self.log.all),
        )


def _drawn(row: torch.Tensor, temperature: float, top_p: float, draw: torch.Generator) -> int:
    """One id by temperature and top_p."""
    chances, ids = (row / temperature).softmax(-1).sort(descending=True)
    kept = chances.cumsum(-1) - chances < top_p
    return int(ids[torch.multinomial(chances * kept, 1, generator=draw)])
