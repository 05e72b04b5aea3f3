"""What one sandbox may still do: its budgets, its sequence numbers, its record.

A lease is granted with a plan and ends exactly once. Everything the trajectory will be made of is
recorded here, from what was asked for and served; the sandbox's own words are kept apart.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.agents.equipment import Equipment
from orchestrator.completion.base import (
    Completer,
    CompletionRequest,
    Refusal,
    Tokenizer,
    UnusableSample,
    counted,
    encoded,
)
from orchestrator.completion.control import EndpointControl
from orchestrator.completion.line import Prompt, TokenLine
from orchestrator.control import CACHE_S, ControlAnswer
from orchestrator.errors import (
    AuthenticationError,
    CompletionError,
    CompletionTimeout,
    ContextLengthError,
    OrchestratorError,
    ProtocolError,
    ToolError,
    ToolServiceError,
)
from orchestrator.proxy.clock import OwnClock
from orchestrator.proxy.left_files import OutputIntake, OutputRule
from orchestrator.proxy.once import Once
from orchestrator.tools.arguments import recordable
from orchestrator.tools.base import HostTool
from orchestrator.types import Completion, CompletionKind, Message, RolloutPlan, Step, ToolCall, Turn

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 * 1024
MAX_STEPS_RECORDED = 1_000
MAX_STEP_CHARS = 1 << 20  # of all steps together, for display
MAX_TOOL_CHARS = 1 << 20
MAX_RECORDED_CHARS = 8 << 20  # of conversations
Keep = Callable[[Completion], object]  # records a completion of one request
# What the policy's own end is called; any other is `no_answer`.
_POLICYS: Mapping[type[Exception], str] = {CompletionTimeout: "timeout", ContextLengthError: "context_length"}
# Answers about one request that no outage gives: a control of some seconds ago will do.
_REFUSED = (Refusal, UnusableSample, ContextLengthError)
_MESSAGE_OVERHEAD = 8  # tokens a chat template puts around a message, roughly; for chat endpoints only


@dataclass(frozen=True, slots=True)
class Submission:
    """What the sandbox says became of the episode."""

    reason: str
    answer: bytes | None
    detail: str
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The lease ended because something could not be served. `name` is an outcome's name."""

    name: str
    detail: str


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to Complete: a completion, or the name of the outcome that ended the lease."""

    completion: Completion | None = None
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class ToolReply:
    """Answer to CallTool."""

    output: str | None = None
    error: str | None = None
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for a completion, checked. `agent`: the managed one that asks; empty: the main one.

    `steps`: those that ended since the last one.
    """

    sequence: int
    kind: CompletionKind
    messages: tuple[Message, ...]
    stop: tuple[str, ...]
    agent: str
    steps: tuple[Step, ...]


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
    ) -> None:
        """`cpu_s` tells the CPU time of the sandbox so far, or None where nobody knows. `control`: the run's;
        None: one of its own."""
        self.plan = plan
        self.tools = tools
        self.equipment = equipment or Equipment()
        self.output = OutputIntake(output, plan.rollout_id)
        self.clock = OwnClock(plan.limits.rollout_timeout_s)
        self.turns: list[Turn] = []
        self.tool_calls: list[ToolCall] = []
        self.steps: list[Step] = []
        self.fatal: AuthenticationError | None = None
        self.control = control or EndpointControl(completer, tokenizer)
        self._completer = completer
        self._tokenizer = tokenizer
        self._line = TokenLine(tokenizer, plan.agent.closing_tag) if tokenizer and completer.takes_ids else None
        self._conversation: tuple[Message, ...] = ()
        self._talks: dict[int, tuple[Message, ...]] = {}  # by segment, where only text goes in
        self._counted = 0  # tokens of the conversation so far, where only text goes in
        self._completions: Once[Reply] = Once()
        self._tool_replies: Once[ToolReply] = Once()
        self._step_chars = 0
        self._bytes = 0
        self._chars = 0  # of all conversations so far, what several have in common once
        self._cpu_s = cpu_s
        self._ended: asyncio.Future[Submission | Refused] = asyncio.get_running_loop().create_future()

    @property
    def live(self) -> bool:
        """Whether anything is still served."""
        return not self._ended.done()

    async def ended(self) -> Submission | Refused:
        """Waits for a result, or for the refusal that ended the lease."""
        return await asyncio.shield(self._ended)

    async def aclose(self) -> None:
        """Revokes the lease: what is being sampled is cancelled upstream. Idempotent."""
        if not self._ended.done():
            self._ended.cancel()
        await self._completions.aclose()
        await self._tool_replies.aclose()
        await self.output.discard()

    # ------------------------------------------------------------ budgets of the sandbox

    def carry(self, size: int) -> bool:
        """Whether so many bytes more may pass between sandbox and orchestrator; if not, the lease has ended."""
        limit = self.plan.limits.proxy_bytes
        if self._bytes + size > limit:
            self.refuse("budget", f"{limit} bytes over the proxy")
            return False
        self._bytes += size
        return True

    async def _check_cpu(self) -> None:
        """Raises _Over. Time already used is all that can be seen; the rollout's own clock bounds the rest."""
        limit = self.plan.limits.cpu_s
        if limit is None or self._cpu_s is None:
            return
        used_s = await self._cpu_s()
        if used_s is not None and used_s > limit:
            raise _Over("budget", f"{limit:g} cpu seconds")

    # ------------------------------------------------------------ completions

    async def complete(
        self,
        sequence: int,
        content: bytes,
        kind: CompletionKind,
        messages: tuple[Message, ...],
        stop: tuple[str, ...] = (),
        agent: str = "",
        steps: tuple[Step, ...] = (),
    ) -> Reply:
        """The answer to one numbered request. Raises SequenceError; ProtocolError for what no such agent asks."""
        plan = self.plan.agent
        if agent and agent not in {managed.name for managed in plan.managed_agents}:
            raise ProtocolError(f"there is no managed agent {agent[:80]!r}")
        if stop and plan.kind != "program":
            raise ProtocolError("only a program may bring stop strings")
        if plan.kind != "program":
            stop = stop_strings(kind, self._tags(agent))
        asked = _Asked(sequence, kind, messages, stop, agent, steps)
        return await self._completions.answer(sequence, content, lambda: self._complete(asked))

    def _tags(self, name: str) -> tuple[str, str] | None:
        """The code tags of the agent that asks; None: it writes no code blocks."""
        agent = self.plan.agent
        kind = next((managed.kind for managed in agent.managed_agents if managed.name == name), None)
        return agent.code_tags if (kind or agent.kind) == "code" else None

    async def _complete(self, asked: _Asked) -> Reply:
        for step in asked.steps:  # here, as a request that is repeated must not show them twice
            self.record_step(step)
        with self.clock.waiting(sampling=True):
            request: CompletionRequest | None = None
            keep: Keep = _nothing
            try:
                request, keep = await self._prepared(asked)
                return self._served(keep, await self._completer.sample(request))
            except _Over as over:
                return Reply(ended=self.refuse(over.name, over.detail))
            except Exception as error:  # whatever it is: the sandbox would see its call fail, and be scored for it
                failure = error
            return await self._after(failure, request, keep)

    def _served(self, keep: Keep, completion: Completion) -> Reply:
        keep(completion)
        return Reply(completion=completion)

    async def _after(self, error: Exception, request: CompletionRequest | None, keep: Keep) -> Reply:
        """What comes of a completion that failed, by the rule of blame: only a policy that has sampled something
        can have chosen to fail, and it is its own end only where a control gets an answer."""
        control: ControlAnswer | None = None
        if self.turns or isinstance(error, UnusableSample | AuthenticationError):
            control = await self.control.answer(self.plan, age_s=CACHE_S if isinstance(error, _REFUSED) else 0.0)
        passing = isinstance(error, CompletionError) and not isinstance(error, _REFUSED)
        if control is not None and control.served and passing and request is not None:
            # The service may have come back only just now. The same request tells: its seed is the same too.
            try:
                return self._served(keep, await self._completer.sample(request))
            except Exception as again:
                error, control = again, await self.control.answer(self.plan)
        return Reply(ended=self._blame(error, control, keep))

    def _blame(self, error: Exception, control: ControlAnswer | None, keep: Keep) -> str:
        """Ends the lease with the name of what broke, or of the policy's own end. `control` None: not asked."""
        if not isinstance(error, OrchestratorError):
            log.error("a completion of rollout %s failed", self.plan.rollout_id, exc_info=error)
        infrastructure = isinstance(error, CompletionError | ContextLengthError)
        ours = "llm_error" if infrastructure else "record_error"
        what = str(error) if isinstance(error, OrchestratorError) else f"no completion: {type(error).__name__}"
        if control is None:
            return self.refuse("context_length" if isinstance(error, ContextLengthError) else ours, what)
        what = f"{what}; {control.told()}"
        if isinstance(error, AuthenticationError) and isinstance(control.failure, AuthenticationError):
            self.fatal = error
        chosen = self.turns or isinstance(error, UnusableSample)
        if not control.served or not chosen:
            return self.refuse(ours, what)
        if isinstance(error, UnusableSample):
            keep(error.completion)
        return self.refuse(_POLICYS.get(type(error), "no_answer"), what)

    async def _prepared(self, asked: _Asked) -> tuple[CompletionRequest, Keep]:
        """The request, and what records its completion. Raises _Over, RecordError."""
        await self._check_cpu()
        plan, started_s = self.plan, self.clock.elapsed_s
        sequence, messages = asked.sequence, asked.messages
        self._reserve_text(messages)
        prompt = await self._prompt(self._line, messages) if self._line else None
        length = len(prompt.ids) if prompt else await self._length(messages)
        max_tokens = self._reserve(asked, length)
        request = CompletionRequest(
            messages=messages,
            prompt_ids=prompt.ids if prompt else None,
            stop=asked.stop,
            sampling=replace(plan.sampling, max_tokens=max_tokens, seed=plan.sampling.seed + sequence),
            rollout_id=plan.rollout_id,
            task_id=plan.task.task_id,
            index=plan.index,
            sequence=sequence,
            split=plan.split,
        )
        return request, functools.partial(self._record, asked, prompt, length, started_s)

    async def _prompt(self, line: TokenLine, messages: tuple[Message, ...]) -> Prompt:
        """The ids to sample from. Raises _Over for what is far too long, RecordError."""
        assert self._tokenizer is not None
        following = line.following(messages)
        text, limit = following.added, self.plan.limits.max_token_length
        ids = await encoded(self._tokenizer, text.text, limit, text.plain)
        if ids is None:
            raise self._far_too_long(len(text.text))
        return following.prompt(ids)

    def _far_too_long(self, size: int) -> _Over:
        limit = self.plan.limits.max_token_length
        return _Over("context_length", f"a prompt of {size} characters for a line of {limit} tokens")

    def _reserve(self, asked: _Asked, prompt_length: int) -> int:
        """Tokens this completion may sample. Raises _Over before anything is spent.

        Managed agents have steps of their own in each call; how often they are called the other budgets bound.
        """
        limits, agent, kind = self.plan.limits, self.plan.agent, asked.kind
        if len(self.turns) >= limits.completions:
            raise _Over("budget", f"{limits.completions} completions")
        most, taken = self._steps(asked)
        if kind is CompletionKind.ACTION and taken >= most:
            raise _Over("max_steps", f"{most} steps" + f" of {asked.agent}" * bool(asked.agent))
        if kind is CompletionKind.FINAL and not agent.final_answer_at_max_steps:
            raise _Over("max_steps", f"{agent.max_steps} steps")
        if sum(t.completion.prompt_tokens for t in self.turns) + prompt_length > limits.prompt_tokens:
            raise _Over("budget", f"{limits.prompt_tokens} prompt tokens")
        sampled_left = limits.completion_tokens - sum(t.completion.completion_tokens for t in self.turns)
        if sampled_left < 1:
            raise _Over("budget", f"{limits.completion_tokens} sampled tokens")
        room = limits.max_token_length - prompt_length
        if room < 1:
            raise _Over(
                "context_length",
                f"a prompt of {prompt_length} tokens for a line of {limits.max_token_length}",
            )
        return min(self.plan.sampling.max_tokens, sampled_left, room)

    def _steps(self, asked: _Asked) -> tuple[int, int]:
        """(steps its agent has, those it took): of a managed one those of this call, which its prompt holds."""
        agent = self.plan.agent
        if not asked.agent:
            return agent.max_steps, sum(turn.is_step for turn in self.turns)
        managed = next(managed for managed in agent.managed_agents if managed.name == asked.agent)
        return managed.max_steps or agent.max_steps, sum(m.role == "assistant" for m in asked.messages)

    async def _length(self, messages: tuple[Message, ...]) -> int:
        """Tokens of a conversation sent as text; only what is new in it is counted anew. 0: unknown.

        Raises _Over for what is far too long.
        """
        if self._tokenizer is None:
            return 0
        kept = _common(self._conversation, messages)
        if kept < len(self._conversation):
            self._counted = 0
            kept = 0
        new, limit = [message.content for message in messages[kept:]], self.plan.limits.max_token_length
        if (count := await counted(self._tokenizer, new, limit)) is None:
            raise self._far_too_long(sum(map(len, new)))
        return self._counted + count + len(new) * _MESSAGE_OVERHEAD

    def _reserve_text(self, messages: tuple[Message, ...]) -> None:
        """Raises _Over for more text than a record is for. Far beyond what the tokens of a rollout can say."""
        self._chars += sum(len(m.content) for m in messages[_common(self._conversation, messages) :])
        if self._chars > MAX_RECORDED_CHARS:
            raise _Over("budget", f"{MAX_RECORDED_CHARS} characters of conversation")

    def _record(
        self, asked: _Asked, prompt: Prompt | None, length: int, started_s: float, completion: Completion
    ) -> None:
        """`length`: of the prompt, in tokens."""
        messages = asked.messages
        kept = _common(self._conversation, messages)
        self._counted = length
        if self._line is not None and prompt is not None:
            self._line.append(prompt, messages, completion)
        self.turns.append(
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
                ended_s=self.clock.elapsed_s,
                agent=asked.agent,
            )
        )
        self._conversation = messages

    def _text_segment(self, messages: tuple[Message, ...]) -> int:
        """The latest segment whose last conversation these messages continue, in text as in ids; else the next."""
        continued = (
            segment
            for segment, talk in reversed(self._talks.items())
            if len(messages) > len(talk) and messages[: len(talk)] == talk
        )
        segment = next(continued, len(self._talks))
        self._talks[segment] = messages
        return segment

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
                await self._reserve_tool_call()
                recorded = recordable(arguments)
                if tool is None:
                    raise ToolError(f"there is no tool {name[:80]!r}")
                output = (await tool.call(arguments))[:MAX_TOOL_CHARS]
            except _Over as over:
                return ToolReply(ended=self.refuse(over.name, over.detail))
            except ToolError as failure:
                error = str(failure)[:MAX_TOOL_CHARS]
            except ToolServiceError as failure:
                error = str(failure)
                ended = self.refuse("tool_error", f"{name}: {failure}")
            except Exception as failure:  # a tool of the user's own may raise anything
                log.exception("the tool %s failed", name[:80])
                error = f"the tool failed: {type(failure).__name__}"
        self.tool_calls.append(ToolCall(sequence, name, recorded, output, error, started_s, self.clock.elapsed_s))
        return ToolReply(output=output, error=error, ended=ended)

    async def _reserve_tool_call(self) -> None:
        """Raises _Over before anything is spent."""
        if len(self.tool_calls) >= self.plan.limits.tool_calls:
            raise _Over("budget", f"{self.plan.limits.tool_calls} tool calls")
        await self._check_cpu()

    def record_step(self, step: Step) -> None:
        """Keeps a step for display; past the caps it is dropped in silence, as nothing depends on it."""
        size = len(step.model_output) + len(step.code) + len(step.observations) + len(step.error)
        if len(self.steps) < MAX_STEPS_RECORDED and self._step_chars + size <= MAX_STEP_CHARS:
            self.steps.append(step)
            self._step_chars += size

    # ------------------------------------------------------------ result

    def submit(self, submission: Submission) -> None:
        """The first result wins. Raises ProtocolError for a later one."""
        if not self.live:
            raise ProtocolError("the episode has ended already")
        for step in submission.steps:
            self.record_step(step)
        self._ended.set_result(submission)

    def refuse(self, name: str, detail: str) -> str:
        """Ends the lease with an outcome's name, which is returned."""
        if self.live:
            self._ended.set_result(Refused(name, detail))
        return name


def _nothing(completion: Completion) -> None:
    """Nothing was asked for that could be recorded."""


class _Over(Exception):
    """Nothing more may be spent. `name` is an outcome's name."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(detail)
        self.name = name
        self.detail = detail


def stop_strings(kind: CompletionKind, code_tags: tuple[str, str] | None) -> tuple[str, ...]:
    """The strings smolagents stops at. A closing tag that is part of the opening one would stop too early."""
    if kind is CompletionKind.PLAN:
        return ("<end_plan>",)
    if kind is CompletionKind.FINAL:
        return ()
    opening, closing = code_tags or ("", "")
    return ("Observation:", "Calling tools:", *(() if closing in opening else (closing,)))


def _common(a: tuple[Message, ...], b: tuple[Message, ...]) -> int:
    """How many leading messages are equal."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
