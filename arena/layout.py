"""Every byte that two processes share, in one place.

Nothing else in Arena knows an offset. Three kinds of segment are laid out here; probe pages, which only
observers read, are laid out in :mod:`arena.probe.page`.

*Ring segment*: owned by the writer, who alone maps it writable. One header page, then the slots::

    0      magic, version, geometry (written once, before the segment is handed over)
    1024   writer words, one cache-line pair each
    2048   one word per rank: the first sequence that this rank's present incarnation takes part in
    4096   slots x slot_bytes; a slot is a 64-byte frame header and the payload

*Control segment*: one per reader incarnation, owned by that reader, who alone maps it writable::

    0      magic, version, rank, pid
    1024   reader words, one cache-line pair each
    4096   when each slot was last released (slots words), then the holds given back (max_holds words), then the tickets
           that each of them named (NAMES words each)
    ...    on a page of its own, the tickets: words that the reader's device writes, one cache-line pair each

*Board segment*: one per rank of an all-reduce on the CPU, owned by that rank, who alone maps it writable::

    0      magic, version, rank, world, bytes of a slot
    1024   the rank's words, one cache-line pair each
    4096   two slots, used in turn

Every participant's words sit 128 bytes apart: x86 prefetches cache lines in pairs, so 64 would still
let two owners fight for one pair (the same spacing as Aeron's counters).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WORD: Final = 8
PAGE: Final = 4096
HUGE_PAGE: Final = 2 << 20
LINE_WORDS: Final = 16

VERSION: Final = 3
RING_MAGIC: Final = 0x4152454E_41524E47  # "ARENARNG"
CONTROL_MAGIC: Final = 0x4152454E_4143544C  # "ARENACTL"
BOARD_MAGIC: Final = 0x4152454E_41424F41  # "ARENABOA"

# ── identity words, at the head of both segments ─────────────────────────────────────────────────
IDENTITY_MAGIC: Final = 0
IDENTITY_VERSION: Final = 1
IDENTITY_PID: Final = 2
IDENTITY_RANK: Final = 3
IDENTITY_SLOTS: Final = 4
IDENTITY_SLOT_BYTES: Final = 5
IDENTITY_HOLDS: Final = 6
IDENTITY_WORDS: Final = 7

# ── writer words, in the ring segment ────────────────────────────────────────────────────────────
LIVE_OFFSET: Final = 1024
PUBLISHED: Final = 0 * LINE_WORDS  # frames published so far; the futex that readers park on
WRITER_PARKED: Final = 1 * LINE_WORDS  # 0, or 1 + the rank whose CONSUMED the writer sleeps on
WRITER_CLOSED: Final = 2 * LINE_WORDS  # 1 once the queue was shut down in an orderly way
READY: Final = 3 * LINE_WORDS  # 1 once every expected reader has attached
WRITER_WORDS: Final = 4 * LINE_WORDS

RANKS_OFFSET: Final = 2048
MAX_READERS: Final = 256
NOT_ADMITTED: Final = (1 << 64) - 1  # no first sequence yet: this incarnation waits for the writer

SLOTS_OFFSET: Final = PAGE

# ── reader words, in the control segment ─────────────────────────────────────────────────────────
CONSUMED: Final = 0 * LINE_WORDS  # frames released so far; the futex that the writer parks on
READER_PARKED: Final = 1 * LINE_WORDS  # 1 while the reader sleeps on PUBLISHED
READER_CLOSED: Final = 2 * LINE_WORDS  # `LEFT` once the reader left in an orderly way, `LOST` if its host did not
READER_MOVES: Final = 3 * LINE_WORDS  # 1 once the reader has followed, or meant to follow, a message to its device
READER_WORDS: Final = 4 * LINE_WORDS
LEFT: Final = 1
LOST: Final = 2  # said by whoever has its seat here: the reader, on another host, is taken for dead

RELEASED_OFFSET: Final = PAGE

# A hold given back: its generation, and above that how many tickets it named. Until the device has written these, it
# may still read the hold's bytes. A name is a ticket's index, and the number that has to be there, or a later one.
NAMES: Final = 3
RETURNED_NAMES_SHIFT: Final = 62
RETURNED_GENERATION: Final = (1 << RETURNED_NAMES_SHIFT) - 1
TICKETS: Final = 16
TICKETS_BYTES: Final = PAGE
NAME_SHIFT: Final = 56
NAME_NUMBER: Final = (1 << NAME_SHIFT) - 1

# ── frames ───────────────────────────────────────────────────────────────────────────────────────
# Header words of a slot. The tag is sequence + kind: one comparison tells a reader that the slot holds the frame
# it wants, and of which kind. No length is written for an inline pickle, which ends itself.
HEAD_TAG: Final = 0
HEAD_SENT_NS: Final = 1  # CLOCK_MONOTONIC at enqueue
HEAD_LENGTH: Final = 2  # bytes of payload
HEAD_TRACE: Final = 3  # three opaque words of trace context, meaningful if FLAG_TRACED
HEAD_FILLED: Final = 6  # of a STREAMED frame: how many bytes of its holds, in their order, are there by now
GIVEN_UP: Final = (1 << 64) - 1  # as HEAD_FILLED, for good: the rest will not come
HEAD_WORDS: Final = 8
PAYLOAD_OFFSET: Final = HEAD_WORDS * WORD

# Kinds lie so far apart that no sequence reaches from one to the next, and differ in at least eleven bits, so that a
# damaged tag is no other kind's. All of it stays below 2**59, where Python's arithmetic is quick.
KIND_INLINE: Final = 0x2B992DF << 32  # the payload is one pickle
KIND_TABLE: Final = 0x54C66D3 << 32  # the payload is a buffer table, small buffers and a pickle
KIND_BLOCK: Final = 0x71E19AC << 32  # the payload is one hold; the block holds what a TABLE payload would
KIND_FRAGMENT: Final = 0x0E5E64A << 32  # a piece of a TABLE payload: total, offset, first sequence, bytes
KIND_ABORT: Final = 0x396BA35 << 32  # discard the pieces so far: the message will not be completed
KIND_STREAMED: Final = 0x17A853B << 32  # as TABLE, and its holds are being filled: see HEAD_FILLED
KINDS: Final = (KIND_INLINE, KIND_TABLE, KIND_BLOCK, KIND_FRAGMENT, KIND_ABORT, KIND_STREAMED)
FLAG_TRACED: Final = 1 << 63

FRAGMENT_HEADER: Final = "QQQ"
FRAGMENT_HEADER_BYTES: Final = 24

# ── blocks ───────────────────────────────────────────────────────────────────────────────────────
BLOCK_ALIGN: Final = PAGE
# A hold as it travels in a frame: segment, offset, bytes, hold id, generation.
HOLD: Final = "QQQQQ"
HOLD_BYTES: Final = 40

# ── boards ───────────────────────────────────────────────────────────────────────────────────────
BOARD_HEAD_WORDS: Final = 5  # magic, version, rank, world, bytes of a slot
ARRIVED: Final = 0 * LINE_WORDS  # steps this rank has published; the futex that the others park on
BOARD_PARKED: Final = 1 * LINE_WORDS  # 0, or 1 + the rank whose ARRIVED this rank sleeps on
BOARD_STATE: Final = 2 * LINE_WORDS  # 0 while in use; else why nothing more will come
TAGS: Final = 3 * LINE_WORDS  # what this rank brought to an even step, and one line on, to an odd one
BOARD_WORDS: Final = 5 * LINE_WORDS
BOARD_SLOTS: Final = 2
BOARD_SLOTS_OFFSET: Final = PAGE


@dataclass(frozen=True)
class Geometry:
    """The numbers both sides must agree on; travels in the handle and in the ring's identity words."""

    slots: int
    slot_bytes: int
    max_holds: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of payload that fit one slot."""
        return self.slot_bytes - PAYLOAD_OFFSET

    @property
    def ring_bytes(self) -> int:
        """Size of the ring segment."""
        return SLOTS_OFFSET + self.slots * self.slot_bytes

    @property
    def returned_offset(self) -> int:
        """Where the words of given-back holds start in a control segment."""
        return RELEASED_OFFSET + self.slots * WORD

    @property
    def named_offset(self) -> int:
        """Where the names of the tickets that those wait for start, `NAMES` for each hold."""
        return self.returned_offset + self.max_holds * WORD

    @property
    def tickets_offset(self) -> int:
        """Where the tickets start, in a control segment."""
        return round_up(self.named_offset + self.max_holds * NAMES * WORD, PAGE)

    @property
    def control_bytes(self) -> int:
        """Size of a reader's control segment."""
        return self.tickets_offset + TICKETS_BYTES


def slot_of(sequence: int, slots: int) -> int:
    """The slot that carries `sequence`. Sequences are never wrapped; only this helper folds them."""
    return sequence % slots


def round_up(nbytes: int, multiple: int) -> int:
    """`nbytes` rounded up to a whole number of `multiple`."""
    return -(-nbytes // multiple) * multiple
