"""Settings of how completions are sampled and how their tokens are known."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from orchestrator.errors import ConfigError
from orchestrator.settings.json_kinds import Options
from orchestrator.settings.kinds import MAX_TOKENS, Choice, Flag, Integer, Number, Only, Text
from orchestrator.settings.row import ATROPOS, AUTO, PLAYS, RUNS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.types import CallFormat, Limits, Sampling


@dataclass(frozen=True, kw_only=True, repr=False)
class ReasoningSettings(Settings, group=ATROPOS, resume=Resume.FREE_DATA, commands=("serve",)):
    """How much reasoning a hosted service is asked for: Atropos' names, which every command takes."""

    thinking_mode: bool = row(
        False, Flag(), "ask a hosted service for reasoning; for your own model see chat_template_kwargs"
    )
    reasoning_effort: str | None = row(
        None,
        Choice(("none", "minimal", "low", "medium", "high", "xhigh")),
        "how much reasoning to ask a hosted service for",
        unset="null",
    )
    max_reasoning_tokens: int | None = row(
        None, Integer(1024, 32_000), "most tokens of reasoning to ask a hosted service for"
    )
    custom_thinking_prompt: str | None = row(
        None,
        Only(Text(), None, "what an agent is told besides is env.instructions"),
        "a prompt of Atropos' that Atropos does not send either",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reasoning_effort is not None and self.max_reasoning_tokens is not None:
            raise ConfigError("env.max_reasoning_tokens: services take it or env.reasoning_effort; leave one out")


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingSettings(
    Settings, group="Sampling and tokens", resume=Resume.DATA, commands=(*RUNS, "branch"), from_run=("branch",)
):
    """How completions are sampled, and where their token ids come from."""

    temperature: float = row(
        1.0,
        Number(at_least=0),
        "of sampling; 0: always the likeliest token",
        to=(Sampling, "temperature"),
        from_run=("demo",),
    )
    top_p: float = row(
        1.0, Number(above=0, at_most=1), "nucleus sampling; 1: off", to=(Sampling, "top_p"), from_run=("demo",)
    )
    max_completion_tokens: int = row(
        1024, Integer(1, MAX_TOKENS), "tokens of one completion", from_run=("demo",), first_run=RUNS
    )
    max_token_length: int = row(
        16_384,
        Integer(16, MAX_TOKENS),
        "tokens of a whole rollout's line, prompts included",
        to=(Limits, "max_token_length"),
        from_run=("demo",),
    )
    seed: int | None = row(
        None,
        Integer(0, 2**63 - 1),
        "each rollout's own seed is a hash of it, the task and the rollout's place",
        unset="none: drawn at the start and kept in run.json",
        from_run=("demo", *PLAYS, "rescore"),
    )
    tokenizer_name: str | None = row(
        None,
        Text("a folder, a hub id or none (`process`, `evaluate` without token ids)", "NAME"),
        "the tokenizer; auto: openai.model_name where that loads, else a default",
        unset=AUTO,
        commands=(*RUNS, "doctor", *PLAYS, "rescore", "export"),
        from_run=(*PLAYS, "export", "rescore"),
        first_run=RUNS,
    )
    token_source: Literal["auto", "exact", "retokenize"] = row(
        "auto",
        Choice(("auto", "exact", "retokenize")),
        "where token ids come from; auto: exact ones where the endpoint can; exact: refuse otherwise",
        commands=(*RUNS, "doctor", "branch"),
        from_run=PLAYS,
    )
    chat_template_kwargs: Mapping[str, Any] | None = row(
        None,
        Options(),
        'arguments of the chat template besides the conversation, like {"enable_thinking": false}; sent to '
        "endpoints that render it themselves",
        from_run=(*PLAYS, "export", "rescore"),
    )
    tool_call_format: Literal["auto", "json", "fenced", CallFormat] = row(
        "auto",
        Choice(("auto", "json", "fenced", *get_args(CallFormat))),
        "how the model writes calls of tools; auto: as its chat template shows; json (tool_calling) and fenced "
        "(shell): in its text, as JSON or in bash blocks, which is auto where the template shows no format",
        from_run=("demo",),
    )
    use_chat_completion: bool = row(
        True,
        Only(Flag(), True, "prompts go out as token ids or as chat, never as plain text"),
        "chat where the endpoint takes no token ids",
    )

    @property
    def named_call_format(self) -> CallFormat | None:
        """The format of the model's own calls, if it is named."""
        match self.tool_call_format:
            case "auto" | "json" | "fenced":
                return None
            case named:
                return named
