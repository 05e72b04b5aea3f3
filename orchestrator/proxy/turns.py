"""The turns of one rollout: prepares prompts, and records completions in their segments."""

import asyncio
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from operator import attrgetter

import orjson

from orchestrator.calls.formats import unclosed
from orchestrator.calls.parsed import ParsedText
from orchestrator.completion.base import TOKEN_CHARS, Tokenizer, counted, encoded, ids_of
from orchestrator.completion.base import count as tokens_of
from orchestrator.completion.harmless import completed_by_tools, prints_name
from orchestrator.completion.line import Prompt, Segments, TokenLine
from orchestrator.completion.prompt_text import Opening
from orchestrator.errors import RecordError
from orchestrator.proxy.budgets import Budgets
from orchestrator.proxy.offers import Offers
from orchestrator.proxy.playback import OtherState, Playback
from orchestrator.proxy.requests import AgentRequest, CallMessage, Refusal, RequestRefused
from orchestrator.proxy.talk import Talk
from orchestrator.rules.waits import aside_if
from orchestrator.types import CallFormat, Completion, Message, RolloutPlan, Tools, Turn, shared

_MESSAGE_OVERHEAD = 8  # tokens a chat template puts around a message, roughly; for chat endpoints only


@dataclass(frozen=True, slots=True)
class ReadyPrompt:
    """A prompt, ready to be sampled from. `place`: of its turn, in the order in which requests were begun.
    `messages`: the conversation, without calls as data. `tools`: as they are kept. `segment`: the one that it
    continues or opens. `line`: the prompt as ids; None: the endpoint takes text. `recorded`: the turn that answers
    it; None: it is to be sampled. `unlike`: why it is not the recorded prompt. A program may have had a refusal of
    this one, which is not on record: then it has one again."""

    place: int
    messages: tuple[Message, ...]
    tools: Tools
    segment: int
    line: Prompt | None
    tokens: int  # length of the prompt; 0: unknown
    recorded: Turn | None = None
    unlike: OtherState | None = None


