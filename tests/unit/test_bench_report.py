"""What the benchmark says of its figures: bounds, percentiles, table and drawing."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from bench.numbers import long_tail, p50, p99, percentile, ratio_of_pairs
from bench.report import Figure, Findings, Scale, Section, drawing, table, write


def a_section() -> Section:
    found = Findings(samples={"one, s": [0.1, 0.2]}, notes=["Nothing else ran."])
    found.add("quick & short", 3.0, "ms", at_most=10.0)
    found.add("too slow", 120.0, "ms", at_most=10.0)
    found.add("many", 400.0, "/s", at_least=300.0)
    found.add("none left", 0.0, "of 5", at_most=0.0)
    found.add("some left", 2.0, "of 5", at_most=0.0)
    found.add("not measured", None, "s", at_most=1.0, note="there is no Jupyter")
    found.add("just a number", 1234.2, "")
    return Section("start", "how it starts", found, 12.0, (0.5, 1.5))


def test_a_bound_holds_or_does_not_or_was_not_measured() -> None:
    holds = [figure.holds for figure in a_section().findings.figures]
    assert holds == [True, False, True, True, False, None, None]
    assert Figure("x", 300.0, "/s", at_least=300.0).holds


def test_the_table_shows_every_figure_its_bound_and_whether_it_holds() -> None:
    lines = table(a_section()).splitlines()
    assert lines[0] == "start: how it starts  (12 s, load 0.5 to 1.5)"
    rows = {line.split("  ")[1].strip(): line for line in lines[1:-1]}
    assert "3 ms" in rows["quick & short"]
    assert rows["quick & short"].endswith("<= 10   yes")
    assert "NO" in rows["too slow"]
    assert ">= 300" in rows["many"]
    assert rows["not measured"].endswith("there is no Jupyter")
    assert rows["just a number"].split()[-1] == "1234"
    assert lines[-1] == "  note: Nothing else ran."


def test_results_can_be_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "new", "now", {"cores": 2}, Scale.QUICK, [a_section()])
    document = json.loads(path.read_text())
    assert document["machine"] == {"cores": 2}
    assert document["scale"] == "quick"
    (section,) = document["sections"]
    assert section["findings"]["samples"] == {"one, s": [0.1, 0.2]}
    assert section["findings"]["figures"][1]["at_most"] == 10.0
    rows = path.with_suffix(".md").read_text().splitlines()
    assert rows[0] == "cores 2"
    assert rows[4] == "| start (0.5 to 1.5) | quick & short | 3 ms | <= 10 | yes |"
    assert rows[9] == "|  | not measured | there is no Jupyter | <= 1 |  |"
    bars = ElementTree.parse(path.with_suffix(".svg")).findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 1 + 5  # the ground, and what is promised and measured


def test_a_drawing_needs_no_figure() -> None:
    ElementTree.fromstring(drawing([]))


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (p50(values), p99(values), percentile(values, 100)) == (50.5, 99.0, 100.0)
    assert p99([7.0]) == percentile([7.0], 0) == 7.0


def test_the_ratio_of_pairs_does_not_see_the_machines_drift() -> None:
    assert ratio_of_pairs([2.0, 20.0, 200.0], [1.0, 10.0, 100.0]) == 2.0


def test_drawn_durations_are_the_same_for_the_same_seed_and_have_a_long_tail() -> None:
    drawn = long_tail(1000, 2.0, 1)
    assert drawn == long_tail(1000, 2.0, 1) != long_tail(1000, 2.0, 2)
    assert 1.5 < p50(drawn) < 2.5
    assert p99(drawn) > 5 * p50(drawn)
