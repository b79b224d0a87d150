"""torch's symmetric memory: its one-shot, two-shot and multicast all-reduce.

One class for all three. The first two need no multicast, and are not refused for the want of it, as they are elsewhere
(vLLM issue 50179); the third is set up only where the memory has a multicast address. Sums in the tensor's own dtype,
which is less exact than the other paths where more than two ranks take part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from arena.device import Declined, Place, SetUp
from arena.device.cuda import cards as who
from arena.device.cuda.streams import StreamOrder

DTYPES: Final = (torch.float32, torch.bfloat16)
_ALIGNMENT_BYTES: Final = 16

FUSED_UP_TO_BYTES: Final = 256 << 10
"""The operator that also copies its input is faster up to here; above, a copy of its own is (two H200s, 2026-11-30)."""

Reduce = Callable[["SymmetricPath", torch.Tensor, torch.Tensor], torch.Tensor]


class SymmetricPath:
    """One of the three: a buffer that all ranks see, and what to do with what is copied into it."""

    operations: tuple[str, ...] = ("all_reduce",)

    def __init__(self, name: str, reduce: Reduce, buffer: torch.Tensor, group_name: str) -> None:
        self.name = name
        self.max_bytes = buffer.nbytes
        self.group_name = group_name
        self._reduce = reduce
        self._buffer = buffer
        self._order = StreamOrder(buffer.device)

    def declines(self, x: torch.Tensor, operation: str = "all_reduce") -> str | None:
        """See `ReducePath`."""
        if operation not in self.operations:
            return "disabled"
        if x.dtype not in DTYPES:
            return "dtype"
        if x.nbytes > self.max_bytes:
            return "too_large"
        return "alignment" if x.nbytes % _ALIGNMENT_BYTES else None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`."""
        self._order.enter()
        flat = x.reshape(-1)
        if flat.numel() == 0:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        return self._reduce(self, flat, self.staging(flat)).view(x.shape)

    def staging(self, x: torch.Tensor) -> torch.Tensor:
        """Where a flat tensor is copied to."""
        return self._buffer.view(x.dtype)[: x.numel()]

    def check(self) -> None:
        """torch's operators tell of no loss: a rank that is gone leaves the others waiting."""

    def close(self) -> None:
        """torch gives the memory back when its last user is gone."""
        del self._buffer


def _one_shot(path: SymmetricPath, x: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
    operators = torch.ops.symm_mem
    if x.nbytes <= FUSED_UP_TO_BYTES:
        result: torch.Tensor = operators.one_shot_all_reduce_copy(staged, x, "sum", path.group_name)
        return result
    staged.copy_(x)
    result = operators.one_shot_all_reduce(staged, "sum", path.group_name)
    return result


def _two_shot(path: SymmetricPath, x: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
    staged.copy_(x)
    torch.ops.symm_mem.two_shot_all_reduce_(staged, "sum", path.group_name)
    return staged.clone()


def _multimem(path: SymmetricPath, x: torch.Tensor, staged: torch.Tensor) -> torch.Tensor:
    staged.copy_(x)
    torch.ops.symm_mem.multimem_all_reduce_(staged, "sum", path.group_name)
    return staged.clone()


REDUCES: Final[dict[str, Reduce]] = {
    "symm_mem_one_shot": _one_shot,
    "symm_mem_two_shot": _two_shot,
    "symm_mem_multimem": _multimem,
}
"""By the name of the path."""


def set_up(name: str, place: Place, max_bytes: int) -> SetUp:
    """Set up one of the three. The rendezvous is torch's, and the one stage that talks to others by itself."""
    yield from who.introduce(place)
    if place.group is None:
        raise Declined("setup_failed", "symmetric memory needs a process group")
    group_name = place.group.group_name
    size_bytes = -(-max_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    try:
        memory = _symmetric_memory()
        buffer = memory.empty(size_bytes, dtype=torch.uint8, device=place.device)
        yield "allocated"
        handle = memory.rendezvous(buffer, group_name)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise Declined("setup_failed", f"symmetric memory: {error}") from None
    if name == "symm_mem_multimem" and not handle.multicast_ptr:
        raise Declined("no_multicast", "the memory has no multicast address")
    path = SymmetricPath(name, REDUCES[name], buffer, group_name)
    yield "may check"
    _check(path, place)
    yield "checked"
    return path


def _check(path: SymmetricPath, place: Place) -> None:
    for dtype in DTYPES:
        pattern = torch.arange(4096, device=place.device, dtype=torch.int32) % 16
        expected = (pattern * place.world + sum(range(place.world))).to(dtype)
        if not torch.equal(path.all_reduce((pattern + place.rank).to(dtype)), expected):
            raise Declined("setup_failed", f"{path.name} added up wrong on rank {place.rank}")


def _symmetric_memory() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory
