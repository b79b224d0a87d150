"""The tensor arena: no byte is given out twice, and every byte comes back once nobody can see it any more."""

import gc
import itertools
import os
import sys
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from arena import MessageQueue, QueueConfig, blocks, layout, memory
from arena.blocks import BlockPool, Hold, NoRoom, PoolLimits, PoolSegment
from arena.borrow import Borrower
from arena.errors import CorruptFrame, OutOfMemory, QueueTimeout
from arena.free_list import FreeList
from arena.layout import Geometry
from arena.peers import Seat
from arena.state import Block as BlockState
from arena.state import Peer
from arena.writer import Writer
from tests.support import processes

PAGE, MIB = layout.PAGE, 1 << 20

# --- free ranges -----------------------------------------------------------------------------------------------------


class Bitmap:
    """A free list as it would be without cleverness: one flag for each unit."""

    def __init__(self, units: int) -> None:
        self.free = [True] * units

    def runs(self) -> list[tuple[int, int]]:
        """Free ranges as (start, length), lowest first, as long as possible."""
        found, at = [], 0
        for free, group in itertools.groupby(self.free):
            length = len(list(group))
            if free:
                found.append((at, length))
            at += length
        return found

    def take(self, units: int) -> int | None:
        for start, length in self.runs():
            if length >= units:
                self.free[start : start + units] = [False] * units
                return start
        return None

    def give(self, start: int, units: int) -> None:
        assert not any(self.free[start : start + units])
        self.free[start : start + units] = [True] * units


@given(st.integers(1, 40), st.lists(st.integers(1, 12) | st.integers(-30, -1), max_size=60))
def test_a_free_list_agrees_with_a_bitmap(units, steps):
    """Positive steps take that many units; negative ones give back one of the ranges that are out."""
    tested, oracle, out = FreeList(units * PAGE), Bitmap(units), []
    for step in steps:
        if step > 0:
            expected = oracle.take(step)
            assert tested.take(step * PAGE) == (None if expected is None else expected * PAGE)
            if expected is not None:
                out.append((expected, step))
        elif out:
            start, length = out.pop(step % len(out))
            oracle.give(start, length)
            tested.give(start * PAGE, length * PAGE)
        runs = oracle.runs()
        assert tested.total == sum(length for _, length in runs) * PAGE
        assert tested.largest == max((length for _, length in runs), default=0) * PAGE
    for start, length in out:
        tested.give(start * PAGE, length * PAGE)
    assert tested.take(units * PAGE) == 0, "all of it in one piece again"


def test_the_lowest_range_that_fits_is_taken():
    free = FreeList(10)
    assert [free.take(n) for n in (2, 3, 1)] == [0, 2, 5]
    free.give(0, 2)
    free.give(5, 1)
    assert free.take(3) == 5, "only there do three fit"
    assert free.take(1) == 0, "lowest, though 5 would fit exactly"


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_neighbours_become_one_range_in_whatever_order_they_come_back(order):
    free = FreeList(4)
    for _ in range(4):
        free.take(1)
    assert (free.total, free.largest, free.take(1)) == (0, 0, None)
    for offset in order:
        free.give(offset, 1)
    assert free.largest == 4


@given(st.integers(1, 30), st.lists(st.tuples(st.integers(0, 29), st.integers(1, 8)), max_size=12))
def test_a_rebuilt_free_list_is_free_but_for_what_is_taken(units, wanted):
    oracle, taken = Bitmap(units), []
    for start, length in sorted(wanted):
        if start + length <= units and all(oracle.free[start : start + length]):
            oracle.free[start : start + length] = [False] * length
            taken.append((start, start + length))
    free = FreeList(units)
    free.take(units)
    free.rebuild(units, taken)
    assert free.total == sum(oracle.free)
    while (start := oracle.take(1)) is not None:
        assert free.take(1) == start
    assert free.take(1) is None


# --- a pool and its readers ------------------------------------------------------------------------------------------

GEOMETRY = Geometry(slots=4, slot_bytes=256, max_holds=8)


