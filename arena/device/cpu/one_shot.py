"""One-shot: everybody copies in, everybody adds up everything. One wait, and world - 1 remote reads a byte."""

from __future__ import annotations

import torch

from arena.device.cpu.path import BoardPath
from arena.device.cpu.tag import Tag

Slots = list[list[torch.Tensor]]


class OneShot(BoardPath[Slots]):
    """Best for small tensors, where waiting is what costs."""

    name = "cpu_one_shot"
    number = 1

    def _make_views(self, dtype: torch.dtype, shape: torch.Size) -> Slots:
        return self._typed_slots(dtype, shape)

    def _step(self, x: torch.Tensor, out: torch.Tensor, views: Slots, tag: Tag | None) -> None:
        board = self._board
        slots = views[(board.step + 1) % 2]
        slots[board.rank].copy_(x)
        board.arrive(tag)
        board.wait(tag)
        self._adder.add(slots, out)
