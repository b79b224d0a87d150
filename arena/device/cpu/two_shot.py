"""Two-shot: each rank adds up its own part of the tensor, and then all parts are gathered. Two waits, fewer sums.

Each rank reads and adds every byte only once instead of once a rank, which is worth the second wait from some size on;
at two ranks too, where the sum of 16-bit floats takes several times as long as a copy.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from arena.device.cpu.path import BoardPath, Cut
from arena.device.cpu.tag import Tag

_ALIGN: Final = 64  # elements; parts start on a cache line of their own


class Views(NamedTuple):
    """One place in the slots, for tensors of one size and dtype, in the two steps that an operation has."""

    sizes: list[int]  # of each rank's part
    gifts: list[tuple[int, torch.Tensor]]  # for each other owner of a part, where this rank leaves it
    mine: list[torch.Tensor]  # by rank, what it left for this one
    sums: list[torch.Tensor]  # by rank, where it leaves the sum of its part


class TwoShot(BoardPath[Views]):
    """Best for large tensors, where adding and moving is what costs."""

    name = "cpu_two_shot"
    number = 2

    def _make_views(self, x: torch.Tensor, number: int) -> Views:
        rank, sizes = self._board.rank, parts_of(x.numel(), self._board.world)
        slots = [slot.view(-1) for slot in self._places(x, number)]
        parts = [slot.split_with_sizes(sizes) for slot in slots]
        gifts = [(owner, part) for owner, part in enumerate(parts[rank]) if owner != rank and sizes[owner]]
        mine = [of_giver[rank] for of_giver in parts]
        return Views(sizes, gifts, mine, [slot[:size] for slot, size in zip(slots, sizes, strict=True)])

    def _whole(self, x: torch.Tensor, cut: Cut[Views], tag: Tag) -> torch.Tensor:
        if x.dim() == 1:
            return torch.cat(self._gathered(x, x, cut, tag))
        return torch.cat(self._gathered(x, x.reshape(-1), cut, tag)).view(x.shape)

    def _piece(self, x: torch.Tensor, out: torch.Tensor, cut: Cut[Views], tag: Tag | None) -> None:
        torch.cat(self._gathered(x, x, cut, tag), out=out)

    def _gathered(self, x: torch.Tensor, flat: torch.Tensor, cut: Cut[Views], tag: Tag | None) -> list[torch.Tensor]:
        """The sums of all parts, where their owners left them. They may be read until the next step."""
        board = self._board
        views, after = self._views(cut, x, 1), self._views(cut, x, 2)
        parts = flat.split_with_sizes(views.sizes)
        for owner, slot in views.gifts:
            slot.copy_(parts[owner])
        board.arrive(tag)
        board.wait(tag)

        mine = views.mine.copy()
        mine[board.rank] = parts[board.rank]
        self._adder.add(mine, after.sums[board.rank])
        board.arrive()
        board.wait()
        return after.sums


def parts_of(count: int, world: int) -> list[int]:
    """The size of each rank's part of `count` elements, in order; the last ones may be shorter, or empty."""
    size = -(-count // (world * _ALIGN)) * _ALIGN
    return [min(count, (rank + 1) * size) - min(count, rank * size) for rank in range(world)]
