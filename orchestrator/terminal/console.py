"""A rich console whose texts cannot control the terminal."""

from collections.abc import Container, Iterable
from typing import Any, TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from orchestrator.rules.text import printable_lines
from orchestrator.terminal.streams import unfiltered


def plain_table(columns: Iterable[str], right: Container[str] = (), **style: Any) -> Table:
    """A table without lines. `right`: columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", **style)
    return table


class Console(rich.console.Console):
    """Rich's console for `stream`. All escape sequences are rich's own; every text is made printable.

    That includes what other code prints and logs while a live view takes these lines over.
    """

    def __init__(self, stream: TextIO, *, soft_wrap: bool = False, width: int | None = None) -> None:
        super().__init__(file=unfiltered(stream), highlight=False, soft_wrap=soft_wrap, width=width)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(printable_lines(part.text), part.style)
