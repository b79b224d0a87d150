"""What the two paths over shared memory have in common: what they take, cutting into steps, checking themselves."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from arena.device import Declined, Place, ReducePath
from arena.device.cpu.board import Board
from arena.device.cpu.outputs import new_output
from arena.device.cpu.sums import DTYPES, Adder
from arena.device.cpu.tag import Tag
from arena.errors import OperandMismatch

Views = TypeVar("Views")
_KEPT = 256


@dataclass(frozen=True)
class Cut(Generic[Views]):
    """How tensors of one shape and dtype travel. Making views costs more than a small sum, so they are kept."""

    tag: Tag
    views: Views | None  # None: it takes several steps


class BoardPath(Generic[Views]):
    """A path over a board. What one step does is the subclass's `_step`; the views it needs, its `_make_views`."""

    name = ""
    number = 0

    def __init__(self, board: Board, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._board = board
        self._adder = Adder(board.world, board.slot_bytes)
        self._cuts: dict[tuple[torch.dtype, torch.Size], Cut[Views]] = {}
        board.users += 1
        self._open = True

    def declines(self, x: torch.Tensor) -> str | None:
        """See `ReducePath`. Takes any shape, layout and alignment."""
        if x.dtype not in DTYPES:
            return "dtype"
        return "too_large" if x.nbytes > self.max_bytes else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`. Takes place for an empty tensor too.

        Raises:
            OperandMismatch, PeerDied, CommunicatorClosed: see `Board.wait`.
        """
        try:
            cut = self._cuts.get((x.dtype, x.shape)) or self._make_cut(x)
            out = new_output(x)
            if cut.views is not None:
                self._step(x, out, cut.views, cut.tag)
            else:
                self._steps(x.reshape(-1), out.view(-1), cut.tag)
            return out
        except OperandMismatch:
            raise  # on every rank, in the same step
        except BaseException as error:
            self._board.give_up(error)
            raise

    def close(self) -> None:
        """Let go of the board."""
        if self._open:
            self._open = False
            self._board.leave()

    def _steps(self, x: torch.Tensor, out: torch.Tensor, tag: Tag) -> None:
        """One step for as much as a slot holds; the first one carries the tag."""
        count, most = x.numel(), self._board.slot_bytes // x.itemsize
        first: Tag | None = tag
        for start in range(0, count, most):
            end = min(start + most, count)
            piece = x[start:end]
            cut = self._cuts.get((x.dtype, piece.shape)) or self._make_cut(piece)
            assert cut.views is not None
            self._step(piece, out[start:end], cut.views, first)
            first = None

    def _make_cut(self, x: torch.Tensor) -> Cut[Views]:
        if len(self._cuts) >= _KEPT:
            self._cuts.clear()
        views = None
        if x.nbytes <= self._board.slot_bytes:
            with torch.inference_mode(False):  # views that are made inside it can't be written to outside
                views = self._make_views(x.dtype, x.shape)
        cut = Cut(Tag.of(x, self.number), views)
        self._cuts[x.dtype, x.shape] = cut
        return cut

    def _typed_slots(self, dtype: torch.dtype, shape: torch.Size) -> list[list[torch.Tensor]]:
        """Everybody's slots as tensors of this shape, for even and for odd steps."""
        count = shape.numel()
        return [[slot.view(dtype)[:count].view(shape) for slot in self._board.slots(step)] for step in (0, 1)]

    def _make_views(self, dtype: torch.dtype, shape: torch.Size) -> Views:
        raise NotImplementedError

    def _step(self, x: torch.Tensor, out: torch.Tensor, views: Views, tag: Tag | None) -> None:
        raise NotImplementedError


def check(path: ReducePath, place: Place, largest: int) -> Generator[object, list[Any], None]:
    """A sum whose result is known, of few elements and of `largest`: some hosts move memory and get it wrong."""
    for count in (1, largest):
        pattern = torch.arange(count, dtype=torch.int32) % 16
        x = (pattern + place.rank).to(torch.float32)
        expected = (pattern * place.world + sum(range(place.world))).to(torch.float32)
        if not torch.equal(path.all_reduce(x), expected):
            raise Declined("setup_failed", f"{path.name} added up wrong on rank {place.rank}")
        yield "checked"
