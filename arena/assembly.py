"""A message that comes in pieces, put together at a reader.

A piece is added before its slot is released, so an interrupt in between brings the same piece again: adding it twice
is the same as adding it once.
"""

from __future__ import annotations

import struct
from typing import Final

from arena import layout
from arena.errors import CorruptFrame
from arena.state import Message, move

_HEADER: Final = struct.Struct(layout.FRAGMENT_HEADER)


class Assembly:
    """The pieces so far.

    Args:
        max_bytes: no message is longer.
    """

    __slots__ = ("_bytes", "_first", "_max_bytes", "_nbytes", "state")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = bytearray()
        self._first = 0  # sequence of the message's first frame
        self._nbytes = 0
        self.state = Message.NONE

    @property
    def complete(self) -> bool:
        """Whether the last piece has come."""
        return self.state is Message.PARTIAL and self._nbytes == len(self._bytes)

    def add(self, sequence: int, payload: memoryview) -> int:
        """Add the piece in a frame; returns its length in bytes.

        Raises:
            CorruptFrame: it neither continues this message nor begins one of an allowed size.
        """
        if payload.nbytes <= layout.FRAGMENT_HEADER_BYTES:
            raise self._corrupt(sequence, f"{payload.nbytes} bytes")
        total, at, first = _HEADER.unpack_from(payload)
        body = payload[layout.FRAGMENT_HEADER_BYTES :]
        if at == 0 and first == sequence and body.nbytes <= total <= self._max_bytes:
            self._begin(first, total)
        known = self.state is Message.PARTIAL and first == self._first and total == len(self._bytes)
        if not known or at > self._nbytes or at + body.nbytes > total:
            raise self._corrupt(sequence, f"piece {at}..{at + body.nbytes} of {total} bytes from frame {first}")
        self._bytes[at : at + body.nbytes] = body
        self._nbytes = at + body.nbytes
        self.state = move(self.state, "fragment")
        return body.nbytes

    def take(self) -> memoryview:
        """The whole message, writable and the caller's own."""
        whole, self._bytes = self._bytes, bytearray()
        self.state = move(self.state, "complete")
        return memoryview(whole)

    def drop(self) -> None:
        """Forget the pieces: the writer gave the message up, or is gone."""
        self._bytes = bytearray()
        self._nbytes = 0
        if self.state is Message.PARTIAL:
            self.state = move(self.state, "abort")

    def _begin(self, first: int, total: int) -> None:
        if self.state is Message.NONE or self.complete:  # complete: an interrupt struck before it was taken
            self._bytes = bytearray(total)
            self._first = first
            self._nbytes = 0
            self.state = Message.PARTIAL

    def _corrupt(self, sequence: int, found: str) -> CorruptFrame:
        expected = (
            f"the piece at {self._nbytes} of {len(self._bytes)}" if self.state is Message.PARTIAL else "a first piece"
        )
        return CorruptFrame(
            f"frame {sequence} is a fragment of another message",
            expected=expected,
            found=found,
            remedy="something else wrote into the ring; shut the queue down and start both ends anew",
        )
