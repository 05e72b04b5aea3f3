"""The chat dialect: `/chat/completions` of any OpenAI-compatible endpoint.

Text in, text out. Ids and log-probs are recorded where the endpoint gives them (vLLM's
`return_token_ids`, llama.cpp's `id` in log-prob entries), but a chat prompt is rendered anew by the
server each turn, so the data made from it are `retokenized`.

`parameters` says how requests look, `chat_answer` how answers are read. What an endpoint does not take is learned
from neutral requests: by the probe at the start, and behind the first refusal of each kind of request.
"""

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from orchestrator.completion.base import (
    LONG_CHARS,
    PROBE_HEADER,
    CompletionRequest,
    Refusal,
    UnusableSample,
    fitted,
    refitted,
)
from orchestrator.completion.chat_answer import completion_of
from orchestrator.completion.finish import FinishReasons
from orchestrator.completion.http import HttpClient
from orchestrator.completion.parameters import (
    EXTRAS,
    NEUTRAL_TOOL,
    NO_ROOM,
    Kind,
    RequestForm,
    kind_of,
    neutral,
    refuses_tools,
)
from orchestrator.completion.retry import NONSENSE, Limiter, Retryable, RetryPolicy, with_retries
from orchestrator.completion.startup import Startup
from orchestrator.completion.versions import Attribution
from orchestrator.errors import (
    CompletionError,
    ContextLengthError,
    EnvironmentUnusable,
    ParameterError,
)
from orchestrator.rules.control import CACHE_S
from orchestrator.rules.policy import Policy
from orchestrator.rules.waits import aside_if
from orchestrator.types import Completion, Message, Sampling, Wishes

log = logging.getLogger(__name__)

PROBES = 2
PROBE_TIMEOUT_S = 60.0
CONTROL_TOKENS = 16
MAX_BODY_BYTES = 32 << 20
LONG_TALK = 100  # messages
_PLAIN = kind_of(Wishes())
_TEMPLATE = re.compile(r"template|jinja|raise_exception|\broles?\b", re.IGNORECASE)
_REFUSING = (500, 501)  # besides 4xx: with these some servers refuse a parameter or a role


def trial(sampling: Sampling, *, stop: tuple[str, ...] = (), tools: bool = False) -> CompletionRequest:
    """A request with the parameters that a run will send: the probe asks for one token of it."""
    talk = (Message("system", "Be brief."), Message("user", "1+1="))
    wishes = Wishes(NEUTRAL_TOOL if tools else ())
    return CompletionRequest(talk, None, stop, sampling, "probe", "probe", 0, 0, wishes=wishes)


