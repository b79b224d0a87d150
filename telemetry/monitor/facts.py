"""What a monitor knows of one moment, wherever it comes from: plain values in base units.

Counts are those since the start; what they were over the last seconds is `recent.py`'s business. A value that a source
can't know is None, or "" where it is a word.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Final, Protocol

from arena.probe import ENDED, ArenaError, BlockRecord
from telemetry.health import Verdict


class Unreachable(ArenaError):
    """A source that can't be asked."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often a duration fell into each bucket; `bounds_s` are the upper ends, the last one infinite."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]

    def since(self, earlier: Histogram) -> Histogram:
        """What came after an earlier moment; all of it if that was another reader's."""
        if earlier.bounds_s != self.bounds_s:
            return self
        counts = tuple([now - before for now, before in zip(self.counts, earlier.counts, strict=True)])
        return self if min(counts) < 0 else Histogram(self.bounds_s, counts)

    def quantile(self, share: float) -> float | None:
        """The duration that this share of them did not exceed, spread evenly inside its bucket; None without any."""
        total = sum(self.counts)
        if not total:
            return None
        wanted = share * total
        lower = 0.0
        for bound, count, below in zip(self.bounds_s, self.counts, accumulate(self.counts), strict=True):
            if below >= wanted and count:
                inside = (wanted - (below - count)) / count
                return lower if bound == inf else lower + (bound - lower) * inside
            lower = bound
        return lower


NO_HISTOGRAM: Final = Histogram((inf,), (0,))


@dataclass(frozen=True, slots=True)
class WriterFacts:
    """The engine's end.

    Attributes:
        process: the letter that /proc gives, "" where that can't be told.
        silent_s: since its last sign of life.
        sequence: frames published so far.
    """

    pid: int | None
    alive: bool | None
    process: str
    state: str
    silent_s: float
    sequence: int


@dataclass(frozen=True, slots=True)
class ReaderFacts:
    """One worker's end.

    Attributes:
        verdict: what the last looks say of it.
        state: working, waiting, in the gate; "" where that can't be told.
        relation: awaiting_readers, awaiting_write, already_read, or "".
        lag: frames published that it has not taken; `lag_s`: since when the oldest of them is there.
        hold: from taking a frame to releasing its slot.
        blocked_s, excess_s, starved_s: as in the metrics, with the wait in progress; None where it was not asked for.
        pinned: segments registered with its device.
        where: host:pid of one on another host, whose pid means nothing here and is None; "" of all others.
    """

    rank: int
    pid: int | None
    alive: bool | None
    process: str
    verdict: Verdict
    state: str
    relation: str
    lag: int
    lag_s: float
    silent_s: float
    hold: Histogram
    blocked_s: float
    excess_s: float
    starved_s: float | None
    held_bytes: int
    pinned: int
    pin_failures: int
    gate_blocks: int
    gate_s: float
    where: str = ""


