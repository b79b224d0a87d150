"""The tensor arena: blocks in shared memory, lent to tensors and given back when their last view dies.

Only the writer allocates. Segments are created as they are needed and live as long as the queue; inside them
the first fit wins, lowest address first, because low pages are the ones that have been touched before.

*Holds, not blocks, are given back.* One tensor may ride in two messages, so a generation per block would free
it under the second. Each (message, block) pair is a hold with an id from a fixed table; when a reader's last
view of that block from that message dies, the reader stores the hold's generation in its own word for that id.
Where a device may still read it then, the reader names the tickets that the device writes behind its copies
(`arena.tickets`), and the hold is back once these have been reached, too. A block is free once every hold on it is
back from every reader that was counted when it was sent, and the writer's own tensors over it are dead.

The writer's end is here; a reader's is `arena.borrow`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from arena import layout, memory
from arena.errors import OutOfMemory
from arena.free_list import FreeList
from arena.layout import round_up
from arena.memory import Segment
from arena.peers import MAX_SEGMENTS, Seat
from arena.probe import Probe
from arena.state import Block as BlockState
from arena.state import Peer, move
from arena.tickets import all_reached

if TYPE_CHECKING:
    from arena.gate import Gate

_HEADROOM_SHARE: Final = 2  # a new segment may take at most 1/2 of what the host or cgroup has left
_LENT_BIT: Final = 1 << 63


class NoRoom(Exception):
    """No block to be had; `reason` is one of FALLBACK_REASONS. Never leaves Arena: it becomes a fallback."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class PoolSegment:
    """One segment of the arena, at the writer."""

    __slots__ = ("cold_from", "free", "number", "segment")

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.free = FreeList(segment.nbytes)
        self.cold_from = 0  # no block has reached this offset yet, so its pages do not exist


# ── what the writer keeps ────────────────────────────────────────────────────────────────────────
class Block:
    """A range of a segment in use."""

    __slots__ = ("entry", "holds", "nbytes", "offset", "segment", "state")

    def __init__(self, segment: PoolSegment, offset: int, nbytes: int, entry: int) -> None:
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.entry = entry
        self.holds = 0
        self.state = BlockState.FREE

    def view(self, nbytes: int | None = None) -> memoryview:
        """The writer's bytes of it."""
        return self.segment.segment.mapping.view(self.offset, self.nbytes if nbytes is None else nbytes)


class Hold:
    """One block in one message, and who must give it back."""

    __slots__ = ("block", "generation", "nbytes", "number", "offset", "seats", "sequence")

    def __init__(self, number: int, generation: int, block: Block, offset: int, nbytes: int) -> None:
        self.number = number
        self.generation = generation
        self.block = block
        self.offset = offset
        self.nbytes = nbytes
        self.seats: list[Seat] = []
        self.sequence = 0

    def words(self) -> tuple[int, int, int, int, int]:
        """As it travels: segment, offset, bytes, id, generation."""
        return self.block.segment.number, self.offset, self.nbytes, self.number, self.generation

    def view(self) -> memoryview:
        """The writer's bytes of it."""
        return self.block.segment.segment.mapping.view(self.offset, self.nbytes)


@dataclass(frozen=True)
class PoolLimits:
    """Settings of the arena; see QueueConfig."""

    max_arena_bytes: int
    segment_bytes: int
    max_holds: int
    prefault: bool
    huge_pages: bool
    peers_may_write: bool