class ChatCompleter:
    """Chat completions of one endpoint."""

    takes_ids = False
    guides = True  # the endpoint does, or refuses
    context_length: int | None = None  # most tokens of prompt and completion together; None: not known

    def __init__(
        self,
        client: HttpClient,
        retry: RetryPolicy | None = None,
        attribution: Attribution | None = None,
        *,
        why: str = "",
        strict: bool = True,
    ) -> None:
        """`why`: the reason for asking for text. `strict`: an endpoint that does not take the temperature or top_p
        that is asked for cannot be used; else it samples at its own."""
        self._attribution = attribution or Attribution(Policy())
        self.endpoint = client.endpoint
        self.why = why
        self._client = client
        self._retry = retry or RetryPolicy()
        self._strict = strict
        self._limiter = Limiter()
        self._reasons = FinishReasons(self.endpoint.shown)
        self._kinds: dict[Kind, RequestForm] = {}
        self._served: set[Kind] = set()
        self._controlled: dict[Kind, float] = {}  # loop time of the last control that changed nothing
        self._learning = asyncio.Lock()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sampling parameters that this endpoint does not know and does not get, whatever is asked for."""
        return tuple(sorted(self._form(_PLAIN).left_out))

    async def aclose(self) -> None:
        await self._client.aclose()

    async def probe(
        self,
        startup: Startup,
        requests: int = PROBES,
        *,
        like: CompletionRequest | None = None,
        needs_tools: bool = False,
        notes: list[str] | None = None,
    ) -> None:
        """Raises EnvironmentUnusable unless the endpoint takes the key, knows the model and serves.

        Asks for at most `requests` completions of one token each, those not counted that `startup` asks for again.
        `like`: what the run will send; what of it is refused is left out from then on. `needs_tools`: the run
        cannot do without tools; where it can, `notes` get a word of it.
        """
        url = self.endpoint.shown
        request = neutral(like or trial(Sampling(1.0, 1.0, 1, 1)), 1)
        form = self._form(_PLAIN)
        for left in reversed(range(requests)):
            try:
                await startup.answered(partial(startup.sample, partial(self._probed, request, form)))
                break
            except UnusableSample as error:  # a model that thinks first gives no text in one token
                log.debug("the probe of %s: %s", url, error)
                break
            except Refusal as error:
                try:
                    changed = self._after(form, error, request)
                except ParameterError as refused:
                    raise EnvironmentUnusable(str(refused)) from error
                if changed is None and request.wishes.tools and refuses_tools(error.words):
                    text = f"the endpoint {url} refuses tools: {error}"
                    if needs_tools:
                        raise EnvironmentUnusable(
                            f"{text}; start it with a parser of calls (vLLM: --enable-auto-tool-choice "
                            "--tool-call-parser NAME), or set --env.tool_call_format json (a shell agent: fenced)"
                        ) from error
                    if notes is not None:
                        notes.append(f"{text}; a program's requests with tools will be refused")
                    request = replace(request, wishes=Wishes())
                elif changed is None and not self._may_be_extras(error, form):
                    raise EnvironmentUnusable(f"the endpoint {url} refuses completions: {error}") from error
                else:
                    form = (changed or form).without_extras()
            except Retryable as error:
                if left == 0:
                    raise EnvironmentUnusable(f"the endpoint {url} does not serve: {error}") from error
            except (CompletionError, ContextLengthError) as error:
                raise EnvironmentUnusable(f"the endpoint {url} refuses completions: {error}") from error
        self._learn(_PLAIN, form)

    async def _probed(self, request: CompletionRequest, form: RequestForm) -> Completion:
        try:
            return await self._call(request, form, PROBE_TIMEOUT_S, PROBE_HEADER)
        except Retryable as error:
            if error.status in _REFUSING and (
                self._after(form, error, request) is not None
                or (request.wishes.tools and refuses_tools(error.words))
            ):
                raise Refusal(str(error), error.status or 500, error.words) from error
            raise

    async def sample(self, request: CompletionRequest) -> Completion:
        attempt = fitted(request, self.context_length)
        kind, first = kind_of(request.wishes), attempt

        async def call() -> Completion:
            nonlocal attempt
            while True:
                form = self._form(kind)
                try:
                    completion = await self._call(attempt, form, self.endpoint.timeout_s)
                except ContextLengthError as error:
                    smaller = refitted(attempt, error)
                    if smaller is None or attempt is not first:
                        raise
                    attempt = smaller
                except (Refusal, Retryable) as error:
                    # Each time something more is left out, so the loop ends.
                    if not await self._learned(error, attempt, form):
                        raise
                else:
                    self._served.add(kind)
                    return completion

        completion, retries = await with_retries(call, self._retry, self.endpoint.timeout_s, self._limiter)
        return replace(completion, retries=retries) if retries else completion

    def _form(self, kind: Kind) -> RequestForm:
        return self._kinds.get(_PLAIN, RequestForm()).beside(self._kinds.get(kind, RequestForm()))

    def _learn(self, kind: Kind, form: RequestForm) -> None:
        """Requests of this kind look so from now on."""
        before, self._kinds[kind] = self._form(kind), form
        if names := sorted(form.left_out - before.left_out):
            log.warning("%s does not know %s: left out", self.endpoint.shown, ", ".join(names))
        if form.most_stops not in (None, before.most_stops):
            log.warning(
                "%s takes %d stop strings: the orchestrator cuts at the others, and the text behind them is "
                "sampled for nothing",
                self.endpoint.shown, form.most_stops,
            )  # fmt: skip
        if form.folds_system and not before.folds_system:
            log.warning(
                "%s takes no system message: it is sent as the beginning of the user's first", self.endpoint.shown
            )

    async def _learned(self, error: Refusal | Retryable, request: CompletionRequest, form: RequestForm) -> bool:
        """Whether requests like this one look otherwise by now, behind a refusal of it.

        A refusal may quote what the model, or code of it, wrote on purpose. So a neutral request of the same kind
        is sent with the same parameters, and only its refusals count.
        """
        kind = kind_of(request.wishes)
        if self._form(kind) != form:
            return True
        if error.status not in _REFUSING and (isinstance(error, Retryable) or error.moved):
            return False
        try:
            names_parameter = await aside_if(_is_long(request), self._after, form, error, request) is not None
        except ParameterError:
            names_parameter = True
        blind = self._may_be_extras(error, form) or _may_be_template(error, form, request)
        if not names_parameter and (kind in self._served or not blind):
            return False
        async with self._learning:
            if self._form(kind) != form:
                return True
            now = asyncio.get_running_loop().time()
            if now - self._controlled.get(kind, -CACHE_S) < CACHE_S:
                return False
            served_form = await self._served_form(form, neutral(request, CONTROL_TOKENS))
            if served_form is None or served_form == form:
                self._controlled[kind] = now
                return False
            self._learn(kind, served_form)
            return True

    async def _served_form(self, form: RequestForm, request: CompletionRequest) -> RequestForm | None:
        """How a neutral request has to look to be served; None: that is not to be found out. Raises
        ParameterError."""
        folds = False  # by a guess
        while (error := await self._refusal(form, request)) is not None:
            if not isinstance(error, Refusal | Retryable) or (
                isinstance(error, Retryable) and error.status not in _REFUSING
            ):
                return None
            changed = self._after(form, error, request)
            if changed is None and self._may_be_extras(error, form):
                changed = form.without_extras()
            elif changed is None and _may_be_template(error, form, request):
                folds, changed = True, replace(form, folds_system=True)  # its template may refuse the role
            if changed is None:
                return None
            form = changed
        plain = replace(form, folds_system=False)
        # What was refused may have passed by the next request.
        return plain if folds and await self._refusal(plain, request) is None else form

    async def _refusal(
        self, form: RequestForm, request: CompletionRequest
    ) -> CompletionError | ContextLengthError | None:
        """Why a request that looks so is not served; None: it is."""
        try:
            await self._call(request, form, PROBE_TIMEOUT_S)
        except UnusableSample:
            return None
        except (CompletionError, ContextLengthError) as error:
            return error
        return None

    def _after(
        self, form: RequestForm, error: Refusal | Retryable, request: CompletionRequest
    ) -> RequestForm | None:
        """How the request is to look after this refusal; None: that makes no difference. Raises ParameterError."""
        extras = self.endpoint.chat_extras
        changed = form.after(error.words, request, strict=self._strict, extras=extras)
        return None if changed == form else changed

    def _may_be_extras(self, error: Refusal | Retryable, form: RequestForm) -> bool:
        """Whether a refusal that names nothing may be of the parameters that are not OpenAI's."""
        return isinstance(error, Refusal) and error.of_text and not form.left_out >= EXTRAS.keys()

    async def _call(
        self,
        request: CompletionRequest,
        form: RequestForm,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Completion:
        before = await self._attribution.before()
        model = before.served.model or self.endpoint.model
        try:
            answer = await self._client.post(
                f"{self._client.openai}/chat/completions",
                await aside_if(_is_long(request), form.body, request, model, self.endpoint),
                timeout_s=timeout_s,
                headers=headers,
                max_bytes=MAX_BODY_BYTES,
            )
        except Refusal as error:
            if NO_ROOM.search(error.words):
                raise UnusableSample("a sample that is all reasoning", _thought(request)) from error
            raise self._attribution.refused(before, error) from error
        try:
            completion, fault = completion_of(answer, request, self._reasons, self._client.quote)
            count = completion.sampled_tokens
            spans = await self._attribution.spans(before, count, (), completion.policy_version)
        except NONSENSE as error:
            said = self._client.quote(answer)
            raise Retryable(f"not a chat completion ({type(error).__name__}): {said}") from error
        completion = completion.sampled_from(spans)
        if fault:  # no retry: an endpoint may not know seeds, and a retry would then give another sample
            raise UnusableSample(fault, completion)
        return completion


def _may_be_template(error: Refusal | Retryable, form: RequestForm, request: CompletionRequest) -> bool:
    """Whether the server's chat template may have refused the system message, in whatever words. A 500 has to name
    the template: it may pass."""
    named = (isinstance(error, Refusal) and error.of_text) or _TEMPLATE.search(error.words) is not None
    return named and form.may_fold(request)


def _thought(request: CompletionRequest) -> Completion:
    """A sample of which the service tells nothing but that it is full."""
    most = request.sampling.max_tokens
    return Completion("", "", "length", None, None, prompt_tokens=0, completion_tokens=most)


def _is_long(request: CompletionRequest) -> bool:
    """Whether reading the calls in its messages takes milliseconds."""
    messages = request.messages
    return len(messages) > LONG_TALK or sum(len(message.content) for message in messages) > LONG_CHARS
