"""What a communicator writes into its probe page, and where the pages lie.

Below the run directory, ``<group>@<instance>`` holds one page per rank, ``rank-<r>``, with the counts of that rank.
Rank 0 makes the directory and leaves its identity there (`owner`), by which `arena gc` knows when it may go.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from arena.probe import EndpointState, Event, Probe, Role, collect_garbage, hooks, run_directory
from arena.probe.directory import KEPT_DEAD, mark_owner, queue_directory, remove_if_empty
from arena.probe.metrics import ALLREDUCE_PATHS, COLLECTIVES, DECLINE_REASONS, OPERATIONS
from arena.probe.page import H_RANK, L_SEQUENCE, L_SEQUENCE_NS, PATH_BITS

if TYPE_CHECKING:
    from arena.device import Stopwatch

SAMPLED: Final = 16
"""One operation in so many is timed."""

_monotonic_ns = time.monotonic_ns


@dataclass(frozen=True)
class OperationCounts:
    """What was served of one operation, by path; and how often a faster path declined, once a reason and operation."""

    operations_by_path: dict[str, int] = field(default_factory=dict)
    bytes_by_path: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CommunicatorStatistics(OperationCounts):
    """What one rank knows of its communicator, at one moment. The counts are those of all-reduce.

    Attributes:
        paths: those that were set up, the same on every rank.
        declined: those that could not be, each with (reason, text), the same on every rank.
        operations_by_path, bytes_by_path: what was served by each.
        fallbacks: operations that a faster path declined, by reason; counted once a reason and operation.
        plan: where the plan of all-reduce comes from.
        collectives: the counts of each other operation.
    """

    name: str = ""
    rank: int = 0
    world: int = 0
    paths: tuple[str, ...] = ()
    declined: dict[str, tuple[str, str]] = field(default_factory=dict)
    plan: str = ""
    collectives: dict[str, OperationCounts] = field(default_factory=dict)


def claim_directory(name: str) -> tuple[str, str]:
    """Make the directory of a new communicator: its path and instance.

    Raises:
        RunDirectoryError: there is no run directory, or no room in it.
    """
    instance, full_name = secrets.token_hex(6), f"allreduce-{name}"
    root = run_directory()
    collect_garbage(root, name=full_name, keep=KEPT_DEAD)
    directory = queue_directory(root, full_name, instance)
    mark_owner(directory)
    return str(directory), instance


class Book:
    """Where the counts of one operation are kept in the page."""

    def __init__(self, probe: Probe, operation: str) -> None:
        prefix, labels = ("allreduce", ()) if operation == "all_reduce" else ("collective", (operation,))
        self.operations = 0
        self.counters = {
            path: (probe.word(f"{prefix}_total", *labels, path), probe.word(f"{prefix}_bytes_total", *labels, path))
            for path in ALLREDUCE_PATHS
        }
        self.seconds = {
            path: probe.word(f"{prefix}_seconds", *(labels or (path,))) for path in ALLREDUCE_PATHS
        }  # of the other operations, one for all paths
        self.fallbacks = {reason: probe.word(f"{prefix}_fallback_total", *labels, reason) for reason in DECLINE_REASONS}

    def counts(self, values: list[int]) -> OperationCounts:
        """What there is besides zeros."""
        served = {path: words for path, words in self.counters.items() if values[words[0]]}
        return OperationCounts(
            {path: values[operations] for path, (operations, _) in served.items()},
            {path: values[total] for path, (_, total) in served.items()},
            {reason: values[word] for reason, word in self.fallbacks.items() if values[word]},
        )


class Account:
    """The counts of one rank."""

    def __init__(self, directory: Path, rank: int, about: dict[str, Any], stopwatch: Stopwatch) -> None:
        self._path, self._about = directory / f"rank-{rank}", about
        self._probe = probe = _page(self._path, rank, about)
        self._stopwatch = stopwatch
        self._operations = 0
        self._running: int | None = None  # the histogram for the time that is not known yet
        self.books = {operation: Book(probe, operation) for operation in ("all_reduce", *COLLECTIVES)}
        probe.proceeding(EndpointState.WORKING, _monotonic_ns())
        probe.flush(_monotonic_ns())

    def timed(self, book: Book, path: str, run: Callable[..., Any], *operands: Any) -> Any:
        """Run an operation, and time it; one that is not over yet is taken down by a later one."""
        stopwatch = self._stopwatch
        self._take_time()
        stopwatch.start()
        out = run(*operands)
        stopwatch.stop()
        self._running = book.seconds[path]
        self._take_time()
        return out

    def _take_time(self) -> None:
        if self._running is not None and (took_ns := self._stopwatch.elapsed_ns()) is not None:
            self._probe.observe(self._running, took_ns)
            self._running = None

    def served(self, book: Book, path: str, nbytes: int, ruled_out: tuple[tuple[str, str], ...]) -> None:
        """One operation is done, or on its way."""
        book.operations += 1
        values = self._probe.values
        operations, total = book.counters[path]
        values[operations] += 1
        values[total] += nbytes
        if ruled_out:
            for reason in {reason for _, reason in ruled_out}:
                values[book.fallbacks[reason]] += 1
        now_ns = _monotonic_ns()
        words = self._probe.words
        self._operations += 1
        words[L_SEQUENCE] = self._operations
        if now_ns >= self._probe.next_flush_ns:
            words[L_SEQUENCE_NS] = now_ns
            self._probe.flush(now_ns)

    def told(self, operation: str, path: str, nbytes: int, run: Callable[..., Any], *operands: Any) -> Any:
        """Run an operation inside a sampled message, and record what the call took. (A GPU may not be done by then.)"""
        began_ns = _monotonic_ns()
        out = run(*operands)
        now_ns, inside = _monotonic_ns(), hooks.inside.get()
        if inside is not None:
            trace, reader = inside
            what = nbytes << 16 | (reader & 0xFF) << 8 | OPERATIONS.index(operation) << PATH_BITS
            what |= ALLREDUCE_PATHS.index(path)
            self._probe.detail(Event.REDUCE, self._operations, now_ns, now_ns - began_ns, what, trace)
        return out

    def counts(self) -> Mapping[str, OperationCounts]:
        """By operation."""
        self._probe.flush(_monotonic_ns())
        return {operation: book.counts(self._probe.values) for operation, book in self.books.items()}

    def describe(self, **changes: Any) -> None:
        """Say something else about the communicator from now on: in another page, which takes the place of this one.

        What a page says of its owner never changes, so that an observer may rely on it.
        """
        old, self._about = self._probe, self._about | changes
        self._probe = new = _page(self._path.with_name(f".{self._path.name}"), old.words[H_RANK], self._about)
        new.values[:] = old.values
        new.words[L_SEQUENCE] = old.words[L_SEQUENCE]
        new.proceeding(EndpointState.WORKING, _monotonic_ns())
        new.flush(_monotonic_ns())
        os.replace(new.path, self._path)
        new.path = self._path

    def close(self) -> None:
        """The last words; the page goes."""
        self._probe.event(Event.CLOSE, self._probe.words[L_SEQUENCE], _monotonic_ns())
        self._probe.closed(EndpointState.CLOSED, _monotonic_ns())
        self._probe.unlink()


def _page(path: Path, rank: int, about: dict[str, Any]) -> Probe:
    return Probe(path, Role.COMMUNICATOR, rank=rank, n_reader=0, slots=0, about=about)


def leave_directory(directory: Path, rank: int) -> None:
    """Remove what one rank has in the directory besides its page; the last one removes the directory."""
    own = [directory / "owner"] if rank == 0 else []
    with contextlib.suppress(FileNotFoundError):  # this rank's page is gone, so another may have been the last one
        for path in (*own, *directory.glob(f"meet-{rank}-*")):  # a meeting that hung has left its socket
            path.unlink(missing_ok=True)
    remove_if_empty(directory)
