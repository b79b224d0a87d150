"""Reading a probe page from outside: read-only, bounds-checked, never trusting a word of it.

The owner may be writing, stopped, dead, of another version, or no Arena process at all. A page that can't be
read raises `BadPage`, which says why; a value that changes while it is read is read again, a few times.

One thing can't be guarded against from here: a file that somebody cuts short while it is mapped. Whoever keeps a
page open looks at the file's size before each reading; Arena itself never shrinks a page.
"""

from __future__ import annotations

import json
import os
import stat
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

from arena import memory
from arena.errors import ArenaError
from arena.layout import WORD
from arena.memory import Mapping
from arena.probe import page
from arena.probe.metrics import BUCKETS, HISTOGRAM_WORDS, Kind, Role

_RETRIES: Final = 8
_ROLES: Final = {number: role for role, number in page.ROLES.items()}


MAX_PAGE_BYTES: Final = 64 << 20
"""Far beyond any page of ours; what claims to be larger is not read."""


class BadPage(ArenaError):
    """A file that is not a readable probe page.

    ``reason`` is one word of a closed set, to count by: unreadable, truncated, foreign, version, changed, and
    unfinished for a page without its magic word, which its owner writes last.
    """

    def __init__(
        self, summary: str, *, reason: str = "unreadable", expected: str = "", found: str = "", remedy: str = ""
    ) -> None:
        super().__init__(summary, expected=expected, found=found, remedy=remedy)
        self.reason = reason


@dataclass(frozen=True)
class PageSeries:
    """Where one series lies among a page's values, and what it is."""

    name: str
    kind: Kind
    unit: str
    scale: float
    labels: dict[str, str]
    word: int

    @property
    def words(self) -> int:
        """How many words it takes."""
        return HISTOGRAM_WORDS if self.kind is Kind.HISTOGRAM else 1

    def sample(self, values: Sequence[int]) -> Sample:
        """The series with its value, out of all the values of its page."""
        common = (self.name, self.kind, self.unit, self.scale, self.labels)
        if self.kind is Kind.HISTOGRAM:
            words = tuple(values[self.word : self.word + HISTOGRAM_WORDS])
            return Sample(*common, buckets=words[:BUCKETS], total=words[BUCKETS])
        return Sample(*common, value=values[self.word])


@dataclass(frozen=True)
class Wait:
    """What an endpoint waits for.

    Attributes:
        since_ns: when the wait began, in the page's monotonic time; 0 when it does not wait.
        progress_ns: its last sign of life besides messages.
        sequence: the sequence that must be released (writer) or come (reader).
        pending: the ranks that still hold it (writer).
        alone: the rank that alone holds it and is certain to be charged, with since when: (rank, ns). None otherwise.
    """

    since_ns: int
    progress_ns: int
    sequence: int
    pending: tuple[int, ...]
    alone: tuple[int, int] | None


@dataclass(frozen=True)
class Sample:
    """One series: a scalar's value, or a histogram's buckets (power-of-two) and sum, in stored units."""

    name: str
    kind: Kind
    unit: str
    scale: float
    labels: dict[str, str]
    value: int = 0
    buckets: tuple[int, ...] = ()
    total: int = 0


@dataclass(frozen=True)
class EventRecord:
    """One record of the flight recorder."""

    number: int
    kind: int
    sequence: int
    time_ns: int
    a: int
    b: int
    trace: tuple[int, int, int]


@dataclass(frozen=True)
class BlockRecord:
    """One live block of the writer's arena, and the ranks that hold it (the writer itself is `lent`)."""

    segment: int
    offset: int
    nbytes: int
    holders: tuple[int, ...]
    lent: bool


