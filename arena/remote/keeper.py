"""Sees to a remote reader while nobody is in a call: a reader may work for long, and there is something to be said.

What was taken is told a little later, with what is taken by then (`RemoteReader._take`): told at once, it would be in
the way of the next message. And a wire may break. What merely broke, zmq mends by itself; a connection on which
something else than its peer's words came it gives up, and another has to be made.

Inside a call the reader does all that itself. This thread sleeps unless messages come, or a connection goes.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from arena.held import HeldLock

_TICK_MS: Final = 10
_QUIET_TICKS: Final = 50  # after so many in which there was nothing to do it sleeps until it is woken


class Keeper:
    """A daemon thread for one reader.

    Args:
        name: of the queue.
        news_fd: becomes readable when there is something to look at.
        look: looks, and does what it can; True if there was something to do, or will be soon.
    """

    __slots__ = ("_ended", "_lock", "_look", "_news_fd", "_pid", "_wake", "awake")

    def __init__(self, name: str, news_fd: int, look: weakref.WeakMethod[Callable[[], bool]]) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pid = os.getpid()
        self._news_fd, self._look = news_fd, look
        self._ended = False
        self._lock = HeldLock()  # a garbage collection may call `stop` from anywhere
        self.awake = False
        threading.Thread(target=self._keep, name=f"arena-keeper:{name}", daemon=True).start()

    def rouse(self) -> None:
        """There will be something to do: look from time to time. For whoever has seen that it is not `awake`."""
        self.awake = True
        self._ring()

    def stop(self) -> None:
        """End it, soon; to be called before the descriptor is closed. More than once does no harm."""
        self._ended = True
        self._ring()

    def _ring(self) -> None:
        with self._lock:
            if self._wake >= 0 and self._pid == os.getpid():  # a forked child has the descriptor, and no such thread
                os.eventfd_write(self._wake, 1)

    def _keep(self) -> None:
        poll, quiet = select.poll(), 0
        for fd in (self._wake, self._news_fd):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(_TICK_MS if self.awake else None)}
            if self._ended:
                break
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._looked() or self._wake in ready:
                self.awake, quiet = True, 0
            else:
                quiet += 1
            if self._news_fd in ready:
                time.sleep(_TICK_MS / 1000)  # it stays readable while the reader is in a call
            if quiet >= _QUIET_TICKS:
                self.awake = False
                self.awake = self._looked()  # whoever saw that we were awake has left it to us
        with self._lock:
            os.close(self._wake)
            self._wake = -1

    def _looked(self) -> bool:
        look = self._look()
        return look is not None and look()
