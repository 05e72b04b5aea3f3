"""What the endpoint is asked for one rollout: which requests it gets, in which form, and within which cost."""

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from operator import attrgetter

from orchestrator.calls.declared import arguments_schema
from orchestrator.calls.formats import guidable
from orchestrator.completion.base import Completer, CompletionRequest, UnusableSample, stop_strings
from orchestrator.errors import ProtocolError
from orchestrator.proxy.requests import AgentRequest, CallMessage, Refusal, RequestRefused
from orchestrator.proxy.turns import ReadyPrompt
from orchestrator.rules.cost_limit import CostLimit
from orchestrator.types import CallFormat, Completion, CompletionKind, RolloutPlan, Wishes


@dataclass(frozen=True, slots=True)
class ReadyRequest:
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


class Sampler:
    """Asks for the completions of one plan's agent. `call_format`: how the model writes calls."""

    def __init__(
        self,
        plan: RolloutPlan,
        completer: Completer,
        call_format: CallFormat | None,
        cost_limit: CostLimit | None,
    ) -> None:
        self._plan = plan
        self._program = plan.agent.kind == "program"
        self._completer = completer
        self._call_format = call_format
        self._cost_limit = cost_limit

    def demand_of_agent(self, ask: AgentRequest) -> None:
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

    def demand_guidance(self, wishes: Wishes) -> None:
        """Raises RequestRefused unless the endpoint keeps to the form that is asked for."""
        form = "text" if wishes.demands else wishes.response_format.get("type", "text")
        if form != "text" and not self._completer.guides:
            text = f"this endpoint cannot keep to a {form}: describe the form in the prompt, and check the text"
            raise RequestRefused(Refusal(text, "response_format"))
        if wishes.logprobs and not self._completer.takes_ids:
            raise RequestRefused(Refusal("this endpoint gives no log-probs of its tokens", "logprobs"))

    def request(self, ask: AgentRequest, prompt: ReadyPrompt, most_tokens: int) -> CompletionRequest:
        """What the endpoint is asked for, with at most so many tokens."""
        plan = self._plan
        return CompletionRequest(
            messages=prompt.messages,
            prompt_ids=prompt.line.ids if prompt.line else None,
            stop=self._stop(ask),
            sampling=replace(plan.sampling, max_tokens=most_tokens, seed=plan.sampling.seed + ask.sequence),
            rollout_id=plan.rollout_id,
            task_id=plan.task.task_id,
            index=plan.index,
            sequence=ask.sequence,
            split=plan.split,
            wishes=self._held_to_schema(ask.wishes),
            call_format=self._call_format if self._program or ask.wishes.tools else None,
            prompt_tokens=prompt.tokens,
        )

    def _stop(self, ask: AgentRequest) -> tuple[str, ...]:
        """The stop strings of the agent that asks."""
        agent = self._plan.agent
        kind = agent.kind_of(ask.agent)
        if self._program:
            return ask.stop
        if ask.wishes.tools or kind == "shell":
            return ()  # calls end with the turn, and their arguments may hold any text: nothing stops them before
        return stop_strings(ask.kind, agent.code_tags if kind == "code" else None)

    def _held_to_schema(self, wishes: Wishes) -> Wishes:
        """What an endpoint that takes ids is asked for: of a demanded call, which the prompt begins, the arguments
        by their schema. The form that was asked for is of answers without calls."""
        if not self._completer.takes_ids or not wishes.demands:
            return wishes
        schema = arguments_schema(wishes.demanded)
        if schema is None or not self._completer.guides or not guidable(self._call_format):
            return replace(wishes, response_format={})
        form = {"type": "json_schema", "json_schema": {"name": "arguments", "schema": schema}}
        return replace(wishes, response_format=form)

    async def sample(self, ready: ReadyRequest, given_up: Collection[int]) -> Completion:
        """`given_up`: numbers of requests that nobody waits for. Raises CostReached, and what the completer
        does."""
        request = ready.request
        if self._cost_limit is None:
            return await self._completer.sample(request)
        most = ready.most_prompt_tokens
        async with self._cost_limit.hold(self._plan.rollout_id, most, request.sampling.max_tokens) as settle:
            try:
                completion = await self._completer.sample(request)
            except UnusableSample as error:
                settle(error.completion.prompt_tokens, error.completion.completion_tokens)
                raise
            except asyncio.CancelledError:
                if request.sequence in given_up:  # nobody knows what it cost: all that it could
                    settle(most, request.sampling.max_tokens)
                raise
            settle(completion.prompt_tokens, completion.completion_tokens)
            return completion
