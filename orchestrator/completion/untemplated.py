"""The trajectory of a conversation that the model's chat template refuses: its texts without the template. Pure.

A model may say what its template refuses to print (a turn of the end token alone, where empty turns are refused).
The rollout is scored all the same, so that such a turn earns no second draw. What it sampled is trained.
"""

from __future__ import annotations

from orchestrator.completion.base import Tokenizer, content_ids
from orchestrator.types import Message, Trajectory, Turn, shared

NOTE = "the model's chat template refuses the conversation: its ids are those of its texts alone"
PLAIN = (Message("user", "What is 1 + 1?"), Message("assistant", "2"))


def demand_plain(tokenizer: Tokenizer) -> None:
    """The control: raises RecordError where the template refuses a plain conversation too."""
    tokenizer.render(PLAIN, generation_prompt=False)


def untemplated(
    pairs: list[tuple[Turn, tuple[Message, ...]]], messages: tuple[Message, ...], tokenizer: Tokenizer
) -> Trajectory:
    """`pairs`: the line's turns, each with its conversation. `messages`: the trajectory's messages.

    Each turn gives the messages that the turn before did not have, then its sampled text, which alone is trained.
    Raises RecordError.
    """
    tokens: list[int] = []
    trained: list[bool] = []
    asked: tuple[Message, ...] = ()
    said = ""
    for turn, talk in pairs:
        new = [message.content for message in talk[shared(asked, talk) :]]
        if said and new:
            new[0] = new[0].removeprefix(said)  # the agent sends back the completion it got
        asked, said = talk, turn.completion.visible
        for text, learn in (*((text, False) for text in new), (turn.completion.reasoning + said, True)):
            ids = content_ids(tokenizer, text)
            tokens += ids
            trained += [learn] * len(ids)
    return Trajectory(tuple(tokens), tuple(trained), None, messages, "retokenized", note=NOTE)
