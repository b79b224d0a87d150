"""A timeline as a picture (SVG): for a report or a README, where no viewer is at hand.

A row for each endpoint; what is inside something else is drawn lower in it. The reader that a wait is charged to gives
it its colour, the same as that reader's own slices have.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, Final

Entry = dict[str, Any]

_WIDTH: Final = 1000
_LEFT: Final = 170
_ROW: Final = 46
_TOP: Final = 40
_WRITER: Final = "#56646f"
_READERS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d00")  # told apart by all
_FONT: Final = 'font-family="ui-monospace, monospace" font-size="11"'


def svg(timeline: Entry) -> str:
    """Draw what `telemetry.perfetto.timeline` made."""
    entries = timeline["traceEvents"]
    names = {one["tid"]: one["args"]["name"] for one in entries if one["name"] == "thread_name"}
    slices = [one for one in entries if one["ph"] == "X"]
    end_us = max((one["ts"] + one["dur"] for one in slices), default=1.0)
    height = _TOP + _ROW * len(names) + 10
    scale = (_WIDTH - _LEFT - 20) / (end_us or 1.0)
    parts = [*_axis(end_us, scale, height), *_rows(names), *_arrows(entries, scale)]
    parts += [_bar(one, slices, names, scale) for one in slices]
    parts += [_bar(one, [], names, scale, lowest=True) for one in _pairs(entries)]
    title = escape(f"queue {timeline['otherData']['queue']}, from {timeline['otherData']['began']}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT}>'
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="14">{title}</text>{"".join(parts)}</svg>\n'
    )


def _axis(end_us: float, scale: float, height: int) -> Iterator[str]:
    step = next(step for step in _steps() if end_us / step <= 8)
    for tick in range(int(end_us / step) + 1):
        x = _LEFT + tick * step * scale
        label = f"{tick * step / 1e3:g} ms" if end_us >= 1e3 else f"{tick * step:g} µs"
        yield f'<path d="M{x:.1f} {_TOP - 8}V{height}" stroke="#ddd"/>'
        yield f'<text x="{x + 3:.1f}" y="{_TOP - 10}">{label}</text>'


def _steps() -> Iterator[float]:
    decade = 1.0
    while True:
        yield from (decade, decade * 2, decade * 5)
        decade *= 10


def _rows(names: dict[int, str]) -> Iterator[str]:
    for tid, name in names.items():
        y = _TOP + _ROW * tid
        yield f'<path d="M0 {y}H{_WIDTH}" stroke="#ddd"/><text x="8" y="{y + 20}">{escape(name)}</text>'


def _arrows(entries: list[Entry], scale: float) -> Iterator[str]:
    starts = {one["id"]: one for one in entries if one["ph"] == "s"}
    for end in entries:
        if end["ph"] == "f" and end["id"] in starts:
            start = starts[end["id"]]
            (x1, y1), (x2, y2) = ((_LEFT + one["ts"] * scale, _TOP + _ROW * one["tid"]) for one in (start, end))
            yield f'<path d="M{x1:.1f} {y1 + 14}L{x2:.1f} {y2 + 8}" stroke="#999" stroke-width="0.7"/>'


def _pairs(entries: list[Entry]) -> Iterator[Entry]:
    """What begins and ends by itself, as slices."""
    begun = {one["id"]: one for one in entries if one["ph"] == "b"}
    for end in entries:
        if end["ph"] == "e" and end["id"] in begun:
            start = begun[end["id"]]
            yield {**start, "dur": end["ts"] - start["ts"]}


def _bar(one: Entry, slices: list[Entry], names: dict[int, str], scale: float, *, lowest: bool = False) -> str:
    depth = 2 if lowest else sum(_holds(other, one) for other in slices)
    x, width = _LEFT + one["ts"] * scale, max(1.5, one["dur"] * scale)
    y = _TOP + _ROW * one["tid"] + 8 + 12 * min(depth, 2)
    blamed = one["args"].get("blame_reader")
    name = names.get(one["tid"], "")
    rank = blamed if blamed is not None else int(name.split()[1]) if name.startswith("reader") else None
    colour = _WRITER if rank is None else _READERS[rank % len(_READERS)]
    label = escape(one["name"])
    text = f'<text x="{x + 2:.1f}" y="{y + 10}" fill="white">{label}</text>' if width > 7 * len(label) else ""
    opacity = 0.55 if depth and blamed is None else 1
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="12" fill="{colour}" fill-opacity="{opacity}">'
        f"<title>{label}, {one['dur']:.1f} µs</title></rect>{text}"
    )


def _holds(outer: Entry, inner: Entry) -> bool:
    if outer is inner or outer["tid"] != inner["tid"] or outer["dur"] <= inner["dur"]:
        return False
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.001)