class Rig:
    """A writer's pool, and readers that borrow from it, without a queue between them."""

    def __init__(self, readers: int = 2, **limits: Any) -> None:
        settings: dict[str, Any] = {
            "max_arena_bytes": 1 * MIB,
            "segment_bytes": 1 * MIB,
            "max_holds": GEOMETRY.max_holds,
            "prefault": False,
            "huge_pages": False,
            "peers_may_write": False,
            **limits,
        }
        self.handed: dict[int, tuple[int, int]] = {}
        self.refuse_segments = False
        self.pool = BlockPool("test", PoolLimits(**settings), None, self._hand_over)
        self.seats = [Seat(rank, Peer.ATTACHED, GEOMETRY) for rank in range(readers)]
        self.consumed = memoryview(array("Q", [1 << 40]))  # every frame was released, unless a test says otherwise
        self.borrowers = [
            Borrower(
                self.handed.get, lambda _: None, self.consumed, seat.returned, settings["max_holds"], views="readonly"
            )
            for seat in self.seats
        ]
        self.sequence = 0

    def _hand_over(self, new: PoolSegment) -> bool:
        if self.refuse_segments:
            return False
        self.handed[new.number] = (new.segment.nbytes, new.segment.fd)
        return True

    def fill(self, nbytes: int) -> list[Any]:
        """Lend blocks until there is no room."""
        lent = []
        while True:
            try:
                lent.append(self.pool.lend(nbytes))
            except NoRoom:
                return lent

    def send(self, nbytes: int, stamp: int = 1, seats: list[Seat] | None = None) -> Hold:
        """Copy something into a block and send it to the seats."""
        block = self.pool.lend(nbytes)
        block.view(nbytes)[:] = bytes([stamp]) * nbytes
        hold = self.pool.hold(block, block.offset, nbytes)
        self.pool.drop(block)
        return self.publish(hold, seats)

    def publish(self, hold: Hold, seats: list[Seat] | None = None) -> Hold:
        self.pool.send(hold, self.sequence, list(self.seats if seats is None else seats))
        self.sequence += 1
        return hold

    def give_back(self, hold: Hold, rank: int) -> None:
        self.borrow(hold, rank).release()

    def borrow(self, hold: Hold, rank: int = 0) -> memoryview:
        return self.borrowers[rank].borrow(hold.words(), hold.sequence)

    def used(self) -> int:
        self.pool.collect()
        return self.pool.used_bytes


