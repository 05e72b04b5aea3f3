"""A lease: one sandbox's right to completions and tools. It answers numbered calls and records all of them.

A lease belongs to one plan and ends once. `budgets` holds what may still be spent, `turns` what was sampled.
`blame` decides whose fault a failed completion is. The steps that the sandbox reports are kept separately.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import orjson

from orchestrator.agents.equipment import Equipment
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
    ToolError,
    ToolServiceError,
)
from orchestrator.proxy.budgets import Budgets, Over
from orchestrator.proxy.clock import OwnClock
from orchestrator.proxy.left_files import OutputIntake, OutputRule
from orchestrator.proxy.once import Once
from orchestrator.proxy.said import Asked, Refusal, Reply, RequestRefused, Spoken, ToolReply
from orchestrator.proxy.turns import Turns
from orchestrator.rules.blame import control_age_s, may_pass, needs_control, verdict
from orchestrator.rules.control import ControlAnswer
from orchestrator.rules.outcome import Refused, Submission
from orchestrator.rules.purse import Purse
from orchestrator.rules.redact import redact
from orchestrator.rules.text import objects_in
from orchestrator.tools.arguments import recordable
from orchestrator.tools.base import HostTool
from orchestrator.types import (
    AgentSpec,
    Completion,
    CompletionKind,
    RequestNotes,
    RolloutPlan,
    Step,
    ToolCall,
    Tools,
    Turn,
    Wishes,
)

log = logging.getLogger(__name__)

_AT_ENDPOINT = "This model's maximum context length is reached at the endpoint"
_GONE = Reply(refused=Refusal("the client of this request hung up"))
MAX_REFUSED = 64  # requests of a program; each costs a look at the conversation
MAX_COUNTED = 256  # prompts whose tokens are counted; each costs the same look
MAX_UNUSED_FIELDS, MAX_REFUSALS_TOLD = 64, 3  # different ones, of all requests
MAX_GIVEN_UP = 1_024  # completions, those that were never sampled included: each number is kept
MAX_TOO_LONG = 8  # of them for their length: a program may shorten its conversation and go on
MAX_STEPS_RECORDED = 1_000
MAX_STEP_CHARS = 1 << 20  # of all steps together, for display
MAX_TOOL_CHARS, MAX_ERROR_CHARS = 1 << 20, 1 << 16  # of one call of a tool
Keep = Callable[[Completion], Reply]  # records a completion of one request


class Lease:
    """One sandbox's right to completions and tools, for one plan."""

    def __init__(
        self,
        plan: RolloutPlan,
        completer: Completer,
        tokenizer: Tokenizer | None,
        tools: Mapping[str, HostTool],
        cpu_s: Callable[[], Awaitable[float | None]] | None = None,
        equipment: Equipment | None = None,
        *,
        output: OutputRule | None = None,
        control: EndpointControl | None = None,
        purse: Purse | None = None,
    ) -> None:
        """`cpu_s` returns the CPU seconds of the sandbox so far, None if unknown. `control`: the run's; None: the
        lease gets its own. `purse`: the run's; None: completions may cost what they do."""
        self.plan = plan
        self.tools = tools
        self.equipment = equipment or Equipment()
        self.output = OutputIntake(output, plan.rollout_id)
        self.clock = OwnClock(plan.limits.rollout_timeout_s)
        self.tool_calls: list[ToolCall] = []
        self.steps: list[Step] = []
        self.fatal: AuthenticationError | CostReached | None = None  # ends the run
        self.control = control or EndpointControl(completer, tokenizer)
        self._completer = completer
        self._purse = purse
        self._budgets = Budgets(plan, cpu_s)
        team = _team_tools(plan.agent, tools, self.equipment)
        self._turns = Turns(plan, self._budgets, tokenizer, takes_ids=completer.takes_ids, team=team)
        # smolagents' agents ask for one completion after the other.
        self.parallel = plan.limits.parallel_completions if plan.agent.kind == "program" else 1
        self._completions: Once[Reply] = Once(self.parallel)
        self._awaited: dict[int, asyncio.Timeout] = {}  # completions that are being sampled
        self._given_up: set[int] = set()  # completions that nobody waits for any more
        self._counts: set[int] = set()  # requests of which only the tokens are wanted
        self._tool_replies: Once[ToolReply] = Once()
        self._answered = 0  # highest number of a request that got a completion
        self._step_chars = 0
        self._unused_fields: dict[str, None] = {}
        self._refusals: dict[str, None] = {}
        self._counted = 0
        self._refused = 0
        self._too_long = 0
        self._ended: asyncio.Future[Submission | Refused] = asyncio.get_running_loop().create_future()

    @property
    def turns(self) -> list[Turn]:
        """The completions so far."""
        return self._turns.all

    @property
    def live(self) -> bool:
        """Whether calls are still served."""
        return not self._ended.done()

    @property
    def awaited(self) -> bool:
        """Whether the sandbox asked for a completion and did not get it: it is being sampled, or the program gave
        it up and got none of those that it asked for later."""
        return self.clock.sampling > 0 or any(number > self._answered for number in self._given_up - self._counts)

    @property
    def notes(self) -> tuple[str, ...]:
        """What people are to know of the requests, for the record."""
        if not (count := len(self._given_up - self._counts)):
            return ()
        return (f"{count} completion{'s were' if count > 1 else ' was'} given up by the program",)

    @property
    def requests(self) -> RequestNotes:
        """What people are to know of the fields and refusals of its requests, for the record."""
        return RequestNotes(tuple(self._unused_fields), tuple(self._refusals))

    async def ended(self) -> Submission | Refused:
        """Waits for a result, or for the refusal that ended the lease."""
        return await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """Cancels what is being sampled, and calls of tools: behind a result nobody reads them. Idempotent."""
        await self._completions.aclose()
        await self._tool_replies.aclose()

    async def aclose(self) -> None:
        """Ends the lease and stops it. Idempotent."""
        if not self._ended.done():
            self._ended.cancel()
        await self.stop()
        await self.output.discard()

    def carry(self, size: int) -> bool:
        """Spends bytes that pass between sandbox and orchestrator. False: too many, and the lease has ended."""
        try:
            self._budgets.carry(size)
        except Over as over:
            self.refuse(over.name, over.detail)
            return False
        return True

    # ------------------------------------------------------------ completions

    async def complete(self, asked: Asked, content: bytes) -> Reply:
        """The answer to one numbered request, whose bytes are `content`. Raises SequenceError; ProtocolError for a
        request that the plan's agent does not make."""
        plan, tools = self.plan.agent, asked.wishes.tools
        if asked.agent and asked.agent not in {managed.name for managed in plan.managed_agents}:
            raise ProtocolError(f"there is no managed agent {asked.agent[:80]!r}")
        if plan.kind != "program":
            if asked.stop or asked.count_only:
                raise ProtocolError("only a program may bring stop strings, or have tokens counted")
            if asked.wishes != Wishes(tools) or (tools and not self._has_calls_as_data(asked)):
                raise ProtocolError("only a program may bring other wishes than an agent's tools")
            if not tools and any(isinstance(message, Spoken) for message in asked.messages):
                raise ProtocolError("calls and results in a request without tools")
            # Calls end with the turn, and their arguments may hold any text: nothing stops them before.
            stop = () if tools else stop_strings(asked.kind, self._tags(asked.agent))
            asked = replace(asked, stop=stop)
        if asked.sequence in self._given_up and not self._completions.came(asked.sequence):
            # It was given up while it was read. Another one may have its place already.
            self._note(asked.notes)
            return _GONE
        return await self._completions.answer(asked.sequence, content, lambda: self._complete(asked))

    def _tags(self, name: str) -> tuple[str, str] | None:
        """The code tags of the agent `name`; None: it writes no code blocks."""
        agent = self.plan.agent
        return agent.code_tags if agent.kind_of(name) == "code" else None

    def _has_calls_as_data(self, asked: Asked) -> bool:
        """Whether this agent, which is no program, brings tools to such a completion."""
        agent = self.plan.agent
        calling = agent.kind_of(asked.agent) == "tool_calling" and asked.kind is CompletionKind.ACTION
        return calling and agent.call_format is not None

    async def give_up(self, sequence: int) -> None:
        """Nobody waits for this completion any more: its client hung up. What is being sampled is cancelled. What
        was sampled and not read stays on record. Returns when another completion may be asked for in its place.
        Raises ProtocolError for a number that no request can have yet."""
        if sequence in self._given_up:
            return
        if not self._completions.may_come(sequence):
            raise ProtocolError(f"completion {sequence} was not asked for")
        if len(self._given_up) >= MAX_GIVEN_UP:
            self.refuse("budget", f"{MAX_GIVEN_UP} completions that were given up")
            return
        self._given_up.add(sequence)
        self._completions.passed(sequence)  # it may have been cut while it was read
        if (patience := self._awaited.pop(sequence, None)) is not None:
            patience.reschedule(asyncio.get_running_loop().time())
            await self._completions.ended(sequence)
        self._turns.abandon(sequence)

    async def _complete(self, asked: Asked) -> Reply:
        for step in asked.steps:  # here, so that a repeated request does not record them twice
            self.record_step(step)
        self._note(asked.notes)
        if asked.count_only:
            self._counts.add(asked.sequence)
        if asked.sequence in self._given_up:
            return _GONE
        try:
            async with asyncio.timeout(None) as patience:
                self._awaited[asked.sequence] = patience
                reply = await self._answer(asked)
        except TimeoutError:
            if not patience.expired():
                raise
            return _GONE
        finally:
            self._awaited.pop(asked.sequence, None)
            self._turns.release(asked.sequence)
            self._budgets.end(asked.sequence, given_up=asked.sequence in self._given_up)
        if reply.completion is not None:
            self._answered = max(self._answered, asked.sequence)
        return reply

    async def _answer(self, asked: Asked) -> Reply:
        if asked.count_only:
            return await self._count(asked)
        with self.clock.waiting(sampling=True):
            try:
                request, keep = await self._prepared(asked)
            except Over as over:
                if over.name == "context_length" and (reply := self._too_long_for_now(over.detail)) is not None:
                    return reply
                return Reply(ended=self.refuse(over.name, over.detail))
            except RequestRefused as error:
                return self._not_served(error.refusal)
            except Exception as error:  # else the sandbox's call would fail, and the rollout be scored for it
                return await self._failed(error, None, _keep_nothing)
            try:
                return await self._sampled(request, keep)
            except Exception as error:  # as above
                return await self._failed(error, request, keep)

    async def _count(self, asked: Asked) -> Reply:
        """The tokens of the prompt."""
        self._counted += 1
        if self._counted > MAX_COUNTED:
            return self._not_served(Refusal(f"the tokens of {MAX_COUNTED} prompts were counted, and that is all"))
        with self.clock.waiting():
            try:
                tokens = (await self._turns.prepared(asked)).tokens
            except Over as over:
                return self._not_served(Refusal(over.detail, "messages", too_long=over.name == "context_length"))
            except RequestRefused as error:
                return self._not_served(error.refusal)
            except Exception as error:  # nothing was sampled, so nothing is anybody's end
                log.warning("tokens of rollout %s were not counted", self.plan.rollout_id, exc_info=error)
                return self._not_served(Refusal("the tokens of this prompt cannot be counted", "messages"))
        if not tokens:
            return self._not_served(Refusal("this run has no tokenizer: tokens are not counted"))
        return Reply(counted=tokens)

    async def _sampled(self, request: CompletionRequest, keep: Keep) -> Reply:
        if self._purse is None:
            return keep(await self._completer.sample(request))
        most = _most_tokens(request)
        try:
            async with self._purse.hold(self.plan.rollout_id, most, request.sampling.max_tokens) as settle:
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
                return keep(completion)
        except CostReached as reached:
            self.fatal = reached
            return Reply(ended=self.refuse("cancelled", str(reached)))

    def _not_served(self, refusal: Refusal) -> Reply:
        """Refuses one request of a program, which may send another one. The rollout of another agent ends: before
        its first completion the operator's tools are at fault, as those of the whole team are looked at then;
        after it, the conversation that the policy wrote."""
        if self.plan.agent.kind != "program":
            return Reply(ended=self.refuse("budget" if self._turns.any else "record_error", refusal.told))
        self._refused += 1
        if self._refused > MAX_REFUSED:
            return Reply(ended=self.refuse("budget", f"{MAX_REFUSED} refused requests; the last: {refusal.told}"))
        return Reply(refused=refusal)

    def _too_long_for_now(self, detail: str, limit: str = "") -> Reply | None:
        """Refuses a program's request for its length, so that the program can shorten its conversation. None: it
        did so too often, or the agent is none that could. `limit`: which one, if it is not the rollout's."""
        self._too_long += 1
        if self.plan.agent.kind != "program" or self._too_long > MAX_TOO_LONG:
            return None
        most = self.plan.limits.max_token_length
        limit = limit or f"This model's maximum context length is {most} tokens (env.max_token_length)"
        told = f"{limit}: {detail}. Shorten the conversation."
        return self._not_served(Refusal(told, "messages", too_long=True))

    async def _prepared(self, asked: Asked) -> tuple[CompletionRequest, Keep]:
        """The request, and a function that records its completion. Raises Over, RecordError."""
        await self._budgets.check_cpu()
        plan, started_s = self.plan, self.clock.elapsed_s
        prompt = await self._turns.prepared(asked)
        self._demand_guidance(asked.wishes)
        request = CompletionRequest(
            messages=prompt.messages,
            prompt_ids=prompt.line.ids if prompt.line else None,
            stop=asked.stop,
            sampling=replace(
                plan.sampling,
                max_tokens=await self._budgets.begin(asked, prompt.tokens),
                seed=plan.sampling.seed + asked.sequence,
            ),
            rollout_id=plan.rollout_id,
            task_id=plan.task.task_id,
            index=plan.index,
            sequence=asked.sequence,
            split=plan.split,
            wishes=self._held_to_schema(asked.wishes),
            call_format=self._turns.call_format if plan.agent.kind == "program" or asked.wishes.tools else None,
            prompt_tokens=prompt.tokens,
        )

        def keep(completion: Completion) -> Reply:
            self._turns.record(asked, prompt, started_s, self.clock.elapsed_s, completion)
            self._budgets.spend(asked.sequence, completion)
            said = self._turns.said(asked, prompt, completion)
            told = self._turns.logprobs(completion) if asked.wishes.logprobs else ()
            stop = next(filter(completion.unseen.startswith, asked.stop), "")
            return Reply(completion=completion, said=said, logprobs=told, stop=stop)

        return request, keep

    def _held_to_schema(self, wishes: Wishes) -> Wishes:
        """What an endpoint that takes ids is asked for: of a demanded call, which the prompt begins, the arguments
        by their schema. The form that was asked for is of answers without calls."""
        if not self._completer.takes_ids or not wishes.demands:
            return wishes
        schema = arguments_schema(wishes.demanded)
        if schema is None or not self._completer.guides or not guidable(self._turns.call_format):
            return replace(wishes, response_format={})
        form = {"type": "json_schema", "json_schema": {"name": "arguments", "schema": schema}}
        return replace(wishes, response_format=form)

    def _demand_guidance(self, wishes: Wishes) -> None:
        """Raises RequestRefused unless the endpoint keeps to the form that is asked for."""
        form = "text" if wishes.demands else wishes.response_format.get("type", "text")
        if form != "text" and not self._completer.guides:
            told = f"this endpoint cannot keep to a {form}: describe the form in the prompt, and check the text"
            raise RequestRefused(Refusal(told, "response_format"))
        if wishes.logprobs and not self._completer.takes_ids:
            raise RequestRefused(Refusal("this endpoint gives no log-probs of its tokens", "logprobs"))

    async def _failed(self, error: Exception, request: CompletionRequest | None, keep: Keep) -> Reply:
        """Ends the lease with the outcome that `blame` decides.

        If the endpoint answers a control, the request is first sent once more, with the same seed: the endpoint
        may have come back in between. What was sampled of the completion before is continued, not sampled again.
        """
        if isinstance(error, EndpointRefusal) and request is not None and _is_held_to_schema(request.wishes):
            # Not every service takes every schema. The call is demanded all the same.
            request = replace(request, wishes=replace(request.wishes, response_format={}))
            try:
                return await self._sampled(request, keep)
            except Exception as again:
                error = again
        wishes = request is not None and request.wishes != Wishes()
        may_go_on = wishes and self.plan.agent.kind == "program"  # without what the endpoint does not know
        of_kind = isinstance(error, ParameterError)  # a neutral request of this kind is refused, too
        of_kind |= isinstance(error, EndpointRefusal) and (error.of_text or not self._turns.any)
        if may_go_on and of_kind:
            return self._not_served(Refusal(f"the endpoint refuses it: {error}"))
        control: ControlAnswer | None = None
        if needs_control(error, sampled=self._turns.any):
            control = await self.control.answer(self.plan, age_s=control_age_s(error))
        if control is not None and control.served and may_pass(error) and request is not None:
            if isinstance(error, Interrupted):
                request = replace(request, begun=error.parts)
            try:
                return await self._sampled(request, keep)
            except Exception as again:
                error, control = again, await self.control.answer(self.plan)
                if may_go_on and control.served and isinstance(error, EndpointRefusal):
                    return self._not_served(Refusal(f"the endpoint refuses it: {error}"))
        if not isinstance(error, OrchestratorError):
            log.error("a completion of rollout %s failed", self.plan.rollout_id, exc_info=error)
        too_long = isinstance(error, ContextLengthError) and (control is None or control.served)
        if too_long and (reply := self._too_long_for_now(str(error), _AT_ENDPOINT)) is not None:
            return reply
        found = verdict(error, control, sampled=self._turns.any)
        self.fatal = found.fatal or self.fatal
        if found.sampled is not None:
            keep(found.sampled)
        advice = ""
        if wishes and isinstance(error, EndpointRefusal):
            advice = "; if it takes no tools, set --env.tool_call_format json"
        return Reply(ended=self.refuse(found.outcome, found.detail + advice))

    # ------------------------------------------------------------ tools, steps

    async def call_tool(self, sequence: int, content: bytes, name: str, arguments: dict[str, Any]) -> ToolReply:
        """The answer to one numbered tool call. Raises SequenceError."""
        return await self._tool_replies.answer(
            sequence, content, lambda: self._call_tool(sequence, name, arguments)
        )

    async def _call_tool(self, sequence: int, name: str, arguments: dict[str, Any]) -> ToolReply:
        started_s = self.clock.elapsed_s
        output: str | None = None
        error: str | None = None
        ended: str | None = None
        recorded: Mapping[str, Any] = {}
        with self.clock.waiting():
            tool = self.tools.get(name)
            try:
                self._budgets.tool_call(len(self.tool_calls))
                await self._budgets.check_cpu()
                recorded = recordable(arguments)
                text = orjson.dumps(recorded)
                self._budgets.tool_text(len(text), objects_in(text))
                if tool is None:
                    raise ToolError(f"there is no tool {name[:80]!r}")
                output = (await tool.call(arguments))[:MAX_TOOL_CHARS]
                self._budgets.tool_text(len(output))
            except Over as over:
                return ToolReply(ended=self.refuse(over.name, over.detail))
            except ToolError as failure:
                error = str(failure)[:MAX_ERROR_CHARS]
            except ToolServiceError as failure:
                error = str(failure)[:MAX_ERROR_CHARS]
                ended = self.refuse("tool_error", f"{name}: {failure}")
            except Exception as failure:  # a tool of the user's own may raise anything
                log.exception("the tool %s failed", name[:80])
                error = f"the tool failed: {type(failure).__name__}"
        self.tool_calls.append(ToolCall(sequence, name, recorded, output, error, started_s, self.clock.elapsed_s))
        return ToolReply(output=output, error=error, ended=ended)

    def record_step(self, step: Step) -> None:
        """Keeps a step for display. Steps past the caps are dropped silently, as nothing depends on them."""
        size = len(step.model_output) + len(step.code) + len(step.observations) + len(step.error)
        if len(self.steps) < MAX_STEPS_RECORDED and self._step_chars + size <= MAX_STEP_CHARS:
            self.steps.append(step)
            self._step_chars += size

    def _note(self, notes: RequestNotes) -> None:
        """Keeps the first different notes. A request that was refused before the first completion says why there
        is none, in the program's own words."""
        for field in notes.unused_fields:
            if len(self._unused_fields) < MAX_UNUSED_FIELDS:
                self._unused_fields.setdefault(field)
        for text in notes.refusals if self._turns.any else ():
            if len(self._refusals) < MAX_REFUSALS_TOLD:
                self._refusals.setdefault(redact(text))

    # ------------------------------------------------------------ result

    def submit(self, submission: Submission) -> None:
        """Ends the lease with the sandbox' result. Raises ProtocolError if the lease has ended."""
        if not self.live:
            raise ProtocolError("the episode has ended already")
        for step in submission.steps:
            self.record_step(step)
        self._note(submission.requests)
        self._ended.set_result(submission)

    def refuse(self, name: str, detail: str) -> str:
        """Ends the lease with the outcome `name`, and returns `name`."""
        if self.live:
            self._ended.set_result(Refused(name, detail))
        return name


