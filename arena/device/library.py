"""What the collectives of torch.distributed have in common, whichever library does them."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

OPERATIONS: Final[tuple[str, ...]] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""What they can do."""

ANY_SIZE: Final = 1 << 62
"""Their ceiling: they have none."""

DTYPES: Final = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
"""What they add up as it is."""


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """See `arena.device.ReducePath`. Moved as bytes, so of any dtype."""
    out = torch.empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device)
    if out.numel():
        dist.all_gather_into_tensor(_bytes(out), _bytes(x.contiguous()), group=group)
    return out


def all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """See `arena.device.ReducePath`. Moved as bytes, so of any dtype."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        dist.all_to_all_single(_bytes(out), _bytes(x.contiguous()), group=group)
    return out


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
