"""The pages as Prometheus metrics: a collector that reads all of a run directory when it is asked.

What can be prepared is prepared once for each set of pages: which words add up to which series, and the labels of
every sample. A scrape reads the words and fills in numbers, which keeps it about as cheap as writing the text is.
"""

from __future__ import annotations

import platform
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from arena.probe import BUCKETS, HISTOGRAM_WORDS, Kind, PageSeries
from telemetry.blame import InProgress, in_progress
from telemetry.exemplars import Observed, observed
from telemetry.health import History, Verdict
from telemetry.ledger import Account, Key, Ledger
from telemetry.names import EXPORTED, HISTOGRAM_READERS, INFO, PAGE_ERRORS, PATH_LABEL, Exported, Per
from telemetry.reader import MAX_READERS, Communicator, Endpoint, Look, Page, Queue, Trouble, Watcher

Samples = dict[str, list[Sample]]
"""What a scrape has so far, by the metric's name without prefix."""

LONGEST_FACT: Final = 120
"""Characters of what a communicator says of itself: its plan may tell at length why another one is not used."""

_LIVENESS: Final = {True: "alive", False: "dead", None: "unknown"}


class ArenaCollector(Collector):
    """Register it with a registry. One scrape runs at a time, and nothing that it finds makes it fail.

    Args:
        watcher: what it looks with.
        on_trouble: gets a sentence for each thing that can't be read, once until it has been mended.
    """

    def __init__(self, watcher: Watcher, on_trouble: Callable[[str], None] = lambda message: None) -> None:
        self._watcher = watcher
        self._on_trouble = on_trouble
        self._lock = threading.Lock()
        self._history = History()
        self._books: dict[tuple[Path, str], _QueueBook] = {}
        self._group_books: dict[tuple[Path, str], _CommunicatorBook] = {}
        self._errors = dict.fromkeys(PAGE_ERRORS, 0)
        self._told: set[tuple[str, Path]] = set()
        self._build = {"version": _version(), "python": platform.python_version()}

    def describe(self) -> Iterable[Metric]:
        """Every family, empty: lets a registry refuse a second collector without a scrape."""
        return [_family(exported, []) for exported in EXPORTED.values()]

    def collect(self) -> Iterable[Metric]:
        """Look at everything, and return what there is to say."""
        with self._lock:
            return [_family(EXPORTED[name], samples) for name, samples in self._scrape().items() if samples]

    def close(self) -> None:
        """Let go of the pages, when the scrape under way is over."""
        with self._lock:
            self._watcher.close()

    def _scrape(self) -> Samples:
        began = time.perf_counter()
        look = self._watcher.look()
        verdicts = self._history.judge(look)
        samples: Samples = {name: [] for name in EXPORTED}
        books = {}
        for queue in look.queues:
            which = (queue.directory, queue.label)
            book = books[which] = self._books.get(which) or _QueueBook(queue.label)
            book.enter(queue, {reader.rank: verdicts[queue.label, reader.rank] for reader in queue.readers}, samples)
        self._books = books
        group_books = {}
        for group in look.communicators:
            which = (group.directory, group.label)
            sheet = group_books[which] = self._group_books.get(which) or _CommunicatorBook(group.label)
            sheet.enter(group, samples)
        self._group_books = group_books
        self._tell(look.troubles)
        for name, labels, value in self._own(look, time.perf_counter() - began):
            samples[name].append(Sample(EXPORTED[name].full_name, labels, value))
        return samples

    def _own(self, look: Look, took_s: float) -> Iterator[tuple[str, dict[str, str], float]]:
        yield "build_info", self._build, 1
        yield "exporter_pages", {}, look.pages
        yield "exporter_scrape_duration_seconds", {}, took_s
        for reason, count in self._errors.items():
            yield "exporter_page_errors_total", {"reason": reason}, count

    def _tell(self, troubles: Sequence[Trouble]) -> None:
        for trouble in troubles:
            self._errors[trouble.reason] += 1
            if (trouble.reason, trouble.path) not in self._told:
                self._on_trouble(trouble.message)
        self._told = {(trouble.reason, trouble.path) for trouble in troubles}