@pytest.fixture
def make() -> Iterator[Any]:
    rigs = []

    def made(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield made
    for one in rigs:
        one.pool.close()


def reason_of(action: Any) -> str:
    with pytest.raises(NoRoom) as caught:
        action()
    return caught.value.reason


# --- room, and the lack of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1])
def test_a_block_is_whole_pages_and_never_none(make, nbytes):
    block = make().pool.lend(nbytes)
    assert block.nbytes == max(PAGE, layout.round_up(nbytes, PAGE))
    assert block.offset % PAGE == 0


def test_an_arena_of_no_bytes_is_disabled(make):
    assert reason_of(lambda: make(max_arena_bytes=0).pool.lend(1)) == "disabled"


def test_more_than_the_whole_arena_is_too_large(make):
    pool = make().pool
    assert reason_of(lambda: pool.lend(1 * MIB + 1)) == "too_large"
    assert pool.lend(1 * MIB).nbytes == 1 * MIB


def test_an_arena_that_readers_hold_all_of_is_full(make):
    rig = make()
    rig.send(1 * MIB)
    assert reason_of(lambda: rig.pool.lend(1)) == "arena_full"


def test_room_that_is_scattered_is_fragmentation(make):
    rig = make()
    held = rig.fill(256 << 10)
    assert len(held) == 4
    rig.pool.drop(held[0])
    rig.pool.drop(held[2])
    assert reason_of(lambda: rig.pool.lend(512 << 10)) == "arena_fragmented"
    assert rig.pool.lend(256 << 10).offset == 0


def test_a_host_without_memory_left_is_asked_for_nothing(make, monkeypatch):
    rig = make()
    monkeypatch.setattr(memory, "headroom_bytes", lambda: 2 * MIB - 1)
    assert reason_of(lambda: rig.pool.lend(1)) == "memory_headroom"
    assert rig.pool.segments == []
    monkeypatch.setattr(memory, "headroom_bytes", lambda: 2 * MIB)
    rig.pool.lend(1)


def test_a_kernel_that_refuses_a_segment_is_no_room(make, monkeypatch):
    rig = make()

    def refuse(*_: object, **__: object) -> None:
        raise OutOfMemory("refused")

    monkeypatch.setattr(blocks.Segment, "create", refuse)
    assert reason_of(lambda: rig.pool.lend(1)) == "memory_headroom"


def test_a_segment_that_can_not_be_handed_over_is_not_used(make):
    rig = make()
    before = len(os.listdir("/proc/self/fd"))
    rig.refuse_segments = True
    assert reason_of(lambda: rig.pool.lend(1)) == "memory_headroom"
    assert (rig.pool.segments, rig.pool.size_bytes) == ([], 0)
    assert len(os.listdir("/proc/self/fd")) == before
    rig.refuse_segments = False
    rig.pool.lend(1)


def test_too_many_segments_are_fragmentation(make, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_SEGMENTS", 3)
    rig = make(segment_bytes=PAGE)
    assert len(rig.fill(PAGE)) == 3
    assert reason_of(lambda: rig.pool.lend(PAGE)) == "arena_fragmented"


def test_without_a_free_hold_nothing_can_be_sent(make):
    rig = make(max_holds=2)
    rig.send(1)
    second = rig.send(1)
    block = rig.pool.lend(1)
    assert reason_of(lambda: rig.pool.hold(block, block.offset, 1)) == "holds_exhausted"
    for rank in (0, 1):
        rig.give_back(second, rank)
    assert rig.pool.hold(block, block.offset, 1).number == second.number


def test_the_arena_grows_by_segments_and_no_further_than_its_limit(make):
    rig = make(segment_bytes=256 << 10, max_arena_bytes=640 << 10)
    assert rig.pool.size_bytes == 0
    assert [rig.pool.lend(128 << 10).segment.number for _ in range(5)] == [1, 1, 2, 2, 3]
    assert rig.pool.size_bytes == 640 << 10, "the last segment is what the limit leaves"
    assert reason_of(lambda: rig.pool.lend(1)) == "arena_full"


def test_a_tensor_larger_than_a_segment_gets_a_segment_of_its_size(make):
    rig = make(segment_bytes=64 << 10)
    block = rig.pool.lend(512 << 10)
    assert block.segment.segment.nbytes == block.nbytes == 512 << 10


def test_low_memory_that_has_been_touched_is_used_again_first(make):
    rig = make()
    for stamp in range(20):
        hold = rig.send(100 << 10, stamp)
        assert hold.block.offset == 0
        for rank in (0, 1):
            rig.give_back(hold, rank)


def test_a_prefaulted_arena_has_its_first_segment_at_once(make):
    rig = make(prefault=True)
    assert [one.segment.nbytes for one in rig.pool.segments] == [1 * MIB]


def test_a_prefaulted_arena_on_a_host_without_memory_starts_empty(make, monkeypatch):
    monkeypatch.setattr(memory, "headroom_bytes", lambda: 0)
    rig = make(prefault=True)
    assert rig.pool.segments == []
    assert reason_of(lambda: rig.pool.lend(1)) == "memory_headroom"


@pytest.mark.parametrize("huge_pages", [True, False])
@pytest.mark.parametrize("prefault", [True, False])
def test_a_block_reads_back_what_was_written_whatever_its_pages(make, huge_pages, prefault):
    limits = {"max_arena_bytes": 16 * MIB, "segment_bytes": 8 * MIB}
    rig = make(huge_pages=huge_pages, prefault=prefault, **limits)
    holds = [rig.send(nbytes, stamp) for stamp, nbytes in enumerate([3 * MIB, 100, 4 * MIB, PAGE, 2 * MIB])]
    for stamp, hold in enumerate(holds):
        assert set(bytes(rig.borrow(hold, 0))) == {stamp}


# --- holds -----------------------------------------------------------------------------------------------------------


def test_a_block_is_free_once_every_reader_gave_it_back(make):
    rig = make()
    hold = rig.send(1)
    assert rig.used() == PAGE
    rig.give_back(hold, 1)
    assert rig.used() == PAGE
    assert rig.pool.holders() == {0: PAGE}
    rig.give_back(hold, 0)
    assert rig.used() == 0
    assert (rig.pool.holders(), rig.pool.holds_used) == ({}, 0)


def test_a_hold_that_nobody_was_to_see_is_simply_taken_back(make):
    rig = make()
    block = rig.pool.lend(1)
    hold = rig.pool.hold(block, block.offset, 1)
    rig.pool.drop(block)
    assert rig.used() == PAGE
    rig.pool.unhold(hold)
    assert rig.used() == 0


EVENTS = ["drop", *((message, rank) for message in (0, 1) for rank in (0, 1))]


@pytest.mark.parametrize("order", list(itertools.permutations(EVENTS)), ids=lambda order: "-".join(map(str, order)))
def test_a_tensor_in_two_messages_is_freed_by_the_last_of_all_its_users(make, order):
    """The writer's own tensor, and two readers' views from each of two messages, die in every possible order."""
    rig = make()
    block = rig.pool.lend(100)
    holds = [rig.publish(rig.pool.hold(block, block.offset, 100)) for _ in range(2)]
    for number, event in enumerate(order, 1):
        if event == "drop":
            rig.pool.drop(block)
        else:
            message, rank = event
            rig.give_back(holds[message], rank)
        assert rig.used() == (PAGE if number < len(order) else 0)
        assert (block.state is BlockState.FREE) == (number == len(order))


@pytest.mark.parametrize("second_after", range(3))
def test_a_tensor_sent_again_while_its_first_message_is_coming_back(make, second_after):
    rig = make()
    block = rig.pool.lend(100)
    first = rig.publish(rig.pool.hold(block, block.offset, 100))
    for rank in range(second_after):
        rig.give_back(first, rank)
        rig.pool.collect()
    second = rig.publish(rig.pool.hold(block, block.offset, 100))
    rig.pool.drop(block)
    for rank in range(second_after, 2):
        rig.give_back(first, rank)
    assert rig.used() == PAGE
    for rank in (0, 1):
        assert rig.used() == PAGE
        rig.give_back(second, rank)
    assert rig.used() == 0


def test_an_old_generation_in_a_reused_hold_frees_nothing(make):
    rig = make(max_holds=1)
    first = rig.send(1)
    for rank in (0, 1):
        rig.give_back(first, rank)
    second = rig.send(1)
    assert (second.number, second.generation) == (first.number, first.generation + 1)
    assert rig.used() == PAGE, "both readers' words hold the first message's generation"
    for rank in (0, 1):
        rig.give_back(first, rank)  # once more, as a callback that comes late would
    assert rig.used() == PAGE
    for rank in (0, 1):
        rig.give_back(second, rank)
    assert rig.used() == 0


def test_giving_back_twice_is_giving_back_once(make):
    rig = make()
    hold = rig.send(1)
    rig.give_back(hold, 0)
    rig.give_back(hold, 0)
    assert rig.used() == PAGE


def test_only_the_readers_counted_when_it_was_sent_are_waited_for(make):
    rig = make(readers=3)
    hold = rig.send(1, seats=rig.seats[:2])
    rig.give_back(hold, 0)
    rig.give_back(hold, 1)
    assert rig.used() == 0


def test_a_message_sent_to_nobody_comes_back_at_once(make):
    rig = make()
    rig.send(1, seats=[])
    assert rig.used() == 0


def test_a_reader_that_left_before_a_message_holds_nothing_of_it(make):
    rig = make()
    hold = rig.send(1)
    rig.give_back(hold, 0)
    rig.seats[1].state = Peer.LEFT
    assert rig.used() == 0
    assert rig.pool.reclaimed == 0


def test_a_reader_that_left_with_a_view_holds_it_until_the_view_dies(make):
    rig = make()
    hold = rig.send(1)
    rig.give_back(hold, 0)
    rig.seats[1].words[layout.CONSUMED] = 1
    rig.seats[1].state = Peer.LEFT
    assert rig.used() == PAGE
    rig.give_back(hold, 1)
    assert rig.used() == 0
    assert rig.pool.reclaimed == 0


class Ended:
    """A process whose end is known."""

    def is_alive(self) -> bool:
        return False


def test_what_a_reader_held_when_it_ended_is_reclaimed_and_counted_once(make):
    rig = make(readers=3)
    first, second = rig.send(1), rig.send(1)
    rig.give_back(first, 1)
    rig.seats[0].state = Peer.DEAD
    rig.seats[1].words[layout.CONSUMED] = 2
    rig.seats[1].state, rig.seats[1].process = Peer.LEFT, Ended()
    for _ in range(3):  # looking again, or asking who holds what, counts nothing
        rig.pool.collect()
        assert rig.pool.holders() == {2: 2 * PAGE}
        assert rig.used() == 2 * PAGE
    rig.give_back(first, 2)
    rig.give_back(second, 2)
    assert rig.used() == 0
    assert rig.pool.reclaimed == 3, "both of reader 0, and the second of reader 1"


def test_holders_are_the_readers_that_still_see_the_bytes(make):
    rig = make()
    first, second = rig.send(3 * PAGE), rig.send(PAGE)
    rig.give_back(first, 0)
    assert rig.pool.holders() == {0: PAGE, 1: 4 * PAGE}
    rig.give_back(second, 1)
    assert rig.pool.holders() == {0: PAGE, 1: 3 * PAGE}


# --- the writer's own tensors ----------------------------------------------------------------------------------------


def test_a_lent_tensors_death_drops_its_block(make):
    rig = make()
    tensor = torch.frombuffer(rig.pool.export(rig.pool.lend(100)), dtype=torch.uint8)
    view = tensor[10:]
    del tensor
    assert rig.used() == PAGE
    del view
    assert rig.used() == 0


def test_an_address_is_found_in_the_block_it_lies_in(make):
    rig = make()
    other, block = rig.pool.lend(2 * PAGE), rig.pool.lend(2 * PAGE)
    start = block.segment.segment.mapping.address + block.offset
    assert rig.pool.find(start, 2 * PAGE) == (block, block.offset)
    assert rig.pool.find(start + 100, 50) == (block, block.offset + 100)
    assert rig.pool.find(start + 2 * PAGE - 1, 1) == (block, block.offset + 2 * PAGE - 1)
    assert rig.pool.find(start + 100, 2 * PAGE) is None, "it leads out of the block"
    assert rig.pool.find(start - 1, 2) is None, "it spans two blocks"
    rig.pool.drop(other)
    assert rig.pool.find(start - 1, 1) is None, "nobody uses that one"
    assert rig.pool.find(np.zeros(8).ctypes.data, 8) is None


# --- what a reader borrows -------------------------------------------------------------------------------------------


def test_a_borrowed_view_gives_back_when_its_last_alias_dies(make):
    rig = make()
    hold = rig.send(100, stamp=7)
    tensor = torch.frombuffer(rig.borrow(hold, 0), dtype=torch.uint8)
    rig.give_back(hold, 1)
    assert tensor.tolist() == [7] * 100
    aliases = [tensor[3:].unsqueeze(0), torch.nn.Parameter(tensor[4:12].view(torch.float32)), tensor.numpy()[::2]]
    del tensor
    while aliases:
        assert rig.used() == PAGE
        del aliases[0]
        gc.collect()
    assert rig.used() == 0


def test_a_view_that_dies_before_its_frame_was_released_gives_nothing_back(make):
    rig = make(readers=1)
    hold = rig.send(100, stamp=7)
    rig.consumed[0] = hold.sequence
    rig.give_back(hold, 0)
    assert rig.used() == PAGE, "an interrupt struck: the frame will be taken again"
    again = rig.borrow(hold)
    assert set(bytes(again)) == {7}
    rig.consumed[0] = hold.sequence + 1
    again.release()
    assert rig.used() == 0


def test_a_segment_is_mapped_once_and_its_descriptor_dropped_however_often_it_is_named(make):
    rig = make(readers=1)
    asked, dropped = [], []
    rig.borrowers[0]._segment = lambda number: asked.append(number) or rig.handed.get(number)
    rig.borrowers[0]._drop_segment = dropped.append
    for _ in range(3):
        rig.borrow(rig.send(100))
    assert (asked, dropped) == ([1], [1])


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, 2),
        (0, 1 << 63),
        (1, MIB),
        (1, (1 << 64) - 1),
        (2, MIB + 1),
        (2, (1 << 64) - 1),
        (3, 8),
        (3, 1 << 40),
        (4, 0),
    ],
)
def test_a_hold_that_names_what_does_not_exist_is_corrupt(make, index, value):
    rig = make()
    words = list(rig.send(100).words())
    words[index] = value
    with pytest.raises(CorruptFrame):
        rig.borrowers[0].borrow(tuple(words), 0)
    assert set(rig.seats[0].returned) == {0}, "and gives nothing back"


