"""NCCL, through torch.distributed: the fallback, for what no other path serves, and across machines."""

from __future__ import annotations

import torch
import torch.distributed as dist

from arena.device import Declined, Place, SetUp, library
from arena.device.library import ANY_SIZE, DTYPES


class Nccl:
    """The group's own operations; all-reduce on a copy, because torch offers it in place only."""

    name = "nccl"
    operations = library.OPERATIONS

    def __init__(self, group: dist.ProcessGroup, *, ours: bool) -> None:
        self.max_bytes = ANY_SIZE
        self._group = group
        self._ours = ours

    def declines(self, x: torch.Tensor, operation: str = "all_reduce") -> str | None:
        """See `ReducePath`. What is only moved may have any dtype."""
        if operation in {"all_gather", "all_to_all"}:
            return None
        return None if x.dtype in DTYPES else "dtype"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`. torch orders streams by itself."""
        out = x.clone(memory_format=torch.contiguous_format)
        if out.numel():
            dist.all_reduce(out, group=self._group)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`."""
        return library.all_gather(x, self._group)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`. NCCL's order of adding, which need not be that of its all-reduce."""
        rows = x.shape[0] // dist.get_world_size(self._group)
        out = torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
        if out.numel():
            dist.reduce_scatter_tensor(out, x.contiguous(), group=self._group)
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`."""
        return library.all_to_all(x, self._group)

    def check(self) -> None:
        """NCCL tells of its losses by itself, or not at all."""

    def close(self) -> None:
        """Give back the group, if it was made here."""
        if self._ours:
            self._ours = False
            dist.destroy_process_group(self._group)


def set_up(place: Place, max_bytes: int) -> SetUp:
    """Use the group if it speaks NCCL, else make one of the same ranks that does."""
    if place.group is None or not dist.is_nccl_available():
        raise Declined("setup_failed", "NCCL needs a process group" if place.group is None else "torch has no NCCL")
    group = _speaking_nccl(place.group)
    path = Nccl(group, ours=group is not place.group)
    try:
        yield "may check"
        pattern = torch.arange(4096, device=place.device, dtype=torch.int32) % 16
        expected = pattern * place.world + sum(range(place.world))
        if not torch.equal(path.all_reduce(pattern + place.rank), expected):
            raise Declined("setup_failed", f"nccl added up wrong on rank {place.rank}")
        yield "checked"
    except BaseException:
        path.close()
        raise
    return path


def _speaking_nccl(group: dist.ProcessGroup) -> dist.ProcessGroup:
    if "nccl" in str(dist.get_backend_config(group)):
        return group
    ranks = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
    return made
