"""A device that is not there: its tensors are meta tensors to torch, and have their bytes here.

The copies to and from it are the CPU engine's. What sees a tensor's device and nothing of its bytes takes it for one
on a GPU.
"""

from typing import Any

import torch

from arena.device.cpu.copies import CpuCopies


class _Elsewhere(CpuCopies):
    kind = "meta"

    def __init__(self) -> None:
        super().__init__()
        self._put: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.fetched = 0
        self.registered_when_fetched: list[bool] = []

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, there."""
        there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self._put.append((there, tensor))
        return there

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `arena.device.Copies`. `source` is another object than what was put there: they are told by shape."""
        tensor = next(tensor for there, tensor in self._put if _same(there, source))
        self.fetched += 1
        self.registered_when_fetched.append(self._is_registered(target.data_ptr(), target.nbytes))
        super().to_host(tensor, target)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.stride() == other.stride()


COPIES: Any = _Elsewhere()
