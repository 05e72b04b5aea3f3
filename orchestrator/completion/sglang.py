"""SGLang: `/generate` with `input_ids`.

`meta_info.output_token_logprobs` is one `[log-prob, id, text]` per sampled id, end token and stop
string included. Log-probs are of the distribution at the sampling temperature unless the server runs
with SGLANG_RETURN_ORIGINAL_LOGPROB=1, so a note at the start tells of another temperature than 1.

Of a sample that is kept to a schema they are of what the schema left over: ModelRunner._preprocess_logits masks
before the sampler takes log-probs, the original ones too. Those of a prompt (`input_token_logprobs`) are the
model's; the first place asked for has none.
"""

import json
from collections.abc import Sequence
from typing import Any

from orchestrator.completion.base import CompletionRequest
from orchestrator.completion.ids import UNFILTERED, Dialect
from orchestrator.completion.sampled import RawSample
from orchestrator.completion.versions import version_text


class SglangDialect(Dialect):
    """SGLang's own endpoint."""

    name = "sglang"
    path = "/generate"
    guides = True
    masks = True

    def __init__(self, *, seeded: bool = True) -> None:
        # Servers before 0.5.2 do not know sampling_seed and refuse a request that has it.
        self.seeded = seeded

    def body(self, request: CompletionRequest, model: str) -> dict[str, Any]:
        sampling = request.sampling
        parameters: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **UNFILTERED,
            "stop": list(request.stop),
            "min_new_tokens": 0,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            **({} if (schema := request.wishes.schema) is None else {"json_schema": json.dumps(schema)}),
        }
        if self.seeded:
            parameters["sampling_seed"] = sampling.seed
        return {
            "input_ids": request.prompt_ids or (),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "stream": False,
        }

    def scoring(self, request: CompletionRequest, model: str, count: int) -> dict[str, Any]:
        begin = len(request.prompt_ids or ()) - count - 1
        return {**self.body(request, model), "logprob_start_len": begin}

    def scores(self, answer: Any, ids: Sequence[int]) -> tuple[list[Any], str | None]:
        meta = (answer[0] if isinstance(answer, list) else answer)["meta_info"]
        pairs = meta["input_token_logprobs"][-len(ids) :]
        if [pair[1] for pair in pairs] != list(ids):
            raise ValueError("log-probs of other ids")
        return [pair[0] for pair in pairs], version_text(meta.get("weight_version"))

    def read(self, answer: Any) -> RawSample:
        answer = answer[0] if isinstance(answer, list) else answer
        meta = answer["meta_info"]
        pairs = meta["output_token_logprobs"]
        reason = meta["finish_reason"]
        return RawSample(
            ids=[pair[1] for pair in pairs],
            logprobs=[pair[0] for pair in pairs],
            finish_reason=reason["type"] if isinstance(reason, dict) else reason,
            prompt_tokens=meta["prompt_tokens"],
            policy_version=version_text(meta.get("weight_version")),
            text=answer.get("text"),
            sampled_tokens=meta["completion_tokens"],
            ended=isinstance(reason, dict) and type(reason.get("matched")) is int,
            weight_versions=meta.get("weight_versions"),
        )
