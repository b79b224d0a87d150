"""gloo, through torch.distributed: the fallback, for what shared memory does not serve and where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from arena.device import Place, SetUp, library
from arena.device.cpu.board import Board
from arena.device.cpu.path import check
from arena.device.cpu.tag import Tag
from arena.device.library import ANY_SIZE, DTYPES
from arena.errors import CommunicatorClosed

_NARROW_FLOATS = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_e"))


class Gloo:
    """The group's own operations. Sums in the tensor's dtype; 8-bit floats in fp32."""

    name = "gloo"
    operations = library.OPERATIONS

    def __init__(self, place: Place, max_bytes: int, board: Board | None) -> None:
        self.max_bytes = ANY_SIZE
        assert place.group is not None
        self._group = place.group
        self._rank, self._world = place.rank, place.world
        self._board = board

    def declines(self, x: torch.Tensor, operation: str = "all_reduce") -> str | None:
        """See `ReducePath`. What is only moved may have any dtype."""
        if operation in {"all_gather", "all_to_all"}:
            return None
        return None if x.dtype in DTYPES or x.dtype in _NARROW_FLOATS else "dtype"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`.

        Raises:
            OperandMismatch, PeerDied, CommunicatorClosed: see `Board.wait`, where there is shared memory.
            CommunicatorClosed: gloo failed, most likely because a rank died.
        """
        self._meet(x, "all_reduce")
        return self._sum(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`; raises as `all_reduce`."""
        self._meet(x, "all_gather")
        with _told("all-gather"):
            return library.all_gather(x, self._group)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`; raises as `all_reduce`. The whole sum, of which a part is kept."""
        self._meet(x, "reduce_scatter")
        rows = x.shape[0] // self._world
        return self._sum(x)[self._rank * rows : (self._rank + 1) * rows].clone()

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`; raises as `all_reduce`."""
        self._meet(x, "all_to_all")
        with _told("all-to-all"):
            return library.all_to_all(x, self._group)

    def _meet(self, x: torch.Tensor, operation: str) -> None:
        """Compare what the ranks bring: one with another tensor would leave gloo waiting until its own deadline."""
        if self._board is not None:
            tag = Tag.of(x, 3, operation)
            self._board.arrive(tag)
            self._board.wait(tag)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype in _NARROW_FLOATS:
            return self._sum(x.to(torch.float32)).to(x.dtype)
        out = x.clone(memory_format=torch.contiguous_format)
        if out.numel():
            with _told("all-reduce"):
                dist.all_reduce(out, group=self._group)
        return out

    def check(self) -> None:
        """See `ReducePath`."""
        if self._board is not None:
            self._board.check()

    def close(self) -> None:
        """The group is not ours to close."""


@contextmanager
def _told(operation: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CommunicatorClosed(
            f"gloo's {operation} failed",
            expected="every rank of the process group",
            found=str(error),
            remedy="if a rank died, start all of them anew: the process group is broken",
        ) from error


def set_up(place: Place, max_bytes: int, board: Board | None) -> SetUp:
    """The group exists already: only try it. The board is used if it is whole on every rank."""
    yield "may check"
    yield from check(Gloo(place, max_bytes, None), place, 1000)
    whole = yield board is not None and board.lost is None
    return Gloo(place, max_bytes, board if all(whole) else None)
