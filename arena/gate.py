"""The DMA gate: a hold goes back only after its view died *and* every copy from it passed.

A view that died may still be the source of a copy in flight; give its hold back then, and the writer overwrites what
the copy engine has yet to read. So a hold that a device may read has a gate, with two things in it: *passages*, points
in streams that have to pass, recorded behind a copy; and *streams*, of which all that is queued when the view dies has
to pass (torch's meaning of ``record_stream``).

**Why there is exactly one store.** A gate has two lives, and in each of them one kind of thread touches it.

- While the view lives, those who use it: whoever adds to the gate holds the tensor, so the view can't die under it.
- The view's death is an event of its own: the interpreter clears the weak reference, then calls back, once. From here
  on nobody can add. The callback looks at the gate: if there is nothing in it, it stores; else it appends to a deque,
  which needs no lock and calls no device, and wakes the helper.
- After that only the helper thread touches it: records on the streams, waits, and stores.

So the one look of the callback decides who stores, and no order of death and passage leads to none or to two. Should
an interrupt have torn the callback, `sweep` (`arena.borrow`) repeats it; a gate that the helper has it does not take
twice, and a hold's word never goes down.

One helper thread serves the process. It makes all calls to the device that are not the user's own, sleeps on an
eventfd unless a dead view's gate is shut, and then looks again in steps that follow the gate's age: 50 µs at first, a
64th of it later, 1 ms at most.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from arena.device import Copies, Passage, Stream
from arena.probe import HISTOGRAM_WORDS, Probe

_FIRST_LOOK_NS: Final = 50_000
_LAST_LOOK_NS: Final = 1_000_000
_SHARE_OF_AGE: Final = 64
_monotonic_ns = time.monotonic_ns


class Gate:
    """What has to pass before one hold goes back. See the head of this file for who may touch it when."""

    __slots__ = ("_log", "_memory", "_passages", "_streams", "taken")

    def __init__(self, memory: object, log: DeviceLog | None) -> None:
        self._memory = memory  # keeps the range mapped, and registered, for as long as a copy may read it
        self._log = log
        self._passages: deque[Passage] = deque()
        self._streams: list[tuple[Copies, Stream]] = []
        self.taken = False  # by the helper

    # ── while the view lives ─────────────────────────────────────────────────────────────────────
    def remember(self, copies: Copies, stream: Stream) -> None:
        """All that is queued there when the view dies has to pass."""
        if (copies, stream) not in self._streams:
            self._streams.append((copies, stream))

    def remember_everything(self, copies: Copies) -> None:
        """The same for every stream of the process: who used the view is not known."""
        self.remember(copies, _EVERY_STREAM)

    def copying(self, copies: Copies, stream: Stream) -> _Copying:
        """Around a copy. Until its passage is recorded all of the stream counts, so an interrupt tears nothing."""
        return _Copying(self, copies, stream)

    def add(self, passage: Passage) -> None:
        """This has to pass."""
        if passage.passed():
            return
        self._passages.append(passage)
        while self._passages and self._passages[0].passed():
            self._passages.popleft()

    def is_empty(self) -> bool:
        """Whether there is nothing to wait for."""
        return not (self._streams or self._passages)

    def view_died(self, release: Callable[[], object]) -> None:
        """Called back, anywhere: `release` once it is open. No lock, no device, can't raise."""
        if not self.taken:  # else a sweep came by while it is shut
            helper.gate(self, release)

    # ── after its death, in the helper ───────────────────────────────────────────────────────────
    def has_passed(self) -> bool:
        """Whether nothing can read the bytes any more. At no moment is the gate empty before that."""
        for copies, stream in list(self._streams):
            self._record(copies, stream)
        while self._passages and self._passages[0].passed():
            self._passages.popleft()
        return self.is_empty()

    def shut(self, now_ns: int) -> None:
        """The view died, and not everything has passed."""
        if self._log is not None:
            self._log.entered(self, now_ns)

    def opened(self, since_ns: int, now_ns: int) -> None:
        """Everything has; it took until now."""
        if self._log is not None:
            self._log.left(self, now_ns - since_ns)
        self._memory = None

    def _record(self, copies: Copies, stream: Stream) -> None:
        """From "all of the stream" to a point in it."""
        try:
            if stream is not _EVERY_STREAM:
                if copies.is_capturing(stream):
                    return  # what is recorded now would become part of the graph
                self._passages.append(copies.record(stream))
            else:
                self._passages.append(copies.record_everything())
        except Exception:  # the stream is gone, or the device is
            self._passages.append(copies.record_everything())
        self._streams.remove((copies, stream))


_EVERY_STREAM: Final = object()