def views_in_a_forked_child() -> tuple[int, int]:
    """A child that drops the views it inherited; what the parent sees of that."""
    rig = Rig(readers=1)
    hold = rig.send(100)
    borrowed = torch.frombuffer(rig.borrow(hold, 0), dtype=torch.uint8)
    lent = torch.frombuffer(rig.pool.export(rig.pool.lend(100)), dtype=torch.uint8)
    pid = os.fork()
    if pid == 0:
        del borrowed, lent
        gc.collect()
        os._exit(set(rig.seats[0].returned) != {0})
    _, status = os.waitpid(pid, 0)
    used = rig.used()
    del borrowed, lent
    return os.waitstatus_to_exitcode(status), used


def test_a_forked_child_that_drops_its_views_gives_nothing_back():
    assert processes.run(views_in_a_forked_child) == (0, 2 * PAGE)


# --- against an oracle -----------------------------------------------------------------------------------------------


class PoolAgainstOracle(RuleBasedStateMachine):
    """Lend, send once or twice, give back, leave, die, in any order: no live view ever changes under its holder."""

    @initialize()
    def begin(self) -> None:
        self.rig = Rig(readers=3, max_arena_bytes=16 * PAGE, segment_bytes=8 * PAGE, max_holds=6)
        self.views: dict[tuple[int, int], tuple[memoryview, int]] = {}  # (rank, generation): bytes, stamp
        self.lent: list[tuple[Any, int]] = []
        self.stamp = 0

    def alive(self) -> list[Seat]:
        return [seat for seat in self.rig.seats if seat.state is Peer.ATTACHED]

    @rule(pages=st.integers(1, 5))
    def lend(self, pages: int) -> None:
        try:
            block = self.rig.pool.lend(pages * PAGE)
        except NoRoom:
            return
        self.stamp = self.stamp % 255 + 1
        tensor = torch.frombuffer(self.rig.pool.export(block), dtype=torch.uint8)
        tensor.fill_(self.stamp)
        self.lent.append((tensor, self.stamp))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        tensor, stamp = self.lent[data.draw(st.integers(0, len(self.lent) - 1))]  # hypothesis keeps what it drew
        found = self.rig.pool.find(tensor.data_ptr(), tensor.numel())
        assert found is not None
        try:
            hold = self.rig.pool.hold(found[0], found[1], tensor.numel())
        except NoRoom as no_room:
            assert no_room.reason == "holds_exhausted"
            return
        self.rig.publish(hold, self.alive())
        for seat in self.alive():
            self.views[seat.rank, hold.generation] = (self.rig.borrow(hold, seat.rank), stamp)
            seat.words[layout.CONSUMED] = self.rig.sequence

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def let_a_view_die(self, data: st.DataObject) -> None:
        del self.views[data.draw(st.sampled_from(sorted(self.views)))]

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.alive()))
        seat.state = Peer.DEAD
        self.views = {key: view for key, view in self.views.items() if key[0] != seat.rank}

    @rule()
    def collect(self) -> None:
        self.rig.pool.collect()

    @invariant()
    def every_live_view_shows_what_was_sent(self) -> None:
        if hasattr(self, "rig"):
            assert all(view[0] == view[-1] == stamp for view, stamp in [*self.views.values(), *self.lent])

    @invariant()
    def blocks_do_not_overlap_and_add_up(self) -> None:
        if hasattr(self, "rig"):
            pool = self.rig.pool
            ranges = sorted((block.segment.number, block.offset, block.nbytes) for block in pool._entries.values())
            for (segment, offset, nbytes), (next_segment, next_offset, _) in itertools.pairwise(ranges):
                assert segment < next_segment or offset + nbytes <= next_offset
            assert pool.used_bytes == sum(nbytes for _, _, nbytes in ranges) <= pool.used_max_bytes
            assert pool.used_bytes + sum(one.free.total for one in pool.segments) == pool.size_bytes <= 16 * PAGE

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.views.clear()
            self.lent.clear()
            assert self.rig.used() == 0
            assert self.rig.pool.holds_used == 0
            assert sorted(self.rig.pool._free_holds) == list(range(6))
            self.rig.pool.close()


