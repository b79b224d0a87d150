"""One-shot: everything to everyone, in one trip over the link. For two ranks the best at any size.

The operations that take one trip by nature are this path's too: all-gather, reduce-scatter, all-to-all, and the
all-reduce that a residual and an RMSNorm follow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import torch

from arena.device import Place
from arena.device.cuda import driver, shapes
from arena.device.cuda.cards import Card
from arena.device.cuda.push import DTYPES, KEPT_LAUNCHES, PushPath, in_vectors, mail_type
from arena.device.cuda.shapes import VECTOR_BYTES, Slots

_SMALL, _SPLIT, _MOVES = range(3)
_NORM: Final = "all_reduce_rms_norm"
_TRIED_ROW: Final = 1000
_TOLERANCE: Final = 0.02  # of the result in 16 bits, relative


class OneShot(PushPath):
    """Five kernels and three kinds of slots: small sums and norms, large sums, and what is moved."""

    name = "one_shot"
    operations: tuple[str, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", _NORM)

    def __init__(self, place: Place, cards: list[Card], max_bytes: int) -> None:
        super().__init__(place, cards, max_bytes)
        self._norms: dict[tuple[torch.dtype, int, int], tuple[driver.Launch, Any]] = {}
        self._room = self._slots()[_SMALL].capacity

    def declines(self, x: torch.Tensor, operation: str = "all_reduce") -> str | None:
        """See `ReducePath`. What is moved goes in whole vectors, and so do the rows of a norm."""
        if operation == "all_reduce" or operation not in self.operations or x.dtype not in DTYPES:
            return super().declines(x, operation)
        if operation == _NORM:
            return self._declines_norm(x)
        world = self._place.world
        row = x.nbytes if operation == "all_gather" else x.nbytes // world
        if row % VECTOR_BYTES:
            return "alignment"
        return "too_large" if row * world > shapes.MOVED_BYTES else None

    def _declines_norm(self, x: torch.Tensor) -> str | None:
        row_bytes = x.shape[-1] * x.itemsize
        if row_bytes % VECTOR_BYTES or not row_bytes:
            return "alignment"
        vectors, row = x.nbytes // VECTOR_BYTES, row_bytes // VECTOR_BYTES
        share = shapes.norm_share(vectors, row, self._multiprocessors)
        return "too_large" if share > self._room else None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`; raises as `all_reduce`."""
        out = x.new_empty((self._place.world * x.shape[0], *x.shape[1:]))
        return self._move("all_gather", x, out, x.nbytes)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`; raises as `all_reduce`."""
        out = x.new_empty((x.shape[0] // self._place.world, *x.shape[1:]))
        return self._move("reduce_scatter", x, out, out.nbytes)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`; raises as `all_reduce`."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._move("all_to_all", x, out, x.nbytes // self._place.world)

    def all_reduce_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ReducePath`; raises as `all_reduce`. The sum and the new residual are rounded, as without a kernel."""
        self.check()
        stream = self._order.enter()
        x, residual, weight = in_vectors(x), in_vectors(residual), in_vectors(weight)
        out, summed = torch.empty_like(x), torch.empty_like(x)
        if x.numel():
            launch, norm = self._norm_launch(x)
            norm.residual, norm.summed, norm.weight = residual.data_ptr(), summed.data_ptr(), weight.data_ptr()
            norm.eps = eps
            self._queue(launch, stream, x, out)
        return out, summed

    def _move(self, kernel: str, x: torch.Tensor, out: torch.Tensor, row_bytes: int) -> torch.Tensor:
        self.check()
        stream = self._order.enter()
        if row_bytes:
            vectors = row_bytes // VECTOR_BYTES
            launch = self._launches.get((kernel, x.dtype, vectors))
            if launch is None:
                self._make_room()
                shape = shapes.shape_for(vectors, self._multiprocessors)
                launch = self._made(kernel, x.dtype, shape, vectors, self._mails[_MOVES])
                self._launches[kernel, x.dtype, vectors] = launch
            self._queue(launch, stream, in_vectors(x), out)
        return out

    def _norm_launch(self, x: torch.Tensor) -> tuple[driver.Launch, Any]:
        """The launch, and what of its arguments changes with each call."""
        vectors, row = x.nbytes // VECTOR_BYTES, x.shape[-1] * x.itemsize // VECTOR_BYTES
        key = (x.dtype, vectors, row)
        found = self._norms.get(key)
        if found is None:
            if len(self._norms) >= KEPT_LAUNCHES:
                self._norms.clear()
            norm = norm_type(self._place.world)()
            norm.mail, norm.row = self._mails[_SMALL], row
            shape = shapes.norm_shape(vectors, row, self._multiprocessors)
            found = self._norms[key] = self._made("one_shot_rms_norm", x.dtype, shape, vectors, norm), norm
        return found

    def _slots(self) -> list[Slots]:
        world = self._place.world
        small = shapes.one_shot_slots(self.max_bytes, world, self._multiprocessors)
        moves = shapes.move_slots(world, self._multiprocessors)
        return [small, shapes.split_slots(self.max_bytes, world), moves]

    def _choose(self, vectors: int) -> tuple[str, int, tuple[int, int]]:
        if vectors * VECTOR_BYTES > shapes.SPLIT_ABOVE_BYTES:
            return "one_shot_split", _SPLIT, shapes.split_shape(self._multiprocessors)
        return "one_shot", _SMALL, shapes.shape_for(vectors, self._multiprocessors)

    # ── trying it out ────────────────────────────────────────────────────────────────────────────
    def _tries(self) -> Iterator[torch.Tensor]:
        yield from super()._tries()
        for dtype in DTYPES:
            for turn in range(4):
                yield from self._try_moves(dtype, 8 * _TRIED_ROW, turn)
                yield self._try_norm(dtype, turn)

    def _try_moves(self, dtype: torch.dtype, count: int, turn: int) -> Iterator[torch.Tensor]:
        rank, world = self._place.rank, self._place.world
        pattern = torch.arange(world * count, device=self._place.device, dtype=torch.int32) * 7 % 13 + turn
        parts = [(pattern + each).to(dtype) for each in range(world)]
        rows = slice(rank * count, (rank + 1) * count)
        total = (pattern * world + sum(range(world))).to(dtype)
        yield (self.all_gather(parts[rank][:count]) == torch.cat([part[:count] for part in parts])).all()
        yield (self.reduce_scatter(parts[rank]) == total[rows]).all()
        yield (self.all_to_all(parts[rank]) == torch.cat([part[rows] for part in parts])).all()

    def _try_norm(self, dtype: torch.dtype, turn: int) -> torch.Tensor:
        """Nothing, where a row of this length does not fit."""
        rank, world, device = self._place.rank, self._place.world, self._place.device
        pattern = (torch.arange(3 * _TRIED_ROW, device=device, dtype=torch.int32) * 7 % 13 + turn).view(3, _TRIED_ROW)
        x, residual = (pattern + rank).to(dtype), pattern.to(dtype)
        if self.declines(x, _NORM) is not None:
            return torch.ones((), dtype=torch.bool, device=device)
        weight = (pattern[0] % 3 + 1).to(dtype)
        normed, summed = self.all_reduce_rms_norm(x, residual, weight, 1e-6)
        expected = (pattern * (world + 1) + sum(range(world))).to(dtype)
        wide = expected.float()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True)) * weight.float()
        close = ((normed.float() - exact).abs() <= _TOLERANCE * exact.abs()).all()
        return (summed == expected).all() & close


@cache
def norm_type(world: int) -> type[Any]:
    """`NormMail` in push.cu for so many ranks."""
    pointers = [(name, ctypes.c_void_p) for name in ("residual", "summed", "weight")]
    fields = [("mail", mail_type(world)), *pointers, ("row", ctypes.c_uint32), ("eps", ctypes.c_float)]
    return type("NormMail", (ctypes.Structure,), {"_fields_": fields})
