"""One-shot: everybody copies in, everybody adds up everything. One wait, and world - 1 remote reads a byte.

The operations that take one wait by nature are this path's too.
"""

from __future__ import annotations

import torch

from arena.device.cpu.board import Board
from arena.device.cpu.exchange import OPERATIONS, Exchange
from arena.device.cpu.path import BoardPath, Cut
from arena.device.cpu.sums import DTYPES
from arena.device.cpu.tag import Tag

Slots = list[torch.Tensor]


class OneShot(BoardPath[Slots]):
    """Best for small tensors, where waiting is what costs."""

    name = "cpu_one_shot"
    number = 1
    operations: tuple[str, ...] = ("all_reduce", *OPERATIONS)

    def __init__(self, board: Board, max_bytes: int) -> None:
        super().__init__(board, max_bytes)
        exchange = Exchange(board, self._adder, self.number)
        self.all_gather = exchange.all_gather
        self.reduce_scatter = exchange.reduce_scatter
        self.all_to_all = exchange.all_to_all

    def declines(self, x: torch.Tensor, operation: str = "all_reduce") -> str | None:
        """See `ReducePath`. Takes any shape, layout and alignment; what is only moved, of any dtype and size."""
        if operation == "all_reduce":
            return super().declines(x)
        return "dtype" if operation == "reduce_scatter" and x.dtype not in DTYPES else None

    def _make_views(self, x: torch.Tensor, number: int) -> Slots:
        return self._places(x, number)

    def _whole(self, x: torch.Tensor, cut: Cut[Slots], tag: Tag) -> torch.Tensor:
        return self._adder.added(self._exchanged(x, cut, tag))

    def _piece(self, x: torch.Tensor, out: torch.Tensor, cut: Cut[Slots], tag: Tag | None) -> None:
        self._adder.add(self._exchanged(x, cut, tag), out)

    def _exchanged(self, x: torch.Tensor, cut: Cut[Slots], tag: Tag | None) -> Slots:
        board = self._board
        slots = self._views(cut, x, 1)
        slots[board.rank].copy_(x)
        board.arrive(tag)
        board.wait(tag)
        return slots
