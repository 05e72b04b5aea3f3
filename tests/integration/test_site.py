"""The documentation as a site: every page is on it, and no link on it leads nowhere."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.fakes.runs import ROOT


def pages(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for place in entry.values():
            if isinstance(place, list):
                yield from pages(place)
            else:
                yield place


def test_every_page_is_in_the_menu_once() -> None:
    named = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    there = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    around = ["README.md", "SECURITY.md", "ARCHITECTURE.md", "CHANGELOG.md"]
    around += ["examples/README.md", "examples/code-tasks/README.md"]
    assert sorted(named) == sorted([*there, *around])


def built_site(folder: Path) -> Path:
    """The site, built in `folder`. Skips the test where it cannot be."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("Zensical is not installed")
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("README.md", "SECURITY.md", "ARCHITECTURE.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, folder)
    subprocess.run(["bash", "docs/stage.sh", "build/site-source"], cwd=folder, check=True)
    built = subprocess.run(
        [str(Path(sys.executable).with_name("zensical")), "build", "--clean", "--strict", "-f", "mkdocs.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build" / "site"


@pytest.mark.full
def test_it_is_built_without_a_warning_and_can_be_searched(tmp_path: Path) -> None:
    site = built_site(tmp_path)
    found = json.dumps(json.loads((site / "search.json").read_text()))
    for word in ("max_cost", "sandbox_lost", "Reinforcement learning", "view_port"):
        assert word in found
    assert (site / "docs" / "tutorials" / "rl" / "index.html").exists()
    assert dead_links(site) == []


class Page(HTMLParser):
    """The links of a page, and the places on it that a link can name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            if name == "id" and value:
                self.places.add(value)


def dead_links(site: Path) -> list[str]:
    """Links inside the site that lead nowhere, each with its page. A folder is a page only if it has an index."""
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            address, _, place = link.partition("#")
            if urlsplit(address).scheme or address.startswith("//"):
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (place and target in pages and place not in pages[target].places):
                dead.append(f"{path.relative_to(site)}: {link}")
    return sorted(dead)
