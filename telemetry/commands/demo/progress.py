"""Progress on stderr: a bar on a terminal, and now and then a line where there is none."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from telemetry.commands.demo.engine import Engine

LINE_S = 3.0  # between lines in a log
FRAME_S = 0.25  # between frames of a bar; drawn by the engine's own thread, so that no other one takes the GIL


class Watch:
    """Shows how far a run is. Also speaks the sentences around it, so that they don't break the bar."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._next_at = 0.0
        self._run = ""

    def __enter__(self) -> Watch:
        if self.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self._bar.stop()

    def say(self, sentence: str) -> None:
        """Print one line of plain text."""
        self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def begin(self, description: str, seconds: float) -> None:
        """A run begins."""
        self._run = description
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._bar.add_task(description, total=seconds, detail="")
        self._next_at = 0.0

    def look(self, engine: Engine) -> None:
        """Show where the run is, if it is time to."""
        now = time.monotonic()
        if now < self._next_at:
            return
        scheduler = engine.scheduler
        detail = (
            f"step {engine.steps}: {scheduler.completed} done, {len(scheduler.active)} running, "
            f"{len(scheduler.waiting)} waiting"
        )
        if self.console.is_terminal:
            self._bar.update(self._bar.task_ids[-1], completed=engine.now_s(), detail=detail, refresh=True)
        else:
            self.say(f"{self._run} {engine.now_s():5.1f} s  {detail}")
        self._next_at = now + (FRAME_S if self.console.is_terminal else LINE_S)
