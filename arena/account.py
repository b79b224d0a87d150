"""What a communicator writes into its probe page, and where the pages lie.

Below the run directory, ``<group>@<instance>`` holds one page per rank, ``rank-<r>``, with the counts of that rank.
Rank 0 makes the directory and leaves its identity there (`owner`), by which `arena gc` knows when it may go.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from arena.probe import EndpointState, Probe, Role, collect_garbage, run_directory
from arena.probe.directory import KEPT_DEAD, mark_owner, queue_directory, remove_if_empty
from arena.probe.metrics import ALLREDUCE_PATHS, DECLINE_REASONS
from arena.probe.page import L_SEQUENCE, L_SEQUENCE_NS

if TYPE_CHECKING:
    import torch

    from arena.device import ReducePath, Stopwatch

SAMPLED: Final = 16
"""One operation in so many is timed."""

_monotonic_ns = time.monotonic_ns


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


class Account:
    """The counts of one rank."""

    def __init__(self, directory: Path, rank: int, about: dict[str, Any], stopwatch: Stopwatch) -> None:
        self._probe = probe = Probe(
            directory / f"rank-{rank}", Role.COMMUNICATOR, rank=rank, n_reader=0, slots=0, about=about
        )
        self._stopwatch = stopwatch
        self._running: str | None = None  # the path whose time is not known yet
        self._operations = 0
        self._counters = {
            path: (probe.word("allreduce_total", path), probe.word("allreduce_bytes_total", path))
            for path in ALLREDUCE_PATHS
        }
        self._seconds = {path: probe.word("allreduce_seconds", path) for path in ALLREDUCE_PATHS}
        self._fallbacks = {reason: probe.word("allreduce_fallback_total", reason) for reason in DECLINE_REASONS}
        probe.proceeding(EndpointState.WORKING, _monotonic_ns())
        probe.flush(_monotonic_ns())

    def due(self) -> bool:
        """Whether the next operation is one to time."""
        return self._operations % SAMPLED == 0

    def timed(self, path: ReducePath, x: torch.Tensor) -> torch.Tensor:
        """Run an operation, and time it; one that is not over yet is taken down by a later one."""
        stopwatch = self._stopwatch
        self._take_time()
        stopwatch.start()
        out = path.all_reduce(x)
        stopwatch.stop()
        self._running = path.name
        self._take_time()
        return out

    def _take_time(self) -> None:
        if self._running is not None and (took_ns := self._stopwatch.elapsed_ns()) is not None:
            self._probe.observe(self._seconds[self._running], took_ns)
            self._running = None

    def served(self, path: str, nbytes: int, ruled_out: tuple[tuple[str, str], ...]) -> None:
        """One operation is done, or on its way."""
        self._operations += 1
        values = self._probe.values
        operations, total = self._counters[path]
        values[operations] += 1
        values[total] += nbytes
        if ruled_out:
            for reason in {reason for _, reason in ruled_out}:
                values[self._fallbacks[reason]] += 1
        now_ns = _monotonic_ns()
        words = self._probe.words
        words[L_SEQUENCE] = self._operations
        if now_ns >= self._probe.next_flush_ns:
            words[L_SEQUENCE_NS] = now_ns
            self._probe.flush(now_ns)

    def counts(self) -> dict[str, Any]:
        """The counted part of `CommunicatorStatistics`."""
        self._probe.flush(_monotonic_ns())
        values = self._probe.values
        served = {path: words for path, words in self._counters.items() if values[words[0]]}
        return {
            "operations_by_path": {path: values[operations] for path, (operations, _) in served.items()},
            "bytes_by_path": {path: values[total] for path, (_, total) in served.items()},
            "fallbacks": {reason: values[word] for reason, word in self._fallbacks.items() if values[word]},
        }

    def close(self) -> None:
        """The last words; the page goes."""
        self._probe.closed(EndpointState.CLOSED, _monotonic_ns())
        self._probe.unlink()


def leave_directory(directory: Path, rank: int) -> None:
    """Remove what one rank has in the directory besides its page; the last one removes the directory."""
    own = [directory / "owner"] if rank == 0 else []
    with contextlib.suppress(FileNotFoundError):  # this rank's page is gone, so another may have been the last one
        for path in (*own, *directory.glob(f"meet-{rank}-*")):  # a meeting that hung has left its socket
            path.unlink(missing_ok=True)
    remove_if_empty(directory)
