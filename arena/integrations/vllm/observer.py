"""vLLM's own queue, left in place and measured: ``ARENA_VLLM=observe``.

Each end keeps a probe page, as ends of Arena's queues do, and so `arena top`, the exporter and the alerts see them.
What a page says is what can be known without touching the queue: its flags in shared memory tell the writer who has
read which chunk, so a wait for a chunk is charged by them; a reader counts what it takes.

Not measured: bytes, the delay from enqueue to dequeue, how long a reader has a message, and readers on other hosts. A
message too large for a chunk goes over a socket of vLLM's, and counts as path "fragments". A reader that waits gives
no sign of life meanwhile; its process is looked at all the same.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any, Final, NamedTuple

from arena.blame import Charge, charge, charge_unfinished
from arena.errors import RunDirectoryError
from arena.integrations.vllm import logger
from arena.integrations.vllm.purpose import BROADCAST, Purposeful, note_worker, purpose_of
from arena.probe import Probe, Role, collect_garbage, run_directory
from arena.probe.directory import (
    KEPT_DEAD,
    WRITER_PAGE,
    mark_owner,
    queue_directory,
    reader_page,
    remove_dead_pages,
    remove_if_empty,
)
from arena.probe.page import L_SEQUENCE, L_SEQUENCE_NS
from arena.state import Endpoint

_REFRESH_NS: Final = 50_000_000
_CLOSE_PRIORITY: Final = 10


class PageInfo(NamedTuple):
    """What travels in vLLM's handle, so that a reader's page lies beside its writer's."""

    directory: str
    instance: str
    name: str
    kind: str
    n_reader: int


def observed_class(original: Any) -> Any:
    """A class that derives from vLLM's `MessageQueue` and measures it."""
    return type("MessageQueue", (_Observed, original), {"__module__": __name__, "__doc__": _Observed.__doc__})


