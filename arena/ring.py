"""The ring: fixed slots, one writer, a position per reader. Claim, publish, poll, release.

`published` counts the frames the writer has published; each reader's `consumed` counts those it has released.
Both only grow and live in one place, the shared word, so that an exception between any two instructions leaves
either the old position or the new one. The vocabulary is the LMAX Disruptor's.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from arena import layout
from arena.errors import CorruptFrame
from arena.layout import Geometry
from arena.memory import Mapping, Words

_HEADER: Final = struct.Struct(layout.FRAME_HEADER)
_TRACE: Final = struct.Struct(layout.FRAME_TRACE)
_pack_header = _HEADER.pack
_unpack_header = _HEADER.unpack_from


class WriterRing:
    """The writer's end. `limit` is a sequence known to be claimable up to, refreshed as readers are looked at."""

    __slots__ = ("_bytes", "geometry", "limit", "live", "published", "ready_word", "slots", "slot_bytes")

    def __init__(self, mapping: Mapping, geometry: Geometry) -> None:
        self.geometry = geometry
        self.slots = geometry.slots
        self.slot_bytes = geometry.slot_bytes
        self._bytes = mapping.view()
        self.live = mapping.words(layout.LIVE_OFFSET, layout.WRITER_WORDS)
        self.published = mapping.words(layout.LIVE_OFFSET + layout.PUBLISHED * layout.WORD, 1)
        self.limit = geometry.slots

    def write(self, sequence: int, kind: int, payload: bytes, now_ns: int) -> None:
        """Fill the slot of a claimed sequence. Nobody looks at it before `publish`."""
        start = layout.SLOTS_OFFSET + (sequence % self.slots) * self.slot_bytes
        length = len(payload)
        self._bytes[start : start + 32] = _pack_header(
            sequence ^ length ^ layout.FRAME_MAGIC, length | kind << 32, now_ns, sequence
        )
        start += layout.PAYLOAD_OFFSET
        self._bytes[start : start + length] = payload

    def write_pieces(self, sequence: int, kind: int, pieces: Sequence[memoryview], now_ns: int) -> None:
        """The same for a payload in several pieces."""
        start = self._payload_start(sequence)
        at = start
        for piece in pieces:
            self._bytes[at : at + len(piece)] = piece
            at += len(piece)
        length = at - start
        head = start - layout.PAYLOAD_OFFSET
        self._bytes[head : head + layout.FRAME_HEADER_BYTES] = _pack_header(
            sequence ^ length ^ layout.FRAME_MAGIC, length | kind << layout.KIND_SHIFT, now_ns, sequence
        )

    def write_trace(self, sequence: int, trace: tuple[int, int, int]) -> None:
        """Add trace context to a frame already written, and flag it."""
        head = self._payload_start(sequence) - layout.PAYLOAD_OFFSET
        at = head + layout.FRAME_TRACE_OFFSET
        self._bytes[at : at + _TRACE.size] = _TRACE.pack(*trace)
        words = self._bytes[head : head + layout.FRAME_HEADER_BYTES].cast("Q")
        words[1] |= layout.FLAG_TRACED

    def publish(self, sequence: int) -> None:
        """Let the readers see the frame."""
        # SYNC POINT frame-visible (publish): slot bytes before this store are seen by whoever reads it
        self.published[0] = sequence + 1

    def _payload_start(self, sequence: int) -> int:
        slot = layout.slot_of(sequence, self.slots)
        return layout.SLOTS_OFFSET + slot * self.slot_bytes + layout.PAYLOAD_OFFSET


class ReaderRing:
    """A reader's end: the ring read-only, and this reader's own control words."""

    __slots__ = (
        "_bytes",
        "_payload_bytes",
        "_released",
        "consumed",
        "control",
        "payloads",
        "published",
        "slot_bytes",
        "slots",
        "writer",
    )

    def __init__(self, ring: Mapping, control: Mapping, geometry: Geometry) -> None:
        self.slots = geometry.slots
        self.slot_bytes = geometry.slot_bytes
        self._payload_bytes = geometry.payload_bytes
        self._bytes = ring.view()
        self.writer = ring.words(layout.LIVE_OFFSET, layout.WRITER_WORDS)
        self.published = ring.words(layout.LIVE_OFFSET + layout.PUBLISHED * layout.WORD, 1)
        self.control = control.words(layout.LIVE_OFFSET, layout.READER_WORDS)
        self.consumed = control.words(layout.LIVE_OFFSET + layout.CONSUMED * layout.WORD, 1)
        self._released = control.raw_words(layout.RELEASED_OFFSET, geometry.slots)
        starts = [layout.SLOTS_OFFSET + slot * geometry.slot_bytes for slot in range(geometry.slots)]
        # One view per slot for the unpickler, which stops by itself: slicing to length costs 50 ns more.
        self.payloads = [self._bytes[at + layout.PAYLOAD_OFFSET : at + geometry.slot_bytes] for at in starts]

    def header(self, sequence: int) -> tuple[int, int, int]:
        """Kind (with flags above it), length and enqueue time of a visible frame.

        Raises:
            CorruptFrame: the slot does not hold this sequence.
        """
        start = layout.SLOTS_OFFSET + (sequence % self.slots) * self.slot_bytes
        check, word, sent_ns, _ = _unpack_header(self._bytes, start)
        length = word & 0xFFFFFFFF
        if check != sequence ^ length ^ layout.FRAME_MAGIC or length > self._payload_bytes:
            raise self._corrupt(sequence)
        return word >> 32, length, sent_ns

    def trace(self, sequence: int) -> tuple[int, int, int]:
        """The frame's trace context."""
        slot = layout.slot_of(sequence, self.slots)
        start = layout.SLOTS_OFFSET + slot * self.slot_bytes + layout.FRAME_TRACE_OFFSET
        a, b, c = _TRACE.unpack_from(self._bytes, start)
        return a, b, c

    def payload(self, sequence: int, length: int) -> memoryview:
        """The frame's payload, in place; valid until `release`."""
        return self.payloads[layout.slot_of(sequence, self.slots)][:length]

    def release(self, sequence: int, now_ns: int) -> None:
        """Let the writer reuse the slot."""
        self._released[sequence % self.slots] = now_ns
        # SYNC POINT slot-reusable (publish): the slot has been read before this store is seen
        self.consumed[0] = sequence + 1

    def _corrupt(self, sequence: int) -> CorruptFrame:
        start = layout.SLOTS_OFFSET + layout.slot_of(sequence, self.slots) * self.slot_bytes
        check, word, _, found = _unpack_header(self._bytes, start)
        return CorruptFrame(
            f"slot {layout.slot_of(sequence, self.slots)} does not hold frame {sequence}",
            expected=f"check word {sequence ^ (word & layout.LENGTH_MASK) ^ layout.FRAME_MAGIC:#x}, sequence {sequence}",
            found=f"check word {check:#x}, sequence {found}, length {word & layout.LENGTH_MASK}",
            remedy="something else wrote into the ring; shut the queue down and start both ends anew",
        )


def released_at(released: Words, sequence: int, slots: int) -> int:
    """When a reader released `sequence`; its table remembers the last `slots` of them."""
    return released[layout.slot_of(sequence, slots)]
