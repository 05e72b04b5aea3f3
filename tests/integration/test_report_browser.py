"""The report in a real browser: what is seen, and that nothing in it runs."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.report import write_report
from orchestrator.run.groups import scored_data_group
from orchestrator.run.line import attempt_line
from orchestrator.run.lines import dumps
from orchestrator.run.prices import PriceList
from tests.fakes.odd_run import an_attempt_line, write_odd_run
from tests.fakes.synthetic_run import HOSTILE, write_synthetic_run
from tests.fakes.trees import tree

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
FLAGS += ("--disable-background-networking", "--disable-component-update")
HOSTILE_GROUP = 9

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = tmp_path_factory.mktemp("run")
    tokenizer = write_synthetic_run(run)
    write_report(run, run / "groups.jsonl", run / "groups.html", tokenizer=tokenizer)
    return (run / "groups.html").as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, report: str):
    """The opened report. Afterwards nothing may have complained, run, asked or been fetched."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(60_000)
    seen: list[str] = []
    page.on("console", lambda message: seen.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: seen.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (seen.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: request.url.split("#")[0] == report or seen.append(request.url))
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.log('violation ' + e.violatedDirective))"
    )
    page.goto(report)
    yield page
    assert page.title() != "owned"
    assert page.locator("img, iframe, object, svg[onload], main script").count() == 0
    assert seen == []
    context.close()


def groups(page) -> list[str]:
    return page.locator(".groups tbody .c-group").all_text_contents()


def open_at(page, report: str, place: str) -> None:
    page.goto(f"{report}{place}")
    shows(page)


def at(page, place: str) -> None:
    """Waits until the address is this one, and shown."""
    page.wait_for_url(f"**{place}")
    shows(page)


def shows(page) -> None:
    """Waits until the page shows what its address names."""
    until(page, "document.body.dataset.shown === location.hash")


def unfold(part) -> None:
    """Opens a part. The browser tells the page of it later, and only then is the part built."""
    part.locator("> summary").click()
    part.locator("> :nth-child(2)").wait_for()


def until(page, true: str) -> None:
    """Waits for an expression. `wait_for_function` has the page evaluate it later, which its policy forbids."""
    deadline = time.monotonic() + 60
    while not page.evaluate(true):
        assert time.monotonic() < deadline, f"never: {true}"
        page.wait_for_timeout(20)


def test_the_table_has_a_row_for_every_group_and_the_summary_counts_them(page):
    assert groups(page) == [str(number) for number in range(10)]
    assert page.locator(".tile b").nth(2).text_content() == "9"
    assert page.locator(".histogram rect.correct").count() == 20
    failed = page.locator(".bars").nth(1).locator(".name").all_text_contents()
    assert sorted(failed) == ["bad_task", "llm_error", "sandbox_lost"]
    retokenized, unreadable = page.locator(".notices .warning").all_text_contents()
    assert retokenized.startswith("4 rollouts are retokenized, ")
    assert unreadable == "Unreadable and not shown: 1 line of rollouts.jsonl."


def test_columns_sort_both_ways(page):
    mean = page.locator("th.c-mean button")
    mean.click()
    rising = [float(text) for text in page.locator(".groups tbody .c-mean").all_text_contents()]
    assert rising == sorted(rising)
    assert page.locator("th.c-mean").get_attribute("aria-sort") == "ascending"
    mean.click()
    falling = [float(text) for text in page.locator(".groups tbody .c-mean").all_text_contents()]
    assert falling == rising[::-1]


def test_groups_are_filtered_by_outcome_kind_and_text(page):
    page.select_option("#outcome", "sandbox_lost")
    assert groups(page) == ["8"]
    page.select_option("#outcome", label="any outcome")
    page.select_option("#which", "dropped")
    assert groups(page) == ["8"]
    page.select_option("#which", "divided")
    assert 0 < len(groups(page)) < 10
    page.select_option("#which", label="all groups")
    page.fill("#search", "NORTHERN week 3?")
    assert groups(page) == ["2"]
    assert page.locator(".tools .told").text_content() == "1 of 10 groups"
    page.fill("#search", "nothing has this")
    assert groups(page) == []


