"""Runs side by side."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from orchestrator.cli import main
from orchestrator.comparing.comparison import ComparedRun, Difference
from orchestrator.rules.estimates import estimate_difference, estimate_share
from tests.fakes.odd_run import an_attempt_line, write_odd_run

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def write_run(
    directory: Path, tasks: dict[str, list[float]], prices: list[dict[str, float]] | None = None
) -> Path:
    """Each task's scores; a negative one: the rollout broke."""
    directory.mkdir()
    lines = []
    for group, (task, scores) in enumerate(tasks.items()):
        for index, score in enumerate(scores):
            broke = score < 0
            lines.append(
                an_attempt_line(
                    rollout_id=f"g{group:06d}-r{index:02d}-a0",
                    group=group,
                    index=index,
                    task_id=task,
                    level=str(group % 2 + 1),
                    outcome="llm_error" if broke else "finished",
                    score=None if broke else score,
                    score_parts={},
                    duration_s=2.0,
                    completions=[{"prompt_tokens": 1000, "completion_tokens": 100, "kind": "action"}],
                )
            )
    (directory / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told: dict[str, Any] = {"config": {"env": {}, "openai": [{"model_name": f"m-{directory.name}"}]}}
    (directory / "run.json").write_text(json.dumps(told | ({"prices": prices} if prices else {})))
    return directory


def compare(*arguments: object) -> int:
    return main(["compare", *map(str, arguments)])


def test_shares_are_over_tasks_and_differences_over_pairs(tmp_path: Path) -> None:
    names = [f"t{n}" for n in range(6)]
    first = write_run(tmp_path / "a", {name: [1.0, 0.0] for name in names} | {"only-a": [1.0, 1.0]})
    other = write_run(
        tmp_path / "b", {name: [1.0, 1.0 if n < 3 else 0.0] for n, name in enumerate(names)} | {"only-b": [-1, -1]}
    )
    a, b = ComparedRun.read(first), ComparedRun.read(other)
    assert (len(a.tasks), len(b.tasks)) == (7, 6), "a task of which no rollout was scored is none"
    assert b.outcomes == {"finished": 12, "llm_error": 2}
    solved = a.solved()
    assert solved is not None
    assert solved.value == pytest.approx((6 * 0.5 + 1) / 7)
    difference = Difference.of(a, b)
    assert (difference.tasks, difference.better, difference.worse) == (6, 3, 0)
    assert difference.changed == [("t0", 0.5, 1.0), ("t1", 0.5, 1.0), ("t2", 0.5, 1.0)]
    assert difference.solved is not None
    assert difference.solved.value == pytest.approx(0.25)
    half = 2.5706 * math.sqrt(6 * 0.0625 / 5) / math.sqrt(6)  # Student's quantile for five degrees of freedom
    assert math.atanh(difference.solved.high) - math.atanh(0.25) == pytest.approx(half / (1 - 0.25**2), rel=0.01)
    assert a.by("level").keys() == {"1", "2"}


@pytest.mark.parametrize(("freedom", "quantile"), [(2, 4.303), (3, 3.182), (10, 2.228), (100, 1.984)])
def test_the_interval_of_a_difference_is_student_s(freedom: int, quantile: float) -> None:
    """Quantiles out of printed tables; around 0 the scale is that of the differences."""
    values = [-0.1, 0.1] + [0.0] * (freedom - 1)
    found = estimate_difference(values)
    assert found is not None
    spread = math.sqrt(0.02 / freedom)
    reach = quantile * spread / math.sqrt(freedom + 1)
    assert math.atanh(found.high) == pytest.approx(reach, rel=0.035)
    assert found.low == -found.high
    assert estimate_difference(values[:2]) is None


@pytest.mark.parametrize(
    "values", [[1.0, 1.0, 0.0], [-1.0, 1.0, 1.0], [1.0] * 3, [0.99, 1.0, 1.0], [-1.0, -1.0, 0.5]]
)
def test_no_interval_ends_where_no_value_can_be(values: list[float]) -> None:
    difference, share = estimate_difference(values), estimate_share([abs(value) for value in values])
    assert difference is not None
    assert share is not None
    assert -1 <= difference.low <= difference.value <= difference.high <= 1
    assert 0 <= share.low <= share.value <= share.high <= 1


def test_a_quantity_has_one_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = {f"t{n}": [1.0, 0.0] for n in range(4)}
    assert compare(write_run(tmp_path / "a", tasks), write_run(tmp_path / "b", tasks)) == 0
    told = capsys.readouterr().out
    assert "\nsolved " in told
    assert "score" not in told.replace("scored rollouts", ""), "the score is whether it was solved"
    parts = write_run(tmp_path / "c", tasks | {"t0": [0.5, 0.5]})
    assert compare(tmp_path / "a", parts) == 0
    assert "\nscore " in capsys.readouterr().out


def test_two_tasks_are_too_few_for_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, {"t0": [1.0], "t1": [0.0]}) for name in "ab"]
    assert compare(*runs) == 0
    assert "too few tasks to tell" in capsys.readouterr().out


@pytest.mark.parametrize("by", ["flags", "table"])
def test_money_is_told_by_prices_that_are_given_for_runs_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    cheap = write_run(tmp_path / "a", {"t": [1.0, -1.0]})
    priced = write_run(tmp_path / "b", {"t": [1.0]}, [{"prompt": 10.0, "completion": 100.0, "weight": 1.0}])
    table = tmp_path / "prices.yaml"
    table.write_text("m-a: {prompt: 1, completion: 10}\n")
    flags = ("--openai.prompt_price", 1, "--openai.completion_price", 10)
    assert compare(cheap, priced, "--json", *(flags if by == "flags" else ("--env.price_table", table))) == 0
    told = [run["cost"] for run in json.loads(capsys.readouterr().out)["runs"]]
    assert told == pytest.approx([2 * 0.002, 0.02]), "of broken attempts too; those on record win"


