"""What wakes the forwarder: the futex that readers sleep on, and for the one that sleeps on sockets, a descriptor too.

A thread sleeps either on a futex or on descriptors. Two threads, one on each, would share one GIL and hand every
message over between them: on a busy machine that cost more than all the rest of the way.
"""

from __future__ import annotations

import os
import weakref

from arena.memory import Futex


class Bell(Futex):
    """In the futex's place at a writer whose queue has a forwarder."""

    __slots__ = ("__weakref__", "_futex", "fd")

    def __init__(self, futex: Futex) -> None:
        self._futex = futex
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd).atexit = False

    def wait(self, expected: int, timeout_ns: int) -> bool:
        """See `arena.memory.Futex.wait`."""
        return self._futex.wait(expected, timeout_ns)

    def wake(self) -> None:
        """Everybody."""
        try:
            os.eventfd_write(self.fd, 1)  # first: it has the longer way
        except OSError:  # rung as often as it can count, and nobody came: whoever does sees that it was
            pass
        self._futex.wake()