def test_a_group_shows_its_members_side_by_side_and_what_broke(page):
    page.click(".groups tbody tr:nth-child(4) .c-mean")
    at(page, "#group-3")
    assert page.locator(".card").count() == 4
    tops = page.locator(".card").evaluate_all("cards => cards.map(card => card.offsetTop)")
    assert len(set(tops)) == 1
    assert "503" in page.locator("#view .rows li").text_content()
    assert page.locator(".card .parts dt").first.text_content() == "correctness"
    assert (
        page.locator(".card i.share").first.evaluate("bar => bar.parentElement.offsetHeight - bar.offsetHeight")
        == 0
    )


def test_a_rollout_shows_thought_code_output_error_and_tool_calls(page, report: str):
    open_at(page, report, "#rollout-g000001-r01-a0")
    assert page.locator(".turn").count() == 3
    second = page.locator(".turn").nth(1)
    assert second.locator(".part-thought pre").text_content() == "Thought: I add them up."
    assert second.locator(".part-code pre").text_content() == "total = sum(row['amount'] for row in rows)"
    assert "TypeError" in second.locator(".part-output pre.error").text_content()
    page.get_by_role("checkbox", name="code").uncheck()
    assert not second.locator(".part-code").is_visible()
    assert second.locator(".part-thought").is_visible()

    open_at(page, report, "#rollout-g000001-r00-a0")
    tools = page.locator(".part.tool")
    assert tools.locator("h3 code").all_text_contents() == ["web_search", "visit_webpage"]
    assert '"query"' in tools.first.locator(".arguments").text_content()
    assert tools.nth(1).locator(".error").text_content() == "404: not found"


def test_a_rollout_shows_what_it_changed(page, report: str):
    open_at(page, report, "#rollout-g000001-r00-a0")
    assert page.locator(".changes").count() == 0  # its root was read-only
    open_at(page, report, "#rollout-g000001-r01-a0")
    changes = page.locator(".changes")
    assert "12 files" in changes.locator("> summary").text_content()
    unfold(changes)
    assert changes.locator(".badge").all_text_contents() == ["added", "changed", "removed"]
    assert changes.locator("code").all_text_contents() == ["/workspace/new.txt", "/etc/hosts", "/usr/bin/cc"]
    assert changes.locator("p.none").all_text_contents() == [
        "9 more changes not listed",
        "Left out: pipes 2, links that lead out 1",
    ]
    unfold(changes.locator("details").nth(1))
    assert changes.locator(".diff .less").text_content() == "-::1 localhost\n"
    assert changes.locator(".diff .more").text_content() == "+::1 me\n"


def test_a_rollout_shows_how_it_was_graded(page, report: str):
    open_at(page, report, "#rollout-g000001-r00-a0")
    assert page.locator(".grade").count() == 0  # its task has no grader
    open_at(page, report, "#rollout-g000001-r01-a0")
    grade = page.locator(".grade")
    assert "reward 0.5" in grade.locator("> summary").text_content()
    assert "1 of 2 tests passed" in grade.locator("> summary").text_content()
    unfold(grade)
    assert grade.locator(".badge").all_text_contents() == ["passed", "failed"]
    assert grade.locator(".warning").all_text_contents() == ["2 processes were left running"]
    assert "reward.json; 1.50 s, CPU 0.40 s" in grade.locator("p.none").text_content()


def test_the_system_prompt_is_built_when_it_is_opened(page, report: str):
    open_at(page, report, "#rollout-g000001-r00-a0")
    prompt = page.locator(".turn").first.locator("details").first
    assert prompt.locator("pre").count() == 0
    unfold(prompt)
    assert "expert assistant" in prompt.locator("pre").text_content()


def test_tokens_are_coloured_by_mask_and_probability(page, report: str):
    open_at(page, report, "#rollout-g000001-r00-a0")
    assert page.locator(".ids").count() == 0
    unfold(page.locator(".tokens"))
    trained = page.locator(".ids .t")
    until(page, "document.querySelectorAll('.ids .t').length > 20")
    assert page.locator(".ids .m").count() > 100
    assert trained.first.text_content() == "Thought"
    colours = trained.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    assert len(set(colours)) >= 4
    clear = "rgba(0, 0, 0, 0)"
    assert clear not in colours
    assert page.locator(".ids .m").first.evaluate("one => getComputedStyle(one).backgroundColor") == clear
    trained.first.hover()
    assert "trained, log-prob -" in page.locator(".tokens .told").text_content()
    assert "id " in trained.first.get_attribute("title")


