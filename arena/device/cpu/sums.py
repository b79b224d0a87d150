"""The sum itself: in rank order, in fp32 for what is narrower, so that every rank gets the same bits.

Two numbers of 16 bits are added in fp32 by torch and rounded once, which is the same as widening them first. fp32,
fp64 and integers are added as they are; integers wrap. What that means for special values: ``-0 + -0`` is ``-0`` and
``-0 + 0`` is ``0``; an infinity stays, opposite ones give NaN; NaN in, NaN out, with the first NaN's bits where only
one rank brought one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)
DTYPES = (*NARROW, torch.float32, torch.float64, torch.int32)


class Adder:
    """Adds up contributions of up to `max_bytes` each. Keeps its scratch memory; not for two threads at once."""

    def __init__(self, world: int, max_bytes: int) -> None:
        size = max_bytes // 2 if world > 2 else 0
        self._total = torch.empty(size, dtype=torch.float32)
        self._next = torch.empty(size, dtype=torch.float32)

    def add(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Store the sum of `parts`, of one shape and dtype, in `out`, which has the same."""
        if len(parts) == 2:
            torch.add(parts[0], parts[1], out=out)
        elif out.dtype in NARROW:
            self._add_wide(parts, out)
        else:
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)

    def added(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum in a new contiguous tensor. Two parts need none to be made beforehand, which takes half as long."""
        if len(parts) == 2:
            return torch.add(parts[0], parts[1])
        out = torch.empty_like(parts[0])
        self.add(parts, out)
        return out

    def _add_wide(self, parts: Sequence[Tensor], out: Tensor) -> None:
        count = out.numel()
        total, widened = self._total[:count].view(out.shape), self._next[:count].view(out.shape)
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(widened.copy_(part))
        out.copy_(total)
