"""``torch.ops.arena.all_reduce(x, group_name)``: the all-reduce as an operator that torch.compile keeps whole.

It names its communicator by the process group's name, because an operator takes no objects; out of place, so that the
compiler has nothing to reason about. Importing this module registers it.
"""

from __future__ import annotations

import torch

from arena.allreduce import lookup

_library = torch.library.Library("arena", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("all_reduce(Tensor x, str group_name) -> Tensor")  # type: ignore[no-untyped-call]


def _all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return lookup(group_name).all_reduce(x)


def _all_reduce_fake(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """Shape, dtype and device of the result: those of `x`, contiguous."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


for _kind in ("CPU", "CUDA"):
    _library.impl("all_reduce", _all_reduce, _kind)  # type: ignore[no-untyped-call]
torch.library.register_fake("arena::all_reduce", _all_reduce_fake, lib=_library)
