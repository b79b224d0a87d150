"""The blocks of `arena bench scrape`. Each has a run directory of its own, so that it scrapes nothing but its own."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from telemetry.commands.bench.children import fork_reader, reap
from telemetry.commands.bench.contenders import Arena, Crew, Ends, crew

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

    from arena.probe import Probe

_WARM_UPS = 50
_SETTLE_MESSAGES = 500


@dataclass(frozen=True)
class Scrapes:
    """Times in ns of alternating turns, and how many samples each writes."""

    arena: list[int]
    constants: list[int]
    samples: int


@dataclass(frozen=True)
class Growth:
    """What a process has more of after many scrapes."""

    resident_bytes: int
    objects: int


@dataclass(frozen=True)
class Watched:
    """Round trips in ns, block by block; the blocks of a pair follow each other."""

    alone: list[list[int]]
    scraped: list[list[int]]


def scrapes(queues: int, readers: int, rounds: int) -> Scrapes:
    """Scrape pages full of numbers, by turns with a collector that returns the very samples of one such scrape."""
    from prometheus_client import CollectorRegistry, generate_latest

    with _run_directory() as run_dir, _registry(run_dir) as registry:
        pages = [page for number in range(queues) for page in _pages(run_dir, f"queue-{number}", readers)]
        constants = CollectorRegistry()
        constants.register(_Constants(registry.collect()))
        samples = sum(len(family.samples) for family in constants.collect())
        arena: list[int] = []
        constant: list[int] = []
        for index in range(rounds):
            turns = [(arena, registry), (constant, constants)]
            for times, source in turns if index % 2 == 0 else reversed(turns):
                times.append(_timed(partial(generate_latest, source)))
        del pages
    return Scrapes(arena, constant, samples)


def growth(count: int) -> Growth:
    """Scrape one queue over and over."""
    from prometheus_client import generate_latest

    with _run_directory() as run_dir, _registry(run_dir) as registry:
        pages = _pages(run_dir, "queue", 2)
        for _ in range(_WARM_UPS):
            generate_latest(registry)
        gc.collect()
        resident, objects = _resident_bytes(), len(gc.get_objects())
        for _ in range(count):
            generate_latest(registry)
        gc.collect()
        del pages
        return Growth(max(0, _resident_bytes() - resident), max(0, len(gc.get_objects()) - objects))


def watched(pairs: int, messages: int, gap_s: float) -> Watched:
    """Round trips of one queue in blocks, every other one with a scrape by another process while it lasts."""
    found = Watched([], [])
    with _run_directory() as run_dir:
        ours, theirs = Pipe()
        scraper = fork_reader(partial(_scrape_on_request, run_dir, theirs))
        with crew(Arena(), 1, _answer) as at_work:
            _round_trips(at_work, _SETTLE_MESSAGES, 0.0)
            for index in range(pairs):
                sides = [(found.alone, ""), (found.scraped, "scrape")]
                for side, request in sides if index % 2 == 0 else reversed(sides):
                    if request:
                        ours.send(request)
                    side.append(_round_trips(at_work, messages, gap_s))
                    if request:
                        ours.recv()  # none reaches into the next block
            at_work.ends.send(None)
        ours.send("")
        reap([scraper])
    return found


class _Constants:
    """A collector that has its samples ready."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return self._families


@contextmanager
def _run_directory() -> Iterator[Path]:
    shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with TemporaryDirectory(prefix="arena-bench-", dir=shm) as path:
        os.environ["ARENA_RUN_DIR"] = path  # of this block's process, and those it forks
        yield Path(path)


@contextmanager
def _registry(run_dir: Path) -> Iterator[CollectorRegistry]:
    from prometheus_client import CollectorRegistry

    from telemetry.metrics import ArenaCollector
    from telemetry.reader import Watcher

    with Watcher(run_dir) as watcher:
        registry = CollectorRegistry()
        registry.register(ArenaCollector(watcher))
        yield registry


def _pages(run_dir: Path, name: str, readers: int) -> list[Probe]:
    """The pages of a queue under load: every value is large, every reader lags, and the marks are there."""
    from arena.probe import Probe, Role
    from arena.probe.directory import WRITER_PAGE, queue_directory, reader_page
    from arena.probe.page import L_SEQUENCE

    directory = queue_directory(run_dir, name, "bench")
    about = {"queue": name, "n_reader": readers, "slots": 64, "slot_bytes": 16 << 10, "views": "readonly"}
    pages = [Probe(directory / WRITER_PAGE, Role.WRITER, rank=0, n_reader=readers, slots=64, about=about)]
    for rank in range(readers):
        path = reader_page(directory, rank, os.getpid(), "bench")
        pages.append(Probe(path, Role.READER, rank=rank, n_reader=readers, slots=0, about=about))
    for sequence in range(1000):
        pages[0].mark(sequence, time.monotonic_ns())
    for behind, page in enumerate(pages):
        page.words[L_SEQUENCE] = 1000 - behind
        page.values[:] = [123_456_789 + word * word for word in range(len(page.values))]
        page.flush(time.monotonic_ns())
    return pages


def _timed(action: Callable[[], object]) -> int:
    began = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - began


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _round_trips(at_work: Crew, messages: int, gap_s: float) -> list[int]:
    times = []
    due = time.monotonic()
    for index in range(messages):
        times.append(_timed(partial(at_work.exchange, {"step": index})))
        due += gap_s
        time.sleep(max(0.0, due - time.monotonic()))
    return times


def _answer(ends: Ends) -> None:
    (receive,) = ends.receives
    while (message := receive()) is not None:
        ends.send(message["step"])


def _scrape_on_request(run_dir: Path, requests: Connection) -> None:
    from prometheus_client import generate_latest

    with _registry(run_dir) as registry:
        while requests.recv():
            generate_latest(registry)
            requests.send("done")