def test_retokenized_tokens_have_no_probability(page, report: str):
    open_at(page, report, "#rollout-g000002-r00-a0")
    unfold(page.locator(".tokens"))
    page.wait_for_selector(".ids .p-unknown")
    assert page.locator(".ids .t:not(.p-unknown)").count() == 0
    assert "retokenized" in page.locator("#view .facts").first.text_content()


def test_the_cost_is_told_of_the_run_its_groups_and_its_attempts(browser, tmp_path: Path):
    tokenizer = write_synthetic_run(tmp_path)
    html = tmp_path / "groups.html"
    run = write_report(
        tmp_path, tmp_path / "groups.jsonl", html, tokenizer=tokenizer, price_list=PriceList((1, 10))
    )
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(html.as_uri())
    cost = sum(row["prompt_tokens"] + 10 * row["tokens"] for row in run.rollouts.values()) / 1e6
    assert run.totals.cost == pytest.approx(cost)
    each = f"{cost / run.totals.written:.5f} a written group, {cost / run.totals.trained:.5f} a trained rollout"
    assert page.locator(".tile", has_text="cost").text_content() == f"{cost:.5f}cost{each}"
    cells = page.locator(".groups tbody .c-cost").all_text_contents()
    assert sum(map(float, cells)) == pytest.approx(cost, abs=1e-4)
    assert page.evaluate(
        "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
    )
    [first, *_] = run.rollouts.values()
    page.goto(f"{html.as_uri()}#rollout-{first['id']}")
    shows(page)
    assert page.locator(".facts div", has_text="cost").text_content() == f"cost{first['cost']:.5f}"
    page.close()


def test_a_lost_attempt_can_be_opened_and_has_no_tokens(page, report: str):
    open_at(page, report, "#rollout-g000008-r00-a2")
    assert page.locator("#view header .badge").text_content() == "sandbox_lost"
    assert "vanished" in page.locator("#view header").text_content()
    assert page.locator(".tokens").count() == 0


def test_hostile_text_is_shown_and_does_nothing(page, report: str):
    for place in (f"#group-{HOSTILE_GROUP}", *(f"#rollout-g00000{HOSTILE_GROUP}-r0{i}-a0" for i in range(4))):
        open_at(page, report, place)
        page.wait_for_selector("#view:not([hidden]) h1")
        heading = page.locator("#view h1").text_content()
        assert heading.startswith("</script><script>document.title='owned'</script><img src=x onerror=")
        assert "U+202E" in heading
        assert "ESC" in heading
        assert not set(heading) & set("\u202e\u2066\x00\x1b\u200b")
        for summary in page.locator("summary").all():
            summary.click()
        width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1]
    page.keyboard.press("Escape")
    at(page, f"#group-{HOSTILE_GROUP}")
    page.locator("#view .rows a").click()
    page.wait_for_selector(".turn")
    assert page.locator("#view header .badge").text_content() == "llm_error"
    assert HOSTILE[:40] in page.locator(".path").text_content()


def test_very_long_lines_are_cut_and_say_so(page, report: str):
    open_at(page, report, f"#rollout-g00000{HOSTILE_GROUP}-r00-a0")
    code = page.locator(".part-code pre").first.text_content()
    assert "more characters in rollouts.jsonl" in page.locator(".turn").first.text_content()
    assert len(code) < 40_000


@pytest.mark.slow
@pytest.mark.parametrize("width", [800, 1280])
@pytest.mark.parametrize("place", ["#", "#group-3", "#group-9", "#rollout-g000001-r01-a0"])
def test_nothing_is_wider_than_the_window(page, report: str, width: int, place: str):
    page.set_viewport_size({"width": width, "height": 900})
    open_at(page, report, place)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_keys_search_walk_the_groups_and_go_back(page):
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("sales")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    at(page, "#group-1")
    page.keyboard.press("j")
    at(page, "#group-2")
    page.keyboard.press("k")
    at(page, "#group-1")
    page.locator(".card .open a").first.click()
    at(page, "#rollout-g000001-r00-a0")
    page.keyboard.press("n")
    at(page, "#rollout-g000001-r01-a0")
    page.keyboard.press("p")
    at(page, "#rollout-g000001-r00-a0")
    page.keyboard.press("Escape")
    at(page, "#group-1")
    page.keyboard.press("Escape")
    page.wait_for_selector("#overview:not([hidden])")
    assert groups(page) == [str(number) for number in range(9)]  # that of group 8 stands in a transcript
    assert page.url.endswith("#?search=sales")


