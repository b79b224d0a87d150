"""An asynchronous copy engine on the CPU: the executable specification of what the DMA gate guards against.

A *stream* is a thread that does what is queued, in order; streams overlap. A copy from registered memory is taken by
address when its turn comes, chunk by chunk and without the GIL, and keeps nothing alive: change the bytes too early
and it copies the changed ones, unmap them and the process dies, as it is with a real copy engine. A copy from other
memory waits for the stream and is done in the caller's thread, as a driver does it.

The stream of those who never made one does everything at once. So a CPU tensor that is "moved to the CPU" is simply
copied, and all that is asynchronous is there for whoever asks for it: the tests.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from arena.device import PinRefused, WordWriter

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES: Final = 64 << 10
_PATIENCE_S: Final = 60.0  # nobody waits for ever on a stream that was left held


class CpuPassage:
    """A point in a stream of this process."""

    __slots__ = ("_event",)

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def passed(self) -> bool:
        """See `arena.device.Passage`."""
        return self._event.is_set()

    def wait(self) -> None:
        """See `arena.device.Passage`."""
        if not self._event.wait(_PATIENCE_S):
            raise TimeoutError(f"a stream did not come to its point within {_PATIENCE_S:.0f} s")


class _Passages:
    """A point in several streams."""

    __slots__ = ("_all",)

    def __init__(self, passages: list[CpuPassage]) -> None:
        self._all = passages

    def passed(self) -> bool:
        """See `arena.device.Passage`."""
        return all([passage.passed() for passage in self._all])

    def wait(self) -> None:
        """See `arena.device.Passage`."""
        for passage in self._all:
            passage.wait()


class _Stopwatch:
    """When a stream came to two points of itself."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._times: list[int] = []

    def start(self) -> None:
        """See `arena.device.Stopwatch`."""
        self._stream.submit(self._note)

    def stop(self) -> None:
        """See `arena.device.Stopwatch`."""
        self._stream.submit(self._note)

    def elapsed_ns(self) -> int | None:
        """See `arena.device.Stopwatch`."""
        return self._times[1] - self._times[0] if len(self._times) == 2 else None

    def _note(self) -> None:
        self._times.append(time.monotonic_ns())


class _AtOnce:
    """The stream of those who never made one."""

    capturing = False

    def submit(self, job: Callable[[], object]) -> None:
        """Do it."""
        job()

    def record(self) -> CpuPassage:
        """Everything is over already."""
        event = threading.Event()
        event.set()
        return CpuPassage(event)


