"""What can all-reduce tensors on GPUs: Arena with its own choice of path, each of its paths, NCCL, and other libraries.

For the figures without dispatch, in graphs of many calls and against the limits of the machine, see `allreduce_graphs`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from arena import AllReduce
from arena.device.cuda import measure
from arena.device.cuda.streams import cuda
from telemetry.commands.bench.allreduce_peers import IN_PLACE, PATHS, Operation, Peers, nccl_in_place

BACKEND: Final = "cpu:gloo,cuda:nccl"
FALLBACK: Final = "nccl"


class CudaRig:
    """One rank: Arena with its own choice of path, each of its paths, NCCL in place, and peers that are there."""

    def __init__(self, rank: int, world: int, largest: int) -> None:
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        cuda.set_device(self.device)
        self._stream = cuda.Stream(self.device)
        self._communicators = {"arena": AllReduce(None, self.device, max_size=largest)}
        for path in PATHS:
            communicator = AllReduce(None, self.device, force_path=path, max_size=largest)
            if path in communicator.paths:
                self._communicators[path] = communicator
            else:
                communicator.close()
        self.contenders: dict[str, Operation] = {
            name: communicator.all_reduce for name, communicator in self._communicators.items()
        }
        self.contenders[IN_PLACE] = nccl_in_place
        self._peers = Peers(dist.group.WORLD, self.device, largest)
        self.contenders |= self._peers.operations

    def times(self, run: Operation, inputs: Sequence[torch.Tensor]) -> list[int]:
        """See `Rig`. In a graph, as often as there are inputs: one operation is shorter than a clock can tell."""
        cuda.synchronize()
        with cuda.stream(self._stream):
            taken = [x.clone() for x in inputs] if run is nccl_in_place else inputs  # it spoils them
            repeated = measure.Repeated(run, taken, len(taken))
            times = [round(repeated.time_us() * 1000) for _ in inputs]
        cuda.synchronize()
        return times

    def close(self) -> None:
        """See `Rig`."""
        self._peers.close()
        for communicator in self._communicators.values():
            communicator.close()


def open_rig(rank: int, world: int, largest: int) -> CudaRig:
    """The rig of one rank."""
    return CudaRig(rank, world, largest)