class _Book:
    """How pages that belong together turn into samples: one row for each series of them, with labels made once."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._rows: list[_Row] = []
        self._labels: dict[tuple[str, ...], dict[str, str]] = {}

    def _row(self, exported: Exported, scale: float, further: tuple[str, ...]) -> _Row:
        labels = self._labels_of(exported, further)
        name = exported.full_name
        if exported.kind != Kind.HISTOGRAM:
            return _Row(exported, (name,), (labels,), scale, [])
        bounds = [str(_bound(exported, edge)) for edge in exported.edges] + ["+Inf"]
        buckets = [{**labels, "le": bound} for bound in bounds]
        names = [f"{name}_bucket"] * len(bounds) + [f"{name}_count", f"{name}_sum"]
        return _Row(exported, tuple(names), (*buckets, labels, labels), scale, [])

    def _labels_of(self, exported: Exported, further: tuple[str, ...]) -> dict[str, str]:
        """The labels of a sample: made once, and shared by all that have the same."""
        key = (exported.name, *further)
        if key not in self._labels:
            names = exported.label_names
            if len(further) < len(names) - 1:  # a histogram without its reader
                names = tuple(name for name in names if name != "reader")
            self._labels[key] = dict(zip(names, map(_printable, (self._label, *further)), strict=True))
        return self._labels[key]


class _QueueBook(_Book):
    """The pages of one queue."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._ledger = Ledger()
        self._rows_of: list[tuple[bool, Key, bool, Page]] = []

    def enter(self, queue: Queue, verdicts: Mapping[int, Verdict], samples: Samples) -> None:
        """Add the queue's samples."""
        now = in_progress(queue)
        accounts = self._ledger.accounts(queue, now)
        self._prepare(queue, accounts)
        values = {key: account.values for key, account in accounts.items()}
        traced = {(end.page.role, end.rank): observed(end) for end in queue.endpoints if end.events}
        for row in self._rows:
            row.fill_in(values, samples[row.exported.name])
            if traced and row.exported.kind == Kind.HISTOGRAM:
                row.add_exemplars(traced, samples[row.exported.name])
        for name, further, value in _derived(queue, verdicts, now, self._ledger):
            exported = EXPORTED[name]
            samples[name].append(Sample(exported.full_name, self._labels_of(exported, further), value))

    def _prepare(self, queue: Queue, accounts: Mapping[Key, Account]) -> None:
        """Find out anew what adds up to what, if the pages are not the same as last time."""
        by_reader = queue.n_reader <= HISTOGRAM_READERS
        of = [(by_reader, key, account.gone, account.page) for key, account in accounts.items()]
        if of == self._rows_of:
            return
        self._labels.clear()
        rows: dict[tuple[str, ...], _Row] = {}
        for key, account in accounts.items():
            for one in account.page.series:
                exported = EXPORTED.get(one.name)
                further = _further_labels(exported, one, key[1], by_reader=by_reader)
                if exported is None or further is None or (account.gone and len(further) > len(exported.labels)):
                    continue  # of a newer version, beyond the limits, or a reader that is not there
                which = (one.name, *further)
                if which not in rows:
                    rows[which] = self._row(exported, one.scale, further)
                rows[which].sources.append((key, one.word))
        self._rows, self._rows_of = list(rows.values()), of


