"""The ring: every reader gets every frame once, in order, and anything else in a slot is told from a frame."""

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from arena import MessageQueue, QueueConfig, layout
from arena.errors import ArenaError, CorruptFrame, QueueTimeout
from arena.layout import Geometry
from arena.memory import Segment
from arena.ring import ReaderRing, WriterRing, released_at
from arena.writer import Writer

MASK = (1 << 64) - 1
OTHER_KINDS = [kind for kind in layout.KINDS if kind != layout.KIND_INLINE]


class Rig:
    """One writer's and some readers' ends of a ring, in one process but on mappings of their own."""

    def __init__(self, slots: int = 4, slot_bytes: int = 256, readers: int = 1) -> None:
        self.geometry = Geometry(slots, slot_bytes, max_holds=8)
        self._segment = Segment.create("ring", self.geometry.ring_bytes)
        self.mapping = self._segment.mapping
        self.writer = WriterRing(self.mapping, self.geometry)
        self.controls = [Segment.create("control", self.geometry.control_bytes) for _ in range(readers)]
        self.readers = [self._reader(control) for control in self.controls]

    def _reader(self, control: Segment) -> ReaderRing:
        ring = Segment.attach(os.dup(self._segment.fd), self.geometry.ring_bytes)
        ring.close()
        return ReaderRing(ring.mapping, control.mapping, self.geometry)

    def publish(self, payload: bytes, kind: int = layout.KIND_TABLE, now_ns: int = 1) -> int:
        sequence = self.writer.published[0]
        self.writer.write_pieces(sequence, kind, [memoryview(payload)], now_ns)
        self.writer.publish(sequence)
        return sequence

    def head(self, sequence: int) -> memoryview:
        """The header words of a frame, for whoever wants to damage them."""
        slot = layout.slot_of(sequence, self.geometry.slots)
        return self.mapping.raw_words(layout.SLOTS_OFFSET + slot * self.geometry.slot_bytes, layout.HEAD_WORDS)

    def close(self) -> None:
        for segment in (self._segment, *self.controls):
            segment.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    one = Rig()
    yield one
    one.close()


# --- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("nbytes", [0, 1, 191, 192])
def test_a_frame_arrives_as_it_was_written(rig, kind, nbytes):
    payload = bytes(range(nbytes))
    sequence = rig.publish(payload, kind)
    (reader,) = rig.readers
    assert reader.published[0] == 1
    assert reader.kind(sequence) == (kind, False)
    assert bytes(reader.payload(sequence)) == payload


def test_pieces_arrive_as_one_payload(rig):
    pieces = [memoryview(b"abc"), memoryview(b""), memoryview(bytearray(b"defg"))]
    rig.writer.write_pieces(0, layout.KIND_TABLE, pieces, 1)
    rig.writer.publish(0)
    assert bytes(rig.readers[0].payload(0)) == b"abcdefg"


def test_an_inline_pickle_ends_itself(rig):
    pickled = pickle.dumps({"step": 1}, 5)
    rig.publish(b"\xff" * 192)
    for sequence in range(1, 5):
        rig.writer.put(sequence, pickled, len(pickled), 1)
    (reader,) = rig.readers
    assert reader.kind(4) == (layout.KIND_INLINE, False), "in the slot that was full of other bytes"
    assert pickle.loads(reader.payloads[0]) == {"step": 1}


@pytest.mark.parametrize("kind", layout.KINDS)
def test_trace_context_rides_along_and_says_so(rig, kind):
    trace = (0, MASK, 1 << 63)
    rig.writer.write_pieces(0, kind, [memoryview(b"x")], 1)
    rig.writer.write_trace(0, trace)
    rig.writer.publish(0)
    (reader,) = rig.readers
    assert reader.kind(0) == (kind, True)
    assert reader.trace(0) == trace
    for sequence in range(1, 5):
        rig.publish(b"y", kind)
        assert reader.kind(sequence) == (kind, False), "the slot's next frame has no trace of it"


def test_a_payload_too_long_for_its_slot_never_reaches_the_next_one(rig):
    rig.publish(b"first")
    rig.publish(b"second")
    with pytest.raises(ValueError):
        rig.writer.write_pieces(2, layout.KIND_TABLE, [memoryview(bytes(100)), memoryview(bytes(93))], 1)
    assert bytes(rig.readers[0].payload(0)) == b"first"
    assert bytes(rig.readers[0].payload(1)) == b"second"


def test_nothing_is_seen_before_it_is_published(rig):
    rig.writer.write_pieces(0, layout.KIND_TABLE, [memoryview(b"x")], 1)
    assert rig.readers[0].published[0] == 0


