"""Which part of a sampled text is the model's reasoning: kept on record, trained on, and never given to the agent.

Code in reasoning is not an action, so the agent must not run it.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tags:
    """Around reasoning. `closes`: what ends it, the surest first. `answer`: the header of an answer behind it."""

    opens: str
    closes: tuple[str, ...]
    answer: str = ""


_THINK = Tags("<think>", ("</think>",))  # of Qwen, DeepSeek, GLM and most others
_FINAL, _ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
_COMMENTARY, _TURN = "<|channel|>commentary<|message|>", "<|start|>assistant"
_HARMONY = (_FINAL, "<|end|>")  # a call may follow a thought, and no answer
TAGS = (
    _THINK,
    Tags("<thinking>", ("</thinking>",)),
    Tags("<thought>", ("</thought>",)),  # EXAONE Deep
    Tags("<reasoning>", ("</reasoning>",)),
    Tags("<seed:think>", ("</seed:think>",)),  # Seed-OSS
    Tags("<longcat_think>", ("</longcat_think>",)),  # LongCat
    Tags("[THINK]", ("[/THINK]",)),  # Magistral
    Tags("◁think▷", ("◁/think▷",)),  # Kimi
    Tags("<|channel>thought", ("<channel|>",)),  # Gemma 4
    Tags("<unused94>thought", ("<unused95>",)),  # MedGemma
    Tags("<|inner_prefix|>", ("<|inner_suffix|>",)),  # Apertus
    Tags("<|START_THINKING|>", ("<|END_THINKING|>",), "<|START_RESPONSE|>"),  # Cohere
    Tags("<|begin_of_thought|>", ("<|end_of_thought|>",), "<|begin_of_solution|>"),  # OpenThinker
    Tags("<|think|>", ("<|end|><|begin|>assistant<|content|>", "<|end|>")),  # Solar
    Tags(_ANALYSIS, _HARMONY, _TURN + _FINAL),  # gpt-oss
)
_HEADERS = (_FINAL, *(tags.answer for tags in TAGS if tags.answer))  # agents get no part of them
LONGEST_TAG = max(len(tags.opens) for tags in TAGS)
_EMPTY = re.compile("|".join(rf"{re.escape(t.opens)}\s*{re.escape(t.closes[0])}\s*$" for t in TAGS))
_OPENINGS = tuple(tags.opens for tags in TAGS)
_PLAIN = (_COMMENTARY, *_HEADERS, *_OPENINGS)
_BEGINNINGS = (*_PLAIN, *(_TURN + text for text in _PLAIN))
_QUOTES = "'\"`"
_SPACE = re.compile(r"\s*")


def opened_by(prompt: str) -> str:
    """The tag that a prompt ends with, where the chat template itself opens the reasoning; else an empty text."""
    end = prompt[-2 * LONGEST_TAG :].rstrip()
    if not end.endswith(_OPENINGS):
        return ""
    return next(opens for opens in _OPENINGS if end.endswith(opens))


def reasoning_chars(text: str, opened: str | None = "") -> int:
    """How many characters at the beginning of a sampled text are reasoning, with its tags and the space behind it,
    and with the header of the answer.

    `opened`: the tag that the prompt ended with. None: the server made the prompt, which may have ended with a
    tag; a closing tag without an opening one shows that it did. Reasoning without an end is the whole text.
    """
    start = at = _behind_space(text, 0)
    if opened == "" and not text.startswith(_BEGINNINGS, at):
        return 0  # nearly always
    tags = _opening(text, at) or next((tags for tags in TAGS if tags.opens == opened), None)
    if tags is None and text.startswith((_COMMENTARY, _TURN + _COMMENTARY), at) and " to=" not in text:
        # gpt-oss may think behind a first message to the user. What it calls stands in such a message, too.
        tags = Tags(_COMMENTARY, (_FINAL,)) if _ANALYSIS in text else None
    elif tags is None and opened is None:
        at = _behind_unopened(text, at)
    absent: set[str] = set()
    while tags is not None:
        end = _close(text, tags, at, absent)
        if end is None:
            return len(text)
        at = _behind_space(text, end)
        tags = _opening(text, at)
    header = next((header for header in _HEADERS if text.startswith(header, at)), "")
    return _behind_space(text, at + len(header)) if header or at > start else 0


def _opening(text: str, at: int) -> Tags | None:
    return next((tags for tags in TAGS if text.startswith((tags.opens, _TURN + tags.opens), at)), None)


def _close(text: str, tags: Tags, at: int, absent: set[str]) -> int | None:
    """Behind what ends the reasoning; None: it does not end. `absent`: what is known to be nowhere behind."""
    for close in tags.closes:
        if close not in absent and (place := text.find(close, at)) >= 0:
            return place + len(close)
        absent.add(close)
    return None


def _behind_unopened(text: str, at: int) -> int:
    """Behind the first closing tag whose opening tag is not in the text before it; `at`: there is none. One in
    quotes is part of the answer's text or code."""
    places = ((_unquoted(text, tags.closes[0]), tags) for tags in TAGS)
    ends = [place + len(tags.closes[0]) for place, tags in places if place >= 0 and tags.opens not in text[:place]]
    return _behind_space(text, min(ends)) if ends else at


def _unquoted(text: str, close: str) -> int:
    """Where the tag is first found that has no quotation marks around it; -1: nowhere."""
    place = text.find(close)
    while place > 0 and text[place - 1] in _QUOTES and text.startswith(text[place - 1], place + len(close)):
        place = text.find(close, place + len(close))
    return place


def tagged(reasoning: str) -> str:
    """Reasoning that a server sent apart from the answer, as the beginning of a sampled text."""
    return f"{_THINK.opens}\n{reasoning.strip()}\n{_THINK.closes[0]}\n\n"


def without_empty(printed: str) -> str:
    """What a template prints before an answer, without the empty reasoning that some templates add."""
    return _EMPTY.sub("", printed)


def _behind_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
