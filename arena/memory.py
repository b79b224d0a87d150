"""Shared memory and its ordering: the only home of its addresses, of futexes and of fences.

A *segment* is a memfd: no /dev/shm limit applies to it (containers give 64 MiB there), SIGKILL leaves
nothing behind, and it is sealed against shrinking, so a peer can't turn our loads into SIGBUS. After its
owner has mapped it, ``F_SEAL_FUTURE_WRITE`` makes the kernel refuse every other writable mapping.

*Words.* One aligned 64-bit word per shared value, one store. ``struct.pack_into`` zeroes its target first,
so a concurrent reader sees a value never written (5.7 M of 27 M reads, measured); an item of a
``memoryview.cast("Q")`` is one 8-byte move, and never tore.

*Order.* ``words[i]`` is a load-acquire and ``words[i] = n`` a store-release:

- x86-64 keeps stores in order and loads in order (Intel SDM vol. 3, 9.2.3.2), so the cast memoryview
  already is that object. Only a load may pass an earlier store; where that matters (parking), `fence`
  takes an uncontended lock, which is a locked read-modify-write in every CPython.
- aarch64 reorders freely. There `FencedWords` puts ``dmb ish`` after each load and before each store. The
  instruction is reached through eight bytes of machine code (`arena.machine_code`).

*Lifetime.* A mapping lives exactly as long as the last buffer taken from it: every memoryview keeps the
ctypes object it was made of, and the range is unmapped when that object dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap as _mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from arena import layout, machine_code
from arena.errors import CorruptFrame, OutOfMemory, UnsupportedPlatform
from arena.machine_code import MACHINE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_syscall = _libc.syscall

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}.get(MACHINE)
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MAP_FIXED_NOREPLACE: Final = 0x100000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MADV_DONTFORK: Final = 10
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25

_F_ADD_SEALS: Final = 1033
_SEAL_SEAL: Final = 0x1
_SEAL_SHRINK: Final = 0x2
_SEAL_GROW: Final = 0x4
_SEAL_FUTURE_WRITE: Final = 0x10


class Words(Protocol):
    """Shared 64-bit words: loads acquire, stores release."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


# ── order ────────────────────────────────────────────────────────────────────────────────────────
def _x86_fence() -> Callable[[], None]:
    new_lock = threading.Lock

    def fence() -> None:
        new_lock().acquire()  # one of its own: a shared one that an interrupt left locked would be waited for for ever

    return fence


def _aarch64_fence() -> Callable[[], None]:
    """See the head of this file for why this is enough."""
    return ctypes.PYFUNCTYPE(None)(machine_code.executable(machine_code.FULL_BARRIER_AARCH64))


def _make_fence() -> Callable[[], None]:
    if MACHINE == "x86_64":
        return _x86_fence()
    if MACHINE == "aarch64":
        return _aarch64_fence()
    raise UnsupportedPlatform(
        "Arena has no memory fence for this architecture",
        expected="x86_64 or aarch64",
        found=MACHINE,
        remedy="run on one of these; a queue without fences would lose or tear messages",
    )


fence: Callable[[], None] = _make_fence()
"""A full barrier: no load below it is done before a store above it is visible."""

UNLOCK_IS_A_FENCE: Final = MACHINE == "x86_64"
"""Releasing a ``threading`` lock already is a full barrier here, so the hot path need not call `fence`."""


class FencedWords:
    """Words on an architecture that reorders: a barrier after each load, before each store."""

    __slots__ = ("_fence", "_words")

    def __init__(self, words: memoryview, barrier: Callable[[], None]) -> None:
        self._words = words
        self._fence = barrier

    def __getitem__(self, index: int) -> int:
        value: int = self._words[index]
        self._fence()
        return value

    def __setitem__(self, index: int, value: int) -> None:
        self._fence()
        self._words[index] = value


def ordered_words(words: memoryview) -> Words:
    """`words` (a cast "Q" memoryview) as ordered words for this architecture."""
    return words if UNLOCK_IS_A_FENCE else FencedWords(words, fence)


