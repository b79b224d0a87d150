"""Lines of styled text, and tables that lose columns, the least important first, until they fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Final, Generic, NamedTuple, TypeVar

GAP: Final = 2
GROWN: Final = 40  # a sparkline says no more when it is longer

_ASCII: Final = str.maketrans(
    {
        "µ": "u", "–": "-", "·": ".", "…": "~", "×": "x", "▶": ">", "◀": "<", "↑": "^", "↓": "v", "→": ">",
        "░": "1", "▒": "2", "▓": "3", "█": "#", "─": "-", "≤": "<",
    }
)  # fmt: skip


class Span(NamedTuple):
    """A piece of a line, in one style of rich's."""

    text: str
    style: str = ""


Line = tuple[Span, ...]
Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column. The most important ones stay (0 always does); one that `grows` takes what is left over."""

    title: str
    width: int
    importance: int
    cell: Callable[[Row], Span]
    left: bool = False
    grows: bool = False


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], width: int) -> list[Line]:
    """Titles and rows, no wider than `width`."""
    shown = _fitting(columns, width)
    used = sum(column.width + GAP for column in shown) - GAP
    widths = [min(width, column.width) + (min(GROWN, max(0, width - used)) if column.grows else 0) for column in shown]
    titles = [Span(column.title, "dim") for column in shown]
    cells = [titles, *([column.cell(row) for column in shown] for row in rows)]
    return [_laid_out(shown, widths, line) for line in cells]


def cut(line: Line, width: int) -> Line:
    """The line, no wider than that; the last column says so when something is missing."""
    left = width
    if sum([len(span.text) for span in line]) <= width:
        return line
    kept = []
    for span in line:
        if len(span.text) >= left:
            kept.append(Span(span.text[: max(0, left - 1)] + "…", span.style))
            break
        kept.append(span)
        left -= len(span.text)
    return tuple(kept)


def wrapped(text: str, style: str, width: int, most: int) -> list[Line]:
    """A sentence over several lines, of which the last one says so when something is missing."""
    pieces = wrap(text, width) or [""]
    lines = [cut((Span(piece, style),), width) for piece in pieces[:most]]
    if len(pieces) > most:
        lines[-1] = cut((Span(f"{pieces[most - 1]} …", style),), width)
    return lines


def in_ascii(line: Line) -> Line:
    """The line without a character that needs more than ASCII."""
    return tuple([span if span.text.isascii() else Span(_ascii(span.text), span.style) for span in line])


def text_of(line: Line) -> str:
    """The line without its styles."""
    return "".join(span.text for span in line).rstrip()


def _ascii(text: str) -> str:
    return text.translate(_ASCII).encode("ascii", "replace").decode()


def _fitting(columns: Sequence[Column[Row]], width: int) -> list[Column[Row]]:
    kept, left = set(), width + GAP
    for column in sorted(columns, key=lambda column: column.importance):
        if column.importance and column.width + GAP > left:
            break
        kept.add(column.title)
        left -= column.width + GAP
    return [column for column in columns if column.title in kept]


def _laid_out(columns: Sequence[Column[Row]], widths: Sequence[int], cells: Sequence[Span]) -> Line:
    spans: list[Span] = []
    for column, cell_width, cell in zip(columns, widths, cells, strict=True):
        spans += [Span(_padded(column, cell.text, cell_width), cell.style), Span(" " * GAP)]
    return tuple(spans[:-1])


def _padded(column: Column[Row], text: str, width: int) -> str:
    if column.grows and text != column.title:
        return text[-width:].rjust(width)  # the newest of a sparkline is at its right end
    if len(text) > width:
        text = text[: width - 1] + "…"
    return text.ljust(width) if column.left or column.grows else text.rjust(width)
