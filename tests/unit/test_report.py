from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import resource
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from orchestrator import report
from orchestrator.errors import ConfigError
from orchestrator.report import reader, write_report
from orchestrator.report.details import TokenTable
from orchestrator.report.page import Page, as_block
from orchestrator.report.summary import Wanted
from orchestrator.rules.estimates import wilson
from orchestrator.run.lines import dumps
from tests.fakes.odd_run import an_attempt_line, write_odd_run
from tests.fakes.synthetic_run import HOSTILE, WordTokenizer, write_synthetic_run

URL = re.compile(r"(?:https?:)?//[\w.-]+\.\w+")


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of those that hold raw text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self._open = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))
        self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            tag, attributes, text = self.found[-1]
            self.found[-1] = tag, attributes, text + data

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for name, attributes, text in self.found if name == tag]

    def block(self, name: str) -> Any:
        return next(json.loads(text) for attributes, text in self.of("script") if attributes.get("id") == name)


def lines(path: Path, *values: Any) -> None:
    path.write_bytes(b"".join(dumps(value) + b"\n" for value in values))


def written(run: Path, tokenizer: WordTokenizer | None = None) -> Elements:
    page = run / "groups.html"
    write_report(run, run / "groups.jsonl", page, tokenizer=tokenizer)
    return Elements(page.read_text())


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WordTokenizer, Elements]:
    run = tmp_path_factory.mktemp("run")
    tokenizer = write_synthetic_run(run)
    return run, tokenizer, written(run, tokenizer)


