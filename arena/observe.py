"""What an endpoint writes into its probe page, kept out of the story of a message.

Everything here comes after the fact and can't fail. The hot path's share is one store a message, its sequence, made
in the verb itself; all else waits for a message that is looked at: every one while they are few, and of many a sample
that costs about the same whatever their rate.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from arena.blame import Charge
from arena.errors import ArenaError, CorruptFrame, DecodeFailed, EncodeFailed, HandleMismatch, PeerDied, QueueTimeout
from arena.probe import Event, Probe
from arena.probe.hooks import Sampled, Trace
from arena.probe.metrics import ERROR_KINDS, FALLBACK_REASONS, PATHS
from arena.probe.page import (
    EVENT_GAP_NS,
    L_SEQUENCE,
    L_SEQUENCE_NS,
    LOOKS_A_WINDOW,
    NO_TRACE,
    TRACE_CREDIT_NS,
)
from arena.state import Endpoint

if TYPE_CHECKING:
    from arena.blocks import BlockPool
    from arena.peers import Roster, Seat
    from arena.wait import Waiter

_ALLOWED_AT_ONCE_NS: Final = 1_000_000_000
_KIND_OF_ERROR: Final[dict[type[ArenaError], str]] = {
    QueueTimeout: "timeout",
    PeerDied: "peer_died",
    HandleMismatch: "handle_mismatch",
    CorruptFrame: "corrupt_frame",
    EncodeFailed: "encode",
    DecodeFailed: "decode",
}


def kind_of(error: ArenaError) -> str:
    """Under which of ``ERROR_KINDS`` it counts; empty for one that is not counted."""
    return _KIND_OF_ERROR.get(type(error), "")


_NEWS: Final = {"attach": Event.ATTACH, "leave": Event.LEAVE, "death": Event.DEATH}
_monotonic_ns = time.monotonic_ns


class _Log(ABC):
    """What both ends record."""

    __slots__ = (
        "_errors",
        "_half_a_period_late",
        "_looks",
        "_missed",
        "_parks",
        "_spin",
        "_waiter",
        "_window_from",
        "page",
        "phase",
        "probe",
        "sample",
    )

    def __init__(self, probe: Probe, waiter: Waiter, *, half_a_period_late: bool) -> None:
        self.probe = probe
        self.sample = 0  # a message is looked at if these bits of its sequence are `phase`
        self.phase = 0
        self._half_a_period_late = half_a_period_late
        self.page = probe.words
        self._waiter = waiter
        self._window_from = 0
        self._looks = 0  # in this window, since there was the last one too many
        self._errors = {kind: probe.word("errors_total", kind) for kind in ERROR_KINDS}
        self._parks = probe.word("parks_total")
        self._missed = probe.word("missed_wakes_total")
        self._spin = probe.word("spin_seconds_total")

    def error(self, error: ArenaError, sequence: int) -> None:
        """Count an error that a caller gets to see."""
        kind = _KIND_OF_ERROR.get(type(error))
        if kind is not None:
            self.probe.count(self._errors[kind])
            self.probe.event(Event.ERROR, sequence, _monotonic_ns(), ERROR_KINDS.index(kind))

    def errors(self) -> dict[str, int]:
        """Errors so far, by kind."""
        values = self.probe.values
        return {kind: values[word] for kind, word in self._errors.items() if values[word]}

    def proceeding(self) -> None:
        """A wait is over."""
        self.probe.proceeding(Endpoint.WORKING, _monotonic_ns())

    def close(self, sequence: int) -> None:
        """The last words; the page goes."""
        now_ns = _monotonic_ns()
        self.probe.event(Event.CLOSE, sequence, now_ns)
        self.probe.closed(Endpoint.CLOSED, now_ns)
        self.probe.unlink()

    def _end_window(self, sequence: int) -> None:
        """Choose how many of the next window's small messages to look at: about as many whatever their rate."""
        passed = sequence - self._window_from
        self._window_from = sequence
        self._looks = 0
        self._look_at_one_in(1 << (passed // LOOKS_A_WINDOW).bit_length())

    def _notice_burst(self) -> None:
        """Where there are more looks than a window should have, look at half as many from here on."""
        self._looks += 1
        if self._looks > LOOKS_A_WINDOW:
            self._looks = 0
            self._look_at_one_in(2 * (self.sample + 1))

    def catch_up(self, sequence: int, now_ns: int) -> None:
        """A burst may be over, and the next message to be looked at far away: begin a new window if it is time."""
        if now_ns >= self.probe.next_flush_ns:
            self._end_window(sequence)
            self.flush(now_ns)

    @abstractmethod
    def flush(self, now_ns: int) -> None:
        """Copy out what observers read."""

    def _look_at_one_in(self, period: int) -> None:
        self.sample = period - 1
        self.phase = period // 2 if self._half_a_period_late else 0

    def _copy_out(self, sequence: int, now_ns: int) -> None:
        waiter, probe = self._waiter, self.probe
        probe.gauge(self._parks, waiter.parks)
        probe.gauge(self._missed, waiter.missed_wakes)
        probe.gauge(self._spin, waiter.spin_ns)
        # A frame is counted before its event is noted, so the difference alone would fall now and then.
        dropped = max(probe.values[probe.events_dropped], sequence - probe.message_events)
        probe.gauge(probe.events_dropped, dropped)
        probe.flush(now_ns)


class Sending:
    """A sampled message on its way: the context that goes with it, and what its span will need."""

    __slots__ = ("at", "began_ns", "encode_ns", "parent", "trace")

    def __init__(self, sampled: Sampled, began_ns: int) -> None:
        self.at = -1  # how many frames were published when it was let in
        self.trace: Trace = sampled[:3]
        self.parent = sampled[3]
        self.began_ns = began_ns
        self.encode_ns = 0  # stays so if it is only sampled once it has been slow


class WriterLog(_Log):
    """What the writer records."""

    __slots__ = (
        "_allowed_until_ns",
        "_blocked",
        "_bytes",
        "_excess",
        "_fallback",
        "_full",
        "_gauges",
        "_memcpy",
        "_memcpy_bytes",
        "_messages",
        "_occupancy",
        "_other_frames",
        "_pool",
        "_published",
        "_roster",
        "_serialize",
        "_slots",
        "_tabled",
        "_traced",
        "_traced_until_ns",
        "_untraced",
        "_wait",
        "_waits",
        "_wanted",
        "_wanted_at",
        "inline_bytes",
        "sending",
    )

    def __init__(self, probe: Probe, waiter: Waiter, roster: Roster, pool: BlockPool, slots: int) -> None:
        super().__init__(probe, waiter, half_a_period_late=False)
        self._roster = roster
        self._pool = pool
        self._slots = slots
        self.inline_bytes = 0  # bytes of messages that rode inline
        self._other_frames = 0  # frames that were not one small message each
        self._tabled = 0  # those among them that were an inline message all the same
        self._published = 0  # as far as this log has seen
        self.sending: Sending | None = None
        self._wanted = 0  # messages to be traced, with those that there was no room for
        self._wanted_at = -1
        self._allowed_until_ns = 0  # as far as messages may be traced that were not slow
        self._traced_until_ns = 0  # as far as the events of sampled messages reach, at one in 5 ms
        word = probe.word
        self._messages = {path: word("messages_published_total", path) for path in PATHS}
        self._bytes = {path: word("published_bytes_total", path) for path in PATHS}
        self._occupancy = word("ring_occupancy_slots")
        self._serialize = word("serialize_seconds", "dump")
        self._memcpy = word("memcpy_seconds", "write")
        self._memcpy_bytes = word("memcpy_bytes_total", "write")
        self._fallback = {reason: word("fallback_total", reason) for reason in FALLBACK_REASONS}
        self._blocked = word("writer_blocked_seconds_total", 0)
        self._excess = word("writer_blocked_excess_seconds_total", 0)
        self._full = word("writer_blocked_full_seconds_total")
        self._waits = word("writer_blocked_total")
        self._wait = word("writer_wait_seconds")
        self._traced = word("traces_sampled_total")
        self._untraced = word("traces_dropped_total")
        gauges = ("segments", "segment_size_bytes", "block_used_bytes", "block_used_max_bytes", "block_budget_bytes")
        self._gauges = {name: word(name) for name in (*gauges, "block_largest_free_bytes", "holds_used")}
        self.flush(_monotonic_ns())

    # ── messages ─────────────────────────────────────────────────────────────────────────────────
    def small(self, sequence: int, nbytes: int, began_ns: int, now_ns: int) -> None:
        """Look at one small message. The verb itself has stored its sequence and added its bytes up."""
        probe = self.probe
        probe.observe(self._serialize, now_ns - began_ns)
        self._look_at_occupancy(sequence)
        probe.mark(sequence, now_ns)
        if now_ns >= probe.next_event_ns:
            probe.message_event(Event.PUBLISH, sequence, now_ns, now_ns - began_ns, nbytes)
        self._notice_burst()
        if now_ns >= probe.next_flush_ns:
            self._end_window(sequence)
            self.flush(now_ns)

    def _look_at_occupancy(self, sequence: int) -> None:
        low = sequence + 1
        for reader in self._roster.words:
            consumed = reader[0]
            if consumed < low:  # noqa: PLR1730 - min() costs a call per reader and message
                low = consumed
        self.probe.observe(self._occupancy, min(sequence + 1 - low, self._slots))

    def frame(self, sequence: int, now_ns: int) -> None:
        """One frame that is not a whole small message."""
        self._other_frames += 1
        self.page[L_SEQUENCE] = sequence + 1
        self.probe.mark(sequence, now_ns)
        self._look_at_occupancy(sequence)
        if now_ns >= self.probe.next_flush_ns:
            self.flush(now_ns)

    def message(
        self, path: str, sequence: int, nbytes: int, took_ns: int, reasons: set[str], sending: Sending | None
    ) -> None:
        """One message that took more than a small pickle; `sequence` is that of its last frame."""
        if path == "inline":  # a table in one slot: counted with the small messages
            self._tabled += 1
            self.inline_bytes += nbytes
        else:
            self.probe.count(self._messages[path])
            self.probe.count(self._bytes[path], nbytes)
        if reasons:
            self.fallback(reasons, sequence, nbytes)
        now_ns = _monotonic_ns()
        if sending is not None:
            self.sent(sending, path, sequence, nbytes, now_ns)
        elif now_ns >= self.probe.next_event_ns:
            self.probe.message_event(Event.PUBLISH, sequence, now_ns, took_ns, nbytes)

    def copied(self, sequence: int, nbytes: int, took_ns: int) -> None:
        """Bytes were copied into a block."""
        self.probe.observe(self._memcpy, took_ns)
        self.probe.count(self._memcpy_bytes, nbytes)
        self._frequent(Event.COPY, sequence, _monotonic_ns(), took_ns, nbytes)

    def fallback(self, reasons: set[str], sequence: int, nbytes: int) -> None:
        """A message did not take the fast path, for these reasons."""
        now_ns = _monotonic_ns()
        for reason in reasons:
            self.probe.count(self._fallback[reason])
            self._frequent(Event.FALLBACK, sequence, now_ns, FALLBACK_REASONS.index(reason), nbytes)

    def _frequent(self, kind: int, sequence: int, now_ns: int, a: int, b: int) -> None:
        trace, sending = NO_TRACE, self.sending
        # It is what this belongs to, and not one that an interrupt kept back. One that is streamed is published by now.
        if sending is not None and sending.at in (sequence, self.page[L_SEQUENCE]):
            trace = sending.trace
            self._traced_until_ns += EVENT_GAP_NS
        self.probe.frequent_event(kind, sequence, now_ns, a, b, trace)

    # ── sampled messages ─────────────────────────────────────────────────────────────────────────
    def admit(self, sending: Sending, now_ns: int, gap_ns: int) -> bool:
        """Whether one more message is traced: one in `gap_ns`, or, if that is 0, as it was slow, in any case.

        The flight recorder must have room for it, until somebody has read the last ones.
        """
        published = self.page[L_SEQUENCE]
        if published != self._wanted_at:  # one that was refused asks again if it is slow
            self._wanted_at = published
            self._wanted += 1
        self._traced_until_ns = max(self._traced_until_ns, now_ns)
        self._allowed_until_ns = max(self._allowed_until_ns, now_ns)
        allowed = not gap_ns or self._allowed_until_ns <= now_ns + _ALLOWED_AT_ONCE_NS
        if not allowed or self._traced_until_ns > now_ns + TRACE_CREDIT_NS:
            return False
        self._allowed_until_ns += gap_ns
        self._traced_until_ns += 2 * EVENT_GAP_NS
        self.probe.count(self._traced)
        self.sending, sending.at = sending, published
        return True

    def sent(self, sending: Sending, path: str, sequence: int, nbytes: int, now_ns: int) -> None:
        """A sampled message has been published."""
        self.sending = None
        probe, trace = self.probe, sending.trace
        probe.event(Event.ORIGIN, sequence, sending.began_ns, sending.parent, PATHS.index(path), trace)
        probe.message_event(Event.PUBLISH, sequence, now_ns, sending.encode_ns, nbytes, trace)

    def error(self, error: ArenaError, sequence: int) -> None:
        """Count an error that a caller gets to see."""
        super().error(error, sequence)
        sending, self.sending = self.sending, None
        kind = _KIND_OF_ERROR.get(type(error))
        if (
            sending is not None and sending.at == sequence and kind is not None
        ):  # it was not sent, and its trace says why
            now_ns, trace = _monotonic_ns(), sending.trace
            self.probe.event(Event.ORIGIN, sequence, sending.began_ns, sending.parent, 0, trace)
            self.probe.event(Event.ERROR, sequence, now_ns, ERROR_KINDS.index(kind), 0, trace)

    # ── waits ────────────────────────────────────────────────────────────────────────────────────
    def waiting(self, floor: int, pending: list[Seat], now_ns: int, alone_since_ns: int) -> None:
        """The writer waits for these to release `floor`."""
        mask = sum(1 << seat.rank for seat in pending)
        wait_on = pending[0].rank + 1 if pending else 0
        self.probe.waiting(Endpoint.WAITING, now_ns, floor, mask, wait_on, alone_since_ns)
        self.flush(now_ns)

    def charge(self, charged: Charge, sequence: int, now_ns: int) -> None:
        """A wait is over, and somebody is charged with it."""
        probe = self.probe
        probe.count(self._blocked + charged.rank, charged.blocked_ns)
        probe.count(self._excess + charged.rank, charged.excess_ns)
        probe.count(self._full, charged.full_ns)
        probe.count(self._waits)
        probe.observe(self._wait, charged.blocked_ns)
        self._frequent(Event.WAIT, sequence, now_ns, charged.blocked_ns, charged.rank)
        self.flush(now_ns)

    def stall(self, floor: int, pending: list[Seat], waited_ns: int) -> None:
        """A wait has become one to warn of."""
        if pending:
            self.probe.event(Event.STALL, floor, _monotonic_ns(), waited_ns, pending[0].rank)

    def news(self, what: str, seat: Seat, sequence: int) -> None:
        """A reader attached, left or died."""
        self.probe.event(_NEWS[what], sequence, _monotonic_ns(), seat.rank, seat.pid or 0)

    # ── reading it back ──────────────────────────────────────────────────────────────────────────
    def flush(self, now_ns: int) -> None:
        """Copy everything out, with what is kept elsewhere until then."""
        self._published = self.page[L_SEQUENCE]
        pool, gauge, gauges = self._pool, self.probe.gauge, self._gauges
        gauge(self._messages["inline"], self._published - self._other_frames + self._tabled)
        gauge(self._bytes["inline"], self.inline_bytes)
        gauge(gauges["segments"], len(pool.segments))
        gauge(gauges["segment_size_bytes"], pool.size_bytes)
        gauge(gauges["block_used_bytes"], pool.used_bytes)
        gauge(gauges["block_used_max_bytes"], pool.used_max_bytes)
        gauge(gauges["block_budget_bytes"], pool.max_bytes)
        gauge(gauges["block_largest_free_bytes"], pool.largest_free_bytes)
        gauge(gauges["holds_used"], pool.holds_used)
        values = self.probe.values
        gauge(self._untraced, max(values[self._untraced], self._wanted - values[self._traced]))
        self._copy_out(self._published, now_ns)

    def counts(self, n_reader: int) -> dict[str, Any]:
        """The counted part of `Statistics`."""
        self.flush(_monotonic_ns())
        values, ranks = self.probe.values, range(n_reader)
        return {
            "messages_by_path": {path: values[word] for path, word in self._messages.items()},
            "bytes_by_path": {path: values[word] for path, word in self._bytes.items()},
            "fallbacks": {reason: values[word] for reason, word in self._fallback.items() if values[word]},
            "errors": self.errors(),
            "blocked_s_by_reader": {rank: values[self._blocked + rank] / 1e9 for rank in ranks},
            "excess_s_by_reader": {rank: values[self._excess + rank] / 1e9 for rank in ranks},
            "blocked_full_s": values[self._full] / 1e9,
        }


class ReaderLog(_Log):
    """What a reader records."""

    __slots__ = ("_delay", "_hold", "_load", "_memcpy", "_memcpy_bytes", "_starved", "_taken", "pending")

    def __init__(self, probe: Probe, waiter: Waiter) -> None:
        # So that no message pays for a look at both ends.
        super().__init__(probe, waiter, half_a_period_late=True)
        self.pending: tuple[int, int, int, int] | None = None
        self._taken: tuple[int, int, int, Trace] | None = None  # a sampled message that its user has
        word = probe.word
        self._delay = word("queue_delay_seconds")
        self._hold = word("reader_hold_seconds")
        self._starved = word("reader_starved_seconds_total")
        self._memcpy = word("memcpy_seconds", "read")
        self._memcpy_bytes = word("memcpy_bytes_total", "read")
        self._load = word("serialize_seconds", "load")

    def frame(self, sequence: int, sent_ns: int, received_ns: int, now_ns: int) -> None:
        """A frame was taken that is to be looked at; that is done when the reader next has time, see `settle`.

        `now_ns` equals `received_ns` where nobody looked at a second clock.
        """
        if self.pending is not None:
            self.settle()
        if now_ns == received_ns:
            now_ns = _monotonic_ns()
        self.page[L_SEQUENCE_NS] = now_ns
        self.pending = (sequence, sent_ns, received_ns, now_ns)

    def settle(self) -> None:
        """Look at the frame that was set aside: the caller is back for more, so its message is with its user."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        sequence, sent_ns, received_ns, now_ns = pending
        probe = self.probe
        delay_ns = max(0, received_ns - sent_ns)  # two time namespaces could make it negative
        hold_ns = now_ns - received_ns
        probe.observe(self._delay, delay_ns)
        probe.observe(self._hold, hold_ns)
        if now_ns >= probe.next_event_ns:
            probe.message_event(Event.CONSUME, sequence, now_ns, delay_ns, hold_ns)
        self._notice_burst()
        if now_ns >= probe.next_flush_ns:
            self._end_window(sequence)
            self.flush(now_ns)

    def taken(self, sequence: int, trace: Trace, times_ns: tuple[int, int, int, int]) -> None:
        """A sampled message was taken; when it was sent, received, begun to be decoded, and released."""
        sent_ns, received_ns, decode_ns, released_ns = times_ns
        self.probe.message_event(
            Event.CONSUME, sequence, released_ns, max(0, received_ns - sent_ns), released_ns - received_ns, trace
        )
        self._taken = (sequence, released_ns, released_ns - decode_ns, trace)

    @property
    def sampled(self) -> tuple[int, Trace] | None:
        """Sequence and context of the sampled message that the caller has."""
        return None if self._taken is None else (self._taken[0], self._taken[3])

    def done(self) -> None:
        """The caller is back for more: so long it had the sampled message."""
        taken, self._taken = self._taken, None
        if taken is not None:
            sequence, released_ns, decode_ns, trace = taken
            now_ns = _monotonic_ns()
            self.probe.event(Event.DONE, sequence, now_ns, now_ns - released_ns, decode_ns, trace)

    def decoded(self, took_ns: int) -> None:
        """A message of several parts was decoded."""
        self.probe.observe(self._load, took_ns)

    def copied(self, nbytes: int, took_ns: int) -> None:
        """Bytes were copied out of the ring."""
        self.probe.observe(self._memcpy, took_ns)
        self.probe.count(self._memcpy_bytes, nbytes)

    def waiting(self, wanted: int, now_ns: int) -> None:
        """The reader waits for `wanted` to be published."""
        self.probe.waiting(Endpoint.WAITING, now_ns, wanted, 0, 0)
        if now_ns >= self.probe.next_flush_ns:
            self._end_window(self.page[L_SEQUENCE])
        self.flush(now_ns)

    def close(self, sequence: int) -> None:
        """The last words; the page goes."""
        self.settle()
        self.done()
        super().close(sequence)

    def flush(self, now_ns: int) -> None:
        """Copy everything out."""
        self.probe.gauge(self._starved, self._waiter.waited_ns)
        self._copy_out(self.page[L_SEQUENCE], now_ns)