class CpuStream:
    """A stream. ``with stream:`` makes it the thread's current one.

    Attributes:
        capturing: set it to have the stream look like one that a graph is being captured on.
    """

    def __init__(self) -> None:
        self.capturing = False
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._outer: list[Any] = []
        self._closed = False
        _streams.append(self)
        self._thread = threading.Thread(target=self._run, name="arena-cpu-stream", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """Queue it."""
        self._jobs.put(job)

    def delay(self, seconds: float) -> None:
        """Queue a pause: the next copy's turn comes later."""
        self.submit(lambda: time.sleep(seconds))

    def hold(self) -> threading.Event:
        """Queue a pause that lasts until the event is set."""
        gate = threading.Event()
        self.submit(lambda: gate.wait(_PATIENCE_S))
        return gate

    def record(self) -> CpuPassage:
        """The point the stream has come to."""
        event = threading.Event()
        if self._closed:
            self._thread.join()  # it may still be at what was queued, and nobody would set the event
            event.set()
        self.submit(event.set)
        return CpuPassage(event)

    def store(self, address: int, number: int) -> None:
        """Queue a store of 64 bits, which asks nobody whether the memory is still there."""
        if self._closed:
            self._thread.join()
            _store(address, number)
        else:
            self.submit(partial(_store, address, number))

    def synchronize(self) -> None:
        """Wait for everything that is queued."""
        self.record().wait()

    def __enter__(self) -> CpuStream:
        self._outer.append(_current())
        _of_thread.stream = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _of_thread.stream = self._outer.pop()

    def close(self) -> None:
        """End it, after what is queued. Once no stream is left, the engine is not in use."""
        self._closed = True
        self.submit(_nothing)
        _streams.remove(self)

    def _run(self) -> None:
        while not self._closed or not self._jobs.empty():
            self._jobs.get()()


class CpuCopies:
    """See `arena.device.Copies`.

    Attributes:
        faults: what the next registrations will be refused for, one each; None lets one through.
        stuck: unregistering fails while this is set.
        lockable_bytes: how much may be registered in all.
        registered: what is registered now, by address, with its length.
        writes_words: clear it to have the engine be one that can't.
    """

    kind = "cpu"

    def __init__(self) -> None:
        self.faults: deque[str | None] = deque()
        self.stuck = False
        self.lockable_bytes = 1 << 40
        self.registered: dict[int, int] = {}
        self.writes_words = True
        self.before_register: Callable[[], object] = lambda: None

    def in_use(self) -> bool:
        """Since somebody made a stream."""
        return is_initialized()

    def enter_helper(self) -> None:
        """Nothing is a matter of the thread here."""

    def current_stream(self, device: torch.device | None = None) -> Any:
        """See `arena.device.Copies`."""
        stream = _current()
        return None if stream is _at_once else stream

    def is_capturing(self, stream: Any) -> bool:
        """See `arena.device.Copies`."""
        return stream is not None and bool(stream.capturing)

    def record(self, stream: Any) -> CpuPassage:
        """See `arena.device.Copies`."""
        passage: CpuPassage = (stream or _at_once).record()
        return passage

    def record_everything(self) -> _Passages:
        """See `arena.device.Copies`."""
        return _Passages([stream.record() for stream in list(_streams)])

    def stopwatch(self, stream: Any) -> _Stopwatch:
        """See `arena.device.Copies`."""
        return _Stopwatch(stream or _at_once)

    def to_device(self, source: torch.Tensor, device: torch.device, stream: Any, *, pinned: bool) -> torch.Tensor:
        """See `arena.device.Copies`."""
        import torch

        kept = source.resolve_conj().resolve_neg().contiguous()
        made = torch.empty(kept.shape, dtype=kept.dtype, device="cpu")
        nbytes, address, target = kept.numel() * kept.element_size(), kept.data_ptr(), made.data_ptr()
        if not (self._is_registered(address, nbytes) and pinned):
            (stream or _at_once).record().wait()
            _move(target, address, nbytes)
        elif address == source.data_ptr():
            (stream or _at_once).submit(partial(_move, target, address, nbytes, made))
        else:
            (stream or _at_once).submit(partial(_move, target, address, nbytes, made, kept))
        return made

    def room(self, nbytes: int, device: torch.device, stream: Any) -> torch.Tensor:
        """See `arena.device.Copies`."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy_bytes(self, source: torch.Tensor, target: torch.Tensor, stream: Any, *, pinned: bool) -> None:
        """See `arena.device.Copies`."""
        address, nbytes, there = source.data_ptr(), source.nbytes, target.data_ptr()
        if self._is_registered(address, nbytes) and pinned:
            (stream or _at_once).submit(partial(_move, there, address, nbytes, target))
        else:
            (stream or _at_once).record().wait()
            _move(there, address, nbytes)

    def behind(self, stream: Any) -> AbstractContextManager[Any]:
        """See `arena.device.Copies`. The CPU's collectives read at once, so it must be over."""
        (stream or _at_once).record().wait()
        return nullcontext()

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `arena.device.Copies`."""
        _current().record().wait()
        target.copy_(source)

    def register(self, address: int, nbytes: int, *, writable: bool) -> None:
        """See `arena.device.Copies`."""
        self.before_register()
        fault = self.faults.popleft() if self.faults else None
        if fault is not None:
            raise PinRefused(fault, "as the test asked for")
        if any([begin < address + nbytes and address < begin + n for begin, n in self.registered.items()]):
            raise PinRefused("already_registered", f"part of the {nbytes} bytes at {address:#x} is registered")
        if sum(self.registered.values()) + nbytes > self.lockable_bytes:
            raise PinRefused("memlock_limit", f"{nbytes} bytes more than may be locked")
        self.registered[address] = nbytes

    def word_writer(self, stream: Any, address: int, offset: int) -> WordWriter | None:
        """See `arena.device.Copies`."""
        if not self.writes_words or offset >= self.registered.get(address, 0):
            return None

        def write(number: int) -> bool:
            if self.writes_words:
                stream.store(address + offset, number)
            return self.writes_words

        return write

    def unregister(self, address: int) -> None:
        """See `arena.device.Copies`."""
        if self.stuck:
            raise PinRefused("driver", "as the test asked for")
        del self.registered[address]

    def _is_registered(self, address: int, nbytes: int) -> bool:
        """Whether all of it is, in one range.

        Raises:
            RuntimeError: only part of it is. A real device refuses such a copy as well, even an ordinary one.
        """
        end = address + nbytes
        touched = [(begin, begin + n) for begin, n in self.registered.items() if begin < end and address < begin + n]
        if any([begin > address or end > after for begin, after in touched]):
            raise RuntimeError(f"invalid argument: {nbytes} bytes at {address:#x} are not in one registered range")
        return bool(touched)


COPIES: Final = CpuCopies()

_streams: list[CpuStream] = []
_of_thread = threading.local()
_at_once: Final = _AtOnce()


def is_initialized() -> bool:
    """Whether this process uses the engine: since somebody made a stream. By torch's name for it."""
    return bool(_streams)


def _current() -> Any:
    return getattr(_of_thread, "stream", _at_once)


def _move(target: int, source: int, nbytes: int, *kept: object) -> None:
    """Copy; `kept` lives until then. The source is never in it."""
    for at in range(0, nbytes, _CHUNK_BYTES):
        ctypes.memmove(target + at, source + at, min(_CHUNK_BYTES, nbytes - at))


def _store(address: int, number: int) -> None:
    ctypes.c_uint64.from_address(address).value = number


def _nothing() -> None:
    pass


def _after_fork() -> None:
    """The child has none of the threads, and nothing registered."""
    _streams.clear()
    _of_thread.stream = _at_once
    COPIES.registered.clear()


os.register_at_fork(after_in_child=_after_fork)