def _team_tools(agent: AgentSpec, tools: Mapping[str, HostTool], equipment: Equipment) -> Tools:
    """The tools that agents of the team bring to completions as data, as far as the operator wrote them."""
    if agent.call_format is None:
        return ()
    shapes = [(name, tool.description, tool.inputs) for name, tool in tools.items()]
    shapes += [(tool.name, tool.description, tool.inputs) for tool in equipment.sandbox_tools]
    shapes += [(managed.name, managed.description, {}) for managed in agent.managed_agents]
    return tuple(
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {key: dict(shape) for key, shape in inputs.items()},
                },
            },
        }
        for name, description, inputs in shapes
    )


def _keep_nothing(completion: Completion) -> Reply:
    """For failures before a request was made: there is no completion to record."""
    return Reply(completion=completion)


def _is_held_to_schema(wishes: Wishes) -> bool:
    return wishes.demands and bool(wishes.response_format)


def _most_tokens(request: CompletionRequest) -> int:
    """What the prompt may have at most."""
    if request.prompt_ids is not None:
        return len(request.prompt_ids)
    # An endpoint that takes texts prints the rest itself. A token has a byte at least.
    wishes = request.wishes
    beside = len(json.dumps([wishes.tools, dict(wishes.response_format)])) if wishes != Wishes() else 0
    return beside + (
        request.prompt_tokens or sum(len(message.content.encode()) + 64 for message in request.messages)
    )
