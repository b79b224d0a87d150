"""Watches the processes of the other ranks, because a kernel that waits for one of them can't."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from arena.probe import Identity, identity, is_alive


class Watch:
    """Calls `on_death(rank)` once, from a thread of its own, when the first of the processes has ended.

    The thread sleeps in the kernel until then. A process of another pid namespace can't be watched and is left out.
    """

    def __init__(self, processes: Mapping[int, Identity], on_death: Callable[[int], None]) -> None:
        self._ranks = {fd: rank for rank, who in processes.items() if (fd := _pidfd(who)) is not None}
        self._dead = [rank for rank, who in processes.items() if is_alive(who) is False]
        self._on_death = on_death
        self._woken, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="arena-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        if self._waker >= 0:
            with suppress(BrokenPipeError):  # it has ended by itself
                os.write(self._waker, b"!")  # closing alone would not do: a forked child may hold the other end
            os.close(self._waker)
            self._waker = -1
            self._thread.join()

    def _run(self) -> None:
        poll = select.poll()
        for fd in (*self._ranks, self._woken):
            poll.register(fd, select.POLLIN)
        ready = [] if self._dead else [fd for fd, _ in poll.poll()]
        dead = [*self._dead, *(self._ranks[fd] for fd in ready if fd in self._ranks)]
        for fd in (*self._ranks, self._woken):
            os.close(fd)
        if dead:
            self._on_death(dead[0])


def _pidfd(who: Identity) -> int | None:
    """A descriptor that becomes readable when the process ends."""
    if who.pid_namespace != identity().pid_namespace:
        return None
    with suppress(OSError):
        fd = os.pidfd_open(who.pid)
        if is_alive(who):  # it was still that process, and no later one of the same number, after opening
            return fd
        os.close(fd)
    return None
