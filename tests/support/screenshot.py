"""The pictures in README: `python -m tests.support.screenshot` draws them anew.

Drawn by hand, one text element a span, so that the picture depends on nobody's template and fetches no font: each span
is stretched to the columns that it takes, whatever monospaced font there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from telemetry.monitor.lines import Line
from telemetry.monitor.screen import Choices, draw
from tests.support.moments import stall

TOP = Path(__file__).parent.parent / "screenshots/top.svg"

COLUMN, LINE = 8.4, 19  # of a character of 14 px
MARGIN, BAR = 16, 36
COLOURS = {"red": "#ff7b72", "yellow": "#e3b341", "green": "#56d364", "cyan": "#76e3ea"}
PLAIN, BEHIND = "#d0d7de", "#0d1117"
FONT = 'font-family="ui-monospace, Menlo, Consolas, \'DejaVu Sans Mono\', monospace" font-size="14"'


def svg(lines: list[Line], width: int, title: str) -> str:
    """A terminal that shows these lines."""
    across, down = round(width * COLUMN) + 2 * MARGIN, len(lines) * LINE + BAR + MARGIN
    buttons = "".join(f'<circle cx="{20 + 20 * at}" cy="18" r="6" fill="#484f58"/>' for at in range(3))
    text = "\n".join(piece for number, line in enumerate(lines) for piece in _spans(line, BAR + 14 + number * LINE))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" {FONT} fill="{PLAIN}">\n'
        f'<rect width="{across}" height="{down}" rx="8" fill="{BEHIND}"/>{buttons}\n'
        f'<text x="{across / 2:g}" y="23" text-anchor="middle">{escape(title)}</text>\n{text}\n</svg>\n'
    )


def _spans(line: Line, y: int) -> Iterator[str]:
    column = 0
    for text, style in line:
        shown = text.strip(" ")
        if shown:
            x = MARGIN + (column + len(text) - len(text.lstrip(" "))) * COLUMN
            yield (
                f'<text x="{x:.1f}" y="{y}" textLength="{len(shown) * COLUMN:.1f}" lengthAdjust="spacingAndGlyphs"'
                f'{_look(style)} xml:space="preserve">{escape(shown, quote=False)}</text>'
            )
        column += len(text)


def _look(style: str) -> str:
    words = style.split()
    colour = "".join(f' fill="{COLOURS[word]}"' for word in words if word in COLOURS)
    bold, dim = ' font-weight="700"' * ("bold" in words), ' opacity="0.6"' * ("dim" in words)
    return colour + bold + dim


def top(width: int = 120, height: int = 34) -> str:
    """`arena top` during a stall."""
    moment, recent = stall()
    return svg(draw(moment, recent, Choices(note="every 0.5 s"), width, height), width, "arena top")


if __name__ == "__main__":
    TOP.write_text(top())
