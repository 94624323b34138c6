"""Text for people: colours and a spinner in a terminal (when rich is there), plain lines everywhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Column:
    """A column of a table: numbers (`right`) are aligned at the right; `width` in characters, at least the title's."""

    title: str
    width: int = 0
    right: bool = True

    def cell(self, text: str) -> str:
        width = max(self.width, len(self.title))
        return text.rjust(width) if self.right else text.ljust(width)


class Output:
    """Where lines go. Every line is there at once, also in a pipe."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = _console(self._stream)

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line as it is; `style` is one of rich's, used in a terminal only."""
        if self._console is None:
            print(text, file=self._stream, flush=True)
        else:
            self._console.print(text, style=style or None, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show in a terminal that something is going on, until the block is left; nothing elsewhere.

        Yields a function that replaces the text.
        """
        if self._console is None:
            yield lambda text: None
            return
        with self._console.status(text) as status:
            yield lambda text: status.update(text)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[Callable[[str], None]]:
        """Announce something that takes seconds: like `status` in a terminal, a line elsewhere."""
        if self._console is None:
            self.line(f"{text} ...")
        with self.status(f"{text} ...") as update:
            yield lambda detail: update(f"{text}: {detail} ...")


class Table:
    """A table that is printed row by row: the title line with the first row, nothing to be closed at the end."""

    def __init__(self, output: Output, columns: Sequence[Column]) -> None:
        self._output = output
        self._columns = columns
        self._started = False

    def row(self, *cells: str, style: str = "") -> None:
        """Print a row of as many cells as there are columns."""
        if not self._started:
            self._started = True
            self._print([column.title for column in self._columns], "bold")
            self._output.line("  ".join(column.cell("").replace(" ", "-") for column in self._columns), "dim")
        self._print(cells, style)

    def _print(self, cells: Sequence[str], style: str) -> None:
        pairs = zip(self._columns, cells, strict=True)
        self._output.line("  ".join(column.cell(cell) for column, cell in pairs).rstrip(), style)


def _console(stream: TextIO) -> Console | None:
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream)
