"""What each part of a tree of rollouts is worth, beside what else could have come there. Pure.

The value of a place in a tree is the mean of the scores of all rollouts that go through it: a Monte-Carlo
estimate, as the policy sampled each of them from there on. An edge (the turns from one fork to the next, or to the
end) has the advantage V(its end) - V(its begin). A group without branches gives score - mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


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
    roots = [leaf for leaf in leaves if parents[leaf.name] is None]

    def below(leaf: Leaf, turn: int) -> list[float]:
        """The scores of all that go through this leaf's begin of `turn`."""
        later = [child for child in children.get(leaf.name, ()) if child.turn >= turn]
        return [leaf.score, *(score for child in later for score in below(child, child.turn))]

    def value(leaf: Leaf, turn: int) -> float:
        return fmean(below(leaf, turn))

    start = fmean(value(root, 1) for root in roots) if roots else 0.0
    worth = {}
    for leaf in leaves:
        parent = parents[leaf.name]
        before, own = (start, 1) if parent is None else (value(parent, leaf.turn), leaf.turn)
        forks = sorted({child.turn for child in children.get(leaf.name, ())})
        begins = [own, *forks]
        values = [before, *(value(leaf, turn) for turn in forks), leaf.score]
        worth[leaf.name] = tuple(
            Edge(turn, values[place + 1] - values[place]) for place, turn in enumerate(begins)
        )
    return worth


def last_forks(branches: Iterable[tuple[str | None, int | None]]) -> dict[str, int]:
    """The last turn at which somebody branched from a rollout, by its name. `branches`: (parent, turn) of all."""
    last: dict[str, int] = {}
    for parent, turn in branches:
        if parent is not None and turn is not None:
            last[parent] = max(turn, last.get(parent, 0))
    return last
