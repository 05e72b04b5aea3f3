"""What one rollout may still spend: bytes, CPU time, completions, tokens, steps, tool calls, recorded text."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from orchestrator.proxy.requests import AgentRequest
from orchestrator.types import Completion, CompletionKind, RolloutPlan

MAX_RECORDED_CHARS = 8 << 20  # of conversations
MAX_TOOL_CHARS = 16 << 20  # of all tool calls: arguments and results
# What `run/lines` reads is more: objects and arrays of a rollout's line, messages of all its prompts together.
MAX_RECORDED_OBJECTS = 800_000
MAX_PROMPTS = 3_000_000
_OBJECTS_OF_A_TURN = 8


class LimitReached(Exception):
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
    """The limits of one plan. Each check raises `LimitReached` before anything is spent."""

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
        self._streamed = 0
        self._chars = 0  # of all conversations so far; text shared by several counts once
        self._tool_chars = 0
        self._objects = self._prompts = 0

    def carry(self, size: int) -> None:
        """Spends bytes that pass between sandbox and orchestrator."""
        limit = self._plan.limits.proxy_bytes
        if self._bytes + size > limit:
            raise LimitReached("budget", f"{limit} bytes over the proxy")
        self._bytes += size

    def relay(self, size: int) -> None:
        """Spends bytes of the sandbox's streams, either way."""
        limit = self._plan.limits.stream_bytes
        if self._streamed + size > limit:
            raise LimitReached("budget", f"{limit} bytes through its streams")
        self._streamed += size

    async def check_cpu(self) -> None:
        """Checks the CPU time used so far. What is used later is bounded by the rollout's own clock."""
        limit = self._plan.limits.cpu_s
        if limit is None or self._cpu_s is None:
            return
        used_s = await self._cpu_s()
        if used_s is not None and used_s > limit:
            raise LimitReached("budget", f"{limit:g} cpu seconds")

    def text(self, chars: int, new: int, messages: int) -> None:
        """Spends the characters of the `new` ones of a prompt's messages. The limits are far above what a
        rollout's tokens can hold."""
        self._chars += chars
        if self._chars > MAX_RECORDED_CHARS:
            raise LimitReached("budget", f"{MAX_RECORDED_CHARS} characters of conversation")
        self._prompts += messages
        if self._prompts > MAX_PROMPTS:
            raise LimitReached("budget", f"{MAX_PROMPTS} messages of prompts")
        self._hold(_OBJECTS_OF_A_TURN + new)

    def tool_text(self, chars: int, objects: int = 0) -> None:
        """Spends what goes on record of a tool call."""
        self._tool_chars += chars
        if self._tool_chars > MAX_TOOL_CHARS:
            raise LimitReached("budget", f"{MAX_TOOL_CHARS} characters of tool calls")
        self._hold(objects)

    def _hold(self, objects: int) -> None:
        self._objects += objects
        if self._objects > MAX_RECORDED_OBJECTS:
            raise LimitReached("budget", f"{MAX_RECORDED_OBJECTS} objects on record")

    def tool_call(self, calls: int) -> None:
        """Checks that one more tool call may follow after `calls`."""
        if calls >= self._plan.limits.tool_calls:
            raise LimitReached("budget", f"{self._plan.limits.tool_calls} tool calls")

    async def begin(self, ask: AgentRequest, prompt_tokens: int) -> int:
        """How many tokens this completion may sample. What it may use is held until `end`: where those under way
        hold what this one needs, it waits for them.

        A managed agent has its own limit of steps in each call; the other budgets bound how often it is called.
        """
        limits, most = self._plan.limits, self._plan.sampling.max_tokens
        if self._completions >= limits.completions:
            raise LimitReached("budget", f"{limits.completions} completions")
        self._step(ask)
        if self._prompt_tokens + prompt_tokens > limits.prompt_tokens:
            raise LimitReached("budget", f"{limits.prompt_tokens} prompt tokens")
        if self._sampled >= limits.completion_tokens:
            raise LimitReached("budget", f"{limits.completion_tokens} sampled tokens")
        room = limits.max_token_length - prompt_tokens
        if room < 1:
            raise LimitReached(
                "context_length", f"a prompt of {prompt_tokens} tokens for a line of {limits.max_token_length}"
            )
        self._completions += 1
        self._steps += ask.is_step
        self._prompt_tokens += prompt_tokens
        share = self._held[ask.sequence] = _Held(prompt_tokens, ask.is_step)
        while self._sampled_left < min(most, room) and any(other.sampled for other in self._held.values()):
            self._settled.clear()
            await self._settled.wait()
        if self._sampled_left < 1:
            raise LimitReached("budget", f"{limits.completion_tokens} sampled tokens")
        share.sampled = min(most, self._sampled_left, room)
        return share.sampled

    @property
    def _sampled_left(self) -> int:
        share = sum(share.sampled for share in self._held.values())
        return self._plan.limits.completion_tokens - self._sampled - share

    def spend(self, sequence: int, completion: Completion) -> None:
        """What this completion had takes the place of what was held for it."""
        share = self._held.pop(sequence, _Held())
        self._prompt_tokens += completion.prompt_tokens - share.prompt
        self._sampled += completion.completion_tokens
        self._objects += len(completion.spans)
        self._settled.set()

    def end(self, sequence: int, *, given_up: bool) -> None:
        """This request is over. Without a completion it has spent nothing; if its client gave it up, nobody knows
        what was sampled of it, so it has spent all that was held. Idempotent."""
        share = self._held.pop(sequence, None)
        if share is None:
            return
        if given_up:
            self._sampled += share.sampled
        else:
            self._completions -= 1
            self._steps -= share.is_step
            self._prompt_tokens -= share.prompt
        self._settled.set()

    def _step(self, ask: AgentRequest) -> None:
        agent = self._plan.agent
        if ask.kind is CompletionKind.FINAL and not agent.final_answer_at_max_steps:
            raise LimitReached("max_steps", f"{agent.max_steps} steps")
        if ask.kind is not CompletionKind.ACTION:
            return
        if ask.agent:
            managed = next(managed for managed in agent.managed_agents if managed.name == ask.agent)
            # The prompt of a managed agent holds the steps of the present call only.
            most, steps = managed.max_steps or agent.max_steps, sum(m.role == "assistant" for m in ask.messages)
        else:
            most, steps = agent.max_steps, self._steps
        if steps >= most:
            raise LimitReached("max_steps", f"{most} steps" + f" of {ask.agent}" * bool(ask.agent))

    def next_step(self) -> None:
        """Another instruction, with action steps of its own."""
        self._steps = 0

    def too_long(self, chars: int) -> LimitReached:
        """The error for a prompt so long that its tokens need not be counted."""
        limit = self._plan.limits.max_token_length
        return LimitReached("context_length", f"a prompt of {chars} characters for a line of {limit} tokens")
