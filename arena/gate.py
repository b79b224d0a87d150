"""The DMA gate: a hold goes back only after its view died *and* every copy from it passed.

A view that died may still be the source of a copy in flight; give its hold back then, and the writer overwrites what
the copy engine has yet to read. So a hold that a device may read has a gate, with two things in it: *passages*, points
in streams that have to pass, recorded behind a copy; and *streams*, of which all that is queued when the view dies has
to pass (torch's meaning of ``record_stream``).

For whoever says nothing there is a *guess*: the stream that was current at the dequeue counts as remembered, until all
of the hold has been moved by `to_device`. Then its bytes are on the device, and what may be queued on that stream by
now, a whole forward pass, need not be waited for.

A passage is a *ticket* where the device can write one (`arena.tickets`), else an event. Of an event somebody has to ask
the device whether it has passed; a ticket the device stores by itself, for the writer to see. So a hold goes one of
three ways once its view is dead:

- *at once*, if nothing is in its gate, or all of it has passed;
- *on tickets*, if all that is left are a few of them: the hold goes back naming these, and the writer waits for them;
- *through the helper*, a thread that asks the device until everything has passed. Of remembered streams it has to
  record the point first: a callback makes no call to a device. What it can record as tickets goes on tickets, then.

**Why there is exactly one store.** A gate has two lives, and in each of them one kind of thread touches it.

- While the view lives, those who use it: whoever adds to the gate holds the tensor, so the view can't die under it.
- The view's death is an event of its own: the interpreter clears the weak reference, then calls back, once. From here
  on nobody can add. The callback claims the lease (`arena.borrow`) and looks at the gate: if there is nothing in it but
  tickets, it stores; else it appends to a deque, which needs no lock and calls no device, and wakes the helper.
- After that only the helper thread touches it: records on the streams, waits, and stores.

So the one look of the callback decides who stores, and no order of death and passage leads to none or to two. Should
an interrupt have torn the callback, the claim is dropped, and `sweep` repeats it; a gate that the helper has it does
not take twice, and a hold's word never goes down. Around a copy the whole of its stream is in the gate until the copy's
passage is, so an interrupt in between leaves too much to wait for, never too little.

What went back on tickets is out of our hands, but not its memory: that stays mapped and registered until the tickets
have been written, which the helper sees to (`arena.helper`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from arena.helper import helper
from arena.layout import NAMES
from arena.tickets import Ticket, Tickets, name_of

if TYPE_CHECKING:
    from arena.device import Copies, Passage, Stream
    from arena.device_log import DeviceLog
    from arena.probe.hooks import Trace

_monotonic_ns = time.monotonic_ns


class Gate:
    """What has to pass before one hold goes back. See the head of this file for who may touch it when."""

    __slots__ = (
        "_guess",
        "_log",
        "_memory",
        "_passages",
        "_stays",
        "_streams",
        "_tickets",
        "died_ns",
        "named",
        "taken",
        "traced",
    )

    def __init__(self, memory: object, log: DeviceLog | None, tickets: Tickets | None = None) -> None:
        self._memory = memory  # keeps the range mapped, and registered, for as long as a copy may read it
        self._log = log
        self._tickets = tickets
        self._passages: deque[Passage] = deque()
        self._streams: list[tuple[Copies, Stream]] = []
        self._guess: tuple[Copies, Stream] | None = None
        self._stays = False  # nothing goes back here, so nothing can wait at the writer
        self.taken = False  # by the helper
        self.named = False  # its hold went back, naming the tickets that are still to be reached
        self.traced: tuple[int, Trace] | None = None  # the sampled message that a copy through it was for
        self.died_ns = 0  # when its view did, if it is traced

    # ── while the view lives ─────────────────────────────────────────────────────────────────────
    def remember(self, copies: Copies, stream: Stream) -> None:
        """All that is queued there when the view dies has to pass."""
        if (copies, stream) not in self._streams:
            self._streams.append((copies, stream))

    def guess(self, copies: Copies, stream: Stream) -> None:
        """The same, unless all of the hold is moved, by a copy that is in here, before its view dies."""
        self._guess = copies, stream

    def moved_whole(self) -> None:
        """It was, and that copy is in here."""
        self._guess = None

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
        return not (self._streams or self._passages or self._guess)

    def point(self, copies: Copies, stream: Stream) -> Passage:
        """The point that the stream has come to: a ticket if possible."""
        ticket = None if self._tickets is None else self._tickets.issue(copies, stream)
        return copies.record(stream) if ticket is None else ticket

    # ── at its death ─────────────────────────────────────────────────────────────────────────────
    def names(self) -> tuple[int, ...] | None:
        """What the hold has to name in order to go back now; None if there is more to wait for than it can name.

        Called back, anywhere: looks at memory, and at nothing else.
        """
        if self._streams or self._guess:
            return None
        left: dict[int, int] = {}
        for passage in self._passages:
            if not isinstance(passage, Ticket):
                return None
            if not passage.passed():
                left[passage.index] = max(left.get(passage.index, 0), passage.number)
        return tuple(map(name_of, left, left.values())) if len(left) <= NAMES else None

    def goes_on_tickets(self) -> None:
        """Called back, anywhere: the hold went back on tickets. Its memory has to stay until they are reached."""
        self.named = True
        if self._log is not None:
            self._log.released("ticket")
        if self.taken:
            return
        if self.traced is None:
            helper.watch(self)
        else:
            self.died_ns = _monotonic_ns()
            helper.gate(self, _nothing)

    def view_died(self, release: Callable[[], object]) -> None:
        """Called back, anywhere: `release` once it is open. No lock, no device, can't raise."""
        if not self.taken:  # else a sweep came by while it is shut
            if self.traced is not None:
                self.died_ns = _monotonic_ns()
            helper.gate(self, release)

    def outlives(self) -> None:
        """Called back, anywhere: nothing goes back, for the frame will be taken again. The memory stays all the same
        until whatever was queued has read it."""
        self._log, self._stays = None, True
        if not self.taken:
            helper.gate(self, _nothing)

    def devices(self) -> list[Copies]:
        """Whose streams are still to be recorded."""
        return [copies for copies, _ in [*self._streams, *([self._guess] if self._guess else [])]]

    # ── after its death, in the helper ───────────────────────────────────────────────────────────
    def has_passed(self) -> bool:
        """Whether nothing can read the bytes any more. At no moment is the gate empty before that."""
        if self._guess is not None:
            self.remember(*self._guess)
            self._guess = None
        for copies, stream in list(self._streams):
            self._record(copies, stream)
        while self._passages and self._passages[0].passed():
            self._passages.popleft()
        return self.is_empty()

    def opens(self) -> bool:
        """Whether the hold can go back, if need be on tickets."""
        return self.has_passed() or (not self._stays and self.names() is not None)

    def shut(self, now_ns: int) -> None:
        """The view died, and not everything has passed."""
        if self._log is not None:
            self._log.entered(self, now_ns)

    def opened(self, since_ns: int, now_ns: int) -> None:
        """Everything has; it took until now."""
        if self._log is not None:
            self._log.left(self, now_ns - since_ns)
            if self.traced is not None:
                self._log.passed(*self.traced, self.died_ns, now_ns)
        self.leave()

    def leave(self) -> None:
        """Nothing is left to wait for: neither is the memory needed any more."""
        self._memory = None
        if self._log is not None:
            self._log.gone(self)

    def _record(self, copies: Copies, stream: Stream) -> None:
        """From "all of the stream" to a point in it."""
        try:
            if stream is not _EVERY_STREAM:
                if copies.is_capturing(stream):
                    return  # what is recorded now would become part of the graph
                self._passages.append(self.point(copies, stream))
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
            self._gate.add(self._gate.point(self._copies, self._stream))
            self._gate._streams.remove((self._copies, self._stream))


def _nothing() -> None:
    pass
