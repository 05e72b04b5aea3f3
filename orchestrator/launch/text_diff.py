"""Unified diffs of texts that may be hostile: time and size are bounded, for each text and for all together.

The shortest edits are found as in E. Myers, "An O(ND) Difference Algorithm and Its Variations" (1986): the time
grows with lines times edits, and edits have a limit. `difflib` takes minutes for some texts of thousands of lines.
"""

from collections.abc import Sequence
from difflib import Match, SequenceMatcher

_EDITS = 400  # of one text
_STEPS = 2_000_000  # lines times edits, of all texts: half a second
_CHARS = 16 << 10  # of one diff
_CONTEXT = 3


class TextDiffs:
    """Makes diffs of `left_bytes` characters together."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes = left_bytes
        self._steps = _STEPS

    def make(self, old: bytes, new: bytes) -> str | None:
        """None: it is no text, or nothing in it changed."""
        if b"\0" in old or b"\0" in new:
            return None
        try:
            before, after = _lines(old.decode()), _lines(new.decode())
        except UnicodeDecodeError:
            return None
        text = "\n".join(_hunks(before, after, self._matches(before, after)))
        room = min(self.left_bytes, _CHARS)
        if len(text) > room:
            text = text[:room].rpartition("\n")[0] + "\n… cut"
        self.left_bytes = max(0, self.left_bytes - len(text))
        return text or None

    def _matches(self, old: list[str], new: list[str]) -> list[Match]:
        """Runs of equal lines, in order; with too many edits only those at the beginning and at the end."""
        begin, shorter = 0, min(len(old), len(new))
        while begin < shorter and old[begin] == new[begin]:
            begin += 1
        end = 0
        while end < shorter - begin and old[-1 - end] == new[-1 - end]:
            end += 1
        a, b = old[begin : len(old) - end], new[begin : len(new) - end]
        most = min(_EDITS, self._steps // (len(a) + len(b) + 1))
        pairs, edits = _pairs(a, b, most)
        self._steps -= (len(a) + len(b)) * edits
        return _runs([(0, 0, begin), *((begin + x, begin + y, 1) for x, y in pairs)], len(old), len(new), end)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    if lines[-1]:
        lines[-1] += "\n\\ No newline at end of file"
    else:
        lines.pop()
    return lines


def _pairs(a: list[str], b: list[str], most: int) -> tuple[list[tuple[int, int]], int]:
    """Places of equal lines that the shortest sequence of edits keeps, and how many edits were tried. No places if
    there are more than `most` edits."""
    reach, trace = {1: 0}, list[dict[int, int]]()  # by diagonal: how far along `a` so many edits come
    for edits in range(most + 1):
        trace.append(dict(reach))
        for diagonal in range(-edits, edits + 1, 2):
            x = _begin(reach, diagonal, edits)
            while x < len(a) and x - diagonal < len(b) and a[x] == b[x - diagonal]:
                x += 1
            reach[diagonal] = x
            if x >= len(a) and x - diagonal >= len(b):
                return _back(trace, len(a), len(b)), edits
    return [], most


def _adds(reach: dict[int, int], diagonal: int, edits: int) -> bool:
    """Whether the last edit on the way to this diagonal adds a line; else it removes one."""
    return diagonal == -edits or (diagonal != edits and reach[diagonal - 1] < reach[diagonal + 1])


def _begin(reach: dict[int, int], diagonal: int, edits: int) -> int:
    """How far along `a` that edit comes."""
    return reach[diagonal + 1] if _adds(reach, diagonal, edits) else reach[diagonal - 1] + 1


def _back(trace: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """The pairs on the way that was found, from its end."""
    pairs = []
    for edits in range(len(trace) - 1, -1, -1):
        reach, diagonal = trace[edits], x - y
        begin = _begin(reach, diagonal, edits)
        while x > begin:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = (x, y - 1) if _adds(reach, diagonal, edits) else (x - 1, y)
    return pairs[::-1]


def _runs(matches: Sequence[tuple[int, int, int]], old: int, new: int, end: int) -> list[Match]:
    """Neighbours as one, then the last `end` lines of both, and the empty one that SequenceMatcher ends with."""
    runs: list[Match] = []
    for a, b, size in (*matches, (old - end, new - end, end)):
        if runs and (runs[-1].a + runs[-1].size, runs[-1].b + runs[-1].size) == (a, b):
            runs[-1] = Match(runs[-1].a, runs[-1].b, runs[-1].size + size)
        elif size:
            runs.append(Match(a, b, size))
    return [*runs, Match(old, new, 0)]


class _Matcher(SequenceMatcher[str]):
    """Groups matches that it has not looked for."""

    def __init__(self, matches: list[Match]) -> None:
        super().__init__(None, "", "")
        self._matches = matches

    def get_matching_blocks(self) -> list[Match]:
        return self._matches


def _hunks(old: list[str], new: list[str], matches: list[Match]) -> list[str]:
    lines: list[str] = []
    for group in _Matcher(matches).get_grouped_opcodes(_CONTEXT):
        (_, a, _, b, _), (_, _, a_end, _, b_end) = group[0], group[-1]
        lines.append(f"@@ -{_range(a, a_end)} +{_range(b, b_end)} @@")
        for tag, i, i_end, j, j_end in group:
            if tag == "equal":
                lines += [f" {line}" for line in old[i:i_end]]
            else:
                lines += [f"-{line}" for line in old[i:i_end]] + [f"+{line}" for line in new[j:j_end]]
    return lines


def _range(begin: int, end: int) -> str:
    return f"{begin + (end > begin)},{end - begin}"