class Turns:
    """The turns so far; each recorded completion adds one.

    Requests of a program may be under way at the same time. Each has a segment to itself until it is released: two
    that continue the same conversation are two segments.
    """

    def __init__(
        self,
        plan: RolloutPlan,
        budgets: Budgets,
        tokenizer: Tokenizer | None,
        *,
        takes_ids: bool,
        team: Tools = (),
        playback: Playback | None = None,
    ) -> None:
        """`team`: the operator's tools of all agents. The template has to show them before anything is sampled.
        `playback`: what is served from a record first."""
        self._turns: dict[int, Turn] = {}  # by place; with the whole conversation
        self._places = count()
        self._busy: dict[int, int] = {}  # segments of the requests under way, by sequence number
        self._limit = plan.limits.max_token_length
        self._budgets = budgets
        self._tokenizer = tokenizer
        self._line = TokenLine(tokenizer, plan.agent.closing_tag) if tokenizer and takes_ids else None
        self._program = plan.agent.kind == "program"
        # An endpoint without ids has tools, whatever the template shows: any format will do for its calls.
        format = plan.agent.call_format or (tokenizer.call_format if tokenizer else None)
        self._talk = Talk(format or (None if takes_ids else "hermes"))
        self._prints_name = lru_cache(256)(partial(prints_name, tokenizer))
        self.names_unused = False  # some messages' names, left out of a prompt
        self._offers = Offers(self._flaw)
        self._team = team
        self._playback = playback
        self._preparing = asyncio.Lock()  # one request after the other: each is compared with the one before
        self._conversation: tuple[Message, ...] = ()  # of the last request
        self._segments = self._line.segments if self._line else Segments()
        if playback is not None and self._line is not None:  # no line of recorded texts goes on
            texts = (turn.segment for turn in playback.prefix.turns if turn.prompt_ids is None)
            self._segments.first = max(texts, default=-1) + 1
        self._counted = 0  # tokens of the last prompt, if the endpoint takes text

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return bool(self._turns)

    @property
    def count(self) -> int:
        return len(self._turns)

    @property
    def all(self) -> list[Turn]:
        """The turns so far, in the order in which they were begun."""
        turns: list[Turn] = []
        before: tuple[Message, ...] = ()
        for _, turn in sorted(self._turns.items()):
            kept = shared(before, turn.messages)
            before = turn.messages
            turns.append(replace(turn, kept=kept, messages=turn.messages[kept:]))
        return turns

    async def prepared(self, ask: AgentRequest) -> ReadyPrompt:
        """The prompt of a request, which has its segment to itself until `release`. Raises LimitReached for too
        much text, RecordError; RequestRefused for a request with tools, or of a program, that the model's
        template cannot show."""
        if ask.refusal is not None:
            raise RequestRefused(ask.refusal)
        async with self._preparing:
            return await self._prepared(ask)

    async def _prepared(self, ask: AgentRequest) -> ReadyPrompt:
        place = next(self._places)
        messages, tools, opening = await aside_if(ask.is_long, self._told, ask)
        if any(names := set(map(attrgetter("name"), ask.messages))):
            self.names_unused |= not names <= {"", *(m.name for m in messages)}
        turn = unlike = None
        if self._playback is not None and ask.count_only:
            messages = self._playback.recorded(messages)
        elif self._playback is not None:
            try:
                busy, slow = tuple(self._busy.values()), ask.is_long or self._playback.is_slow
                turn, messages = await aside_if(slow, self._playback.next, ask, messages, tools, busy)
            except OtherState as error:
                messages, unlike = self._playback.recorded(messages), error
        kept = shared(self._conversation, messages)
        messages = (*self._conversation[:kept], *messages[kept:])  # a message that came again is kept once
        if not ask.count_only:  # of which nothing is kept
            chars = sum(len(m.content) for m in messages[kept:])
            self._budgets.text(chars, len(messages) - kept, len(messages))
        if turn is not None:
            return await self._recorded(ask, place, messages, tools, turn)
        if self._line is None:
            segment = self._busy[ask.sequence] = self._text_segment(messages, tools, self._taken(ask))
            counted = await self._length(messages, kept)
            if not ask.count_only:
                self._conversation, self._counted = messages, counted
            return ReadyPrompt(place, messages, tools, segment, None, counted, unlike=unlike)
        assert self._tokenizer is not None
        following = None
        while following is None or not self._line.is_after(following):  # meanwhile, a completion may be abandoned
            busy = self._taken(ask)
            try:
                following = await aside_if(ask.is_long, self._line.following, messages, tools, opening, busy)
            except RecordError as error:
                if self._program:
                    raise _refused(str(error), "messages") from error
                raise
        self._busy[ask.sequence] = following.segment
        text = following.added
        ids = await encoded(self._tokenizer, text.text, self._limit, text.plain)
        if ids is None:
            raise self._budgets.too_long(len(text.text))
        prompt = following.prompt(ids)
        if not ask.count_only:
            self._conversation = messages
        return ReadyPrompt(place, messages, tools, prompt.segment, prompt, len(prompt.ids), unlike=unlike)

    async def _recorded(
        self, ask: AgentRequest, place: int, messages: tuple[Message, ...], tools: Tools, turn: Turn
    ) -> ReadyPrompt:
        """The prompt of a turn that is served from the record, with the ids of then; inherited ones without ids
        are context. Raises RecordError where others have none, and are to go on."""
        completion, line = turn.completion, None
        tokens = completion.prompt_tokens
        if self._line is not None and (turn.prompt_ids is None or completion.tokens_T is None):
            if not turn.inherited:
                raise RecordError(f"turn {turn.sequence} of the record has no ids that could go on")
        elif self._line is not None and turn.prompt_ids is not None and completion.tokens_T is not None:
            before = self._segments.get(turn.segment)
            ids = (before.ids if before else ids_of()) + ids_of(turn.prompt_ids)
            line = Prompt(turn.segment, ids, turn.prompt_ids, turn.closing, tools, turn.opening)
            tokens = len(ids)
        else:  # counted as then: the room of later completions follows from it
            tokens = self._counted = await self._length(messages, shared(self._conversation, messages))
        self._conversation = messages
        self._busy[ask.sequence] = turn.segment
        return ReadyPrompt(place, messages, tools, turn.segment, line, tokens, turn)

    def _taken(self, ask: AgentRequest) -> tuple[int, ...]:
        """Segments that a request cannot continue now: others do, or the record goes on with them."""
        recorded = () if self._playback is None or ask.count_only else self._playback.segments
        return (*self._busy.values(), *recorded)

    def release(self, sequence: int) -> None:
        """This request is over: others may continue its segment. Idempotent."""
        self._busy.pop(sequence, None)

    @property
    def call_format(self) -> CallFormat | None:
        """How calls are written in the texts of conversations."""
        return self._talk.format

    def logprobs(self, completion: Completion) -> tuple[tuple[str, float], ...]:
        """Text and log-prob of each sampled token but the one that ends the turn."""
        if self._tokenizer is None or completion.tokens_T is None or completion.logprobs_T is None:
            return ()
        pairs = list(zip(completion.tokens_T, completion.logprobs_T, strict=True))
        if pairs and self._tokenizer.is_end(pairs[-1][0]):
            pairs.pop()
        texts = {token: self._tokenizer.decode((token,)) for token, _ in pairs}
        return tuple((texts[token], logprob) for token, logprob in pairs)

    def parsed(self, ask: AgentRequest, prepared: ReadyPrompt, completion: Completion) -> ParsedText | None:
        """What an agent that has calls as data gets of a completion. None: this one gets the text."""
        if not self._has_calls(ask):
            return None
        opening = prepared.line.opening if prepared.line else ""
        forced = opening if ask.wishes.tool_choice == "required" else ""
        text, wishes = opening + completion.visible, replace(ask.wishes, tools=prepared.tools)
        result = self._talk.parsed_text(text, wishes, ask.sequence)
        if not result.calls and (end := unclosed(self.call_format, forced)):
            result = self._talk.parsed_text(text + end, wishes, ask.sequence)
        if not result.calls:
            return ParsedText(forced + completion.visible, ())
        # The text beside calls has no space around it.
        begins = next(filter(result.content.startswith, (opening.lstrip(), opening.strip())), "")
        return result if forced else ParsedText(result.content.removeprefix(begins), result.calls)

    def _has_calls(self, ask: AgentRequest) -> bool:
        """Whether calls are data to who asks."""
        return self._program or bool(ask.wishes.tools)

    def _told(self, ask: AgentRequest) -> tuple[tuple[Message, ...], Tools, Opening | None]:
        """(the conversation as the template takes it, the tools as they are kept, how the answer begins). Raises
        RequestRefused, LimitReached."""
        team, self._team = self._team, ()
        if team and (flaw := self._flaw(team)) is not None:
            raise RequestRefused(flaw)
        if not self._has_calls(ask):
            return ask.messages, (), None
        wishes, last = ask.wishes, ask.messages[-1]
        messages = tuple(map(self._named, self._talk.plain(ask.messages)))
        if isinstance(last, CallMessage) and last.calls:
            raise _refused("the last message has calls without results", "messages")
        prefix = messages[-1] if messages[-1].role == "assistant" else None
        if prefix is not None:
            messages = messages[:-1]
        tools = self._offers.same(wishes.tools)
        if self._line is None or self._tokenizer is None:
            if prefix is not None:
                raise _refused("this endpoint cannot continue a message of the assistant's", "messages")
            return messages, tools, None
        if self._program:
            self._demand_modest(messages)
        shown = self._tokenizer.shape.fit(messages, tools, self._tokenizer.call_format)
        if wishes.demands:
            if prefix is not None:
                raise _refused("a call cannot be demanded behind the beginning of an answer", "tool_choice")
            name = wishes.demanded["name"] if wishes.demanded else None
            return shown, tools, Opening(self._tokenizer.call_opening(name), plain=False)
        return shown, tools, None if prefix is None else Opening(prefix.content, plain=True)

    def _named(self, message: Message) -> Message:
        """Without its name where the prompt has no place for it, or cannot have it as text."""
        if not message.name or (self._line and self._prints_name(message.role, message.name)):
            return message
        return replace(message, name="")

    def _flaw(self, tools: Tools) -> Refusal | None:
        """Why the template cannot show these tools."""
        if self._line is None or self._tokenizer is None:
            return None
        if self._tokenizer.call_format is None or not self._tokenizer.shape.tools:
            return Refusal("the model's chat template shows no tools: describe them in the prompt", "tools")
        spelled = self._tokenizer.spells_control(orjson.dumps(tools).decode())
        if spelled or completed_by_tools(self._tokenizer, tools):
            return Refusal("a tool spells a control token of the model", "tools")
        return None

    def _demand_modest(self, messages: tuple[Message, ...]) -> None:
        """Raises LimitReached for a conversation that is far too long to be printed."""
        assert self._tokenizer is not None
        contents = [message.content for message in messages]
        chars = sum(map(len, contents))
        if chars > self._limit * TOKEN_CHARS and tokens_of(self._tokenizer, contents, self._limit) is None:
            raise self._budgets.too_long(chars)

    async def _length(self, messages: tuple[Message, ...], kept: int) -> int:
        """Tokens of a conversation that is sent as text. `kept`: how many messages it shares with the last one;
        only the others are counted. 0: unknown."""
        if self._tokenizer is None:
            return 0
        before = self._counted
        if kept < len(self._conversation):
            before = kept = 0
        new = [message.content for message in messages[kept:]]
        if (count := await counted(self._tokenizer, new, self._limit)) is None:
            raise self._budgets.too_long(sum(map(len, new)))
        return before + count + len(new) * _MESSAGE_OVERHEAD

    def record(
        self, ask: AgentRequest, prepared: ReadyPrompt, started_s: float, ended_s: float, completion: Completion
    ) -> Turn:
        """Records one completion; returns it with its whole conversation. Times in seconds since the start of the
        rollout."""
        messages, prompt, then = prepared.messages, prepared.line, prepared.recorded
        if then is not None:
            started_s, ended_s = then.started_s, then.ended_s
        if self._line is not None and prompt is not None:
            self._line.append(prompt, messages, completion)
        elif self._line is None or then is None:
            self._segments.append(prepared.segment, messages, prepared.tools, completion)
        turn = self._turns[prepared.place] = Turn(
            sequence=ask.sequence,
            kind=ask.kind,
            kept=0,
            messages=messages,
            segment=prepared.segment,
            prompt_ids=prompt.added if prompt else None,
            closing=prompt.closing if prompt else "",
            completion=completion,
            started_s=started_s,
            ended_s=ended_s,
            agent=ask.agent,
            tools=prepared.tools,
            opening=prompt.opening if prompt else "",
            inherited=then is not None and then.inherited,
        )
        if then is not None and then.abandoned:  # whatever becomes of it now: its line goes on before it
            self._segments.abandon(turn.segment, completion)
            turn = self._turns[prepared.place] = replace(turn, abandoned=True)
        return turn

    def abandon(self, sequence: int) -> Turn | None:
        """Nobody got this completion, if there is one: its segment goes on before it. A completion that was
        continued was read. Returns it where it is abandoned now."""
        place = next((place for place, turn in self._turns.items() if turn.sequence == sequence), None)
        if place is None or (turn := self._turns[place]).segment in self._busy.values():
            return None
        if any(later > place and other.segment == turn.segment for later, other in self._turns.items()):
            return None  # also where what continued it was abandoned: two such would make no line
        abandoned = self._segments.abandon(turn.segment, turn.completion)
        self._turns[place] = turn = replace(turn, abandoned=abandoned)
        return turn

    def _text_segment(self, messages: tuple[Message, ...], tools: Tools, busy: tuple[int, ...]) -> int:
        """The latest segment that these messages continue and that is not `busy`; else a new one."""
        for segment, completion in self._segments.begin(messages, tools if self._program else None, busy):
            place = len(segment.messages)
            # A program may rewrite its conversation: smolagents' agents only put their own words around
            # completions.
            message = Message(messages[place].role, messages[place].content.strip())
            same = not self._program or message == Message("assistant", completion.visible.strip())
            if same and messages[:place] == segment.messages:
                return segment.number
        return self._segments.opened(busy)


def _refused(told: str, param: str) -> RequestRefused:
    return RequestRefused(Refusal(told, param))
