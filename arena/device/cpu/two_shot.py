"""Two-shot: each rank adds up its own part of the tensor, and then all parts are gathered. Two waits, fewer sums.

Each rank reads and adds every byte only once instead of once a rank, which is worth the second wait from some size on;
at two ranks too, where the sum of 16-bit floats takes several times as long as a copy.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from arena.device.cpu.path import BoardPath
from arena.device.cpu.tag import Tag

_ALIGN: Final = 64  # elements; parts start on a cache line of their own


class Views(NamedTuple):
    """Slots of one size and dtype, for even and for odd steps."""

    sizes: list[int]  # of each rank's part
    given: list[list[list[torch.Tensor]]]  # [parity][rank][part]: what a rank gives to the owner of a part
    sums: list[list[torch.Tensor]]  # [parity][rank]: where a rank leaves the sum of its part


class TwoShot(BoardPath[Views]):
    """Best for large tensors, where adding and moving is what costs."""

    name = "cpu_two_shot"
    number = 2

    def _make_views(self, dtype: torch.dtype, shape: torch.Size) -> Views:
        sizes = parts_of(shape.numel(), self._board.world)
        slots = self._typed_slots(dtype, torch.Size((shape.numel(),)))
        given = [[list(slot.split_with_sizes(sizes)) for slot in of_step] for of_step in slots]
        sums = [[slot[:size] for slot, size in zip(of_step, sizes, strict=True)] for of_step in slots]
        return Views(sizes, given, sums)

    def _step(self, x: torch.Tensor, out: torch.Tensor, views: Views, tag: Tag | None) -> None:
        board, rank = self._board, self._board.rank
        parts = x.reshape(-1).split_with_sizes(views.sizes)
        given = views.given[(board.step + 1) % 2]
        for owner, part in enumerate(parts):
            if owner != rank and views.sizes[owner]:
                given[rank][owner].copy_(part)
        board.arrive(tag)
        board.wait(tag)

        sums = views.sums[(board.step + 1) % 2]
        mine = [parts[rank] if giver == rank else given[giver][rank] for giver in range(board.world)]
        self._adder.add(mine, sums[rank])
        board.arrive()
        board.wait()
        torch.cat(sums, out=out.view(-1))


def parts_of(count: int, world: int) -> list[int]:
    """The size of each rank's part of `count` elements, in order; the last ones may be shorter, or empty."""
    size = -(-count // (world * _ALIGN)) * _ALIGN
    return [min(count, (rank + 1) * size) - min(count, rank * size) for rank in range(world)]
