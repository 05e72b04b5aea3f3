"""What each part of a tree of rollouts is worth, beside what else could have come there. Pure.

The value of a place in a tree is the mean of the scores of all rollouts that go through it: a Monte-Carlo
estimate, as the policy sampled each of them from there on. An edge (the turns from one fork to the next, or to the
end) has the advantage V(its end) - V(its begin). A group without branches gives score - mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from operator import attrgetter


@dataclass(frozen=True, slots=True)
class Leaf:
    """A rollout by its end. `parent`: the one from which it branched, where it sampled turn `turn` itself."""

    name: str
    score: float
    parent: str | None = None
    turn: int = 1


@dataclass(frozen=True, slots=True)
class Edge:
    """A rollout's turns from `turn` on, up to its next edge, have this advantage."""

    turn: int
    advantage: float


def edges(leaves: Sequence[Leaf]) -> Mapping[str, tuple[Edge, ...]]:
    """The edges of each rollout, by its name; those that it inherited are its parent's.

    A parent comes before its branches; one whose parent does not is a root. Where roots are compared, each tree
    counts as one: it is one draw of the task, however many leaves it has.
    """
    by_name: dict[str, Leaf] = {}
    children: dict[str, list[Leaf]] = {}
    parents: dict[str, Leaf | None] = {}
    for leaf in leaves:
        parent = parents[leaf.name] = by_name.get(leaf.parent or "")
        if parent is not None:
            children.setdefault(parent.name, []).append(leaf)
        by_name[leaf.name] = leaf
    # Exact: where all scores are the same, nothing is worth more. Branches come first, and each is looked at once:
    # a record may be forged.
    through: dict[str, tuple[Fraction, int]] = {}  # sum and number of the scores behind its own first turn
    values: dict[str, dict[int, Fraction]] = {}  # of the begins of the turns at which somebody branched from it
    for leaf in reversed(leaves):
        total, count = through[leaf.name] = Fraction(leaf.score), 1
        values[leaf.name] = {}
        for child in sorted(children.get(leaf.name, ()), key=attrgetter("turn"), reverse=True):
            more, branches = through[child.name]
            total, count = total + more, count + branches
            values[leaf.name][child.turn] = total / count
            if child.turn >= leaf.turn or parents[leaf.name] is None:
                through[leaf.name] = total, count
    roots = [total / count for name, (total, count) in through.items() if parents[name] is None]
    start = sum(roots, Fraction()) / max(1, len(roots))
    worth = {}
    for leaf in leaves:
        parent = parents[leaf.name]
        before, own = (start, 1) if parent is None else (values[parent.name][leaf.turn], leaf.turn)
        forks = sorted(values[leaf.name].items())
        begins = [own, *(turn for turn, _ in forks)]
        ways = pairwise([before, *(value for _, value in forks), Fraction(leaf.score)])
        worth[leaf.name] = tuple(
            Edge(turn, float(end - begin)) for turn, (begin, end) in zip(begins, ways, strict=True)
        )
    return worth


def last_forks(branches: Iterable[tuple[str | None, int | None]]) -> dict[str, int]:
    """The last turn at which somebody branched from a rollout, by its name. `branches`: (parent, turn) of all."""
    last: dict[str, int] = {}
    for parent, turn in branches:
        if parent is not None and turn is not None:
            last[parent] = max(turn, last.get(parent, 0))
    return last
