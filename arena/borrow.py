"""What a reader borrows from the tensor arena, and how it gives it back.

The callback that gives back runs anywhere: in the garbage collector, in another thread, inside the endpoint's lock. So
it is one aligned store, and the writer looks for it when it next needs room.
"""

from __future__ import annotations

from collections.abc import Callable

from arena import memory
from arena.errors import CorruptFrame
from arena.memory import Mapping, Segment, Words


class Borrower:
    """A reader's end of the arena: maps segments as frames name them, and gives holds back."""

    def __init__(
        self,
        take_segment: Callable[[int], tuple[int, int] | None],
        returned: Words,
        max_holds: int,
        *,
        views: str,
    ) -> None:
        self._take_segment = take_segment
        self._returned = returned
        self._max_holds = max_holds
        self._views = views
        self._mappings: dict[int, Mapping] = {}

    def borrow(self, words: tuple[int, int, int, int, int]) -> memoryview:
        """The bytes of a hold. When the last view of them dies, the hold is given back.

        Raises:
            CorruptFrame: the hold names memory that does not exist.
        """
        number, offset, nbytes, hold, generation = words
        self._check_hold(hold, generation)
        mapping = self._mapping(number)
        return mapping.export(offset, nbytes, _give_back, self._returned, hold, generation, memory.fork_epoch())

    def close(self) -> None:
        """Let the segments go. Views of them stay valid, and the memory goes with the last one that dies."""
        self._mappings.clear()

    def peek(self, words: tuple[int, int, int, int, int]) -> memoryview:
        """The bytes of a hold that `give_back` will return by hand; read-only."""
        number, offset, nbytes, hold, generation = words
        self._check_hold(hold, generation)
        return self._mapping(number).view(offset, nbytes).toreadonly()

    def give_back(self, words: tuple[int, int, int, int, int]) -> None:
        """Return a hold now."""
        _, _, _, hold, generation = words
        if hold < self._max_holds:
            _give_back(self._returned, hold, generation, memory.fork_epoch())

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
            handed_over = self._take_segment(number)
            if handed_over is None:
                raise CorruptFrame(
                    f"a frame names segment {number}, which was never handed over",
                    expected="the writer to push a segment before it publishes a frame that names it",
                    found="no such segment on the attach socket",
                    remedy="something else wrote into the ring; shut the queue down and start both ends anew",
                )
            nbytes, fd = handed_over
            segment = Segment.attach(fd, nbytes, writable=self._views == "shared")
            segment.close()
            mapping = self._mappings[number] = segment.mapping
        return mapping


def _give_back(returned: Words, hold: int, generation: int, epoch: int) -> None:
    if epoch == memory.fork_epoch():
        # SYNC POINT block-reusable (publish): the last view is dead before this store is seen
        returned[hold] = generation
