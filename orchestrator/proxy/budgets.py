"""What one rollout may still spend: bytes, CPU time, completions, tokens, steps, tool calls, recorded text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from orchestrator.proxy.said import Asked
from orchestrator.types import Completion, CompletionKind, RolloutPlan

MAX_RECORDED_CHARS = 8 << 20  # of conversations
MAX_TOOL_CHARS = 16 << 20  # of all tool calls: arguments and results
# What `run/lines` reads is more: objects and arrays of a rollout's line, messages of all its prompts together.
MAX_RECORDED_OBJECTS = 800_000
MAX_PROMPTS = 3_000_000
_OBJECTS_OF_A_TURN = 8


class Over(Exception):
    """A budget is used up. `name` is an outcome's name."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(detail)
        self.name = name
        self.detail = detail


@dataclass(slots=True)
class _Held:
    """What a completion under way may use."""

    prompt: int = 0
    is_step: bool = False
    sampled: int = 0


class Budgets:
    """The limits of one plan. Each check raises `Over` before anything is spent."""

    def __init__(self, plan: RolloutPlan, cpu_s: Callable[[], Awaitable[float | None]] | None) -> None:
        self._plan = plan
        self._cpu_s = cpu_s
        self._completions = 0  # begun, those under way included; so are the next two
        self._steps = 0
        self._prompt_tokens = 0
        self._sampled = 0
        self._held: dict[int, _Held] = {}  # by sequence number, of completions under way
        self._settled = asyncio.Event()
        self._bytes = 0
        self._chars = 0  # of all conversations so far; text shared by several counts once
        self._tool_chars = 0
        self._objects = self._prompts = 0

    def carry(self, size: int) -> None:
        """Spends bytes that pass between sandbox and orchestrator."""
        limit = self._plan.limits.proxy_bytes
        if self._bytes + size > limit:
            raise Over("budget", f"{limit} bytes over the proxy")
        self._bytes += size

    async def check_cpu(self) -> None:
        """Checks the CPU time used so far. What is used later is bounded by the rollout's own clock."""
        limit = self._plan.limits.cpu_s
        if limit is None or self._cpu_s is None:
            return
        used_s = await self._cpu_s()
        if used_s is not None and used_s > limit:
            raise Over("budget", f"{limit:g} cpu seconds")

    def text(self, chars: int, new: int, messages: int) -> None:
        """Spends the characters of the `new` ones of a prompt's messages. The limits are far above what a
        rollout's tokens can hold."""
        self._chars += chars
        if self._chars > MAX_RECORDED_CHARS:
            raise Over("budget", f"{MAX_RECORDED_CHARS} characters of conversation")
        self._prompts += messages
        if self._prompts > MAX_PROMPTS:
            raise Over("budget", f"{MAX_PROMPTS} messages of prompts")
        self._hold(_OBJECTS_OF_A_TURN + new)

    def tool_text(self, chars: int, objects: int = 0) -> None:
        """Spends what goes on record of a tool call."""
        self._tool_chars += chars
        if self._tool_chars > MAX_TOOL_CHARS:
            raise Over("budget", f"{MAX_TOOL_CHARS} characters of tool calls")
        self._hold(objects)

    def _hold(self, objects: int) -> None:
        self._objects += objects
        if self._objects > MAX_RECORDED_OBJECTS:
            raise Over("budget", f"{MAX_RECORDED_OBJECTS} objects on record")

    def tool_call(self, calls: int) -> None:
        """Checks that one more tool call may follow after `calls`."""
        if calls >= self._plan.limits.tool_calls:
            raise Over("budget", f"{self._plan.limits.tool_calls} tool calls")

    async def begin(self, asked: Asked, prompt_tokens: int) -> int:
        """How many tokens this completion may sample. What it may use is held until `end`: where those under way
        hold what this one needs, it waits for them.

        A managed agent has its own limit of steps in each call; the other budgets bound how often it is called.
        """
        limits, most = self._plan.limits, self._plan.sampling.max_tokens
        if self._completions >= limits.completions:
            raise Over("budget", f"{limits.completions} completions")
        self._step(asked)
        if self._prompt_tokens + prompt_tokens > limits.prompt_tokens:
            raise Over("budget", f"{limits.prompt_tokens} prompt tokens")
        if self._sampled >= limits.completion_tokens:
            raise Over("budget", f"{limits.completion_tokens} sampled tokens")
        room = limits.max_token_length - prompt_tokens
        if room < 1:
            raise Over(
                "context_length", f"a prompt of {prompt_tokens} tokens for a line of {limits.max_token_length}"
            )
        self._completions += 1
        self._steps += asked.is_step
        self._prompt_tokens += prompt_tokens
        held = self._held[asked.sequence] = _Held(prompt_tokens, asked.is_step)
        while self._sampled_left < min(most, room) and any(other.sampled for other in self._held.values()):
            self._settled.clear()
            await self._settled.wait()
        if self._sampled_left < 1:
            raise Over("budget", f"{limits.completion_tokens} sampled tokens")
        held.sampled = min(most, self._sampled_left, room)
        return held.sampled

    @property
    def _sampled_left(self) -> int:
        held = sum(held.sampled for held in self._held.values())
        return self._plan.limits.completion_tokens - self._sampled - held

    def spend(self, sequence: int, completion: Completion) -> None:
        """What this completion had takes the place of what was held for it."""
        held = self._held.pop(sequence, _Held())
        self._prompt_tokens += completion.prompt_tokens - held.prompt
        self._sampled += completion.completion_tokens
        self._objects += len(completion.spans)
        self._settled.set()

    def end(self, sequence: int, *, given_up: bool) -> None:
        """This request is over. Without a completion it has spent nothing; if its client gave it up, nobody knows
        what was sampled of it, so it has spent all that was held. Idempotent."""
        held = self._held.pop(sequence, None)
        if held is None:
            return
        if given_up:
            self._sampled += held.sampled
        else:
            self._completions -= 1
            self._steps -= held.is_step
            self._prompt_tokens -= held.prompt
        self._settled.set()

    def _step(self, asked: Asked) -> None:
        agent = self._plan.agent
        if asked.kind is CompletionKind.FINAL and not agent.final_answer_at_max_steps:
            raise Over("max_steps", f"{agent.max_steps} steps")
        if asked.kind is not CompletionKind.ACTION:
            return
        if asked.agent:
            managed = next(managed for managed in agent.managed_agents if managed.name == asked.agent)
            # The prompt of a managed agent holds the steps of the present call only.
            most, taken = managed.max_steps or agent.max_steps, sum(m.role == "assistant" for m in asked.messages)
        else:
            most, taken = agent.max_steps, self._steps
        if taken >= most:
            raise Over("max_steps", f"{most} steps" + f" of {asked.agent}" * bool(asked.agent))

    def too_long(self, chars: int) -> Over:
        """The error for a prompt so long that its tokens need not be counted."""
        limit = self._plan.limits.max_token_length
        return Over("context_length", f"a prompt of {chars} characters for a line of {limit} tokens")
