"""Builds chat requests without the parts that an endpoint does not take.

OpenAI's relatives refuse what they do not know, each in its own words. What they refuse is left out, or said in
another way: the product cuts at stop strings itself, and puts a system message before the user's. This module
reads a refusal and says what to send next. Whether that is right is found out with neutral requests (`chat`), so
that no text of a rollout decides what is sent for others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.calls.structured import structured
from orchestrator.completion.base import CompletionRequest, Endpoint
from orchestrator.completion.shape import folded
from orchestrator.errors import ParameterError
from orchestrator.types import Message, Tools, Wishes

# Parameters of servers other than OpenAI's, sent so that none of their defaults applies.
EXTRAS: Mapping[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "repeat_penalty": 1.0,
    "return_token_ids": True,
}
_LIMITS = ("max_tokens", "max_completion_tokens")
USUAL_STOPS = 4  # that services take which take any, as OpenAI's
_PENALTIES = ("presence_penalty", "frequency_penalty")
_SAMPLING = ("temperature", "top_p")
# What a refusal may name, in the order in which it is given up: a refusal may also list what is valid.
_TIERS: tuple[tuple[str, ...], ...] = (
    tuple(EXTRAS),
    ("seed", "logprobs", "n", *_PENALTIES),
    ("stop",),
    _LIMITS,
    _SAMPLING,
)
_SPELLINGS: Mapping[str, str] = {
    "n": r"['\"`]n['\"`]|parameter n|candidate_?count|multiple (choices|candidates|completions)",
    "stop": r"stop|stop[_ ](sequences?|strings?|words?)",
    "logprobs": r"(response_)?log[_ ]?probs?|top_logprobs",
    "presence_penalty": r"presence[_ ]penalty|penalty is not enabled",
    "frequency_penalty": r"frequency[_ ]penalty|penalty is not enabled",
}
_NAMES = {
    name: re.compile(rf"(?<![a-z0-9_])(?:{_SPELLINGS.get(name, name.replace('_', '[_ ]'))})(?![a-z0-9_])")
    for tier in _TIERS
    for name in tier
}
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_FEWER = re.compile(
    r"(?:at most|maximum|max|up to|no more than|limit(?:ed)? (?:of|to)|only)\D{0,30}?(\d{1,2}|one)\b"
)
_TOO_MANY = re.compile(r"too (many|long)|at most|maximum|no more than|up to \d")
_SYSTEM = re.compile(
    r"(system|developer)[ _]?(role|message|prompt|instruction)s?\b.{0,80}\b(not|un\w+)\b"
    r"|\b(not|un\w+|invalid|only)\b.{0,60}\b(system|developer)\b|roles must alternate"
    r"|\b(role|message)\b.{0,20}\bmust (be|use|have)\b.{0,20}\buser\b"
    r"|only.{0,20}\buser\b.{0,20}\bassistant\b.{0,20}\brole"
)
_REASONING = re.compile(r"\breasoning(_effort)?\b")
_TOOLS = re.compile(r"\btools?\b|tool_(choice|calls?)|function[ _]call")
Kind = tuple[str, str]
NO_ROOM = re.compile(
    r"could not finish the message because max_tokens", re.IGNORECASE
)  # it was served, and thought


@dataclass(frozen=True, slots=True)
class RequestForm:
    """What requests of one kind look like. `most_stops` None: the endpoint takes any number of stop strings."""

    left_out: frozenset[str] = frozenset()
    limit: str = _LIMITS[0]
    most_stops: int | None = None
    folds_system: bool = False
    asks_effort: bool = False  # for reasoning, by OpenAI's `reasoning_effort` in the place of `reasoning`

    def beside(self, other: RequestForm) -> RequestForm:
        """What is left if both hold."""
        stops = [one.most_stops for one in (self, other) if one.most_stops is not None]
        limit = next((one.limit for one in (self, other) if one.limit != _LIMITS[0]), _LIMITS[0])
        return RequestForm(
            self.left_out | other.left_out,
            limit,
            min(stops, default=None),
            self.folds_system or other.folds_system,
            self.asks_effort or other.asks_effort,
        )

    def without_extras(self) -> RequestForm:
        return replace(self, left_out=self.left_out | EXTRAS.keys())

    def body(self, request: CompletionRequest, model: str, endpoint: Endpoint) -> dict[str, Any]:
        """The JSON to post."""
        sampling, wishes = request.sampling, request.wishes
        # Of several stop strings the last are kept: a code agent's closing tag is among them.
        stop = (
            request.stop[-self.most_stops :]
            if self.most_stops
            else request.stop
            if self.most_stops is None
            else ()
        )
        body: dict[str, Any] = {
            "model": model,
            self.limit: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": 1 if endpoint.takes_n else None,
            "seed": sampling.seed,
            **dict.fromkeys(_PENALTIES, 0.0),
            "logprobs": True,
            "stop": list(stop) or None,
            **EXTRAS,
        }
        body = {name: value for name, value in body.items() if name not in self.left_out and value is not None}
        messages = folded(request.messages) if self.folds_system else request.messages
        conversation = structured(messages, wishes.tools, request.call_format, for_api=True)
        extras = dict(endpoint.chat_extras)
        if self.asks_effort and (reasoning := extras.pop("reasoning", None)):
            extras["reasoning_effort"] = reasoning.get("effort") or "medium"
        return {**body, **_wished(wishes), **extras, "messages": conversation}

    def after(
        self, words: str, request: CompletionRequest, *, strict: bool, extras: Mapping[str, Any]
    ) -> RequestForm | None:
        """What to send after a refusal in these words; None: they name nothing that can be left out or said in
        another way. `strict`: samples must be of the distribution that was asked for. `extras`: the operator's
        fields. Raises ParameterError."""
        if NO_ROOM.search(words):
            return None
        text = _HUMP.sub("_", words).lower()
        names = self._named(text, request)
        if not names and "reasoning" in extras and _REASONING.search(text):
            return self._asking_effort(extras["reasoning"], words)
        if not names:
            return replace(self, folds_system=True) if self._refuses_system(text, request) else None
        if names == {"stop"}:
            return replace(self, most_stops=self._fewer_stops(text, len(request.stop)))
        if names <= set(_LIMITS):
            return replace(self, limit=_LIMITS[1])
        if names <= set(_SAMPLING):
            names = {_neutral(names, request, words, strict=strict)}
        return replace(self, left_out=self.left_out | names)

    def _asking_effort(self, reasoning: Mapping[str, Any], words: str) -> RequestForm:
        if self.asks_effort or "max_tokens" in reasoning:
            flags = "env.max_reasoning_tokens" if "max_tokens" in reasoning else "env.thinking_mode"
            advice = "set env.reasoning_effort instead" if "max_tokens" in reasoning else "leave it out"
            raise ParameterError(f"{flags}: the endpoint cannot be asked so ({words[:200]}); {advice}")
        return replace(self, asks_effort=True)

    def _named(self, text: str, request: CompletionRequest) -> set[str]:
        """The parameters that are sent and named, of one tier."""
        sent = {name for tier in _TIERS for name in tier} - self.left_out
        if not request.stop or self.most_stops == 0:
            sent.discard("stop")
        if self.limit != _LIMITS[0]:
            sent -= set(_LIMITS)
        param = _param(text)
        for tier in _TIERS:
            names = {name for name in tier if name in sent and _NAMES[name].search(param or text)}
            if names:
                return names
        return set()

    def _refuses_system(self, text: str, request: CompletionRequest) -> bool:
        return self.may_fold(request) and _SYSTEM.search(text) is not None

    def may_fold(self, request: CompletionRequest) -> bool:
        """Whether a system message could be sent as the user's."""
        return not self.folds_system and bool(request.messages) and request.messages[0].role == "system"

    def _fewer_stops(self, text: str, sent: int) -> int:
        sent = sent if self.most_stops is None else min(sent, self.most_stops)
        fewer = _FEWER.search(text)
        most = (1 if fewer[1] == "one" else int(fewer[1])) if fewer else 0
        if 0 < most < sent:
            return most
        if sent > USUAL_STOPS:  # one program's many must not cost the others theirs
            return USUAL_STOPS
        return 1 if sent > 1 and _TOO_MANY.search(text) else 0


