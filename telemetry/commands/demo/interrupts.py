"""Ctrl-C and SIGTERM end a run the same way: once, as a KeyboardInterrupt in the engine's thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is entered, the first signal interrupts; later ones do nothing, so that cleaning up is not cut short."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def insist(self) -> None:
        """Interrupt again, after a signal: what it came upon may have swallowed it, as an import of torch does."""
        if self.received is not None:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            raise KeyboardInterrupt


@contextmanager
def deferred() -> Iterator[None]:
    """Let what is inside finish; a signal that arrives meanwhile is delivered after it."""
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
