"""The advantages of a tree, by hand and by what must hold of every tree."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.advantages import Edge, Leaf, edges, last_forks

SCORES = st.floats(0, 1, allow_nan=False)


@st.composite
def groups(draw: st.DrawFn) -> list[Leaf]:
    """Trunks with branches at any turns, and whole rollouts."""
    leaves = []
    for root in range(draw(st.integers(1, 4))):
        leaves.append(Leaf(f"r{root}", draw(SCORES)))
        for branch, turn in enumerate(draw(st.lists(st.integers(2, 5), max_size=5))):
            leaves.append(Leaf(f"r{root}b{branch}", draw(SCORES), f"r{root}", turn))
    return leaves


@st.composite
def forests(draw: st.DrawFn) -> list[Leaf]:
    """Branches of branches as well."""
    leaves: list[Leaf] = []
    for number in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([None, *leaves]))
        turn = 1 if parent is None else parent.turn + draw(st.integers(1, 3))
        leaves.append(Leaf(str(number), draw(SCORES), parent and parent.name, turn))
    return leaves


@given(forests())
def test_edges_are_differences_of_means_over_all_that_go_through_a_place(group: list[Leaf]) -> None:
    by_name = {leaf.name: leaf for leaf in group}

    def sampler(leaf: Leaf, turn: int) -> str:
        """Who sampled this turn of the rollout."""
        return leaf.name if turn >= leaf.turn else sampler(by_name[str(leaf.parent)], turn)

    def value(leaf: Leaf, turn: int) -> float:
        """Of the place where this turn of the rollout begins; all are there at the begin of the first one."""
        before = [sampler(leaf, at) for at in range(1, turn)]
        through = [one for one in group if before == [sampler(one, at) for at in range(1, turn)]]
        return fmean(one.score for one in through)

    roots = [leaf for leaf in group if leaf.parent is None]
    start = fmean(fmean(one.score for one in group if sampler(one, 1) == root.name) for root in roots)
    for leaf in group:
        forks = sorted({one.turn for one in group if one.parent == leaf.name})
        first = start if leaf.parent is None else value(leaf, leaf.turn)
        values = [first, *(value(leaf, turn) for turn in forks), leaf.score]
        wanted = [
            Edge(turn, pytest.approx(values[at + 1] - values[at])) for at, turn in enumerate([leaf.turn, *forks])
        ]
        assert list(edges(group)[leaf.name]) == wanted


@given(forests(), SCORES)
def test_where_all_scores_are_equal_nothing_is_worth_more(group: list[Leaf], score: float) -> None:
    found = edges([Leaf(leaf.name, score, leaf.parent, leaf.turn) for leaf in group])
    assert {edge.advantage for own in found.values() for edge in own} == {0.0}


def test_a_forged_tree_costs_no_more_than_its_size() -> None:
    chain = [Leaf(str(n), 1.0, str(n - 1) if n else None, n + 1) for n in range(5_000)]
    assert edges(chain)["4999"] == (Edge(5_000, 0.0),)


def test_a_tree_by_hand() -> None:
    """A trunk that failed, branches at turn 2 (1 of 2 solved) and at turn 4 (both solved), and a whole rollout."""
    tree = [
        Leaf("trunk", 0.0),
        Leaf("a", 1.0, "trunk", 2),
        Leaf("b", 0.0, "trunk", 2),
        Leaf("c", 1.0, "trunk", 4),
        Leaf("d", 1.0, "trunk", 4),
        Leaf("whole", 0.0),
    ]
    at_2, at_4 = 3 / 5, 2 / 3
    root = (at_2 + 0.0) / 2
    found = edges(tree)
    assert found["trunk"] == (
        Edge(1, pytest.approx(at_2 - root)),
        Edge(2, pytest.approx(at_4 - at_2)),
        Edge(4, pytest.approx(0 - at_4)),
    )
    assert found["a"] == (Edge(2, pytest.approx(1 - at_2)),)
    assert found["b"] == (Edge(2, pytest.approx(0 - at_2)),)
    assert found["c"] == found["d"] == (Edge(4, pytest.approx(1 - at_4)),)
    assert found["whole"] == (Edge(1, pytest.approx(0 - root)),)


@given(st.lists(SCORES, min_size=1, max_size=8))
def test_without_branches_it_is_score_less_mean(scores: list[float]) -> None:
    found = edges([Leaf(str(n), score) for n, score in enumerate(scores)])
    for n, score in enumerate(scores):
        assert found[str(n)] == (Edge(1, pytest.approx(score - fmean(scores))),)


@given(groups())
def test_siblings_weighted_by_their_leaves_sum_to_nothing(group: list[Leaf]) -> None:
    found = edges(group)
    forks = {(leaf.parent, leaf.turn) for leaf in group if leaf.parent is not None}
    for parent, turn in forks:
        branches = [leaf for leaf in group if (leaf.parent, leaf.turn) == (parent, turn)]
        (on,) = (edge for edge in found[str(parent)] if edge.turn == turn)
        through = 1 + sum(leaf.parent == parent and leaf.turn > turn for leaf in group)
        total = through * on.advantage + sum(found[leaf.name][0].advantage for leaf in branches)
        assert total == pytest.approx(0, abs=1e-9)
    roots = [leaf for leaf in group if leaf.parent is None]
    assert sum(found[root.name][0].advantage for root in roots) == pytest.approx(0, abs=1e-9)


@given(groups())
def test_the_edges_on_the_way_to_a_leaf_sum_to_its_score_less_the_mean_of_roots(group: list[Leaf]) -> None:
    found, by_name = edges(group), {leaf.name: leaf for leaf in group}
    start = None
    for leaf in group:
        way = [edge.advantage for edge in found[leaf.name]]
        if leaf.parent is not None:
            way += [edge.advantage for edge in found[leaf.parent] if edge.turn < leaf.turn]
        begin = by_name[leaf.name].score - sum(way)
        start = begin if start is None else start
        assert begin == pytest.approx(start, abs=1e-9)


def test_a_branch_of_nobody_in_the_group_counts_as_a_root() -> None:
    assert edges([Leaf("a", 1.0, "gone", 3), Leaf("b", 0.0)])["a"] == (Edge(1, 0.5),)


def test_the_last_fork_is_the_latest() -> None:
    assert last_forks([("a", 2), ("a", 4), (None, None), ("b", 3)]) == {"a": 4, "b": 3}
