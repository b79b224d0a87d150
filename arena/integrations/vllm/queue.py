"""vLLM's `MessageQueue` with Arena's queue behind it.

The class that `queue_class` makes derives from vLLM's own, so each object is one of two things: with an Arena queue in
it, it is that queue's face; without one it *is* vLLM's queue, with vLLM's own methods. The second is what a group with
readers on other hosts gets, and what a handle of vLLM's own leads to. vLLM's factories (`create_from_process_group`
and its like) call the constructor and `create_from_handle` by name, and so need no second version here.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import util
from typing import Any, Final

from arena.errors import InvalidArgument, OutOfMemory, QueueClosed, QueueTimeout, RunDirectoryError
from arena.integrations.vllm import logger
from arena.integrations.vllm.handle import MAGIC, VERSION, QueueHandle
from arena.integrations.vllm.purpose import (
    BROADCAST,
    Purposeful,
    note_worker,
    purpose_of,
    queue_config,
    why_not,
)
from arena.message_queue import MessageQueue

_CHUNK_BYTES: Final = 24 << 20  # vLLM's own default
_POLL_S: Final = 0.02
"""A reader polls so long, yielding, before it sleeps: about a step, where vLLM's own polls for a second. Whoever sleeps
within a step stands behind another process's time slice, 3 ms, when it wakes up on a machine with too few cores."""

_LEAVE_PRIORITY: Final = 10  # of what a process does at its end: before multiprocessing waits for its children


def queue_class(original: Any) -> Any:
    """A class that derives from vLLM's `MessageQueue` and takes its place."""
    return type("MessageQueue", (_OverArena, original), {"__module__": __name__, "__doc__": _OverArena.__doc__})


