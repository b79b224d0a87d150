"""The probe page: what one endpoint leaves in shared memory for others to look at, alive or dead.

A small file on tmpfs, one writer, plain 64-bit stores, no lock, no I/O, nothing that can raise. Whoever maps
it reads it while its owner is hung under the GIL, stopped, or gone. The idea is Aeron's counters file and the
JVM's perf data; both keep it off disk for the same reason: a page that is written back can stall its writer.

Layout, in 64-bit words::

    0      header (H_*)              written once
    32     live words (L_*)          one store each, at once
    64     values                    counters, gauges, histograms; copied from a private list at most every
                                     100 ms, before each sleep, and with every charged wait
    ...    publish marks (writer) · block table (writer) · segment sizes (writer) · event ring · metadata (JSON)

The hot path adds to the private list, which costs a third of adding to shared memory; so after a SIGKILL
mid-burst up to 100 ms of histogram counts are missing. Of the live words the sequence is never late; its time is
that of the last message that was looked at (see `arena.observe`), and the writer has marks instead.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from array import array
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from arena import memory
from arena.errors import RunDirectoryError
from arena.layout import PAGE, WORD, round_up
from arena.memory import Mapping
from arena.probe import hooks
from arena.probe.metrics import Role, Series, lay_out

PAGE_MAGIC: Final = 0x4152454E_4150524F  # "ARENAPRO"
PAGE_VERSION: Final = 1

H_MAGIC: Final = 0
H_VERSION: Final = 1
H_BYTES: Final = 2
H_ROLE: Final = 3
H_RANK: Final = 4
H_PID: Final = 5
H_START_TICKS: Final = 6  # /proc/<pid>/stat field 22: with the pid, it names one process for ever
H_PID_NAMESPACE: Final = 7
H_WALL_NS: Final = 8  # wall clock and CLOCK_MONOTONIC, read together at the start
H_MONOTONIC_NS: Final = 9
H_VALUES: Final = 10  # word offsets and counts of the parts
H_VALUES_COUNT: Final = 11
H_MARKS: Final = 12
H_MARKS_COUNT: Final = 13
H_BLOCKS: Final = 14
H_BLOCKS_COUNT: Final = 15
H_EVENTS: Final = 16
H_EVENTS_COUNT: Final = 17
H_METADATA: Final = 18
H_METADATA_BYTES: Final = 19
H_TIME_NAMESPACE: Final = 20
H_SEGMENTS: Final = 21
H_SEGMENTS_COUNT: Final = 22  # 0 in pages from before there was the table

LIVE: Final = 32
L_STATE: Final = LIVE + 0
L_PROGRESS_NS: Final = LIVE + 1  # last sign of life besides messages: a look while waiting, its end, a heartbeat
L_SEQUENCE: Final = LIVE + 2  # published (writer) or consumed (reader)
L_SEQUENCE_NS: Final = LIVE + 3  # at a reader: when it took the last frame that was looked at
L_WAIT_SINCE_NS: Final = LIVE + 4  # 0 when not waiting
L_WAIT_SEQUENCE: Final = LIVE + 5  # the sequence that must be released (writer) or come (reader)
L_WAIT_ON: Final = LIVE + 6  # 1 + the rank the writer sleeps on
L_ALONE_SINCE_NS: Final = LIVE + 7  # since when that rank alone holds the sequence; 0 while others do, or did and died
L_PENDING: Final = LIVE + 8  # four words, one bit a rank: who still holds that sequence
PENDING_WORDS: Final = 4
L_EVENTS: Final = LIVE + 12  # events written so far
L_BLOCK_SEAL: Final = LIVE + 13  # sequence lock of the block table: odd while it changes
L_VALUES_NS: Final = LIVE + 14  # when the values were last copied out

VALUES: Final = 64

MARK_WORDS: Final = 2  # sequence + 1 (0: no mark), time of publishing

BLOCK_WORDS: Final = 4  # segment + 1 (0: free entry), offset, bytes, holders (bit mask of ranks, 63: the writer)
BLOCK_ENTRIES: Final = 256
SEGMENT_ENTRIES: Final = 128  # as many as there may be; bytes of segment 1, 2, ...; 0 for one that there is not

EVENT_WORDS: Final = 8  # kind, sequence, time, a, b, three words of trace context
EVENT_ENTRIES: Final = 256  # 16 KiB: stays in cache
_EVENT: Final = struct.Struct("8Q")

FLUSH_NS: Final = 100_000_000
EVENT_GAP_NS: Final = 5_000_000
"""Message events closer together than this are dropped and counted: the ring covers the last second at least."""

TRACE_CREDIT_NS: Final = 64 * EVENT_GAP_NS
"""Events of sampled messages may come so far ahead of one in 5 ms. More of them would overwrite each other before they
are read, at the writer and at its readers different ones; so the writer samples no more."""

DETAILS: Final = {Role.READER: (32, 10_000_000), Role.COMMUNICATOR: (128, 5_000_000)}
"""Of what may come many times in one sampled message: so many at once, and one in so many ns in the long run. With them
no event is overwritten before it is read, twice a second."""

MODE_BITS: Final = 8
"""Bits that say which modes the copies of a `TO_DEVICE` had."""

PATH_BITS: Final = 5
"""Bits that say which of ALLREDUCE_PATHS served a `REDUCE`; three more say which of OPERATIONS it was."""

NO_TRACE: Final = (0, 0, 0)

LOOKS_A_WINDOW: Final = 4
"""About how many small messages are looked at closely between two copy-outs: 40 a second."""

MASK: Final = (1 << 64) - 1


class Event:
    """Kinds of events in the flight recorder, and what `a` and `b` mean in each."""

    PUBLISH: Final = 1  # a: ns of encoding; of several parts without a trace: of all of sending; b: bytes
    CONSUME: Final = 2  # a: ns from publish to receive, b: ns from receive to release
    WAIT: Final = 3  # writer, when a wait for a slot ended; a: ns, b: rank charged
    COPY: Final = 4  # a: ns, b: bytes
    FALLBACK: Final = 5  # a: index of the reason in FALLBACK_REASONS, b: bytes
    ATTACH: Final = 6  # a: rank, b: pid
    LEAVE: Final = 7  # a: rank, b: pid
    DEATH: Final = 8  # a: rank, b: pid
    ABORT: Final = 9
    GROW: Final = 10  # a: segment, b: bytes
    RECLAIM: Final = 11  # a: rank, b: holds
    ERROR: Final = 12  # a: index of the kind in ERROR_KINDS
    CLOSE: Final = 13
    STALL: Final = 14  # a wait passed a second; a: ns so far, b: rank waited for
    # Of sampled messages only. Their other events are always recorded, and carry the trace's words.
    ORIGIN: Final = 15  # at the time when its enqueue began; a: the sender's own span, 0 without, b: index of its path
    DONE: Final = 16  # the reader is back for more; a: ns since the release, b: ns of decoding, which ended with it
    TO_DEVICE: Final = 17  # a call of to_device returned; a: ns, b: bytes << MODE_BITS | a bit for each of COPY_MODES
    GATE: Final = 18  # a hold went back by way of its gate; a: ns since its view died
    REDUCE: Final = 19  # communicator; a: ns, b: bytes << 16 | the reader's rank << 8 | operation << PATH_BITS | path

    NAMES: Final = {
        PUBLISH: "publish",
        CONSUME: "consume",
        WAIT: "wait",
        COPY: "copy",
        FALLBACK: "fallback",
        ATTACH: "attach",
        LEAVE: "leave",
        DEATH: "death",
        ABORT: "abort",
        GROW: "grow",
        RECLAIM: "reclaim",
        ERROR: "error",
        CLOSE: "close",
        STALL: "stall",
        ORIGIN: "origin",
        DONE: "done",
        TO_DEVICE: "to_device",
        GATE: "gate",
        REDUCE: "reduce",
    }


ROLES: Final = {Role.WRITER: 1, Role.READER: 2, Role.COMMUNICATOR: 3}


@dataclass(frozen=True)
class Identity:
    """Which process owns a page."""

    pid: int
    start_ticks: int
    pid_namespace: int


def identity(pid: int | None = None) -> Identity:
    """The identity of a process of this pid namespace; of this one by default.

    Raises:
        ProcessLookupError: there is no such process.
    """
    pid = os.getpid() if pid is None else pid
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        raise ProcessLookupError(pid) from None
    # The command name may hold spaces and parentheses; fields count from the last one.
    start_ticks = int(stat[stat.rindex(b")") + 2 :].split()[19])
    return Identity(pid, start_ticks, namespace("pid"))


@cache
def namespace(kind: str) -> int:
    """Inode of this process's namespace of that kind, 0 where /proc does not tell. A process stays in its own."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


