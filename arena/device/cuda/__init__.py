"""All-reduce and its relatives for CUDA tensors. The only package that may talk to CUDA.

Our own kernels for GPUs that can write into each other's memory, torch's symmetric memory, and NCCL for everything
else.

    driver      the few driver calls that torch has no door for    build     source to kernels, at run time
    cards       can these GPUs reach each other                    inbox     memory that peers write to
    shapes      how a size is cut (pure)                           push      what our own paths share, with push.cu
    one_shot    everything to everyone, and what is moved          two_shot  each rank sums a part
    streams     one communicator, one stream                       watch     who died while a kernel waited
    symmetric   torch's symmetric memory                           nccl      the fallback
    stopwatch   time between two events
    measure     time in a graph, and what to hold it against

And the way there, for `arena.transfer`: `copies` by the GPU's own engines, and `pins`, the host memory they may read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from arena.device import Place, SetUp, Traits
from arena.device.cuda import driver, nccl, push, symmetric
from arena.device.cuda.one_shot import OneShot
from arena.device.cuda.stopwatch import EventPair
from arena.device.cuda.two_shot import TwoShot
from arena.errors import InvalidArgument


class CudaDevice:
    """The GPU of one communicator at one rank. Its paths share nothing."""

    kind = "cuda"
    fallback = "nccl"
    asynchronous = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise InvalidArgument(
                "there is no GPU to all-reduce on",
                expected="a torch with CUDA, and a GPU that this process sees",
                found=f"torch {torch.__version__}, {torch.cuda.device_count()} GPUs",
                remedy="use the CPU, or look at CUDA_VISIBLE_DEVICES and at the installed torch",
            )

    def traits(self, device: torch.device) -> Traits:
        """See `arena.device.Device`."""
        properties = torch.cuda.get_device_properties(device)
        return Traits("cuda", properties.name, f"CUDA {driver.version()}", (properties.major, properties.minor))

    def paths(self) -> Mapping[str, Callable[[Place, int], SetUp]]:
        """See `arena.device.Device`."""
        made: dict[str, Callable[[Place, int], SetUp]] = {
            "one_shot": partial(push.set_up, OneShot),
            "two_shot": partial(push.set_up, TwoShot),
            **{name: partial(symmetric.set_up, name) for name in symmetric.REDUCES},
            "nccl": nccl.set_up,
        }
        return {name: partial(on_its_device, set_up) for name, set_up in made.items()}

    def broken(self) -> Mapping[str, str]:
        """Nothing is shared, so nothing is lost with something else."""
        return {}

    def stopwatch(self) -> EventPair:
        """See `arena.device.Device`."""
        return EventPair()

    def synchronize(self) -> None:
        """See `arena.device.Device`."""
        torch.cuda.synchronize()


Made = TypeVar("Made")


def on_its_device(
    set_up: Callable[[Place, int], Generator[Any, list[Any], Made]], place: Place, max_bytes: int
) -> Generator[object, list[Any], Made]:
    """A set-up, with its device current in every stage: which device is current is a matter of the thread."""
    steps, heard = set_up(place, max_bytes), None
    try:
        while True:
            torch.cuda.set_device(place.device)
            said = steps.send(heard)  # type: ignore[arg-type]
            heard = yield said
    except StopIteration as end:
        made: Made = end.value
        return made
    finally:
        steps.close()