def test_the_address_holds_search_filter_and_order(page, report: str):
    page.fill("#search", "sales")
    page.select_option("#which", "divided")
    page.locator("th.c-tokens button").click()
    page.locator("th.c-tokens button").click()
    shown, address = groups(page), page.url
    page.goto("about:blank")
    page.goto(address)
    assert groups(page) == shown
    assert page.input_value("#search") == "sales"
    assert page.locator("th.c-tokens").get_attribute("aria-sort") == "descending"
    page.locator(".groups tbody .c-group a").first.click()
    page.wait_for_selector("#view:not([hidden])")
    page.locator(".path a").first.click()
    at(page, address[len(report) :])
    assert groups(page) == shown


def test_transcripts_ids_and_errors_are_searched(page):
    for words, found in (("g000003-r01-a0", ["3"]), ("I add them up.", ["1"]), ("TypeError", ["1"])):
        page.fill("#search", words)
        assert found[0] in groups(page), words
        assert len(groups(page)) < 10, words


def test_groups_that_are_all_right_or_all_wrong_are_one_click_away(page, report: str):
    counted = {}
    for link in page.locator(".tile.links a").all():
        number, kind = (link.text_content() or "").split(" ", 1)
        link.click()
        shows(page)
        counted[kind] = int(number)
        assert len(groups(page)) - int(number) in (0, 1)  # the one that was not written is not counted
        page.go_back()
    assert set(counted) == {"right and wrong", "all wrong", "all right"}


def test_the_commonest_errors_lead_to_where_they_were_met(page):
    errors = page.locator(".panel", has_text="Commonest errors").locator("li")
    assert errors.first.text_content().startswith("TypeError in 16 rollouts, 16 steps ")
    errors.first.locator("a").click()
    shows(page)
    assert page.input_value("#search") == "TypeError"
    assert set(groups(page)) < set(map(str, range(10)))


