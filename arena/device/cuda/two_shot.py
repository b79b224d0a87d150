"""Two-shot: each rank sums its part and pushes the sum. Two trips, but less over the link with more than two ranks."""

from __future__ import annotations

from arena.device.cuda import shapes
from arena.device.cuda.push import PushPath
from arena.device.cuda.shapes import Slots


class TwoShot(PushPath):
    """A reduce-scatter and an all-gather in one kernel."""

    name = "two_shot"

    def _slots(self) -> list[Slots]:
        return [shapes.two_shot_slots(self.max_bytes, self._place.world, self._multiprocessors)]

    def _choose(self, vectors: int) -> tuple[str, int, tuple[int, int]]:
        chunk = shapes.two_shot_chunk(vectors, self._place.world)
        return "two_shot", 0, shapes.shape_for(chunk, self._multiprocessors)
