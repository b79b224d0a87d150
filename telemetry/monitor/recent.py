"""How it went over the last seconds: rates, shares and quantiles, out of the moments kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from telemetry.monitor.facts import GroupFacts, Moment, QueueFacts, RankFacts, ReaderFacts

WINDOW_S: Final = 10.0
"""How far back shares, rates and quantiles look."""

SPARKS: Final = 60
"""Looks that a sparkline can show."""


@dataclass(frozen=True, slots=True)
class QueueRates:
    """A queue over the window, all None before there are two looks.

    Attributes:
        blocked: share of the time that the writer waited for a slot; `full`: for every reader at once.
        fallbacks: messages in the window that left the fast path.
    """

    messages_per_s: float | None = None
    bytes_per_s: float | None = None
    blocked: float | None = None
    full: float | None = None
    fallbacks: int | None = None


@dataclass(frozen=True, slots=True)
class ReaderRates:
    """A reader over the window: shares of the time, and how long it held frames.

    Where it took none in the window, the quantiles are those since it attached.
    """

    blocked: float | None = None
    excess: float | None = None
    starved: float | None = None
    hold_p50_s: float | None = None
    hold_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class RankRates:
    """A rank of a communicator over the window; rates are None before there are two looks.

    Attributes:
        path: what served most of its operations; "" before the first one.
        declined, declines: why a faster path most often did not serve, and how often that was; "" for never.
        lately: whether there was any operation in the window. If not, path and declines are those since the start.
    """

    operations_per_s: float | None
    bytes_per_s: float | None
    path: str
    declined: str
    declines: int
    lately: bool


_Key = tuple[str, str]
T = TypeVar("T")


class Recent:
    """The moments of the window, and what follows from them; fed one moment after the other."""

    def __init__(self) -> None:
        self._moments: dict[_Key, deque[tuple[float, QueueFacts]]] = {}
        self._rates: dict[_Key, deque[float]] = {}
        self._lags: dict[tuple[str, str, int], deque[int]] = {}
        self._worked_out: dict[_Key, dict[str, Any]] = {}
        self._groups: dict[_Key, deque[tuple[float, GroupFacts]]] = {}

    def add(self, moment: Moment) -> None:
        """Take one more moment; queues that are not in it are forgotten."""
        if moment.stale_s:
            return
        there = {(queue.label, queue.instance) for queue in moment.queues}
        self._moments = {key: kept for key, kept in self._moments.items() if key in there}
        self._rates = {key: kept for key, kept in self._rates.items() if key in there}
        self._lags = {key: kept for key, kept in self._lags.items() if key[:2] in there}
        self._worked_out = {key: known for key, known in self._worked_out.items() if key in there}
        for queue in moment.queues:
            self._add(moment.time_s, queue)
        groups = {(group.label, group.instance): group for group in moment.groups}
        self._groups = {key: kept for key, kept in self._groups.items() if key in groups}
        for key, group in groups.items():
            _keep(self._groups.setdefault(key, deque()), moment.time_s, group)

    def queue(self, queue: QueueFacts) -> QueueRates:
        """A queue of the newest moment."""
        return self.once("rates", queue, self._compare)

    def once(self, what: str, queue: QueueFacts, work: Callable[[QueueFacts], T]) -> T:
        """What `work` makes of a queue of the newest moment, worked out once until the queue is looked at again."""
        known = self._worked_out.setdefault((queue.label, queue.instance), {})
        if what not in known:
            known[what] = work(queue)
        found: T = known[what]
        return found

    def _compare(self, queue: QueueFacts) -> QueueRates:
        span_s, before = self._window(queue)
        if before is None:
            return QueueRates()
        return QueueRates(
            messages_per_s=max(0, queue.published - before.published) / span_s,
            bytes_per_s=max(0, queue.published_bytes - before.published_bytes) / span_s,
            blocked=_share(queue.waited_s - before.waited_s, span_s),
            full=_share(queue.full_s - before.full_s, span_s),
            fallbacks=max(0, sum(queue.fallbacks.values()) - sum(before.fallbacks.values())),
        )

    def reader(self, queue: QueueFacts, reader: ReaderFacts) -> ReaderRates:
        """A reader of the newest moment."""
        span_s, before_queue = self._window(queue)
        before = before_queue.reader(reader.rank) if before_queue else None
        hold = reader.hold if before is None else reader.hold.since(before.hold)
        hold = hold if any(hold.counts) else reader.hold
        p50_s, p99_s = hold.quantile(0.5), hold.quantile(0.99)
        if before is None:
            return ReaderRates(hold_p50_s=p50_s, hold_p99_s=p99_s)
        return ReaderRates(
            blocked=_share(reader.blocked_s - before.blocked_s, span_s),
            excess=_share(reader.excess_s - before.excess_s, span_s),
            starved=_starved(reader, before, span_s),
            hold_p50_s=p50_s,
            hold_p99_s=p99_s,
        )

    def rank(self, group: GroupFacts, rank: RankFacts) -> RankRates:
        """A rank of a communicator of the newest moment."""
        kept: Sequence[tuple[float, GroupFacts]] = self._groups.get((group.label, group.instance), ())
        before = kept[0][1].rank(rank.rank) if len(kept) > 1 else None
        operations, nbytes, declines = (
            _since(getattr(rank, what), getattr(before, what, {})) for what in ("operations", "nbytes", "declines")
        )
        lately = before is not None and bool(operations)
        declined = _most(declines if lately else rank.declines)
        span_s = max(1e-6, kept[-1][0] - kept[0][0]) if kept else 0.0
        return RankRates(
            operations_per_s=None if before is None else sum(operations.values()) / span_s,
            bytes_per_s=None if before is None else sum(nbytes.values()) / span_s,
            path=_most(operations if lately else rank.operations),
            declined=declined,
            declines=(declines if lately else rank.declines).get(declined, 0),
            lately=lately,
        )

    def rates(self, queue: QueueFacts) -> Sequence[float]:
        """Messages a second, from look to look."""
        return self._rates.get((queue.label, queue.instance), ())

    def lags(self, queue: QueueFacts, rank: int) -> Sequence[int]:
        """A reader's lag, look by look."""
        return self._lags.get((queue.label, queue.instance, rank), ())

    def _add(self, time_s: float, queue: QueueFacts) -> None:
        key = (queue.label, queue.instance)
        kept = self._moments.setdefault(key, deque())
        if kept and kept[-1][1] is queue:  # not looked at this time
            return
        self._worked_out.pop(key, None)
        if kept and time_s > kept[-1][0]:
            rate = max(0, queue.published - kept[-1][1].published) / (time_s - kept[-1][0])
            self._rates.setdefault(key, deque(maxlen=SPARKS)).append(rate)
        _keep(kept, time_s, queue)
        for reader in queue.readers:
            self._lags.setdefault((*key, reader.rank), deque(maxlen=SPARKS)).append(reader.lag)

    def _window(self, queue: QueueFacts) -> tuple[float, QueueFacts | None]:
        kept = self._moments.get((queue.label, queue.instance))
        if kept is None or len(kept) < 2:
            return 0.0, None
        return max(1e-6, kept[-1][0] - kept[0][0]), kept[0][1]


def _keep(kept: deque[tuple[float, T]], time_s: float, facts: T) -> None:
    kept.append((time_s, facts))
    while len(kept) > 2 and time_s - kept[1][0] >= WINDOW_S:
        kept.popleft()


def _since(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What came since an earlier moment, of that which came at all."""
    return {what: more for what, count in now.items() if (more := count - before.get(what, 0)) > 0}


def _most(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda what: counts[what], default="")


def _starved(reader: ReaderFacts, before: ReaderFacts, span_s: float) -> float | None:
    if reader.starved_s is None or before.starved_s is None:
        return None
    return _share(reader.starved_s - before.starved_s, span_s)


def _share(part_s: float, whole_s: float) -> float:
    return min(1.0, max(0.0, part_s / whole_s))