class _CommunicatorBook(_Book):
    """The pages of one communicator.

    Each rank has series of its own, out of a page that no other follows: nothing is added up that could fall when a
    rank leaves, so there is no ledger.
    """

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._rows_of: list[Page] = []

    def enter(self, group: Communicator, samples: Samples) -> None:
        """Add the communicator's samples."""
        self._prepare(group)
        values = {(rank.page.role, rank.rank): rank.values for rank in group.ranks}
        for row in self._rows:
            row.fill_in(values, samples[row.exported.name])
        for name, further, value in _of_group(group):
            exported = EXPORTED[name]
            samples[name].append(Sample(exported.full_name, self._labels_of(exported, further), value))

    def _prepare(self, group: Communicator) -> None:
        of = [rank.page for rank in group.ranks]
        if of == self._rows_of:
            return
        self._labels.clear()
        rows: dict[tuple[str, ...], _Row] = {}
        for page in of:
            for one in page.series:
                exported = EXPORTED.get(one.name)
                further = _labels_of_rank(exported, one, page.rank, group.paths)
                if exported is not None and further is not None:
                    row = rows.setdefault((one.name, *further), self._row(exported, one.scale, further))
                    row.sources.append(((page.role, page.rank), one.word))
        self._rows, self._rows_of = list(rows.values()), of


class _Row(NamedTuple):
    """One series of the pages: the words that add up to it, and the names and labels of the samples it makes."""

    exported: Exported
    names: tuple[str, ...]
    labels: tuple[dict[str, str], ...]
    scale: float
    sources: list[tuple[Key, int]]

    def fill_in(self, values: Mapping[Key, Sequence[int]], into: list[Sample]) -> None:
        if self.exported.kind == Kind.HISTOGRAM:
            into += map(Sample, self.names, self.labels, self._histogram(values))
        else:
            total = sum([values[key][word] for key, word in self.sources])
            into.append(Sample(self.names[0], self.labels[0], total * self.scale))

    def add_exemplars(self, traced: Mapping[Key, Mapping[str, list[Observed]]], into: list[Sample]) -> None:
        """Give each bucket the newest value in it whose trace is known."""
        bounds = [1 << edge for edge in self.exported.edges]
        first = len(into) - len(self.names)
        for key, _ in self.sources:
            for one in traced.get(key, {}).get(self.exported.name, ()):
                at = first + bisect_right(bounds, one.value_ns)
                exemplar = Exemplar(dict(one.labels), one.value_ns * self.scale, one.wall_s)
                into[at] = into[at]._replace(exemplar=exemplar)

    def _histogram(self, values: Mapping[Key, Sequence[int]]) -> list[float]:
        parts = [values[key][word : word + HISTOGRAM_WORDS] for key, word in self.sources]
        words = parts[0] if len(parts) == 1 else [sum(column) for column in zip(*parts, strict=True)]
        below = list(accumulate(words[:BUCKETS]))  # index k: how many values are below 2^k
        count = below[-1]
        return [*(below[edge] for edge in self.exported.edges), count, count, words[BUCKETS] * self.scale]


def _further_labels(
    exported: Exported | None, one: PageSeries, rank: int, *, by_reader: bool
) -> tuple[str, ...] | None:
    """The values of all labels but `queue`; None for what is beyond what was declared."""
    if exported is None or exported.per is Per.COMMUNICATOR:
        return None
    closed = _closed_labels(exported, one)
    if closed is None:
        return None
    if exported.per is Per.QUEUE or (exported.kind == Kind.HISTOGRAM and not by_reader):
        return closed
    reader = str(one.labels.get("reader", rank))
    return (reader, *closed) if reader.isdecimal() and int(reader) < MAX_READERS else None


def _labels_of_rank(
    exported: Exported | None, one: PageSeries, rank: int, paths: Sequence[str]
) -> tuple[str, ...] | None:
    """The values of all labels but `group`; None for a path that was not set up, and for what was not declared."""
    if exported is None or exported.per is not Per.COMMUNICATOR:
        return None
    closed = _closed_labels(exported, one)
    if closed is None or one.labels.get(PATH_LABEL, "") not in ("", *paths):
        return None
    return (str(rank), *closed)


def _closed_labels(exported: Exported, one: PageSeries) -> tuple[str, ...] | None:
    """The values of the labels that were declared with closed sets; None if one is not in its set."""
    if not exported.page or exported.kind != one.kind.value:
        return None
    closed = tuple(one.labels.get(label, "") for label, _ in exported.labels)
    known = all(value in values for value, (_, values) in zip(closed, exported.labels, strict=True))
    return closed if known else None