def test_scores_are_shown_over_time_and_by_the_weights_that_sampled(page, tmp_path: Path):
    """Groups from 5 on were sampled by newer weights, and only their rollouts solve anything."""
    write_synthetic_run(tmp_path)
    path = tmp_path / "rollouts.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines() if row.startswith("{") and '"plan":' in row]
    for place, row in enumerate(rows):
        newer = row["group"] >= 5
        row |= {"started_at": 1e9 + place, "score_parts": {}}
        row["score"] = None if row["score"] is None else float(newer)
        for completion in row["completions"]:
            completion |= {"policy_version": "8" if newer else "7", "policy_spans": []}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    other, errors = opened_apart(page, tmp_path)
    course = other.locator(".panel", has_text="Scores over time")
    points = course.locator("polyline.solved").get_attribute("points").split()
    heights = [float(point.split(",")[1]) for point in points]
    assert (heights[0], heights[-1]) == (125, 15)  # from none to all
    assert course.locator(".bars .name").all_text_contents() == ["7", "8"]
    assert [text.split()[0] for text in course.locator(".bars .number").all_text_contents()] == ["0.000", "1.000"]
    assert errors == []


def test_a_link_opens_the_turn_that_it_names(page, report: str):
    open_at(page, report, "#rollout-g000001-r01-a0")
    last = page.locator(".turn").last
    last.locator(".anchor").click()
    at(page, "#rollout-g000001-r01-a0/3")
    page.goto("about:blank")
    open_at(page, report, "#rollout-g000001-r01-a0/3")
    top = page.locator("#turn-3").evaluate("turn => turn.getBoundingClientRect().top")
    assert abs(top) < 900
    assert page.title() == "g000001-r01-a0 – run0 – run report"


def test_two_rollouts_stand_side_by_side_and_the_first_difference_is_marked(page, report: str):
    open_at(page, report, "#beside-g000001-r00-a0/g000001-r01-a0")
    assert page.locator(".beside .differs").count() == 1
    assert page.locator(".beside .turn").count() == 5
    page.select_option("select[aria-label='the right rollout']", "g000001-r00-a0")
    at(page, "#beside-g000001-r00-a0/g000001-r00-a0")
    assert "They say the same." in page.locator("#view header").text_content()
    for place in ("#beside-g000001-r00-a0/g000002-r00-a0", "#beside-g000001-r00-a0"):  # of another group; half
        open_at(page, report, place)
        assert page.locator("#overview").is_visible()


def test_code_prompts_ids_and_the_command_of_a_replay_are_copied(page, report: str):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    open_at(page, report, "#rollout-g000001-r01-a0")
    page.get_by_role("button", name="copy the command that replays it").click()
    page.get_by_role("button", name="copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("orchestrator replay /")
    assert copied.endswith("--rollout g000001-r01-a0")
    for place, ending in (("", "g000001-r01-a0"), ("/2", "g000001-r01-a0 --turn 2")):
        open_at(page, report, f"#rollout-g000001-r01-a0{place}")
        page.get_by_role("button", name="copy the command that branches at the open turn").click()
        until(page, f"navigator.clipboard.readText().then((text) => text.endsWith('--rollout {ending}'))")
        assert page.evaluate("navigator.clipboard.readText()").startswith("orchestrator branch /")
    page.locator(".turn").nth(1).locator(".part-code .copy").click()
    until(page, "navigator.clipboard.readText().then((text) => text.startsWith('total = '))")
    unfold(page.locator(".tokens"))
    page.get_by_role("button", name="copy the ids").click()
    until(page, "navigator.clipboard.readText().then((text) => JSON.parse(text).length > 100, () => false)")


def test_the_report_of_a_groups_file_offers_no_command_that_needs_a_record(browser, report: str, tmp_path: Path):
    shutil.copy(report.removeprefix("file://").replace(".html", ".jsonl"), tmp_path / "alone.jsonl")
    assert main(["view", str(tmp_path / "alone.jsonl")]) == 0
    with closing(browser.new_context()) as context:
        alone = context.new_page()
        alone.goto((tmp_path / "alone.html").as_uri() + "#rollout-g000001-r01-a0")
        assert alone.title().endswith("alone.jsonl – run report")
        assert alone.locator("#view h1").count() == 1
        assert alone.locator("#view header .copy").count() == 0


def test_tokens_are_read_by_keyboard(page, report: str):
    open_at(page, report, "#rollout-g000001-r00-a0")
    unfold(page.locator(".tokens"))
    until(page, "document.querySelectorAll('.ids .t').length > 20")
    page.locator(".ids").focus()
    page.keyboard.press("ArrowRight")
    first = page.locator(".tokens .told").text_content()
    page.keyboard.press("ArrowRight")
    assert "trained, log-prob" in first
    places = [int(text.split()[1].rstrip(",")) for text in (first, page.locator(".tokens .told").text_content())]
    assert places[1] == places[0] + 1


def test_a_group_without_a_right_answer_has_no_green_outcome(page):
    green = page.locator(".groups tbody tr").evaluate_all(
        "rows => rows.map(row => [row.querySelectorAll('.badge.finished').length > 0, "
        "row.querySelectorAll('.scores .correct').length > 0])"
    )
    assert all(badge == right for badge, right in green)
    assert {badge for badge, _ in green} == {True, False}


def test_an_address_of_nothing_shows_the_run(page, report: str):
    for place in ("#group-99", "#rollout-no", "#%E0%A4%A", "#__proto__"):
        open_at(page, report, place)
        assert page.locator("#overview").is_visible()


def opened_apart(page, folder: Path):
    """The report of another run in a page of its own, and the errors it meets."""
    write_report(folder, folder / "groups.jsonl", folder / "groups.html")
    other = page.context.new_page()
    errors: list[str] = []
    other.on("pageerror", lambda error: errors.append(str(error)))
    other.goto((folder / "groups.html").as_uri())
    return other, errors


def test_a_report_of_an_empty_run_opens(page, tmp_path: Path):
    empty, errors = opened_apart(page, tmp_path)
    assert empty.locator(".tile b").all_text_contents()[:3] == ["–", "–", "0"]
    assert "no rollout was scored" in empty.locator(".panels").text_content()
    assert errors == []


def test_a_rollout_that_was_graded_later_had_one_slot(page, tmp_path: Path):
    timed = {"started_at": 1e9, "duration_s": 5.0, "launch_s": 0.5}
    ended = {"outcome": "finished", "reason": ""}
    stopped = an_attempt_line(outcome="cancelled", score=None, ungraded=ended, **timed)
    graded = an_attempt_line(rollout_id="g000000-r00-a1", attempt=1, **timed)
    (tmp_path / "rollouts.jsonl").write_bytes(b"".join(dumps(line) + b"\n" for line in (stopped, graded)))
    once, errors = opened_apart(page, tmp_path)
    assert once.locator("canvas.slots").get_attribute("aria-label").startswith("1 slot over 5.50 s:")
    assert errors == []


@pytest.mark.long
def test_fields_of_any_type_break_no_view(page, tmp_path: Path):
    count = write_odd_run(tmp_path)
    odd, errors = opened_apart(page, tmp_path)
    hashes = odd.evaluate("run.rollouts.map(rolloutHash)")
    assert len(hashes) == count
    for place in ("#group-0", *hashes):
        odd.evaluate("place => { location.hash = place; route(); }", place)
        assert odd.locator("#view h1").count() == 1
    assert errors == []


@pytest.mark.parametrize(("format", "shown"), [("hermes", ["ls -l"]), (None, ["pwd"])])
def test_commands_of_a_shell_agent_are_code(browser, tmp_path: Path, format: str | None, shown: list[str]):
    """Those of calls come from the step, those of blocks from the text."""
    tokenizer = write_synthetic_run(tmp_path)
    path = tmp_path / "rollouts.jsonl"
    line = next(json.loads(row) for row in path.read_text().splitlines() if '"steps":[{' in row)
    line["plan"]["agent"] |= {"kind": "shell", "call_format": format}
    line["steps"] = [{**line["steps"][0], "code": "ls -l"}]
    line["completions"] = [
        {**line["completions"][0], "text": "I look.\n```bash\npwd\n```\n", "reasoning_chars": 0}
    ]
    path.write_text(json.dumps(line) + "\n")
    write_report(tmp_path, tmp_path / "groups.jsonl", tmp_path / "groups.html", tokenizer=tokenizer)
    page = browser.new_page()
    open_at(page, (tmp_path / "groups.html").as_uri(), f"#rollout-{line['rollout_id']}")
    assert page.locator(".turn .part-code pre").all_text_contents() == shown
    page.close()


def test_a_tree_is_drawn_and_leads_to_its_branches_by_keyboard(browser, tmp_path: Path) -> None:
    group = tree()
    record = b"".join(dumps(attempt_line(member)) + b"\n" for member in group.members_G)
    (tmp_path / "rollouts.jsonl").write_bytes(record)
    (tmp_path / "groups.jsonl").write_bytes(dumps(scored_data_group(group)) + b"\n")
    write_report(tmp_path, tmp_path / "groups.jsonl", tmp_path / "tree.html", tokenizer=None)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{(tmp_path / 'tree.html').as_uri()}#group-0")
    shows(page)
    assert page.locator(".tree > li").count() == 2, "the trunk and the whole rollout"
    forks = page.locator(".tree .fork")
    assert [text.split(" of its own")[0].split("-a0")[0] for text in forks.all_text_contents()] == [
        "from turn 21.000 g000000-r01",
        "from turn 30.000 g000000-r02",
    ]
    forks.locator("a").first.focus()
    page.keyboard.press("Enter")
    at(page, "#rollout-g000000-r01-a0")
    assert "branched from g000000-r00-a0, turn 2" in page.locator("header").last.text_content()
    assert page.locator(".turn").count() == 3
    assert page.locator(".turn.inherited").count() == 1
    page.locator("header a", has_text="turn 2").click()
    at(page, "#rollout-g000000-r00-a0/2")
    page.close()


def test_a_rollout_shows_its_requests_and_services(page, tmp_path: Path):
    asked = {
        "started_s": 1.0,
        "ended_s": 1.5,
        "method": "GET",
        "scheme": "https",
        "host": "files.example",
        "port": 443,
    }
    asked |= {"target": "/" + "x" * 200, "status": 200, "refusal": "", "sent": 0, "received": 1234}
    no = asked | {"refusal": "<img src=x onerror=alert(1)>", "status": None, "source": "border"}
    crossings = [asked | {"source": "cache"}, no, *[asked | {"source": "network"}] * 203]
    beside = {"name": "db", "image": "postgres:16", "started_s": 0.0, "healthy_s": 2.0, "log": "<b>ready</b>"}
    services = [beside | {"ended": ""}, beside | {"name": "q", "healthy_s": None, "ended": "code 1", "log": ""}]
    call = {
        "name": "get_time",
        "arguments": {},
        "output": "12:00",
        "error": None,
        "started_s": 2.5,
        "ended_s": 3.0,
    }
    turns = [{"kind": "action", "text": "a", "started_s": at, "ended_s": at + 0.5} for at in (0.0, 1.6)]
    line = an_attempt_line(crossings=crossings, services=services, tool_calls=[call], completions=turns)
    (tmp_path / "rollouts.jsonl").write_bytes(dumps(line | {"duration_s": 4.0, "started_at": 1e9}) + b"\n")
    (tmp_path / "run.json").write_text('{"agent": {"mcp_tools": {"get_time": {"server": "clock"}}}}')
    odd, errors = opened_apart(page, tmp_path)
    tiles = odd.locator(".tile").all_text_contents()
    assert "205requests to the outside1 refused, 1 from the cache, 253 kB received" in tiles
    assert "2services beside agents1 ended by themselves" in tiles
    assert "asks the outside" in odd.locator(".legend").last.text_content()
    odd.evaluate("() => { location.hash = rolloutHash(run.rollouts[0]); route(); }")
    shows(odd)
    course = odd.locator(".course")
    assert course.locator(".lane").evaluate_all("all => all.map((one) => one.ariaLabel)") == [
        "completions: 2", "MCP clock: 1", "requests: 205, 1 refused", "db: there after 2.00 s", "q: code 1",
    ]  # fmt: skip
    assert course.locator(".bad").count() == 2  # the refused request, and the service that ended
    starts, runs = (course.locator(".lane").nth(3).locator("i").nth(place).bounding_box() for place in range(2))
    assert runs["width"] == pytest.approx(2 * starts["width"], abs=2)  # 2 s before the assignment, 4 s behind it
    course.locator(".bad").first.hover()
    assert odd.locator(".course + .told").text_content().startswith("GET https://files.example:443/xxx")
    course.locator(".lane").nth(1).locator("i").click()
    odd.wait_for_url("**/2")
    shows(odd)
    assert "MCP clock: get_time" in odd.locator("#turn-2").text_content()
    assert "200 requests to the outside, 1 refused" in odd.locator("#turn-1 h2").text_content()
    figures = odd.locator("#view dl.facts").first.text_content()
    assert "requests205" in figures
    assert "refused1" in figures
    requests = odd.locator(".requests")
    unfold(requests)
    assert requests.locator("tbody tr").count() == 200
    first, refused = (requests.locator("tbody tr").nth(place) for place in range(2))
    assert first.locator("td").all_text_contents() == [
        "GET", ("https://files.example:443/" + "x" * 200)[:80] + "…", "200", "0", "1,234", "0.50 s", "cache",
    ]  # fmt: skip
    assert refused.get_attribute("class") == "refused"
    assert refused.locator("td").nth(2).text_content() == "refused: <img src=x onerror=alert(1)>"
    assert requests.locator("p.none").text_content() == "5 more requests in the record"
    beside_it = odd.locator(".services")
    unfold(beside_it)
    rows = beside_it.locator("tbody tr")
    assert rows.nth(0).locator("td").all_text_contents() == ["db", "postgres:16", "2.00 s", "with the rollout"]
    assert rows.nth(1).locator("td").all_text_contents() == ["q", "postgres:16", "never", "code 1"]
    unfold(beside_it.locator("details"))
    assert beside_it.locator("pre").text_content() == "<b>ready</b>"
    for width in (390, 1280):
        odd.set_viewport_size({"width": width, "height": 900})
        assert odd.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert errors == []
