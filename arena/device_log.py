"""What an endpoint's probe page says about pins, gates and copies to the device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from arena.probe import HISTOGRAM_WORDS, Event, Probe

if TYPE_CHECKING:
    from arena.device import Copies, Stopwatch, Stream
    from arena.gate import Gate
    from arena.probe.hooks import Trace

_TIMED_BYTES: Final = 1 << 20  # smaller copies are over before two events are recorded
_TIMED_GAP_NS: Final = 50_000_000
_monotonic_ns = time.monotonic_ns


class DeviceLog:
    """What one endpoint's probe page says about pins, gates and copies.

    Mostly written by the helper, while the endpoint sleeps: so what changes is shown at once. No two threads add to
    one word but for the copies, which are counted by whoever makes them.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        word = probe.word
        self._pinned = word("segment_pinned")
        self._pinned_bytes = word("segment_pinned_bytes")
        self._pin_seconds = word("pin_seconds_total")
        self._waits = word("dma_gate_wait_seconds")
        self._blocks = word("blocks_in_gate")
        self._oldest = word("gate_oldest_since_nanoseconds")
        self._inside: dict[Gate, int] = {}  # in the order in which they came
        self._timed: tuple[Stopwatch, int] | None = None
        self._time_due_ns = 0

    def pinned(self, segments: int, nbytes: int, took_ns: int) -> None:
        """So many more segments are registered; fewer, if negative."""
        for word, amount in ((self._pinned, segments), (self._pinned_bytes, nbytes), (self._pin_seconds, took_ns)):
            self._probe.count(word, amount)
            self._probe.show(word)

    def pin_failed(self, reason: str, took_ns: int) -> None:
        """A segment is not."""
        for word, amount in ((self._probe.word("pin_failures_total", reason), 1), (self._pin_seconds, took_ns)):
            self._probe.count(word, amount)
            self._probe.show(word)

    def copied(self, mode: str) -> None:
        """A tensor was sent to the device."""
        word = self._probe.word("device_copies_total", mode)
        self._probe.count(word)
        self._probe.show(word)

    def timing(self, copies: Copies, stream: Stream, nbytes: int) -> Stopwatch | None:
        """Something to time a copy with, on its stream: only a large one, one at a time, twenty a second at most."""
        if nbytes < _TIMED_BYTES:
            return None
        self.settle()
        now_ns = _monotonic_ns()
        if self._timed is not None or now_ns < self._time_due_ns:
            return None
        self._time_due_ns = now_ns + _TIMED_GAP_NS
        return copies.stopwatch(stream)

    def timed(self, watch: Stopwatch, nbytes: int) -> None:
        """That copy is queued."""
        self._timed = watch, nbytes

    def settle(self) -> None:
        """Enter the copy that was timed last, if it is over."""
        if self._timed is None:
            return
        watch, nbytes = self._timed
        try:
            took_ns = watch.elapsed_ns()
        except RuntimeError:  # the device is lost
            self._timed = None
            return
        if took_ns is not None:
            self._timed = None
            for name, amount in (("h2d_seconds_total", took_ns), ("h2d_bytes_total", nbytes)):
                word = self._probe.word(name)
                self._probe.count(word, amount)
                self._probe.show(word)

    def released(self, way: str) -> None:
        """A hold went back that a copy had to be waited for."""
        word = self._probe.word("gate_releases_total", way)
        self._probe.count(word)
        self._probe.show(word)

    def entered(self, gate: Gate, now_ns: int) -> None:
        """A dead view waits."""
        self._inside[gate] = now_ns
        self._show_gates()

    def left(self, gate: Gate, took_ns: int) -> None:
        """Its hold went back, as the helper saw."""
        self._probe.observe(self._waits, took_ns)
        self._probe.show(self._waits, HISTOGRAM_WORDS)
        if not gate.named:
            self.released("helper")

    def gone(self, gate: Gate) -> None:
        """Nobody waits at it any more."""
        if self._inside.pop(gate, None) is not None:
            self._show_gates()

    def passed(self, sequence: int, trace: Trace, died_ns: int, now_ns: int) -> None:
        """A hold of a sampled message went back, which its view gave up at `died_ns`."""
        self._probe.detail(Event.GATE, sequence, now_ns, now_ns - died_ns, 0, trace)

    def _show_gates(self) -> None:
        self._probe.gauge(self._blocks, len(self._inside))
        self._probe.gauge(self._oldest, next(iter(self._inside.values()), 0))
        self._probe.show(self._blocks)
        self._probe.show(self._oldest)


def device_log(probe: Probe | None) -> DeviceLog | None:
    """What an endpoint with this probe records; nothing without one."""
    return None if probe is None else DeviceLog(probe)
