"""Times one operation on a GPU by two events of its stream."""

from __future__ import annotations

from typing import Any

import torch

from arena.device.cuda import driver
from arena.device.cuda.streams import cuda


class EventPair:
    """See `arena.device.Stopwatch`.

    Args:
        stream: the one that the operation goes to; if None, the one that is current at its start.
    """

    __slots__ = ("_began", "_ended", "_stream", "_timed")

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream
        self._began, self._ended = (cuda.Event(enable_timing=True) for _ in range(2))
        self._timed = False

    def start(self) -> None:
        """See `arena.device.Stopwatch`. A capture runs nothing, so there is nothing to time."""
        stream = self._stream
        capturing = (
            torch.cuda.is_current_stream_capturing()
            if stream is None
            else driver.is_capturing(stream.cuda_stream, stream.device_index)
        )
        self._timed = not capturing
        if self._timed:
            self._began.record(stream)

    def stop(self) -> None:
        """See `arena.device.Stopwatch`."""
        if self._timed:
            self._ended.record(self._stream)

    def elapsed_ns(self) -> int | None:
        """See `arena.device.Stopwatch`. Asked in a capture too, of an operation before it."""
        with driver.Relaxed():
            if not self._timed or not self._ended.query():
                return None
            milliseconds: float = self._began.elapsed_time(self._ended)
        return round(milliseconds * 1e6)
