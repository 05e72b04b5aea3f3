"""The model's chat template: how it is shown a conversation, and what it prints.

A template is a program that comes with the model. Some refuse a system message, some leave it out, some print it
again before each new question; some print a text only if it comes as a list of parts. How a template has to be
shown a conversation is found once, with a small one whose words have to come out in their order.
"""

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from orchestrator.calls.structured import structured
from orchestrator.completion.shape import Shape, folded, shape_of
from orchestrator.errors import RecordError
from orchestrator.types import CallFormat, Message, Tools

_TALK = (
    Message("system", "word 27183"),
    Message("user", "word 31415"),
    Message("assistant", "word 14142"),
    Message("user", "word 22360"),
)
_SYSTEM, *_LATER = (message.content.split()[1] for message in _TALK)  # templates may change letters
_NONE: frozenset[str] = frozenset()
_ALL = frozenset(("system", "user", "assistant", "tool"))
_FORMAT = re.compile(r"""(["'])([^"'\\{}]*%[^"'\\{}]*)\1""")


@dataclass(frozen=True, slots=True)
class Form:
    """How a template is shown a conversation. `parts`: the roles whose texts come as lists of parts. `folds`: a
    system message comes as the beginning of the first user message. `fault`: why no form was found."""

    parts: frozenset[str] = _NONE
    folds: bool = False
    fault: str = ""


class ChatTemplate:
    """The template of a `transformers` tokenizer, with the operator's own variables for it."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any], call_format: CallFormat | None) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self.call_format = call_format
        self.text = str(getattr(tokenizer, "chat_template", ""))  # of all templates, where it has several

    def render(
        self, messages: tuple[Message, ...], *, generation_prompt: bool, tools: Tools = (), at: float | None = None
    ) -> str:
        """What it prints. `at`: the unix time whose date (UTC) it takes for today's; None: now.

        Raises RecordError for roles in an order that it does not know.
        """
        return self._rendered(self.form, messages, generation_prompt, tools, at)

    @cached_property
    def shape(self) -> Shape:
        """Which conversations it prints whole."""
        return shape_of(self)

    @cached_property
    def form(self) -> Form:
        """Tries the forms, the plainest first."""
        faults = []
        for parts, folds in product((_NONE, _ALL, _ALL - {"assistant"}), (False, True)):
            form = Form(parts, folds)
            if not (fault := self._fault(form)):
                return form
            faults.append(fault)
        return Form(fault=faults[1])  # what is wrong with plain texts, whatever becomes of the system message

    def _fault(self, form: Form) -> str:
        try:
            text = self._rendered(form, _TALK, True, (), None)
        except RecordError as error:
            return str(error)
        places = [text.find(word) for word in (_SYSTEM, *_LATER)]
        for message, place in zip(_TALK, places, strict=True):
            if place < 0:
                return f"it prints nothing of a message of the role {message.role}"
        again = text.rfind(_SYSTEM) > places[2]
        return "it prints messages in another order" if again or places != sorted(places) else ""

    def _rendered(
        self, form: Form, messages: tuple[Message, ...], generation_prompt: bool, tools: Tools, at: float | None
    ) -> str:
        conversation = folded(messages) if form.folds else messages
        entries = structured(conversation, tools, self.call_format)
        try:
            return self._printed(form, entries, generation_prompt, tools, at)
        except Exception as error:  # the template is a program that comes with the model
            singly = structured(conversation, tools, self.call_format, one_by_one=True)
            if singly != entries:
                # Llama 3.1 writes several calls, and its template refuses them. As text they look the same.
                with contextlib.suppress(Exception):
                    return self._printed(form, singly, generation_prompt, tools, at)
            raise RecordError(f"the model's chat template refuses the conversation: {error}") from error

    def _printed(
        self, form: Form, entries: list[dict[str, Any]], generation_prompt: bool, tools: Tools, at: float | None
    ) -> str:
        for message in entries:
            if message["role"] in form.parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
        # transformers 5 returns a BatchEncoding unless told not to tokenize.
        printed = self._tokenizer.apply_chat_template(
            entries,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **({"tools": list(tools)} if tools else {}),
            **({} if at is None else self._dated(tools, at)),
            **self._variables,
        )
        return str(printed)

    def _dated(self, tools: Tools, at: float) -> dict[str, str]:
        """The template to print with, where it asks for the date: with an answer of its own, because it takes no
        function as a variable."""
        if "strftime_now" not in self.text:
            return {}
        text = self._tokenizer.get_chat_template(None, list(tools) or None)
        return {"chat_template": _with_date(text, at)}


@lru_cache(64)
def _with_date(template: str, at: float) -> str:
    now = datetime.fromtimestamp(at, UTC)
    dates = {format: now.strftime(format) for _, format in _FORMAT.findall(template)}
    entries = json.dumps(dates, ensure_ascii=False)
    return f"{{%- macro strftime_now(format) -%}}{{{{ {entries}[format] }}}}{{%- endmacro -%}}{template}"
