"""The page of a run under way, in a real browser."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.inference import Reply, ScriptedServer, by_task
from tests.fakes.runs import Running, answers, flags, lines, run, running, until, whole_lines

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
TASKS = 8


async def page_url(started: Running) -> str:
    """Where the run says that its page is."""
    assert started.process.stderr is not None
    while "live page: " not in (said := (await started.process.stderr.readline()).decode()):
        assert said, "it has ended"
    return said.split()[-1]


def fetched(url: str | urllib.request.Request, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(url, method=method) if isinstance(url, str) else url
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Any, list[str]]]:
    """The page in a browser, and what it complained of or asked of others."""
    origin = url.partition("?")[0]
    async with playwright.async_playwright() as api:
        browser = await api.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        seen: list[str] = []
        page.on("pageerror", lambda error: seen.append(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith(origin) or seen.append(request.url))
        await page.goto(url)
        yield page, seen
        await browser.close()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
async def test_it_follows_the_run_and_keeps_the_last_that_was_known(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS, delay_s=1.0)) as server:
        given = flags(home, server.base_url, view_port=0, max_concurrent_sandboxes=2, compress="zstd")
        async with running(*given, directory=home) as started:
            url = await page_url(started)
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}", url)
            async with opened(url) as (page, seen):
                await page.wait_for_selector(".groups tbody tr")
                early = await page.locator(".groups tbody tr").count()
                assert "2 of 2 in use" in await page.locator(".live").inner_text()
                await page.fill("#search", "number 0")
                await page.wait_for_timeout(3000)
                assert await page.evaluate("document.activeElement.id") == "search"
                await page.fill("#search", "")
                # It has ended, and its group may not be written yet: its tokens come when it is.
                await page.evaluate("location.hash = rolloutHash(run.rollouts[0])")
                await page.wait_for_selector(".turn .part-code")
                await page.click(".tokens > summary")
                await page.wait_for_selector(".ids .t")
                assert "Reference answer" in await page.locator("#view").inner_text()
                ended = await started.ended()
                await page.evaluate("location.hash = ''")
                await page.wait_for_selector(".live.away")
                last = await page.locator(".groups tbody tr").count()
    assert ended.code == 0, ended.stderr
    assert seen == []
    assert 0 < early < TASKS
    assert early <= last <= TASKS


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
async def test_a_rollout_under_way_is_opened_and_shows_its_turns_as_they_come(home: Path) -> None:
    code = "<code>\nprint('turn {}')\n</code>"
    turns = [Reply(f"Thought: {n}.\n{code.format(n)}", delay_s=3.0) for n in range(4)]
    turns.append(Reply("<code>\nfinal_answer(1)\n</code>", delay_s=3.0))
    async with ScriptedServer("vllm", by_task({f"of q{n}!": [turns] for n in range(TASKS)})) as server:
        given = flags(home, server.base_url, view_port=0, max_concurrent_sandboxes=1, group_size=2, total_steps=2)
        async with running(*given, directory=home) as started:
            async with opened(await page_url(started)) as (page, seen):
                link = page.locator(".running a").first
                name = await link.text_content()
                assert "What is number" in await page.locator(".running .reason").first.inner_text()
                await link.click()
                await page.wait_for_selector(".turn:nth-child(2) .part-code")
                assert whole_lines(home / "run" / "rollouts.jsonl") == 0, "it has not ended"
                assert "under way" in await page.locator("#view header").inner_text()
                assert "turn 0" in await page.locator(".turn").first.inner_text()
                await page.wait_for_selector(".turn:nth-child(3) .part-code")
                await page.wait_for_selector("#view .answer")
                assert await page.locator(".turn").count() == 5
                assert f"#rollout-{name}" in page.url
                assert "finished" in await page.locator("#view header").inner_text()
                assert "No tokens" in await page.locator("#view").inner_text(), "the other one has not ended"
                await page.click(".tokens > summary")
                await page.wait_for_selector(".ids .t")
            started.signal(signal.SIGTERM)
            ended = await started.ended()
    assert ended.code == 143, ended.stderr
    assert seen == []


@pytest.mark.slow
async def test_only_who_has_the_token_reads_it_and_nobody_changes_anything(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS, delay_s=1.0)) as server:
        given = flags(home, server.base_url, view_port=0, max_concurrent_sandboxes=2)
        async with running(*given, directory=home) as started:
            url = await page_url(started)
            origin, _, token = url.partition("?token=")

            async def get(path: str, **how: str) -> tuple[int, bytes]:
                return await asyncio.to_thread(fetched, f"{origin}{path}", **how)

            await until(lambda: whole_lines(home / "run" / "rollouts.jsonl") >= 2, "rollouts")
            for path in ("", "?token=", "?token=x", "update", "groups", "rollout?id=g000000-r00-a0", f"x/{token}"):
                code, body = await get(path)
                assert code in (403, 404)
                assert b"Thought" not in body
                assert b"g000000" not in body
            for method in ("POST", "PUT", "DELETE"):
                assert (await get(f"?token={token}", method=method))[0] == 405
            for given in ("-1", "x", "9" * 40, "1.5", "0&sort=x", "0&which=1;DROP TABLE found"):
                assert (await get(f"groups?token={token}&first={given}".replace(" ", "+")))[0] == 400
            code, body = await get(f"rollout?token={token}&id=../../etc/passwd")
            assert (code, body) == (200, b"null")
            first = json.loads((await get(f"update?token={token}"))[1])
            assert first["all_groups"]
            again = json.loads((await get(f"update?token={token}"))[1])
            assert again["version"] >= first["version"]
            rebound = urllib.request.Request(f"{origin}update?token={token}", headers={"Host": "evil.example"})
            assert (await asyncio.to_thread(fetched, rebound))[0] == 403
            assert again["state"]["hosts"][""]["slots"] == 2
            ended = await started.ended()
    assert ended.code == 0, ended.stderr


async def test_where_nothing_can_be_shown_it_is_said_before_anything_begins(home: Path) -> None:
    async with ScriptedServer("vllm", answers(TASKS)) as server:
        port = server.base_url.removesuffix("/v1").rpartition(":")[2]
        taken = await run(*flags(home, server.base_url, view_port=port), directory=home)
    assert taken.code == 3
    assert f"env.view_port: nothing can listen at {port}" in taken.stderr
    assert not taken.traceback
    assert lines(home / "run" / "rollouts.jsonl") == []
