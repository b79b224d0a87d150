"""Pictures of one line: a sparkline, the slots of a ring, the blocks of an arena.

None of them needs colour, and each has an ASCII form, in which a slot shows how many readers hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from arena.probe import BlockRecord
from telemetry.monitor.facts import QueueFacts, ReaderFacts
from telemetry.monitor.lines import Line, Span

_BARS: Final = "▁▂▃▄▅▆▇█"
_ASCII_BARS: Final = "_.-=+*%#"
_SHADES: Final = "·░▒▓█"
_RANKS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
FREE, SEVERAL, LENT = "·", "+", "w"


def sparkline(values: Sequence[float], width: int, most: float = 0.0, *, ascii: bool = False) -> str:
    """The last `width` values as bars; the tallest bar is `most`, or the largest value."""
    shown = list(values)[-width:]
    top = max(most, *shown, 1e-12) if shown else 1.0
    bars = _ASCII_BARS if ascii else _BARS
    return "".join(bars[min(7, int(8 * value / top))] if value > 0 else bars[0] for value in shown)


def ring(queue: QueueFacts, width: int, *, ascii: bool = False) -> list[Line]:
    """The slots, by how many readers still hold each, and below them who takes which next; `W`: the writer's next."""
    if queue.writer is None or not queue.slots:
        return []
    counting = [reader for reader in queue.readers if reader.alive is not False]
    held = _held(queue, counting)
    a_cell, a_slot = -(-queue.slots // width), max(1, min(4, width // queue.slots))
    groups = [held[at : at + a_cell] for at in range(0, queue.slots, a_cell)]
    cells = [_slot(max(group), len(counting), ascii=ascii) for group in groups for _ in range(a_slot)]
    marks = [" "] * len(cells)
    for reader in counting:
        if reader.lag:
            _mark(marks, (queue.writer.sequence - reader.lag) % queue.slots // a_cell * a_slot, _letter(reader.rank))
    _mark(marks, queue.writer.sequence % queue.slots // a_cell * a_slot, "W")
    return [_in_runs(cells, "cyan"), (Span("".join(marks).rstrip(), "bold"),)]


def arena(blocks: Sequence[BlockRecord], segments: Sequence[tuple[int, int]], width: int) -> list[Line]:
    """One line a segment: which rank alone holds a range, `+` several, `w` the writer, `·` free or not in the table.

    The longest line is the largest segment, so that a cell is as many bytes in each.
    """
    largest = max([nbytes for _, nbytes in segments], default=1)
    lines = []
    for number, nbytes in segments:
        inside = [block for block in blocks if block.segment == number]
        lines.append(_in_runs(_segment(inside, nbytes, max(1, nbytes * width // largest)), "cyan"))
    return lines


def guessed(blocks: Sequence[BlockRecord], segments: int, size: int) -> list[tuple[int, int]]:
    """Segments of which a writer of an earlier version says no sizes: all of one, unless a block lies beyond it."""
    ends = {block.segment: 0 for block in blocks}
    for block in blocks:
        ends[block.segment] = max(ends[block.segment], block.offset + block.nbytes)
    return [(number, max(1, size // segments, ends.get(number, 0))) for number in range(segments)]


def _held(queue: QueueFacts, readers: Sequence[ReaderFacts]) -> list[int]:
    """For each slot, how many readers have not released it."""
    held = [0] * queue.slots
    newest = queue.writer.sequence - 1 if queue.writer else 0
    for reader in readers:
        for behind in range(min(reader.lag, queue.slots)):
            held[(newest - behind) % queue.slots] += 1
    return held


def _slot(holders: int, readers: int, *, ascii: bool) -> str:
    if not holders:
        return FREE
    if ascii:
        return str(holders) if holders < 10 else "#"
    if holders == readers:
        return _SHADES[4]
    return _SHADES[1] if holders == 1 else _SHADES[2 if 2 * holders < readers else 3]


def _segment(blocks: Sequence[BlockRecord], nbytes: int, width: int) -> list[str]:
    cells = [FREE] * width
    for block in blocks:
        first = block.offset * width // nbytes
        last = max(first + 1, -(-(block.offset + block.nbytes) * width // nbytes))
        for at in range(first, min(last, width)):
            held_by = _holder(block)
            cells[at] = held_by if cells[at] in (FREE, held_by) else SEVERAL
    return cells


def _holder(block: BlockRecord) -> str:
    if len(block.holders) > 1:
        return SEVERAL
    return _letter(block.holders[0]) if block.holders else LENT


def _letter(rank: int) -> str:
    return _RANKS[rank] if rank < len(_RANKS) else SEVERAL


def _mark(marks: list[str], at: int, letter: str) -> None:
    """Two that meet stand side by side, `1W` at a full ring; of more than that only `+` is left."""
    free = next((cell for cell in (at, at + 1) if cell < len(marks) and marks[cell] == " "), None)
    if free is None:
        marks[at] = SEVERAL
    else:
        marks[free] = letter


def _in_runs(cells: Sequence[str], style: str) -> Line:
    """Free cells dim, the others not."""
    runs = ((free, "".join(run)) for free, run in groupby(cells, key=lambda cell: cell == FREE))
    return tuple(Span(text, "dim" if free else style) for free, text in runs)
