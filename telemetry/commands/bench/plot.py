"""Times by size as a picture (SVG): a line for each contender, both axes logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

Points = Sequence[tuple[int, float]]
"""Size in bytes and time in ns, in rising order of size."""

_WIDTH: Final = 1000
_HEIGHT: Final = 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 190, 40, 40
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d00", "#56646f")
_FONT: Final = 'font-family="ui-monospace, monospace" font-size="11"'


@dataclass(frozen=True)
class _Axis:
    """From values to pixels, by their logarithm."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.end - self.start)


def svg(title: str, lines: Mapping[str, Points]) -> str:
    """Draw the lines; the first one is drawn strongest, and on top."""
    sizes = [size for points in lines.values() for size, _ in points]
    times = [time for points in lines.values() for _, time in points]
    across = _Axis(min(sizes), max(*sizes, 2 * min(sizes)), _LEFT, _WIDTH - _RIGHT)
    up = _Axis(10 ** _decade(min(times)), 10 ** (_decade(max(times)) + 1), _HEIGHT - _BOTTOM, _TOP)
    parts = [*_sizes(across), *_times(up)]
    for number, (name, points) in reversed(list(enumerate(lines.items()))):
        parts += _line(number, name, [(across.at(size), up.at(time)) for size, time in points])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {_FONT}>'
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="16">{escape(title)}</text>'
        f"{''.join(parts)}</svg>\n"
    )


def _sizes(across: _Axis) -> Iterator[str]:
    for power in range(math.ceil(math.log2(across.low)), math.floor(math.log2(across.high)) + 1):
        x = across.at(2**power)
        yield f'<path d="M{x:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#ddd"/>'
        if power % 2 == 1:
            label = f"{2**power >> 20} MiB" if power >= 20 else f"{2**power / 1024:g} KiB"
            yield f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{label}</text>'


def _times(up: _Axis) -> Iterator[str]:
    for decade in range(_decade(up.low), _decade(up.high) + 1):
        y = up.at(10**decade)
        label = f"{10 ** (decade - 3):g} µs" if decade < 6 else f"{10 ** (decade - 6):g} ms"
        yield f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'


def _line(number: int, name: str, points: Sequence[tuple[float, float]]) -> Iterator[str]:
    colour, width = _COLOURS[number % len(_COLOURS)], 1.5 if number else 3
    corners = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    yield f'<path d="M{corners}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width + 1}" fill="{colour}"/>'
    x, y = _WIDTH - _RIGHT + 16, _TOP + 18 * number
    yield f'<path d="M{x} {y}h16" stroke="{colour}" stroke-width="{width}"/>'
    yield f'<text x="{x + 22}" y="{y + 4}">{escape(name)}</text>'


def _decade(time_ns: float) -> int:
    return math.floor(math.log10(time_ns) + 1e-9)