os.register_at_fork(after_in_child=namespace.cache_clear)  # a child may be put into another one


class Probe:
    """The owner's side of a page. Every method is one thought, after the fact, and can't fail."""

    __slots__ = (
        "_details",
        "_details_until_ns",
        "_due_ns",
        "_event_base",
        "_events",
        "_index",
        "_mapping",
        "_marked",
        "_marks",
        "_marks_count",
        "_ordered",
        "_recording",
        "_values_out",
        "events_dropped",
        "message_events",
        "next_event_ns",
        "next_flush_ns",
        "path",
        "values",
        "view",
        "words",
    )

    def __init__(self, path: Path, role: Role, *, rank: int, n_reader: int, slots: int, about: dict[str, Any]) -> None:
        series, count = lay_out(role, n_reader)
        metadata = json.dumps({**about, "series": [_described(one) for one in series]}).encode()
        writer = role is Role.WRITER
        marks = VALUES + count
        blocks = marks + slots * MARK_WORDS
        segments = blocks + (BLOCK_ENTRIES * BLOCK_WORDS if writer else 0)
        events = round_up(segments + (SEGMENT_ENTRIES if writer else 0), EVENT_WORDS)
        metadata_word = events + EVENT_ENTRIES * EVENT_WORDS
        nbytes = round_up(metadata_word * WORD + len(metadata), PAGE)

        self.path = path
        self._mapping = _create_page(path, nbytes)
        self.view = self._mapping.view()
        self.words = self._mapping.raw_words(0, nbytes // WORD)
        self._ordered = memory.ordered_words(self.words)
        self.values = [0] * count
        self._index = {(one.metric.name, *one.labels.values()): one.word for one in series}
        self._values_out = self.words[VALUES : VALUES + count]
        self._marks = marks
        self._marks_count = slots  # 0 at a reader
        self._marked = 0
        self._event_base = events * WORD
        self._events = 0
        self._recording = threading.RLock()  # not a plain one: a signal handler may interrupt its own thread
        self._details = DETAILS.get(role, (0, 0))
        self._details_until_ns = 0
        self._due_ns = [0] * (1 + max(Event.NAMES))
        self.message_events = 0
        self.next_event_ns = 0
        self.next_flush_ns = 0
        self.events_dropped = self._index[("events_dropped_total",)]

        own = identity()
        start = metadata_word * WORD
        self.view[start : start + len(metadata)] = metadata
        header = {
            H_VERSION: PAGE_VERSION,
            H_BYTES: nbytes,
            H_ROLE: ROLES[role],
            H_RANK: rank,
            H_PID: own.pid,
            H_START_TICKS: own.start_ticks,
            H_PID_NAMESPACE: own.pid_namespace,
            H_WALL_NS: time.time_ns(),
            H_MONOTONIC_NS: time.monotonic_ns(),
            H_VALUES: VALUES,
            H_VALUES_COUNT: count,
            H_MARKS: marks if writer else 0,
            H_MARKS_COUNT: slots,
            H_BLOCKS: blocks if writer else 0,
            H_BLOCKS_COUNT: BLOCK_ENTRIES if writer else 0,
            H_EVENTS: events,
            H_EVENTS_COUNT: EVENT_ENTRIES,
            H_METADATA: start,
            H_METADATA_BYTES: len(metadata),
            H_TIME_NAMESPACE: namespace("time"),
            H_SEGMENTS: segments if writer else 0,
            H_SEGMENTS_COUNT: SEGMENT_ENTRIES if writer else 0,
        }
        for word, value in header.items():
            self.words[word] = value
        # Last, so that nobody takes a half-written page for a whole one.
        self._ordered[H_MAGIC] = PAGE_MAGIC
        if hooks.page_made is not None:
            hooks.page_made(path)

    # ── where things are ─────────────────────────────────────────────────────────────────────────
    def word(self, name: str, *labels: object) -> int:
        """Index in `values` of a series; for a histogram, of its bucket 0."""
        key = (name, *map(str, labels))
        return self._index[key]

    # ── adding ───────────────────────────────────────────────────────────────────────────────────
    def count(self, word: int, amount: int = 1) -> None:
        """Add to a counter."""
        self.values[word] += amount

    def observe(self, histogram: int, value: int) -> None:
        """Add one value to a histogram."""
        values = self.values
        values[histogram + value.bit_length()] += 1
        values[histogram + 65] += value

    def gauge(self, word: int, value: int) -> None:
        """Set a gauge."""
        self.values[word] = value

    def event(
        self, kind: int, sequence: int, now_ns: int, a: int = 0, b: int = 0, trace: hooks.Trace = NO_TRACE
    ) -> None:
        """Record something rare. Always kept until 256 later events have overwritten it."""
        self._record(kind, sequence, now_ns, a, b, trace)

    def frequent_event(
        self, kind: int, sequence: int, now_ns: int, a: int, b: int, trace: hooks.Trace = NO_TRACE
    ) -> None:
        """Record what each message may bring: one of a kind in 5 ms, so all that took as long; any of a sampled one."""
        if trace is not NO_TRACE or now_ns >= self._due_ns[kind]:
            self._due_ns[kind] = now_ns + EVENT_GAP_NS
            self._record(kind, sequence, now_ns, a, b, trace)

    def message_event(
        self, kind: int, sequence: int, now_ns: int, a: int, b: int, trace: hooks.Trace = NO_TRACE
    ) -> None:
        """Record one message. The hot path asks `next_event_ns` first: of a burst, one in 5 ms is kept."""
        self.next_event_ns = now_ns + EVENT_GAP_NS
        self.message_events += 1
        self._record(kind, sequence, now_ns, a, b, trace)

    def detail(self, kind: int, sequence: int, now_ns: int, a: int, b: int, trace: hooks.Trace) -> None:
        """Record what a sampled message may have many of, from any thread; what is too much is counted."""
        at_once, gap_ns = self._details
        self._details_until_ns = max(self._details_until_ns, now_ns)
        if self._details_until_ns > now_ns + at_once * gap_ns:
            self.count(self.events_dropped)
            return
        self._details_until_ns += gap_ns
        self._record(kind, sequence, now_ns, a, b, trace)

    def _record(self, kind: int, sequence: int, now_ns: int, a: int, b: int, trace: hooks.Trace) -> None:
        with self._recording:  # details may come from other threads than the owner's
            start = self._event_base + (self._events % EVENT_ENTRIES) * 64
            self.view[start : start + 64] = _EVENT.pack(kind, sequence, now_ns, a & MASK, b & MASK, *trace)
            self._events += 1
            self._ordered[L_EVENTS] = self._events

    def mark(self, sequence: int, now_ns: int) -> None:
        """Remember when a frame was published: how late a reader is, in seconds, is read off the marks."""
        at = self._marks + (self._marked % self._marks_count) * MARK_WORDS
        self._marked += 1
        words = self._ordered
        words[at] = 0  # whoever reads between these stores skips the pair
        words[at + 1] = now_ns
        words[at] = sequence + 1

    # ── letting others see ───────────────────────────────────────────────────────────────────────
    def flush(self, now_ns: int) -> None:
        """Copy the values out."""
        self.next_flush_ns = now_ns + FLUSH_NS
        self._values_out[:] = array("Q", self.values)
        self.words[L_VALUES_NS] = now_ns

    def show(self, word: int, count: int = 1) -> None:
        """Copy some values out at once: for a thread that can't leave it to the endpoint's next flush."""
        self._values_out[word : word + count] = array("Q", self.values[word : word + count])

    def waiting(
        self, state: int, now_ns: int, sequence: int, pending: int, wait_on: int, alone_since_ns: int = 0
    ) -> None:
        """Say that a wait has begun, or for whom it goes on."""
        words = self.words
        if wait_on:
            for index in range(PENDING_WORDS):
                words[L_PENDING + index] = (pending >> (64 * index)) & MASK
        words[L_WAIT_SEQUENCE] = sequence
        words[L_WAIT_ON] = wait_on
        words[L_ALONE_SINCE_NS] = alone_since_ns
        if not words[L_WAIT_SINCE_NS]:
            words[L_WAIT_SINCE_NS] = now_ns
        words[L_STATE] = state
        words[L_PROGRESS_NS] = now_ns

    def proceeding(self, state: int, now_ns: int) -> None:
        """Say that the wait is over."""
        words = self.words
        words[L_WAIT_SINCE_NS] = 0
        if words[L_WAIT_ON]:
            words[L_WAIT_ON] = 0
            words[L_ALONE_SINCE_NS] = 0
            for index in range(PENDING_WORDS):
                words[L_PENDING + index] = 0
        words[L_STATE] = state
        words[L_PROGRESS_NS] = now_ns

    def progress(self, now_ns: int) -> None:
        """A sign of life."""
        self.words[L_PROGRESS_NS] = now_ns

    def block(self, entry: int, segment: int, offset: int, nbytes: int, holders: int) -> None:
        """Rewrite one entry of the block table; `segment` is 1-based, 0 for an entry that is free."""
        if entry >= BLOCK_ENTRIES:
            return
        words, ordered = self.words, self._ordered
        changing = words[L_BLOCK_SEAL] | 1  # odd already, if an interrupt cut the last change short
        ordered[L_BLOCK_SEAL] = changing
        base = words[H_BLOCKS] + entry * BLOCK_WORDS
        ordered[base] = segment
        words[base + 1] = offset
        words[base + 2] = nbytes
        words[base + 3] = holders
        ordered[L_BLOCK_SEAL] = changing + 1

    def segment(self, number: int, nbytes: int) -> None:
        """Say how large a segment of the arena is; they count from 1."""
        if number <= SEGMENT_ENTRIES:
            self.words[self.words[H_SEGMENTS] + number - 1] = nbytes

    def closed(self, state: int, now_ns: int) -> None:
        """The last words of an endpoint that ends in order."""
        self.proceeding(state, now_ns)
        self.flush(now_ns)

    def unlink(self) -> None:
        """Remove the page's file. What was counted goes with it; death leaves it for a post-mortem."""
        self.path.unlink(missing_ok=True)


def _described(series: Series) -> dict[str, Any]:
    metric = series.metric
    return {
        "name": metric.name,
        "kind": metric.kind.value,
        "unit": metric.unit,
        "scale": metric.scale,
        "labels": series.labels,
        "word": series.word,
    }


def _create_page(path: Path, nbytes: int) -> Mapping:
    """Create and reserve the file, so that a full file system is an error now and not SIGBUS later."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        os.fchmod(fd, 0o640)  # whatever the umask: the directory's mode decides whether the group gets this far
        os.posix_fallocate(fd, 0, nbytes)
        return Mapping(fd, nbytes, writable=True)
    except OSError as error:
        path.unlink(missing_ok=True)
        free = os.statvfs(path.parent)
        raise RunDirectoryError(
            f"no room for the probe page {path.name}",
            expected=f"{nbytes} bytes free on the file system of {path.parent}",
            found=f"{free.f_bavail * free.f_frsize} bytes free ({error.strerror})",
            remedy="free some, set ARENA_RUN_DIR to another tmpfs, or turn probes off",
        ) from error
    finally:
        os.close(fd)
