"""The seam to a device: what an all-reduce path is, and how a device offers its paths.

A *path* is one way to all-reduce, at one rank. It is set up together with the same path of the other ranks, and
set-up may fail or hang on any of them. So a path never talks to another rank about its own set-up: `set_up` is a
generator that yields what this rank has to say, is sent the list of what all ranks said (index = rank), once a
stage, and returns the path at the end. `arena.lockstep` drives it, and is the only place that knows about deadlines,
votes and ranks that never come. The idea of a protocol as a generator without I/O is that of the sans-I/O libraries
(h11, wsproto).

Stages run in a thread of set-up's own: whatever is current per thread, such as a CUDA device, is not.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from arena.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

DEVICES: Final = ("cpu", "cuda")


class ReducePath(Protocol):
    """One way to all-reduce, set up, at one rank.

    Attributes:
        name: one of `ALLREDUCE_PATHS`.
        max_bytes: the largest tensor it was set up for; that size still fits.
    """

    name: str
    max_bytes: int

    def declines(self, x: torch.Tensor) -> str | None:
        """Why it can't serve this tensor, one of `DECLINE_REASONS`; None if it can.

        Decided from shape, dtype, contiguity and alignment alone, so that where these are the same on all ranks the
        answer is. It never waits, and never raises.
        """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in a new contiguous tensor of the same shape and dtype. `x` stays as it is."""

    def close(self) -> None:
        """Give back what set-up took. A rank that still waits for this one hears of it."""


SetUp = Generator[object, "list[Any]", ReducePath]
"""What a rank says, what all said, and the path in the end. What is said is small and can be pickled."""


@dataclass(frozen=True)
class Place:
    """Where one rank stands.

    Attributes:
        rank: this rank in its group.
        world: how many there are.
        device: the tensors' device.
        group: for libraries that insist on one (gloo, NCCL, symmetric memory's rendezvous).
        directory: a directory of this communicator's own in the run directory; None where there is none to be had.
    """

    rank: int
    world: int
    device: torch.device
    group: torch.distributed.ProcessGroup | None
    directory: Path | None = None


class Declined(Exception):
    """Raised in set-up: this path is not to be had here, for one of `DECLINE_REASONS`."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


@dataclass(frozen=True)
class Traits:
    """What a plan depends on besides the world size, as far as the device is concerned.

    Attributes:
        kind: one of `DEVICES`.
        name: the chip.
        driver: the version of what drives it.
        capability: the chip's generation, such as (9, 0); (0, 0) for a CPU.
    """

    kind: str
    name: str
    driver: str
    capability: tuple[int, int] = (0, 0)


class Stopwatch(Protocol):
    """Times one operation where it runs, without waiting for it."""

    def start(self) -> None:
        """Right before the operation."""

    def stop(self) -> None:
        """Right after it was started."""

    def elapsed_ns(self) -> int | None:
        """How long it took; None while it is not over, or where this one can't be timed (a graph being captured)."""


class Device(Protocol):
    """A kind of device: its traits and its paths. One object serves one communicator."""

    kind: str
    fallback: str
    """The path that serves what no other does."""

    def traits(self, device: torch.device) -> Traits:
        """What a plan depends on."""

    def paths(self) -> Mapping[str, Callable[[Place, int], SetUp]]:
        """How to set up each path, for tensors of so many bytes, by name."""

    def broken(self) -> Mapping[str, str]:
        """Paths that were set up and have been taken down since, by the failure of another one's set-up, with why."""

    def stopwatch(self) -> Stopwatch:
        """Something to time an operation with."""

    def synchronize(self) -> None:
        """Wait until everything that was started is over."""


def open_device(kind: str) -> Device:
    """The device of this kind. Nothing is loaded before it is asked for.

    Raises:
        InvalidArgument: there is no such kind.
    """
    if kind == "cpu":
        from arena.device.cpu import CpuDevice

        return CpuDevice()
    if kind == "cuda":
        from arena.device.cuda import CudaDevice

        return CudaDevice()
    raise InvalidArgument(
        f"there is no all-reduce on {kind!r}",
        expected=" or ".join(DEVICES),
        found=kind,
        remedy="move the tensors there",
    )
