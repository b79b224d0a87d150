"""Seeing from outside that a thread sleeps on a futex: what makes tests of wake-ups certain rather than lucky."""

import platform
import time
from pathlib import Path

_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine(), "")


def wait_until_asleep_on(address: int, *, pid: int, tid: int | None = None, timeout_s: float = 20.0) -> None:
    """Return once the thread is inside futex(2) on that address of its process."""
    path = Path(f"/proc/{pid}/task/{pid if tid is None else tid}/syscall")
    wanted = [_FUTEX, hex(address)]
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if path.read_text().split()[:2] == wanted:
            return
        time.sleep(0.0005)
    raise AssertionError(f"thread {tid or pid} never slept on {address:#x}: {path.read_text().strip()}")