class _Observed(Purposeful):
    """vLLM's `MessageQueue`, with a probe page."""

    arena_mode: Final = "observed"
    _page: Probe | None = None
    _messages: int = 0

    def __init__(self, n_reader: int, n_local_reader: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(n_reader, n_local_reader, *args, **kwargs)  # type: ignore[call-arg]
        kind, name = purpose_of(n_reader)
        try:
            if n_local_reader:
                self._observe_writer(kind, name, n_local_reader)
        except (AttributeError, RunDirectoryError) as error:
            logger().warning("queue %s is not measured: %s", name, error)

    def _observe_writer(self, kind: str, name: str, n_reader: int) -> None:
        buffer, instance, root = self.buffer, secrets.token_hex(6), run_directory()  # type: ignore[attr-defined]
        about = {
            "queue": name,
            "instance": instance,
            "n_reader": n_reader,
            "slots": buffer.max_chunks,
            "slot_bytes": buffer.max_chunk_bytes,
            "max_arena_bytes": 0,
            "views": "vllm",
        }
        collect_garbage(root, name=name, keep=KEPT_DEAD)
        directory = queue_directory(root, name, instance)
        mark_owner(directory)
        path = directory / WRITER_PAGE
        self._keep(Probe(path, Role.WRITER, rank=0, n_reader=n_reader, slots=buffer.max_chunks, about=about))
        self.handle.arena_page = PageInfo(str(directory), instance, name, kind, n_reader)  # type: ignore[attr-defined]

    @classmethod
    def create_from_handle(cls, handle: Any, rank: int) -> Any:
        """As vLLM's, with a page beside the writer's, where that has one."""
        self = super().create_from_handle(handle, rank)  # type: ignore[misc]
        info: PageInfo | None = getattr(handle, "arena_page", None)
        if info is None or rank not in handle.local_reader_ranks:
            return self
        if info.kind == BROADCAST:
            note_worker(rank)
        own = handle.local_reader_ranks.index(rank)
        directory = Path(info.directory)
        about = {"queue": info.name, "instance": info.instance, "n_reader": info.n_reader}
        try:
            remove_dead_pages(directory, own, keep=1)
            path = reader_page(directory, own, os.getpid(), secrets.token_hex(3))
            self._keep(Probe(path, Role.READER, rank=own, n_reader=info.n_reader, slots=0, about=about))
        except (FileNotFoundError, RunDirectoryError) as error:
            logger().warning("reader %d of queue %s is not measured: %s", own, info.name, error)
        return self

    def _keep(self, page: Probe) -> None:
        self._page = page
        page.proceeding(Endpoint.WORKING, time.monotonic_ns())
        page.flush(time.monotonic_ns())
        self._closing = util.Finalize(self, _close, args=(page,), exitpriority=_CLOSE_PRIORITY)
        self._closing_pid = os.getpid()  # a forked child has this object too, but not the page

    # ── the writer ───────────────────────────────────────────────────────────────────────────────
    @contextlib.contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[Any]:
        """As vLLM's, after a wait that is charged to whom the chunk's flags name."""
        page = self._page
        if page is None:
            with super().acquire_write(timeout) as chunk:  # type: ignore[misc]
                yield chunk
            return
        with super().acquire_write(self._await_chunk(page, timeout)) as chunk:  # type: ignore[misc]
            yield chunk
            by_socket = bool(chunk[0] == 1)
        now_ns = time.monotonic_ns()
        page.count(page.word("messages_published_total", "fragments" if by_socket else "inline"))
        page.mark(self._messages, now_ns)
        self._messages += 1
        page.words[L_SEQUENCE] = self._messages
        page.progress(now_ns)
        if now_ns >= page.next_flush_ns:
            page.observe(page.word("ring_occupancy_slots"), max(self._lags().values()))
            page.flush(now_ns)

    def _await_chunk(self, page: Probe, timeout: float | None) -> float | None:
        """Wait, as vLLM does, until everybody has read the next chunk; what is left of the timeout."""
        began_ns = time.monotonic_ns()
        ends_ns = None if timeout is None else began_ns + int(timeout * 1e9)
        with self.buffer.get_metadata(self.current_idx) as flags:  # type: ignore[attr-defined]
            holders = _holders(flags)
            if not holders:
                return timeout
            pending, released_ns, shown_ns = holders, dict[int, int](), 0
            while pending:
                now_ns = time.monotonic_ns()
                if ends_ns is not None and now_ns > ends_ns:
                    lags = {rank: lag for rank, lag in self._lags().items() if rank in pending}
                    self._charge(page, charge_unfinished(began_ns, now_ns, released_ns, lags, len(flags) - 1), now_ns)
                    page.count(page.word("errors_total", "timeout"))
                    raise TimeoutError
                if now_ns - shown_ns >= _REFRESH_NS:
                    shown_ns = now_ns
                    alone_ns = max((began_ns, *released_ns.values())) if len(pending) == 1 else 0
                    mask = sum(1 << rank for rank in pending)
                    page.waiting(Endpoint.WAITING, now_ns, self._messages, mask, min(pending) + 1, alone_ns)
                os.sched_yield()
                still = _holders(flags)
                released_ns.update(dict.fromkeys(pending - still, time.monotonic_ns()))
                pending = still
        now_ns = time.monotonic_ns()
        self._charge(page, charge(began_ns, now_ns, released_ns, self.buffer.n_reader), now_ns)  # type: ignore[attr-defined]
        return None if ends_ns is None else max(0.0, (ends_ns - now_ns) / 1e9)

    def _charge(self, page: Probe, charged: Charge, now_ns: int) -> None:
        page.count(page.word("writer_blocked_seconds_total", charged.rank), charged.blocked_ns)
        page.count(page.word("writer_blocked_excess_seconds_total", charged.rank), charged.excess_ns)
        page.count(page.word("writer_blocked_full_seconds_total"), charged.full_ns)
        page.count(page.word("writer_blocked_total"))
        page.observe(page.word("writer_wait_seconds"), charged.blocked_ns)
        page.proceeding(Endpoint.WORKING, now_ns)
        page.flush(now_ns)

    def _lags(self) -> dict[int, int]:
        """How many chunks each reader has not read yet."""
        buffer = self.buffer  # type: ignore[attr-defined]
        lags = dict.fromkeys(range(buffer.n_reader), 0)
        for index in range(buffer.max_chunks):
            with buffer.get_metadata(index) as flags:
                for rank in _holders(flags):
                    lags[rank] += 1
        return lags

    # ── a reader ─────────────────────────────────────────────────────────────────────────────────
    def dequeue(self, timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, counted."""
        page = self._page
        if page is None:
            return super().dequeue(timeout, *args, **kwargs)  # type: ignore[misc]
        began_ns = time.monotonic_ns()
        page.waiting(Endpoint.WAITING, began_ns, self._messages, 0, 0)
        try:
            message = super().dequeue(timeout, *args, **kwargs)  # type: ignore[misc]
        except TimeoutError:
            page.count(page.word("errors_total", "timeout"))
            raise
        finally:
            now_ns = time.monotonic_ns()
            page.count(page.word("reader_starved_seconds_total"), now_ns - began_ns)
            page.proceeding(Endpoint.WORKING, now_ns)
        self._messages += 1
        page.words[L_SEQUENCE] = self._messages
        page.words[L_SEQUENCE_NS] = now_ns
        if now_ns >= page.next_flush_ns:
            page.flush(now_ns)
        return message

    def shutdown(self) -> None:
        """As vLLM's. The page goes.

        It is gone when this returns, even if another thread is about to remove it: that may be a daemon thread, which
        the end of the process would cut off.
        """
        if (own := getattr(super(), "shutdown", None)) is not None:
            own()
        page = self._page
        if page is None:
            return
        if os.getpid() == self._closing_pid:
            _close(page)
        self._page = None
        self._closing.cancel()


def _holders(flags: Any) -> set[int]:
    """Who has not read a chunk: the first flag says that it is written, the others who has read it."""
    return {rank for rank, read in enumerate(flags[1:]) if not read} if flags[0] else set()


def _close(page: Probe) -> None:
    page.closed(Endpoint.CLOSED, time.monotonic_ns())
    page.unlink()
    if page.path.name == WRITER_PAGE:
        (page.path.parent / "owner").unlink(missing_ok=True)
    remove_if_empty(page.path.parent)
