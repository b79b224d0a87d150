"""What a figure depends on: the machine, and whether its kernel makes huge pages of shared memory on demand."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import mmap
import os
import platform
from pathlib import Path
from typing import Any

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; Python's mmap module has no name for it
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_FIXED, _MAP_PRIVATE_ANONYMOUS = 0x01, 0x10, 0x22


def facts() -> dict[str, Any]:
    """The facts that go with every report."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "numpy", "pyzmq", "iceoryx2", "vllm")},
        "madvise_collapse": collapse_works(),
    }


def collapse_works() -> bool:
    """Whether MADV_COLLAPSE succeeds here on shared memory; tried, because no setting alone tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    reserved_bytes = 2 * _HUGE_PAGE_BYTES
    descriptor = os.memfd_create("arena-bench-collapse")
    reserved = libc.mmap(None, reserved_bytes, _PROT_NONE, _MAP_PRIVATE_ANONYMOUS, -1, 0)
    try:
        os.ftruncate(descriptor, _HUGE_PAGE_BYTES)
        aligned = (reserved + _HUGE_PAGE_BYTES - 1) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        libc.mmap(aligned, _HUGE_PAGE_BYTES, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, descriptor, 0)
        ctypes.memset(aligned, 1, mmap.PAGESIZE)
        return bool(libc.madvise(aligned, _HUGE_PAGE_BYTES, _MADV_COLLAPSE) == 0)
    finally:
        libc.munmap(reserved, reserved_bytes)
        os.close(descriptor)


def _cpu_model() -> str:
    """The name in /proc/cpuinfo; aarch64 gives numbers there instead, so its architecture has to do."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