class _Copying:
    __slots__ = ("_copies", "_gate", "_stream")

    def __init__(self, gate: Gate, copies: Copies, stream: Stream) -> None:
        self._gate, self._copies, self._stream = gate, copies, stream

    def __enter__(self) -> None:
        self._gate._streams.append((self._copies, self._stream))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._gate.add(self._copies.record(self._stream))
            self._gate._streams.remove((self._copies, self._stream))


# ── the helper ───────────────────────────────────────────────────────────────────────────────────
Job = Iterator[object]
"""Work for the helper, in steps. Between two of them it looks at the gates."""


class _Helper:
    """The process's one thread for devices. `gate` and `do` may be called from anywhere, once `start` was."""

    def __init__(self) -> None:
        self._fd = -1
        self._dead: deque[tuple[Gate, Callable[[], object]]] = deque()
        self._jobs: deque[Job] = deque()
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

    def enter(self, copies: Copies) -> None:
        """In the helper: be ready for calls to this device."""
        if copies.kind not in self._entered:
            copies.enter_helper()
            self._entered.add(copies.kind)

    def forget(self) -> None:
        """In a forked child, which has no such thread."""
        if self._fd >= 0:
            os.close(self._fd)

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
                sleeping.poll()
            try:
                os.eventfd_read(fd)  # before the look at the deques: what comes after it wakes us again
            except BlockingIOError:
                pass
            while self._dead:
                gate, release = self._dead.popleft()
                if not gate.taken:
                    gate.taken = True
                    shut.append(_Shut(gate, release))
            if self._jobs:
                self._step()
            shut = [one for one in shut if not self._opened(one)]
            if shut and not self._jobs:
                age_ns = _monotonic_ns() - shut[-1].since_ns
                time.sleep(min(max(age_ns // _SHARE_OF_AGE, _FIRST_LOOK_NS), _LAST_LOOK_NS) / 1e9)

    def _opened(self, one: _Shut) -> bool:
        try:
            for copies, _ in one.gate._streams:
                self.enter(copies)
            passed = one.gate.has_passed()
        except Exception:
            passed = False  # a shut gate costs a block, an open one could cost its bytes
        if passed:
            one.release()
            one.gate.opened(one.since_ns, _monotonic_ns())
        elif not one.seen:
            one.seen = True
            one.gate.shut(one.since_ns)
        return passed

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


helper = _Helper()


def _after_fork() -> None:
    global helper  # noqa: PLW0603 - one for the process, as forks are
    helper.forget()
    helper = _Helper()


os.register_at_fork(after_in_child=_after_fork)


# ── what is seen of it ───────────────────────────────────────────────────────────────────────────
class DeviceLog:
    """What one endpoint's probe page says about pins, gates and copies.

    Mostly written by the helper, while the endpoint sleeps: so what changes is shown at once. No two threads add to
    one word but for the copies, which are counted by whoever makes them.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        word = probe.word
        self._pinned = word("segment_pinned")
        self._pinned_bytes = word("segment_pinned_bytes")
        self._pin_seconds = word("pin_seconds_total")
        self._waits = word("dma_gate_wait_seconds")
        self._blocks = word("blocks_in_gate")
        self._oldest = word("gate_oldest_since_nanoseconds")
        self._inside: dict[Gate, int] = {}  # in the order in which they came

    def pinned(self, segments: int, nbytes: int, took_ns: int) -> None:
        """So many more segments are registered; fewer, if negative."""
        for word, amount in ((self._pinned, segments), (self._pinned_bytes, nbytes), (self._pin_seconds, took_ns)):
            self._probe.count(word, amount)
            self._probe.show(word)

    def pin_failed(self, reason: str, took_ns: int) -> None:
        """A segment is not."""
        for word, amount in ((self._probe.word("pin_failures_total", reason), 1), (self._pin_seconds, took_ns)):
            self._probe.count(word, amount)
            self._probe.show(word)

    def copied(self, mode: str) -> None:
        """A tensor was sent to the device."""
        word = self._probe.word("device_copies_total", mode)
        self._probe.count(word)
        self._probe.show(word)

    def entered(self, gate: Gate, now_ns: int) -> None:
        """A dead view waits."""
        self._inside[gate] = now_ns
        self._show_gates()

    def left(self, gate: Gate, took_ns: int) -> None:
        """Its hold went back."""
        self._probe.observe(self._waits, took_ns)
        self._probe.show(self._waits, HISTOGRAM_WORDS)
        if self._inside.pop(gate, None) is not None:
            self._show_gates()

    def _show_gates(self) -> None:
        self._probe.gauge(self._blocks, len(self._inside))
        self._probe.gauge(self._oldest, next(iter(self._inside.values()), 0))
        self._probe.show(self._blocks)
        self._probe.show(self._oldest)


def device_log(probe: Probe | None) -> DeviceLog | None:
    """What an endpoint with this probe records; nothing without one."""
    return None if probe is None else DeviceLog(probe)