def test_a_release_is_seen_by_the_writer_with_its_time(rig):
    (reader,) = rig.readers
    for sequence in range(6):
        rig.publish(b"x")
        reader.release(sequence, 1000 + sequence)
    control = rig.controls[0].mapping
    released = control.raw_words(layout.RELEASED_OFFSET, rig.geometry.slots)
    assert control.words(layout.LIVE_OFFSET, layout.READER_WORDS)[layout.CONSUMED] == 6
    assert [released_at(released, sequence, rig.geometry.slots) for sequence in (2, 3, 4, 5)] == [
        1002,
        1003,
        1004,
        1005,
    ]


# --- what is no frame ------------------------------------------------------------------------------------------------


def is_a_frame(rig: Rig, sequence: int) -> bool:
    try:
        rig.readers[0].kind(sequence)
        rig.readers[0].payload(sequence)
    except CorruptFrame as error:
        assert str(sequence) in str(error)
        assert error.expected or error.found
        return False
    return True


@pytest.mark.parametrize("kind", layout.KINDS)
def test_a_flipped_bit_in_the_sequence_or_the_stamp_is_found(rig, kind):
    sequence = rig.publish(b"x", kind)
    for bit in range(56):
        rig.head(sequence)[layout.HEAD_TAG] ^= 1 << bit
        assert not is_a_frame(rig, sequence), f"bit {bit}"
        rig.head(sequence)[layout.HEAD_TAG] ^= 1 << bit
    assert is_a_frame(rig, sequence)


@pytest.mark.parametrize("value", [0, MASK, 1, 255, 1 << 32, 1 << 63])
def test_a_tag_that_was_overwritten_is_found(rig, value):
    sequence = rig.publish(b"x")
    rig.head(sequence)[layout.HEAD_TAG] = value
    assert not is_a_frame(rig, sequence)


@pytest.mark.parametrize("value", [193, 256, 1 << 32, MASK])
def test_a_length_beyond_the_slot_is_found(rig, value):
    sequence = rig.publish(b"x")
    rig.head(sequence)[layout.HEAD_LENGTH] = value
    assert not is_a_frame(rig, sequence)


