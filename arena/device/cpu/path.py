"""What the two paths over shared memory have in common: what they take, cutting into steps, checking themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Generic, TypeVar

import torch

from arena.device import Declined, Place, ReducePath
from arena.device.cpu.board import Board
from arena.device.cpu.outputs import new_output
from arena.device.cpu.sums import DTYPES, Adder
from arena.device.cpu.tag import Tag
from arena.errors import OperandMismatch
from arena.layout import BOARD_SLOTS, LINE_WORDS, WORD, round_up

Views = TypeVar("Views")
_KEPT = 256
_MOST_PLACES = 8
_ROTATED_BYTES = 32 << 10
_LINE_BYTES = LINE_WORDS * WORD


class Cut(Generic[Views]):
    """How tensors of one shape and dtype travel. Making views costs more than a small sum, so they are kept.

    In every step a tensor takes another place in the slots, in turn. What a rank writes to is then no longer in the
    cache of whoever read it last, from which it would have to be called back: at 256 KiB and two ranks that is worth
    10 % and more. Which place it is follows from the step's number, so all ranks mean the same.

    Attributes:
        tag: what the ranks compare.
        places: by step, modulo their number, once they have been needed; none if it takes several steps.
    """

    __slots__ = ("places", "tag")

    def __init__(self, tag: Tag, nbytes: int, slot_bytes: int) -> None:
        self.tag = tag
        self.places: list[Views | None] = []
        if nbytes <= slot_bytes:
            turns = min(_MOST_PLACES, slot_bytes // round_up(nbytes, _LINE_BYTES)) if nbytes >= _ROTATED_BYTES else 1
            self.places = [None] * (BOARD_SLOTS * turns)


class BoardPath(ABC, Generic[Views]):
    """A path over a board. What one step does is the subclass's `_step`; the views it needs, its `_make_views`."""

    name = ""
    number = 0
    operations: tuple[str, ...] = ("all_reduce",)

    def __init__(self, board: Board, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._board = board
        self._adder = Adder(board.world, board.slot_bytes)
        self._cuts: dict[tuple[torch.dtype, torch.Size], Cut[Views]] = {}
        board.users += 1
        self._open = True

    def declines(self, x: torch.Tensor, operation: str = "all_reduce") -> str | None:
        """See `ReducePath`. Takes any shape, layout and alignment."""
        if operation not in self.operations:
            return "disabled"
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
            if cut.places:
                return self._whole(x, cut, cut.tag)
            out = new_output(x)
            self._steps(x.reshape(-1), out.view(-1), cut.tag)
            return out
        except OperandMismatch:
            raise  # on every rank, in the same step
        except BaseException as error:
            self._board.give_up(error)
            raise

    def check(self) -> None:
        """See `ReducePath`."""
        self._board.check()

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
            self._piece(piece, out[start:end], cut, first)
            first = None

    def _make_cut(self, x: torch.Tensor) -> Cut[Views]:
        if len(self._cuts) >= _KEPT:
            self._cuts.clear()
        cut: Cut[Views] = Cut(Tag.of(x, self.number), x.nbytes, self._board.slot_bytes)
        self._cuts[x.dtype, x.shape] = cut
        return cut

    def _views(self, cut: Cut[Views], x: torch.Tensor, step: int) -> Views:
        """What is needed in a step to come, 1 for the next one."""
        places = cut.places
        number = (self._board.step + step) % len(places)
        views = places[number]
        if views is None:
            with torch.inference_mode(False):  # views that are made inside it can't be written to outside
                views = places[number] = self._make_views(x, number)
        return views

    def _places(self, x: torch.Tensor, number: int) -> list[torch.Tensor]:
        """Everybody's place number `number` for a tensor like `x`, by rank, in its shape."""
        nbytes = x.nbytes
        start = number // BOARD_SLOTS * round_up(nbytes, _LINE_BYTES)
        slots = self._board.slots(number)
        return [slot[start : start + nbytes].view(x.dtype).view(x.shape) for slot in slots]

    @abstractmethod
    def _make_views(self, x: torch.Tensor, number: int) -> Views:
        """What a step needs for tensors like `x`, in place number `number`."""

    @abstractmethod
    def _whole(self, x: torch.Tensor, cut: Cut[Views], tag: Tag) -> torch.Tensor:
        """The sum of what fits into a slot, in a new tensor."""

    @abstractmethod
    def _piece(self, x: torch.Tensor, out: torch.Tensor, cut: Cut[Views], tag: Tag | None) -> None:
        """The sum of a piece, flat, into a part of the result."""


def check(path: ReducePath, place: Place, largest: int) -> Generator[object, list[Any], None]:
    """A sum whose result is known, of few elements and of `largest`: some hosts move memory and get it wrong."""
    for count in (1, largest):
        pattern = torch.arange(count, dtype=torch.int32) % 16
        x = (pattern + place.rank).to(torch.float32)
        expected = (pattern * place.world + sum(range(place.world))).to(torch.float32)
        if not torch.equal(path.all_reduce(x), expected):
            raise Declined("setup_failed", f"{path.name} added up wrong on rank {place.rank}")
        yield "checked"
