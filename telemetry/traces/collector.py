"""From pages to spans: threads that follow flight recorders, in the process itself or from outside."""

from __future__ import annotations

import atexit
import multiprocessing.process
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from opentelemetry.sdk.trace import TracerProvider

from arena.probe import (
    ENDED,
    BadPage,
    ProbeReader,
    RunDirectoryError,
    observed_directory,
    pages,
    process_state,
    queue_directories,
)
from telemetry.messages import Follower
from telemetry.traces.ids import Relation
from telemetry.traces.outlet import EXIT_S, outlet_of
from telemetry.traces.spans import Spans

POLL_S: Final = 0.5
PACE_S: Final = 0.0005
AT_ONCE: Final = 64
"""After so many messages' spans the thread lets go of the interpreter lock for `PACE_S`."""


@dataclass(frozen=True)
class Counts:
    """What became of what was recorded, in this process.

    Attributes:
        spans: made so far.
        events_lost: events that were overwritten before they were read. Their messages have no spans from here.
        delivered: spans that a collector has taken; None where the provider is not `otlp_provider`'s.
        dropped: spans that were given up: the queue was full, or the collector failed, or was silent.
    """

    spans: int
    events_lost: int
    delivered: int | None = None
    dropped: int | None = None


class _Followed:
    """One page, and how far its events have become spans."""

    def __init__(self, path: Path, spans: Spans, *, from_start: bool) -> None:
        self.file = _file(path)
        self.page = ProbeReader(path)
        self.follower = Follower(self.page.role, from_start=from_start)
        self._make = spans.maker(self.page)

    def close(self) -> None:
        self.page.close()

    def advance(self) -> Iterator[int]:
        """Make the spans of what is new; yields how many after each message."""
        events = self.page.events(self.follower.next_number)
        if events:
            clock = _offset_ns(self.page)
            for message in self.follower.read(events):
                yield self._make(message, clock)

    def finish(self) -> Iterator[int]:
        """The owner has ended: make spans of what it left open, too."""
        yield from self.advance()
        clock = _offset_ns(self.page)
        for message in self.follower.unfinished():
            yield self._make(message, clock)


class _Collector:
    """Follows pages from a thread, and makes spans of what they record."""

    from_start = True

    def __init__(self, provider: TracerProvider, relation: Relation) -> None:
        self.pid = os.getpid()
        self._provider = provider
        self._spans = Spans(provider, relation)
        self._followed: dict[Path, _Followed] = {}
        self._made = 0
        self._lost = 0  # by pages that are followed no more
        self._lock = threading.Lock()
        self._collecting = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arena-traces", daemon=True)

    def start(self) -> None:
        """Follow what there is, and from then on what comes."""
        self._find()
        self._thread.start()

    def watch(self, path: Path) -> None:
        """Follow one more page, unless it can't be read."""
        try:
            followed = _Followed(path, self._spans, from_start=self.from_start)
        except (BadPage, OSError):
            return
        with self._lock:
            self._followed[path] = followed

    def close(self) -> None:
        """Make the last spans, and stop."""
        self._stop.set()
        self._thread.join(EXIT_S / 2)
        self._collect(lambda: None)

    def counts(self) -> Counts:
        """What became of it all so far."""
        lost = self._lost + sum(one.follower.lost for _, one in self._all())
        outlet = outlet_of(self._provider)
        return (
            Counts(self._made, lost) if outlet is None else Counts(self._made, lost, outlet.delivered, outlet.dropped)
        )

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            self._find()
            self._collect(self._breathe)

    def _find(self) -> None:
        """Look for pages that have come."""

    def _breathe(self) -> None:
        self._stop.wait(PACE_S)

    def _collect(self, between: Callable[[], object]) -> None:
        with self._collecting:
            for path, one in self._all():
                over = self._ended(one)  # before the look: what it recorded until then is read
                for count, made in enumerate(one.finish() if over else one.advance(), 1):
                    self._made += made
                    if count % AT_ONCE == 0:
                        between()
                if over or one.follower.closed:
                    self._forget(path, one)

    def _all(self) -> list[tuple[Path, _Followed]]:
        with self._lock:
            return list(self._followed.items())

    def _ended(self, one: _Followed) -> bool:
        return False

    def _forget(self, path: Path, one: _Followed) -> None:
        with self._lock:
            self._followed.pop(path, None)
            self._lost += one.follower.lost
        one.close()


class InProcess(_Collector):
    """The pages of this process, which tells of them; they are followed until their last event."""

    def __init__(self, provider: TracerProvider, relation: Relation) -> None:
        super().__init__(provider, relation)
        self.start()
        self._over = False
        atexit.register(self.end)
        # A child of multiprocessing ends without atexit.
        self._finalizer = multiprocessing.util.Finalize(None, self.end, exitpriority=100)

    def close(self) -> None:
        """Make the last spans, and stop."""
        if not self._over:
            self._over = True
            super().close()
            atexit.unregister(self.end)
            self._finalizer.cancel()

    def end(self) -> None:
        """The process ends. In a child of multiprocessing nobody but us sees to it that the last spans leave."""
        if self._over or self.pid != os.getpid():  # inherited over a fork
            return
        self.close()
        if multiprocessing.process.parent_process() is not None:
            leaving = threading.Thread(target=self._provider.shutdown, name="arena-traces-exit", daemon=True)
            leaving.start()
            leaving.join(EXIT_S)


class HostTraces(_Collector):
    """The pages of every process of a run directory. A context manager; for `arena export --otlp`."""

    from_start = False

    def __init__(
        self, provider: TracerProvider, run_dir: str | os.PathLike[str] | None = None, relation: Relation = "both"
    ) -> None:
        self._run_dir = None if run_dir is None else os.fspath(run_dir)
        self._known: set[Path] = set()
        super().__init__(provider, relation)
        self.start()

    def __enter__(self) -> HostTraces:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _find(self) -> None:
        found = set(all_pages(self._run_dir))
        for path in found - self._known:
            self.watch(path)
        self._known = found

    def _ended(self, one: _Followed) -> bool:
        return process_state(one.page.owner) in ENDED or _file(one.page.path) != one.file

    def _forget(self, path: Path, one: _Followed) -> None:
        super()._forget(path, one)
        if _file(path) not in (0, one.file):  # another page has taken its place: of a communicator with another plan
            self._known.discard(path)


def _file(path: Path) -> int:
    """What tells a file from another one of its name; 0 for none."""
    try:
        return os.lstat(path).st_ino
    except OSError:
        return 0


def _offset_ns(page: ProbeReader) -> int:
    """Wall clock less the page's clock, now: of three readings the one that was interrupted least."""
    readings = []
    for _ in range(3):
        before, wall, after = page.now_ns(), time.time_ns(), page.now_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def own_pages() -> Iterator[Path]:
    """Pages of queues that were made before `install`."""
    for path in all_pages(None):
        if _owner_of(path) == os.getpid():
            yield path


def _owner_of(path: Path) -> int:
    try:
        with ProbeReader(path) as page:
            return page.owner.pid
    except BadPage:
        return 0


def all_pages(run_dir: str | None) -> list[Path]:
    """Every page of a run directory."""
    try:
        return [path for directory in queue_directories(observed_directory(run_dir)) for path in pages(directory)]
    except (OSError, RunDirectoryError):
        return []  # no queue yet