# ── futexes ──────────────────────────────────────────────────────────────────────────────────────
class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Futex:
    """The low half of a shared word as a futex. Works on a read-only mapping; never the private kind."""

    __slots__ = ("_address", "_buffer", "_timeout", "_timeout_ref")

    def __init__(self, buffer: memoryview, address: int) -> None:
        self._buffer = buffer  # keeps the mapping alive for as long as somebody may sleep on it
        self._address = ctypes.c_void_p(address)
        self._timeout = _Timespec()
        self._timeout_ref = ctypes.byref(self._timeout)

    def wait(self, expected: int, timeout_ns: int) -> bool:
        """Sleep while the word's low half equals that of `expected`; False when the timeout ended it."""
        self._timeout.seconds, self._timeout.nanoseconds = divmod(timeout_ns, 1_000_000_000)
        if _syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, expected & 0xFFFFFFFF, self._timeout_ref, None, 0) == 0:
            return True
        return ctypes.get_errno() != errno.ETIMEDOUT

    def wake(self) -> None:
        """Wake everybody who sleeps on the word."""
        _syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


# ── mappings ─────────────────────────────────────────────────────────────────────────────────────
_writable_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()


def unmap(address: int, nbytes: int) -> None:
    """End a mapping. For whoever took that over with `Mapping.leave_unmapping_to`; all others just drop its buffers."""
    _libc.munmap(address, nbytes)


def _os_error(summary: str) -> OutOfMemory:
    code = ctypes.get_errno()
    return OutOfMemory(summary, found=os.strerror(code), remedy="free memory or raise the limit that refused it")


class Mapping:
    """One mapped range of a segment, unmapped when the last buffer taken from it is gone."""

    __slots__ = ("__weakref__", "_buffer_type", "_root", "_unmapping", "address", "nbytes", "writable")

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        self.nbytes = nbytes
        self.writable = writable
        self.address = _map_aligned(fd, nbytes, writable=writable)
        # A type per mapping: ctypes has no array type without a length, and only a Python subclass can
        # carry attributes and weak references.
        buffer_type: Any = type("SharedBytes", (ctypes.c_ubyte * nbytes,), {})
        self._buffer_type = buffer_type
        self._root = buffer_type.from_address(self.address)
        self._unmapping = weakref.finalize(self._root, unmap, self.address, nbytes)
        self._unmapping.atexit = False
        if writable:
            # A forked child must not be able to write a frame; see `_hold_inherited_ranges`.
            _libc.madvise(self.address, nbytes, _MADV_DONTFORK)
            _writable_mappings.add(self)

    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview:
        """Bytes of the mapping; read-only unless the mapping is writable."""
        end = self._checked(offset, self.nbytes - offset if nbytes is None else nbytes)
        view = memoryview(self._root).cast("B")[offset:end]
        return view if self.writable else view.toreadonly()

    def raw_words(self, offset: int, count: int) -> memoryview:
        """Unordered 64-bit words: for private tables and for what a later ordered store publishes."""
        return self.view(offset, count * layout.WORD).cast("Q")

    def words(self, offset: int, count: int) -> Words:
        """Ordered 64-bit words."""
        return ordered_words(self.raw_words(offset, count))

    def futex(self, offset: int) -> Futex:
        """The word at byte `offset` as a futex."""
        self._checked(offset, layout.WORD)
        return Futex(self.view(offset, layout.WORD), self.address + offset)

    def export(self, offset: int, nbytes: int, on_death: Callable[..., object], *args: object) -> memoryview:
        """Bytes whose last view's death calls ``on_death(*args)``; for tensors over shared memory.

        The view is writable for torch's sake, which refuses read-only buffers; the mapping is what protects
        the bytes. The callback runs wherever the last reference dies, so it must not block, lock or raise.
        """
        view, owner = self.exported(offset, nbytes)
        weakref.finalize(owner, on_death, *args).atexit = False
        return view

    def exported(self, offset: int, nbytes: int) -> tuple[memoryview, Any]:
        """The same, and an object that dies with the last view: for whoever wants to hold a weak reference to it."""
        end = self._checked(offset, nbytes)
        owner = self._buffer_type.from_address(self.address)
        owner.mapped = self._root
        return memoryview(owner).cast("B")[offset:end], owner

    def leave_unmapping_to(self, take: Callable[..., object]) -> None:
        """When the last buffer goes, call ``take(address, nbytes)`` instead of unmapping: it is to do that then.

        For pages that a device knows of. `take` runs wherever that buffer dies, so it must not block, lock or raise.
        """
        ours, self._unmapping = self._unmapping, weakref.finalize(self._root, take, self.address, self.nbytes)
        self._unmapping.atexit = False
        ours.detach()

    @property
    def root(self) -> object:
        """What keeps the range mapped, for whoever has to keep it so without a buffer."""
        return self._root

    def collapse(self, offset: int, nbytes: int) -> bool:
        """Back the range with huge pages, zeroed; False where the kernel can't (the range works all the same).

        One touch per huge page and MADV_COLLAPSE beats faulting every small page by 3 to 5 times (measured).
        Both ends must be multiples of 2 MiB.
        """
        touch = memoryview(self._root).cast("B")
        for position in range(offset, offset + nbytes, layout.HUGE_PAGE):
            touch[position] = 0
        return bool(_libc.madvise(self.address + offset, nbytes, _MADV_COLLAPSE) == 0)

    def populate(self, offset: int, nbytes: int) -> bool:
        """Fault the range's pages in now rather than at first use."""
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        return bool(_libc.madvise(self.address + offset, nbytes, advice) == 0)

    def _checked(self, offset: int, nbytes: int) -> int:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CorruptFrame(
                "a reference points outside its segment",
                expected=f"a range inside 0..{self.nbytes}",
                found=f"{nbytes} bytes at {offset}",
                remedy="the peer is broken or foreign; shut the queue down and start both ends anew",
            )
        return offset + nbytes


