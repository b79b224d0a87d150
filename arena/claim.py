"""Waiting for a slot: for whom, how long, and whom it is charged to. The only place where head-of-line blocking lives.

The writer sleeps on one straggler at a time, since all must pass, and says in its page which ones still hold the
slot. When it goes on, the readers' own release times tell who was last.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from arena.blame import alone_since, charge, charge_unfinished
from arena.errors import QueueTimeout
from arena.memory import Futex, Words
from arena.observe import WriterLog
from arena.peers import Roster, Seat
from arena.ring import WriterRing, released_at
from arena.wait import Waiter

_monotonic_ns = time.monotonic_ns


class _RosterChanged(Exception):
    """While waiting, a reader attached, left or died: look again for whom to wait."""


class Claim:
    """How the writer comes by a slot that is not free yet.

    Args:
        name: the queue's, for messages.
        check_open: raises if the queue is being closed.
        see_to_roster: called when the roster has changed; its argument tells whether a message may be refused now.
        warn: gets one sentence when a wait has lasted `stall_warning_s`.
    """

    __slots__ = (
        "_check_open",
        "_futex",
        "_name",
        "_parked",
        "_ring",
        "_roster",
        "_see_to_roster",
        "_stall_ns",
        "_waiter",
        "_warn",
        "log",
        "waited_ns",
        "waiting",
    )

    def __init__(  # noqa: PLR0913 - most of them by name, and made in one place
        self,
        name: str,
        ring: WriterRing,
        roster: Roster,
        waiter: Waiter,
        *,
        futex: Futex,
        parked: Words,
        check_open: Callable[[], None],
        see_to_roster: Callable[[bool], None],
        warn: Callable[[str], None],
        stall_warning_s: float,
    ) -> None:
        self._name = name
        self._ring = ring
        self._roster = roster
        self._waiter = waiter
        self._futex = futex
        self._parked = parked
        self._check_open = check_open
        self._see_to_roster = see_to_roster
        self._warn = warn
        self._stall_ns = int(min(stall_warning_s, 1e9) * 1e9)  # it may be infinite
        self.log: WriterLog | None = None
        self.waiting = False
        self.waited_ns = 0  # by the last call of `wait`

    def wait(self, sequence: int, deadline_ns: int | None, *, first: bool) -> None:
        """Return once every counted reader has released the frame `slots` before `sequence`.

        Args:
            sequence: the one to be claimed.
            deadline_ns: monotonic time of the deadline.
            first: whether it is a message's first frame, so that the message may still be refused.

        Raises:
            QueueTimeout: says who holds the line.
        """
        self.waited_ns = 0
        if sequence < self._new_limit(sequence):
            return
        floor = sequence - self._ring.slots
        if self._pending(floor):  # not so if one has only been admitted: its word says 0 until it takes its place
            self._block(floor, deadline_ns, first=first)
        consumed = [seat.consumed for seat in self._roster.counted]
        self._ring.limit = min(consumed, default=sequence) + self._ring.slots

    def close(self) -> None:
        """Let go of the queue, which would otherwise live until the next garbage collection."""
        del self._check_open, self._see_to_roster, self._warn

    def _new_limit(self, sequence: int) -> int:
        """How far the ring is free, as readers stand now. Most calls end with this: once a lap nobody is waited for."""
        low = sequence
        for reader in self._roster.words:
            consumed = reader[0]
            if consumed < low:  # noqa: PLR1730 - min() costs a call per reader
                low = consumed
        limit = self._ring.limit = low + self._ring.slots
        return limit

    def _pending(self, floor: int) -> list[Seat]:
        return [seat for seat in self._roster.counted if seat.consumed <= floor]

    def _block(self, floor: int, deadline_ns: int | None, *, first: bool) -> None:
        started_ns = _monotonic_ns()
        holders = {seat.rank: seat for seat in self._pending(floor)}
        n_counted = len(self._roster.counted)
        warned = False

        def look(now_ns: int) -> None:
            nonlocal warned
            self._check_open()
            changed = self._roster.reap() or self._roster.changed
            pending = self._pending(floor)
            self.waiting = True
            if self.log is not None:
                self.log.waiting(floor, pending, now_ns, self._alone_since(floor, pending, holders, started_ns, now_ns))
            if not warned and now_ns - started_ns >= self._stall_ns:
                warned = True
                self._report_stall(floor, pending, now_ns - started_ns)
            if changed:
                raise _RosterChanged

        try:
            self._outwait(floor, look, first=first, deadline_ns=deadline_ns)
        finally:
            if self.waiting:
                self.waiting = False
                if self.log is not None:
                    self.log.proceeding()
            ended_ns = _monotonic_ns()
            self.waited_ns = ended_ns - started_ns
            self._charge(floor, started_ns, ended_ns, holders, n_counted)

    def _outwait(self, floor: int, look: Callable[[int], None], *, first: bool, deadline_ns: int | None) -> None:
        """Wait for one straggler after the other. In a function of its own: see `MessageQueue._new_lock`."""
        while pending := self._pending(floor):
            straggler = min(pending, key=lambda seat: seat.consumed)
            try:
                passed = self._waiter.spin(straggler.words, floor, deadline_ns) or self._waiter.park(
                    straggler.words,
                    floor,
                    futex=straggler.futex or self._futex,
                    parked=self._parked,
                    code=straggler.rank + 1,
                    look=look,
                    deadline_ns=deadline_ns,
                )
            except _RosterChanged:
                self._see_to_roster(first)
                continue
            if not passed:
                raise self._timed_out(floor)

    def _alone_since(
        self, floor: int, pending: list[Seat], holders: dict[int, Seat], started_ns: int, now_ns: int
    ) -> int:
        """Since when one reader alone holds the slot; 0 unless it is certain to be the one that gets charged.

        It is not where another holder died: that one never released, and may be charged for it.
        """
        others = [seat for seat in holders.values() if seat not in pending]
        if len(pending) != 1 or pending[0] not in holders.values() or any(seat.consumed <= floor for seat in others):
            return 0
        released_ns = {seat.rank: released_at(seat.released, floor, self._ring.slots) for seat in others}
        return alone_since(started_ns, now_ns, released_ns)

    def _charge(self, floor: int, started_ns: int, ended_ns: int, holders: dict[int, Seat], n_counted: int) -> None:
        if self.log is None:
            return
        lags = {rank: self._lag(seat) for rank, seat in holders.items() if seat.consumed <= floor}
        passed = [seat for rank, seat in holders.items() if rank not in lags]
        released_ns = {seat.rank: released_at(seat.released, floor, self._ring.slots) for seat in passed}
        if lags:
            charged = charge_unfinished(started_ns, ended_ns, released_ns, lags, n_counted)
        elif released_ns:
            charged = charge(started_ns, ended_ns, released_ns, n_counted)
        else:
            return
        self.log.charge(charged, self._ring.published[0], ended_ns)

    def _lag(self, seat: Seat) -> int:
        return max(0, self._ring.published[0] - seat.consumed)

    def _timed_out(self, floor: int) -> QueueTimeout:
        pending = self._pending(floor)
        halted = any(seat.process is not None and seat.process.halted_by() for seat in pending)
        advice = "let what is stopped go on (kill -CONT)" if halted else "see what that reader does (py-spy dump --pid)"
        return QueueTimeout(
            f"queue {self._name!r} is full: {self._verdict(pending)}",
            expected=f"frame {floor} released by all {len(self._roster.counted)} readers",
            found=f"{self._ring.published[0]} published",
            remedy=f"nothing was sent; {advice}, or allow more time",
        )

    def _verdict(self, pending: list[Seat]) -> str:
        """Who holds the line, in the three words' sense: awaiting_readers."""
        now_ns = _monotonic_ns()
        return "awaiting_readers " + ", ".join(
            f"{seat.describe()} lag {self._lag(seat)}{self._circumstances(seat, now_ns)}" for seat in pending
        )

    def _circumstances(self, seat: Seat, now_ns: int) -> str:
        """What its process, and its own release times, tell of a reader that holds the line."""
        if seat.process is None:
            return ""
        halted_by = seat.process.halted_by()
        facts = [f"stopped by {halted_by}"] if halted_by else []
        if seat.consumed > seat.first:
            since_ns = now_ns - released_at(seat.released, seat.consumed - 1, self._ring.slots)
            facts.append(f"took nothing for {max(0, since_ns) / 1e9:.1f} s")
        else:
            facts.append("has taken nothing yet")
        return f" ({', '.join(facts)})"

    def _report_stall(self, floor: int, pending: list[Seat], waited_ns: int) -> None:
        if self.log is not None:
            self.log.stall(floor, pending, waited_ns)
        self._warn(f"queue {self._name!r} blocked for {waited_ns / 1e9:.1f} s: {self._verdict(pending)}")
