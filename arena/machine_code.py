"""Instructions that Python has no name for, as bytes in a page of their own: there is no compiler at install time.

A page is written first and turned executable then, never both at once; the kernel makes it coherent with the caches of
instructions when it turns.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from functools import cache
from typing import Final

from arena.errors import UnsupportedPlatform

MACHINE: Final = {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())

FULL_BARRIER_AARCH64: Final = bytes.fromhex(
    "bf3b03d5"  # dmb ish
    "c0035fd6"  # ret
)

STREAM_X86_64: Final = bytes.fromhex(
    # rdi: to, on a multiple of 16 bytes; rsi: from; rdx: how many times 64 bytes, at least one
    "f30f6f06"  # again: movdqu xmm0, [rsi]
    "f30f6f4e10"  # movdqu xmm1, [rsi + 16]
    "f30f6f5620"  # movdqu xmm2, [rsi + 32]
    "f30f6f5e30"  # movdqu xmm3, [rsi + 48]
    "660fe707"  # movntdq [rdi], xmm0
    "660fe74f10"  # movntdq [rdi + 16], xmm1
    "660fe75720"  # movntdq [rdi + 32], xmm2
    "660fe75f30"  # movntdq [rdi + 48], xmm3
    "4883c640"  # add rsi, 64
    "4883c740"  # add rdi, 64
    "48ffca"  # dec rdx
    "75cd"  # jnz again
    "0faef8"  # sfence: such stores keep no order among others
    "c3"  # ret
)
"""Copies with stores that go past the caches (Intel SDM vol. 1, 10.4.6.2): the line that is overwritten is not read
first, and nothing else is pushed out of the caches. All of it is in SSE2, which every x86-64 has."""


def executable(code: bytes) -> int:
    """Where this code lies now, for good, to be called.

    Raises:
        UnsupportedPlatform: the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, anonymous, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise _refused("a page", ctypes.get_errno())
    ctypes.memmove(address, code, len(code))
    if libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC):
        error = ctypes.get_errno()
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))
        raise _refused("mprotect(PROT_EXEC)", error)
    return int(address)


def _refused(what: str, error: int) -> UnsupportedPlatform:
    return UnsupportedPlatform(
        "this system refuses executable pages",
        expected=f"{what} for a few instructions of Arena's",
        found=os.strerror(error),
        remedy="allow it for this process (SELinux execmem, systemd MemoryDenyWriteExecute)",
    )


@cache
def stream() -> Callable[[int, int, int], None] | None:
    """`STREAM_X86_64`, to be called without the GIL: (to, from, lines of 64 bytes). None where there is none."""
    if MACHINE != "x86_64":
        return None
    try:
        address = executable(STREAM_X86_64)
    except UnsupportedPlatform:
        return None
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(address)