def test_prices_that_are_not_enough_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", {"t": [1.0]})
    (table := tmp_path / "prices.yaml").write_text("other: {prompt: 1, completion: 10}\n")
    for command in (["compare", str(run)], ["view"]):
        assert main([*command, str(run), "--env.price_table", str(table)]) == 2
        assert capsys.readouterr().err == "orchestrator: env.price_table: no prices of m-a in it\n"
        assert main([*command, str(run), "--openai.prompt_price", "1"]) == 2
        assert "openai.prompt_price, openai.completion_price: give both" in capsys.readouterr().err
    others = ("--env.price_table", str(table), "--openai.prompt_price", "0", "--openai.completion_price", "0")
    assert main(["view", str(run), *others]) == 0
    assert "cost           0.0000\n" in capsys.readouterr().out


def test_money_is_told_where_prices_are_on_record(tmp_path: Path) -> None:
    priced = [{"prompt": 10.0, "completion": 100.0, "weight": 1.0}]
    dear = ComparedRun.read(write_run(tmp_path / "a", {"t": [1.0, -1.0]}, priced))
    assert dear.cost == pytest.approx(2 * (1000 * 10 + 100 * 100) / 1e6), "what broke has cost too"
    assert ComparedRun.read(write_run(tmp_path / "b", {"t": [1.0]})).cost is None


def test_an_attempt_that_came_again_with_its_score_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {"t": [1.0]}, [{"prompt": 10.0, "completion": 100.0, "weight": 1.0}])
    (told,) = (run / "rollouts.jsonl").read_text().splitlines()
    line = json.loads(told)
    again = {**line, "rollout_id": "g000000-r00-a1", "attempt": 1}
    stopped = {**line, "outcome": "cancelled", "score": None, "ungraded": {"name": "finished", "detail": ""}}
    (run / "rollouts.jsonl").write_text(json.dumps(stopped) + "\n" + json.dumps(again) + "\n")
    read = ComparedRun.read(run)
    assert (read.prompt_tokens, read.sampled_tokens, read.duration_s) == (1000, 100, 2.0)
    assert read.cost == pytest.approx(0.02)


def test_counts_that_no_machine_word_holds_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", {"t": [1.0]})
    line = json.loads((run / "rollouts.jsonl").read_text())
    line["completions"] = [{"prompt_tokens": 10**15 - 1, "completion_tokens": 10**15 - 1}] * 20_000
    (run / "rollouts.jsonl").write_text(json.dumps(line) + "\n")
    assert compare(run, run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["prompt_tokens"] > 2**64


class Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_table_json_and_page_say_the_same_and_names_are_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {HOSTILE: [1.0], "t1": [1.0], "t2": [0.0], "t3": [1.0]}
    a = write_run(tmp_path / "a", tasks)
    b = write_run(tmp_path / "b", {**tasks, HOSTILE: [0.0]})
    page = tmp_path / "c.html"
    assert compare(a, b, "--html", page) == 0
    printed = capsys.readouterr().out
    assert compare(a, b, "--html", page, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == f"page: {page}\n"
    assert "\x1b" not in printed
    found = Texts()
    found.feed(page.read_text())
    assert "script" not in found.tags
    assert any("alert(1)" in text for text in found.texts)
    told = json.loads(captured.out)
    assert told["runs"][0]["solved"]["value"] == 0.75
    assert told["differences_from_the_first"][0]["solved"]["value"] == -0.25
    assert "75.0%" in printed
    assert any("75.0%" in text for text in found.texts)
    assert "-25.0%" in printed
    assert "0 better, 1 worse" in printed


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if tag == "a" and name == "href"]


def test_every_task_leads_to_its_rollouts_in_the_reports_of_both_runs(tmp_path: Path) -> None:
    tasks = {f"t{n}": [1.0] for n in range(30)}
    a = write_run(tmp_path / "a & b", tasks)
    b = write_run(tmp_path / "b", tasks | {"t7": [0.0], "only-b": [1.0]})
    page = tmp_path / "pages" / "c.html"
    page.parent.mkdir()
    assert compare(a, b, "--html", page) == 0
    assert Links(page.read_text()).links == [], "there is no report to lead to"
    assert "`orchestrator view` writes one" in page.read_text()
    for run in (a, b):
        assert main(["view", str(run)]) == 0
    assert compare(a, b, "--html", page) == 0
    links = Links(page.read_text()).links
    assert {f"../{name}/report.html#group-{n}" for name in ("a%20%26%20b", "b") for n in range(30)} <= set(links)
    assert "../b/report.html#group-30" in links
    assert {(page.parent / unquote(link.partition("#")[0])).is_file() for link in links} == {True}
    assert page.read_text().count('scope="row">t') >= 30, "all of them, not the first"


def test_a_run_of_odd_fields_is_shown(tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    write_odd_run(tmp_path / "odd")
    assert compare(tmp_path / "odd", tmp_path / "odd", "--html", tmp_path / "c.html") == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "RUNS is missing"),
        (("a",), "2 paths or more"),
        (("a", "none"), "none is neither a run directory nor a groups file"),
        (("a", "empty"), "holds no rollout"),
        (("a", "g/groups.jsonl"), "name the run's directory"),
        (("a", "a", "--html", "none/c.html"), "cannot write"),
    ],
)
def test_what_is_no_comparison_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", {"t": [1.0]})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "rollouts.jsonl").write_text("")
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "groups.jsonl").write_text("{}\n")
    assert compare(*arguments) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
