"""What can all-reduce CPU tensors: Arena with its own choice of path, each of its paths, and gloo in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from arena import AllReduce
from arena.wait import usable_cores

BACKEND = "gloo"
FALLBACK = "gloo"
IN_PLACE = "gloo, in place"
_clock = time.monotonic_ns


class CpuRig:
    """One rank. torch computes with this rank's share of the cores, as under torchrun on a full host."""

    device = torch.device("cpu")

    def __init__(self, world: int, largest: int) -> None:
        torch.set_num_threads(max(1, usable_cores() // world))
        self._communicators = {"arena": AllReduce(None, "cpu", max_size=largest)}
        for path in ("cpu_one_shot", "cpu_two_shot", FALLBACK):
            self._communicators[path] = AllReduce(None, "cpu", force_path=path, max_size=largest)
        self.contenders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            name: communicator.all_reduce for name, communicator in self._communicators.items()
        }
        self.contenders[IN_PLACE] = _in_place

    def times(self, run: Callable[[torch.Tensor], torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[int]:
        """See `Rig`."""
        if run is _in_place:
            inputs = [x.clone() for x in inputs]  # it spoils them
        took = []
        for x in inputs:
            start = _clock()
            run(x)
            took.append(_clock() - start)
        return took

    def close(self) -> None:
        """See `Rig`."""
        for communicator in self._communicators.values():
            communicator.close()


def _in_place(x: torch.Tensor) -> torch.Tensor:
    """gloo as most call it. No new tensor, so not the same service; here to show what that part costs."""
    dist.all_reduce(x)
    return x


def open_rig(rank: int, world: int, largest: int) -> CpuRig:
    """The rig of one rank."""
    return CpuRig(world, largest)
