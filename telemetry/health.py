"""A verdict for each reader, from a window of looks instead of thresholds that somebody would have to tune.

The idea is Burrow's, for Kafka's consumers: not how large a lag is says that a reader is in trouble, but that it did
not move while there was something to do. Two verdicts need no window, because they are facts seen from outside: a
process that is gone, and one that a signal stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Final

from arena.probe import ENDED
from telemetry.reader import Look

WINDOW_NS: Final = 5_000_000_000
"""How far back a verdict looks, if there are enough looks in it."""

ENOUGH: Final = 3
"""Looks without which nothing is judged; where they are further apart than the window, it gets longer."""

GAP_NS: Final = 250_000_000
"""Looks closer together than this count as one: a reader may take its time over a message."""

_STOPPED: Final = ("T", "t")


class Verdict(IntEnum):
    """What the window says, the worst last."""

    OK = 0
    LAGGING = 1  # last of all, never caught up, and fell further behind or stayed in the ring's second half
    STALLED = 2  # had something to take, took nothing, and showed no sign of life
    STOPPED = 3  # a signal or a debugger stopped the process
    GONE = 4  # the process ended without saying goodbye


@dataclass(frozen=True)
class Sign:
    """One reader in one look: when, how far it had come, how far behind it was, its last sign of life.

    And whether it was the last one: no living reader was further behind.
    """

    time_ns: int
    sequence: int
    lag: int
    heartbeat_ns: int
    last: bool = True


def judge(window: Sequence[Sign], process: str, slots: int) -> Verdict:
    """The verdict.

    Args:
        window: the looks, oldest first.
        process: the state of its process, as in `telemetry.reader.Endpoint`.
        slots: the ring's length.
    """
    if process in ENDED:
        return Verdict.GONE
    if process in _STOPPED:
        return Verdict.STOPPED
    if len(window) < ENOUGH or not all(sign.lag for sign in window):
        return Verdict.OK
    first = window[0]
    if all((sign.sequence, sign.heartbeat_ns) == (first.sequence, first.heartbeat_ns) for sign in window):
        return Verdict.STALLED
    lags = [sign.lag for sign in window]
    fell = any(later < earlier for earlier, later in pairwise(lags))
    behind = (not fell and lags[-1] > lags[0]) or 2 * min(lags) >= slots > 0
    # Whoever is mostly ahead of another is held up by that one: in a collective, or by a ring that it keeps full.
    last = 2 * sum(sign.last for sign in window) >= len(window)
    return Verdict.LAGGING if behind and last else Verdict.OK


class History:
    """The windows of all readers, fed one look after the other."""

    def __init__(self) -> None:
        self._windows: dict[Path, deque[Sign]] = {}

    def judge(self, look: Look) -> dict[tuple[str, int], Verdict]:
        """Take one more look, and judge every reader in it; by the queue's label and rank."""
        there: set[Path] = set()
        verdicts = {}
        for queue in look.queues:
            most = max((queue.lag(reader) for reader in queue.readers if reader.alive is not False), default=0)
            for reader in queue.readers:
                there.add(reader.page.path)
                lag = queue.lag(reader)
                sign = Sign(look.time_ns, reader.sequence, lag, reader.heartbeat_ns, lag >= most)
                window = self._remember(reader.page.path, sign)
                verdicts[queue.label, reader.rank] = judge(window, reader.process, queue.slots)
        for path in self._windows.keys() - there:
            del self._windows[path]
        return verdicts

    def _remember(self, path: Path, sign: Sign) -> deque[Sign]:
        window = self._windows.setdefault(path, deque())
        if not window or sign.time_ns - window[-1].time_ns >= GAP_NS:
            window.append(sign)
        while len(window) > ENOUGH and sign.time_ns - window[1].time_ns >= WINDOW_NS:
            window.popleft()
        return window
