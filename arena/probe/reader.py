"""Reading a probe page from outside: read-only, bounds-checked, never trusting a word of it.

The owner may be writing, stopped, dead, of another version, or no Arena process at all. A page that can't be
read raises `BadPage`, which says why; a value that changes while it is read is read again, a few times.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from arena import memory
from arena.errors import ArenaError
from arena.layout import WORD
from arena.probe import page
from arena.probe.metrics import BUCKETS, HISTOGRAM_WORDS, Kind, Role

_RETRIES: Final = 8
_ROLES: Final = {number: role for role, number in page.ROLES.items()}


class BadPage(ArenaError):
    """A file that is not a readable probe page."""


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
        self._map = _map(path)
        self._words = memoryview(self._map).cast("Q")
        try:
            self._check_header()
            self.about: dict[str, Any] = self._metadata()
            self._series = self._checked_series()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._map.close()

    def __enter__(self) -> ProbeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── who ──────────────────────────────────────────────────────────────────────────────────────
    @property
    def role(self) -> Role:
        """Writer, reader or communicator."""
        return _ROLES[self._words[page.H_ROLE]]

    @property
    def rank(self) -> int:
        """The reader's rank; 0 for a writer."""
        return self._words[page.H_RANK]

    @property
    def owner(self) -> page.Identity:
        """The process that writes the page."""
        words = self._words
        return page.Identity(words[page.H_PID], words[page.H_START_TICKS], words[page.H_PID_NAMESPACE])

    def wall_ns(self, monotonic_ns: int) -> int:
        """A monotonic time of the owner's as wall-clock time."""
        return self._words[page.H_WALL_NS] + monotonic_ns - self._words[page.H_MONOTONIC_NS]

    # ── what ─────────────────────────────────────────────────────────────────────────────────────
    def live(self, word: int) -> int:
        """One of the `L_*` words."""
        return self._words[word]

    def pending(self) -> tuple[int, ...]:
        """The ranks that hold the sequence the writer waits for."""
        mask = sum(self._words[page.L_PENDING + index] << (64 * index) for index in range(4))
        return _ranks(mask)

    def samples(self) -> list[Sample]:
        """Every series of the page."""
        return [self._sample(one) for one in self._series]

    def publish_time(self, sequence: int) -> int:
        """When `sequence` was published, by the writer's marks: 0 without any.

        While messages are few each has its mark. In a burst one in 16 has, and the last one before `sequence` is
        taken; of a sequence older than all marks only this is known, that it is older.
        """
        base, count = self._words[page.H_MARKS], self._words[page.H_MARKS_COUNT]
        raw = self._words[base : base + count * page.MARK_WORDS].tolist()
        memory.fence()
        again = self._words[base : base + count * page.MARK_WORDS].tolist()
        starts = range(0, len(raw), page.MARK_WORDS)
        # A mark that was rewritten between its sequence and its time has another sequence by now.
        marks = sorted((raw[at] - 1, raw[at + 1]) for at in starts if raw[at] and raw[at] == again[at])
        before = [time_ns for marked, time_ns in marks if marked <= sequence]
        return before[-1] if before else marks[0][1] if marks else 0

    def events(self) -> list[EventRecord]:
        """The flight recorder, oldest first, without records that were overwritten while being read."""
        base, capacity = self._words[page.H_EVENTS], self._words[page.H_EVENTS_COUNT]
        head = self._words[page.L_EVENTS]
        memory.fence()
        raw = self._words[base : base + capacity * page.EVENT_WORDS].tolist()
        memory.fence()
        first_intact = max(0, self._words[page.L_EVENTS] + 1 - capacity)
        records = []
        for number in range(max(first_intact, head - capacity, 0), head):
            start = (number % capacity) * page.EVENT_WORDS
            kind, sequence, time_ns, a, b, *trace = raw[start : start + page.EVENT_WORDS]
            records.append(EventRecord(number, kind, sequence, time_ns, a, b, (trace[0], trace[1], trace[2])))
        return records

    def blocks(self) -> list[BlockRecord]:
        """The arena's live blocks; empty if the table would not hold still."""
        base, entries = self._words[page.H_BLOCKS], self._words[page.H_BLOCKS_COUNT]
        for _ in range(_RETRIES):
            seal = self._words[page.L_BLOCK_SEAL]
            memory.fence()
            raw = self._words[base : base + entries * page.BLOCK_WORDS].tolist()
            memory.fence()
            if seal % 2 == 0 and seal == self._words[page.L_BLOCK_SEAL]:
                rows = [raw[at : at + page.BLOCK_WORDS] for at in range(0, len(raw), page.BLOCK_WORDS)]
                return [
                    BlockRecord(row[0] - 1, row[1], row[2], _ranks(row[3] & ~(1 << 63)), bool(row[3] >> 63))
                    for row in rows
                    if row[0]
                ]
        return []

    # ── checks ───────────────────────────────────────────────────────────────────────────────────
    def _check_header(self) -> None:
        words = self._words
        if words[page.H_MAGIC] != page.PAGE_MAGIC:
            raise BadPage(f"{self.path} is not a probe page", expected="Arena's magic", found=hex(words[page.H_MAGIC]))
        if words[page.H_VERSION] != page.PAGE_VERSION:
            raise BadPage(
                f"{self.path} has another layout",
                expected=f"version {page.PAGE_VERSION}",
                found=f"version {words[page.H_VERSION]}",
                remedy="use the monitor of the Arena version that runs there",
            )
        parts = (
            (page.H_VALUES, words[page.H_VALUES_COUNT]),
            (page.H_MARKS, words[page.H_MARKS_COUNT] * page.MARK_WORDS),
            (page.H_BLOCKS, words[page.H_BLOCKS_COUNT] * page.BLOCK_WORDS),
            (page.H_EVENTS, words[page.H_EVENTS_COUNT] * page.EVENT_WORDS),
        )
        inside = all(words[start] + length <= len(words) for start, length in parts)
        text_inside = words[page.H_METADATA] + words[page.H_METADATA_BYTES] <= len(words) * WORD
        if not (inside and text_inside and words[page.H_ROLE] in _ROLES):
            raise BadPage(f"{self.path} is truncated or damaged", expected="every part inside the file")

    def _metadata(self) -> dict[str, Any]:
        start, length = self._words[page.H_METADATA], self._words[page.H_METADATA_BYTES]
        try:
            about = json.loads(self._map[start : start + length])
        except (RecursionError, ValueError) as error:
            raise BadPage(f"{self.path} has damaged metadata", found=str(error)) from error
        if not isinstance(about, dict):
            raise BadPage(f"{self.path} has damaged metadata", expected="an object")
        return about

    def _checked_series(self) -> list[dict[str, Any]]:
        try:
            for one in self.about["series"]:
                length = HISTOGRAM_WORDS if Kind(one["kind"]) is Kind.HISTOGRAM else 1
                inside = 0 <= one["word"] <= self._words[page.H_VALUES_COUNT] - length
                fields = (("word", int), ("labels", dict), ("name", str), ("unit", str), ("scale", (int, float)))
                if not inside or not all(isinstance(one[name], kind) for name, kind in fields):
                    raise ValueError(one)
                float(one["scale"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise BadPage(f"{self.path} has damaged metadata", found=repr(error)) from error
        series: list[dict[str, Any]] = self.about["series"]
        return series

    def _sample(self, one: dict[str, Any]) -> Sample:
        start = self._words[page.H_VALUES] + one["word"]
        kind = Kind(one["kind"])
        common = (one["name"], kind, one["unit"], float(one["scale"]), one["labels"])
        if kind is Kind.HISTOGRAM:
            words = self._words[start : start + HISTOGRAM_WORDS].tolist()
            return Sample(*common, buckets=tuple(words[:BUCKETS]), total=words[BUCKETS])
        return Sample(*common, value=self._words[start])


def _map(path: Path) -> mmap.mmap:
    """Map a page read-only. Its owner never shrinks it; a file that has been cut short shows in the header."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not hold us
    except OSError as error:
        raise BadPage(f"{path} can't be opened", found=error.strerror or "") from error
    try:
        status = os.fstat(fd)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise BadPage(f"{path} is not a file", found=stat.filemode(status.st_mode))
        if size < (page.VALUES * WORD) or size % WORD:
            raise BadPage(f"{path} is too short for a probe page", found=f"{size} bytes")
        return mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)


def _ranks(mask: int) -> tuple[int, ...]:
    return tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
