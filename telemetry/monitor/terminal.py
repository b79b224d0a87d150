"""A terminal that is taken over and given back: whatever happens, it is afterwards what it was before.

Only lines that changed are written, in one go and between the marks of a synchronised update, so that nothing flickers
and a monitor costs next to nothing. Signals only leave a note; `wait` returns at once and the loop acts on it, which
keeps every way out, ctrl-C and SIGTERM among them, on the one path that restores the terminal.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Final

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from telemetry.monitor.lines import Line, Span

_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the alternate screen, no cursor, empty
_LEAVE: Final = "\x1b[0m\x1b[?25h\x1b[?1049l"
_BEGIN: Final = "\x1b[?2026h"
_END: Final = "\x1b[?2026l"
_KEYS: Final = {
    "\x1b[A": "up", "\x1bOA": "up", "\x1b[B": "down", "\x1bOB": "down", "\t": "down", "\x1b[Z": "up",
    "\r": "enter", "\n": "enter", "\x1b": "escape", "\x03": "q",
}  # fmt: skip
_KEY: Final = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_NOTED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SYSTEMS: Final = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
    "windows": ColorSystem.WINDOWS,
}


class Terminal:
    """The terminal behind standard output and input. A context manager."""

    def __init__(self) -> None:
        self._out = sys.stdout.fileno()
        self._in = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._painter = Painter(Console())
        self._before: list[Any] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._notes: set[int] = set()
        self._painted: list[str] = []
        self._size = (0, 0)
        self.ended_by = 0
        """The number of the signal that asks for the end."""

    def __enter__(self) -> Terminal:
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_before = signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
        for number in _NOTED:
            self._handlers[number] = signal.signal(number, self._note)
        try:
            self._take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._give_back()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wake_before)
            os.close(self._wake_in)
            os.close(self._wake_out)

    def size(self) -> tuple[int, int]:
        """Columns and lines, now."""
        columns, lines = os.get_terminal_size(self._out)
        if (columns, lines) != self._size:
            self._size = (columns, lines)
            self._painted = []
        return max(1, columns), max(1, lines)

    def paint(self, lines: Sequence[Line]) -> None:
        """Show these lines, from the top; only what differs from what is there is written."""
        new = [self._painter.ansi(line) for line in lines]
        parts = [] if self._painted else ["\x1b[2J"]
        for row, text in enumerate(new):
            if row >= len(self._painted) or text != self._painted[row]:
                parts.append(f"\x1b[{row + 1};1H{text}\x1b[0m\x1b[K")
        if len(new) < len(self._painted):
            parts.append(f"\x1b[{len(new) + 1};1H\x1b[J")
        if parts:
            self._write(f"{_BEGIN}{''.join(parts)}{_END}")
        self._painted = new

    def wait(self, timeout_s: float) -> list[str]:
        """The keys that were pressed; returns early for a key and for a signal."""
        watched = [self._wake_in] if self._in is None else [self._wake_in, self._in]
        ready, _, _ = select.select(watched, [], [], max(0.0, timeout_s))
        if self._wake_in in ready:
            os.read(self._wake_in, 4096)
        self._act_on_notes()
        return self._keys() if self._in in ready else []

    # ── taking and giving back ───────────────────────────────────────────────────────────────────
    def _take(self) -> None:
        if self._in is not None:
            self._before = termios.tcgetattr(self._in)
            tty.setcbreak(self._in, termios.TCSADRAIN)  # keys that were pressed already count
        self._painted, self._size = [], (0, 0)
        self._write(_ENTER)

    def _give_back(self) -> None:
        try:
            self._write(_LEAVE)
            if self._in is not None and self._before is not None:
                termios.tcsetattr(self._in, termios.TCSADRAIN, self._before)
        except (OSError, termios.error):  # the terminal itself is gone
            pass

    def _suspend(self) -> None:
        """Ctrl-Z: the shell gets its terminal back, and this process stops as it would have without us."""
        self._give_back()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._notes.discard(signal.SIGCONT)
        self._take()

    # ── signals and keys ─────────────────────────────────────────────────────────────────────────
    def _note(self, number: int, frame: FrameType | None) -> None:
        self._notes.add(number)

    def _act_on_notes(self) -> None:
        notes, self._notes = self._notes, set()
        self.ended_by = next((number for number in _ENDING if number in notes), self.ended_by)
        if signal.SIGTSTP in notes:
            self._suspend()
        elif signal.SIGCONT in notes:  # stopped and continued by somebody else, who may have used the terminal
            self._take()

    def _keys(self) -> list[str]:
        assert self._in is not None
        try:
            pressed = os.read(self._in, 4096).decode("utf-8", "replace")
        except OSError:
            pressed = ""
        if not pressed:  # end of file: there will be no more keys
            self._in = None
        return [_KEYS.get(key, key) for key in _KEY.findall(pressed)]

    def _write(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "replace"))
        while data:
            try:
                data = data[os.write(self._out, data) :]
            except BlockingIOError:
                select.select([], [self._out], [])


class Painter:
    """Lines in a console's colours: NO_COLOR, TERM and what the terminal can do are rich's to know."""

    def __init__(self, console: Console) -> None:
        name = console.color_system
        self._system = _SYSTEMS.get(name) if name else None
        self._no_color = console.no_color
        self._styles: dict[str, Style] = {"": Style.null()}
        self._lines: dict[Line, str] = {}

    def ansi(self, line: Line) -> str:
        """The line with escape codes; a line that was on the last screen too costs nothing."""
        text = self._lines.get(line)
        if text is None:
            if len(self._lines) > 500:
                self._lines.clear()
            text = self._lines[line] = "".join([self._span(span) for span in line]).rstrip(" ")
        return text

    def _span(self, span: Span) -> str:
        style = self._styles.get(span.style)
        if style is None:
            style = Style.parse(span.style)
            style = self._styles[span.style] = style.without_color if self._no_color else style
        return style.render(span.text, color_system=self._system)
