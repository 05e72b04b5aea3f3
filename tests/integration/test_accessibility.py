"""Every kind of page by axe-core, light and dark, wide and narrow; and all of it by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.report import write_report
from orchestrator.rules.observer import Observer
from orchestrator.telemetry.live_page import live_page
from tests.e2e.guide import blocks
from tests.fakes.runs import ROOT
from tests.fakes.synthetic_run import write_synthetic_run
from tests.integration.test_site import built_site
from tests.unit.test_evaluation_page import write_evaluation

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
GRAVE = ("serious", "critical")
ALL_LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (390, 1280)]
# One of each scheme and width in `make test`.
LOOKS = [
    pytest.param(*look, marks=[] if look in (("light", 1280), ("dark", 390)) else pytest.mark.full)
    for look in ALL_LOOKS
]
SEES_COPIES = """addEventListener("copy", () => {
  const field = document.activeElement;
  window.copied = field && "value" in field && field.value ? field.value : String(getSelection());
}, true);"""
# A part that was opened is built a little later.
BUILT = """() => new Promise((built) => {
  const look = () => [...document.querySelectorAll("details[open]")].every((one) => one.childElementCount > 1)
    ? built() : setTimeout(look, 10);
  look();
})"""
PLACES = {
    "report": (
        "", "#group-1", "#rollout-g000001-r01-a0", "#rollout-g000008-r00-a0",
        "#beside-g000001-r00-a0/g000001-r01-a0",
    ),
    "evaluation": ("", "#group-0"),
    "shared": ("", "#group-0"),
    "compared": ("",),
}  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Each kind of page: where it is."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "run").mkdir()
    tokenizer = write_synthetic_run(folder / "run")
    write_report(folder / "run", folder / "run" / "groups.jsonl", folder / "report.html", tokenizer=tokenizer)
    evaluations = [write_evaluation(folder / name) for name in ("a", "b")]
    for run in evaluations:
        assert main(["view", str(run)]) == 0
    assert main(["view", str(evaluations[0]), "--no-answers", "--output", str(folder / "shared.html")]) == 0
    assert main(["compare", *map(str, evaluations), "--html", str(folder / "compared.html")]) == 0
    pages = {name: folder / f"{name}.html" for name in ("report", "shared", "compared")}
    return {
        name: path.as_uri() for name, path in (pages | {"evaluation": folder / "a" / "evaluation.html"}).items()
    }


@asynccontextmanager
async def opened(scheme: str, width: int) -> AsyncIterator[Any]:
    async with playwright.async_playwright() as api:
        browser = await api.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = await browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.set_default_timeout(60_000)
        yield page
        await browser.close()


async def findings(page: Any) -> list[str]:
    """What axe-core finds grave on the page as it is, with where."""
    await page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    found = await page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    assert found["passes"], "it has looked"
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in found["violations"]
        for node in violation["nodes"]
        if node["impact"] in GRAVE
    ]


async def wider_than_the_window(page: Any) -> bool:
    return await page.evaluate("document.documentElement.scrollWidth > innerWidth")


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), LOOKS)
async def test_no_page_has_a_grave_finding(made: dict[str, str], scheme: str, width: int) -> None:
    found: list[str] = []
    async with opened(scheme, width) as page:
        for name, places in PLACES.items():
            for place in places:
                await page.goto("about:blank")
                await page.goto(made[name] + place)
                if name != "compared":
                    await page.wait_for_selector("main:not([hidden]) h1")
                for summary in await page.locator("details:not([open]) > summary").all():
                    if await summary.is_visible():
                        await summary.click()
                await page.evaluate(BUILT)
                found += [f"{name}{place}: {finding}" for finding in await findings(page)]
                assert not await wider_than_the_window(page), name + place
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), LOOKS)
async def test_the_live_page_has_none(tmp_path: Path, scheme: str, width: int) -> None:
    write_synthetic_run(tmp_path)
    async with live_page("0", tmp_path, Observer(), lambda: None) as url, opened(scheme, width) as page:
        await page.goto(url)
        await page.wait_for_selector(".groups tbody tr")
        assert not (found := await findings(page)), "\n".join(found)
        assert not await wider_than_the_window(page)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PLACES))
async def test_everything_is_reached_and_worked_by_keyboard(made: dict[str, str], name: str) -> None:
    async with opened("light", 1280) as page:
        await page.goto(made[name])
        wanted = "a[href], button, input, select, summary, [tabindex='0']"
        shown = await page.locator(wanted).evaluate_all("all => all.filter(e => e.checkVisibility()).length")
        for reached in range(shown):
            await page.keyboard.press("Tab")
            at = "document.activeElement"
            assert await page.evaluate(f"{at} !== document.body"), f"{reached} of {shown}"
            assert await page.evaluate(f"getComputedStyle({at}).outlineStyle") != "none", "focus is seen"
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement === document.body"), "no more than these"


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "width"), ALL_LOOKS)
async def test_the_site_has_none_and_its_diagram_is_whole(site: Path, scheme: str, width: int) -> None:
    async with opened(scheme, width) as page:
        await page.goto((site / "index.html").as_uri())
        assert not (found := await findings(page)), "\n".join(found)
        assert not await wider_than_the_window(page)
        for between in (width, 768):
            await page.set_viewport_size({"width": between, "height": 900})
            diagram = page.locator("pre > code", has_text="one container per rollout")
            assert await diagram.evaluate("code => code.scrollWidth <= code.clientWidth"), between


@pytest.mark.full
async def test_what_a_tutorial_copies_is_what_runs(site: Path) -> None:
    """The button gives the block as the tests run it, without a prompt or a line more."""
    async with opened("light", 1280) as page:
        await page.add_init_script(SEES_COPIES)
        for source in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
            await page.goto((site / "docs" / "tutorials" / source.stem / "index.html").as_uri())
            wanted = [block.text.strip() for block in blocks(source.read_text("utf-8"))]
            buttons = page.locator("button.md-code__button[data-md-type=copy], button.md-clipboard")
            assert await buttons.count() == len(wanted), source.stem
            for place, text in enumerate(wanted):
                await buttons.nth(place).click(force=True)
                assert (await page.evaluate("window.copied")).strip() == text


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_site(tmp_path_factory.mktemp("site"))


async def test_the_time_line_is_worked_by_keys(made: dict[str, str]) -> None:
    async with opened("light", 1280) as page:
        await page.goto(made["report"])
        await page.locator("canvas.slots").focus()
        await page.keyboard.press("ArrowRight")
        first = await page.locator(".below .told").inner_text()
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("ArrowRight")
        second = await page.locator(".below .told").inner_text()
        assert first.partition(" ")[0] != second.partition(" ")[0]
        await page.keyboard.press("+")
        assert await page.locator(".below button").is_visible(), "it is enlarged"
        await page.keyboard.press("Enter")
        await page.wait_for_url("**#rollout-*")
