"""What Arena's all-reduce on GPUs is held against: NCCL in place and with registered buffers, vLLM's kernel, torch's.

A *peer* takes a plain tensor and leaves its result in a new one, copies included; NCCL is also measured in place,
without any copy, and counts as the stricter peer. A *bare* contender wants its input in symmetric memory, or changes
it; it is there to be compared with, and its result is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist

from arena.device.cuda.streams import cuda

IN_PLACE: Final = "nccl, in place"
REGISTERED: Final = "nccl, registered"
VLLM: Final = "vllm custom"
PATHS: Final = ("one_shot", "two_shot", "symm_mem_one_shot", "symm_mem_two_shot", "nccl")

Operation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """An operation and what it may be held against."""

    name: str
    kind: str  # "own", "peer", "bare" or "limit"
    operation: Operation


def nccl_in_place(x: torch.Tensor) -> torch.Tensor:
    """NCCL as most call it. No new tensor, so not the same service; here to show what that part costs."""
    dist.all_reduce(x)
    return x


class Peers:
    """Those that can be had here, set up at one rank; collective.

    Attributes:
        operations: by name. What a library lacks is left out, on every rank alike.
        missing: why each of the others is not there.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, largest: int) -> None:
        self.operations: dict[str, Operation] = {}
        self.missing: dict[str, str] = {}
        self._closing: list[Callable[[], object]] = []
        for name, make in ((REGISTERED, self._registered_nccl), (VLLM, self._vllm)):
            why, operation = "", None
            try:
                operation = make(device, largest)
            except Exception as error:  # another library's, of any kind
                why = f"{type(error).__name__}: {error}"
            everybody: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everybody, why, group=group)
            if operation is not None and not any(everybody):
                self.operations[name] = operation
            else:
                self.missing[name] = next(filter(None, everybody))

    def close(self) -> None:
        """Give everything back."""
        for close in self._closing:
            with suppress(Exception):
                close()
        self._closing.clear()

    def _registered_nccl(self, device: torch.device, largest: int) -> Operation:
        """A copy into memory that NCCL has registered, its all-reduce there, and a copy out."""
        group: Any = dist.group.WORLD
        backend = group._get_backend(device)
        pool = cuda.MemPool(backend.mem_allocator)
        with cuda.use_mem_pool(pool):
            staging = torch.empty(largest, dtype=torch.uint8, device=device)
        backend.register_mem_pool(pool)
        self._closing.append(lambda: backend.deregister_mem_pool(pool))

        def run(x: torch.Tensor) -> torch.Tensor:
            staged = staging[: x.nbytes].view(x.dtype).view(x.shape)
            staged.copy_(x)
            dist.all_reduce(staged)
            return staged.clone()

        return run

    def _vllm(self, device: torch.device, largest: int) -> Operation:
        """vLLM's own kernel, which copies into its buffer first, as it does outside of vLLM's own graphs."""
        module = import_module("vllm.distributed.device_communicators.custom_all_reduce")
        made = module.CustomAllreduce(dist.new_group(backend="gloo"), device, max_size=largest)
        self._closing.append(made.close)
        if made.disabled:
            raise RuntimeError("it has disabled itself")

        def run(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = made.all_reduce(x, registered=False)
            return out

        return run


def symmetric_variants(path: Any) -> list[Contender]:
    """What else can be put together from torch's operators, with copies and without."""
    operators, name = torch.ops.symm_mem, path.group_name

    def staged(x: torch.Tensor) -> torch.Tensor:
        return path.staging(x)  # type: ignore[no-any-return]

    def fused(x: torch.Tensor) -> Any:
        return operators.one_shot_all_reduce_copy(staged(x), x, "sum", name)

    def copied(x: torch.Tensor) -> Any:
        return operators.one_shot_all_reduce(staged(x).copy_(x), "sum", name)

    def two_shot_out(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        operators.two_shot_all_reduce_out(staged(x).copy_(x), "sum", name, out)
        return out

    def bare_one_shot(x: torch.Tensor) -> Any:
        return operators.one_shot_all_reduce(staged(x), "sum", name)

    def bare_two_shot(x: torch.Tensor) -> Any:
        return operators.two_shot_all_reduce_(staged(x), "sum", name)

    return [
        Contender("torch one-shot, copy fused", "peer", fused),
        Contender("torch one-shot, copied", "peer", copied),
        Contender("torch two-shot, out", "peer", two_shot_out),
        Contender("torch one-shot, symmetric input", "bare", bare_one_shot),
        Contender("torch two-shot, symmetric, in place", "bare", bare_two_shot),
    ]