class BlockPool:
    """The writer's arena. Not thread-safe: the endpoint's lock guards it. A tensor's death leaves a dead reference."""

    def __init__(
        self,
        name: str,
        limits: PoolLimits,
        probe: Probe | None,
        hand_over: Callable[[PoolSegment], bool],
    ) -> None:
        self._name = name
        self._limits = limits
        self._probe = probe
        self._hand_over = hand_over
        self.segments: list[PoolSegment] = []
        self._free_holds = list(range(limits.max_holds - 1, -1, -1))
        self._outstanding: dict[int, Hold] = {}
        self._generation = 0
        self._entries: dict[int, Block] = {}
        self._free_entries: list[int] = []
        self._next_entry = 0
        self._exported: dict[Block, weakref.ref[object]] = {}  # those that a tensor of the writer's lives on
        self._gates: dict[Block, Gate] = {}  # of such tensors' blocks, where a device may still be writing to one
        self.used_bytes = 0
        self.used_max_bytes = 0
        self.size_bytes = 0
        self.reclaimed = 0
        self.torn = False  # an interrupt may have struck half-way through a change: `repair` first
        self._next_number = 1  # 0 is the ring's
        if limits.prefault and limits.max_arena_bytes:
            try:
                self._grow(min(limits.segment_bytes, limits.max_arena_bytes))
            except NoRoom:
                pass  # as without prefault: messages fall back, and say why

    # ── lend ─────────────────────────────────────────────────────────────────────────────────────
    def lend(self, nbytes: int) -> Block:
        """A block of at least `nbytes`, which the caller writes to and then holds or drops.

        Raises:
            NoRoom: with the reason.
        """
        limit = self._limits.max_arena_bytes
        if limit == 0:
            raise NoRoom("disabled")
        wanted = max(round_up(nbytes, layout.BLOCK_ALIGN), layout.BLOCK_ALIGN)
        if wanted > limit:
            raise NoRoom("too_large")
        self.collect()
        block = self._first_fit(wanted)
        if block is None:
            self._grow(wanted)
            block = self._first_fit(wanted)
            assert block is not None, "a new segment holds what it was made for"
        self._warm(block)
        block.state = move(block.state, "lend")
        self.used_bytes += block.nbytes
        self.used_max_bytes = max(self.used_max_bytes, self.used_bytes)
        self._show(block)
        return block

    def drop(self, block: Block) -> None:
        """The writer's own use of a block is over."""
        self._move(block, "drop")

    def export(self, block: Block) -> memoryview:
        """The block's bytes for a tensor of the writer's; after the tensor's death `collect` drops the block."""
        view, owner = block.segment.segment.mapping.exported(block.offset, block.nbytes)
        self._exported[block] = weakref.ref(owner)
        return view

    def guard(self, block: Block, gate: Gate) -> None:
        """A device may fill an exported block: when the tensor dies, drop the block once that has passed, too."""
        self._gates[block] = gate

    def find(self, address: int, nbytes: int) -> tuple[Block, int] | None:
        """The block that an address range of this process lies in, and the offset in its segment."""
        for pool_segment in self.segments:
            offset = address - pool_segment.segment.mapping.address
            if 0 <= offset < pool_segment.segment.nbytes:
                for block in self._entries.values():
                    inside = block.offset <= offset and offset + nbytes <= block.offset + block.nbytes
                    if inside and block.segment is pool_segment:
                        return block, offset
        return None

    # ── hold ─────────────────────────────────────────────────────────────────────────────────────
    def hold(self, block: Block, offset: int, nbytes: int) -> Hold:
        """Prepare to send part of a block. `send` or `unhold` follows.

        Raises:
            NoRoom: the hold table is full.
        """
        if not self._free_holds:
            self.collect()
        if not self._free_holds:
            raise NoRoom("holds_exhausted")
        self._generation += 1
        hold = Hold(self._free_holds.pop(), self._generation, block, offset, nbytes)
        block.state = move(block.state, "hold")
        block.holds += 1
        return hold  # `send` will show it

    def send(self, hold: Hold, sequence: int, seats: list[Seat]) -> None:
        """The message is about to be published as `sequence` to `seats`: from now on the hold is theirs."""
        hold.sequence = sequence
        hold.seats = seats
        self._outstanding[hold.number] = hold
        self._show(hold.block)

    def unhold(self, hold: Hold) -> None:
        """Take back a hold that nobody will see, or that everybody returned."""
        self._outstanding.pop(hold.number, None)
        self._free_holds.append(hold.number)
        hold.block.holds -= 1
        if not hold.block.holds:
            self._move(hold.block, "return")
        else:
            self._show(hold.block)

    def collect(self) -> None:
        """Take back what readers gave back, what the dead held, and what the writer's own tensors left."""
        for block in [block for block, tensor in self._exported.items() if tensor() is None]:
            if self._gates and block in self._gates:
                if not self._gates[block].has_passed():
                    continue
                del self._gates[block]
            del self._exported[block]
            self.drop(block)
        for hold in [hold for hold in self._outstanding.values() if self._is_back(hold)]:
            self._count_reclaimed(hold)
            self.unhold(hold)

    def repair(self, published: int) -> None:
        """After an interrupt: rebuild what it may have torn from what no interrupt tears, namely who holds what.

        A hold counts if its frame was published, a block if such a hold or a living tensor of the writer's is on it.
        """
        self.torn = True
        self._outstanding = {n: hold for n, hold in self._outstanding.items() if hold.sequence < published}
        counts = {block: 0 for block in self._exported}
        for hold in self._outstanding.values():
            counts[hold.block] = counts.get(hold.block, 0) + 1
        self._free_holds = [n for n in range(self._limits.max_holds - 1, -1, -1) if n not in self._outstanding]
        self._entries = {block.entry: block for block in counts}
        self._free_entries = [entry for entry in range(self._next_entry) if entry not in self._entries]
        self.used_bytes = sum(block.nbytes for block in counts)
        self.size_bytes = sum(pool_segment.segment.nbytes for pool_segment in self.segments)
        for pool_segment in self.segments:
            inside = [(b.offset, b.offset + b.nbytes) for b in counts if b.segment is pool_segment]
            pool_segment.free.rebuild(pool_segment.segment.nbytes, sorted(inside))
        for block, count in counts.items():
            block.holds = count
            held = BlockState.LENT_AND_HELD if block in self._exported else BlockState.HELD
            block.state = held if count else BlockState.LENT
            self._show(block)
        if self._probe is not None:
            for entry in self._free_entries:
                self._probe.block(entry, 0, 0, 0, 0)
        self.torn = False

    def owing(self) -> set[Seat]:
        """The seats that have not given everything back."""
        return {seat for hold in list(self._outstanding.values()) for seat in hold.seats}

    @property
    def max_bytes(self) -> int:
        """The arena's limit."""
        return self._limits.max_arena_bytes

    @property
    def holds_used(self) -> int:
        """Holds not back yet."""
        return len(self._outstanding)

    @property
    def largest_free_bytes(self) -> int:
        """The largest block that fits without a new segment."""
        return max((segment.free.largest for segment in self.segments), default=0)

    def holders(self) -> dict[int, int]:
        """Bytes that each rank holds."""
        held: dict[int, int] = {}
        for hold in list(self._outstanding.values()):
            for seat in hold.seats:
                if not self._returned(hold, seat):
                    held[seat.rank] = held.get(seat.rank, 0) + hold.block.nbytes
        return held

    def close(self) -> None:
        """Let the segments go. Tensors over them stay valid, and the memory goes with the last one that dies."""
        for pool_segment in self.segments:
            pool_segment.segment.close()
        self.segments = []
        self._outstanding = {}
        self._entries = {}
        self._exported = {}
        self._gates = {}
        self._hand_over = _nowhere  # the callback holds the queue, which should go with its last reference

    # ── inside ───────────────────────────────────────────────────────────────────────────────────
    def _first_fit(self, wanted: int) -> Block | None:
        for pool_segment in self.segments:
            offset = pool_segment.free.take(wanted)
            if offset is not None:
                entry = self._free_entries.pop() if self._free_entries else self._next_entry
                self._next_entry = max(self._next_entry, entry + 1)
                block = Block(pool_segment, offset, wanted, entry)
                self._entries[entry] = block
                return block
        return None

    def _grow(self, wanted: int) -> None:
        limit = self._limits.max_arena_bytes
        size = max(self._limits.segment_bytes, wanted)
        if size >= layout.HUGE_PAGE:
            size = round_up(size, layout.HUGE_PAGE)
        if self.size_bytes + size > limit:
            size = wanted
        if self.size_bytes + size > limit:
            free = limit - self.size_bytes + sum(segment.free.total for segment in self.segments)
            raise NoRoom("arena_fragmented" if free >= wanted else "arena_full")
        if len(self.segments) >= MAX_SEGMENTS:
            raise NoRoom("arena_fragmented")
        if size > memory.headroom_bytes() // _HEADROOM_SHARE:
            raise NoRoom("memory_headroom")
        pool_segment = self._create(size)
        if not self._hand_over(pool_segment):
            pool_segment.segment.close()
            raise NoRoom("memory_headroom")
        self.segments.append(pool_segment)
        self.size_bytes += size
        if self._probe is not None:
            self._probe.segment(pool_segment.number, size)

    def _create(self, size: int) -> PoolSegment:
        try:
            segment = Segment.create(self._name, size, peers_may_write=self._limits.peers_may_write)
        except (OSError, OutOfMemory):
            raise NoRoom("memory_headroom") from None
        pool_segment = PoolSegment(self._next_number, segment)
        self._next_number += 1
        if self._limits.prefault:
            self._make_pages(pool_segment, size)
        return pool_segment

    def _warm(self, block: Block) -> None:
        """Give a block that reaches into untouched memory huge pages, while no reader has seen them.

        Only where the block fills them: a small one would pay for 2 MiB it does not use.
        """
        pool_segment, end = block.segment, block.offset + block.nbytes
        if end <= pool_segment.cold_from:
            return
        if self._limits.huge_pages and end - pool_segment.cold_from >= layout.HUGE_PAGE:
            self._make_pages(pool_segment, end)
        else:
            pool_segment.cold_from = end

    def _make_pages(self, pool_segment: PoolSegment, end: int) -> None:
        mapping, size = pool_segment.segment.mapping, pool_segment.segment.nbytes
        start = round_up(pool_segment.cold_from, layout.HUGE_PAGE)
        end_of_huge = min(round_up(end, layout.HUGE_PAGE), size // layout.HUGE_PAGE * layout.HUGE_PAGE)
        pool_segment.cold_from = max(end, end_of_huge)
        wanted = self._limits.huge_pages and end_of_huge > start
        if wanted and not mapping.collapse(start, end_of_huge - start) and self._probe is not None:
            self._probe.count(self._probe.word("collapse_failures_total"))
        if self._limits.prefault:
            mapping.populate(0, size)

    def _count_reclaimed(self, hold: Hold) -> None:
        """Count what came back because its holder died."""
        dead = [seat for seat in hold.seats if not self._given_back(hold, seat) and not self._never_taken(hold, seat)]
        self.reclaimed += len(dead)
        if self._probe is not None and dead:
            self._probe.count(self._probe.word("holds_reclaimed_total", "reader_died"), len(dead))

    def _is_back(self, hold: Hold) -> bool:
        for seat in hold.seats:
            # SYNC POINT block-reusable (observe): the reader's last access came before its store
            if seat.returned[hold.number] != hold.generation and not self._returned(hold, seat):
                return False
        return True

    def _returned(self, hold: Hold, seat: Seat) -> bool:
        if self._given_back(hold, seat) or self._never_taken(hold, seat) or seat.state is Peer.DEAD:
            return True
        return seat.state is Peer.LEFT and seat.process is not None and seat.process.is_alive() is False

    def _given_back(self, hold: Hold, seat: Seat) -> bool:
        # SYNC POINT block-reusable (observe): the reader's last access came before its store, or before its tickets
        word = seat.returned[hold.number]
        if word & layout.RETURNED_GENERATION != hold.generation:
            return False
        names = word >> layout.RETURNED_NAMES_SHIFT
        return not names or all_reached(seat.named, seat.tickets, hold.number, names)

    def _never_taken(self, hold: Hold, seat: Seat) -> bool:
        """It left before it came to this message."""
        return seat.state is Peer.LEFT and seat.consumed <= hold.sequence

    def _move(self, block: Block, event: str) -> None:
        block.state = move(block.state, event)
        if block.state is BlockState.FREE:
            self.used_bytes -= block.nbytes
            block.segment.free.give(block.offset, block.nbytes)
            del self._entries[block.entry]
            self._free_entries.append(block.entry)
        self._show(block)

    def _show(self, block: Block) -> None:
        """Keep the block table of the probe page true."""
        if self._probe is None:
            return
        if block.state is BlockState.FREE:
            self._probe.block(block.entry, 0, 0, 0, 0)
            return
        holders = _LENT_BIT if block.state in (BlockState.LENT, BlockState.LENT_AND_HELD) else 0
        if block.holds:
            for hold in self._outstanding.values():
                if hold.block is block:
                    for seat in hold.seats:
                        holders |= (1 << seat.rank) if seat.rank < 63 else 0
        self._probe.block(block.entry, block.segment.number, block.offset, block.nbytes, holders)


def _nowhere(new: PoolSegment) -> bool:
    return False