def test_a_pool_keeps_its_word_whatever_happens_in_whatever_order():
    run_state_machine_as_test(
        PoolAgainstOracle, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )


# --- interrupted anywhere --------------------------------------------------------------------------------------------


class CtrlC(BaseException):
    pass


def interrupt_at(line_number: int, action: Any) -> bool:
    """Run something, with an interrupt before the n-th line that it runs in blocks.py; whether it got that far."""
    lines = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal lines
        code = frame.f_code
        # An exception in a finaliser goes nowhere, in any program.
        if code.co_filename != blocks.__file__ or code.co_name == "_append_unless_forked":
            return None
        if event == "line":
            lines += 1
            if lines == line_number:
                raise CtrlC
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except CtrlC:
        return True
    finally:
        sys.settrace(before)
    return False


def some_life(rig: Rig, tensors: list[torch.Tensor]) -> None:
    """Every change that a pool goes through: copies and lent tensors, sent, given back, dropped, given up."""
    first = rig.send(3 * PAGE)
    block = rig.pool.lend(2 * PAGE)
    tensors.append(torch.frombuffer(rig.pool.export(block), dtype=torch.uint8))
    rig.publish(rig.pool.hold(block, block.offset, 2 * PAGE))
    rig.give_back(first, 0)
    rig.give_back(first, 1)
    rig.pool.collect()
    rig.pool.unhold(rig.pool.hold(block, block.offset, PAGE))
    rig.send(PAGE)
    tensors.clear()
    rig.pool.collect()