class ProbeReader:
    """One page, mapped read-only. Close it, or use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping = _map(path)
        self._words = self._mapping.raw_words(0, self._mapping.nbytes // WORD)
        self._blocks: list[BlockRecord] = []
        try:
            # A copy: what was checked can't change any more.
            self._header: list[int] = self._words[: page.LIVE].tolist()
            self._check_header()
            self._same_clock = self._header[page.H_TIME_NAMESPACE] == page.namespace("time")
            self.about: dict[str, Any] = self._metadata()
            self.series = self._checked_series()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        del self._mapping

    def __enter__(self) -> ProbeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── who ──────────────────────────────────────────────────────────────────────────────────────
    @property
    def role(self) -> Role:
        """Writer, reader or communicator."""
        return _ROLES[self._header[page.H_ROLE]]

    @property
    def rank(self) -> int:
        """The reader's rank; 0 for a writer."""
        return self._header[page.H_RANK]

    @property
    def owner(self) -> page.Identity:
        """The process that writes the page."""
        header = self._header
        return page.Identity(header[page.H_PID], header[page.H_START_TICKS], header[page.H_PID_NAMESPACE])

    @property
    def started_ns(self) -> int:
        """When the page was made, by the wall clock."""
        return self._header[page.H_WALL_NS]

    def now_ns(self) -> int:
        """The owner's monotonic time, now; from another time namespace, by the wall clock."""
        if self._same_clock:
            return time.monotonic_ns()
        return self._header[page.H_MONOTONIC_NS] + time.time_ns() - self._header[page.H_WALL_NS]

    def check_unchanged(self) -> None:
        """Raise if the file has been written over since it was opened.

        Raises:
            BadPage: it has.
        """
        if self._words[: page.LIVE].tolist() != self._header:
            raise BadPage(f"{self.path} was written over", reason="changed", expected="the header it had when opened")

    # ── what ─────────────────────────────────────────────────────────────────────────────────────
    def live(self, word: int) -> int:
        """One of the `L_*` words."""
        return self._words[word]

    @property
    def state(self) -> int:
        """What the endpoint is doing: see `arena.state.Endpoint`."""
        return self._words[page.L_STATE]

    @property
    def sequence(self) -> int:
        """Frames published (writer) or taken (reader)."""
        return self._words[page.L_SEQUENCE]

    @property
    def heartbeat_ns(self) -> int:
        """The last sign of life: a message that was looked at, a look around while waiting, a heartbeat."""
        words = self._words
        return max(words[page.L_PROGRESS_NS], words[page.L_SEQUENCE_NS], words[page.L_VALUES_NS])

    def pending(self) -> tuple[int, ...]:
        """The ranks that hold the sequence the writer waits for."""
        return _ranks(self._words[page.L_PENDING : page.L_PENDING + page.PENDING_WORDS].tolist())

    def values(self) -> list[int]:
        """All values as they lie in the page; `series` says what is what."""
        start, count = self._header[page.H_VALUES], self._header[page.H_VALUES_COUNT]
        return self._words[start : start + count].tolist()

    def samples(self) -> list[Sample]:
        """Every series of the page."""
        values = self.values()
        return [one.sample(values) for one in self.series]

    def values_and_wait(self) -> tuple[list[int], Wait]:
        """All values, and the wait that was in progress while they were read: none that they already contain.

        The owner ends a wait first and charges it then, so a wait that was the same before and after is not charged.
        """
        return self._around(self.values)

    def wait(self) -> Wait:
        """The wait that is in progress, alone: a tenth of what the values cost."""
        return self._around(list)[1]

    def _around(self, read_values: Callable[[], list[int]]) -> tuple[list[int], Wait]:
        words = self._words
        since_ns = words[page.L_WAIT_SINCE_NS]
        memory.fence()
        values = read_values()
        # As the owner stores them: pending, rank, since when alone. A later look only makes the wait longer.
        progress_ns, sequence, wait_on = (
            words[word] for word in (page.L_PROGRESS_NS, page.L_WAIT_SEQUENCE, page.L_WAIT_ON)
        )
        alone_ns = words[page.L_ALONE_SINCE_NS]
        pending = self.pending() if wait_on else ()
        memory.fence()
        if not since_ns or words[page.L_WAIT_SINCE_NS] != since_ns:
            return values, Wait(0, progress_ns, 0, (), None)
        alone = (wait_on - 1, alone_ns) if alone_ns and pending == (wait_on - 1,) else None
        return values, Wait(since_ns, progress_ns, sequence, pending, alone)

    def marks(self) -> list[tuple[int, int]]:
        """Sequences with the time of their publishing, sorted; see `published_at`."""
        base, count = self._header[page.H_MARKS], self._header[page.H_MARKS_COUNT]
        raw = self._words[base : base + count * page.MARK_WORDS].tolist()
        memory.fence()
        again = self._words[base : base + count * page.MARK_WORDS].tolist()
        pairs = zip(raw[:: page.MARK_WORDS], raw[1 :: page.MARK_WORDS], again[:: page.MARK_WORDS], strict=True)
        # A mark that was rewritten between its sequence and its time has another sequence by now.
        return sorted([(number - 1, time_ns) for number, time_ns, later in pairs if number and number == later])

    def events(self, since: int = 0) -> list[EventRecord]:
        """The flight recorder, oldest first, without records that were overwritten while being read.

        With `since`, only those numbered so or higher; the first one's number less `since` tells how many are lost.
        """
        base, capacity = self._header[page.H_EVENTS], self._header[page.H_EVENTS_COUNT]
        head = self._words[page.L_EVENTS]
        if head <= since:
            return []
        memory.fence()
        raw = self._words[base : base + capacity * page.EVENT_WORDS].tolist()
        memory.fence()
        first_intact = max(0, self._words[page.L_EVENTS] + 1 - capacity)
        records = []
        for number in range(max(first_intact, head - capacity, since), head):
            start = (number % capacity) * page.EVENT_WORDS
            kind, sequence, time_ns, a, b, *trace = raw[start : start + page.EVENT_WORDS]
            records.append(EventRecord(number, kind, sequence, time_ns, a, b, (trace[0], trace[1], trace[2])))
        return records

    def traced(self) -> bool:
        """Whether the flight recorder holds anything of a sampled message: much cheaper than to read it."""
        base, capacity = self._header[page.H_EVENTS], self._header[page.H_EVENTS_COUNT]
        last_word = base + page.EVENT_WORDS - 1  # the sender's span, never 0
        return any(self._words[last_word : base + capacity * page.EVENT_WORDS : page.EVENT_WORDS].tolist())

    def blocks(self) -> list[BlockRecord]:
        """The arena's live blocks; if the table would not hold still, those of the last time that it did."""
        base, entries = self._header[page.H_BLOCKS], self._header[page.H_BLOCKS_COUNT]
        for _ in range(_RETRIES):
            seal = self._words[page.L_BLOCK_SEAL]
            memory.fence()
            raw = self._words[base : base + entries * page.BLOCK_WORDS].tolist()
            memory.fence()
            if seal % 2 == 0 and seal == self._words[page.L_BLOCK_SEAL]:
                used = [page.BLOCK_WORDS * entry for entry, segment in enumerate(raw[:: page.BLOCK_WORDS]) if segment]
                rows = [raw[at : at + page.BLOCK_WORDS] for at in used]
                self._blocks = [
                    BlockRecord(row[0] - 1, row[1], row[2], _ranks((row[3] & ~(1 << 63),)), bool(row[3] >> 63))
                    for row in rows
                ]
                break
        return self._blocks

    def segments(self) -> tuple[tuple[int, int], ...]:
        """The arena's segments, numbered as in `BlockRecord`, with their bytes; none in a page that does not tell."""
        base, entries = self._header[page.H_SEGMENTS], self._header[page.H_SEGMENTS_COUNT]
        sizes = self._words[base : base + entries].tolist()
        return tuple([(number, nbytes) for number, nbytes in enumerate(sizes) if nbytes])

    # ── checks ───────────────────────────────────────────────────────────────────────────────────
    def _check_header(self) -> None:
        header = self._header
        if header[page.H_MAGIC] != page.PAGE_MAGIC:
            raise BadPage(
                f"{self.path} is not a probe page",
                reason="foreign" if header[page.H_MAGIC] else "unfinished",
                expected="Arena's magic",
                found=hex(header[page.H_MAGIC]),
                remedy="remove it if it is not yours, or run `arena gc`",
            )
        if header[page.H_VERSION] != page.PAGE_VERSION:
            raise BadPage(
                f"{self.path} has another layout",
                reason="version",
                expected=f"version {page.PAGE_VERSION}",
                found=f"version {header[page.H_VERSION]}",
                remedy="use the monitor of the Arena version that runs there",
            )
        parts = (
            (page.H_VALUES, header[page.H_VALUES_COUNT]),
            (page.H_MARKS, header[page.H_MARKS_COUNT] * page.MARK_WORDS),
            (page.H_BLOCKS, header[page.H_BLOCKS_COUNT] * page.BLOCK_WORDS),
            (page.H_SEGMENTS, header[page.H_SEGMENTS_COUNT]),
            (page.H_EVENTS, header[page.H_EVENTS_COUNT] * page.EVENT_WORDS),
        )
        inside = all(header[start] + length <= len(self._words) for start, length in parts)
        text_inside = header[page.H_METADATA] + header[page.H_METADATA_BYTES] <= len(self._words) * WORD
        if not (inside and text_inside and header[page.H_ROLE] in _ROLES):
            raise BadPage(
                f"{self.path} is truncated or damaged",
                reason="truncated",
                expected="every part inside the file",
                remedy="run `arena gc` once its process is gone",
            )

    def _metadata(self) -> dict[str, Any]:
        start, length = self._header[page.H_METADATA], self._header[page.H_METADATA_BYTES]
        try:
            about = json.loads(bytes(self._mapping.view(start, length)))
        except (RecursionError, ValueError) as error:
            raise self._damaged(str(error)) from error
        if not isinstance(about, dict):
            raise self._damaged(type(about).__name__)
        return about

    def _checked_series(self) -> tuple[PageSeries, ...]:
        try:
            return tuple(self._one_series(one) for one in self.about["series"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise self._damaged(repr(error)) from error

    def _one_series(self, one: dict[str, Any]) -> PageSeries:
        fields = (("word", int), ("labels", dict), ("name", str), ("unit", str), ("scale", (int, float)))
        if not all(isinstance(one[name], kind) for name, kind in fields):
            raise ValueError(one)
        found = PageSeries(one["name"], Kind(one["kind"]), one["unit"], float(one["scale"]), one["labels"], one["word"])
        inside = 0 <= found.word <= self._header[page.H_VALUES_COUNT] - found.words
        if not (inside and 0 < found.scale < inf and all(isinstance(value, str) for value in found.labels.values())):
            raise ValueError(one)
        return found

    def _damaged(self, found: str) -> BadPage:
        return BadPage(
            f"{self.path} has damaged metadata",
            reason="truncated",
            expected="an object with a list of series",
            found=found,
            remedy="run `arena gc` once its process is gone",
        )


def published_at(marks: Sequence[tuple[int, int]], sequence: int) -> int:
    """When `sequence` was published, by the writer's marks: 0 without any.

    While messages are few each has its mark. In a burst one in 16 has, and the last one before `sequence` is taken; of
    a sequence older than all marks only this is known, that it is older.
    """
    at = bisect_right(marks, sequence, key=lambda mark: mark[0])
    return marks[max(0, at - 1)][1] if marks else 0


def _map(path: Path) -> Mapping:
    """Map a page read-only, and keep no file open. A file that has been cut short shows in the header."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not hold us
    except OSError as error:
        theirs = "join the group of its directory, or run under its uid"
        raise BadPage(
            f"{path} can't be opened",
            reason="unreadable",
            found=error.strerror or "",
            remedy=theirs if isinstance(error, PermissionError) else "",
        ) from error
    try:
        status = os.fstat(fd)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise BadPage(f"{path} is not a file", reason="foreign", found=stat.filemode(status.st_mode))
        if size < (page.VALUES * WORD) or size % WORD:
            raise BadPage(f"{path} is too short for a probe page", reason="truncated", found=f"{size} bytes")
        if size > MAX_PAGE_BYTES:
            raise BadPage(f"{path} is too large for a probe page", reason="foreign", found=f"{size} bytes")
        return Mapping(fd, size, writable=False)
    finally:
        os.close(fd)


def _ranks(words: Sequence[int]) -> tuple[int, ...]:
    """The bits that are set, counted over the words."""
    mask = sum(word << (64 * index) for index, word in enumerate(words))
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
