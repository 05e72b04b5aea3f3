"""A conversation in which somebody spoke before: as messages that an agent goes on with."""

from collections.abc import Callable, Iterable

from sandbox.types import Call, Message


def before(context: Iterable[Message], as_text: Callable[[Call], str] | None) -> list[Message]:
    """What was said before. `as_text`: a call as the agent writes it in its text; None: calls are data."""
    talk: list[Message] = []
    for one in context:
        if as_text is not None:
            calls = [as_text(call) for call in one.calls]
            one = Message(
                "user" if one.role == "tool" else one.role, "\n\n".join(filter(None, (one.content, *calls)))
            )
        if talk and talk[-1].role == one.role != "tool" and not (talk[-1].calls or one.calls):
            one = Message(one.role, f"{talk.pop().content}\n\n{one.content}")
        talk.append(one)
    return talk


def say(talk: list[Message], text: str) -> None:
    """The user's next words. Chat templates want the two to take turns."""
    if talk[-1].role == "user":
        text = f"{talk.pop().content}\n\n{text}"
    talk.append(Message("user", text))