def _printable(text: str) -> str:
    """The text, if UTF-8 can say it: file names, and what a page says of itself, may be anything."""
    return text.encode(errors="backslashreplace").decode()


def _bound(exported: Exported, edge: int) -> float:
    """The upper bound that stands on a bucket. Slots are whole: below 2^k is at most 2^k - 1."""
    return (1 << edge) / 1e9 if exported.unit == "seconds" else float((1 << edge) - 1)


# ── what the exporter makes itself ───────────────────────────────────────────────────────────────
Derived = Iterator[tuple[str, tuple[str, ...], float]]
"""Name, the values of all labels but `queue` or `group`, value."""


def _derived(queue: Queue, verdicts: Mapping[int, Verdict], now: InProgress, ledger: Ledger) -> Derived:
    if queue.writer is not None:
        yield from _of_writer(queue, queue.writer, now)
    for reader in queue.readers:
        yield from _of_reader(queue, reader, verdicts[reader.rank])
        name, rank = "messages_consumed_total", str(reader.rank)
        # A position: a new incarnation is at 0 until it has its place.
        yield name, (rank,), ledger.never_falling(name, rank, reader.sequence)


def _of_writer(queue: Queue, writer: Endpoint, now: InProgress) -> Derived:
    about = writer.page.about
    facts = [str(about.get(fact, "")) for fact in ("n_reader", "slots", "slot_bytes", "views")]
    yield "queue_info", (queue.instance, *facts), 1
    if writer.alive is not None:
        yield "writer_up", (), writer.alive
    yield "writer_start_time_seconds", (), writer.page.started_ns / 1e9
    yield "writer_heartbeat_age_seconds", (), writer.heartbeat_age_s
    yield "ring_slots", (), queue.slots
    used = max((queue.lag(reader) for reader in queue.readers if reader.alive is not False), default=0)
    yield "ring_slots_used", (), queue.slots if now.pending else used
    yield "writer_stall_in_progress_seconds", (), now.lasted_ns / 1e9
    for rank in range(min(queue.n_reader, MAX_READERS)):
        yield "writer_stall_pending", (str(rank),), rank in now.pending


def _of_reader(queue: Queue, reader: Endpoint, verdict: Verdict) -> Derived:
    rank = str(reader.rank)
    yield "reader_info", (rank, reader.page.where or str(reader.page.owner.pid), _LIVENESS[reader.alive]), 1
    if reader.alive is not None:
        yield "reader_up", (rank,), reader.alive
    yield "reader_start_time_seconds", (rank,), reader.page.started_ns / 1e9
    yield "reader_heartbeat_age_seconds", (rank,), reader.heartbeat_age_s
    yield "reader_lag_messages", (rank,), queue.lag(reader)
    yield "reader_lag_seconds", (rank,), queue.lag_s(reader)
    yield "reader_verdict", (rank,), verdict
    yield "reader_held_bytes", (rank,), queue.held_bytes(reader.rank)
    yield "dma_gate_oldest_age_seconds", (rank,), reader.gate_age_s


def _of_group(group: Communicator) -> Derived:
    for rank in group.ranks:
        about = rank.page.about
        facts = (about.get("world", ""), about.get("device", ""), ",".join(group.paths), group.plan)
        short = (str(fact)[:LONGEST_FACT] for fact in facts)
        yield "allreduce_plan_info", (str(rank.rank), group.instance, *short), 1


def _family(exported: Exported, samples: list[Sample]) -> Metric:
    """A family as OpenMetrics wants it: without the suffix of its kind."""
    name = exported.full_name
    if exported.kind in (Kind.COUNTER, INFO):
        name = name.rpartition("_")[0]
    unit = exported.unit if name.endswith(f"_{exported.unit}") else ""
    family = Metric(name, exported.help, exported.kind, unit)
    family.samples = samples
    return family


def _version() -> str:
    try:
        return version("arena-dataplane")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"
