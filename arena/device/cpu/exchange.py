"""All-gather, reduce-scatter and all-to-all over a board: everybody puts rows down, everybody takes what is its own.

One step each, and several for what does not fit into a slot. A rank leaves one row that all others take (all-gather),
or one for each of them; whoever takes rows keeps them as they are or adds them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from arena.device.cpu.board import Board
from arena.device.cpu.outputs import new_output
from arena.device.cpu.sums import Adder
from arena.device.cpu.tag import Tag
from arena.errors import OperandMismatch

OPERATIONS: Final = ("all_gather", "reduce_scatter", "all_to_all")
_ALIGN: Final = 64  # elements; what is cut is cut at the edge of a cache line
_KEPT: Final = 256


class Rows(NamedTuple):
    """The slots of one step."""

    own: torch.Tensor  # [rows, width], what this rank puts down
    parts: list[torch.Tensor]  # by rank, what this one takes


class Exchange:
    """The three operations, for the path `number`. Not for two threads at once."""

    def __init__(self, board: Board, adder: Adder, number: int) -> None:
        self._board = board
        self._adder = adder
        self._number = number
        self._kept: dict[tuple[torch.dtype, int, int], list[Rows]] = {}

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`."""
        out = new_output(x, torch.Size((self._board.world * x.shape[0], *x.shape[1:])))
        self._run("all_gather", x, x.reshape(1, -1 if x.numel() else 0), out)
        return out

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`."""
        world = self._board.world
        out = new_output(x, torch.Size((x.shape[0] // world, *x.shape[1:])))
        self._run("reduce_scatter", x, x.reshape(world, -1 if x.numel() else 0), out)
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`."""
        out = new_output(x)
        self._run("all_to_all", x, x.reshape(self._board.world, -1 if x.numel() else 0), out)
        return out

    def _run(self, operation: str, x: torch.Tensor, given: torch.Tensor, out: torch.Tensor) -> None:
        """Give rows, and fill `out`. Takes place for an empty tensor too.

        Raises:
            OperandMismatch, PeerDied, CommunicatorClosed: see `Board.wait`.
        """
        tag: Tag | None = Tag.of(x, self._number, operation)
        try:
            for start, end in self._cut(given):
                taken = self._step(given[:, start:end], tag)
                tag = None
                self._put(operation, taken, out, start, end)
        except OperandMismatch:
            raise  # on every rank, in the same step
        except BaseException as error:
            self._board.give_up(error)
            raise

    def _put(self, operation: str, taken: list[torch.Tensor], out: torch.Tensor, start: int, end: int) -> None:
        """One step's part of the result, columns `start` to `end` of each rank's row."""
        if operation == "reduce_scatter":
            self._adder.add(taken, out.view(-1)[start:end])
            return
        columns = out.view(self._board.world, out.numel() // self._board.world)[:, start:end]
        for row, part in zip(columns.unbind(), taken, strict=True):
            row.copy_(part)

    def _step(self, given: torch.Tensor, tag: Tag | None) -> list[torch.Tensor]:
        """Put rows down, and wait for the others'. What is returned may be read until the next step."""
        board = self._board
        rows = self._rows(given)[(board.step + 1) % 2]
        rows.own.copy_(given)
        board.arrive(tag)
        board.wait(tag)
        return rows.parts

    def _cut(self, given: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Columns that fit into a slot."""
        rows, count = given.shape
        most = self._board.slot_bytes // given.itemsize // rows // _ALIGN * _ALIGN
        for start in range(0, max(count, 1), most):
            yield start, min(start + most, count)

    def _rows(self, given: torch.Tensor) -> list[Rows]:
        """For even and for odd steps. Making views costs more than a small copy, so they are kept."""
        dtype, (rows, width) = given.dtype, given.shape
        kept = self._kept.get((dtype, rows, width))
        if kept is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            with torch.inference_mode(False):  # views that are made inside it can't be written to outside
                kept = [self._make_rows(dtype, rows, width, step) for step in (0, 1)]
            self._kept[dtype, rows, width] = kept
        return kept

    def _make_rows(self, dtype: torch.dtype, rows: int, width: int, step: int) -> Rows:
        board = self._board
        slots = [slot.view(dtype)[: rows * width].view(rows, width) for slot in board.slots(step)]
        return Rows(slots[board.rank], [slot[board.rank if rows > 1 else 0] for slot in slots])
