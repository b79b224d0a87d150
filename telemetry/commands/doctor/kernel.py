"""What Arena asks of the kernel, tried for real on a scrap of memory: a version number would not tell."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from arena.layout import HUGE_PAGE
from arena.memory import Segment

_SO_PEERPIDFD: Final = 77


@dataclass(frozen=True)
class Feature:
    """One feature, whether it works here, and what its absence means."""

    name: str
    works: bool
    required: bool
    found: str = ""
    needed: str = ""
    todo: str = ""


def features() -> list[Feature]:
    """memfd with seals, futex, pidfd, a socket's pidfd, huge pages on demand."""
    container = "allow it in the container's seccomp profile"
    return [
        _tried("memfd, sealed", _memfd, True, "shared memory: Linux 5.1 or later", container),
        _tried("futex", _futex, True, "sleeping until a message comes", container),
        _tried("pidfd", _pidfd, False, "seeing a death at once: Linux 5.3", f"{container}; else /proc is asked"),
        _tried(
            "pidfd of a socket's peer",
            _peer_pidfd,
            False,
            "liveness across pid namespaces: Linux 6.5",
            "keep the engine's processes in one pid namespace",
        ),
        _tried(
            "huge pages on demand (MADV_COLLAPSE)",
            _collapse,
            False,
            "first large messages at full speed: Linux 6.1",
            "prefault=True in QueueConfig pays at the start instead",
        ),
    ]


def hands_over_descriptors() -> bool | str:
    """True, or why a descriptor can't be sent over a unix socket."""
    try:
        here, there = socket.socketpair()
        with here, there:
            socket.send_fds(here, [b"x"], [here.fileno()])
            _, received, _, _ = socket.recv_fds(there, 1, 1)
            for fd in received:
                os.close(fd)
            return bool(received) or "nothing came"
    except OSError as error:
        return error.strerror or str(error)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that this process's cgroup may use at a time, by the tightest limit above it; None without one."""
    quotas = []
    for path in _cgroups(root):
        try:
            limit, period = (path / "cpu.max").read_text().split()
            if limit != "max":
                quotas.append(int(limit) / int(period))
        except (OSError, ValueError):
            continue
    return min(quotas, default=None)


def _cgroups(root: Path) -> list[Path]:
    try:
        entries = [line.strip().split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return [root]
    own = next((entry[2] for entry in entries if len(entry) == 3 and not entry[1]), "/")
    path = root / own.lstrip("/")
    return [path, *(parent for parent in path.parents if parent.is_relative_to(root))]


def _tried(name: str, attempt: Callable[[], bool], required: bool, needed: str, todo: str) -> Feature:
    try:
        works, found = attempt(), "does not work"
    except (OSError, AttributeError) as error:
        works, found = False, getattr(error, "strerror", None) or str(error)
    return Feature(name, works, required, found, needed, todo)


def _memfd() -> bool:
    Segment.create("doctor", HUGE_PAGE).close()
    return True


def _futex() -> bool:
    segment = Segment.create("doctor", HUGE_PAGE)
    try:
        return not segment.mapping.futex(0).wait(0, 1_000_000)  # nobody wakes it: only its time limit can end it
    finally:
        segment.close()


def _pidfd() -> bool:
    os.close(os.pidfd_open(os.getpid()))
    return True


def _peer_pidfd() -> bool:
    here, there = socket.socketpair()
    with here, there:
        os.close(here.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    return True


def _collapse() -> bool:
    segment = Segment.create("doctor", HUGE_PAGE)
    try:
        return segment.mapping.collapse(0, HUGE_PAGE)
    finally:
        segment.close()
