"""The seam to a device: what a path of collectives is, how a device offers its paths, and how bytes get there and back.

A *path* is one way to all-reduce, at one rank; some can do other collectives as well. It is set up together with the
same path of the other ranks, and set-up may fail or hang on any of them. So a path never talks to another rank about
its own set-up: `set_up` is a generator that yields what this rank has to say, is sent the list of what all ranks said
(index = rank), once a stage, and returns the path at the end. `arena.lockstep` drives it, and is the only place that
knows about deadlines, votes and ranks that never come. The idea of a protocol as a generator without I/O is that of the
sans-I/O libraries (h11, wsproto).

Stages run in a thread of set-up's own: whatever is current per thread, such as a CUDA device, is not.

*Copies* are the other half. They go in the order of streams; a *passage* is a point in one, which has passed once
everything queued before it is over. A copy takes its bytes by address, whenever its turn comes: nothing in Python
keeps them alive until then. That is what the DMA gate is for (`arena.gate`), and the CPU's engine is as careless.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from arena.errors import InvalidArgument

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

DEVICES: Final = ("cpu", "cuda")


class ReducePath(Protocol):
    """One way to all-reduce, set up, at one rank.

    Attributes:
        name: one of `ALLREDUCE_PATHS`.
        max_bytes: the largest tensor it was set up for; that size still fits.
        operations: what it can do, by the names of its methods: ``all_reduce``, and some of `COLLECTIVES`. Those are

            all_gather(x)      x of every rank, one after the other along the first dimension
            reduce_scatter(x)  of the sum of all ranks' x, this rank's rows: the n-th of `world` equal parts
            all_to_all(x)      of every rank's x, this rank's rows, one after the other
            all_reduce_rms_norm(x, residual, weight, eps)  as `arena.allreduce.AllReduce` has it, in one kernel

            each into new contiguous tensors, of the dtype of `x`, which has one dimension at least, all of them whole.
    """

    name: str
    max_bytes: int
    operations: tuple[str, ...]

    def declines(self, x: torch.Tensor, operation: str = "all_reduce") -> str | None:
        """Why it can't serve this tensor, one of `DECLINE_REASONS`; None if it can.

        Decided from shape, dtype, contiguity and alignment alone, so that where these are the same on all ranks the
        answer is. It never waits, and never raises.
        """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in a new contiguous tensor of the same shape and dtype. `x` stays as it is."""

    def check(self) -> None:
        """Raise what has become of operations since they were started, if one was given up. Waits for nothing.

        Raises:
            PeerDied, CommunicatorClosed: a rank is gone.
        """

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
    """The path that serves what no other does; it can do all operations but fused ones."""
    asynchronous: bool
    """Whether operations may go on after their call has returned."""

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


# ── copies ───────────────────────────────────────────────────────────────────────────────────────
Stream = Any
"""Whatever the users of a kind of device call a stream: torch.cuda.Stream, or `arena.device.cpu.copies.CpuStream`."""


