"""Settings of one inference endpoint: `openai.*`."""

import json
from dataclasses import dataclass
from typing import get_args

from orchestrator.rules.redact import Secret
from orchestrator.rules.text import path_of
from orchestrator.settings.json_kinds import Headers
from orchestrator.settings.kinds import Choice, Flag, Integer, Key, Number, Only, Text, is_url, seconds
from orchestrator.settings.row import ATROPOS, ENDPOINT, EVALUATION, RUNS, Resume, row
from orchestrator.settings.section import Settings
from orchestrator.types import ServerType


def _is_endpoint(text: str) -> bool:
    if text.startswith("replay:"):
        return text != "replay:" and bool(path_of(text.removeprefix("replay:")))
    return not text or is_url(text)


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenAISettings(
    Settings, section="openai", group=ENDPOINT, resume=Resume.FREE_DATA, commands=(*RUNS, "doctor", "branch")
):
    """One inference endpoint: `openai.*`. All but `headers`, `startup_timeout`, `weight` and the prices are
    Atropos' names (APIServerConfig)."""

    base_url: str = row(
        "",
        Text("a URL with http:// or https://, or replay:RUN_DIR", "URL", _is_endpoint),
        "where completions come from, like http://localhost:9001/v1",
        resume=Resume.FREE_CONFIRM,
        first_run=RUNS,
    )
    model_name: str = row(
        "default", Text("a name", "NAME"), "the model to ask for", resume=Resume.DATA, first_run=RUNS
    )
    api_key: Secret = row(
        Secret(),
        Key(),
        "or --api-key; x or nothing: the environment's OPENAI_API_KEY, which other users cannot see",
        first_run=RUNS,
    )
    headers: Secret = row(
        Secret(), Headers(), 'sent with every request, like {"api-key": "KEY"}; a secret, as the key is'
    )
    server_type: ServerType = row(
        "auto", Choice(get_args(ServerType)), "its protocol; auto: found out by asking it"
    )
    timeout: float = row(1200.0, seconds(above=0), "for one completion")
    startup_timeout: float = row(
        300.0,
        seconds(at_least=0),
        "how long an endpoint that is still loading is waited for at the start; 0: not at all",
    )
    weight: float = row(1.0, Number(above=0), "its share of the rollouts, if a --config names several servers")
    num_requests_for_eval: int = row(64, Integer(1), "evaluation requests at a time")
    prompt_price: float | None = row(
        None,
        Number(at_least=0),
        "money per million prompt tokens, to tell the cost",
        commands=RUNS,
        group=EVALUATION,
    )
    completion_price: float | None = row(
        None,
        Number(at_least=0),
        "money per million sampled tokens, to tell the cost",
        commands=RUNS,
        group=EVALUATION,
    )
    num_max_requests_at_once: int = row(512, Integer(1), "requests at a time", commands=("serve",), group=ATROPOS)
    tokenizer_name: str = row(
        "none", Text(), "none: model_name; see env.tokenizer_name", commands=("serve",), group=ATROPOS
    )
    rolling_buffer_length: int = row(
        1000,
        Integer(1, 1_000_000),
        "latest completions that count for request times in Weights & Biases",
        commands=("serve",),
        group=ATROPOS,
    )
    n_kwarg_is_ignored: bool = row(
        False, Flag(), "the endpoint is not told `n`, which is 1", commands=("serve",), group=ATROPOS
    )
    health_check: bool = row(
        False,
        Only(Flag(), False, "an endpoint is asked when rollouts fail at it, not every second"),
        "ask all the time whether the endpoint is alive",
        commands=("serve",),
        group=ATROPOS,
    )

    def key(self) -> str:
        """The key to send; empty: none."""
        return self.api_key.reveal()

    def sent_headers(self) -> dict[str, str]:
        """The headers to send besides."""
        headers: dict[str, str] = json.loads(self.headers.reveal() or "{}")
        return headers

    def hidden(self) -> tuple[Secret, ...]:
        words = [word for value in self.sent_headers().values() for word in (value, *value.split())]
        return (*super().hidden(), *(Secret(word) for word in words if len(word) >= 6))  # others are in any text
