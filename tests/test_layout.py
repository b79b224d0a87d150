"""Every shared byte has one owner, one place and one alignment."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena import layout
from arena.layout import Geometry, round_up, slot_of
from arena.probe.page import PAGE_MAGIC

GEOMETRIES = st.builds(
    Geometry,
    slots=st.integers(2, 1 << 14),
    slot_bytes=st.integers(4, 1 << 12).map(lambda lines: lines * 64),
    max_holds=st.integers(1, 1 << 16),
)


@pytest.mark.parametrize(
    "words",
    [
        (layout.PUBLISHED, layout.WRITER_PARKED, layout.WRITER_CLOSED, layout.READY),
        (layout.CONSUMED, layout.READER_PARKED, layout.READER_CLOSED),
    ],
    ids=["writer", "reader"],
)
def test_live_words_keep_off_each_others_pair_of_cache_lines(words):
    pairs = [word * layout.WORD // 128 for word in words]
    assert len(set(pairs)) == len(words)


def test_the_parts_of_a_header_page_do_not_overlap():
    assert layout.IDENTITY_WORDS * layout.WORD <= layout.LIVE_OFFSET
    assert layout.LIVE_OFFSET + layout.WRITER_WORDS * layout.WORD <= layout.RANKS_OFFSET
    assert layout.RANKS_OFFSET + layout.MAX_READERS * layout.WORD <= layout.SLOTS_OFFSET
    assert layout.LIVE_OFFSET + layout.READER_WORDS * layout.WORD <= layout.RELEASED_OFFSET


def test_identity_words_are_told_apart():
    words = [value for name, value in vars(layout).items() if name.startswith("IDENTITY_") and name != "IDENTITY_WORDS"]
    assert sorted(words) == list(range(layout.IDENTITY_WORDS))


def test_every_live_word_is_inside_its_block():
    assert max(layout.PUBLISHED, layout.WRITER_PARKED, layout.WRITER_CLOSED, layout.READY) < layout.WRITER_WORDS
    assert max(layout.CONSUMED, layout.READER_PARKED, layout.READER_CLOSED) < layout.READER_WORDS


def test_a_frame_header_holds_what_it_names():
    assert len({layout.HEAD_TAG, layout.HEAD_SENT_NS, layout.HEAD_LENGTH, *range(layout.HEAD_TRACE, 6)}) == 6
    assert layout.HEAD_TRACE + 3 <= layout.HEAD_WORDS
    assert layout.HEAD_WORDS * layout.WORD == layout.PAYLOAD_OFFSET


def test_declared_sizes_are_those_of_the_formats():
    assert struct.calcsize(layout.FRAGMENT_HEADER) == layout.FRAGMENT_HEADER_BYTES
    assert struct.calcsize(layout.HOLD) == layout.HOLD_BYTES


def test_the_smallest_slot_carries_a_fragment_and_a_hold():
    smallest = Geometry(slots=2, slot_bytes=256, max_holds=1).payload_bytes
    assert smallest > layout.FRAGMENT_HEADER_BYTES
    assert smallest >= layout.HOLD_BYTES


def test_no_sequence_reaches_from_one_kind_of_frame_to_the_next():
    # A frame a microsecond for a thousand years is 2**55 frames.
    assert all(later - kind > 1 << 55 for kind, later in itertools.pairwise(sorted(layout.KINDS)))
    assert layout.KINDS[-1] + (1 << 55) < layout.FLAG_TRACED


def test_small_numbers_are_no_tags():
    assert min(layout.KINDS) > 1 << 55


def test_magic_words_are_told_apart():
    magics = [layout.RING_MAGIC, layout.CONTROL_MAGIC, PAGE_MAGIC]
    assert len(set(magics)) == 3
    assert all(0 < magic < 1 << 64 for magic in magics)


@given(GEOMETRIES)
def test_slots_fill_the_ring_segment_exactly(geometry):
    assert geometry.ring_bytes == layout.SLOTS_OFFSET + geometry.slots * geometry.slot_bytes
    assert geometry.payload_bytes == geometry.slot_bytes - layout.PAYLOAD_OFFSET


@given(GEOMETRIES)
def test_a_control_segment_has_room_for_its_tables_and_no_page_more(geometry):
    assert geometry.returned_offset == layout.RELEASED_OFFSET + geometry.slots * layout.WORD
    assert geometry.named_offset == geometry.returned_offset + geometry.max_holds * layout.WORD
    end = geometry.named_offset + geometry.max_holds * layout.NAMES * layout.WORD
    assert end <= geometry.tickets_offset < end + layout.PAGE
    assert geometry.tickets_offset % layout.PAGE == 0
    assert layout.TICKETS * layout.LINE_WORDS * layout.WORD <= layout.TICKETS_BYTES
    assert geometry.control_bytes == geometry.tickets_offset + layout.TICKETS_BYTES
    assert geometry.control_bytes % layout.PAGE == 0


@given(st.integers(0, 1 << 63), st.integers(2, 1 << 14))
def test_sequences_one_round_apart_share_a_slot_and_no_others_do(sequence, slots):
    assert slot_of(sequence, slots) == slot_of(sequence + slots, slots)
    assert slot_of(sequence, slots) != slot_of(sequence + 1, slots)
    assert 0 <= slot_of(sequence, slots) < slots


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30))
def test_rounding_up_gives_the_next_multiple(nbytes, multiple):
    rounded = round_up(nbytes, multiple)
    assert rounded % multiple == 0
    assert nbytes <= rounded < nbytes + multiple