def test_after_an_interrupt_at_any_line_a_repair_loses_nothing_and_frees_nothing_too_early():
    line = 0
    interrupted = True
    while interrupted:
        line += 1
        rig = Rig(max_arena_bytes=16 * PAGE, segment_bytes=4 * PAGE)
        tensors: list[torch.Tensor] = []
        interrupted = interrupt_at(line, partial(some_life, rig, tensors))
        rig.pool.repair(rig.sequence)
        used = rig.used()
        outstanding = list(rig.pool._outstanding.values())
        assert all(rig.borrow(hold, 0).nbytes == hold.nbytes for hold in outstanding)
        taken = {(block.segment.number, block.offset) for block in (hold.block for hold in outstanding)}
        fresh = rig.fill(PAGE)
        assert taken.isdisjoint((block.segment.number, block.offset) for block in fresh), (
            "what readers hold is given out"
        )
        assert len(fresh) * PAGE + used == 16 * PAGE
        for block in fresh:
            rig.pool.drop(block)
        for hold in outstanding:
            rig.give_back(hold, 0)
            rig.give_back(hold, 1)
        tensors.clear()
        assert rig.used() == 0
        assert sorted(rig.pool._free_holds) == list(range(GEOMETRY.max_holds))
        assert sum(one.free.total for one in rig.pool.segments) == rig.pool.size_bytes
        rig.pool.close()
    assert line > 100, "the life above runs many lines"


