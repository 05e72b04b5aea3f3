"""The turns of one rollout: prepares prompts, and records completions in their segments."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.completion.base import Tokenizer, counted, encoded
from orchestrator.completion.line import Prompt, TokenLine
from orchestrator.proxy.budgets import Budgets
from orchestrator.proxy.said import Asked
from orchestrator.types import Completion, Message, RolloutPlan, Turn, shared

_MESSAGE_OVERHEAD = 8  # tokens a chat template puts around a message, roughly; for chat endpoints only


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt, ready to be sampled from. `line`: the prompt as ids; None: the endpoint takes text."""

    line: Prompt | None
    tokens: int  # length of the prompt; 0: unknown


class Turns:
    """The turns so far, in `all`; each recorded completion adds one."""

    def __init__(
        self, plan: RolloutPlan, budgets: Budgets, tokenizer: Tokenizer | None, *, takes_ids: bool
    ) -> None:
        self.all: list[Turn] = []
        self._limit = plan.limits.max_token_length
        self._budgets = budgets
        self._tokenizer = tokenizer
        self._line = TokenLine(tokenizer, plan.agent.closing_tag) if tokenizer and takes_ids else None
        self._conversation: tuple[Message, ...] = ()
        self._talks: dict[int, tuple[Message, ...]] = {}  # last one of each segment, for text endpoints
        self._counted = 0  # tokens of the last prompt, if the endpoint takes text

    async def prepared(self, messages: tuple[Message, ...]) -> Prepared:
        """The prompt of a conversation. Raises Over for too much text, RecordError."""
        self._budgets.text(sum(len(m.content) for m in messages[shared(self._conversation, messages) :]))
        if self._line is None:
            return Prepared(None, await self._length(messages))
        assert self._tokenizer is not None
        following = self._line.following(messages)
        text = following.added
        ids = await encoded(self._tokenizer, text.text, self._limit, text.plain)
        if ids is None:
            raise self._budgets.too_long(len(text.text))
        prompt = following.prompt(ids)
        return Prepared(prompt, len(prompt.ids))

    async def _length(self, messages: tuple[Message, ...]) -> int:
        """Tokens of a conversation that is sent as text. Only its new messages are counted. 0: unknown."""
        if self._tokenizer is None:
            return 0
        kept = shared(self._conversation, messages)
        if kept < len(self._conversation):
            self._counted = kept = 0
        new = [message.content for message in messages[kept:]]
        if (count := await counted(self._tokenizer, new, self._limit)) is None:
            raise self._budgets.too_long(sum(map(len, new)))
        return self._counted + count + len(new) * _MESSAGE_OVERHEAD

    def record(
        self, asked: Asked, prepared: Prepared, started_s: float, ended_s: float, completion: Completion
    ) -> None:
        """Records one completion. Times in seconds since the start of the rollout."""
        messages, prompt = asked.messages, prepared.line
        kept = shared(self._conversation, messages)
        self._counted = prepared.tokens
        if self._line is not None and prompt is not None:
            self._line.append(prompt, messages, completion)
        self.all.append(
            Turn(
                sequence=asked.sequence,
                kind=asked.kind,
                kept=kept,
                messages=messages[kept:],
                segment=prompt.segment if prompt else self._text_segment(messages),
                prompt_ids=prompt.added if prompt else None,
                closing=prompt.closing if prompt else "",
                completion=completion,
                started_s=started_s,
                ended_s=ended_s,
                agent=asked.agent,
            )
        )
        self._conversation = messages

    def _text_segment(self, messages: tuple[Message, ...]) -> int:
        """The latest segment whose last conversation these messages continue; else a new one."""
        continued = (
            segment
            for segment, talk in reversed(self._talks.items())
            if len(messages) > len(talk) and messages[: len(talk)] == talk
        )
        segment = next(continued, len(self._talks))
        self._talks[segment] = messages
        return segment