def kind_of(wishes: Wishes) -> Kind:
    """(the choice among tools, the form of the answer). Requests of one kind are refused for the same parameters:
    some services take no log-probs beside a form."""
    form = str(wishes.response_format.get("type", "text"))
    choice = "named" if wishes.tool_name else wishes.tool_choice
    return choice if wishes.tools else "", "" if form == "text" else form


def refuses_tools(words: str) -> bool:
    """Whether a refusal names tools."""
    return _TOOLS.search(words.lower()) is not None


def neutral(request: CompletionRequest, most_tokens: int) -> CompletionRequest:
    """A request of the same kind, with the same parameters, without a word of the rollout's."""
    wishes, system = request.wishes, [message for message in request.messages[:1] if message.role == "system"]
    form = wishes.response_format
    if form.get("type") == "json_schema":
        schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": schema}}
    elif kind_of(wishes)[1]:
        form = {"type": "json_object"}
    messages = (
        *(Message("system", "Be brief.") for _ in system),
        Message("user", 'Say hello in JSON: {"a": "hello"}'),
    )
    names = NEUTRAL_TOOL[0]["function"]["name"] if wishes.tool_name else ""
    return replace(
        request,
        messages=messages,
        stop=tuple(f"</{number}>" for number in range(len(request.stop))),
        sampling=replace(request.sampling, max_tokens=min(most_tokens, request.sampling.max_tokens)),
        wishes=replace(wishes, tools=NEUTRAL_TOOL if wishes.tools else (), tool_name=names, response_format=form),
        sequence=0,
    )


NEUTRAL_TOOL: Tools = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
)


def _neutral(names: set[str], request: CompletionRequest, words: str, *, strict: bool) -> str:
    """Which of the sampling parameters is left out: one that has no effect. Raises ParameterError."""
    sampling = request.sampling
    values = {"top_p": sampling.top_p, "temperature": sampling.temperature}
    for name, value in values.items():
        if name in names and (value == 1.0 or not strict):
            return name
    flags = " or ".join(f"--env.{name} 1" for name in values if name in names)
    raise ParameterError(f"the endpoint does not take {' and '.join(sorted(names))} ({words[:200]}); set {flags}")


def _param(text: str) -> str:
    """The parameter that an error object of OpenAI's form names; empty: none that is known."""
    begin = text.find("{")
    try:
        content = json.loads(text[begin:]) if begin >= 0 else None
        param = str(content.get("error", content).get("param") or "") if content else ""
    except (ValueError, AttributeError, RecursionError):
        match = re.search(r'"param"\s*:\s*"([a-z_]+)"', text)
        param = match[1] if match else ""
    return f"'{param}'" if any(pattern.search(f"'{param}'") for pattern in _NAMES.values()) else ""


def _wished(wishes: Wishes) -> dict[str, Any]:
    """What a program asks for, as OpenAI's API has it."""
    fields: dict[str, Any] = {}
    if wishes.tools:
        fields["tools"] = list(wishes.tools)
        names = {"type": "function", "function": {"name": wishes.tool_name}}
        fields["tool_choice"] = names if wishes.tool_name else wishes.tool_choice
    if wishes.response_format:
        fields["response_format"] = wishes.response_format
    return fields
