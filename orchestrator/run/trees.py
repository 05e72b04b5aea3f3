"""Trees in training data: which tokens of a rollout have which advantage, and which stand in another's row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.completion.base import Tokenizer
from orchestrator.completion.trajectory import trajectory
from orchestrator.rules.advantages import Edge, Leaf, edges, last_forks
from orchestrator.types import Branch, Member, Record, Trajectory


@dataclass(frozen=True, slots=True)
class InTree:
    """One rollout's place in its group's trees. `last_fork`: the last turn at which somebody branched from it; 1:
    nobody did."""

    edges: tuple[Edge, ...]
    last_fork: int = 1

    def advantages(
        self, record: Record, line: Trajectory, tokenizer: Tokenizer | None, closing_tag: str
    ) -> list[float]:
        """For each token of the line; 0 where it is not trained."""
        first, *later = self.edges
        place_T = [int(trained) for trained in line.trained_T]  # 0: not trained, n: of the n-th edge
        for edge in later:
            own = trajectory(own_from(record, edge.turn), tokenizer, closing_tag, line.segment)
            place_T = [place + own for place, own in zip(place_T, own.trained_T, strict=True)]
        values = [0.0, first.advantage, *(edge.advantage for edge in later)]
        return [values[place] * on for place, on in zip(place_T, line.trained_T, strict=True)]


def own_from(record: Record, turn: int) -> Record:
    """The record with all turns before this one as context."""
    turns = (replace(one, inherited=True) if at < turn else one for at, one in enumerate(record.turns, 1))
    return replace(record, turns=tuple(turns)) if turn > 1 else record


def in_trees(members: Iterable[Member]) -> Mapping[str, InTree]:
    """The place of each member, by its rollout id. Empty: nobody branched."""
    return places([_leaf(member) for member in members])


def places(leaves: Sequence[Leaf]) -> Mapping[str, InTree]:
    """As `in_trees`."""
    forks = last_forks((leaf.parent, leaf.turn) for leaf in leaves)
    if not forks:
        return {}
    return {name: InTree(own, forks.get(name, 1)) for name, own in edges(leaves).items()}


def leaf(name: str, score: float, branch: Branch | None) -> Leaf:
    """Of a rollout, by what its record says. One that branched from another run's is a root."""
    if branch is None or branch.run:
        return Leaf(name, score)
    return Leaf(name, score, branch.parent, branch.turn)


def _leaf(member: Member) -> Leaf:
    return leaf(member.attempt.plan.rollout_id, member.score.value, member.attempt.record.branch)