@given(st.integers(0, MASK), st.integers(0, 1 << 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_number_passes_for_a_tag_but_those_of_this_sequence(rig, word, sequence):
    rig.head(sequence)[layout.HEAD_TAG] = word
    rig.head(sequence)[layout.HEAD_LENGTH] = 0
    right = {kind + sequence for kind in layout.KINDS} | {kind + sequence | layout.FLAG_TRACED for kind in layout.KINDS}
    assert is_a_frame(rig, sequence) == (word in right)


@given(st.sampled_from(layout.KINDS), st.integers(0, 1 << 50), st.sampled_from(layout.KINDS), st.integers(0, 1 << 50))
def test_two_frames_never_carry_the_same_tag(kind, sequence, other_kind, other_sequence):
    same = (kind, sequence) == (other_kind, other_sequence)
    assert (kind + sequence == other_kind + other_sequence) == same


@pytest.mark.parametrize("kind", layout.KINDS)
def test_the_frame_before_or_after_in_the_same_slot_is_not_taken_for_this_one(rig, kind):
    for _ in range(5):
        rig.publish(b"x", kind)
    assert is_a_frame(rig, 4)
    assert not is_a_frame(rig, 0), "overwritten by frame 4"
    assert not is_a_frame(rig, 8), "not written yet"


def test_an_empty_slot_is_no_frame(rig):
    assert not is_a_frame(rig, 0)


# --- what is no frame, at an endpoint --------------------------------------------------------------------------------


@pytest.fixture
def pair(run_dir):
    config = QueueConfig(slots=4, slot_bytes=512, min_block_bytes=128)
    with (
        MessageQueue(1, config=config) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        yield writer, reader


def words_of_slot(writer: MessageQueue, slot: int) -> memoryview:
    assert isinstance(writer, Writer)
    return writer._segment.mapping.raw_words(layout.SLOTS_OFFSET + slot * 512, 512 // 8)


MESSAGES: dict[str, Any] = {"inline": {"step": 1}, "table": torch.arange(3), "block": torch.arange(1000)}


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        (layout.HEAD_TAG, "inline"),  # which ends itself, and has no length
        (layout.HEAD_TAG, "table"),
        (layout.HEAD_LENGTH, "table"),
        (layout.HEAD_TAG, "block"),
        (layout.HEAD_LENGTH, "block"),
    ],
)
def test_a_reader_refuses_a_damaged_header_and_keeps_its_place(pair, word, kind):
    writer, reader = pair
    writer.enqueue(MESSAGES[kind])
    words_of_slot(writer, 0)[word] ^= 1 << 40
    for _ in range(2):
        with pytest.raises(CorruptFrame):
            reader.dequeue(timeout=0)
    assert reader.statistics().errors == {"corrupt_frame": 2}
    words_of_slot(writer, 0)[word] ^= 1 << 40
    received = reader.dequeue(timeout=0)
    assert received == {"step": 1} if kind == "inline" else torch.equal(received, MESSAGES[kind])


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@pytest.mark.parametrize("kind", ["table", "block"])
def test_no_damage_to_a_table_takes_the_reader_down(pair, kind, data):
    writer, reader = pair
    sequence = writer.statistics().published
    writer.enqueue(MESSAGES[kind])
    words = words_of_slot(writer, sequence % 4)
    table_words = range(layout.HEAD_WORDS, layout.HEAD_WORDS + 3 + 5)  # the table's own head, and its one entry
    at = data.draw(st.sampled_from([layout.HEAD_TAG, layout.HEAD_LENGTH, *table_words]))
    words[at] ^= data.draw(st.integers(1, MASK) | st.integers(0, 63).map(lambda bit: 1 << bit))
    with contextlib.suppress(ArenaError):
        assert isinstance(reader.dequeue(timeout=0), torch.Tensor)
    if reader.statistics().consumed_by_reader[0] == sequence:
        reader._ring.release(sequence, 1)  # no frame: the reader stays before it
    writer.enqueue("the queue goes on")
    assert reader.dequeue(timeout=0) == "the queue goes on"


# --- against a list --------------------------------------------------------------------------------------------------


class RingAgainstList(RuleBasedStateMachine):
    """Claim, publish, poll and release in any order; a list knows what each reader has to see next."""

    @initialize(slots=st.integers(2, 5), readers=st.integers(1, 3))
    def begin(self, slots: int, readers: int) -> None:
        self.rig = Rig(slots=slots, readers=readers)
        self.sent: list[tuple[int, bytes, tuple[int, int, int] | None]] = []
        self.taken = [0] * readers

    def claimable(self) -> bool:
        return len(self.sent) - min(self.taken) < self.rig.geometry.slots

    @precondition(lambda self: self.claimable())
    @rule(
        kind=st.sampled_from(layout.KINDS),
        payload=st.binary(max_size=192),
        trace=st.none() | st.tuples(*[st.integers(0, MASK)] * 3),
    )
    def publish(self, kind: int, payload: bytes, trace: tuple[int, int, int] | None) -> None:
        sequence = self.rig.writer.published[0]
        if kind == layout.KIND_INLINE:
            payload = pickle.dumps(payload[:100], 5)
        if kind == layout.KIND_INLINE and trace is None:
            self.rig.writer.put(sequence, payload, len(payload), 1)
        else:
            cut = len(payload) // 3
            self.rig.writer.write_pieces(sequence, kind, [memoryview(payload[:cut]), memoryview(payload[cut:])], 1)
            if trace is not None:
                self.rig.writer.write_trace(sequence, trace)
            self.rig.writer.publish(sequence)
        self.sent.append((kind, payload, trace))

    @rule(data=st.data())
    def poll_and_perhaps_release(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.taken) - 1))
        reader, sequence = self.rig.readers[rank], self.taken[rank]
        assert reader.consumed[0] == sequence
        if reader.published[0] <= sequence:
            assert sequence == len(self.sent)
            return
        kind, payload, trace = self.sent[sequence]
        assert reader.kind(sequence) == (kind, trace is not None)
        if kind == layout.KIND_INLINE:
            assert pickle.loads(reader.payloads[sequence % reader.slots]) == pickle.loads(payload)
        else:
            assert bytes(reader.payload(sequence)) == payload
        if trace is not None:
            assert reader.trace(sequence) == trace
        if data.draw(st.booleans()):
            reader.release(sequence, 1)
            self.taken[rank] += 1

    @invariant()
    def positions_are_in_order(self) -> None:
        if hasattr(self, "rig"):
            consumed = [reader.consumed[0] for reader in self.rig.readers]
            assert consumed == self.taken
            assert max(consumed) <= self.rig.writer.published[0] <= min(consumed) + self.rig.geometry.slots

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.close()


def test_a_ring_behaves_like_a_list_that_each_reader_walks():
    run_state_machine_as_test(
        RingAgainstList, settings=settings(max_examples=50, stateful_step_count=40, deadline=None)
    )


