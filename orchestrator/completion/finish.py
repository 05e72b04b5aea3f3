"""Translates the finish reasons of many services into the few that the product knows.

A word that is not in the table, an empty one and none at all are judged by what came with them: an answer that has
as many tokens as were asked for was cut off, any other answer with text or ids ended by itself. An answer with
nothing in it is asked for again. No word alone costs a rollout.
"""

import logging
import re
from collections.abc import Mapping
from typing import Literal

from orchestrator.completion.base import Finish
from orchestrator.completion.retry import Aborted, Retryable

log = logging.getLogger(__name__)

End = Literal["stop", "length", "content_filter", "aborted", "broken_off", "out_of_time"]

# Written in small letters with `_`. Of OpenAI, Azure, OpenRouter, Together, Mistral, DeepSeek, xAI, vLLM, SGLang,
# LMDeploy, TensorRT-LLM, Ollama and LM Studio; Anthropic and Bedrock (`end_turn`); Gemini (`MAX_TOKENS`); Cohere
# (`COMPLETE`); TGI (`eos_token`); watsonx, AI21, Aleph Alpha, Titan, Zhipu and llama.cpp.
_WORDS: Mapping[End, str] = {
    "stop": """
        stop stopped eos eos_token eos_found stopped_eos end_turn end_of_turn pause_turn message_stop
        stop_sequence stop_string stop_string_found stop_word stop_words stop_token stop_id stop_criteria_met
        stopped_word word end end_id eot end_of_text endoftext end_of_sequence complete completed finish finished
        done normal success tool_calls tool_call tool_use tools function function_call function_calls
        eos_token_id eos_id stop_token_id
    """,
    "length": """
        length limit max_tokens max_token max_length max_len max_new_tokens max_output_tokens
        max_completion_tokens max_predicted_tokens_reached maximum_tokens maximum_length model_length max_context
        max_output max_tokens_reached max_length_reached length_limit length_exceeded overflow context_overflow
        token_limit stopped_limit error_limit context_length context_length_reached context_length_exceeded
        context_window_exceeded model_context_window_exceeded truncated
    """,
    "content_filter": """
        content_filter content_filtered safety recitation language blocklist prohibited_content spii image_safety
        policy_violation content_policy content_policy_violation safety_violation blocked_by_policy guardrails
        refusal guardrail_intervened guardrail sensitive moderation flagged blocked error_toxic
        malformed_function_call malformed_tool_use malformed_model_output malformed_response
        unexpected_tool_call too_many_tool_calls
    """,
    "aborted": "abort aborted",  # by the server, as for new weights; what was sampled before stands
    "broken_off": """
        cancelled canceled user_cancel user_stopped error failed server_error network_error
        internal_error internal_server_error system_error interrupted preempted unavailable service_unavailable
        overloaded engine_overloaded disconnected
        insufficient_system_resource model_unloaded load unload
    """,
    # As a long text may be.
    "out_of_time": "timeout timed_out time_out deadline_exceeded time_limit max_time not_finished",
}
_END_OF: Mapping[str, End] = {word: end for end, words in _WORDS.items() for word in words.split()}
_NO_LETTER = re.compile(r"[^a-z0-9]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_PREFIX = re.compile(
    r"^(finish_reason|stop_reason|reason)_"
)  # of enumerations: FINISH_REASON_STOP, REASON_MAX_LEN


def end_of(reason: object) -> End | None:
    """What the word says; None: nothing that is known."""
    if isinstance(reason, Mapping):  # SGLang's own endpoint tells more beside the word
        reason = reason.get("type")
    if not isinstance(reason, str):
        return None
    if (known := _END_OF.get(reason)) is not None:  # nearly always
        return known
    word = _NO_LETTER.sub("_", _HUMP.sub("_", reason[:100]).lower()).strip("_")
    return _END_OF.get(word) or _END_OF.get(_PREFIX.sub("", word))


class FinishReasons:
    """The finish reasons of one endpoint. `who`: the endpoint, for people."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._told: set[str] = set()

    def end(self, reason: object, *, there: bool, full: bool) -> Finish:
        """Why a sample ended. `there`: it has text, calls or ids. `full`: it has as many tokens as were asked for.

        Raises Aborted where the server aborted it, Retryable where nothing came and no known word says why, or the
        server broke it off before.
        """
        end = end_of(reason)
        if end == "aborted":
            raise Aborted("the server aborted it", sampled=True)
        word = f"finish reason {str(reason)[:40]!r}"
        if end in ("broken_off", "out_of_time") and not there:
            raise Retryable(f"an answer that the server broke off ({word})")
        if end is not None:
            return end
        if not there:
            raise Retryable(f"an answer with nothing in it ({word})")
        judged: Literal["stop", "length"] = "length" if full else "stop"
        if word not in self._told and len(self._told) < 16:
            self._told.add(word)
            log.warning(
                "%s ends answers with the %s, which is not known here: taken for %r where an answer has as many "
                "tokens as were asked for, else for 'stop'",
                self._who, word, "length",
            )  # fmt: skip
        return judged
