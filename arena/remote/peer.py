"""One remote reader, as its forwarder sees it: how far it was sent to, how far it has come, whether it lives."""

from __future__ import annotations

import time
from typing import Any, Protocol

from arena.remote import wire
from arena.remote.standin import Outgoing, StandIn

_UNANSWERED: int = 1000  # a reader may work for long while connections come and go; these stay in its memory
_AGAIN_NS = 2_000_000_000
_monotonic_ns = time.monotonic_ns


class Unreachable(Exception):
    """There is no connection to that reader now."""


class Post(Protocol):
    """Sends to one reader."""

    def __call__(self, identity: bytes, head: bytes, data: memoryview | None = None, /) -> None:
        """Queue a message, with data where it lies.

        Raises:
            Unreachable: nobody is connected under that identity.
        """


class Peer:
    """A reader and its seat. Everything here happens under the server's lock.

    Args:
        identity: how the router knows its connection.
        stand_in: its seat in the ring.
        window_bytes: how much may be under way to it.
        post: sends.
    """

    def __init__(self, identity: bytes, stand_in: StandIn, window_bytes: int, post: Post) -> None:
        self.identity = identity
        self.stand_in = stand_in
        self.lost_ns = 0  # since when there is no connection; 0 while there is one
        self._post = post
        self._window_bytes = window_bytes
        self._epoch = 0
        self._first = 0  # with which frame its part begins
        self._cursor: int | None = None  # the next frame to be sent; None until the writer has admitted us
        self._sent = 0  # bytes of this epoch
        self._received = 0  # and how many of them it has taken
        self._sending: Outgoing | None = None  # the frame before the cursor, while chunks of it are left
        self._buffer = self._at = 0
        self._furthest = 0  # where the cursor has been
        self._uncounted = 0  # bytes that went out, and observers have not been told of
        self._unanswered = 0  # pings
        self._pinged_ns = 0
        self._told_end = False

    # ── sending ──────────────────────────────────────────────────────────────────────────────────
    def send_some(self) -> bool:
        """Send one frame, or one chunk, if there is one and room for it."""
        if self.lost_ns or ((cursor := self._cursor) is None and (cursor := self._admitted()) is None):
            return False
        try:
            if self._sending is not None:
                return self._send_chunk(self._sending)
            return self._send_frame(cursor)
        except Unreachable:
            self.lost_ns = _monotonic_ns()
            return False

    def send_short(self, sequence: int, tail: bytes) -> bool:
        """Send a frame without buffers, if it is this one's turn, everything before it is sent, and there is room."""
        if self._cursor != sequence or self._sending is not None or self.lost_ns:
            return False
        nbytes = len(tail) - wire.SHORT_TAIL_BYTES
        if self._sent - self._received + nbytes > self._window_bytes:
            return False
        try:
            self._post(self.identity, wire.pack_frame(self._epoch, self._first, sequence, tail))
        except Unreachable:
            self.lost_ns = _monotonic_ns()
            return False
        self._sent += nbytes
        self._uncounted += nbytes
        self._cursor = self._furthest = sequence + 1  # beyond it nothing is published yet
        return True

    def send_end(self, why: dict[str, Any]) -> bool:
        """Say that nothing more will come, once all has been sent. True if it was said now."""
        cursor, stand_in = self._cursor, self.stand_in
        if self._told_end or self.lost_ns or self._sending is not None:
            return False
        following = stand_in.published if cursor is None else cursor  # not admitted: nothing was ever meant for it
        if following < stand_in.published:
            return False
        self._told_end = self._try(wire.pack_end(self._epoch, following if cursor is not None else 0, why))
        return self._told_end

    def copy_out(self, now_ns: int) -> None:
        """Let observers see what was counted, from time to time."""
        self.stand_in.sent(self._uncounted)
        self._uncounted = 0
        self.stand_in.copy_out(now_ns)

    def ping(self) -> None:
        """Say how far we are; this also shows whether there is a connection.

        One that is not answered is repeated less and less often: it would pile up at a reader that works.
        """
        now_ns = _monotonic_ns()
        if self.lost_ns or now_ns - self._pinged_ns < self._unanswered * _AGAIN_NS or self._unanswered >= _UNANSWERED:
            return
        self._pinged_ns = now_ns
        self._unanswered += self._try(self._ping())

    def probe(self) -> None:
        """Connections have come or gone: is there one, and has everything come through it?"""
        if self._unanswered < _UNANSWERED and self._try(self._ping()):
            self._unanswered += 1
            if self.lost_ns:
                self._begin_again(self.stand_in.following)

    def _ping(self) -> bytes:
        stand_in = self.stand_in
        return wire.pack_ping(wire.Ping(stand_in.ready, self._epoch, stand_in.published, self._sent))

    def _try(self, message: bytes) -> bool:
        try:
            self._post(self.identity, message)
        except Unreachable:
            self.lost_ns = self.lost_ns or _monotonic_ns()
            return False
        return True

    def _admitted(self) -> int | None:
        """With which frame its part begins, once the writer has said so."""
        if self.stand_in.is_admitted():
            self._first = self._cursor = self.stand_in.following
        return self._cursor

    def _send_frame(self, cursor: int) -> bool:
        """Send the next frame. Until it is posted somebody waits: what only keeps the books comes after."""
        stand_in = self.stand_in
        self._cursor = cursor = max(cursor, stand_in.following)  # taken, though we had begun again before it
        if cursor >= stand_in.published:
            return False
        out = stand_in.outgoing(cursor)
        nbytes = out.payload_bytes
        if not self._has_room(nbytes):
            return False
        self._post(self.identity, wire.pack_frame(self._epoch, self._first, cursor, out.tail))
        self._sent += nbytes
        self._uncounted += nbytes
        self._cursor = cursor = cursor + 1
        self._furthest = max(self._furthest, cursor)
        if out.buffers:
            self._sending, self._buffer, self._at = out, 0, 0
            self._skip_empty(out)
        return True

    def _send_chunk(self, out: Outgoing) -> bool:
        assert self._cursor is not None
        buffer = out.buffers[self._buffer]
        data = buffer[self._at : self._at + wire.CHUNK_BYTES]
        if not self._has_room(data.nbytes):
            return False
        head = wire.pack_chunk(wire.Chunk(self._epoch, self._cursor - 1, self._buffer, self._at))
        self._post(self.identity, head, data)
        self._sent += data.nbytes
        self._uncounted += data.nbytes
        self._at += data.nbytes
        if self._at == buffer.nbytes:
            self._buffer, self._at = self._buffer + 1, 0
            self._skip_empty(out)
        return True

    def _skip_empty(self, out: Outgoing) -> None:
        while self._buffer < len(out.buffers) and not out.buffers[self._buffer].nbytes:
            self._buffer += 1
        if self._buffer == len(out.buffers):
            self._sending = None

    def _has_room(self, nbytes: int) -> bool:
        under_way = self._sent - self._received
        return not under_way or under_way + nbytes <= self._window_bytes

    # ── receiving ────────────────────────────────────────────────────────────────────────────────
    def on_taken(self, taken: wire.Taken) -> None:
        """It says how far it has come.

        Raises:
            Malformed: it can't have.
        """
        self._heard()
        following = self.stand_in.following
        if taken.epoch > self._epoch or taken.next > max(self._furthest, following):
            raise wire.Malformed(f"{taken.next} frames taken of {self._furthest} sent, in epoch {taken.epoch}")
        if taken.epoch == self._epoch:
            if taken.received > self._sent:
                raise wire.Malformed(f"{taken.received} bytes received of {self._sent}")
            self._received = max(self._received, taken.received)
        self.stand_in.acknowledge(taken.next)
        self.stand_in.show(taken.state, taken.waited_ns)

    def on_resume(self, epoch: int, following: int) -> None:
        """It misses a frame. An answer to an epoch that is over is no news.

        Raises:
            Malformed: it was never sent that far.
        """
        self._heard()
        if epoch != self._epoch or self._cursor is None:
            return
        if following > self._furthest:  # the cursor may be back before it, from an earlier time that we began again
            raise wire.Malformed(f"frame {following} missing of {self._furthest} sent")
        self._begin_again(max(following, self.stand_in.following))

    def _heard(self) -> None:
        self._unanswered = 0
        if self.lost_ns:
            self._begin_again(self.stand_in.following)

    def _begin_again(self, following: int) -> None:
        """A new epoch: whatever was under way counts no longer."""
        self.lost_ns = 0
        self._epoch += 1
        self._sent = self._received = 0
        self._sending, self._told_end = None, False
        if self._cursor is not None:
            self.stand_in.resent(max(0, self._cursor - following))
            self._cursor = following

    def forget(self) -> None:
        """Let go of what was to be sent."""
        self._sending = None
