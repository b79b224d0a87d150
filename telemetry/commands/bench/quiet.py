"""The block of `arena bench idle`: long silences, a few messages, and the reader's CPU time read from outside.

Every message carries the time at which it was sent; the reader subtracts it from its own clock, which is the same one,
and says so only when asked, so that nothing it is measured by wakes it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

from telemetry.commands.bench.children import BlockFailed
from telemetry.commands.bench.contenders import Contender, Crew, Ends, crew
from telemetry.commands.bench.harness import Block, summarise

_SETTLE_S = 0.2


@dataclass(frozen=True)
class Plan:
    """How long each silence and stream lasts."""

    idle_s: float
    pause_s: float
    pauses: int
    long_pause_s: float
    long_pauses: int
    rate_hz: int
    rate_s: float

    @property
    def seconds(self) -> float:
        """How long a contender is measured."""
        return self.idle_s + self.pause_s * self.pauses + self.long_pause_s * self.long_pauses + self.rate_s

    @property
    def labels(self) -> list[str]:
        """Names of the delays of a `Quiet`, in its order."""
        labels = [f"first after {self.pause_s:g} s", f"{self.rate_hz} a second"]
        return labels + [f"first after {self.long_pause_s:g} s"] * (self.long_pauses > 0)


@dataclass(frozen=True)
class Quiet:
    """Delays from send to receipt, named by `Plan.labels`, and CPU as shares of one core."""

    delays: list[Block]
    idle_cpu: float
    rate_cpu: float


def quiet(make: Callable[[], Contender], plan: Plan) -> Quiet:
    """Measures one contender with one reader."""
    with crew(make(), 1, _answer_delays) as at_work:
        reader_cpu = cpu_clock(at_work.pids[0])
        _send_stamped(at_work, [_SETTLE_S] * 3)  # what is slow only once is over
        idle_cpu = _share_of_core(reader_cpu, lambda: time.sleep(plan.idle_s))
        after_pause = _send_stamped(at_work, [plan.pause_s] * plan.pauses)
        stream: list[int] = []
        gaps = [1 / plan.rate_hz] * int(plan.rate_hz * plan.rate_s)
        rate_cpu = _share_of_core(reader_cpu, lambda: stream.extend(_send_stamped(at_work, gaps)))
        delays = [after_pause, stream]
        if plan.long_pauses:
            delays.append(_send_stamped(at_work, [plan.long_pause_s] * plan.long_pauses))
        at_work.ends.send(None)
    return Quiet([summarise(times) for times in delays], idle_cpu, rate_cpu)


def cpu_clock(pid: int) -> Callable[[], int]:
    """The CPU time of another process with all its threads, in ns; /proc/<pid>/stat only counts in ticks of 10 ms."""
    clock_id = ctypes.c_int()
    error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock_id))
    if error:
        raise OSError(error, f"clock_getcpuclockid({pid})")
    return lambda: time.clock_gettime_ns(clock_id.value)


def _share_of_core(cpu_ns: Callable[[], int], during: Callable[[], object]) -> float:
    start, before = time.monotonic_ns(), cpu_ns()
    during()
    return (cpu_ns() - before) / (time.monotonic_ns() - start)


def _send_stamped(at_work: Crew, gaps_s: list[float]) -> list[int]:
    """Sends a message after each gap and returns the delays. Gaps count from plan to plan: a late one is caught up."""
    due = time.monotonic()
    for gap in gaps_s:
        due += gap
        time.sleep(max(0.0, due - time.monotonic()))
        at_work.ends.send({"step": 1, "sent_ns": time.monotonic_ns()})
    (delays,) = at_work.exchange({"report": True})
    if len(delays) != len(gaps_s):
        raise BlockFailed(f"the reader must see {len(gaps_s)} messages, found {len(delays)}")
    found: list[int] = delays
    return found


def _answer_delays(ends: Ends) -> None:
    (receive,) = ends.receives
    delays: list[int] = []
    while (message := receive()) is not None:
        if "report" in message:
            ends.send(delays)
            delays.clear()
        else:
            delays.append(time.monotonic_ns() - message["sent_ns"])
