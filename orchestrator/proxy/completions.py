"""The completions of one lease: numbered requests, each answered once, and whose fault it is where one fails.

`budgets` holds what may still be spent, `turns` prepares prompts and keeps what was sampled, `blame` judges
failures.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from orchestrator.calls.declared import arguments_schema
from orchestrator.calls.formats import guidable
from orchestrator.completion.base import (
    Completer,
    CompletionRequest,
    Interrupted,
    Tokenizer,
    UnusableSample,
    stop_strings,
)
from orchestrator.completion.base import Refusal as EndpointRefusal
from orchestrator.completion.control import EndpointControl
from orchestrator.errors import (
    AuthenticationError,
    ContextLengthError,
    CostReached,
    OrchestratorError,
    ParameterError,
    ProtocolError,
)
from orchestrator.proxy.budgets import Budgets, LimitReached
from orchestrator.proxy.clock import OwnClock
from orchestrator.proxy.numbered_calls import NumberedCalls
from orchestrator.proxy.playback import OtherState, Playback
from orchestrator.proxy.requests import AgentRequest, CallMessage, Refusal, Reply, RequestRefused
from orchestrator.proxy.turns import ReadyPrompt, Turns
from orchestrator.rules.blame import control_age_s, may_pass, needs_control, verdict
from orchestrator.rules.control import ControlAnswer
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.types import (
    Completion,
    CompletionKind,
    Entry,
    Message,
    RolloutPlan,
    ToolCall,
    Tools,
    Turn,
    Wishes,
    shared,
)

log = logging.getLogger(__name__)

MAX_REFUSED = 64  # requests of a program; each costs a look at the conversation
MAX_COUNTED = 256  # prompts whose tokens are counted; each costs the same look
MAX_TOO_LONG = 8  # prompts refused for their length: a program may shorten its conversation and go on
MAX_GIVEN_UP = 1_024  # completions, those that were never sampled included: each number is kept
_GONE = Reply(refused=Refusal("the client of this request hung up"))


@dataclass(frozen=True, slots=True)
class _Sampling:
    """A request that is ready to be sampled. `started_s`: since the start of the rollout."""

    ask: AgentRequest
    prompt: ReadyPrompt
    request: CompletionRequest
    started_s: float

    @property
    def wishes(self) -> Wishes:
        return self.request.wishes

    @property
    def most_prompt_tokens(self) -> int:
        """What the prompt may have at most."""
        request = self.request
        if request.prompt_ids is not None:
            return len(request.prompt_ids)
        # An endpoint that takes texts prints the rest itself. A token has at least one byte.
        fields = [request.wishes.tools, dict(request.wishes.response_format)]
        beside = len(json.dumps(fields)) if request.wishes != Wishes() else 0
        most = sum(len(message.content.encode()) + 64 for message in request.messages)
        return beside + (request.prompt_tokens or most)


class Completions:
    """What one sandbox may sample."""

    def __init__(
        self,
        plan: RolloutPlan,
        completer: Completer,
        tokenizer: Tokenizer | None,
        clock: OwnClock,
        budgets: Budgets,
        *,
        team: Tools,
        control: EndpointControl,
        cost_limit: CostLimit | None,
        playback: Playback | None,
        end: Callable[[str, str], str],
        served: Callable[[Entry], None],
    ) -> None:
        """`team`, `playback`: as for `Turns`. `served` gets every completion that goes on record, its prompt as a
        difference to that of the one before; not those that are on record already. `end` ends the lease with the
        outcome of this name and with details, and returns the name."""
        self.turns = Turns(plan, budgets, tokenizer, takes_ids=completer.takes_ids, team=team, playback=playback)
        self._playback = playback
        self.fatal: AuthenticationError | CostReached | None = None  # ends the run
        # smolagents' agents ask for one completion after the other.
        self.parallel = plan.limits.parallel_completions if plan.agent.kind == "program" else 1
        self._plan = plan
        self._program = plan.agent.kind == "program"
        self._completer = completer
        self._clock = clock
        self._budgets = budgets
        self._control = control
        self._cost_limit = cost_limit
        self._end = end
        self._served, self._parted = served, False
        self._served_talk: tuple[Message, ...] = ()  # of the last completion that was told
        self._replies: NumberedCalls[Reply] = NumberedCalls(self.parallel)
        self._running: dict[int, asyncio.Task[Any]] = {}  # by number
        self._given_up: set[int] = set()  # numbers that nobody waits for any more
        self._played_back: set[int] = set()  # numbers that were answered from the record
        self._asked = asyncio.Event()  # another request was begun, or one given up
        self._counts: set[int] = set()  # numbers of requests of which only the tokens are wanted
        self._answered = 0  # highest number of a request that got a completion
        self._counted = self._refused = self._too_long = 0

    @property
    def awaited(self) -> bool:
        """Whether the sandbox asked for a completion and did not get it: it is being sampled, or the program gave
        it up and got none of those that it asked for later."""
        return self._clock.sampling > 0 or any(number > self._answered for number in self._given_up - self._counts)

    @property
    def given_up(self) -> int:
        """How many completions the program gave up."""
        return len(self._given_up - self._counts)

    async def aclose(self) -> None:
        """Cancels what is being sampled. Idempotent."""
        await self._replies.aclose()

    async def reply(self, ask: AgentRequest, content: bytes, note: Callable[[AgentRequest], None]) -> Reply:
        """The answer to one numbered request, whose bytes are `content`. `note` is called with each request once.
        Raises SequenceError; ProtocolError for a request that the plan's agent does not make."""
        self._demand_of_agent(ask)
        if ask.sequence in self._given_up and not self._replies.came(ask.sequence):
            note(ask)  # it was given up while it was read: another one may have its place already
            return _GONE

        async def make() -> Reply:
            note(ask)
            return await self._once(ask)

        return await self._replies.answer(ask.sequence, content, make)

    def _demand_of_agent(self, ask: AgentRequest) -> None:
        """Raises ProtocolError for a request that the plan's agent does not make."""
        agent, tools = self._plan.agent, ask.wishes.tools
        if ask.agent and ask.agent not in {managed.name for managed in agent.managed_agents}:
            raise ProtocolError(f"there is no managed agent {ask.agent[:80]!r}")
        if self._program:
            return
        kind = agent.kind_of(ask.agent)
        acts = kind == "tool_calling" and ask.kind is CompletionKind.ACTION
        calls = agent.call_format is not None and (acts or kind == "shell")
        if ask.stop or ask.count_only:
            raise ProtocolError("only a program may bring stop strings, or have tokens counted")
        if ask.wishes != Wishes(tools) or (tools and not calls):
            raise ProtocolError("only a program may bring other wishes than an agent's tools")
        if any(map(attrgetter("name"), ask.messages)):
            raise ProtocolError("only a program may name who speaks")
        if not tools and CallMessage in map(type, ask.messages):
            raise ProtocolError("calls and results in a request without tools")

    def _stop(self, ask: AgentRequest) -> tuple[str, ...]:
        """The stop strings of the agent that asks."""
        agent = self._plan.agent
        kind = agent.kind_of(ask.agent)
        if self._program:
            return ask.stop
        if ask.wishes.tools or kind == "shell":
            return ()  # calls end with the turn, and their arguments may hold any text: nothing stops them before
        return stop_strings(ask.kind, agent.code_tags if kind == "code" else None)

    async def give_up(self, sequence: int) -> None:
        """Takes note that nobody waits for this completion: its client hung up. What is being sampled is
        cancelled; what was sampled and not read stays on record. What came from a record stays what it was then,
        whoever hangs up now. Returns when another completion may be asked for in its place. Raises ProtocolError
        for a number that no request can have yet."""
        if sequence in self._given_up:
            return
        if not self._replies.may_come(sequence):
            raise ProtocolError(f"completion {sequence} was not asked for")
        if len(self._given_up) >= MAX_GIVEN_UP:
            self._end("budget", f"{MAX_GIVEN_UP} completions that were given up")
            return
        self._given_up.add(sequence)
        self._replies.passed(sequence)  # it may have been cut while it was read
        self._asked.set()
        if (task := self._running.pop(sequence, None)) is not None:
            task.cancel()
        await self._replies.ended(sequence)
        if self._plays and sequence in self._played_back:
            return
        if (turn := self.turns.abandon(sequence)) is not None:
            self._tell(turn)

    @property
    def _plays(self) -> bool:
        """Whether some of the record is left to be served."""
        return self._playback is not None and not self._playback.over

    async def _once(self, ask: AgentRequest) -> Reply:
        number = ask.sequence
        if ask.count_only:
            self._counts.add(number)
        if number in self._given_up:
            return _GONE
        task = asyncio.current_task()
        assert task is not None
        if not self._plays:  # else it may be served from the record, which takes no time
            self._running[number] = task
        try:
            reply = await (self._count(ask) if ask.count_only else self._answer(ask))
        except asyncio.CancelledError:
            if number not in self._given_up:
                raise
            return _GONE
        finally:
            self._running.pop(number, None)
            self.turns.release(number)
            self._budgets.end(number, given_up=number in self._given_up)
        if reply.completion is not None:
            self._answered = max(self._answered, number)
        return reply

    async def _count(self, ask: AgentRequest) -> Reply:
        """The tokens of the prompt."""
        self._counted += 1
        if self._counted > MAX_COUNTED:
            return self._refuse(Refusal(f"the tokens of {MAX_COUNTED} prompts were counted, and that is all"))
        with self._clock.waiting():
            try:
                tokens = (await self.turns.prepared(ask)).tokens
            except LimitReached as over:
                return self._refuse(Refusal(over.detail, "messages", too_long=over.name == "context_length"))
            except RequestRefused as error:
                return self._refuse(error.refusal)
            except Exception as error:  # nothing was sampled, so nothing is anybody's end
                log.warning("tokens of rollout %s were not counted", self._plan.rollout_id, exc_info=error)
                return self._refuse(Refusal("the tokens of this prompt cannot be counted", "messages"))
        if not tokens:
            return self._refuse(Refusal("this run has no tokenizer: tokens are not counted"))
        return Reply(counted=tokens)

    async def _answer(self, ask: AgentRequest) -> Reply:
        sampling = None
        with self._clock.waiting(sampling=True):
            try:
                sampling = await self._prepared(ask)
                return await self._sampled(sampling)
            except LimitReached as over:
                if over.name == "context_length" and (reply := self._too_long_for_now(over.detail)) is not None:
                    return reply
                advice = ": raise env.max_token_length" if over.name == "context_length" else ""
                return Reply(ended=self._end(over.name, over.detail + advice))
            except RequestRefused as error:
                return self._refuse(error.refusal)
            except OtherState as error:
                return Reply(ended=self._end("record_error", str(error)))
            except Exception as error:  # else the sandbox's call would fail, and the rollout be scored for it
                return await self._failed(error, sampling)

    async def _prepared(self, ask: AgentRequest) -> _Sampling:
        """Raises LimitReached, RequestRefused, RecordError."""
        await self._budgets.check_cpu()
        plan, started_s = self._plan, self._clock.elapsed_s
        prompt = await self.turns.prepared(ask)
        self._asked.set()
        self._demand_guidance(ask.wishes)
        most = await self._budgets.begin(ask, prompt.tokens)
        if prompt.unlike is not None and not self._part(prompt.unlike):
            raise prompt.unlike
        if self.look_whether_parted():
            started_s = self._clock.elapsed_s
        request = CompletionRequest(
            messages=prompt.messages,
            prompt_ids=prompt.line.ids if prompt.line else None,
            stop=self._stop(ask),
            sampling=replace(
                plan.sampling,
                max_tokens=most,
                seed=plan.sampling.seed + ask.sequence,
            ),
            rollout_id=plan.rollout_id,
            task_id=plan.task.task_id,
            index=plan.index,
            sequence=ask.sequence,
            split=plan.split,
            wishes=self._held_to_schema(ask.wishes),
            call_format=self.turns.call_format if self._program or ask.wishes.tools else None,
            prompt_tokens=prompt.tokens,
        )
        return _Sampling(ask, prompt, request, started_s)

    def _held_to_schema(self, wishes: Wishes) -> Wishes:
        """What an endpoint that takes ids is asked for: of a demanded call, which the prompt begins, the arguments
        by their schema. The form that was asked for is of answers without calls."""
        if not self._completer.takes_ids or not wishes.demands:
            return wishes
        schema = arguments_schema(wishes.demanded)
        if schema is None or not self._completer.guides or not guidable(self.turns.call_format):
            return replace(wishes, response_format={})
        form = {"type": "json_schema", "json_schema": {"name": "arguments", "schema": schema}}
        return replace(wishes, response_format=form)

    def _demand_guidance(self, wishes: Wishes) -> None:
        """Raises RequestRefused unless the endpoint keeps to the form that is asked for."""
        form = "text" if wishes.demands else wishes.response_format.get("type", "text")
        if form != "text" and not self._completer.guides:
            text = f"this endpoint cannot keep to a {form}: describe the form in the prompt, and check the text"
            raise RequestRefused(Refusal(text, "response_format"))
        if wishes.logprobs and not self._completer.takes_ids:
            raise RequestRefused(Refusal("this endpoint gives no log-probs of its tokens", "logprobs"))

    async def _sampled(self, sampling: _Sampling) -> Reply:
        request = sampling.request
        if (turn := sampling.prompt.recorded) is not None:
            await self.in_time(turn, request.sequence)
            return self._played(sampling, turn)
        if request.sequence in self._given_up:
            raise asyncio.CancelledError
        if (task := asyncio.current_task()) is not None:
            self._running[request.sequence] = task
        if self._cost_limit is None:
            return self._kept(sampling, await self._completer.sample(request))
        most = sampling.most_prompt_tokens
        try:
            async with self._cost_limit.hold(self._plan.rollout_id, most, request.sampling.max_tokens) as settle:
                try:
                    completion = await self._completer.sample(request)
                except UnusableSample as error:
                    settle(error.completion.prompt_tokens, error.completion.completion_tokens)
                    raise
                except asyncio.CancelledError:
                    if request.sequence in self._given_up:  # nobody knows what it cost: all that it could
                        settle(most, request.sampling.max_tokens)
                    raise
                settle(completion.prompt_tokens, completion.completion_tokens)
                return self._kept(sampling, completion)
        except CostReached as reached:
            self.fatal = reached
            return Reply(ended=self._end("cancelled", str(reached)))

    def _part(self, unlike: OtherState) -> bool:
        """Whether the sandbox may go on where it is not what the record says."""
        assert self._playback is not None
        return self._playback.part(str(unlike))

    def look_whether_parted(self) -> bool:
        """Whether the sandbox is on its own since now, before the record was served to its end. The clock goes on
        from where it parted."""
        if self._playback is None or not self._playback.unlike or self._parted:
            return False
        self._parted = True
        if (parting := self._playback.parting) is not None:
            told: tuple[Entry, ...] = (parting, *self._playback.given)
            for one in told:
                self._served(one)
        self._go_on()
        return True

    async def in_time(self, then: Turn | ToolCall, sequence: int = 0) -> None:
        """Waits with an answer from the record until all is asked for that was asked for before it came, at most
        as long as it took then. Else a program that asks for it first would see by it whether it is on record,
        which may follow from what those others said."""
        with suppress(TimeoutError):
            async with asyncio.timeout(then.ended_s - then.started_s):
                while self._playback and self._playback.is_early(then.ended_s) and sequence not in self._given_up:
                    self._asked.clear()
                    await self._asked.wait()

    def _go_on(self) -> None:
        """The clock goes on from where it was then. Own time that the sandbox took beyond that on its way counts:
        else it could win time by knowing that it is on its way. How long it waited for what it gave up is not on
        record."""
        assert self._playback is not None
        then, own_s = self._playback.stand, self._clock.own_s
        known = self._playback.served and not self._playback.lacks_some
        if known and not self._plan.task.steps:  # between them the clock stood still, and nobody knows how long
            own_s = max(own_s, then.elapsed_s - then.waiting_s)
        elapsed_s = max(then.elapsed_s, then.waiting_s + own_s, self._clock.elapsed_s if self._parted else 0.0)
        self._clock.go_on(elapsed_s, own_s, max(then.sampling_s, self._clock.sampling_s if self._parted else 0.0))

    def _played(self, sampling: _Sampling, turn: Turn) -> Reply:
        """The reply from the record. Behind the last one the clock goes on from where it was then."""
        assert self._playback is not None
        reply = self._kept(sampling, turn.completion, known=bool(self._playback.prefix.continued))
        self._played_back.add(sampling.ask.sequence)
        if self._playback.served or self._parted:
            self._go_on()
        return reply

    def _kept(self, sampling: _Sampling, completion: Completion, *, known: bool = False) -> Reply:
        """The reply with this completion, which goes on record. `known`: it is there already."""
        ask = sampling.ask
        turn = self.turns.record(ask, sampling.prompt, sampling.started_s, self._clock.elapsed_s, completion)
        if not known:
            self._tell(turn)
        self._budgets.spend(ask.sequence, completion)
        return Reply(
            completion=completion,
            parsed=self.turns.parsed(ask, sampling.prompt, completion),
            logprobs=self.turns.logprobs(completion) if ask.wishes.logprobs else (),
            stop=next(filter(completion.unseen.startswith, sampling.request.stop), ""),
        )

    def _tell(self, turn: Turn) -> None:
        kept = shared(self._served_talk, turn.messages)
        self._served_talk = turn.messages
        self._served(replace(turn, kept=kept, messages=turn.messages[kept:]))

    # ------------------------------------------------------------ refusals and failures

    def _refuse(self, refusal: Refusal) -> Reply:
        """Refuses one request of a program, which may send another one. The rollout of another agent ends: before
        its first completion the operator's tools are at fault, as those of the whole team are looked at then;
        after it, the conversation that the policy wrote."""
        if not self._program:
            return Reply(ended=self._end("budget" if self.turns.any else "record_error", refusal.text))
        self._refused += 1
        if self._refused > MAX_REFUSED:
            return Reply(ended=self._end("budget", f"{MAX_REFUSED} refused requests; the last: {refusal.text}"))
        return Reply(refused=refusal)

    def _too_long_for_now(self, detail: str, limit: str = "") -> Reply | None:
        """Refuses a program's request for its length, so that the program can shorten its conversation. None: it
        did so too often, or the agent is no program. `limit`: which one, if it is not the rollout's."""
        self._too_long += 1
        if not self._program or self._too_long > MAX_TOO_LONG:
            return None
        most = self._plan.limits.max_token_length
        limit = limit or f"This model's maximum context length is {most} tokens (env.max_token_length)"
        return self._refuse(Refusal(f"{limit}: {detail}. Shorten the conversation.", "messages", too_long=True))

    async def _failed(self, error: Exception, sampling: _Sampling | None) -> Reply:
        """Ends the lease with the outcome that `blame` decides. `sampling` None: the request could not be
        prepared.

        If the endpoint answers a control, the request is first sent once more, with the same seed: the endpoint
        may have come back in between. What was sampled of the completion before is continued, not sampled again.
        """
        wishes = Wishes() if sampling is None else sampling.wishes
        if sampling and isinstance(error, EndpointRefusal) and wishes.demands and wishes.response_format:
            # Not every service takes every schema. The call is demanded all the same.
            wishes = replace(wishes, response_format={})
            sampling = replace(sampling, request=replace(sampling.request, wishes=wishes))
            try:
                return await self._sampled(sampling)
            except Exception as again:
                error = again
        may_go_on = wishes != Wishes() and self._program  # without what the endpoint does not know
        of_kind = isinstance(error, ParameterError)  # a neutral request of this kind is refused, too
        of_kind |= isinstance(error, EndpointRefusal) and (error.of_text or not self.turns.any)
        if may_go_on and of_kind:
            return self._refuse(Refusal(f"the endpoint refuses it: {error}"))
        control: ControlAnswer | None = None
        if needs_control(error, sampled=self.turns.any):
            control = await self._control.answer(self._plan, age_s=control_age_s(error))
        if control is not None and control.served and may_pass(error) and sampling is not None:
            if isinstance(error, Interrupted):
                sampling = replace(sampling, request=replace(sampling.request, begun=error.parts))
            try:
                return await self._sampled(sampling)
            except Exception as again:
                error, control = again, await self._control.answer(self._plan)
                if may_go_on and control.served and isinstance(error, EndpointRefusal):
                    return self._refuse(Refusal(f"the endpoint refuses it: {error}"))
        if not isinstance(error, OrchestratorError):
            log.error("a completion of rollout %s failed", self._plan.rollout_id, exc_info=error)
        if isinstance(error, ContextLengthError) and (control is None or control.served):
            limit = "This model's maximum context length is reached at the endpoint"
            if (reply := self._too_long_for_now(str(error), limit)) is not None:
                return reply
        judged = verdict(error, control, sampled=self.turns.any)
        self.fatal = judged.fatal or self.fatal
        if judged.sampled is not None and sampling is not None:
            self._kept(sampling, judged.sampled)
        refused = wishes != Wishes() and isinstance(error, EndpointRefusal)
        advice = (
            "; if it takes no tools, set --env.tool_call_format json (a shell agent: fenced)" if refused else ""
        )
        return Reply(ended=self._end(judged.outcome, judged.detail + advice))
