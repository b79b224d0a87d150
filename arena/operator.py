"""The operations as operators that torch.compile keeps whole: ``torch.ops.arena.all_reduce(x, group_name)`` and others.

    all_reduce(x, group_name)
    all_gather(x, group_size, group_name)
    reduce_scatter(x, group_size, group_name)
    all_to_all(x, group_name)
    all_reduce_rms_norm(x, residual, weight, eps, group_name)

They name their communicator by the process group's name, because an operator takes no objects, and how many ranks it
has where the shape of the result depends on it, as torch's own do; out of place, so that the compiler has nothing to
reason about. Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from arena.allreduce import AllReduce, lookup
from arena.errors import InvalidArgument

_library = torch.library.Library("arena", "FRAGMENT")  # type: ignore[no-untyped-call]


def _all_reduce(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return lookup(group_name).all_reduce(x)


def _all_gather(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return _of_size(group_size, group_name).all_gather(x)


def _reduce_scatter(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return _of_size(group_size, group_name).reduce_scatter(x)


def _all_to_all(x: torch.Tensor, group_name: str) -> torch.Tensor:
    return lookup(group_name).all_to_all(x)


def _all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return lookup(group_name).all_reduce_rms_norm(x, residual, weight, eps)


def _of_size(group_size: int, group_name: str) -> AllReduce:
    found = lookup(group_name)
    if found.world != group_size:
        raise InvalidArgument(
            f"the group {group_name!r} is of another size", expected=f"{found.world} ranks", found=f"{group_size}"
        )
    return found


# ── shape, dtype and device of the results, which are contiguous ─────────────────────────────────
def _like(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _gathered(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    rows, *rest = x.shape or (1,)
    return torch.empty((rows * group_size, *rest), dtype=x.dtype, device=x.device)


def _scattered(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return torch.empty((x.shape[0] // group_size, *x.shape[1:]), dtype=x.dtype, device=x.device)


def _like_both(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(x), _like(x)


def _register(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    for kind in ("CPU", "CUDA"):
        _library.impl(name, function, kind)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"arena::{name}", fake, lib=_library)


_register("all_reduce(Tensor x, str group_name) -> Tensor", _all_reduce, _like)
_register("all_gather(Tensor x, int group_size, str group_name) -> Tensor", _all_gather, _gathered)
_register("reduce_scatter(Tensor x, int group_size, str group_name) -> Tensor", _reduce_scatter, _scattered)
_register("all_to_all(Tensor x, str group_name) -> Tensor", _all_to_all, _like)
_register(
    "all_reduce_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str group_name) -> (Tensor, Tensor)",
    _all_reduce_rms_norm,
    _like_both,
)
