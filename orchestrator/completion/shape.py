"""Which conversations a chat template prints whole, and how others are brought into a form that it prints.

A template is a program that comes with the model. Some refuse a system message that is not the first, neighbours
of one role or results of tools; some leave them out without a word. So each is tried once, with words that have to
be in what is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from orchestrator.calls.formats import written
from orchestrator.calls.structured import calls_in
from orchestrator.errors import RecordError
from orchestrator.types import Call, CallFormat, Message, Role, Tools

CALL = Call("", "word_63914", '{"which": "word 17320"}')  # of a tool that no template knows
NAMED: tuple[Role, ...] = (
    "system",
    "user",
)  # a model's own turns begin as it was prompted, results name their tool
TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": CALL.name,
            "description": "Gives a word.",
            "parameters": {"type": "object", "properties": {"which": {"type": "string"}}, "required": []},
        },
    },
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a template prints as it is."""

    late_system: bool  # a system message behind others
    neighbours: bool  # two messages of one role
    results: bool  # messages of the role `tool` behind calls
    bare_results: bool  # behind other messages too
    tools: bool  # the tools that there are
    tools_again: bool = False  # and once more before a later question
    names: frozenset[Role] = frozenset()  # of who speaks, in messages of these roles

    def fit(
        self, messages: Sequence[Message], tools: Tools = (), format: CallFormat | None = None
    ) -> tuple[Message, ...]:
        """The conversation with as little changed as the template needs: late system messages and results become
        the user's, neighbours are joined by an empty line. `tools`, `format`: by which calls are known."""
        fitted: list[tuple[Role, str, list[str]]] = []
        called = False
        for place, message in enumerate(messages):
            role: Role = message.role
            if role != "tool":
                called = not self.bare_results and calls_in(messages, place, tools, format) is not None
            printed = self.results and (called or self.bare_results)
            if (role == "system" and place and not self.late_system) or (role == "tool" and not printed):
                role = "user"
            name = message.name if role == message.role else ""
            if fitted and fitted[-1][0] == role and role != "tool" and not self.neighbours:
                _, before, contents = fitted[-1]
                fitted[-1] = (role, name if name == before else "", [*contents, message.content])
            else:
                fitted.append((role, name, [message.content]))
        return tuple(Message(role, "\n\n".join(contents), name=name) for role, name, contents in fitted)


def folded(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation with its first system message at the beginning of the user message behind it."""
    if not messages or messages[0].role != "system":
        return messages
    first, *rest = messages
    if rest and rest[0].role == "user":
        return (replace(rest[0], content=f"{first.content}\n\n{rest[0].content}"), *rest[1:])
    return (Message("user", first.content), *rest)


class Printer(Protocol):
    """A chat template, or a tokenizer that has one."""

    @property
    def call_format(self) -> CallFormat | None: ...

    def render(self, messages: tuple[Message, ...], *, generation_prompt: bool, tools: Tools = ()) -> str: ...


def implied_system(template: Printer) -> str:
    """The system message that a template prints for a conversation without one; empty: it prints nothing."""
    user, word = Message("user", "word 31415"), "word 27183"
    try:
        with_system = template.render((Message("system", word), user), generation_prompt=False)
        untold = template.render((user,), generation_prompt=False)
    except RecordError:
        return ""
    before, _, behind = with_system.partition(word)
    implied = len(untold) > len(before) + len(behind) and untold.startswith(before) and untold.endswith(behind)
    return untold[len(before) : len(untold) - len(behind)] if implied else ""


def tools_text(template: Printer, tools: Tools) -> str:
    """What the template prints of the tools before a first question. Raises RecordError."""
    question = (Message("user", "31415"),)
    with_tools = template.render(question, generation_prompt=True, tools=tools)
    bare = template.render(question, generation_prompt=True)
    start = next(
        (at for at, (one, other) in enumerate(zip(with_tools, bare, strict=False)) if one != other), len(bare)
    )
    return with_tools[start : start + len(with_tools) - len(bare)]


def shape_of(template: Printer) -> Shape:
    """Tries a chat template."""

    def prints(*messages: tuple[Role, str], tools: Tools = ()) -> bool:
        talk = tuple(Message(role, text) for role, text in messages)
        try:
            text = template.render(talk, generation_prompt=True, tools=tools)
        except RecordError:
            return False
        named = tools and CALL.name not in text
        return not named and all(message.content in text for message in talk)

    def prints_results(talk: tuple[tuple[Role, str], ...]) -> bool:
        if template.call_format is None:
            return False
        call = written("", (CALL,), template.call_format)
        messages = (*(Message(*one) for one in talk), Message("assistant", call), Message("tool", "word 24494"))
        try:
            return "word 24494" in template.render(messages, generation_prompt=True, tools=TOOLS)
        except RecordError:
            return False

    def prints_again() -> bool:
        talk = (Message("user", "31415"), Message("assistant", "14142"), Message("user", "17320"))
        try:
            text = template.render(talk, generation_prompt=True, tools=TOOLS)
        except RecordError:
            return False
        return CALL.name in text.rpartition("14142")[2]

    def prints_name(role: Role) -> bool:
        named = Message(role, "word 31415", name="word_27183")
        talk = (named,) if role == "user" else (named, Message("user", "word 14142"))
        try:
            text = template.render(talk, generation_prompt=True)
        except RecordError:
            return False
        return all(message.name in text and message.content in text for message in talk)

    first: tuple[tuple[Role, str], ...] = (("system", "word 27183"), ("user", "word 31415"))
    if not prints(*first):
        first = first[1:]  # it takes no system message, and may take all others
    bare_results = prints(*first, ("assistant", "word 14142"), ("tool", "word 17320"))
    return Shape(
        late_system=prints(*first, ("assistant", "word 14142"), ("system", "word 17320"), ("user", "word 22360")),
        neighbours=prints(
            *first, ("user", "word 14142"), ("assistant", "word 17320"), ("assistant", "word 22360")
        ),
        results=bare_results or prints_results(first),
        bare_results=bare_results,
        tools=prints(*first, tools=TOOLS),
        tools_again=prints_again(),
        names=frozenset(role for role in NAMED if prints_name(role)),
    )
