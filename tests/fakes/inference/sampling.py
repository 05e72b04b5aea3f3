"""From a scripted text to sampled ids, stopped where an inference engine stops.

The script says what the model means to say; `Awkward` says how clumsily it comes out: all the things
that real sampling does and that naive bookkeeping of tokens gets wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from tests.fakes.inference.model import Model

_LEADING = ("\n", " ", "\n\n", "  \n")
_TRAILING = ("\n", " ", "\n\n", " \n ")
Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Awkward:
    """How likely each oddity is, per completion (`split`: per token).

    split: the ids of a token's text, but not the ones a tokenizer would choose.
    leading, trailing: white space around the text (trailing: before an end token).
    beyond_stop: the token that completes a stop string goes on with line breaks.
    end_after_stop: the engine looks for stop strings too late, an end token stands behind them.
    end_inside: the model ends its turn in the middle of the text.
    other_end: the turn ends in the other end token, `<|endoftext|>`.
    cut: stopped for length in the middle of the text.
    """

    split: float = 0.0
    leading: float = 0.0
    trailing: float = 0.0
    beyond_stop: float = 0.0
    end_after_stop: float = 0.0
    end_inside: float = 0.0
    other_end: float = 0.0
    cut: float = 0.0


TIDY = Awkward()
CLUMSY = Awkward(0.3, 0.3, 0.3, 0.5, 0.1, 0.05, 0.2, 0.05)


@dataclass(frozen=True, slots=True)
class Sample:
    """What was sampled. `stopped_by`: the stop string or end id, None for length.

    `visible_bytes`: length of the text before the stop string or end token.
    """

    ids: list[int]
    finish: Finish
    stopped_by: str | int | None
    visible_bytes: int


def sample(
    model: Model,
    text: str,
    *,
    stop: Sequence[str],
    max_tokens: int,
    ignore_end: bool = False,
    open_end: bool = False,
    awkward: Awkward = TIDY,
    rng: Random,
) -> Sample:
    """Samples `text` and then the end of the turn. `open_end`: it is cut behind the text instead."""
    ids, late = _ids(model, text, tuple(s for s in stop if s), awkward, rng)
    if rng.random() < awkward.end_inside and len(ids) > 2:
        ids = ids[: rng.randrange(1, len(ids))]
    elif (rng.random() < awkward.cut and len(ids) > 2) or open_end:
        ids = ids if open_end else ids[: rng.randrange(1, len(ids))]
        return _stopped(model, ids, () if late else stop, min(max_tokens, len(ids)), ignore_end)
    ids.append(model.end_of_text_id if rng.random() < awkward.other_end else model.end_id)
    return _stopped(model, ids, () if late else stop, max_tokens, ignore_end)


def _ids(model: Model, text: str, stop: tuple[str, ...], awkward: Awkward, rng: Random) -> tuple[list[int], bool]:
    """(ids of the text, whether stop strings are to be found too late)."""
    if rng.random() < awkward.leading:
        text = rng.choice(_LEADING) + text
    closing = next((s for s in stop if text.rstrip().endswith(s)), None)
    last: list[int] = []
    late = closing is not None and rng.random() < awkward.end_after_stop
    if closing is not None and not late and rng.random() < awkward.beyond_stop:
        text, last = _overhanging(model, text.rstrip(), closing, rng)
    elif rng.random() < awkward.trailing:
        text += rng.choice(_TRAILING)
    ids: list[int] = []
    for token_id in model.encode(text):
        if token_id not in model.special and rng.random() < awkward.split:
            ids += _other_ids(model, model.pieces[token_id], rng)
        else:
            ids.append(token_id)
    return ids + last, late


def _overhanging(model: Model, text: str, stop: str, rng: Random) -> tuple[str, list[int]]:
    """(`text` without its end, one token that has this end and line breaks)."""
    found = [
        (size, model.ids[piece])
        for size in range(1, len(stop) + 1)
        for breaks in ("\n", "\n\n")
        if (piece := (stop[-size:] + breaks).encode()) in model.ids
    ]
    if not found:
        return text, []
    size, token_id = rng.choice(found)
    return text[:-size], [token_id]


def _other_ids(model: Model, piece: bytes, rng: Random) -> list[int]:
    """Ids of the same bytes, cut at places of chance: also within a character."""
    if len(piece) < 2:
        return [model.ids[piece]]
    at = rng.randrange(1, len(piece))
    ids = []
    for part in (piece[:at], piece[at:]):
        ids += [model.ids[part]] if part in model.ids else _other_ids(model, part, rng)
    return ids


def _stopped(model: Model, ids: Sequence[int], stop: Sequence[str], max_tokens: int, ignore_end: bool) -> Sample:
    """Goes through the ids as an engine does, one at a time, and ends where it would."""
    stops = [s.encode() for s in stop if s]
    reach = max((len(s) for s in stops), default=0)
    text = b""
    for count, token_id in enumerate(ids, 1):
        if token_id in model.ends and not ignore_end:
            return Sample(list(ids[:count]), "stop", token_id, len(text))
        start = max(0, len(text) - reach + 1)
        text += model.pieces[token_id]
        found = [(at, s) for s in stops if (at := text.find(s, start)) >= 0]
        if found:
            at, string = min(found)
            return Sample(list(ids[:count]), "stop", string.decode(), at)
        if count >= max_tokens:
            return Sample(list(ids[:count]), "length", None, len(text))
    return Sample(list(ids), "length", None, len(text))
