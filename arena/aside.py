"""Calls that may hang, in a library or a driver, where no exception and no signal helps: made in a thread of their own.

The thread is left behind when its time is up.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Hung(Exception):
    """A call in the thread of its own did not return in time."""


class Aside:
    """A thread that makes calls for somebody who will not wait for ever. Left behind once a call has hung.

    What a call that hung returns in the end goes to `too_late`.
    """

    def __init__(self, too_late: Callable[[Any], None] = lambda value: None) -> None:
        self._too_late = too_late
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._hung = False
        threading.Thread(target=self._run, name="arena-set-up", daemon=True).start()

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """What the function returns or raises.

        Raises:
            Hung: it did neither in time.
        """
        self._calls.put(function)
        try:
            good, value = self._results.get(timeout=timeout_s)
        except queue.Empty:
            self._hung = True
            raise Hung from None
        if not good:
            raise value
        result: T = value
        return result

    @property
    def hung(self) -> bool:
        """Whether the thread is lost."""
        return self._hung

    def end(self) -> None:
        """Let the thread end, when it can."""
        self._calls.put(None)

    def _run(self) -> None:
        while (function := self._calls.get()) is not None:
            try:
                result = True, function()
            except Exception as error:
                result = False, error
            except BaseException as error:  # SystemExit is a failure of what was called, and no wish to leave
                result = False, RuntimeError(repr(error))
            if self._hung:  # nobody listens any more
                self._too_late(result[1])
                return
            self._results.put(result)
            del function, result
