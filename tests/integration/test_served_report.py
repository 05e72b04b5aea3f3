"""`view --serve` in a real browser: it shows what the report in a file shows, of all rollouts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.report import write_report
from tests.fakes.synthetic_run import write_synthetic_run
from tests.integration.test_report_browser import CHROMIUM, FLAGS, at, groups, until

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
SHOWN = "document.querySelector('main:not([hidden])').innerText"


@contextmanager
def served(run: Path, *flags: str) -> Iterator[str]:
    """The URL of `orchestrator view --serve RUN`."""
    argv = [sys.executable, "-m", "orchestrator", "view", "--serve", str(run), *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("served") / "run"
    write_synthetic_run(run)
    return run


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    with served(run, "--tokenizer", "none") as url:
        yield url


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium.new_context(viewport={"width": 1280, "height": 900})
        chromium.close()


@pytest.fixture
def opened(context) -> Iterator[Callable[[str], Any]]:
    """Opens a page. Afterwards none may have complained, run anything of the run's, or asked others."""
    pages, seen = [], []

    def open_page(url: str) -> Any:
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: seen.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (seen.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda request: request.url.startswith((url.partition("?")[0], "about:")) or seen.append(request.url),
        )
        page.goto(url)
        page.wait_for_selector(".groups tbody tr")
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        assert page.title() != "owned"
        assert page.locator("img, iframe, object, svg[onload], main script").count() == 0
        page.close()
    assert seen == []


@pytest.mark.slow
def test_it_shows_what_the_report_in_a_file_shows(run: Path, url: str, opened, tmp_path: Path) -> None:
    write_report(run, run / "groups.jsonl", tmp_path / "report.html")
    there, here = opened((tmp_path / "report.html").as_uri()), opened(url)
    until(here, "run.rollouts.length === 45 && document.querySelector('.slots') !== null")
    assert here.evaluate(SHOWN).splitlines() == there.evaluate(SHOWN).splitlines()
    places = there.evaluate("[...run.groups.map((g) => `#group-${g.number}`), ...run.rollouts.map(rolloutHash)]")
    assert len(places) == 55
    for place in places:
        for page in (there, here):
            page.evaluate(f"location.hash = {place!r}" if "'" not in place else f'location.hash = "{place}"')
            until(page, "document.body.dataset.shown === location.hash && !view.hidden")
        assert here.evaluate(SHOWN).splitlines() == there.evaluate(SHOWN).splitlines(), place
    order = "[...document.querySelectorAll('.groups tbody .c-group')].map((cell) => cell.textContent).join()"
    for query in (
        "#?sort=mean", "#?sort=mean&down=1", "#?sort=scores&down=1", "#?sort=outcomes", "#?search=typeerror",
        "#?sort=spread&which=divided", "#?search=NORTHERN+3%3F", "#?search=%C3%BCber+alles", "#?which=dropped",
        "#?which=wrong", "#?outcome=sandbox_lost", "#?sort=seconds&outcome=finished", "#?search=nothing",
    ):  # fmt: skip
        there.evaluate(f"location.hash = '{query}'")
        here.evaluate(f"location.hash = '{query}'")
        until(there, "document.body.dataset.shown === location.hash && view.hidden")
        wanted = there.evaluate(order)
        until(here, f"{order} === '{wanted}'")
        told = there.locator(".tools .told").text_content()
        until(here, f"document.querySelector('.tools .told').textContent === '{told}'")


@pytest.mark.slow
def test_it_is_read_by_keyboard_and_an_address_opens_the_same_again(url: str, opened) -> None:
    page = opened(url)
    page.keyboard.press("/")
    page.keyboard.type("typeerror")
    at(page, "#?search=typeerror")
    until(page, "document.querySelector('.tools .told').textContent === '9 of 10 groups'")
    page.keyboard.press("Escape")
    for key in "jj":
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    at(page, "#group-1")
    page.keyboard.press("j")
    at(page, "#group-2")
    page.keyboard.press("k")
    at(page, "#group-1")
    page.keyboard.press("n")
    at(page, "#rollout-g000001-r00-a0")
    page.keyboard.press("n")
    at(page, "#rollout-g000001-r01-a0")
    assert page.locator(".turn .part-code").count() > 0
    again = opened(url)
    again.goto(page.url)
    until(again, "document.body.dataset.shown === '#rollout-g000001-r01-a0'")
    assert again.evaluate(SHOWN) == page.evaluate(SHOWN)
    for place in ("#group-1", "#?search=typeerror"):
        page.keyboard.press("Escape")
        at(page, place)


def test_a_place_that_is_not_there_shows_the_run(url: str, opened) -> None:
    page = opened(url)
    for place in ("#group-99", "#rollout-nobody", "#group-" + "9" * 30, "#beside-g000001-r00-a0/x", "#rollout-%"):
        page.goto(url + place)
        until(page, "!home.hidden && document.body.dataset.shown === location.hash")
        assert groups(page)[:2] == ["0", "1"]


def test_a_run_that_grows_and_one_that_is_replaced_are_followed(run: Path, opened, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("rollouts.index*"))
    record = copy / "rollouts.jsonl"
    lines = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(lines[:8]))
    with served(copy) as url:
        page = opened(url)
        assert groups(page) == ["0", "1"]
        with record.open("ab") as end:
            end.writelines(lines[8:12])
        page.goto(url)
        page.reload()
        until(page, "document.querySelectorAll('.groups tbody tr').length === 3")
        record.with_suffix(".new").write_bytes(b"".join(lines[12:21]))
        os.replace(record.with_suffix(".new"), record)
        page.reload()
        until(page, "document.querySelector('.groups tbody .c-group')?.textContent === '3'")
        assert groups(page) == ["3", "4"]
        page.goto("about:blank")


def test_it_is_for_this_machine_and_who_has_the_token(url: str) -> None:
    origin, _, token = url.partition("?token=")
    assert origin.startswith("http://127.0.0.1:")

    def asked(path: str, host: str = "127.0.0.1") -> int:
        request = urllib.request.Request(origin + path, headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    for path in ("", "update", "groups", "group?number=1", "rollout?id=g000001-r00-a0", "ended?after=0"):
        joined = "&" if "?" in path else "?"
        assert asked(path) == asked(f"{path}{joined}token=x") == 403
        assert asked(f"{path}{joined}token={token}") == asked(f"{path}{joined}token={token}", "localhost:1") == 200
        assert asked(f"{path}{joined}token={token}", "127.0.0.1.evil.example") == 403


@pytest.mark.slow
def test_what_makes_no_sense_is_refused(run: Path) -> None:
    for flags in (["--serve", "--group", "1"], ["--serve", "--output", "x.html"], ["--port", "0"]):
        argv = [sys.executable, "-m", "orchestrator", "view", str(run), *flags]
        told = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert told.returncode == 2
        assert "--serve" in told.stderr
