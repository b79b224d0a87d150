"""Ranks that have a GPU each, in processes of their own, and the set-up of one path among them."""

import datetime
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arena.device import Place
from arena.joining import meet, rounds_of
from arena.lockstep import Budget, set_up
from tests.support.processes import Child, ChildDied

CUDA = getattr(torch, "cuda")  # noqa: B009, the attribute itself is for arena/device/cuda alone
PATIENCE_S = 40.0
OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class Rank:
    """One of the ranks, inside its process."""

    def __init__(self, rank: int, world: int, store: Path, gpu: int, *, hidden: bool) -> None:
        os.environ.update(OFF)  # multicast stays off wherever these tests run
        if hidden:
            os.environ["CUDA_VISIBLE_DEVICES"], gpu = str(gpu), 0
        self.rank, self.world = rank, world
        self.device = torch.device("cuda", gpu)
        CUDA.set_device(self.device)
        patience = datetime.timedelta(seconds=PATIENCE_S)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=world, timeout=patience
        )
        self.gloo = dist.new_group(backend="gloo", timeout=patience)
        self.rounds = rounds_of(dist.group.WORLD)
        meet(dist.group.WORLD, self.rounds, None, PATIENCE_S)

    def tell(self, said: Any) -> list[Any]:
        """What every rank says."""
        answers: list[Any] = [None] * self.world
        dist.all_gather_object(answers, said, group=self.gloo)
        return answers

    def meet(self) -> None:
        """All are here, and have nothing queued."""
        CUDA.synchronize()
        dist.barrier(self.gloo)

    def set_up(self, name: str, max_bytes: int) -> Any:
        """One path, in lock-step with the others."""
        from arena.device.cuda import CudaDevice

        place = Place(self.rank, self.world, self.device, dist.group.WORLD)
        return set_up(name, CudaDevice().paths()[name](place, max_bytes), self.rounds, self.rank, Budget(PATIENCE_S))


def need_gpus(gpus: tuple[int, ...]) -> None:
    """Skip the test where there are fewer."""
    if CUDA.device_count() <= max(gpus):
        pytest.skip(f"needs {max(gpus) + 1} GPUs")


def on_gpus(
    function: Callable[..., Any],
    store: Path,
    *args: Any,
    gpus: tuple[int, ...] = (0, 1),
    hidden: bool = False,
    within: float = 90,
) -> list[Any]:
    """Run `function(rank, *args)` at every rank; the results by rank, None of a killed one.

    Rank r is on GPU `gpus[r]`, and with `hidden` sees no other.
    """
    need_gpus(gpus)
    with ExitStack() as stack:
        arguments = [(function, (rank, len(gpus), store, gpu), hidden, args) for rank, gpu in enumerate(gpus)]
        children = [stack.enter_context(Child(_as_rank, *each)) for each in arguments]
        return [_result(child, within) for child in children]


def _result(child: Child, within: float) -> Any:
    try:
        return child.result(within)
    except ChildDied:
        return None


def _as_rank(function: Callable[..., Any], place: tuple[Any, ...], hidden: bool, args: tuple[Any, ...]) -> Any:
    return function(Rank(*place, hidden=hidden), *args)
