"""`MessageQueue`: the public face of a queue, and what its two ends have in common.

The story of one message is told in two files: `arena.writer` sends it, `arena.reader` takes it. Here is what
both need around it: the lock, the states, closing, forking.

One cheap lock guards an endpoint, so several threads may use it. Whoever enters twice in one thread, through
a ``__reduce__``, a signal handler or a finaliser, gets an error rather than a deadlock. Nobody holds the lock
against `shutdown`, `statistics` or the release of a block: these only leave a note and wake the waiter.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from arena.config import QueueConfig, RemoteConfig, check_on_warning, check_poll, check_timeout, unknown_variables
from arena.errors import ArenaError, HandleMismatch, QueueClosed, QueueTimeout, ReentrantUse, UseAfterFork, WrongEnd
from arena.held import HeldLock
from arena.peers import Handle, is_elsewhere, naming_descriptors
from arena.probe import Probe
from arena.state import Endpoint, move

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

Warn = Callable[[str], None]

__all__ = ["MessageQueue", "Statistics"]


@dataclass(frozen=True)
class Statistics:
    """What one endpoint knows of its queue, at one moment. Times in seconds, sizes in bytes.

    A reader fills only what it can know: its own position, lag, waiting and errors. Without probes the counts
    that only probes keep are 0.
    """

    name: str
    role: str
    state: str
    published: int
    consumed_by_reader: dict[int, int] = field(default_factory=dict)
    lag_by_reader: dict[int, int] = field(default_factory=dict)
    peers: dict[int, str] = field(default_factory=dict)
    messages_by_path: dict[str, int] = field(default_factory=dict)
    bytes_by_path: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    blocked_s_by_reader: dict[int, float] = field(default_factory=dict)
    excess_s_by_reader: dict[int, float] = field(default_factory=dict)
    blocked_full_s: float = 0.0
    starved_s: float = 0.0
    arena_used_bytes: int = 0
    arena_used_max_bytes: int = 0
    arena_size_bytes: int = 0
    held_bytes_by_reader: dict[int, int] = field(default_factory=dict)
    segments: int = 0
    holds_used: int = 0
    holds_reclaimed: int = 0
    parks: int = 0
    missed_wakes: int = 0
    pins: dict[int, str] = field(default_factory=dict)


class MessageQueue:
    """A broadcast queue in shared memory: one writer, N readers, each of which gets every message, in order.

    ``MessageQueue(n_reader)`` makes the queue and is its writer. `create_from_handle` makes a reader, in another
    process or this one. Either end is a context manager that shuts down on leaving.

    Example:
        >>> queue = MessageQueue(n_reader=1)
        >>> reader = MessageQueue.create_from_handle(queue.export_handle(), rank=0)
        >>> queue.enqueue({"step": 1})
        >>> reader.dequeue()
        {'step': 1}
    """

    __slots__ = (
        "__weakref__",
        "_acquire",
        "_attention",
        "_busy",
        "_closing",
        "_lock",
        "_on_warning",
        "_probe",
        "_release",
        "_state",
        "name",
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> MessageQueue:
        if cls is MessageQueue:
            from arena.writer import Writer

            return object.__new__(Writer)
        return object.__new__(cls)

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int | None = None,
        *,
        config: QueueConfig | None = None,
        remote: RemoteConfig | str | None = None,
        on_warning: Warn | None = None,
    ) -> None:
        """Create a queue and be its writer.

        Args:
            n_reader: how many readers are expected. They count from now on: nothing is lost before they attach.
            n_local_reader: how many of them are on this host; by default all. Where a reader is turns out when it
                attaches: of any rank it may be here or there.
            config: settings; ``ARENA_*`` environment variables override them.
            remote: the address on which readers on other hosts are listened for, or more about that. By default there
                are none, and nothing listens. Extra: ``remote``.
            on_warning: called with one sentence when a wait turns into a stall, and at the start if the environment
                has ``ARENA_*`` variables that are no settings. Must not use the queue.

        Raises:
            InvalidArgument: an argument of the wrong type or out of range.
            RunDirectoryError: no usable run directory, or no room in it.
            OutOfMemory: the kernel has no memory for the ring.
            OutOfDescriptors: no more files may be opened here.
            MissingLibrary: `remote`, or the restricted serializer, without the extra.
        """
        raise NotImplementedError  # pragma: no cover - `__new__` gives a Writer

    def _begin(self, name: str, on_warning: Warn | None) -> None:
        self.name = name
        self._on_warning = check_on_warning(on_warning)
        self._new_lock()
        self._busy = False  # a call is under way
        self._attention = False  # something to see to before the next message
        self._closing = False
        self._state = Endpoint.NEW
        self._probe: Probe | None = None
        _endpoints.add(self)
        if on_warning is not None and (unknown := unknown_variables()):
            on_warning(f"no setting of queue {name!r} is called {', '.join(unknown)}")

    # ── making ───────────────────────────────────────────────────────────────────────────────────
    @staticmethod
    def create_from_handle(
        handle: Handle,
        rank: int,
        *,
        timeout: float | None = 60.0,
        poll_s: float = 0.0,
        on_warning: Warn | None = None,
    ) -> MessageQueue:
        """Attach as reader `rank`, on the writer's host or another. Needs nobody's attention at the writer.

        On the writer's host (`arena.peers.host.host_id`), where its run directory is in sight, memory is shared. From
        anywhere else the reader connects to the address in the handle; what it takes from there is its own memory,
        whatever `QueueConfig.views` says.

        Args:
            handle: what `export_handle` gave.
            rank: 0..n_reader-1, one process each. A rank whose process ended may be taken again; the new one
                takes part from the next message on.
            timeout: seconds to wait for the writer's process to answer; None for ever.
            poll_s: seconds for which each wait for a message polls, yielding its core, before it sleeps; by default as
                long as the gaps between messages make it worth while, 1 ms at most. Not on other hosts.
            on_warning: see `MessageQueue`.

        Raises:
            InvalidArgument: a rank, a timeout or a time to poll that is none.
            HandleMismatch: another version, another queue, a wrong secret.
            AttachRefused: no such rank, or it is taken.
            PeerDied: the writer is dead.
            QueueClosed: the queue is gone.
            QueueTimeout: the writer's process did not answer.
            OutOfDescriptors: no more files may be opened here.
            MissingLibrary: the reader is on another host and has not the extra ``remote``.
        """
        from arena.reader import Reader

        if not isinstance(handle, Handle):
            raise HandleMismatch(
                "that is not a queue's handle", expected="what export_handle() gave", found=type(handle).__name__
            )
        handle.check()
        poll_ns = check_poll(poll_s)
        with naming_descriptors(f"can't attach to queue {handle.name!r}"):
            if is_elsewhere(handle):
                from arena.remote.reader import RemoteReader

                return RemoteReader(handle, rank, timeout=timeout, on_warning=on_warning)
            return Reader(handle, rank, timeout=timeout, poll_ns=poll_ns, on_warning=on_warning)

    @staticmethod
    def create_from_process_group(
        group: torch.distributed.ProcessGroup | None,
        *,
        writer_rank: int = 0,
        config: QueueConfig | None = None,
        remote: RemoteConfig | str | None = None,
        timeout: float | None = None,
        on_warning: Warn | None = None,
    ) -> MessageQueue:
        """Collective over a torch.distributed group: `writer_rank` writes, the others read.

        Readers get ranks 0..world-2 in group order, the writer left out. Who shares memory with the writer is tried
        out; the others connect to `remote`, an address of the writer's host. Without it that is the one by which the
        writer reaches ``MASTER_ADDR``, as torchrun sets it. Returns when everybody is attached.

        Raises:
            InvalidArgument: ranks are on other hosts, and there is no address for them.
            QueueTimeout: somebody is missing after `timeout` seconds.
        """
        from arena.group import create_from_process_group

        return create_from_process_group(
            group, writer_rank=writer_rank, config=config, remote=remote, timeout=timeout, on_warning=on_warning
        )

    # ── verbs ────────────────────────────────────────────────────────────────────────────────────
    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send an object to every reader. Returns when it is in shared memory.

        Readers see the bytes as they were at this call, whatever becomes of them after it; a tensor from `lend`
        is the one exception.

        Args:
            obj: anything picklable. CPU tensors, numpy arrays and other large buffers are copied once, into shared
                memory, and reach the readers without a further copy. A GPU tensor is copied there by its GPU, behind
                what is queued on the current stream, and reaches the readers as a CPU tensor.
            timeout: seconds to wait for a slot; None waits as long as it takes.

        Raises:
            QueueTimeout: the slowest reader did not release a slot in time. Nothing was sent.
            PeerDied: a reader died since the last call (once per death). Nothing was sent; calling again goes on
                without it.
            NoReader: nobody is left.
            MessageTooLarge: above ``max_message_bytes``.
            EncodeFailed: the object can't be pickled.
            QueueClosed: this end was shut down.
        """
        raise self._wrong_end("enqueue", "writer")

    def dequeue(self, timeout: float | None = None) -> Any:
        """Take the next message.

        Tensors in it are views of shared memory (see `QueueConfig.views`); the memory is given back when the last
        view of it dies, be that a slice, a Parameter or a numpy alias.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            QueueTimeout: no message came in time. The next call waits for the same one.
            PeerDied: the writer died, and everything it published has been taken.
            QueueClosed: the writer shut the queue down, and everything was taken; or this end was shut down.
            CorruptFrame: shared memory was overwritten by something else.
            DecodeFailed: unpickling raised. The message is consumed.
        """
        raise self._wrong_end("dequeue", "reader")

    def dequeue_to(
        self, device: torch.device | str | int, timeout: float | None = None, *, stream: Any = None, shard: Any = None
    ) -> Any:
        """Take the next message, with its tensors on a device: `dequeue` and `to_device` in one.

        Large tensors arrive sooner by it: once a reader has called this, the writer publishes them before it has copied
        them to shared memory, and the device follows that copy (`arena.filling`). So it takes about the longer one of
        the two copies, instead of their sum. It needs the tensor's segment to be pinned here already; else, and for
        all other tensors, this is no different from the two calls. A message that the writer gave up half-way is
        skipped, as one in fragments is.

        Args:
            device: where to.
            timeout: as for `dequeue`; also for the writer to finish what it has begun.
            stream: as for `to_device`.
            shard: as for `to_device`.

        Raises:
            as `dequeue` and `to_device`; PeerDied also if the writer died while it copied: that message was not sent.
        """
        return self.to_device(self.dequeue(timeout), device, stream, shard=shard)

    def to_device(
        self, message: Any, device: torch.device | str | int, stream: Any = None, *, shard: Any = None
    ) -> Any:
        """The message with its tensors on a device, at the speed of its own copy engine where their memory is pinned.

        The original may be dropped at once: its blocks go back when the copies have passed. Dicts, lists, tuples and
        dataclasses are made anew around the tensors, all else is the same object. A copy is ordered like any work on
        its stream; whoever uses the result on another one has to wait, as always in torch.

        Args:
            message: a tensor, or anything with tensors in it.
            device: where to.
            stream: on which the copies are queued; by default the calling thread's current one of that device.
            shard: an `arena.AllReduce`, or a process group of torch's, of readers that all move this message, each to a
                GPU of its own: of a large contiguous tensor each copies a part, and gets the rest from the others
                (`arena.shard`). Collective, in the order of the messages and of the tensors in them.

        Raises:
            InvalidArgument: a graph is being captured on that stream; `shard` is no group, or one for another device.
            PinFailed: a segment can't be pinned, and ``pin="required"``.
        """
        raise self._wrong_end("to_device", "reader")

    def broadcast_object(self, obj: object = None) -> Any:
        """`enqueue` at the writer, `dequeue` at a reader; returns the object at both."""
        raise NotImplementedError

    def lend(self, shape: Any, dtype: torch.dtype, *, or_private: bool = False) -> AbstractContextManager[torch.Tensor]:
        """A tensor born in shared memory, so that enqueueing it copies nothing.

        After `enqueue` it belongs to the readers: writing to it changes what they see.

        Args:
            shape: sizes, as for `torch.empty`.
            dtype: the element type.
            or_private: where there is no room, give ordinary memory (counted) rather than raise.

        Raises:
            InvalidArgument: no tensor has that shape, or the type is none of torch's.
            OutOfMemory: there is no room in the arena.
        """
        raise self._wrong_end("lend", "writer")

    def heartbeat(self) -> None:
        """Say from inside long work that this process is busy, not hung. Costs a fraction of a microsecond."""
        if self._probe is not None:
            self._probe.progress(time.monotonic_ns())

    def export_handle(self) -> Handle:
        """What a reader needs to attach. Small and picklable; holds the queue's secret."""
        raise self._wrong_end("export_handle", "writer")

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every expected reader has attached. Collective, but not needed before `enqueue`.

        Raises:
            QueueTimeout: names who is missing.
        """
        raise NotImplementedError

    def statistics(self) -> Statistics:
        """A snapshot; never waits for anybody."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Leave. On the writer it closes the queue; on a reader it leaves it. Any thread may call it, twice too.

        Whoever waits at either end is woken. Readers still get what was published; tensors stay valid until
        their last view dies. Of two threads that call it at once, neither returns before this end is closed, or a
        second is over: a process whose main thread came second may exit, and a daemon thread that came first would be
        cut off.
        """
        if self._state is Endpoint.FORKED:
            return
        if self._state is not Endpoint.CLOSED:
            self._closing = self._attention = True
            self._say_closing()
        if self._lock.acquire(timeout=1.0):
            try:
                if not self._busy:
                    self._finish()
            finally:
                self._lock.release()

    # ── for the two ends ─────────────────────────────────────────────────────────────────────────
    # The verbs take the lock by hand: `with` costs twice as much as two bound calls. CPython delivers signals only
    # after calls and at loop ends, so between the verb's last call and `_release` there is no gap; everything
    # before is inside its `try`, and `_leave` knows whether the lock was taken.
    # From CPython 3.12 on, a conditional jump back to a loop's head is in no `try` and no `with` of its own function:
    # a Ctrl-C there would leave the lock behind. So a loop in one ends in a plain statement, or is in a function of its
    # own; `tests/test_interrupts.py` sees to it.
    def _new_lock(self) -> None:
        self._lock = HeldLock()
        self._acquire = self._lock.acquire
        self._release = self._lock.release

    def _contend(self, timeout: float | None) -> None:
        """Another thread is in a call: wait for it."""
        if not self._acquire(timeout=-1 if timeout is None else check_timeout(timeout) or 0.0):
            raise QueueTimeout(
                f"another thread uses queue {self.name!r}",
                expected="its call to end within the timeout",
                remedy="nothing was sent or taken; allow more time, or use one endpoint per thread",
            )

    def _enter(self) -> None:
        """Begin a call, for which something is to be seen to first. A signal handler's call is refused from now on."""
        try:
            self._refuse_use()
        except ReentrantUse as error:
            error.fresh = True
            raise
        self._busy = True

    def _leave(self, error: BaseException) -> None:
        """A verb failed: count it, and let go of what it held."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            return
        if isinstance(error, ReentrantUse) and error.fresh:
            error.fresh = False  # the outer call still runs; should this come by again, it ends by it
        else:
            self._busy = False
            if self._state is not Endpoint.FORKED:  # where the memory to count in is not mapped
                if isinstance(error, ArenaError):
                    self._count_error(error)
                if self._closing:
                    self._finish()
        self._release()

    def _count_error(self, error: ArenaError) -> None:
        raise NotImplementedError

    def _say_closing(self) -> None:
        """Tell the peers, and wake every waiter of this end."""
        raise NotImplementedError

    def _release_everything(self) -> None:
        """Give back what the endpoint holds. Called once."""
        raise NotImplementedError

    def _finish(self) -> None:
        """The last one out closes the door: the call under way, or else `shutdown` itself."""
        if self._state is not Endpoint.CLOSED:
            self._state = move(self._state, "close")
            self._attention = True  # the next call must be refused
            self._release_everything()
            self._forget_parts()

    def _refuse_use(self) -> None:
        """Raise if this endpoint can't be used now. Called with the lock held."""
        if self._busy:
            raise ReentrantUse(
                f"queue {self.name!r} was used from inside one of its own calls",
                expected="one call at a time in a thread",
                found="a call from a __reduce__, a signal handler or a finaliser",
                remedy="collect what to send and send it after the call",
            )
        self._refuse_forked()
        if self._closing:
            if self._state is not Endpoint.CLOSED:
                self._finish()
            raise self._closed()

    def _refuse_forked(self) -> None:
        """Raise in a forked child, where the endpoint's memory is not mapped."""
        if self._state is Endpoint.FORKED:
            raise UseAfterFork(
                f"queue {self.name!r} was inherited through fork",
                expected="use by the process that made this endpoint",
                found=f"process {os.getpid()}",
                remedy="attach in the child with create_from_handle",
            )

    def _closed(self) -> QueueClosed:
        return QueueClosed(f"queue {self.name!r} was shut down by this end")

    def _wrong_end(self, verb: str, end: str) -> WrongEnd:
        return WrongEnd(
            f"only the {end} of a queue can {verb}",
            expected=f"the {end}'s end of {self.name!r}",
            found=f"the {'reader' if end == 'writer' else 'writer'}'s",
        )

    def _warn(self, text: str) -> None:
        if self._on_warning is not None:
            self._on_warning(text)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"queue {self.name!r} can't be pickled; send what export_handle() gives, and attach with create_from_handle"
        )

    def __enter__(self) -> MessageQueue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        """Dropped without `shutdown`: the same, and a ResourceWarning, as for a file.

        The others would wait for ever for what nobody can read or send any more. Not at the interpreter's end: that of
        the process tells them.
        """
        if getattr(self, "_state", Endpoint.NEW) in _AT_WORK and not sys.is_finalizing():
            try:
                warnings.warn(f"dropped without shutdown(): {self!r}", ResourceWarning, stacklevel=2, source=self)
            finally:
                self.shutdown()

    def _keep_parts(self, *parts: object) -> None:
        """Keep what a shutdown touches, none of which may refer to this end, until it has been.

        Python takes garbage in circles apart in any order, and the memory may be unmapped before its end is dropped.
        """
        _kept[id(self)] = parts

    def _forget_parts(self) -> None:
        _kept.pop(id(self), None)


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same bound method, for parts of its object to call: it does not keep that alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = reference()
        assert found is not None, "its object calls its parts"
        return found(*args)

    return call


_AT_WORK: Final = (Endpoint.WORKING, Endpoint.WAITING, Endpoint.GATE)
_endpoints: weakref.WeakSet[MessageQueue] = weakref.WeakSet()
_kept: dict[int, tuple[object, ...]] = {}


def _note_fork() -> None:
    _kept.clear()
    for endpoint in list(_endpoints):
        endpoint._state = Endpoint.FORKED
        endpoint._attention = True
        endpoint._probe = None
        endpoint._new_lock()
        endpoint._busy = False


os.register_at_fork(after_in_child=_note_fork)