def _map_aligned(fd: int, nbytes: int, *, writable: bool) -> int:
    """Map `fd` shared at a 2 MiB boundary: huge pages need address and offset aligned alike."""
    protection = _mmap.PROT_READ | (_mmap.PROT_WRITE if writable else 0)
    align = layout.HUGE_PAGE if nbytes >= layout.HUGE_PAGE else layout.PAGE
    span = layout.round_up(nbytes, layout.PAGE)
    reserve_flags = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved = _libc.mmap(None, span + align, 0, reserve_flags, -1, 0)
    if reserved in (None, _MAP_FAILED):
        raise _os_error(f"no address space for {nbytes} bytes")
    start = layout.round_up(reserved, align)
    address = _libc.mmap(start, span, protection, _mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    failed = address in (None, _MAP_FAILED)
    code = ctypes.get_errno()
    if start > reserved:
        _libc.munmap(reserved, start - reserved)
    tail = reserved + span + align - (start + span)
    if tail:
        _libc.munmap(start + span, tail)
    if failed:
        _libc.munmap(start, span)
        ctypes.set_errno(code)
        raise _os_error(f"the kernel refused to map {nbytes} bytes of shared memory")
    return start


def _hold_inherited_ranges() -> None:
    """In a forked child: put an inaccessible page range where each writable mapping was.

    The kernel did not copy those ranges (MADV_DONTFORK), but the child's Python objects still believe in
    them and will unmap them one day. Left empty, somebody else's mapping could be in that place by then.
    """
    for mapping in list(_writable_mappings):
        flags = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
        _libc.mmap(mapping.address, layout.round_up(mapping.nbytes, layout.PAGE), 0, flags, -1, 0)


_forks = 0


def fork_epoch() -> int:
    """A number that differs in a forked child: what was set up under another one is the parent's business."""
    return _forks


def _after_fork() -> None:
    global _forks  # noqa: PLW0603 - one number for the process, as forks are
    _forks += 1
    _hold_inherited_ranges()


os.register_at_fork(after_in_child=_after_fork)


_LABEL_BYTES: Final = 249  # the kernel takes no longer name of a memfd, which is for whoever looks into /proc


# ── segments ─────────────────────────────────────────────────────────────────────────────────────
class Segment:
    """A memfd and this process's mapping of it. `close` drops the fd; the mapping goes with its last buffer."""

    __slots__ = ("fd", "mapping", "nbytes")

    def __init__(self, fd: int, mapping: Mapping) -> None:
        self.fd = fd
        self.mapping = mapping
        self.nbytes = mapping.nbytes

    @classmethod
    def create(cls, name: str, nbytes: int, *, peers_may_write: bool = False) -> Segment:
        """A new sealed segment, writable here and, unless `peers_may_write`, nowhere else."""
        fd = -1
        try:
            label = f"arena:{name}".encode(errors="replace")[:_LABEL_BYTES].decode(errors="ignore")
            fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, nbytes)
            mapping = Mapping(fd, nbytes, writable=True)
            seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL
            fcntl.fcntl(fd, _F_ADD_SEALS, seals if peers_may_write else seals | _SEAL_FUTURE_WRITE)
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.EFBIG, errno.ENOSPC, errno.ENOMEM):
                raise OutOfMemory(
                    f"the system refused a segment of {nbytes} bytes",
                    expected="a memfd of that size",
                    found=error.strerror or str(error),
                    remedy="free memory, or raise the limit that refused it (ulimit -f)",
                ) from error
            raise
        return cls(fd, mapping)

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, writable: bool = False) -> Segment:
        """Map a segment received from a peer, after checking that it is what the peer said. Takes over `fd`."""
        try:
            size = os.fstat(fd).st_size
            if size != nbytes or nbytes <= 0:
                raise CorruptFrame(
                    "a segment is not as large as its owner said",
                    expected=f"{nbytes} bytes",
                    found=f"{size} bytes",
                    remedy="the peer is broken or foreign; shut the queue down and start both ends anew",
                )
            if not fcntl.fcntl(fd, 1034) & _SEAL_SHRINK:  # F_GET_SEALS: an unsealed file could shrink under us
                raise CorruptFrame(
                    "a segment is not sealed",
                    expected="F_SEAL_SHRINK on every segment",
                    found="a file that its owner may still truncate",
                    remedy="the peer is broken or foreign; shut the queue down and start both ends anew",
                )
            return cls(fd, Mapping(fd, nbytes, writable=writable))
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the fd, once. Buffers already taken stay valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