def test_the_policy_allows_exactly_the_script_and_style_that_are_there(synthetic):
    page = synthetic[2]
    policy = next(a["content"] for a, _ in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    [style] = [text for _, text in page.of("style")]
    [script] = [text for attributes, text in page.of("script") if "type" not in attributes]
    for kind, text in (("script-src", script), ("style-src", style)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_hostile_text_stays_inside_the_data_blocks(synthetic):
    page = synthetic[2]
    tags = {tag for tag, _, _ in page.found}
    assert tags == {
        *("html", "head", "meta", "title", "style", "body", "noscript", "main"),
        *("footer", "p", "kbd", "script"),
    }
    assert not [a for _, attributes, _ in page.found for a in attributes if a.startswith("on")]
    blocks = [text for attributes, text in page.of("script") if attributes.get("type") == "application/json"]
    assert len(blocks) > 40
    assert not re.search("[<>&\u2028\u2029\x00]", "".join(blocks))
    assert page.block("run")["bad_tasks"][0]["reason"].endswith(HOSTILE)


def test_the_page_names_no_place_to_fetch_from(synthetic):
    page = synthetic[2]
    code = "".join(text for _, text in page.of("style")) + page.of("script")[-1][1]
    assert URL.findall(code.replace("http://www.w3.org/2000/svg", "")) == []
    assert not [a for _, attributes, _ in page.found for a in attributes if a in ("src", "href", "srcset")]


def test_escaped_data_are_the_same_data_to_a_json_reader():
    value = {HOSTILE: [HOSTILE, 1.5, None]}
    assert json.loads(as_block(value)) == value


def test_lone_surrogates_do_not_stop_the_report():
    assert b"\\ud8" not in as_block(["a\ud800b"])


def test_credentials_in_the_endpoint_address_are_not_shown(synthetic):
    run, _, page = synthetic
    assert ["endpoint", "127.0.0.1:8080"] in page.block("run")["facts"]
    assert "hunter2" not in (run / "groups.html").read_text()


def test_torn_and_strange_lines_are_counted_and_the_others_shown(tmp_path: Path):
    rollouts, groups = tmp_path / "rollouts.jsonl", tmp_path / "groups.jsonl"
    lines(
        rollouts,
        an_attempt_line(),
        [1],
        "text",
        {"rollout_id": 5},
        an_attempt_line(group=-1),
        an_attempt_line(group="0"),
    )
    with rollouts.open("ab") as file:
        file.write(b'{"score": NaN}\n\xff\xfe\n\n{"a": "\\ud800"}\n' + b"[" * 5000 + b'\n{"rollout_id": "g0')
    groups.write_bytes(b'{"tokens": [[1]]}\n{"overrides": [{"rollout_id": "g000000-r00-a0"}]}\n{"over')
    run = written(tmp_path).block("run")
    assert run["skipped"] == {"rollout_lines": 10, "group_lines": 2}
    assert [row["id"] for row in run["rollouts"]] == ["g000000-r00-a0"]
    assert run["groups"][0]["written"] is True


def test_fields_of_any_type_are_survived(tmp_path: Path):
    count = write_odd_run(tmp_path)
    run = written(tmp_path).block("run")
    assert len(run["rollouts"]) == count


def test_an_empty_run_gives_a_page(tmp_path: Path):
    run = written(tmp_path).block("run")
    assert run["rollouts"] == run["groups"] == []
    assert "run.json" in run["notes"][0]


def test_a_report_replaces_the_old_one_and_leaves_nothing_else(tmp_path: Path):
    page = tmp_path / "groups.html"
    page.write_text("old")
    written(tmp_path)
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["groups.html"]


def test_a_failure_while_writing_keeps_the_old_report(tmp_path: Path, synthetic):
    run, _, _ = synthetic
    page = tmp_path / "groups.html"
    page.write_text("old")

    class BrokenTokenizer(WordTokenizer):
        def decode(self, ids: list[int] | tuple[int, ...]) -> str:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        write_report(run, run / "groups.jsonl", page, tokenizer=BrokenTokenizer())
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["groups.html"]


def test_a_full_disk_leaves_no_draft(tmp_path: Path):
    child = os.fork()
    if child == 0:  # the limit is the process'
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with Page(tmp_path / "report.html"):
                pass
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_large_run_keeps_every_group_and_says_what_was_left_out(synthetic, monkeypatch: pytest.MonkeyPatch):
    run, _, whole = synthetic
    monkeypatch.setattr(report, "MAX_DETAILED", 6)
    page = written(run)
    told = page.block("run")
    assert len(told["groups"]) == len(whole.block("run")["groups"])
    assert told["left_out"] == len(told["rollouts"]) - 6
    detailed = [row for row in told["rollouts"] if row["detail"] is not None]
    assert {row["outcome"] for row in detailed} == {row["outcome"] for row in told["rollouts"]}


def test_details_are_of_each_outcome_and_of_groups_of_each_kind_and_level_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Eight groups of two: right and wrong, all wrong, all right, each twice on either of two levels."""
    kinds = [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)]
    attempts = [
        an_attempt_line(rollout_id=f"g{group}-r{index}", group=group, index=index, level=level, score=score)
        for group, (level, scores) in enumerate((level, scores) for scores in kinds for level in "1122")
        for index, score in enumerate(scores)
    ]
    late = an_attempt_line(rollout_id="late", group=3, index=0, level="2", outcome="max_steps", score=0.0)
    lines(tmp_path / "rollouts.jsonl", *attempts, late)
    monkeypatch.setattr(report, "MAX_DETAILED", 14)
    rows = [row for row in written(tmp_path).block("run")["rollouts"] if row["detail"] is not None]
    assert {row["outcome"] for row in rows} == {"finished", "max_steps"}
    assert {row["group"] for row in rows if row["id"] != "late"} == {0, 2, 4, 6, 8, 10, 1}


def test_a_page_may_have_one_rollout_group_or_outcome_alone(tmp_path: Path, synthetic):
    run, _, whole = synthetic
    for wanted, expected in (
        (Wanted(rollout="g000001-r01-a0"), {"g000001-r01-a0"}),
        (Wanted(group=2), {row["id"] for row in whole.block("run")["rollouts"] if row["group"] == 2}),
        (Wanted(outcome="sandbox_lost"), {"g000008-r00-a0", "g000008-r00-a1", "g000008-r00-a2"}),
    ):
        page = tmp_path / "page.html"
        write_report(run, run / "groups.jsonl", page, wanted=wanted)
        told = Elements(page.read_text()).block("run")
        assert {row["id"] for row in told["rollouts"]} == expected
        assert {group["number"] for group in told["groups"]} == {row["group"] for row in told["rollouts"]}
        assert told["totals"] == whole.block("run")["totals"]
        assert told["only"] == str(wanted)
        assert all(row["detail"] is not None for row in told["rollouts"])
    with pytest.raises(ConfigError, match="has nothing of the rollout no"):
        write_report(run, run / "groups.jsonl", page, wanted=Wanted(rollout="no"))


def test_what_is_wanted_is_found_however_long_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader, "MOST_ATTEMPTS", 5)
    lines(tmp_path / "rollouts.jsonl", *(an_attempt_line(rollout_id=f"r{n}", group=n) for n in range(40)))
    write_report(tmp_path, tmp_path / "groups.jsonl", tmp_path / "page.html", wanted=Wanted(rollout="r3"))
    told = Elements((tmp_path / "page.html").read_text()).block("run")
    assert [row["id"] for row in told["rollouts"]] == ["r3"]
    assert told["totals"]["attempts"] == 40


def test_errors_of_steps_are_counted_by_type_and_by_the_module_that_is_missing(tmp_path: Path):
    def failed(*texts: str, type: str = "AgentExecutionError") -> dict[str, Any]:
        return {"steps": [{"error_type": type, "error": text} for text in texts]}

    pandas = "Traceback (most recent call last):\n  File 1\nModuleNotFoundError: No module named 'pandas'"
    lines(
        tmp_path / "rollouts.jsonl",
        an_attempt_line(rollout_id="a", **failed(pandas, pandas)),
        an_attempt_line(rollout_id="b", **failed(pandas, "x.y.ConnectionError: refused", "nothing known\nmore")),
        an_attempt_line(rollout_id="c", **failed("ValueError: not by code", type="AgentParsingError")),
        an_attempt_line(rollout_id="d", **failed(*(f"E{n}Error: {n}" for n in range(100)))),
        an_attempt_line(rollout_id="e", **failed("\n" * 100_000 + "a" * 100_000, "a." * 50_000)),
    )
    errors = written(tmp_path).block("run")["totals"]["errors"]
    assert errors[0] == ["ModuleNotFoundError pandas", 3, 2, "No module named 'pandas'"]
    assert ["ConnectionError", 1, 1, "refused"] in errors
    assert ["AgentParsingError", 1, 1, "ValueError: not by code"] in errors
    assert len(errors) <= 12


def test_details_past_the_size_are_left_out(synthetic, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "MAX_DETAIL_BYTES", 60_000)
    page = written(synthetic[0])
    blocks = [text for attributes, text in page.of("script") if (attributes.get("id") or "").startswith("detail-")]
    assert 0 < sum(len(text.encode()) for text in blocks) <= 60_000
    assert page.block("run")["left_out"] == len(page.block("run")["rollouts"]) - len(blocks)


def test_token_lines_give_back_ids_masks_and_log_probs(synthetic):
    run, tokenizer, page = synthetic
    first = json.loads((run / "groups.jsonl").read_text().split("\n")[0])
    row = next(r for r in page.block("run")["rollouts"] if r["id"] == first["overrides"][1]["rollout_id"])
    line, table = page.block(f"detail-{row['detail']}")["tokens"], page.block("token-table")
    assert [table[place][0] for place in line["tokens"]] == first["tokens"][1]
    assert "".join(table[place][1] for place in line["tokens"]) == tokenizer.decode(first["tokens"][1])
    trained = [place % 2 == 1 for place, length in enumerate(line["runs"]) for _ in range(length)]
    assert trained == [mask != -100 for mask in first["masks"][1]]
    sampled = [p for p, t in zip(first["inference_logprobs"][1], trained, strict=True) if t]
    assert line["logprobs"] == pytest.approx([-1000 * p for p in sampled], abs=0.5)


def test_a_character_of_several_tokens_is_shown_once():
    tokenizer = WordTokenizer()
    ids = tokenizer.encode("a 😀b é")
    group = {"tokens": [ids], "masks": [ids], "inference_logprobs": None}
    table = TokenTable(tokenizer)
    line = table.member(group, 0)
    assert line is not None
    pieces = [table.entries[place][1] for place in line["tokens"]]
    assert "".join(map(str, pieces)) == "a 😀b é"
    assert "�" not in "".join(map(str, pieces))
    assert line["logprobs"] is None


def test_broken_utf8_ends_after_four_tokens():
    table = TokenTable(WordTokenizer())
    line = table.member({"tokens": [[0xF0] * 9 + [65]], "masks": [[-100] * 10]}, 0)
    assert line is not None
    assert "A" in [table.entries[place][1] for place in line["tokens"]][-1]


def test_without_tokenizer_there_are_ids(synthetic):
    page = written(synthetic[0])
    assert {piece for _, piece in page.block("token-table")} == {None}
    assert synthetic[2].block("token-table") != page.block("token-table")


def test_masks_that_do_not_match_their_tokens_are_not_shown():
    table = TokenTable(None)
    for masks in ([[1]], [], None, [[1, 2, 3]], "x"):
        assert table.member({"tokens": [[1, 2]], "masks": masks}, 0) is None
    assert table.member({"tokens": [[1, -5]], "masks": [[1, 2]]}, 0) is None
    line = table.member({"tokens": [[1, 2]], "masks": [[1, -100]], "inference_logprobs": [["x", 1.0]]}, 0)
    assert line == {"total": 2, "tokens": [0, 1], "runs": [0, 1, 1], "logprobs": [None]}


def test_what_the_scorer_calls_solved_and_why_it_could_not_say(tmp_path: Path):
    scored = {"score": 1.0, "score_parts": {"judge": 1.0, "by_rules": 0.0}}
    failed = {"score": 0.0, "score_parts": {}, "score_evidence": {"failure": "mine raised KeyError"}}
    half = {"score": 0.5, "score_parts": {}}
    both = [
        an_attempt_line(rollout_id=f"g000000-r0{i}-a0", index=i, **more)
        for i, more in enumerate((scored, failed, half))
    ]
    lines(tmp_path / "rollouts.jsonl", *both)
    (tmp_path / "groups.jsonl").touch()
    rollouts = written(tmp_path).block("run")["rollouts"]
    assert [r["solved"] for r in rollouts] == [True, False, False]
    assert [(r["unscorable"], r["reason"]) for r in rollouts][1] == (True, "mine raised KeyError")


def test_the_interval_of_the_solved_share_has_groups_as_n(synthetic):
    page = synthetic[2]
    totals = page.block("run")["totals"]
    groups = {row["group"] for row in page.block("run")["rollouts"]}
    assert totals["scored"] > len(groups)
    low, high = wilson(totals["solved"] / totals["scored"], len(groups))
    assert totals["interval"] == [pytest.approx(low), pytest.approx(high)]


def test_outcomes_that_broke_are_listed_and_their_group_told_apart(synthetic):
    told = synthetic[2].block("run")
    lost = [row for row in told["rollouts"] if row["outcome"] == "sandbox_lost"]
    assert len(lost) == 3
    assert {row["score"] for row in lost} == {None}
    assert [g["written"] for g in told["groups"] if g["number"] == lost[0]["group"]] == [False]
    assert told["kinds"]["sandbox_lost"] == "failed"
    assert told["kinds"]["timeout"] == "ended"
