"""What sections hand in, and how it is shown: a table on the terminal, JSON and an SVG in a folder.

A figure is one number with its unit and, where the project promises one, its bound. A figure that could not be
measured has no value and says why.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from html import escape
from math import log10
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class Scale(StrEnum):
    """How much is measured: a second or two per section (does it run?), minutes, or all there is."""

    TINY = "tiny"
    QUICK = "quick"
    FULL = "full"

    def pick(self, tiny: T, quick: T, full: T) -> T:
        """The one that belongs to this scale."""
        return {Scale.TINY: tiny, Scale.QUICK: quick, Scale.FULL: full}[self]


@dataclass(frozen=True, slots=True)
class Figure:
    """One result. `at_most` and `at_least` are promises; `note` says how to read it, or why there is no value."""

    name: str
    value: float | None
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def bound(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"

    @property
    def holds(self) -> bool | None:
        """None: nothing is promised, or nothing was measured."""
        if self.value is None or not self.bound:
            return None
        return self.value <= self.at_most if self.at_most is not None else self.value >= (self.at_least or 0.0)

    @property
    def shown(self) -> str:
        if self.value is None:
            return "-"
        size = abs(self.value)
        return f"{self.value:.0f}" if size >= 100 else f"{self.value:.3g}"


@dataclass(slots=True)
class Findings:
    """What one section found. `samples`: the single measurements, by name."""

    figures: list[Figure] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, value: float | None, unit: str, **more: Any) -> None:
        """One more figure; `more` as in `Figure`."""
        self.figures.append(Figure(name, value, unit, **more))


@dataclass(frozen=True, slots=True)
class Section:
    """One section as it was measured. `load`: the load averages (1 min) before and after."""

    name: str
    title: str
    findings: Findings
    wall_s: float
    load: tuple[float, float]
    error: str = ""


def table(section: Section) -> str:
    """The section for a terminal."""
    rows = [
        (f.name, f.shown, f.unit, f.bound, {True: "yes", False: "NO", None: ""}[f.holds], f.note)
        for f in section.findings.figures
    ]
    before, after = section.load
    lines = [f"{section.name}: {section.title}  ({section.wall_s:.0f} s, load {before:.1f} to {after:.1f})"]
    if rows:
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        for row in rows:
            name, value, unit, bound, holds = (
                cell.rjust(width) if column == 1 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=False))
            )
            lines.append(f"  {name}  {value} {unit}  {bound}  {holds}  {row[5]}".rstrip())
    lines += [f"  note: {note}" for note in section.findings.notes]
    if section.error:
        lines.append(f"  FAILED: {section.error}")
    return "\n".join(lines)


def write(folder: Path, name: str, machine: dict[str, Any], scale: Scale, sections: Sequence[Section]) -> Path:
    """`name`.json, .md and .svg in the folder. The JSON's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {"machine": machine, "scale": scale, "sections": [asdict(section) for section in sections]}
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(machine, sections))
    path.with_suffix(".svg").write_text(drawing(sections))
    return path


def page(machine: dict[str, Any], sections: Sequence[Section]) -> str:
    """The tables in Markdown, as docs/performance.md shows them."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items() if name != "load"), ""]
    lines += ["| section (load) | figure | value | bound | holds |", "|---|---|---|---|---|"]
    for section in sections:
        first = f"{section.name} ({section.load[0]:.1f} to {section.load[1]:.1f})"
        for figure in section.findings.figures:
            holds = {True: "yes", False: "no", None: ""}[figure.holds]
            value = f"{figure.shown} {figure.unit}".strip() if figure.value is not None else figure.note
            lines.append(f"| {first} | {figure.name} | {value} | {figure.bound} | {holds} |")
            first = ""
    return "\n".join([*lines, ""])


ROW_PX, LEFT_PX, BAR_PX, RIGHT_PX = 20, 380, 320, 150


def drawing(sections: Sequence[Section]) -> str:
    """A bar for each promised figure: how much of its bound it takes up, on a logarithmic scale from a
    hundredth to ten times; the line in the middle is the bound itself."""
    promised = [f for s in sections for f in s.findings.figures if f.holds is not None]
    height = ROW_PX * (len(promised) + 2)
    line_x = LEFT_PX + BAR_PX * 2 / 3
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT_PX + BAR_PX + RIGHT_PX}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{line_x}" y="14" text-anchor="middle" fill="#666">bound</text>',
        f'<path d="M{line_x} 18V{height - ROW_PX + 4}" stroke="#999"/>',
    ]
    for place, figure in enumerate(promised):
        y = ROW_PX * (place + 1)
        share = _share(figure)
        width = BAR_PX * min(max((log10(max(share, 1e-9)) + 2) / 3, 0.005), 1.0)
        parts += [
            f'<text x="{LEFT_PX - 8}" y="{y + 14}" text-anchor="end">{escape(figure.name)}</text>',
            f'<rect x="{LEFT_PX}" y="{y + 4}" width="{width:.1f}" height="{ROW_PX - 8}" '
            f'fill="{"#2a7f62" if figure.holds else "#c0392b"}"/>',
            f'<text x="{LEFT_PX + BAR_PX + 8}" y="{y + 14}">'
            f"{escape(f'{figure.shown} {figure.unit} ({figure.bound})')}</text>",
        ]
    return "\n".join([*parts, "</svg>", ""])


def _share(figure: Figure) -> float:
    """Of its bound: below 1 is good, whichever way the bound goes."""
    assert figure.value is not None
    over, under = figure.value, figure.at_most
    if under is None:
        over, under = figure.at_least or 0.0, figure.value
    return over / under if under else 10.0 * bool(over)