# ── room ─────────────────────────────────────────────────────────────────────────────────────────
def headroom_bytes() -> int:
    """Bytes that may still be taken before the host or this process's cgroup runs out of memory."""
    return min(_available_bytes(), *_cgroup_headrooms())


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 1 << 62


def _cgroup_headrooms() -> Iterator[int]:
    yield 1 << 62
    for limit_path, usage_path in _cgroup_files():
        try:
            with open(limit_path) as limit_file, open(usage_path) as usage_file:
                limit = limit_file.read().strip()
                if limit != "max":
                    yield max(0, int(limit) - int(usage_file.read()))
        except (OSError, ValueError):
            continue


def _cgroup_files() -> Iterator[tuple[str, str]]:
    """Limit and usage files of this process's cgroup and its ancestors, version 2 then version 1."""
    try:
        with open("/proc/self/cgroup") as lines:
            entries = [line.strip().split(":", 2) for line in lines]
    except OSError:
        return
    for _, controllers, path in (entry for entry in entries if len(entry) == 3):
        if controllers == "":
            parts = [part for part in path.split("/") if part and part != ".."]
            for depth in range(len(parts), -1, -1):
                root = "/".join(["/sys/fs/cgroup", *parts[:depth]])
                yield f"{root}/memory.max", f"{root}/memory.current"
        elif "memory" in controllers.split(","):
            for root in (f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"):
                yield f"{root}/memory.limit_in_bytes", f"{root}/memory.usage_in_bytes"


# ── copies ───────────────────────────────────────────────────────────────────────────────────────
class _PyBuffer(ctypes.Structure):
    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.c_void_p]
_GIL_FREE_COPY_BYTES: Final = 1 << 16


def copy_bytes(target: memoryview, source: Any) -> None:
    """Copy a contiguous buffer into `target` (same length), without the GIL when that is worth a call.

    Slice assignment holds the GIL for the whole copy: 200 MB would stop every other thread for 20 ms.
    """
    if target.nbytes < _GIL_FREE_COPY_BYTES:
        target[:] = source
        return
    there, here = _PyBuffer(), _PyBuffer()
    _get_buffer(target, ctypes.byref(there), 1)
    try:
        _get_buffer(source, ctypes.byref(here), 0)
        try:
            if here.len != there.len:
                raise ValueError(f"copy of {here.len} bytes into {there.len}")
            ctypes.memmove(there.buf, here.buf, here.len)
        finally:
            _release_buffer(ctypes.byref(here))
    finally:
        _release_buffer(ctypes.byref(there))


def address_of(exporter: Any) -> int:
    """Where the memory of an object from `Mapping.exported` begins: its mapping's first byte."""
    return ctypes.addressof(exporter)


_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_view_of.restype = ctypes.py_object
_BUFFER_READ: Final = 0x100  # PyBUF_READ


def view_of(address: int, nbytes: int) -> memoryview:
    """Memory at `address`, read-only; the caller keeps it alive for as long as the view is used."""
    view: memoryview = _view_of(address, nbytes, _BUFFER_READ)
    return view


def copy_from(target: memoryview, address: int) -> None:
    """Fill `target` from memory at `address` that the caller keeps alive, without the GIL."""
    there = _PyBuffer()
    _get_buffer(target, ctypes.byref(there), 1)
    try:
        ctypes.memmove(there.buf, address, there.len)
    finally:
        _release_buffer(ctypes.byref(there))
