"""The helper: the one thread of a process that makes calls to a device which are not the user's own.

Callbacks hand it what they may not do themselves: they append to a deque, which needs no lock, and write to an eventfd.
It sleeps on that unless a dead view's gate is shut (`arena.gate`), and then looks again in steps that follow the gate's
age: 50 µs at first, a 64th of it later, 1 ms at most. Gates whose holds went back on tickets it only watches, four
times a second: no release waits for that, but their memory stays mapped and registered until then, and the page tells
of a device that stopped copying. Between two looks it does a step of a job: registering, unregistering, unmapping.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from arena.device import Copies
    from arena.gate import Gate

_FIRST_LOOK_NS: Final = 50_000
_LAST_LOOK_NS: Final = 1_000_000
_SHARE_OF_AGE: Final = 64
_WATCH_NS: Final = 250_000_000
_monotonic_ns = time.monotonic_ns

Job = Iterator[object]
"""Work for the helper, in steps. Between two of them it looks at the gates."""


class Helper:
    """The process's one thread for devices. `gate` and `do` may be called from anywhere, once `start` was."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._fd = -1
        self._dead: deque[tuple[Gate, Callable[[], object]]] = deque()
        self._jobs: deque[Job] = deque()
        self._named: deque[Gate] = deque()
        self._watched: list[_Shut] = []
        self._watch_due_ns = 0
        self.watches = False  # whether gates may go on tickets
        self._starting = threading.RLock()  # not a plain one: a signal handler may start it too
        self._entered: set[str] = set()

    def start(self) -> None:
        """Have it ready: it must not be for a callback to start a thread."""
        if self._fd >= 0:
            return
        with self._starting:
            if self._fd < 0:
                fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                threading.Thread(target=self._run, args=(fd,), name="arena-device", daemon=True).start()
                self._fd = fd

    def gate(self, gate: Gate, release: Callable[[], object]) -> None:
        """The view died: `release` once the gate is open. No lock, no device, can't raise."""
        self._dead.append((gate, release))
        self._wake()

    def do(self, job: Job) -> None:
        """Work off a job. Likewise."""
        self._jobs.append(job)
        self._wake()

    def watch(self, gate: Gate) -> None:
        """Keep this gate until its tickets are reached; its hold went back. Likewise, and not worth waking for."""
        self._named.append(gate)

    def enter(self, copies: Copies) -> None:
        """In the helper: be ready for calls to this device."""
        if copies.kind not in self._entered:
            copies.enter_helper()
            self._entered.add(copies.kind)

    def forget(self) -> None:
        """In a forked child, which has no such thread: begin anew."""
        if self._fd >= 0:
            os.close(self._fd)
        self._begin()  # whatever it had to do was the parent's

    def _wake(self) -> None:
        try:
            os.eventfd_write(self._fd, 1)
        except OSError:
            pass  # not started, so nobody needs it; or awake for the next 2^64 times

    def _run(self, fd: int) -> None:
        sleeping = select.poll()
        sleeping.register(fd, select.POLLIN)
        shut: list[_Shut] = []
        while True:
            if not shut and not self._jobs:
                sleeping.poll(_WATCH_NS // 1_000_000 if self.watches else None)
            try:
                os.eventfd_read(fd)  # before the look at the deques: what comes after it wakes us again
            except BlockingIOError:
                pass
            shut += self._taken()
            if self._jobs:
                self._step()
            shut = [one for one in shut if not self._opened(one)]
            if self.watches and _monotonic_ns() >= self._watch_due_ns:
                self._see_to_watched()
            if shut and not self._jobs:
                age_ns = _monotonic_ns() - shut[-1].since_ns
                time.sleep(min(max(age_ns // _SHARE_OF_AGE, _FIRST_LOOK_NS), _LAST_LOOK_NS) / 1e9)

    def _taken(self) -> list[_Shut]:
        """The gates handed over. (In the loop itself, the last one would stay in a variable while it sleeps.)"""
        taken = []
        while self._dead:
            gate, release = self._dead.popleft()
            if not gate.taken:
                gate.taken = True
                taken.append(_Shut(gate, release))
        return taken

    def _opened(self, one: _Shut) -> bool:
        try:
            for copies in one.gate.devices():
                self.enter(copies)
            passed = one.gate.has_passed() if one.gate.named else one.gate.opens()
        except Exception:
            passed = False  # a shut gate costs a block, an open one could cost its bytes
        if passed and not one.gate.named:
            one.release()
            passed = not one.gate.named
        if passed:
            one.gate.opened(one.since_ns, _monotonic_ns())
        elif one.gate.named and one.gate.traced is None:
            self._watched.append(one)
            return True
        elif not one.seen:
            one.seen = True
            one.gate.shut(one.since_ns)
        return passed

    def _see_to_watched(self) -> None:
        """Let go of what has been read, and tell of what has not been for long."""
        now_ns = _monotonic_ns()
        self._watch_due_ns = now_ns + _WATCH_NS
        while self._named:
            self._watched.append(_Shut(self._named.popleft(), _nothing))
        waiting = []
        for one in self._watched:
            if one.gate.has_passed():
                one.gate.leave()
                continue
            if not one.seen:
                one.seen = True
                one.gate.shut(one.since_ns)
            waiting.append(one)
        self._watched = waiting

    def _step(self) -> None:
        job = self._jobs[0]
        try:
            next(job)
            self._jobs.rotate(-1)
        except Exception:  # its end, or a bug in it that must not take the gates along
            self._jobs.remove(job)


class _Shut:
    """A gate that a dead view waits at."""

    __slots__ = ("gate", "release", "seen", "since_ns")

    def __init__(self, gate: Gate, release: Callable[[], object]) -> None:
        self.gate, self.release, self.since_ns, self.seen = gate, release, _monotonic_ns(), False


def _nothing() -> None:
    pass


helper: Final = Helper()
"""The one of this process."""


def _after_fork() -> None:
    helper.forget()


os.register_at_fork(after_in_child=_after_fork)
