"""Copies of host memory that are too large for the caches: by a few threads, past the caches, in order.

torch copies with as many threads as it has been given: each core there is, or one, as engines do that run a process
for each GPU. They go on spinning when their part is done, for ten milliseconds and more; and each store first reads the
line that it overwrites. A queue's writer has readers that are to follow what is there already, on cores of their own,
and with devices that read the same memory. So here a few threads take one piece after the other, and store past the
caches where the machine can (`arena.machine_code`): the bytes are for devices and other processes. On the 16 cores
beside an H200 that fills 200 MB in 2.7 ms with 8 threads, where torch needs 5 with 16 and 10 with 4, and a device that
follows is done after 4.4 ms instead of 8.6 (tests/bench/RESULTS.md).

But where many threads of torch's are spinning, whoever else wants their cores waits for a turn, and the slowest piece
is the last: then they are the fastest to copy. `is_better` tells; on few cores ours always are.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from queue import SimpleQueue
from typing import Final

from arena import machine_code

PIECE_BYTES: Final = 2 << 20
"""What a thread takes at a time where others follow: the first ones are there early."""

_LARGE_PIECE_BYTES: Final = 4 << 20  # where nobody does: the GIL is asked for less often
_MOST_THREADS: Final = 10  # from here on, memory is what they wait for
_FEW_CORES: Final = 4  # one thread of ours copies as much as two or three of torch's
_LINE: Final = 64
_NAP_S: Final = 50e-6


def copy(to: int, at: int, nbytes: int) -> None:
    """Copy memory to memory that does not overlap it, without the GIL; both have to stay while this runs.

    Args:
        to, at: addresses.
        nbytes: how many, at least one.

    When this raises, because an interrupt came, nobody copies any more.
    """
    _Job(to, at, list(pieces(nbytes, _LARGE_PIECE_BYTES))).run(min(_cores(), _MOST_THREADS) - 1)


def copy_in_order(to: int, at: int, nbytes: int, reached: Callable[[int], None]) -> None:
    """The same, from the first byte to the last.

    Args:
        reached: called by the calling thread again and again, with how many bytes are there. When it raises, nobody
            copies any more, either.
    """
    parts = list(pieces(nbytes, PIECE_BYTES))
    helpers = min(_cores() * 5 // 8, _MOST_THREADS)  # the other cores are for those who follow
    if helpers > 1:
        _Job(to, at, parts).run(helpers, reached)
        return
    for begin, end in parts:
        _copy_piece(to + begin, at + begin, end - begin)
        reached(end)


def is_better(threads: int) -> bool:
    """Whether this is better now than so many threads of torch's: they are few, or half of the cores are free.

    What runs is what runs on the whole machine; on one with many cores that are not ours it errs on torch's side.
    """
    cores = _cores()
    return 2 * threads <= cores or cores <= _FEW_CORES or 2 * _running() <= cores


def pieces(nbytes: int, size: int) -> Iterator[tuple[int, int]]:
    """How that much is copied: (from, to) of each piece. The last two share what is left, so that none is a scrap."""
    begin = 0
    while nbytes - begin > 2 * size:
        yield begin, begin + size
        begin += size
    if nbytes - begin > size:
        half = begin + -(-(nbytes - begin) // 2 // _LINE) * _LINE
        yield begin, half
        begin = half
    yield begin, nbytes


def _copy_piece(to: int, at: int, nbytes: int) -> None:
    """By the calling thread."""
    stream = machine_code.stream()
    head = -to % _LINE
    lines = (nbytes - head) // _LINE
    if stream is None or lines <= 0:
        ctypes.memmove(to, at, nbytes)
        return
    if head:
        ctypes.memmove(to, at, head)
    stream(to + head, at + head, lines)
    done = head + lines * _LINE
    if done < nbytes:
        ctypes.memmove(to + done, at + done, nbytes - done)


class _Job:
    """One copy by several threads. Of two flags for each piece, the first says that a helper is at it, the second that
    nobody is any more."""

    def __init__(self, to: int, at: int, parts: list[tuple[int, int]]) -> None:
        self._to, self._at, self._parts = to, at, parts
        self._next = iter(range(len(parts)))  # each of its steps is one step for all threads
        self._begun, self._over = bytearray(len(parts)), bytearray(len(parts))
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._is_off = False
        self._error: BaseException | None = None

    def run(self, helpers: int, reached: Callable[[int], None] | None = None) -> None:
        """With helpers, and the calling thread's own hands; or by helpers alone, while it tells how far they are.

        However it ends, nobody copies any more then: memory that is given up is soon another's.
        """
        interrupt: BaseException | None = None
        try:
            called = self._call(helpers)
            if reached is None or not called:
                self._copy_too()
            if reached is not None:
                self._tell(reached)
            self._raise_if_failed()
        finally:
            self._is_off = True  # a store, and no call: no signal comes before it
            while True:
                try:
                    self._await_helpers()
                    break
                except BaseException as error:  # another one; it can wait for a piece to be over
                    interrupt = error
            if interrupt is not None:
                raise interrupt

    def _copy_too(self) -> None:
        for number in self._next:
            begin, end = self._parts[number]
            _copy_piece(self._to + begin, self._at + begin, end - begin)
            self._over[number] = 1
        while 0 in self._over:
            self._ended.get()

    def _tell(self, reached: Callable[[int], None]) -> None:
        for number, (_, end) in enumerate(self._parts):
            while not self._over[number]:
                self._ended.get()
            self._raise_if_failed()
            reached(end)

    def _await_helpers(self) -> None:
        while any([begun > over for begun, over in zip(self._begun, self._over, strict=True)]):
            time.sleep(_NAP_S)

    def _call(self, helpers: int) -> int:
        """Have so many help; how many do."""
        wanted, cores = min(helpers, len(self._parts)), frozenset(os.sched_getaffinity(0))
        for number in range(wanted):
            pool = _pool(cores)
            try:
                pool.submit(self._help)
            except RuntimeError:  # the interpreter is ending, and starts no thread any more
                return number
            except BaseException:  # with a thread half started, it would be waited for at the interpreter's end
                pool.shutdown(wait=False)
                _pool.cache_clear()
                raise
        return wanted

    def _help(self) -> None:
        for number in self._next:
            self._begun[number] = 1
            try:
                if not self._is_off:  # looked at with our flag up: either we are waited for, or we see it
                    begin, end = self._parts[number]
                    _copy_piece(self._to + begin, self._at + begin, end - begin)
            except BaseException as error:
                self._error = error
            self._over[number] = 1
            self._ended.put(None)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _running() -> int:
    """How many threads are on cores, or wait for one, on this machine; as many as there are cores if it won't say."""
    try:
        with open("/proc/loadavg") as load:
            return int(load.read().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):
        return _cores()


@cache
def _pool(cores: frozenset[int]) -> ThreadPoolExecutor:
    """This process's threads for callers on these cores, which they inherit; they begin when they are first needed."""
    return ThreadPoolExecutor(_MOST_THREADS, "arena-copy")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's
