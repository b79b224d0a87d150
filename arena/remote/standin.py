"""A seat of the ring, held for a reader on another host: it hands frames on, and releases them when told."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from typing import Any, Final

from arena import layout, memory
from arena.codec import TABLE_HEAD_BYTES, HoldWords, holds_in, table_bytes
from arena.peers import Handle
from arena.probe.page import L_SEQUENCE, L_STATE
from arena.reader import Reader
from arena.remote import wire
from arena.state import Endpoint

_HOLD: Final = struct.Struct(layout.HOLD)
_FRAGMENT: Final = struct.Struct(layout.FRAGMENT_HEADER)
_NO_TRACE: Final = (0, 0, 0)
_monotonic_ns = time.monotonic_ns


class Outgoing:
    """A frame to be sent, as often as it takes.

    Attributes:
        tail: its head and payload, as `arena.remote.wire.pack_frame_tail` makes them.
        buffers: the blocks that go with it, in place: it is on loan for as long as this, or zmq, has them.
    """

    __slots__ = ("buffers", "payload_bytes", "sent_ns", "tail", "trace")

    def __init__(self, kind: int, sent_ns: int, trace: tuple[int, int, int], payload_bytes: int) -> None:
        self.sent_ns = sent_ns
        self.trace = trace
        self.payload_bytes = payload_bytes
        self.buffers: list[memoryview] = []
        self.tail = b""

    def pack(self, kind: int, payload: bytes) -> None:
        """Once all buffers are known."""
        sizes = [buffer.nbytes for buffer in self.buffers]
        self.tail = wire.pack_frame_tail(kind, self.sent_ns, self.trace, sizes, payload)


class Latest:
    """The last frame without blocks that was made ready: the next reader gets the same."""

    __slots__ = ("out", "sequence")

    def __init__(self) -> None:
        self.sequence = -1
        self.out: Outgoing | None = None


class StandIn(Reader):
    """Attached like any reader, from the forwarder's process. Its `consumed` is what the reader beyond has taken.

    Args:
        handle: of the queue.
        rank: the reader's.
        where: the reader's host:pid.
        latest: what all of this ring's have in common.
        timeout: seconds that the writer's process may take to answer.
    """

    __slots__ = ("_front", "_kept", "_latest", "_sent_word", "_waited_ns")

    def __init__(self, handle: Handle, rank: int, where: str, latest: Latest, *, timeout: float | None) -> None:
        super().__init__(replace(handle, prefault=False), rank, timeout=timeout, on_warning=None, where=where)
        self._kept: dict[int, Outgoing] = {}
        self._latest = latest
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
    def outgoing(self, sequence: int) -> Outgoing:
        """A published frame that has not been taken yet, with all it needs at the other end.

        Raises:
            CorruptFrame: the ring does not hold it, or it names what does not exist.
        """
        out = self._kept.get(sequence)
        if out is None:
            latest = self._latest
            out = latest.out if latest.sequence == sequence else None
            self._kept[sequence] = out = out or self._made_ready(sequence)
        return out

    def _made_ready(self, sequence: int) -> Outgoing:
        kind, traced = self._ring.kind(sequence)
        view = self._ring.payload(sequence)
        payload = bytes(view)
        sent_ns = self._heads[layout.slot_of(sequence, self._slots)][layout.HEAD_SENT_NS]
        out = Outgoing(kind, sent_ns, self._ring.trace(sequence) if traced else _NO_TRACE, len(payload))
        if kind != layout.KIND_INLINE:
            for hold in self._holds(kind, view, sequence, out.buffers):
                out.buffers.append(self._borrower.borrow(hold, sequence))
        out.pack(kind, payload)
        if kind == layout.KIND_INLINE:
            self._latest.sequence, self._latest.out = sequence, out
        return out

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
        taken = [self._kept.pop(sequence, None) for sequence in range(first, following)]
        for sequence in range(max(first, following - self._slots), following):
            self._released[layout.slot_of(sequence, self._slots)] = now_ns
        # SYNC POINT slot-reusable (publish): the slots have been read, and need not be again, before this store is seen
        self._consumed[0] = following
        if self._log is not None:
            self._note(first, taken, now_ns)
        taken.clear()  # only now: what is given back earlier is not given back
        self._wake_writer()

    def _note(self, first: int, taken: list[Outgoing | None], now_ns: int) -> None:
        log = self._log
        assert log is not None
        log.done()
        for sequence, out in enumerate(taken, first):
            log.page[L_SEQUENCE] = sequence + 1
            if out is None:
                continue
            if any(out.trace):
                log.taken(sequence, out.trace, (out.sent_ns, now_ns, now_ns, now_ns))
            if sequence & log.sample == log.phase:
                log.frame(sequence, out.sent_ns, now_ns, now_ns)

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
