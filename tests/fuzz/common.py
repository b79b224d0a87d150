"""What all fuzzed parsers share: a queue with its reader, names of outcomes, checks, and memory that ends at a wall.

Python does not see a read beyond the end of memory that it was given an address of. So whatever is mapped here ends at
a page that nobody may touch, and what is handed to a parser ends there to the byte: one step beyond is a SIGSEGV, which
the harness tells.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from arena import MessageQueue, QueueConfig, layout, memory, wait

SLOT_BYTES = 4096
SLOTS = 8
SETTINGS: dict[str, Any] = {"slots": SLOTS, "slot_bytes": SLOT_BYTES, "segment_bytes": 1 << 18}
SETTINGS |= {"max_arena_bytes": 1 << 20, "max_message_bytes": 1 << 20}
Run = Callable[[bytes], str]

torch.set_num_threads(1)  # a forked child has lost OpenMP's threads, and would wait for them for ever


class Wrong(Exception):
    """Something came out that must not."""


_VARYING = re.compile(r"0x[0-9a-f]+|[0-9]+|'[^']*'|/\S+")


def name_of(error: Exception) -> str:
    """An outcome, with as much of what it says as tells one cause from another."""
    return f"{type(error).__name__}: {_VARYING.sub('', str(error)).partition(';')[0][:24]}"


@contextlib.contextmanager
def a_pair(**settings: Any) -> Iterator[tuple[Any, Any]]:
    """A queue and its only reader, in this process."""
    with (
        MessageQueue(1, config=QueueConfig(**{**SETTINGS, **settings})) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        yield queue, reader


def pairs_of(data: bytes, most: int = 16) -> list[tuple[int, int]]:
    """A case as places and what is written there."""
    words = memoryview(data[: min(len(data), 16 * most) // 16 * 16]).cast("Q")
    return list(zip(words[::2], words[1::2], strict=True))


@contextlib.contextmanager
def written(words: Any, changes: list[tuple[int, int]]) -> Iterator[None]:
    """Words as somebody else has left them; afterwards they are as before."""
    kept = []
    try:
        for place, value in changes:
            kept.append((place, words[place]))
            words[place] = value
        yield
    finally:
        for place, value in reversed(kept):
            words[place] = value


# ── walls ────────────────────────────────────────────────────────────────────────────────────────
_libc = memory._libc
_NOBODY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_FIXED = 0x10


class WalledBuffer:
    """Memory of up to so many bytes, whose last byte is the last before the wall."""

    def __init__(self, nbytes: int) -> None:
        span = layout.round_up(nbytes, layout.PAGE)
        start = _libc.mmap(None, span + layout.PAGE, 0, _NOBODY, -1, 0)
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        assert _libc.mmap(start, span, rights, _NOBODY | _FIXED, -1, 0) == start
        self._end = start + span
        self._most = nbytes
        self._kept: Any = None

    def put(self, data: bytes, align: int = 1) -> memoryview:
        """The data, read-only, right in front of the wall, or as near as its alignment lets it; until the next call."""
        data = data[: self._most]
        start = (self._end - len(data)) // align * align
        ctypes.memmove(start, data + b"\xee" * (self._end - start - len(data)), self._end - start)
        self._kept = (ctypes.c_ubyte * len(data)).from_address(start)
        return memoryview(self._kept).cast("B").toreadonly()

    def lend(self, data: bytes, align: int) -> memoryview:
        """The same, writable: as what is borrowed is."""
        self.put(data, align)
        return memoryview(self._kept).cast("B")


def prepare() -> None:
    """From now on what Arena maps in this process ends at a page that nobody may touch. Nobody is yielded to."""
    memory._map_aligned = _map_walled
    memory.unmap = _unmap_walled
    wait._sched_yield = lambda: None


def _map_walled(fd: int, nbytes: int, *, writable: bool) -> int:
    align = layout.HUGE_PAGE if nbytes >= layout.HUGE_PAGE else layout.PAGE
    span = layout.round_up(nbytes, layout.PAGE)
    reserved = _libc.mmap(None, span + align + layout.PAGE, 0, _NOBODY, -1, 0)
    if reserved in (None, memory._MAP_FAILED):
        raise memory._os_error(f"no address space for {nbytes} bytes")
    start = layout.round_up(reserved, align)
    end = start + span + layout.PAGE
    rights = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = _libc.mmap(start, span, rights, mmap.MAP_SHARED | _FIXED, fd, 0)
    for at, length in ((reserved, start - reserved), (end, reserved + span + align + layout.PAGE - end)):
        if length:
            _libc.munmap(at, length)
    if mapped in (None, memory._MAP_FAILED):
        _unmap_walled(start, nbytes)
        raise memory._os_error(f"the kernel refused to map {nbytes} bytes of shared memory")
    return start


def _unmap_walled(address: int, nbytes: int) -> None:
    _libc.munmap(address, layout.round_up(nbytes, layout.PAGE) + layout.PAGE)


# ── what may come out ────────────────────────────────────────────────────────────────────────────
def address_of(view: memoryview) -> int:
    """Where a view's first byte lies."""
    there = memory._PyBuffer()
    memory._get_buffer(view, ctypes.byref(there), 0)
    memory._release_buffer(ctypes.byref(there))
    return int(there.buf or 0)


def check_tensor(tensor: torch.Tensor) -> None:
    """Every element of it lies in its storage, and can be read."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return
    if tensor.numel():
        reach = tensor.storage_offset() + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if (reach + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise Wrong(
                f"a tensor of {tensor.shape} {tensor.stride()} beyond its {tensor.untyped_storage().nbytes()} bytes"
            )
        if tensor.numel() < 1 << 20 and not tensor.is_quantized and max(tensor.stride(), default=0) < 1 << 40:
            with contextlib.suppress(RuntimeError):  # strides next to 2^63 that nothing goes along: torch says no
                tensor.detach().clone(memory_format=torch.contiguous_format)


def parts_of(obj: object, depth: int = 3) -> Iterator[tuple[int, int, object]]:
    """The tensors and buffers of a message, each with the memory it lies in: address, bytes, itself."""
    if isinstance(obj, torch.Tensor):
        if obj.layout is torch.strided and obj.device.type == "cpu":
            storage = obj.untyped_storage()
            yield storage.data_ptr(), storage.nbytes(), obj
    elif isinstance(obj, memoryview):
        with contextlib.suppress(BufferError):
            yield address_of(obj), obj.nbytes, obj
    elif isinstance(obj, list | tuple | dict) and depth:
        for one in list(obj.values()) if isinstance(obj, dict) else obj:
            yield from parts_of(one, depth - 1)


def same(a: Any, b: Any) -> bool:
    """Whether two messages are equal, tensors too."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        alike = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return bool(alike and torch.equal(a.detach(), b.detach()))
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)
