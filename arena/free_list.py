"""First fit over the free ranges of a segment: lowest address first, because low pages have been touched before."""

from __future__ import annotations

import bisect


class FreeList:
    """The free ranges of one segment, sorted and merged."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, nbytes: int) -> None:
        self._starts = [0]
        self._ends = [nbytes]

    def take(self, nbytes: int) -> int | None:
        """The lowest offset where `nbytes` fit, now taken; None if they fit nowhere."""
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= nbytes:
                if end - start == nbytes:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + nbytes
                return start
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Return a range, merging it with its neighbours."""
        end = offset + nbytes
        index = bisect.bisect_left(self._starts, offset)
        joins_next = index < len(self._starts) and self._starts[index] == end
        joins_last = index > 0 and self._ends[index - 1] == offset
        if joins_last and joins_next:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_last:
            self._ends[index - 1] = end
        elif joins_next:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)

    def rebuild(self, nbytes: int, taken: list[tuple[int, int]]) -> None:
        """Start anew: all of `nbytes` is free but for the ranges (start, end) taken, in order."""
        self._starts = [0, *(end for _, end in taken)]
        self._ends = [*(start for start, _ in taken), nbytes]
        gaps = [(start, end) for start, end in zip(self._starts, self._ends, strict=True) if start < end]
        self._starts = [start for start, _ in gaps]
        self._ends = [end for _, end in gaps]

    @property
    def largest(self) -> int:
        """The largest free range."""
        return max((end - start for start, end in zip(self._starts, self._ends, strict=True)), default=0)

    @property
    def total(self) -> int:
        """All free bytes."""
        return sum(self._ends) - sum(self._starts)
