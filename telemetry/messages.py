"""What became of single messages, put together from the flight recorders: how each was sent, how each reader took it.

Pure: events go in, in the order in which one page recorded them, and messages come out once their last event is there.
Times are the page's own monotonic ones. A message whose events were partly overwritten before anybody read them is
left out, rather than told wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from arena.probe import (
    ALLREDUCE_PATHS,
    COPY_MODES,
    ERROR_KINDS,
    MODE_BITS,
    OPERATIONS,
    PATH_BITS,
    PATHS,
    Event,
    EventRecord,
    Role,
)

NO_TRACE: Final = (0, 0, 0)
Trace = tuple[int, int, int]


@dataclass(frozen=True)
class Part:
    """A part of sending that was timed: `number` is the rank that a wait was charged to, or the bytes of a copy."""

    began_ns: int
    ended_ns: int
    number: int


@dataclass(frozen=True)
class Sent:
    """One message as its writer saw it.

    Attributes:
        sequence: of its last frame.
        began_ns: when `enqueue` began; without a trace, the beginning of what was recorded.
        ended_ns: when it was published, or the error raised.
        encode_ns: how long encoding took; 0 where that is not known, as of a message sampled for being slow.
        nbytes: its size.
        path: one of `arena.probe.PATHS`; "" without a trace.
        waits: for a slot.
        copies: into blocks.
        trace: its words of context, all 0 for a message that was not sampled.
        parent: the span that the sender was in, or 0.
        error: why it was not sent, one of `arena.probe.ERROR_KINDS`, or "".
    """

    sequence: int
    began_ns: int
    ended_ns: int
    encode_ns: int
    nbytes: int
    path: str
    waits: tuple[Part, ...]
    copies: tuple[Part, ...]
    trace: Trace = NO_TRACE
    parent: int = 0
    error: str = ""


@dataclass(frozen=True)
class Taken:
    """One message as one reader saw it.

    Attributes:
        sequence: of its last frame.
        published_ns: when that was published.
        received_ns: when the reader saw it.
        released_ns: when its slot was free again.
        decode_ns: how long decoding took, which ended with the release; 0 without a trace.
        done_ns: when the reader was back for more; 0 without a trace, and for a reader that never came back.
        trace: its words of context, all 0 for a message that was not sampled.
        error: why its user did not get it, or "".
    """

    sequence: int
    published_ns: int
    received_ns: int
    released_ns: int
    decode_ns: int = 0
    done_ns: int = 0
    trace: Trace = NO_TRACE
    error: str = ""


@dataclass(frozen=True)
class Work:
    """What a worker did with a sampled message that it had taken, as one page recorded it.

    Attributes:
        name: `h2d` (a call of `to_device`), `dma_gate` (from a view's death to the return of its hold), or what a
            communicator did: one of `arena.probe.OPERATIONS`.
        number: of the event: which of the page's.
        sequence: the message's; of a communicator's, which of its operations.
        part: when, and how many bytes; 0 for a gate.
        how: the modes of the copies, or the path of the operation.
        trace: the message's words of context.
        reader: the rank that took the message; None where the page is that reader's.
    """

    name: str
    number: int
    sequence: int
    part: Part
    how: str
    trace: Trace
    reader: int | None = None


Message = Sent | Taken | Work


class Follower:
    """Follows one page's events from batch to batch.

    Args:
        role: whose page it is.
        from_start: whether events that were overwritten before the first batch count as lost, too.
    """

    def __init__(self, role: Role, *, from_start: bool) -> None:
        by_role = {Role.WRITER: self._sender, Role.READER: self._taker, Role.COMMUNICATOR: self._reducer}
        self._follow: Callable[[EventRecord], Iterator[Message]] = by_role[role]
        self._next = 0
        self._counts = from_start
        self._waits: list[tuple[int, Part]] = []
        self._copies: list[tuple[int, Part]] = []
        self._origin: EventRecord | None = None
        self._open: Taken | None = None
        self.lost = 0
        self.closed = False

    @property
    def next_number(self) -> int:
        """The number of the first event that has not been read."""
        return self._next

    def read(self, events: Iterable[EventRecord]) -> Iterator[Message]:
        """The messages that these events, which follow on those read before, complete."""
        for event in events:
            if event.number != self._next:
                self.lost += (event.number - self._next) * self._counts
                self._forget()
            self._next, self._counts = event.number + 1, True
            self.closed = self.closed or event.kind == Event.CLOSE
            yield from self._follow(event)

    def unfinished(self) -> Iterator[Taken]:
        """What the reader took and never came back from, once its page is over."""
        if self._open is not None:
            yield self._open
        self._forget()

    def _forget(self) -> None:
        self._waits, self._copies, self._origin, self._open = [], [], None, None

    # ── at the writer ────────────────────────────────────────────────────────────────────────────
    def _sender(self, event: EventRecord) -> Iterator[Sent]:
        if event.kind == Event.WAIT:
            self._waits.append((event.sequence, _part(event)))
        elif event.kind == Event.COPY:
            self._copies.append((event.sequence, _part(event)))
        elif event.kind == Event.ORIGIN:
            self._origin = event
        elif event.kind == Event.PUBLISH or (event.kind == Event.ERROR and event.trace != NO_TRACE):
            if event.trace == NO_TRACE or self._origin is not None:
                yield self._sent(event)
            self._forget()

    def _sent(self, last: EventRecord) -> Sent:
        origin = self._origin if last.trace != NO_TRACE else None
        error = _named(ERROR_KINDS, last.a) if last.kind == Event.ERROR else ""
        began_ns = origin.time_ns if origin else last.time_ns - last.a
        waits, copies = (_of(last, began_ns, parts) for parts in (self._waits, self._copies))
        return Sent(
            sequence=last.sequence,
            began_ns=min(began_ns, *(part.began_ns for part in (*waits, *copies)), last.time_ns),
            ended_ns=last.time_ns,
            encode_ns=0 if error else last.a,
            nbytes=last.b,
            path=_named(PATHS, origin.b) if origin else "",
            waits=waits,
            copies=copies,
            trace=last.trace,
            parent=origin.a if origin else 0,
            error=error,
        )

    # ── at a reader ──────────────────────────────────────────────────────────────────────────────
    def _taker(self, event: EventRecord) -> Iterator[Taken | Work]:
        if event.kind == Event.CONSUME:
            received_ns = event.time_ns - event.b
            taken = Taken(event.sequence, received_ns - event.a, received_ns, event.time_ns, trace=event.trace)
            if event.trace == NO_TRACE:
                yield taken
            else:
                self._open = taken
        elif self._open is not None and event.kind == Event.ERROR and _named(ERROR_KINDS, event.a) == "decode":
            self._open = replace(self._open, error="decode")
        elif self._open is not None and event.kind == Event.DONE and event.sequence == self._open.sequence:
            yield replace(self._open, decode_ns=event.b, done_ns=event.time_ns)
            self._open = None
        elif event.kind == Event.TO_DEVICE:
            modes = [mode for bit, mode in enumerate(COPY_MODES) if event.b >> bit & 1]
            yield _work("h2d", event, event.b >> MODE_BITS, ",".join(modes) or "unknown")
        elif event.kind == Event.GATE:  # often long after the message itself is done
            yield _work("dma_gate", event, 0, "")

    # ── at a rank of a communicator ──────────────────────────────────────────────────────────────
    def _reducer(self, event: EventRecord) -> Iterator[Work]:
        if event.kind == Event.REDUCE:
            path = _named(ALLREDUCE_PATHS, event.b & ((1 << PATH_BITS) - 1))
            operation = _named(OPERATIONS, (event.b & 0xFF) >> PATH_BITS)
            yield _work(operation, event, event.b >> 16, path, event.b >> 8 & 0xFF)


def _named(names: Sequence[str], index: int) -> str:
    """The name with this index; what a page of another version says may be beyond ours."""
    return names[index] if index < len(names) else "unknown"


def _work(name: str, event: EventRecord, nbytes: int, how: str, reader: int | None = None) -> Work:
    part = Part(event.time_ns - event.a, event.time_ns, nbytes)
    return Work(name, event.number, event.sequence, part, how, event.trace, reader)


def _part(event: EventRecord) -> Part:
    return Part(event.time_ns - event.a, event.time_ns, event.b)


def _of(last: EventRecord, began_ns: int, parts: list[tuple[int, Part]]) -> tuple[Part, ...]:
    """The parts of this message: a writer has one message at a time, so those that fall into its time."""
    return tuple(
        part for sequence, part in parts if sequence == last.sequence or began_ns <= part.began_ns <= last.time_ns
    )
