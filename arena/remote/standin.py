"""A seat of the ring, held for a reader on another host: it hands frames on, and releases them when told."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from arena import layout, memory
from arena.codec import TABLE_HEAD_BYTES, HoldWords, holds_in, table_bytes
from arena.layout import HEAD_LENGTH, HEAD_SENT_NS, HEAD_TAG, KIND_INLINE
from arena.peers import Handle
from arena.probe.page import L_SEQUENCE, L_STATE
from arena.reader import Reader
from arena.remote import wire
from arena.state import Endpoint

_HOLD: Final = struct.Struct(layout.HOLD)
_FRAGMENT: Final = struct.Struct(layout.FRAGMENT_HEADER)
_NO_TRACE: Final = (0, 0, 0)
_monotonic_ns = time.monotonic_ns


class Outgoing(NamedTuple):
    """A frame to be sent, as often as it takes.

    Attributes:
        payload_bytes: what its slot holds.
        tail: its head and payload, as `arena.remote.wire.pack_frame_tail` makes them.
        buffers: the blocks that go with it, in place: it is on loan for as long as this, or zmq, has them.
    """

    payload_bytes: int
    tail: bytes
    buffers: Sequence[memoryview] = ()


class Latest:
    """The last short frame that was made ready: the next reader gets the same."""

    __slots__ = ("sequence", "tail")

    def __init__(self) -> None:
        self.sequence = -1
        self.tail = b""


class StandIn(Reader):
    """Attached like any reader, from the forwarder's process. Its `consumed` is what the reader beyond has taken.

    Args:
        handle: of the queue.
        rank: the reader's.
        where: the reader's host:pid.
        latest: what all of this ring's have in common.
        timeout: seconds that the writer's process may take to answer.
    """

    __slots__ = ("_front", "_kept", "_latest", "_payloads", "_sent_word", "_waited_ns")

    def __init__(self, handle: Handle, rank: int, where: str, latest: Latest, *, timeout: float | None) -> None:
        super().__init__(replace(handle, prefault=False), rank, timeout=timeout, on_warning=None, where=where)
        self._kept: dict[int, Outgoing] = {}
        self._latest = latest
        self._payloads = self._ring.payloads
        self._front = bytearray()  # of a message in fragments: as far as its table goes
        self._sent_word = 0 if self._probe is None else self._probe.word("remote_sent_bytes_total")

    # ── how things stand ─────────────────────────────────────────────────────────────────────────
    @property
    def published(self) -> int:
        """Frames that are there to be sent."""
        # SYNC POINT frame-visible (observe): the slot's bytes came before this store
        return self._published[0]

    @property
    def following(self) -> int:
        """The first frame that the reader has not taken."""
        return self._consumed[0]

    @property
    def ready(self) -> bool:
        """Whether every expected reader has attached."""
        return bool(self._ring.writer[layout.READY])

    @property
    def on_loan(self) -> bool:
        """Whether anything of the arena is still with us, or with zmq."""
        return self._borrower.lends

    def is_admitted(self) -> bool:
        """Whether the writer has said with which frame this incarnation begins."""
        if not self._admitted:
            self._admitted = self._take_place()
        return self._admitted

    def park(self, floor: int) -> bool:
        """About to sleep until the writer rings (`arena.remote.bell`); False if there is more than `floor` by now."""
        self._parked[0] = 1
        memory.fence()  # the flag must be visible before the last look, or the wake could be lost
        return self._published[0] <= floor

    def unpark(self) -> None:
        """Awake."""
        self._parked[0] = 0

    @property
    def is_closed(self) -> bool:
        """Whether the writer has shut the queue down."""
        return bool(self._ring.writer[layout.WRITER_CLOSED])

    def end(self) -> dict[str, Any] | None:
        """Why nothing more will be published; None while something may. To be asked before `published` is."""
        if self.is_closed:
            return {"kind": "QueueClosed"}
        process = self._attachment.process
        if process.is_alive() is False:
            return {"kind": "PeerDied", "ending": process.ending(), "pid": process.who.pid, "signal": process.signal()}
        return None

    # ── frames ───────────────────────────────────────────────────────────────────────────────────
    def short(self, sequence: int) -> bytes | None:
        """The tail of a published frame, if nothing goes with it and it is not traced, as most are; else None.

        Raises:
            CorruptFrame: its length leads outside the slot.
        """
        latest = self._latest
        if latest.sequence == sequence:
            return latest.tail
        slot = sequence % self._slots
        head, payload = self._heads[slot], self._payloads[slot]
        if head[HEAD_TAG] != KIND_INLINE + sequence:
            return None
        nbytes = head[HEAD_LENGTH]
        if nbytes > payload.nbytes:
            self._ring.payload(sequence)
        latest.tail = tail = wire.pack_short_tail(KIND_INLINE, head[HEAD_SENT_NS], payload[:nbytes])
        latest.sequence = sequence
        return tail

    def outgoing(self, sequence: int) -> Outgoing:
        """A published frame that has not been taken yet, with all it needs at the other end.

        Raises:
            CorruptFrame: the ring does not hold it, or it names what does not exist.
        """
        out = self._kept.get(sequence)
        if out is not None:
            return out
        if (tail := self.short(sequence)) is not None:
            return Outgoing(len(tail) - wire.SHORT_TAIL_BYTES, tail)
        self._kept[sequence] = out = self._made_ready(sequence)
        return out

    def _made_ready(self, sequence: int) -> Outgoing:
        kind, traced = self._ring.kind(sequence)
        view = self._ring.payload(sequence)
        sent_ns = self._heads[layout.slot_of(sequence, self._slots)][HEAD_SENT_NS]
        trace = self._ring.trace(sequence) if traced else _NO_TRACE
        buffers: list[memoryview] = []
        for hold in self._holds(kind, view, sequence, buffers):
            buffers.append(self._borrower.borrow(hold, sequence))
        sizes = [buffer.nbytes for buffer in buffers]
        tail = wire.pack_frame_tail(kind, sent_ns, trace, sizes, bytes(view))
        return Outgoing(len(view), tail, buffers)

    def _holds(self, kind: int, payload: memoryview, sequence: int, buffers: list[memoryview]) -> list[HoldWords]:
        """The holds that come with a frame; a block that holds the payload itself is borrowed first."""
        if kind == layout.KIND_TABLE:
            return holds_in(payload)
        if kind == layout.KIND_BLOCK:
            hold: HoldWords = _HOLD.unpack_from(payload.tobytes().ljust(_HOLD.size, b"\0"))
            buffers.append(self._borrower.borrow(hold, sequence))
            return holds_in(buffers[0])
        if kind == layout.KIND_FRAGMENT:
            return self._holds_of_fragments(payload)
        return []

    def _holds_of_fragments(self, payload: memoryview) -> list[HoldWords]:
        """A message in fragments brings its holds with the last one. They are named at its beginning: keep that."""
        total, at, _ = _FRAGMENT.unpack_from(payload.tobytes().ljust(_FRAGMENT.size, b"\0"))
        body = payload[_FRAGMENT.size :]
        if at == 0:
            self._front.clear()
        front = self._front
        wanted = table_bytes(front) if len(front) >= TABLE_HEAD_BYTES else TABLE_HEAD_BYTES
        if len(front) < wanted:
            front += body
        return holds_in(memoryview(bytes(front))) if at + body.nbytes >= total else []

    def acknowledge(self, following: int) -> None:
        """The reader has taken every frame before this one."""
        first = self._consumed[0]
        if following <= first:
            return
        now_ns = _monotonic_ns()
        sequences = range(max(first, following - self._slots), following)
        noted = [] if self._log is None else [self._sent_and_trace(sequence) for sequence in sequences]
        taken = [self._kept.pop(sequence, None) for sequence in sequences]
        for sequence in sequences:
            self._released[layout.slot_of(sequence, self._slots)] = now_ns
        # SYNC POINT slot-reusable (publish): the slots have been read, and need not be again, before this store is seen
        self._consumed[0] = following
        for sequence, (sent_ns, trace) in zip(sequences, noted, strict=False):
            self._note(sequence, sent_ns, trace, now_ns)
        taken.clear()  # only now: what is given back earlier is not given back
        self._wake_writer()

    def _sent_and_trace(self, sequence: int) -> tuple[int, tuple[int, int, int]]:
        head = self._heads[layout.slot_of(sequence, self._slots)]
        return head[HEAD_SENT_NS], self._ring.trace(sequence) if head[HEAD_TAG] & layout.FLAG_TRACED else _NO_TRACE

    def _note(self, sequence: int, sent_ns: int, trace: tuple[int, int, int], now_ns: int) -> None:
        log = self._log
        assert log is not None
        log.done()
        log.page[L_SEQUENCE] = sequence + 1
        if any(trace):
            log.taken(sequence, trace, (sent_ns, now_ns, now_ns, now_ns))
        if sequence & log.sample == log.phase:
            log.frame(sequence, sent_ns, now_ns, now_ns)

    def sent(self, nbytes: int) -> None:
        """Count bytes that went out."""
        if self._probe is not None:
            self._probe.count(self._sent_word, nbytes)

    def resent(self, frames: int) -> None:
        """Count frames that have to go out again."""
        if self._probe is not None:
            self._probe.count(self._probe.word("remote_resent_total"), frames)

    def show(self, state: int, waited_ns: int) -> None:
        """Let observers see what the reader does, as far as it tells."""
        if self._log is None or self._probe is None:
            return
        now_ns = _monotonic_ns()
        self._waiter.waited_ns = waited_ns
        if state == wire.STATE_WAITING and self._consumed[0] >= self._published[0]:
            self._log.settle()
            self._log.waiting(self._consumed[0], now_ns)
        elif self._log.page[L_STATE] == Endpoint.WAITING:
            self._log.proceeding()
        else:
            self._probe.progress(now_ns)
        self.copy_out(now_ns)

    def copy_out(self, now_ns: int) -> None:
        """Let observers see what was counted, from time to time."""
        if self._log is not None and now_ns >= self._log.probe.next_flush_ns:
            self._log.flush(now_ns)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────
    def forget(self) -> None:
        """Give back what was kept to be sent again."""
        self._kept.clear()

    def die(self) -> None:
        """The reader is taken for dead: the writer is to hear of it, and go on without."""
        self._ring.control[layout.READER_CLOSED] = layout.LOST
        self._wake_writer()
        self.shutdown()
