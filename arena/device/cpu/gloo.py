"""gloo, through torch.distributed: the fallback, for what shared memory does not serve and where there is none."""

from __future__ import annotations

import torch
import torch.distributed as dist

from arena.device import Place, SetUp
from arena.device.cpu.board import Board
from arena.device.cpu.path import check
from arena.device.cpu.tag import Tag
from arena.device.library import ANY_SIZE, DTYPES
from arena.errors import CommunicatorClosed

_NARROW_FLOATS = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_e"))


class Gloo:
    """The group's own all-reduce. Sums in the tensor's dtype; 8-bit floats in fp32."""

    name = "gloo"

    def __init__(self, place: Place, max_bytes: int, board: Board | None) -> None:
        self.max_bytes = ANY_SIZE
        self._group = place.group
        self._board = board

    def declines(self, x: torch.Tensor) -> str | None:
        """See `ReducePath`."""
        return None if x.dtype in DTYPES or x.dtype in _NARROW_FLOATS else "dtype"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`.

        Raises:
            OperandMismatch, PeerDied, CommunicatorClosed: see `Board.wait`, where there is shared memory.
            CommunicatorClosed: gloo failed, most likely because a rank died.
        """
        if self._board is not None:
            tag = Tag.of(x, 3)  # a rank with another tensor would leave gloo waiting until its own deadline
            self._board.arrive(tag)
            self._board.wait(tag)
        if x.dtype in _NARROW_FLOATS:
            return self._sum(x.to(torch.float32)).to(x.dtype)
        return self._sum(x)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        if out.numel():
            try:
                dist.all_reduce(out, group=self._group)
            except RuntimeError as error:
                raise _failed(error) from error
        return out

    def close(self) -> None:
        """The group is not ours to close."""


def _failed(error: RuntimeError) -> CommunicatorClosed:
    return CommunicatorClosed(
        "gloo's all-reduce failed",
        expected="every rank of the process group",
        found=str(error),
        remedy="if a rank died, start all of them anew: the process group is broken",
    )


def set_up(place: Place, max_bytes: int, board: Board | None) -> SetUp:
    """The group exists already: only try it. The board is used if it is whole on every rank."""
    yield "may check"
    yield from check(Gloo(place, max_bytes, None), place, 1000)
    whole = yield board is not None and board.lost is None
    return Gloo(place, max_bytes, board if all(whole) else None)
