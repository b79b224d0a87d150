"""Waiting for a shared word to pass a floor: poll, yield, then sleep on a futex.

Both directions of the queue are this one wait: a reader waits until `published` passes the sequence it wants,
the writer until a straggler's `consumed` passes the sequence whose slot it wants.

How long to poll is a bet on how soon the word moves. The budget follows the recent gaps: steps that come every
50 us are met while polling, an engine that steps every 20 ms does not burn a core between steps. Where the
processes outnumber the cores (or a CPU quota), polling takes time from the peer that is awaited, so yield at once.

Every sleep is bounded. Waking up unasked, the waiter looks at the word again (a wake that should have come is
counted as missed) and asks whether waiting still makes sense.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from arena import memory
from arena.memory import Futex, Words

BUSY_POLLS: Final = 5
FIRST_POLLS: Final = 16
POLLS_A_LOOK: Final = 8
MIN_BUDGET_NS: Final = 50_000
MAX_BUDGET_NS: Final = 1_000_000
BUSY_GAP_NS: Final = 50_000  # gaps shorter than this follow each other without a pause
CROWDED_BUDGET_NS: Final = 300_000
LONG_GAP_NS: Final = 500_000  # gaps longer than this are slept through
GAP_CAP_NS: Final = 4_000_000  # one pause must not hide for long that steps are short again
PARK_NS: Final = 50_000_000
IDLE_PARK_NS: Final = 100_000_000
IDLE_AFTER_NS: Final = 1_000_000_000

_monotonic_ns = time.monotonic_ns
_sched_yield = os.sched_yield


def usable_cores() -> int:
    """Cores this process may use at once: its affinity, or its cgroup's CPU quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def deadline_after(timeout_s: float | None) -> int | None:
    """The monotonic time, in ns, at which a wait of `timeout_s` ends; None for a wait without end."""
    return None if timeout_s is None else _monotonic_ns() + int(timeout_s * 1e9)


class Waiter:
    """How one endpoint waits. Not for two threads at once.

    A wait is `spin`, then, if that did not do, `park`.
    """

    __slots__ = (
        "_busy_polls",
        "_expected_ns",
        "_max_budget_ns",
        "_spun_ns",
        "crowded",
        "ended_ns",
        "min_budget_ns",
        "missed_wakes",
        "parks",
        "spin_ns",
        "waited_ns",
    )

    def __init__(self, processes: int) -> None:
        self.crowded = processes > usable_cores()
        self._busy_polls = 0 if self.crowded else BUSY_POLLS
        self._max_budget_ns = CROWDED_BUDGET_NS if self.crowded else MAX_BUDGET_NS
        self._expected_ns = GAP_CAP_NS  # the recent gaps, as an average that forgets quickly; at first no bet
        self._spun_ns = 0  # how long the spin before a park took
        self.min_budget_ns = MIN_BUDGET_NS  # polled for at least, whatever the gaps: for whoever knows that it pays
        self.ended_ns = 0  # when the last wait was over
        self.waited_ns = 0  # all waits together
        self.spin_ns = 0  # those parts of them that burnt CPU, without the shortest ones
        self.parks = 0
        self.missed_wakes = 0

    def spin(self, word: Words, floor: int, deadline_ns: int | None = None) -> bool:
        """Poll and yield until ``word[0] > floor``; False once the budget, or the deadline, is spent.

        Most waits of a busy queue end in the first few rounds, so these come before any reckoning.
        """
        started_ns = _monotonic_ns()
        for _ in range(self._busy_polls):
            if word[0] > floor:
                self.ended_ns = started_ns
                return True
        for _ in range(FIRST_POLLS):
            _sched_yield()
            if word[0] > floor:
                self.ended_ns = now_ns = _monotonic_ns()
                self.waited_ns += now_ns - started_ns
                self._expected_ns >>= 1
                return True
        return self._spin_on(word, floor, started_ns, deadline_ns)

    def _spin_on(self, word: Words, floor: int, started_ns: int, deadline_ns: int | None) -> bool:
        ends_ns = started_ns + self._budget_ns()
        if deadline_ns is not None and deadline_ns < ends_ns:
            ends_ns = deadline_ns
        passed = False
        while not passed and _monotonic_ns() < ends_ns:
            for _ in range(POLLS_A_LOOK):
                _sched_yield()
                if word[0] > floor:
                    passed = True
                    break
        self.ended_ns = _monotonic_ns()
        waited_ns = self.ended_ns - started_ns
        self.waited_ns += waited_ns
        self.spin_ns += waited_ns
        if passed:
            self._learn(waited_ns)
        else:
            self._spun_ns = waited_ns
        return passed

    def park(
        self,
        word: Words,
        floor: int,
        *,
        futex: Futex,
        parked: Words,
        code: int,
        look: Callable[[int], None],
        deadline_ns: int | None,
    ) -> bool:
        """Sleep until ``word[0] > floor``; False if the deadline came first.

        Args:
            word: the shared word.
            floor: the value to pass.
            futex: the same word as a futex.
            parked: this endpoint's own word that tells the other side to wake it.
            code: what to write there.
            look: called with the time before the first sleep and after each. Refreshes what observers see, and
                raises if waiting has become pointless.
            deadline_ns: monotonic time of the deadline.
        """
        began_ns = now_ns = _monotonic_ns()
        look(now_ns)
        try:
            parked[0] = code
            memory.fence()  # the flag must be visible before the last look, or the wake could be lost
            while True:
                seen = word[0]
                if seen > floor:
                    return True
                sleep_ns = PARK_NS if now_ns - began_ns < IDLE_AFTER_NS else IDLE_PARK_NS
                if deadline_ns is not None:
                    sleep_ns = min(sleep_ns, deadline_ns - now_ns)
                    if sleep_ns <= 0:
                        return False
                self.parks += 1
                woken = futex.wait(seen, sleep_ns)
                now_ns = _monotonic_ns()
                if word[0] > floor:
                    self.missed_wakes += not woken
                    return True
                look(now_ns)
        finally:
            self.ended_ns = _monotonic_ns()
            parked[0] = 0
            self.waited_ns += self.ended_ns - began_ns
            # The whole gap: taught the slept part alone, the budget settles just below gaps that it could cover.
            self._learn(self.ended_ns - began_ns + self._spun_ns)
            self._spun_ns = 0

    def _learn(self, waited_ns: int) -> None:
        self._expected_ns = (3 * self._expected_ns + min(waited_ns, GAP_CAP_NS)) >> 2

    def _budget_ns(self) -> int:
        """How long to poll before sleeping: a few of the recent gaps, if these are short enough to bet on.

        Where messages follow each other without a pause, one that is late is late by an interrupt or a moment without
        its core, which is over sooner than a sleep and a wake-up.
        """
        if self._expected_ns > LONG_GAP_NS:
            return self.min_budget_ns
        if self._expected_ns < BUSY_GAP_NS and not self.crowded:
            return self._max_budget_ns
        return max(self.min_budget_ns, min(3 * self._expected_ns, self._max_budget_ns))