class QueueAgainstList(RuleBasedStateMachine):
    """The same for whole queues: messages of every size and path, calls that find the ring full or empty or the arena
    full, and readers that keep what they got for as long as they like."""

    SLOTS = 6
    FRAGMENT = 256 - layout.PAYLOAD_OFFSET - layout.FRAGMENT_HEADER_BYTES

    @initialize(readers=st.integers(1, 2), arena=st.sampled_from([0, 32 << 10, 1 << 20]))
    def begin(self, readers: int, arena: int) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="arena-")
        config = QueueConfig(
            slots=self.SLOTS,
            slot_bytes=256,
            max_arena_bytes=arena,
            segment_bytes=16 << 10,
            min_block_bytes=1024,
            run_dir=self.directory.name,
        )
        self.writer = MessageQueue(readers, config=config)
        handle = self.writer.export_handle()
        self.readers = [MessageQueue.create_from_handle(handle, rank) for rank in range(readers)]
        self.sent: list[Any] = []
        self.taken = [0] * readers
        self.kept: list[tuple[Any, Any]] = []
        self.lent: list[torch.Tensor] = []
        self.number = 0

    def message(self, nbytes: int, kind: str) -> Any:
        """Something to send, unlike anything sent before."""
        self.number += 1
        text = self.number.to_bytes(4, "little") * (nbytes // 4 + 1)
        if kind == "bytes":
            return text
        if kind == "both":
            return [torch.frombuffer(bytearray(text), dtype=torch.uint8), text[:1000]]
        if kind == "again" and self.lent:
            return self.lent[self.number % len(self.lent)][self.number % 3 :]
        with self.writer.lend((len(text),), torch.uint8, or_private=True) as tensor:
            tensor.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        if kind == "again":
            self.lent.append(tensor)
        return tensor

    @rule(
        nbytes=st.sampled_from([0, 10, 100, 300, 500, 900, 3000, 9000, 70_000]),
        kind=st.sampled_from(["bytes", "both", "tensor", "again"]),
    )
    def enqueue(self, nbytes: int, kind: str) -> None:
        message = self.message(nbytes, kind)
        before = self.writer.statistics().published
        try:
            self.writer.enqueue(message, timeout=0)
        except QueueTimeout:
            lag = before - min(self.writer.statistics().consumed_by_reader.values())
            frames = (2 * nbytes + 2000) // self.FRAGMENT  # at most, with an abort that may be owed
            assert lag + frames > self.SLOTS, "a timeout with room in the ring"
        else:
            self.sent.append(own_copy(message))

    @rule(data=st.data())
    def dequeue(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.readers) - 1))
        try:
            message = self.readers[rank].dequeue(timeout=0)
        except QueueTimeout:
            assert self.taken[rank] == len(self.sent)
            return
        expected = self.sent[self.taken[rank]]
        self.taken[rank] += 1
        assert alike(message, expected)
        if data.draw(st.booleans()):
            self.kept.append((message, expected))

    @precondition(lambda self: self.kept or self.lent)
    @rule(data=st.data())
    def let_something_die(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.kept) + len(self.lent) - 1))
        if which < len(self.kept):
            del self.kept[which]
        else:
            del self.lent[which - len(self.kept)]

    @invariant()
    def nobody_is_further_than_the_writer(self) -> None:
        if hasattr(self, "writer"):
            statistics = self.writer.statistics()
            assert all(0 <= lag <= self.SLOTS for lag in statistics.lag_by_reader.values())
            assert all(taken <= len(self.sent) for taken in self.taken)

    @invariant()
    def what_is_kept_does_not_change(self) -> None:
        if hasattr(self, "writer"):
            assert all(alike(message, expected) for message, expected in self.kept)

    def teardown(self) -> None:
        if not hasattr(self, "writer"):
            return
        for rank, reader in enumerate(self.readers):
            while self.taken[rank] < len(self.sent):
                assert alike(reader.dequeue(timeout=0), self.sent[self.taken[rank]])
                self.taken[rank] += 1
            with pytest.raises(QueueTimeout):
                reader.dequeue(timeout=0)
        self.writer.enqueue("still in order", timeout=0)
        assert [reader.dequeue(timeout=0) for reader in self.readers] == ["still in order"] * len(self.readers)
        assert self.writer.statistics().errors.keys() <= {"timeout"}
        self.kept.clear()
        self.lent.clear()
        self.writer._pool.collect()
        statistics = self.writer.statistics()
        assert (statistics.arena_used_bytes, statistics.holds_used) == (0, 0), "nothing is left, of no message"
        for queue in (*self.readers, self.writer):
            queue.shutdown()
        self.directory.cleanup()


def own_copy(message: Any) -> Any:
    """A copy that shares no memory with the message."""
    if isinstance(message, list):
        return [own_copy(one) for one in message]
    return message.clone() if isinstance(message, torch.Tensor) else message


def alike(one: Any, other: Any) -> bool:
    if isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else bool(one == other)


def test_a_queue_behaves_like_a_list_that_each_reader_walks():
    run_state_machine_as_test(
        QueueAgainstList,
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
