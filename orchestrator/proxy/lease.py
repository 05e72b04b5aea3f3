"""A lease: one sandbox's right to completions and tools. It answers numbered calls and records all of them.

A lease belongs to one plan and ends once. `completions` has what is sampled, `budgets` what may still be spent.
The steps that the sandbox reports are kept separately.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import orjson

from orchestrator.agents.equipment import Equipment
from orchestrator.completion.base import Completer, Tokenizer
from orchestrator.completion.control import EndpointControl
from orchestrator.errors import ProtocolError, ToolError, ToolServiceError
from orchestrator.proxy.budgets import Budgets, LimitReached
from orchestrator.proxy.clock import OwnClock
from orchestrator.proxy.completions import Completions
from orchestrator.proxy.left_files import OutputIntake, OutputRule
from orchestrator.proxy.numbered_calls import NumberedCalls
from orchestrator.proxy.playback import OtherState, Playback
from orchestrator.proxy.playback_clock import PlaybackClock
from orchestrator.proxy.relay import Relay
from orchestrator.proxy.requests import AgentRequest, Reply, ToolReply
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.rules.outcome import Refused, Submission
from orchestrator.rules.redact import redact
from orchestrator.rules.text import objects_in
from orchestrator.tools.arguments import recordable
from orchestrator.tools.base import CALLER, HostTool
from orchestrator.types import (
    NO_WORLD,
    AgentSpec,
    Entry,
    RequestNotes,
    RolloutPlan,
    Step,
    TaskStep,
    ToolCall,
    Tools,
    Turn,
    World,
)

log = logging.getLogger(__name__)

MAX_UNUSED_FIELDS, MAX_REFUSAL_NOTES = 64, 3  # different ones, of all requests
MAX_STEPS_RECORDED = 1_000
MAX_STEP_CHARS = 1 << 20  # of all steps together, for display
_LEAST_S = 1.0  # of a deadline
TOOL_CALLS_TOGETHER = 16  # of a program; the code worker of another agent makes one call after the other
MAX_TOOL_CHARS, MAX_ERROR_CHARS = 1 << 20, 1 << 16  # of one call of a tool


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
        cost_limit: CostLimit | None = None,
        served: Callable[[Entry], None] = lambda one: None,
        world: World = NO_WORLD,
    ) -> None:
        """`cpu_s` returns the CPU seconds of the sandbox so far, None if unknown. `control`: the run's; None: the
        lease gets its own. `cost_limit`: the run's; None: completions may cost what they do. `served` gets what
        goes on record, once it does. `world`: where its streams lead."""
        self.plan = plan
        self._step = 1  # of the task, which is under way
        self.tools = tools
        self.equipment = equipment or Equipment()
        self.output = OutputIntake(output, plan.rollout_id)
        self.clock = OwnClock(self._timeout_s)
        program = plan.agent.kind == "program"
        self.playback = None if plan.prefix is None else Playback(plan.prefix, program=program)
        self._playback_clock = PlaybackClock(self.playback, self.clock, steps=bool(plan.task.steps), served=served)
        self.tool_calls: list[ToolCall] = []
        self.steps: list[Step] = []
        self.control = control or EndpointControl(completer, tokenizer)
        self._end = _End(asyncio.get_running_loop().create_future())
        # What follows the step that has ended; None: none has, or it was the last.
        self._following: asyncio.Future[TaskStep | None] | None = None
        self.healthy = asyncio.Event()  # what comes before the step has succeeded
        self._budgets = Budgets(plan, cpu_s)
        self.world = world
        world.keep_time(lambda: self.clock.elapsed_s)
        self.relay = Relay(world.ways, partial(_relay, self._budgets, self._end))
        self.completions = Completions(
            plan,
            completer,
            tokenizer,
            self.clock,
            self._budgets,
            team=_team_tools(plan.agent, tools, self.equipment),
            control=self.control,
            cost_limit=cost_limit,
            playback_clock=self._playback_clock,
            served=served,
            end=partial(_refuse, self._end),  # not a method: no circle that only a garbage collection ends
        )
        self._served = served
        self._tool_replies: NumberedCalls[ToolReply] = NumberedCalls(TOOL_CALLS_TOGETHER if program else 1)
        self._tool_calls_begun = 0
        self._step_chars = 0
        self._unused_fields: dict[str, None] = {}
        self._refusals: dict[str, None] = {}

    @property
    def turns(self) -> list[Turn]:
        """The completions so far."""
        return self.completions.turns.all

    @property
    def live(self) -> bool:
        """Whether calls are still served."""
        return not self._end.future.done()

    @property
    def notes(self) -> tuple[str, ...]:
        """What people are to know of the requests, for the record."""
        if not (count := self.completions.given_up):
            return ()
        return (f"{count} completion{'s were' if count > 1 else ' was'} given up by the program",)

    @property
    def playback_notes(self) -> tuple[str, ...]:
        """How its sandbox was brought to where a record stood, for the record."""
        return (self.playback.note,) if self.playback and (self.playback.over or self.playback.unlike) else ()

    @property
    def requests(self) -> RequestNotes:
        """What people are to know of the fields and refusals of its requests, for the record."""
        names = ["messages[].name"] if self.completions.turns.names_unused else []
        return RequestNotes(tuple(dict.fromkeys([*self._unused_fields, *names])), tuple(self._refusals))

    @property
    def _timeout_s(self) -> float:
        """The agent's own time for the step under way."""
        steps = self.plan.task.steps
        own_s = steps[self._step - 1].timeout_s if steps else None
        return self.plan.limits.rollout_timeout_s if own_s is None else own_s

    @property
    def deadline_s(self) -> float:
        """Of the step under way, from when it began. A rollout that goes on has waited for some of it already; its
        own time it takes again."""
        limit_s = min(self.plan.limits.deadline_s, self._timeout_s if self.plan.task.steps else math.inf)
        if self.plan.prefix is None or self.plan.task.steps:
            return limit_s
        return max(_LEAST_S, limit_s - self.plan.prefix.waiting_s)

    async def ended(self) -> Submission | Refused:
        """Waits for a result, or for the refusal that ended the lease."""
        return await asyncio.shield(self._end.future)

    async def stop(self) -> None:
        """Cancels what is being sampled, calls of tools, and streams: after a result nobody reads them.
        Idempotent."""
        await self.completions.aclose()
        await self._tool_replies.aclose()
        await self.relay.aclose()

    async def aclose(self) -> None:
        """Ends the lease and stops it. Idempotent."""
        if not self._end.future.done():
            self._end.future.cancel()
        self.finish()
        await self.stop()
        await self.output.discard()

    def carry(self, size: int) -> bool:
        """Spends bytes that pass between sandbox and orchestrator. False: too many, and the lease has ended."""
        try:
            self._budgets.carry(size)
        except LimitReached as over:
            self.refuse(over.name, over.detail)
            return False
        return True

    async def complete(self, ask: AgentRequest, content: bytes) -> Reply:
        """As `Completions.reply`."""
        return await self.completions.reply(ask, content, self._note_request)

    def _note_request(self, ask: AgentRequest) -> None:
        for step in ask.steps:
            self.record_step(step)
        self._note(ask.notes)

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
        CALLER.set(self.plan.rollout_id)  # of this task alone
        with self.clock.waiting():
            tool = self.tools.get(name)
            try:
                self._budgets.tool_call(self._tool_calls_begun)
                self._tool_calls_begun += 1
                await self._budgets.check_cpu()
                recorded = recordable(arguments)
                text = orjson.dumps(recorded)
                self._budgets.tool_text(len(text), objects_in(text))
                if (call := self._recorded(sequence, name, recorded)) is not None:
                    await self._playback_clock.in_time(call)
                    self._budgets.tool_text(len(call.output or ""))
                    self.tool_calls.append(call)
                    if not self.plan.prefix or not self.plan.prefix.continued:  # else it was told already
                        self._served(call)
                    return ToolReply(output=call.output, error=call.error)
                self._playback_clock.look_whether_parted()
                if tool is None:
                    raise ToolError(f"there is no tool {name[:80]!r}")
                output = (await tool.call(arguments))[:MAX_TOOL_CHARS]
                self._budgets.tool_text(len(output))
            except LimitReached as over:
                return ToolReply(ended=self.refuse(over.name, over.detail))
            except OtherState as differs:
                return ToolReply(ended=self.refuse("record_error", str(differs)))
            except ToolError as failure:
                error = str(failure)[:MAX_ERROR_CHARS]
            except ToolServiceError as failure:
                error = str(failure)[:MAX_ERROR_CHARS]
                ended = self.refuse("tool_error", f"{name}: {failure}")
            except Exception as failure:  # a tool of the user's own may raise anything
                log.exception("the tool %s failed", name[:80])
                error = f"the tool failed: {type(failure).__name__}"
        started_s = max(started_s, self.clock.went_on_s)
        self.tool_calls.append(ToolCall(sequence, name, recorded, output, error, started_s, self.clock.elapsed_s))
        self._served(self.tool_calls[-1])
        return ToolReply(output=output, error=error, ended=ended)

    def _recorded(self, sequence: int, name: str, arguments: Mapping[str, Any]) -> ToolCall | None:
        """The recorded answer to this call. Raises OtherState."""
        return None if self.playback is None else self.playback.tool_call(sequence, name, arguments)

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
        for text in notes.refusals if self.completions.turns.any else ():
            if len(self._refusals) < MAX_REFUSAL_NOTES:
                self._refusals.setdefault(redact(text))

    # ------------------------------------------------------------ result

    async def submit(self, submission: Submission) -> TaskStep | None:
        """Ends the lease with the sandbox' result, or a step: then it waits for `go_on`, and returns the next
        step. A repetition waits for the same. Raises ProtocolError for another step than the one under way."""
        if self._following is None and submission.step == self._step - 1:
            return self.plan.task.steps[submission.step]
        if submission.step != self._step:
            raise ProtocolError(f"a result of step {submission.step}, and step {self._step} is under way")
        if self.live:
            for step in submission.steps:
                self.record_step(step)
            self._note(submission.requests)
            if self._step < len(self.plan.task.steps) and submission.ends_step:
                self._following = asyncio.get_running_loop().create_future()
            self._end.future.set_result(submission)
        elif self._following is None:
            raise ProtocolError("the episode has ended already")
        return None if self._following is None else await asyncio.shield(self._following)

    def has_ended_step(self, number: int) -> bool:
        """Whether this step's result was taken and was not the last: its sender may ask again what follows."""
        return number == (self._step - 1 if self._following is None else self._step)

    def go_on(self, following: TaskStep) -> None:
        """The step that the sandbox is to carry out now, in place of the one that it ended."""
        assert not self.live
        self.healthy.clear()
        self._budgets.next_step()
        self._end.future = asyncio.get_running_loop().create_future()
        ended, self._following = self._following, None
        self._step += 1
        self.clock.renew(self._timeout_s)
        if ended is not None and not ended.done():
            ended.set_result(following)

    def finish(self) -> None:
        """No step follows the one that has ended. Idempotent."""
        if self._following is not None and not self._following.done():
            self._following.set_result(None)

    def refuse(self, name: str, detail: str) -> str:
        """Ends the lease with the outcome `name`, and returns `name`."""
        return _refuse(self._end, name, detail)


class _End:
    """Of the lease, or of the step under way."""

    def __init__(self, future: asyncio.Future[Submission | Refused]) -> None:
        self.future = future


def _refuse(end: _End, name: str, detail: str) -> str:
    if not end.future.done():
        end.future.set_result(Refused(name, detail))
    return name


def _relay(budgets: Budgets, end: _End, size: int) -> bool:
    """Spends bytes of streams. False: too many, and the lease has ended."""
    try:
        budgets.relay(size)
    except LimitReached as over:
        _refuse(end, over.name, over.detail)
        return False
    return True


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
