"""docs/troubleshooting.md quotes errors that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from orchestrator.settings.table import SECTIONS
from orchestrator.types import EndedName, FailedName

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()


def said() -> str:
    """All texts of the program, docstrings left out. In a text with expressions these are left out."""
    texts = []
    for file in (ROOT / "orchestrator").rglob("*.py"):
        docs = set()
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):  # what holds a node comes before it
            if isinstance(node, ast.Expr):
                docs.add(node.value)
            elif node in docs:
                continue
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))  # type: ignore[misc]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def quoted() -> list[str]:
    """The first column's quotations."""
    rows = re.findall(r"^\| (?!the error|---)([^|]+) \|", PAGE, re.MULTILINE)
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row)]


def test_what_it_quotes_is_said() -> None:
    known = said()
    assert [text for text in quoted() if text not in known and text not in {*EndedName, *FailedName}] == []


def test_settings_it_names_exist() -> None:
    known = {row.key for section in SECTIONS.values() for row in section.rows().values()}
    named = set(re.findall(r"`(?:--)?((?:env|openai)\.[a-z_]+)[ `]", PAGE))
    assert len(named) > 8
    assert named <= known