# --- through real queues ---------------------------------------------------------------------------------------------


@pytest.fixture
def queues(run_dir):
    """Make a queue and its readers; all are shut down at the end."""
    made: list[MessageQueue] = []

    def make_queue(readers: int = 2, **options: Any) -> list[MessageQueue]:
        writer = MessageQueue(readers, config=QueueConfig(**{"huge_pages": False, **options}))
        made.append(writer)
        made.extend(MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(readers))
        return made

    yield make_queue
    for queue in reversed(made):
        queue.shutdown()


def used_by(writer: MessageQueue) -> int:
    """Bytes in use, once the writer has looked around: it does five times a second, and here."""
    assert isinstance(writer, Writer)
    writer._roster.reap()
    writer._pool.collect()
    return writer.statistics().arena_used_bytes


def test_a_lent_tensor_in_two_messages_lives_until_the_last_view_of_either(queues):
    writer, first, second = queues()
    with writer.lend((64, 1024), torch.float32) as tensor:
        tensor.fill_(3)
        writer.enqueue({"pixels": tensor})
        writer.enqueue({"again": tensor[10:], "and": tensor.t()})
    assert writer.statistics().segments == 1
    one = [first.dequeue()["pixels"], second.dequeue()["pixels"]]
    two = [first.dequeue(), second.dequeue()]
    del tensor
    assert used_by(writer) == 64 * 4096, "one block, and no copy of it"
    del one
    assert used_by(writer) == 64 * 4096
    assert torch.equal(two[1]["again"], torch.full((54, 1024), 3.0))
    del two[0]
    assert used_by(writer) == 64 * 4096
    del two
    assert used_by(writer) == 0


def test_a_slice_that_outlives_its_message_keeps_the_block_and_no_longer(queues):
    writer, first, second = queues()
    writer.enqueue(torch.arange(100_000))
    second.dequeue()
    kept = first.dequeue()[7:9]
    gc.collect()
    assert used_by(writer) > 0
    assert kept.tolist() == [7, 8]
    del kept
    assert used_by(writer) == 0


def test_a_reader_that_leaves_without_reading_gives_everything_back(queues):
    writer, first, second = queues()
    for _ in range(3):
        writer.enqueue(torch.zeros(100_000))
    second.shutdown()
    for _ in range(3):
        first.dequeue()
    assert used_by(writer) == 0