@dataclass(frozen=True, slots=True)
class ArenaFacts:
    """The tensor arena, in bytes."""

    segments: int = 0
    size: int = 0
    used: int = 0
    used_max: int = 0
    budget: int = 0
    largest_free: int = 0


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """The writer's wait for a slot that is not over: how long, and which ranks hold the slot."""

    lasted_s: float = 0.0
    pending: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """One queue.

    Attributes:
        waited_s: what the writer has waited for slots in all, with the wait in progress; `full_s`: for every reader.
        fallbacks: messages that left the fast path, by reason, and `errors` by kind; only those that are not 0.
        blocks: the arena's live blocks; None where the source does not tell.
        segments: the arena's segments by number, with their bytes; empty where the source does not tell.
    """

    label: str
    instance: str
    n_reader: int
    slots: int
    writer: WriterFacts | None
    readers: tuple[ReaderFacts, ...]
    wait: WaitFacts
    published: int
    published_bytes: int
    waited_s: float
    full_s: float
    fallbacks: dict[str, int]
    errors: dict[str, int]
    arena: ArenaFacts
    blocks: tuple[BlockRecord, ...] | None
    segments: tuple[tuple[int, int], ...] = ()

    @property
    def used(self) -> int:
        """Slots that a living reader has not released."""
        if self.wait.pending:
            return self.slots
        return max((reader.lag for reader in self.readers if reader.alive is not False), default=0)

    @property
    def dead(self) -> bool:
        """Whether every end of it is known to be dead."""
        if self.writer is not None and self.writer.alive is not False:
            return False
        return all(reader.alive is False for reader in self.readers)

    @property
    def silent_s(self) -> float:
        """Since anybody's last sign of life."""
        silences = [reader.silent_s for reader in self.readers] + ([self.writer.silent_s] if self.writer else [])
        return min(silences, default=0.0)

    def reader(self, rank: int) -> ReaderFacts | None:
        """The reader of that rank, if it is there."""
        return next((one for one in self.readers if one.rank == rank), None)


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank of a communicator.

    Attributes:
        operations, nbytes: served so far, by path; only those paths that served any.
        declines: operations that a faster path declined, by reason; only those reasons that there were.
    """

    rank: int
    pid: int | None
    alive: bool | None
    process: str
    operations: dict[str, int]
    nbytes: dict[str, int]
    declines: dict[str, int]

    @property
    def total(self) -> int:
        """Operations by whichever path."""
        return sum(self.operations.values())

    @property
    def state(self) -> str:
        """A word for what is known of its process; "" where that is nothing."""
        if self.alive is None:
            return ""
        return "STOPPED" if is_stopped(self.process) else "alive" if self.alive else "ENDED"


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One communicator of an all-reduce.

    Attributes:
        world: for how many ranks it was made; a rank that has left is not among `ranks`.
        paths: those that could be set up.
        plan: where the plan comes from.
    """

    label: str
    instance: str
    world: int
    device: str
    plan: str
    paths: tuple[str, ...]
    ranks: tuple[RankFacts, ...]

    def rank(self, number: int) -> RankFacts | None:
        """The rank of that number, if it is there."""
        return next((one for one in self.ranks if one.rank == number), None)


@dataclass(frozen=True)
class Moment:
    """Everything there was to see at one time.

    Attributes:
        time_s, wall_s: when, by the monotonic and by the wall clock.
        source: a run directory, or a URL.
        troubles: a sentence for each thing that could not be read.
        stale_s: for how long the source has not answered; the rest is what it said last.
        groups: communicators; none where one queue alone was asked for.
    """

    time_s: float
    wall_s: float
    source: str
    queues: tuple[QueueFacts, ...]
    troubles: tuple[str, ...] = field(default=())
    stale_s: float = 0.0
    groups: tuple[GroupFacts, ...] = ()

    def queue(self, label: str) -> QueueFacts | None:
        """The queue of that name, if it is there."""
        return next((one for one in self.queues if one.label == label), None)

    def only(self, label: str | None) -> Moment:
        """The moment with one queue alone, or as it is."""
        if label is None:
            return self
        queues = tuple(queue for queue in self.queues if queue.label == label)
        return Moment(self.time_s, self.wall_s, self.source, queues, self.troubles, self.stale_s)


class Source(Protocol):
    """Where moments come from."""

    name: str

    def look(self, readers_of: Collection[str] | None = None) -> Moment:
        """Take one. Of the readers of other queues than these, it may know the verdict and the lag alone."""

    def close(self) -> None:
        """Give back what looking needs."""


def is_stopped(process: str) -> bool:
    """Whether a signal or a debugger holds the process."""
    return process in ("T", "t")


def is_ended(process: str) -> bool:
    """Whether the process is gone."""
    return process in ENDED


def plain(label: str) -> str:
    """A name from elsewhere as it may stand on a terminal: no control characters, one column a character."""
    if label.isascii() and label.isprintable():
        return label
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in label)


def names(queues: Sequence[QueueFacts]) -> list[str]:
    """The labels of queues."""
    return [queue.label for queue in queues]