class _OverArena(Purposeful):
    """vLLM's `MessageQueue`, carried by Arena; vLLM's own where that can't be.

    Differences that a caller may meet: a reader or writer that died is a `PeerDied` rather than a wait without end, and
    a tensor on a GPU arrives as a CPU tensor.
    """

    arena_mode: Final = "replaced"

    _arena: MessageQueue | None = None
    _chunk_bytes: int = _CHUNK_BYTES

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int | None = None,
        max_chunks: int | None = None,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
        **unknown: Any,
    ) -> None:
        """Make a queue and be its writer.

        Args:
            n_reader: readers in all; with any on another host, the queue is vLLM's own, and the log says so.
            n_local_reader: those on this host.
            local_reader_ranks: their ranks in the engine, as `create_from_handle` will be given them; 0.. by default.
            max_chunk_bytes: what `acquire_write` yields. A message needs no chunk: it rides in a slot or in the arena.
            max_chunks: not needed: the ring has `QueueConfig.slots`.
            connect_ip: not needed on one host.
            enable_shm_tensor_arena: not needed: Arena's is always there (``ARENA_MAX_ARENA_BYTES=0`` turns it off).
            unknown: what later versions of vLLM pass; the log says that it has no effect.
        """
        options = {
            "local_reader_ranks": local_reader_ranks,
            "max_chunk_bytes": max_chunk_bytes,
            "max_chunks": max_chunks,
            "connect_ip": connect_ip,
            "enable_shm_tensor_arena": enable_shm_tensor_arena or None,
            **unknown,
        }
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else list(local_reader_ranks)
        if len(ranks) != n_local_reader:
            raise InvalidArgument(
                "not every local reader has a rank", expected=f"{n_local_reader} ranks", found=repr(local_reader_ranks)
            )
        kind, name = purpose_of(n_reader)
        reason = why_not(n_reader, n_local_reader)
        if not reason:
            try:
                self._arena = MessageQueue(n_reader, config=queue_config(name, n_reader), on_warning=logger().warning)
            except (OutOfMemory, RunDirectoryError) as error:
                reason = str(error)
        if self._arena is None:
            logger().warning("queue %s is vLLM's own, and Arena can't see into it: %s", name, reason)
            super().__init__(n_reader, n_local_reader, **_given(options))  # type: ignore[call-arg]
            return
        if unknown:
            logger().warning("queue %s is Arena's, where %s has no effect", name, ", ".join(sorted(unknown)))
        self._chunk_bytes = max_chunk_bytes or _CHUNK_BYTES
        self.n_local_reader = n_local_reader
        self._become(writer=True, local_reader_rank=-1)
        self.handle = QueueHandle(MAGIC, VERSION, kind, ranks, os.getpid(), self._arena.export_handle())

    @classmethod
    def create_from_handle(cls, handle: Any, rank: int) -> Any:
        """Attach as a reader, however long the writer's process takes to answer.

        Raises:
            HandleMismatch: the handle is another Arena version's.
            InvalidArgument: the queue keeps no place for this rank.
            PeerDied: the writer's process is dead.
        """
        if not isinstance(handle, QueueHandle):
            _tell_of_vllms_own(handle)
            return super().create_from_handle(handle, rank)  # type: ignore[misc]
        handle.check()
        own = handle.rank_of(rank)
        self = cls.__new__(cls)
        self._arena = MessageQueue.create_from_handle(
            handle.arena, own, timeout=None, poll_s=_POLL_S, on_warning=logger().warning
        )
        self.handle = handle
        self._become(writer=False, local_reader_rank=own)
        if handle.kind == BROADCAST:
            note_worker(rank)
        return self

    def _become(self, *, writer: bool, local_reader_rank: int) -> None:
        """What vLLM's own queue knows of itself, and that the queue is left at this process's end, or with this object.

        A worker's end runs no atexit hooks, but multiprocessing's.
        """
        assert self._arena is not None
        self.n_remote_reader = 0
        self.shutting_down = False
        self.local_reader_rank = local_reader_rank
        self._interval_s = float(import_module("vllm.envs").VLLM_RINGBUFFER_WARNING_INTERVAL)
        self._is_writer = writer
        self._is_local_reader = not writer
        self._is_remote_reader = False
        util.Finalize(self, self._arena.shutdown, exitpriority=_LEAVE_PRIORITY)

    # ── verbs ────────────────────────────────────────────────────────────────────────────────────
    def export_handle(self) -> Any:
        """What readers attach with."""
        return self.handle

    def wait_until_ready(self) -> None:
        """Wait until every reader has attached, as long as their models take to load. Collective.

        Raises:
            RuntimeError: "cancelled": this end was shut down meanwhile.
            PeerDied: the writer died; a reader is told.
        """
        if self._arena is None:
            super().wait_until_ready()  # type: ignore[misc]
            return
        try:
            self._arena.wait_until_ready(None)
        except QueueClosed as closed:
            raise _cancelled() from closed

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send an object to every reader.

        Raises:
            TimeoutError: no slot came free in `timeout` seconds; it names who holds the line.
            RuntimeError: "cancelled": this end was shut down, or no reader is left.
            PeerDied: a reader died; told once.
        """
        arena = self._arena
        if arena is None:
            super().enqueue(obj, timeout)  # type: ignore[misc]
            return
        try:
            arena.enqueue(obj, timeout)
        except QueueClosed as closed:
            raise _cancelled() from closed

    def dequeue(self, timeout: float | None = None, *given: Any, cancel: Any = None, indefinite: bool = False) -> Any:
        """Take the next message.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
            given: `indefinite`, and in earlier versions of vLLM `cancel` before it.
            cancel: an event that ends the wait once it is set, and this end with it.
            indefinite: a long wait is nothing to write a line about.

        Raises:
            TimeoutError: no message came in time.
            RuntimeError: "cancelled": either end was shut down, or `cancel` was set.
            PeerDied: the writer died, and everything that it sent has been taken.
        """
        arena = self._arena
        if arena is None:
            options = {"cancel": cancel, "indefinite": indefinite or None}
            return super().dequeue(timeout, *given, **_given(options))  # type: ignore[misc]
        for one in given:
            if isinstance(one, bool):
                indefinite = one
            elif one is not None:
                cancel = one
        if cancel is not None:
            self._heed(cancel)
        try:
            if indefinite:
                return arena.dequeue(timeout if timeout is None else max(0.0, timeout))
            return _take_and_tell(arena, timeout, self._interval_s)
        except QueueClosed as closed:
            raise _cancelled() from closed

    def _heed(self, cancel: threading.Event) -> None:
        """Shut this end down when an event is set, which a worker's is once, at its end."""
        if cancel.is_set():
            self.shutdown()
        elif self.__dict__.setdefault("_heeded", None) is not cancel:
            self._heeded = cancel
            threading.Thread(target=_end_on, args=(cancel, self._arena), name="arena-cancel", daemon=True).start()

    def shutdown(self) -> None:
        """Leave; at the writer, close. Whoever waits at this end gets ``RuntimeError("cancelled")``."""
        if self._arena is not None:
            self.shutting_down = True
            self._arena.shutdown()
        elif (own := getattr(super(), "shutdown", None)) is not None:
            own()

    @contextlib.contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[memoryview]:
        """A chunk of `max_chunk_bytes` to fill, sent at the end of the block; not sent if that raises."""
        if self._arena is None:
            with super().acquire_write(timeout) as buffer:  # type: ignore[misc]
                yield buffer
            return
        chunk = bytearray(self._chunk_bytes)
        with memoryview(chunk) as buffer:
            yield buffer
        self.enqueue(chunk, timeout)

    @contextlib.contextmanager
    def acquire_read(self, timeout: float | None = None, *given: Any, **options: Any) -> Iterator[memoryview]:
        """The chunk that `acquire_write` sent.

        Raises:
            InvalidArgument: the message was sent with `enqueue`, which `dequeue` takes.
        """
        if self._arena is None:
            with super().acquire_read(timeout, *given, **options) as buffer:  # type: ignore[misc]
                yield buffer
            return
        chunk = self.dequeue(timeout, *given, **options)
        if not isinstance(chunk, (bytearray, memoryview)):
            raise InvalidArgument(
                "that message is no chunk",
                expected="what acquire_write sent",
                found=type(chunk).__name__,
                remedy="take it with dequeue()",
            )
        with memoryview(chunk) as buffer:
            yield buffer


# ── what is said, and waiting ───────────────────────────────────────────────────────────────────
def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Without what was not given, of which earlier versions of vLLM may never have heard."""
    return {name: value for name, value in options.items() if value is not None}


def _tell_of_vllms_own(handle: Any) -> None:
    if getattr(handle, "remote_subscribe_addr", None) is not None:
        logger().info("this process reads a queue of vLLM's own: it has readers on other hosts")
        return
    logger().warning(
        "this process has Arena's plugin and was given a queue of vLLM's own, which goes on as such: the process that "
        "made it has no plugin; install arena-dataplane for every process of the engine, with the same VLLM_PLUGINS "
        "and ARENA_VLLM, or set ARENA_VLLM=0 for all"
    )


def _take_and_tell(arena: MessageQueue, timeout: float | None, interval_s: float) -> Any:
    """Dequeue, with a line in the log now and then while nothing comes."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left_s = interval_s if deadline is None else min(interval_s, max(0.0, deadline - time.monotonic()))
        try:
            return arena.dequeue(left_s)
        except QueueTimeout as late:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            logger().info("after %.0f s: %s", interval_s, late)


def _end_on(cancel: threading.Event, arena: MessageQueue) -> None:
    cancel.wait()
    arena.shutdown()


def _cancelled() -> RuntimeError:
    """What vLLM's own callers know it by."""
    return RuntimeError("cancelled")
