"""A message that comes in pieces, put together at a reader.

A piece is added before its slot is released, so an interrupt in between brings the same piece again: adding it twice
is the same as adding it once.
"""

from __future__ import annotations

import struct
from typing import Final

from arena import layout
from arena.errors import CorruptFrame
from arena.state import Message

_HEADER: Final = struct.Struct(layout.FRAGMENT_HEADER)


class _Pieces:
    """One message under way."""

    __slots__ = ("first", "nbytes", "whole")

    def __init__(self, first: int, total: int) -> None:
        self.first = first  # sequence of its first frame
        self.whole = bytearray(total)
        self.nbytes = 0  # so far


TABLE_SLACK_BYTES: Final = 1 << 30
"""What tables, specs and padding may add to a message's own bytes."""


class Assembly:
    """The pieces so far. Each change is one store, so that an interrupt finds the old state or the new one.

    Args:
        max_bytes: no message is longer.
    """

    __slots__ = ("_max_bytes", "_pieces")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: _Pieces | None = None

    @property
    def state(self) -> Message:
        """Whether a message is under way."""
        return Message.NONE if self._pieces is None else Message.PARTIAL

    @property
    def complete(self) -> bool:
        """Whether the last piece has come."""
        return self._pieces is not None and self._pieces.nbytes == len(self._pieces.whole)

    def add(self, sequence: int, payload: memoryview) -> int:
        """Add the piece in a frame; returns its length in bytes.

        Raises:
            CorruptFrame: it neither continues this message nor begins one of an allowed size.
        """
        if payload.nbytes <= layout.FRAGMENT_HEADER_BYTES:
            raise self._corrupt(sequence, f"{payload.nbytes} bytes")
        total, at, first = _HEADER.unpack_from(payload)
        body = payload[layout.FRAGMENT_HEADER_BYTES :]
        if at == 0 and first == sequence and body.nbytes <= total <= self._max_bytes and self._may_begin(first):
            self._pieces = _Pieces(first, total)
        pieces = self._pieces
        known = pieces is not None and first == pieces.first and total == len(pieces.whole)
        if pieces is None or not known or at > pieces.nbytes or at + body.nbytes > total:
            raise self._corrupt(sequence, f"piece {at}..{at + body.nbytes} of {total} bytes from frame {first}")
        pieces.whole[at : at + body.nbytes] = body
        pieces.nbytes = at + body.nbytes
        return body.nbytes

    def whole(self) -> memoryview:
        """The complete message, writable and the caller's own."""
        assert self._pieces is not None, "only a complete message is whole"
        return memoryview(self._pieces.whole)

    def drop(self) -> None:
        """Forget the pieces: they have been decoded, the writer gave the message up, or it is gone."""
        self._pieces = None

    def _may_begin(self, first: int) -> bool:
        """Nothing is under way, or this very message is, or one that was decoded before an interrupt struck."""
        return self._pieces is None or self._pieces.first == first or self.complete

    def _corrupt(self, sequence: int, found: str) -> CorruptFrame:
        pieces = self._pieces
        expected = "a first piece" if pieces is None else f"the piece at {pieces.nbytes} of {len(pieces.whole)}"
        return CorruptFrame(
            f"frame {sequence} is a fragment of another message",
            expected=expected,
            found=found,
            remedy="something else wrote into the ring; shut the queue down and start both ends anew",
        )
