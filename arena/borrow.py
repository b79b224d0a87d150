"""What a reader borrows from the tensor arena, and how it gives it back.

A hold is given back when the last view of its bytes dies, and only if the frame that brought it has been released by
then. If it has not, an interrupt struck: the frame will be taken again, and with it the hold. So there is one moment,
the store to `consumed`, from which on a message's holds are in its reader's hands; no interrupt can tear that.

The callback runs anywhere: in the garbage collector, in another thread, inside the endpoint's lock. So it is one look
and one aligned store, and the writer looks for it when it next needs room. An interrupt within it is lost, and with it
the store (Python reports what a callback raises, and goes on); `sweep` makes up for that.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from arena import memory
from arena.errors import CorruptFrame
from arena.memory import Mapping, Segment, Words


class Borrower:
    """A reader's end of the arena: maps segments as frames name them, and gives holds back."""

    def __init__(
        self,
        segment: Callable[[int], tuple[int, int] | None],
        drop_segment: Callable[[int], None],
        consumed: Words,
        returned: Words,
        max_holds: int,
        *,
        views: str,
    ) -> None:
        self._segment = segment
        self._drop_segment = drop_segment
        self._consumed = consumed
        self._returned = returned
        self._max_holds = max_holds
        self._views = views
        self._mappings: dict[int, Mapping] = {}

    def borrow(self, words: tuple[int, int, int, int, int], sequence: int) -> memoryview:
        """The bytes of a hold that came with frame `sequence`, writable; see the head of this file.

        Raises:
            CorruptFrame: the hold names memory that does not exist.
        """
        number, offset, nbytes, hold, generation = words
        self._check_hold(hold, generation)
        view, owner = self._mapping(number).exported(offset, nbytes)
        lease = _Lease(owner, _give_back)
        lease.consumed, lease.sequence = self._consumed, sequence
        lease.returned, lease.hold, lease.generation = self._returned, hold, generation
        lease.epoch = memory.fork_epoch()
        _leases[id(lease)] = lease
        return view

    def prefault(self, numbers: list[int]) -> None:
        """Map these segments now, with all their pages, rather than when a frame first names them."""
        for number in numbers:
            mapping = self._mapping(number)
            mapping.populate(0, mapping.nbytes)

    def sweep(self) -> None:
        """Give back what died while an interrupt kept the callback from doing it."""
        for lease in list(_leases.values()):
            if lease.returned is self._returned and lease() is None:
                _give_back(lease)

    def close(self) -> None:
        """Let the segments go. Views of them stay valid, and the memory goes with the last one that dies."""
        self._mappings.clear()

    def _check_hold(self, hold: int, generation: int) -> None:
        if hold >= self._max_holds or generation == 0:
            raise CorruptFrame(
                "a frame names a hold that does not exist",
                expected=f"a hold below {self._max_holds} and a generation above 0",
                found=f"hold {hold}, generation {generation}",
                remedy="something else wrote into the ring; shut the queue down and start both ends anew",
            )

    def _mapping(self, number: int) -> Mapping:
        mapping = self._mappings.get(number)
        if mapping is None:
            handed_over = self._segment(number)
            if handed_over is None:
                raise CorruptFrame(
                    f"a frame names segment {number}, which was never handed over",
                    expected="the writer to push a segment before it publishes a frame that names it",
                    found="no such segment on the attach socket",
                    remedy="something else wrote into the ring; shut the queue down and start both ends anew",
                )
            nbytes, fd = handed_over
            segment = Segment.attach(os.dup(fd), nbytes, writable=self._views == "shared")
            segment.close()
            mapping = self._mappings[number] = segment.mapping
            self._drop_segment(number)  # not before it is in its place: an interrupt must find it here or there
        return mapping


class _Lease(weakref.ref[Any]):
    """A weak reference to the views of one hold, with all that giving it back takes, and nothing else."""

    __slots__ = ("consumed", "epoch", "generation", "hold", "returned", "sequence")

    consumed: Words
    sequence: int
    returned: Words
    hold: int
    generation: int
    epoch: int


_leases: dict[int, _Lease] = {}
"""Every lease not given back yet: a view may outlive its reader, and a weak reference must be kept to fire."""


def _give_back(lease: _Lease) -> None:
    if getattr(lease, "epoch", None) != memory.fork_epoch():
        return  # a forked child's copy, neither its to give back nor mapped here; or interrupted before it was written
    # A later hold of this number may be back already: our own word never goes down.
    if lease.consumed[0] > lease.sequence and lease.returned[lease.hold] < lease.generation:
        # SYNC POINT block-reusable (publish): the last view is dead before this store is seen
        lease.returned[lease.hold] = lease.generation
    _leases.pop(id(lease), None)
