"""The pictures in README: `python -m tests.support.screenshot` draws them anew."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.text import Text

from telemetry.monitor.lines import Line
from telemetry.monitor.screen import Choices, draw
from tests.support.moments import stall

TOP = Path(__file__).parent.parent / "screenshots/top.svg"


def svg(lines: list[Line], width: int, title: str) -> str:
    """A terminal that shows these lines."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(Text.assemble(*line), soft_wrap=True)
    return console.export_svg(title=title, unique_id="arena")


def top(width: int = 120, height: int = 30) -> str:
    """`arena top` during a stall."""
    moment, recent = stall()
    return svg(draw(moment, recent, Choices(note="every 0.5 s"), width, height), width, "arena top")


if __name__ == "__main__":
    TOP.write_text(top())