def test_a_reader_that_leaves_with_a_tensor_keeps_it_for_as_long_as_it_lives(queues):
    writer, first, second = queues()
    writer.enqueue(torch.arange(100_000))
    first.dequeue()
    kept = second.dequeue()
    second.shutdown()
    assert used_by(writer) > 0
    writer.enqueue(torch.zeros(100_000))
    assert torch.equal(kept, torch.arange(100_000))
    first.dequeue()
    del kept
    assert used_by(writer) == 0


def test_a_message_that_can_not_be_decoded_gives_its_blocks_back(queues):
    writer, first, second = queues()
    writer.enqueue([torch.zeros(100_000), RaisesWhenLoaded(), torch.zeros(100_000)])
    for reader in (first, second):
        with pytest.raises(Exception, match="could not be unpickled"):
            reader.dequeue()
    assert used_by(writer) == 0


class RaisesWhenLoaded:
    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize("views", ["readonly", "shared", "private"])
def test_the_block_is_back_when_the_last_view_dies_whatever_the_views(queues, views):
    writer, first, second = queues(views=views)
    writer.enqueue(torch.arange(100_000))
    got = [first.dequeue(), second.dequeue()]
    assert (used_by(writer) > 0) == (views != "private"), "a private copy needs no block any more"
    assert all(torch.equal(one, torch.arange(100_000)) for one in got)
    del got
    assert used_by(writer) == 0


def test_a_message_given_up_at_its_last_fragment_gives_its_blocks_back(queues):
    # A block for the tensor, then no room for the rest: the message goes in fragments that name the block.
    writer, reader = queues(
        readers=1, slots=4, slot_bytes=1024, min_block_bytes=8192, max_arena_bytes=8192, segment_bytes=8192
    )
    room = 1024 - layout.PAYLOAD_OFFSET - layout.FRAGMENT_HEADER_BYTES
    message = [torch.zeros(8192, dtype=torch.uint8), b"x" * (room * 4)]
    with pytest.raises(QueueTimeout):
        writer.enqueue(message, timeout=0)
    assert writer.statistics().published == 4, "all but the last fragment are out"
    assert used_by(writer) == 0
    with pytest.raises(QueueTimeout):
        reader.dequeue(timeout=0)
    writer.enqueue("next", timeout=1)
    assert reader.dequeue(timeout=1) == "next"


def test_a_full_arena_falls_back_and_says_why(queues):
    writer, first, second = queues(max_arena_bytes=1 * MIB, segment_bytes=1 * MIB)
    writer.enqueue(torch.zeros(1 * MIB, dtype=torch.uint8))
    kept = [first.dequeue(), second.dequeue()]
    writer.enqueue(torch.ones(100_000, dtype=torch.uint8))
    assert writer.statistics().fallbacks == {"arena_full": 1}
    assert writer.statistics().held_bytes_by_reader == {0: 1 * MIB, 1: 1 * MIB}
    assert [int(reader.dequeue().sum()) for reader in (first, second)] == [100_000] * 2
    del kept
    writer.enqueue(torch.ones(100_000, dtype=torch.uint8))
    assert writer.statistics().fallbacks == {"arena_full": 1}
    assert writer.statistics().messages_by_path["block"] == 2
    with pytest.raises(OutOfMemory, match="too_large"), writer.lend(1 * MIB + 1, torch.uint8):
        pass


def test_lending_without_room_gives_private_memory_only_when_asked(queues):
    writer, *_ = queues(max_arena_bytes=0)
    with pytest.raises(OutOfMemory, match="disabled"), writer.lend(10, torch.float32):
        pass
    with writer.lend((2, 5), torch.float32, or_private=True) as tensor:
        assert (tensor.shape, tensor.dtype) == ((2, 5), torch.float32)
    assert writer.statistics().fallbacks == {"disabled": 2}


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (), (1,), 5])
def test_any_shape_can_be_lent(queues, shape):
    writer, first, second = queues()
    with writer.lend(shape, torch.bfloat16) as tensor:
        assert tensor.shape == torch.empty(shape, device="meta").shape
        tensor.fill_(2)
        writer.enqueue(tensor)
    assert all(torch.equal(reader.dequeue(), tensor) for reader in (first, second))
    del tensor
    assert used_by(writer) == 0
