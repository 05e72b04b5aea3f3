"""A Harbor agent that knows the ids of all it samples: a shell loop over the orchestrator's completions.

`harbor run` makes the container, runs this class in its own process, and grades. The class asks vLLM, SGLang or
llama.cpp with prompts as ids: each prompt is the ids before it, as they were sent and sampled, and what the chat
template prints behind them. Harbor keeps them in result.json, in `agent_result.rollout_details`.
"""

import asyncio
import os
import re
from contextlib import aclosing

from harbor.agents.base import BaseAgent
from harbor.agents.installed.base import UnknownApiError
from harbor.agents.options import AgentOptions
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail

from orchestrator.completion.base import Completer, CompletionRequest, Endpoint
from orchestrator.completion.connect import connect
from orchestrator.completion.line import TokenLine
from orchestrator.completion.tokenizer import load_tokenizer
from orchestrator.errors import CompletionError, ContextLengthError, EnvironmentUnusable
from orchestrator.rules.plan import derive_seed
from orchestrator.types import Message, Sampling

SYSTEM = (
    "You work in a Linux container. To run a command, write it in a block that begins with ```bash and ends with "
    "```, one block at a time; you get what it prints. When the task is done, answer without a block."
)
_BLOCK = re.compile(r"^```bash\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_SHOWN_CHARS = 10_000


class Options(AgentOptions):
    """`--ak NAME=VALUE`. `endpoint`: of an inference server that takes ids. `tokenizer`: a folder or a hub id."""

    endpoint: str
    tokenizer: str
    max_steps: int = 12
    max_tokens: int = 1024
    temperature: float = 1.0
    seed: int = 0
    command_timeout_s: int = 60


class ExactIds(BaseAgent):
    """`-a exact_ids:ExactIds`."""

    options_model = Options

    @staticmethod
    def name() -> str:
        return "exact-ids"

    def version(self) -> str:
        return "0.1.0"

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing is installed in the container."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Samples and runs commands until the model writes none. What was sampled when Harbor's time limit ends it
        is in `context`. Raises UnknownApiError for what is the endpoint's fault: Harbor takes no reward for it."""
        details = RolloutDetail(prompt_token_ids=[], completion_token_ids=[], logprobs=[])
        context.rollout_details, context.n_input_tokens, context.n_output_tokens = [details], 0, 0
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, self.options.tokenizer)
            endpoint = Endpoint(self.options.endpoint, self.model_name or "", os.environ.get("OPENAI_API_KEY", ""))
            async with aclosing(await connect(endpoint, tokenizer, tokens="exact")) as completer:
                await self._work(completer, TokenLine(tokenizer, ""), instruction, environment, context, details)
        except ContextLengthError:
            pass  # the policy's own end: what it has done is graded
        except (CompletionError, EnvironmentUnusable) as error:
            raise UnknownApiError(str(error)) from error

    async def _work(
        self,
        completer: Completer,
        line: TokenLine,
        instruction: str,
        environment: BaseEnvironment,
        context: AgentContext,
        details: RolloutDetail,
    ) -> None:
        given = self.options
        seed = derive_seed(given.seed, self.session_id or "", 0, 0, 0)  # each trial has a session
        sampling = Sampling(given.temperature, 1.0, given.max_tokens, seed)
        messages = (Message("system", SYSTEM), Message("user", instruction))
        for step in range(given.max_steps):
            prompt = line.prompt(messages)
            completion = await completer.sample(
                CompletionRequest(messages, prompt.ids, (), sampling, self.session_id or "", "", 0, step)
            )
            line.append(prompt, messages, completion)
            details["prompt_token_ids"].append(list(prompt.ids))
            details["completion_token_ids"].append(list(completion.tokens_T))
            details["logprobs"].append(list(completion.logprobs_T))
            context.n_input_tokens += completion.prompt_tokens
            context.n_output_tokens += completion.completion_tokens
            if (block := _BLOCK.search(completion.visible)) is None:
                return
            seen = await self._seen(environment, block[1])
            messages = (*messages, Message("assistant", completion.visible), Message("user", seen))

    async def _seen(self, environment: BaseEnvironment, command: str) -> str:
        """What a command printed, and how it ended."""
        try:
            done = await environment.exec(command, timeout_sec=self.options.command_timeout_s)
        except RuntimeError as error:  # Harbor's word for a command that ran out of time
            return str(error)
        printed = f"{done.stdout or ''}{done.stderr or ''}"[:_SHOWN_CHARS]
        return f"{printed}\n[exit code {done.return_code}]"
