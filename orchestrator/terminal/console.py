"""Tables, colours and views that redraw themselves, with nothing in them that steers the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from orchestrator.terminal.streams import unfiltered
from orchestrator.text import printable_lines


class Console(rich.console.Console):
    """Rich's, made for `stream`: of what is shown only colours and movements of its own are not plain text.

    That goes for what others print and log, too, while a live view of it takes their lines.
    """

    def __init__(self, stream: TextIO, *, soft_wrap: bool = False, width: int | None = None) -> None:
        super().__init__(file=unfiltered(stream), highlight=False, soft_wrap=soft_wrap, width=width)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for part in super().render(renderable, options):
            yield part if part.control else Segment(printable_lines(part.text), part.style)
