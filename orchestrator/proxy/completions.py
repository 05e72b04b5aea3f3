"""The completions of one lease: numbered requests, each answered once, and whose fault it is where one fails.

`sampler` asks the endpoint, `budgets` holds what may still be spent, `turns` prepares prompts and keeps what was
sampled, `blame` judges failures.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orchestrator.completion.base import Completer, Interrupted, Tokenizer
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
from orchestrator.proxy.playback import OtherState
from orchestrator.proxy.playback_clock import PlaybackClock
from orchestrator.proxy.requests import AgentRequest, Refusal, Reply, RequestRefused
from orchestrator.proxy.sampler import ReadyRequest, Sampler
from orchestrator.proxy.turns import Turns
from orchestrator.rules.blame import control_age_s, may_pass, needs_control, verdict
from orchestrator.rules.control import ControlAnswer
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.types import Completion, Entry, Message, RolloutPlan, Tools, Turn, Wishes, shared

log = logging.getLogger(__name__)

MAX_REFUSED = 64  # requests of a program; each costs a look at the conversation
MAX_COUNTED = 256  # prompts whose tokens are counted; each costs the same look
MAX_TOO_LONG = 8  # prompts refused for their length: a program may shorten its conversation and go on
MAX_GIVEN_UP = 1_024  # completions, those that were never sampled included: each number is kept
_GONE = Reply(refused=Refusal("the client of this request hung up"))


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
        playback_clock: PlaybackClock,
        end: Callable[[str, str], str],
        served: Callable[[Entry], None],
    ) -> None:
        """`team`: as for `Turns`. `served` gets every completion that goes on record, its prompt as a
        difference to that of the one before; not those that are on record already. `end` ends the lease with the
        outcome of this name and with details, and returns the name."""
        playback, takes_ids = playback_clock.playback, completer.takes_ids
        self.turns = Turns(plan, budgets, tokenizer, takes_ids=takes_ids, team=team, playback=playback)
        self._playback_clock = playback_clock
        self.fatal: AuthenticationError | CostReached | None = None  # ends the run
        # smolagents' agents ask for one completion after the other.
        self.parallel = plan.limits.parallel_completions if plan.agent.kind == "program" else 1
        self._plan = plan
        self._program = plan.agent.kind == "program"
        self._sampler = Sampler(plan, completer, self.turns.call_format, cost_limit)
        self._clock = clock
        self._budgets = budgets
        self._control = control
        self._end = end
        self._served = served
        self._served_talk: tuple[Message, ...] = ()  # of the last completion that was told
        self._replies: NumberedCalls[Reply] = NumberedCalls(self.parallel)
        self._running: dict[int, asyncio.Task[Any]] = {}  # by number
        self._given_up: set[int] = set()  # numbers that nobody waits for any more
        self._played_back: set[int] = set()  # numbers that were answered from the record
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
        self._sampler.demand_of_agent(ask)
        if ask.sequence in self._given_up and not self._replies.came(ask.sequence):
            note(ask)  # it was given up while it was read: another one may have its place already
            return _GONE

        async def make() -> Reply:
            note(ask)
            return await self._once(ask)

        return await self._replies.answer(ask.sequence, content, make)

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
        self._playback_clock.asked.set()
        if (task := self._running.pop(sequence, None)) is not None:
            task.cancel()
        await self._replies.ended(sequence)
        if self._playback_clock.plays and sequence in self._played_back:
            return
        if (turn := self.turns.abandon(sequence)) is not None:
            self._tell(turn)

    async def _once(self, ask: AgentRequest) -> Reply:
        number = ask.sequence
        if ask.count_only:
            self._counts.add(number)
        if number in self._given_up:
            return _GONE
        task = asyncio.current_task()
        assert task is not None
        if not self._playback_clock.plays:  # else it may be served from the record, which takes no time
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
        ready = None
        with self._clock.waiting(sampling=True):
            try:
                ready = await self._prepared(ask)
                return await self._sampled(ready)
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
                return await self._failed(error, ready)

    async def _prepared(self, ask: AgentRequest) -> ReadyRequest:
        """Raises LimitReached, RequestRefused, RecordError."""
        await self._budgets.check_cpu()
        started_s = self._clock.elapsed_s
        prompt = await self.turns.prepared(ask)
        self._playback_clock.asked.set()
        self._sampler.demand_guidance(ask.wishes)
        most = await self._budgets.begin(ask, prompt.tokens)
        if prompt.unlike is not None and not self._playback_clock.part(prompt.unlike):
            raise prompt.unlike
        self._playback_clock.look_whether_parted()
        return ReadyRequest(ask, prompt, self._sampler.request(ask, prompt, most), started_s)

    async def _sampled(self, ready: ReadyRequest) -> Reply:
        request = ready.request
        if (turn := ready.prompt.recorded) is not None:
            await self._playback_clock.in_time(turn, lambda: request.sequence not in self._given_up)
            return self._played(ready, turn)
        if request.sequence in self._given_up:
            raise asyncio.CancelledError
        if (task := asyncio.current_task()) is not None:
            self._running[request.sequence] = task
        try:
            return self._kept(ready, await self._sampler.sample(ready, self._given_up))
        except CostReached as reached:
            self.fatal = reached
            return Reply(ended=self._end("cancelled", str(reached)))

    def _played(self, ready: ReadyRequest, turn: Turn) -> Reply:
        """The reply from the record."""
        prefix = self._plan.prefix
        reply = self._kept(ready, turn.completion, known=bool(prefix and prefix.continued))
        self._played_back.add(ready.ask.sequence)
        self._playback_clock.answered()
        return reply

    def _kept(self, ready: ReadyRequest, completion: Completion, *, known: bool = False) -> Reply:
        """The reply with this completion, which goes on record. `known`: it is there already."""
        ask = ready.ask
        started_s = max(ready.started_s, self._clock.went_on_s)
        turn = self.turns.record(ask, ready.prompt, started_s, self._clock.elapsed_s, completion)
        if not known:
            self._tell(turn)
        self._budgets.spend(ask.sequence, completion)
        return Reply(
            completion=completion,
            parsed=self.turns.parsed(ask, ready.prompt, completion),
            logprobs=self.turns.logprobs(completion) if ask.wishes.logprobs else (),
            stop=next(filter(completion.unseen.startswith, ready.request.stop), ""),
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

    async def _failed(self, error: Exception, ready: ReadyRequest | None) -> Reply:
        """Ends the lease with the outcome that `blame` decides. `ready` None: the request could not be prepared.

        If the endpoint answers a control, the request is first sent once more, with the same seed: the endpoint
        may have come back in between. What was sampled of the completion before is continued, not sampled again.
        """
        wishes = Wishes() if ready is None else ready.wishes
        if ready and isinstance(error, EndpointRefusal) and wishes.demands and wishes.response_format:
            # Not every service takes every schema. The call is demanded all the same.
            wishes = replace(wishes, response_format={})
            ready = replace(ready, request=replace(ready.request, wishes=wishes))
            try:
                return await self._sampled(ready)
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
        if control is not None and control.served and may_pass(error) and ready is not None:
            if isinstance(error, Interrupted):
                ready = replace(ready, request=replace(ready.request, begun=error.parts))
            try:
                return await self._sampled(ready)
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
        if judged.sampled is not None and ready is not None:
            self._kept(ready, judged.sampled)
        refused = wishes != Wishes() and isinstance(error, EndpointRefusal)
        advice = (
            "; if it takes no tools, set --env.tool_call_format json (a shell agent: fenced)" if refused else ""
        )
        return Reply(ended=self._end(judged.outcome, judged.detail + advice))
