"""Moments from the probe pages of this host: read-only, without the queue's processes noticing."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Final

from arena.probe import BUCKETS, ArenaError, EndpointState, PageSeries, observed_directory
from telemetry.blame import InProgress, in_progress, relation
from telemetry.health import History, Verdict
from telemetry.monitor.facts import (
    NO_HISTOGRAM,
    ArenaFacts,
    GroupFacts,
    Histogram,
    Moment,
    QueueFacts,
    RankFacts,
    ReaderFacts,
    WaitFacts,
    WriterFacts,
    plain,
)
from telemetry.reader import Communicator, Endpoint, Page, Queue, Watcher

_BOUNDS_S: Final = (*((1 << bit) / 1e9 for bit in range(BUCKETS - 1)), inf)
_FEW: Final = 4  # so many queues are looked at every time
_STATES: Final = {int(state): state.name.lower() for state in EndpointState}


class Pages:
    """Looks at a run directory. Never raises for what it finds."""

    def __init__(self, run_dir: str | os.PathLike[str] | None = None) -> None:
        self._run_dir = os.fspath(run_dir) if run_dir is not None else None
        self._watcher = Watcher(run_dir)
        self._history = History()
        self._words: dict[int, _Words] = {}
        self._pages: dict[int, Page] = {}
        self._seen: dict[str, tuple[Queue, QueueFacts]] = {}
        self._turn = 0
        self.name = self._directory()

    def look(self, readers_of: Collection[str] | None = None) -> Moment:
        """Look at every page, now; given `readers_of`, at what is `_at_rest` every other time."""
        self._turn += 1
        look = self._watcher.look(readers_of, () if readers_of is None else self._at_rest(readers_of))
        verdicts = self._history.judge(look)
        ends = [one.endpoints for one in look.queues] + [one.ranks for one in look.communicators]
        pages = {id(end.page): end.page for some in ends for end in some}
        self._words = {key: words for key, words in self._words.items() if key in pages}
        self._pages = pages  # keeps them alive, so that no other one gets the same id
        self._seen = {queue.label: self._facts(queue, verdicts) for queue in look.queues}
        queues = tuple(facts for _, facts in self._seen.values())
        troubles = tuple(trouble.message for trouble in look.troubles)
        groups = tuple([self._group(one) for one in look.communicators])
        return Moment(look.time_ns / 1e9, time.time(), self.name, queues, troubles, groups=groups)

    def close(self) -> None:
        """Unmap every page."""
        self._watcher.close()

    def _directory(self) -> str:
        try:
            return str(observed_directory(self._run_dir))
        except ArenaError:  # the look says what is wrong with it
            return self._run_dir or os.environ.get("ARENA_RUN_DIR", "the run directory")

    def _at_rest(self, readers_of: Collection[str]) -> list[str]:
        """Of many queues half of those that are well and not looked into: they were looked at a moment ago."""
        if len(self._seen) <= _FEW:
            return []
        well = [label for label, (_, facts) in self._seen.items() if label not in readers_of and _is_well(facts)]
        return well[self._turn % 2 :: 2]

    def _facts(self, queue: Queue, verdicts: Mapping[tuple[str, int], Verdict]) -> tuple[Queue, QueueFacts]:
        """What a look saw of a queue with what it comes to; that of the last time if it was not looked at."""
        seen = self._seen.get(queue.label)
        return seen if seen is not None and seen[0] is queue else (queue, self._queue(queue, verdicts))

    def _queue(self, queue: Queue, verdicts: Mapping[tuple[str, int], Verdict]) -> QueueFacts:
        now = in_progress(queue)
        words, values = self._of(queue.writer) if queue.writer else (_NO_WORDS, ())
        charged = words.by_label("writer_blocked_seconds_total", values, 1e-9)
        excess = words.by_label("writer_blocked_excess_seconds_total", values, 1e-9)
        if now.charged is not None:  # what the writer itself counts only when the wait is over
            _add(charged, now.charged, now.lasted_ns)
            _add(excess, now.charged, now.excess_ns)
        waited_s = sum(charged.values()) + (now.lasted_ns / 1e9 if now.charged is None else 0.0)
        return QueueFacts(
            label=plain(queue.label),
            instance=plain(queue.instance),
            n_reader=queue.n_reader,
            slots=queue.slots,
            writer=_writer(queue.writer) if queue.writer else None,
            readers=tuple([self._reader(queue, one, verdicts, now, charged, excess) for one in queue.readers]),
            wait=WaitFacts(now.lasted_ns / 1e9, now.pending),
            published=words.total("messages_published_total", values),
            published_bytes=words.total("published_bytes_total", values),
            waited_s=waited_s,
            full_s=(words.total("writer_blocked_full_seconds_total", values) + now.full_ns) * 1e-9,
            fallbacks=words.counts("fallback_total", values),
            errors=words.counts("errors_total", values),
            arena=_arena(words, values),
            blocks=queue.blocks,
            segments=queue.segments,
        )

    def _reader(
        self,
        queue: Queue,
        end: Endpoint,
        verdicts: Mapping[tuple[str, int], Verdict],
        now: InProgress,
        charged: Mapping[str, float],
        excess: Mapping[str, float],
    ) -> ReaderFacts:
        (words, values), rank, lag = self._of(end), str(end.rank), queue.lag(end)
        return ReaderFacts(
            rank=end.rank,
            pid=None if end.page.where else end.page.owner.pid,
            alive=end.alive,
            process=end.process,
            verdict=verdicts[queue.label, end.rank],
            state=_STATES.get(end.state, ""),
            relation=relation(queue, end) if now.pending or end.wait.since_ns else "",
            lag=lag,
            lag_s=queue.lag_s(end) if lag else 0.0,
            silent_s=end.heartbeat_age_s,
            hold=words.histogram("reader_hold_seconds", values),
            blocked_s=charged.get(rank, 0.0),
            excess_s=excess.get(rank, 0.0),
            starved_s=words.total("reader_starved_seconds_total", values) * 1e-9 if values else None,
            held_bytes=queue.held_bytes(end.rank) if queue.blocks else 0,
            pinned=words.total("segment_pinned", values),
            pin_failures=words.total("pin_failures_total", values),
            gate_blocks=words.total("blocks_in_gate", values),
            gate_s=end.gate_age_s if words.total("blocks_in_gate", values) else 0.0,
            where=plain(end.page.where),
        )

    def _group(self, group: Communicator) -> GroupFacts:
        device = plain(str(group.about.get("device", "")))
        ranks = tuple([self._rank(one) for one in group.ranks])
        label, instance, paths = plain(group.label), plain(group.instance), tuple(map(plain, group.paths))
        return GroupFacts(label, instance, group.world, device, plain(group.plan), paths, ranks)

    def _rank(self, end: Endpoint) -> RankFacts:
        words, values = self._of(end)
        return RankFacts(
            rank=end.rank,
            pid=end.page.owner.pid,
            alive=end.alive,
            process=end.process,
            operations=words.counts("allreduce_total", values),
            nbytes=words.counts("allreduce_bytes_total", values),
            declines=words.counts("allreduce_fallback_total", values),
        )

    def _of(self, end: Endpoint) -> tuple[_Words, Sequence[int]]:
        page = end.page
        if not end.values:
            return _NO_WORDS, ()
        words = self._words.get(id(page))
        if words is None:
            words = self._words[id(page)] = _Words(page.series)
        return words, end.values


class _Words:
    """Where the series of one page lie, by name: found out once, as long as the page stays."""

    def __init__(self, series: Sequence[PageSeries]) -> None:
        self._words: dict[str, list[int]] = {}
        self._labels: dict[str, list[str]] = {}
        for one in series:
            self._words.setdefault(one.name, []).append(one.word)
            self._labels.setdefault(one.name, []).append(next(iter(one.labels.values()), ""))

    def total(self, name: str, values: Sequence[int]) -> int:
        """The sum over all labels; 0 for what the page does not have."""
        words = self._words.get(name, ())
        return values[words[0]] if len(words) == 1 else sum([values[word] for word in words])

    def by_label(self, name: str, values: Sequence[int], scale: float) -> dict[str, float]:
        """The value for each value of its one label."""
        words = self._words.get(name, ())
        return {label: values[word] * scale for label, word in zip(self._labels.get(name, ()), words, strict=True)}

    def counts(self, name: str, values: Sequence[int]) -> dict[str, int]:
        """The same for things that are counted, without those that are 0."""
        words = self._words.get(name, ())
        return {label: values[at] for label, at in zip(self._labels.get(name, ()), words, strict=True) if values[at]}

    def histogram(self, name: str, values: Sequence[int]) -> Histogram:
        """The one histogram of that name."""
        for word in self._words.get(name, ()):
            return Histogram(_BOUNDS_S, tuple(values[word : word + BUCKETS]))
        return NO_HISTOGRAM


_NO_WORDS: Final = _Words(())


def _is_well(queue: QueueFacts) -> bool:
    return not queue.wait.pending and not any(reader.verdict for reader in queue.readers)


def _writer(end: Endpoint) -> WriterFacts:
    state = _STATES.get(end.state, "")
    return WriterFacts(end.page.owner.pid, end.alive, end.process, state, end.heartbeat_age_s, end.sequence)


def _arena(words: _Words, values: Sequence[int]) -> ArenaFacts:
    return ArenaFacts(
        segments=words.total("segments", values),
        size=words.total("segment_size_bytes", values),
        used=words.total("block_used_bytes", values),
        used_max=words.total("block_used_max_bytes", values),
        budget=words.total("block_budget_bytes", values),
        largest_free=words.total("block_largest_free_bytes", values),
    )


def _add(seconds: dict[str, float], rank: int, more_ns: int) -> None:
    seconds[str(rank)] = seconds.get(str(rank), 0.0) + more_ns / 1e9
