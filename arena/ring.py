"""The ring: fixed slots, one writer, a position per reader. Claim, publish, poll, release.

`published` counts the frames the writer has published; each reader's `consumed` counts those it has released.
Both only grow and live in one place, the shared word, so that an exception between any two instructions leaves
either the old position or the new one. The vocabulary is the LMAX Disruptor's.
"""

from __future__ import annotations

from collections.abc import Sequence

from arena import layout
from arena.errors import CorruptFrame
from arena.layout import HEAD_FILLED, HEAD_LENGTH, HEAD_SENT_NS, HEAD_TAG, HEAD_TRACE, KIND_INLINE, Geometry
from arena.memory import Mapping, Words, ordered_words


def _slot_views(mapping: Mapping, geometry: Geometry) -> tuple[list[memoryview], list[memoryview]]:
    """Header words and payload bytes of every slot: looking a view up is cheaper than slicing one."""
    whole = mapping.view()
    starts = range(layout.SLOTS_OFFSET, geometry.ring_bytes, geometry.slot_bytes)
    heads = [whole[at : at + layout.PAYLOAD_OFFSET].cast("Q") for at in starts]
    payloads = [whole[at + layout.PAYLOAD_OFFSET : at + geometry.slot_bytes] for at in starts]
    return heads, payloads


class WriterRing:
    """The writer's end. `limit` is a sequence known to be claimable up to, refreshed as readers are looked at."""

    __slots__ = ("_heads", "_payloads", "limit", "live", "published", "slots")

    def __init__(self, mapping: Mapping, geometry: Geometry) -> None:
        self.slots = geometry.slots
        self._heads, self._payloads = _slot_views(mapping, geometry)
        self.live = mapping.words(layout.LIVE_OFFSET, layout.WRITER_WORDS)
        self.published = mapping.words(layout.LIVE_OFFSET + layout.PUBLISHED * layout.WORD, 1)
        self.limit = geometry.slots

    def put(self, sequence: int, pickled: bytes, nbytes: int, now_ns: int) -> None:
        """Write and publish one inline pickle, at a claimed sequence: what most messages are, in one call."""
        slot = sequence % self.slots
        self._payloads[slot][:nbytes] = pickled
        head = self._heads[slot]
        head[0] = KIND_INLINE + sequence  # HEAD_TAG
        head[1] = now_ns  # HEAD_SENT_NS
        # SYNC POINT frame-visible (publish): slot bytes before this store are seen by whoever reads it
        self.published[0] = sequence + 1

    def write_pieces(self, sequence: int, kind: int, pieces: Sequence[bytes | memoryview], now_ns: int) -> None:
        """Fill the slot of a claimed sequence with a frame of any kind. Nobody looks at it before `publish`."""
        target = self._payloads[layout.slot_of(sequence, self.slots)]
        at = 0
        for piece in pieces:
            target[at : at + len(piece)] = piece
            at += len(piece)
        head = self._heads[layout.slot_of(sequence, self.slots)]
        head[HEAD_TAG] = kind + sequence
        head[HEAD_SENT_NS] = now_ns
        head[HEAD_LENGTH] = at

    def write_trace(self, sequence: int, trace: tuple[int, int, int]) -> None:
        """Add trace context to a frame already written, and flag it."""
        head = self._heads[layout.slot_of(sequence, self.slots)]
        for index, word in enumerate(trace):
            head[HEAD_TRACE + index] = word
        head[HEAD_TAG] |= layout.FLAG_TRACED

    def filled(self, sequence: int) -> Words:
        """The word that says how far the holds of a streamed frame are filled, see `arena.filling`."""
        return _filled(self._heads, sequence, self.slots)

    def publish(self, sequence: int) -> None:
        """Let the readers see the frame."""
        # SYNC POINT frame-visible (publish): slot bytes before this store are seen by whoever reads it
        self.published[0] = sequence + 1


class SizedWriterRing(WriterRing):
    """The same for a ring whose frames travel: a pickle ends itself, but whoever forwards it must know where."""

    __slots__ = ()

    def put(self, sequence: int, pickled: bytes, nbytes: int, now_ns: int) -> None:
        """See `WriterRing.put`."""
        self._heads[sequence % self.slots][HEAD_LENGTH] = nbytes
        super().put(sequence, pickled, nbytes, now_ns)


class ReaderRing:
    """A reader's end: the ring read-only, and this reader's own control words."""

    __slots__ = ("consumed", "control", "heads", "payloads", "published", "released", "slots", "writer")

    def __init__(self, ring: Mapping, control: Mapping, geometry: Geometry) -> None:
        self.slots = geometry.slots
        self.heads, self.payloads = _slot_views(ring, geometry)
        self.writer = ring.words(layout.LIVE_OFFSET, layout.WRITER_WORDS)
        self.published = ring.words(layout.LIVE_OFFSET + layout.PUBLISHED * layout.WORD, 1)
        self.control = control.words(layout.LIVE_OFFSET, layout.READER_WORDS)
        self.consumed = control.words(layout.LIVE_OFFSET + layout.CONSUMED * layout.WORD, 1)
        self.released = control.raw_words(layout.RELEASED_OFFSET, geometry.slots)

    def kind(self, sequence: int) -> tuple[int, bool]:
        """Kind of a visible frame, and whether trace context came with it.

        Raises:
            CorruptFrame: the slot does not hold this sequence.
        """
        tag = self.heads[layout.slot_of(sequence, self.slots)][HEAD_TAG]
        kind = (tag & ~layout.FLAG_TRACED) - sequence
        if kind not in layout.KINDS:
            raise self._corrupt(sequence, f"tag {tag:#x}")
        return kind, bool(tag & layout.FLAG_TRACED)

    def payload(self, sequence: int) -> memoryview:
        """A frame's payload, in place; valid until `release`.

        Raises:
            CorruptFrame: its length leads outside the slot.
        """
        slot = layout.slot_of(sequence, self.slots)
        length = self.heads[slot][HEAD_LENGTH]
        if length > self.payloads[slot].nbytes:
            raise self._corrupt(sequence, f"{length} bytes in a slot of {self.payloads[slot].nbytes}")
        return self.payloads[slot][:length]

    def trace(self, sequence: int) -> tuple[int, int, int]:
        """The frame's trace context."""
        head = self.heads[layout.slot_of(sequence, self.slots)]
        return head[HEAD_TRACE], head[HEAD_TRACE + 1], head[HEAD_TRACE + 2]

    def filled(self, sequence: int) -> Words:
        """The word that says how far the holds of a streamed frame are filled, see `arena.filling`."""
        return _filled(self.heads, sequence, self.slots)

    def release(self, sequence: int, now_ns: int) -> None:
        """Let the writer reuse the slot."""
        self.released[sequence % self.slots] = now_ns
        # SYNC POINT slot-reusable (publish): the slot has been read before this store is seen
        self.consumed[0] = sequence + 1

    def _corrupt(self, sequence: int, found: str) -> CorruptFrame:
        return CorruptFrame(
            f"slot {layout.slot_of(sequence, self.slots)} does not hold frame {sequence}",
            expected=f"a tag of {sequence:#x} and a kind",
            found=found,
            remedy="something else wrote into the ring; shut the queue down and start both ends anew",
        )


def _filled(heads: list[memoryview], sequence: int, slots: int) -> Words:
    return ordered_words(heads[layout.slot_of(sequence, slots)][HEAD_FILLED : HEAD_FILLED + 1])


def released_at(released: Words, sequence: int, slots: int) -> int:
    """When a reader released `sequence`; its table remembers the last `slots` of them."""
    return released[layout.slot_of(sequence, slots)]
