"""Finds out whether an endpoint really takes token ids and gives ids and log-probs back, with our tokenizer.

Text is no way out of a fault: only an endpoint that answered that it gives no ids is asked for text instead.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from orchestrator.completion.base import PROBE_HEADER, CompletionRequest, Refusal, ids_of
from orchestrator.completion.http import HttpClient, Unreadable
from orchestrator.completion.ids import Dialect, IdCompleter, WrongTokenizer
from orchestrator.completion.llamacpp import LlamaCppCompleter, LlamaCppDialect
from orchestrator.completion.retry import ForeignAnswer, Retryable
from orchestrator.completion.sglang import SglangDialect
from orchestrator.completion.startup import Startup
from orchestrator.completion.tokenizer import HubTokenizer
from orchestrator.completion.versions import Attribution, Question, vllm_version
from orchestrator.completion.vllm import VllmDialect
from orchestrator.errors import AuthenticationError, CompletionError, ContextLengthError, EnvironmentUnusable
from orchestrator.rules.policy import Policy
from orchestrator.types import Message, Sampling

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0
TOKENIZE_TIMEOUT_S = 10.0
_TEXT = "I add 12 and 30, größer als 7:\n<code>\nfor i in range(3):\n    print(12 + 30)\n</code>"


@dataclass(frozen=True, slots=True)
class IdProbe:
    """Asks one endpoint for ids. `known`: a server that takes ids, by its own word. `policy`: what a trainer
    says it serves."""

    dialect: Dialect
    client: HttpClient
    tokenizer: HubTokenizer
    startup: Startup
    known: bool
    temperature: float
    notes: list[str]
    policy: Policy

    async def ids_or_why_not(self) -> IdCompleter | str:
        """An exact completer; or why the endpoint gives no ids, in its own words.

        Raises EnvironmentUnusable for an endpoint that gives ids, but none that can be used.
        """
        address = self.client.endpoint.shown
        try:
            return await self._ids()
        except WrongTokenizer as error:
            raise EnvironmentUnusable(
                f"the tokenizer is not the endpoint's: {error}; set --env.tokenizer_name to the model's own"
            ) from error
        except AuthenticationError as error:
            raise EnvironmentUnusable(str(error)) from error
        except Refusal as error:
            if self.known:  # it takes ids, but not ours: going on with text would hide the reason
                raise EnvironmentUnusable(
                    f"the endpoint refuses our token ids ({error}); set --env.tokenizer_name to the model's "
                    "own tokenizer, or --env.token_source retokenize to do without its ids"
                ) from error
            return f"as {self.dialect.name} it answered: {error}"
        except (ForeignAnswer, ContextLengthError) as error:
            return f"as {self.dialect.name} it answered: {error}"
        except CompletionError as error:
            raise EnvironmentUnusable(
                f"what the endpoint {address} answers as {self.dialect.name} cannot be used ({error}); set "
                "--env.tokenizer_name to the model's own tokenizer, or --env.token_source retokenize to do "
                "without ids"
            ) from error

    async def _ids(self) -> IdCompleter:
        """An exact completer, probed. Raises what `IdCompleter.probe` raises, and EnvironmentUnusable."""
        if unknown := self.tokenizer.unknown_template_kwargs:
            names = ", ".join(unknown)
            raise EnvironmentUnusable(
                f"env.chat_template_kwargs: the chat template of {self.tokenizer.name} does not know {names}"
            )
        kind = LlamaCppCompleter if isinstance(self.dialect, LlamaCppDialect) else IdCompleter
        text = self.tokenizer.render((Message("user", "1+1="),), generation_prompt=True)
        prompt = ids_of(self.tokenizer.encode(text))

        async def attempt(seed: int) -> IdCompleter:
            sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=1, seed=seed)
            request = CompletionRequest((), prompt, (), sampling, "probe", "probe", 0, 0)

            async def probed(completer: IdCompleter) -> IdCompleter:
                await self.startup.sample(lambda: completer.probe(request, PROBE_TIMEOUT_S))
                return completer

            completer = kind(self.dialect, self.client, self.tokenizer, attribution=Attribution(self.policy))
            if isinstance(self.dialect, SglangDialect):
                other = SglangDialect(seeded=False)
                unseeded = IdCompleter(other, self.client, self.tokenizer, attribution=Attribution(self.policy))
                return await _seeded_if_known(completer, unseeded, probed)
            return await probed(completer)

        else_do = "" if self.known else "; for an endpoint without token ids set --openai.server_type openai"
        try:
            completer = await self.startup.answered(partial(attempt, 1), else_do)
        except Retryable:
            # A fault that passes, or a rare token, may spoil one answer: two decide. One is left for the chat.
            if self.startup.samples_left < 2:
                raise
            completer = await self.startup.answered(partial(attempt, 2), else_do)
        if isinstance(self.dialect, VllmDialect):  # from the first task on: no probe asks for it
            completer.attribution.question = Question(self.client, "/weight_info", vllm_version)
        if isinstance(completer.dialect, SglangDialect) and not completer.dialect.seeded:
            self.notes.append("this SGLang knows no sampling_seed: rollouts are not repeatable by seed")
        if isinstance(self.dialect, VllmDialect | LlamaCppDialect):
            await _compare_tokenizers(self.dialect, self.client, self.tokenizer, self.notes)
        if isinstance(self.dialect, SglangDialect) and self.temperature != 1.0:
            self.notes.append(
                "SGLang's log-probs are of the distribution at the sampling temperature "
                "unless it was started with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
            )
        return completer


async def _seeded_if_known(
    seeded: IdCompleter, unseeded: IdCompleter, probed: Callable[[IdCompleter], Awaitable[IdCompleter]]
) -> IdCompleter:
    """The first one, unless this SGLang does not know seeds. Raises what `probed` raises."""
    try:
        return await probed(seeded)
    except (Refusal, Retryable) as error:
        # Old servers answer 400 with the parameter's name, or a bare 500.
        bare = isinstance(error, Retryable) and error.status == 500
        if not bare and "sampling_seed" not in str(error):
            raise
    await probed(unseeded)
    if bare:  # or it was a fault that has passed by now
        with suppress(Refusal, Retryable, EnvironmentUnusable):  # the last one: no sample is left to find out
            return await probed(seeded)
    return unseeded


async def _compare_tokenizers(
    dialect: Dialect, client: HttpClient, tokenizer: HubTokenizer, notes: list[str]
) -> None:
    """Raises WrongTokenizer where the server's tokenizer gives other ids. No `/tokenize`: it is not checked."""
    # In the chat template, so that the special tokens' ids are compared too.
    text = tokenizer.render((Message("user", _TEXT),), generation_prompt=True)
    body = (
        {"content": text, "add_special": False, "parse_special": True}
        if isinstance(dialect, LlamaCppDialect)
        else {"model": client.endpoint.model, "prompt": text, "add_special_tokens": False}
    )
    try:
        answer = await client.post("/tokenize", body, timeout_s=TOKENIZE_TIMEOUT_S, headers=PROBE_HEADER)
        theirs = answer["tokens"]
    except AuthenticationError:
        raise
    except (Refusal, Unreadable, ContextLengthError, KeyError, TypeError) as error:
        log.debug("no /tokenize at %s: %s", client.endpoint.shown, error)
        return
    except CompletionError as error:  # it samples, so it is not loading any more
        notes.append(f"the tokenizer was not compared with that of {client.endpoint.shown}: {error}")
        return
    if isinstance(theirs, list) and theirs != tokenizer.encode(text):
        raise WrongTokenizer(f"it makes {len(theirs)} other ids of a text of ours")