class PinRefused(Exception):
    """A range could not be registered, for one of `PIN_FAILURES`. It is as it was, and no error is left behind."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason
        self.text = text


class Passage(Protocol):
    """A point in a stream, or in all of them."""

    def passed(self) -> bool:
        """Whether everything queued before it is over. Never waits.

        A device that is lost says yes: nothing of it runs any more.
        """

    def wait(self) -> None:
        """Wait until it has passed, without the GIL."""


WordWriter = Callable[[int], bool]
"""Has one stream store a number to one word, once all that is queued there is over; False if it was not queued."""


class Copies(Protocol):
    """How bytes get to a kind of device and back. One object serves the process, from any of its threads.

    Attributes:
        kind: the torch device type.
    """

    kind: str

    def in_use(self) -> bool:
        """Whether this process has begun to use the device. Finding out does not make it begin."""

    def enter_helper(self) -> None:
        """Called once by a thread that will record, ask and register, while others may be capturing a graph."""

    def current_stream(self, device: torch.device | None = None) -> Stream:
        """The calling thread's current stream on that device, by default on its current one.

        None where whatever is queued is over at once; a stream of None, in the other calls, means that one.
        """

    def is_capturing(self, stream: Stream) -> bool:
        """Whether what is queued there now is only written down, for a graph."""

    def record(self, stream: Stream) -> Passage:
        """The point that the stream has come to."""

    def record_everything(self) -> Passage:
        """The point that every stream of the process has come to. Can't fail: nothing runs on a device that is lost."""

    def stopwatch(self, stream: Stream) -> Stopwatch:
        """Times what is queued on this stream between its start and its stop, by the stream's own account."""

    def to_device(self, source: torch.Tensor, device: torch.device, stream: Stream, *, pinned: bool) -> torch.Tensor:
        """Queue a copy of a CPU tensor. Unless `pinned`, the source has been read when the call returns."""

    def room(self, nbytes: int, device: torch.device, stream: Stream) -> torch.Tensor:
        """So many bytes there, for what goes on this stream; nothing is in them yet."""

    def copy_bytes(self, source: torch.Tensor, target: torch.Tensor, stream: Stream, *, pinned: bool) -> None:
        """Queue a copy of bytes of the CPU's into as many from `room`; as `to_device` otherwise."""

    def behind(self, stream: Stream) -> AbstractContextManager[Any]:
        """Within it, what the calling thread begins with a device's tensors comes after what is queued there."""

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Fill a CPU tensor of the same shape, after what is queued on the current stream; done on return."""

    def register(self, address: int, nbytes: int, *, writable: bool) -> None:
        """Tell the device of a range of host memory, so that it may copy from there by itself.

        Raises:
            PinRefused: with the reason.
        """

    def word_writer(self, stream: Stream, address: int, offset: int) -> WordWriter | None:
        """What has a stream write a 64-bit word of registered memory by itself, behind what is queued: a `WordWriter`.

        The store is made when its turn comes, wherever the memory has gone by then, and is seen by other processes
        after all that came before it on that stream has read and written what it had to, whatever this process does.
        Not while a graph is being captured on the stream.

        Args:
            stream: which is not None. The writer keeps its handle, and queues nothing on another stream that got it.
            address: where the registered, writable range begins.
            offset: of the word in it, in bytes; a multiple of 8.

        Returns:
            None where the device, its driver, or this range is not up to it.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`.

        Raises:
            PinRefused: the range may still be registered, so it must stay mapped.
        """


COPIES: Final = {"cuda": "arena.device.cuda.copies", "cpu": "arena.device.cpu.copies"}
"""The module of each kind of copies; there they are its ``COPIES``."""


def open_copies(kind: str) -> Copies:
    """The copies of this kind of device. Nothing is loaded before it is asked for, and nothing begins to be used.

    Raises:
        InvalidArgument: there is no such kind.
    """
    module = COPIES.get(kind)
    if module is None:
        raise InvalidArgument(
            f"Arena has no copies to {kind!r}",
            expected=" or ".join(DEVICES),
            found=kind,
            remedy="use the tensor's own .to(), without non_blocking, before the tensor goes",
        )
    loaded = sys.modules.get(module)  # most often; import_module has a long way there
    copies: Copies = getattr(loaded, "COPIES", None) or import_module(module).COPIES
    return copies


def copies_in_use() -> Copies | None:
    """The copies of the device that this process has begun to use. Loads nothing for a process that uses none."""
    for module, kind in (("torch.cuda", "cuda"), ("arena.device.cpu.copies", "cpu")):
        loaded = sys.modules.get(module)
        begun = getattr(loaded, "is_initialized", None)  # absent while the module is being loaded
        if begun is not None and begun():
            return open_copies(kind)
    return None


def copies_from(tensor: torch.Tensor) -> Copies | None:
    """How to get a tensor of a device to the host; None if it is there, or nobody knows."""
    kind = tensor.device.type
    return open_copies(kind) if kind != "cpu" and kind in COPIES else None
