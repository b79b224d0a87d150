"""A command in a terminal of its own, seen as a user sees it: a pseudo-terminal, and pyte to understand what comes."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pyte

ROOT = Path(__file__).parent.parent.parent
_MAIN = "import sys; sys.argv[0] = 'arena'; from telemetry.cli import main; main()"
ARENA = [sys.executable, "-c", _MAIN]
# The first process of a session has to take its terminal, so that ctrl-C and ctrl-Z come as signals.
_TAKE_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
PATIENCE_S = 30.0


class Terminal:
    """The `arena` command on a terminal of `columns` × `lines`; killed on leaving the `with` block.

    Args:
        before: Python that runs in it first.
        under: a shell, such as bash, in which it is typed as a command.
    """

    def __init__(
        self,
        *arguments: str,
        columns: int = 100,
        lines: int = 40,
        before: str = "",
        under: str | None = None,
        **environment: str,
    ) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.master, self._slave = pty.openpty()
        self._resize_line(columns, lines)
        self.before = termios.tcgetattr(self._slave)
        settings = {"TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"} | environment
        inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            _command(arguments, before, under),
            cwd=ROOT,
            env=inherited | settings,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
        )
        if under is not None:
            self.press(f"{shlex.join([*ARENA, *arguments])}\n")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)

    @property
    def lines(self) -> list[str]:
        """What stands on the screen."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def first(self) -> str:
        """The verdict."""
        return self.lines[0]

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(self.lines)

    def until(self, condition: Callable[[], Any], within: float = PATIENCE_S) -> Any:
        """Follow the output until the screen is as wanted."""
        deadline = time.monotonic() + within
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {within} s:\n{self.text}"
            if not self.follow(0.02) and self.process.poll() is not None and not self.follow(0.1):
                value = condition()
                assert value, f"ended with {self.process.returncode}:\n{self.text}"
                break
        return value

    def shows(self, words: str, within: float = PATIENCE_S) -> None:
        """Wait for words anywhere on the screen."""
        self.until(lambda: words in self.text, within)

    def follow(self, seconds: float) -> bool:
        """Take what comes, if something comes in that time."""
        ready, _, _ = select.select([self.master], [], [], seconds)
        if not ready:
            return False
        data = os.read(self.master, 1 << 16)
        self.raw += data
        self._stream.feed(data)
        return True

    def press(self, keys: str) -> None:
        """Type."""
        os.write(self.master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Another size, as when somebody pulls at the window's corner."""
        self._resize_line(columns, lines)
        self.screen.resize(lines, columns)
        os.kill(self.process.pid, signal.SIGWINCH)

    def end(self, within: float = PATIENCE_S) -> int:
        """Wait for the end; the exit code."""
        deadline = time.monotonic() + within
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still runs:\n{self.text}"
            self.follow(0.02)
        while self.follow(0.05):
            pass
        return self.process.wait()

    def is_restored(self) -> bool:
        """Whether the terminal is as it was: its modes, the cursor, the main screen."""
        entered, left = self.raw.count(b"\x1b[?1049h"), self.raw.count(b"\x1b[?1049l")
        modes = termios.tcgetattr(self._slave) == self.before
        return modes and entered == left and not self.screen.cursor.hidden

    def _resize_line(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


def _command(arguments: tuple[str, ...], before: str, under: str | None) -> list[str]:
    if under is None:
        return [sys.executable, "-c", f"{_TAKE_TERMINAL}; {before}{_MAIN}", *arguments]
    return [sys.executable, "-c", f"{_TAKE_TERMINAL}; os.execvp({under!r}, [{under!r}, '--norc', '-i'])"]
