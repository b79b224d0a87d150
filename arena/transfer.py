"""A message's tensors to the device: walk the message, copy each tensor, and shut the gate of what it lies in."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from arena import borrow
from arena.device import Copies, Stream, copies_in_use, open_copies
from arena.errors import InvalidArgument, PinFailed
from arena.follow import Arrival, Follower
from arena.probe import COPY_MODES, MODE_BITS, Event, Probe
from arena.shard import Shard

if TYPE_CHECKING:
    from arena.device_log import DeviceLog
    from arena.pin import Pins
    from arena.probe.hooks import Trace

_Made = TypeVar("_Made")


class Mover:
    """Copies tensors to one device, on one stream.

    Args:
        device: where to.
        stream: on which; by default the calling thread's current one there.
        log: counts the copies.
        gated: called around a copy that keeps the caller waiting: it is not from pinned memory.
        moving: takes down what is copied, and through which gates, for a message that is traced.
        shard: the group that shares large tensors out, see `arena.shard.Shard`; each rank copies all of them if None.

    Attributes:
        follower: has what is on its way already, of a message that was followed while it came.
    """

    def __init__(
        self,
        device: torch.device,
        stream: Stream,
        log: DeviceLog | None,
        gated: Callable[[], Any],
        moving: Moving | None = None,
        shard: Any = None,
    ) -> None:
        self._device = device
        self._copies: Copies = open_copies(device.type)
        self._stream = self._copies.current_stream(device) if stream is None else stream
        self._log = log
        self._gated = gated
        self._moving = moving
        self._shard = None if shard is None else Shard(shard, device)
        self._trouble: PinFailed | None = None
        self.follower = Follower(device, self._copies, self._stream, self._shard)
        if self._copies.is_capturing(self._stream):
            raise InvalidArgument(
                "a copy from the arena can't be part of a graph",
                expected="a stream on which no graph is being captured",
                found="one that is: each replay would read a block that has long been another message's",
                remedy="move the message before the capture, into a tensor that stays, and copy_ into that later",
            )

    def message(self, message: Any, moving: Moving | None = None) -> Any:
        """All of a message there."""
        if moving is not None:
            self._moving = moving
        moved = map_tensors(message, self)
        if moving is not None:
            moving.done()
        if self._trouble is not None:
            raise self._trouble
        return moved

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor there. Whatever it lies in is not given back before it has been read."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.to(self._device)
        moved = self._copied(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(moved, requires_grad=tensor.requires_grad)
        return moved.requires_grad_(tensor.requires_grad)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.detach()
        leases = borrow.leases_of(source) if source.numel() else []
        arrival = self._arrival(source, leases)
        if self._shard is not None and self._shard.takes(source):
            moved = self._shared_out(source, leases, self._shard, arrival)
        elif arrival is not None:
            self._count("streamed", source, leases)
            moved = _tensor_in(arrival.room, source)
        else:
            moved = self._alone(source, leases)
        for lease in leases:
            if lease.is_all_of(source.nbytes):
                borrow.gate_of(lease).moved_whole()
        return moved

    def _arrival(self, source: torch.Tensor, leases: list[borrow.Lease]) -> Arrival | None:
        """What has been followed of exactly this tensor; the first one that asks for it gets it."""
        arrived = self.follower.arrived
        words = leases[0].words if len(leases) == 1 else None
        if words not in arrived or words[2] != source.nbytes or not source.is_contiguous():
            return None
        return arrived.pop(words)

    def _alone(self, source: torch.Tensor, leases: list[borrow.Lease]) -> torch.Tensor:
        pinned = bool(leases) and self._is_pinned(leases) and source.is_contiguous()
        self._count("pinned_async" if pinned else "pageable_sync", source, leases)
        copy = partial(self._copies.to_device, source, self._device, self._stream, pinned=pinned)
        if pinned:
            return self._timed(copy, source.nbytes, leases)
        with self._gated():
            return self._behind_gates(copy, leases)

    def _shared_out(
        self, source: torch.Tensor, leases: list[borrow.Lease], shard: Shard, arrival: Arrival | None
    ) -> torch.Tensor:
        """This rank's part from here, the others' from them. Nothing that is wrong here alone may keep them waiting."""
        part = None if arrival is None else arrival.part
        if part is not None:
            self._count("streamed", source, leases)
        else:
            begin, end, length = shard.part(source.nbytes)
            part = shard.room(length, self._copies, self._device, self._stream)
            self._copy_part(source, begin, end, part.mine, leases)
        return _tensor_in(shard.gather(part, self._copies, self._stream), source)

    def _copy_part(
        self, source: torch.Tensor, begin: int, end: int, room: torch.Tensor, leases: list[borrow.Lease]
    ) -> None:
        try:
            pinned = bool(leases) and self._is_pinned(leases)
        except PinFailed as failed:
            pinned, self._trouble = False, failed  # raised once the others have what they wait for
        self._count("pinned_async" if pinned else "pageable_sync", source, leases)
        target = room[: end - begin]
        copy = partial(self._copies.copy_bytes, _bytes_of(source)[begin:end], target, self._stream, pinned=pinned)
        if pinned:
            self._timed(copy, end - begin, leases)
        else:
            with self._gated():
                self._behind_gates(copy, leases)

    def _count(self, mode: str, source: torch.Tensor, leases: list[borrow.Lease]) -> None:
        if self._log is not None:
            self._log.copied(mode)
        if self._moving is not None:
            self._moving.copied(mode, source.nbytes, leases)

    def _timed(self, copy: Callable[[], _Made], nbytes: int, leases: list[borrow.Lease]) -> _Made:
        """A copy from pinned memory, and now and then how long a large one takes the device."""
        watch = None if self._log is None else self._log.timing(self._copies, self._stream, nbytes)
        if self._log is None or watch is None:
            return self._behind_gates(copy, leases)
        watch.start()
        made = self._behind_gates(copy, leases)
        watch.stop()
        self._log.timed(watch, nbytes)
        return made

    def _is_pinned(self, leases: list[borrow.Lease]) -> bool:
        in_use = copies_in_use()
        if in_use is not self._copies:
            return False
        return all([self._is_segment_pinned(borrow.pins_of(lease, in_use), lease.segment) for lease in leases])

    def _is_segment_pinned(self, pins: Pins, number: int) -> bool:
        if not pins.waits(number):
            return pins.state(number).is_pinned
        with self._gated():
            return pins.state(number).is_pinned

    def _behind_gates(self, copy: Callable[[], _Made], leases: list[borrow.Lease]) -> _Made:
        if not leases:
            return copy()
        with borrow.gate_of(leases[0]).copying(self._copies, self._stream):
            return self._behind_gates(copy, leases[1:])


def _tensor_in(room: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """What lies in a device's bytes as `source`, which is contiguous, does in its own."""
    made = torch.empty(0, dtype=source.dtype, device=room.device)
    return made.set_(room.untyped_storage(), room.storage_offset(), source.shape, source.stride())


def _bytes_of(source: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, in place."""
    at = source.storage_offset() * source.element_size()
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(source.untyped_storage(), at, (source.nbytes,), (1,))


class Moving:
    """One call of `to_device` with the sampled message that its caller has: what it copied becomes one event."""

    def __init__(self, probe: Probe, sequence: int, trace: Trace) -> None:
        self._probe = probe
        self._of = sequence, trace
        self._began_ns = time.monotonic_ns()
        self._nbytes = self._modes = 0

    def copied(self, mode: str, nbytes: int, leases: list[borrow.Lease]) -> None:
        """A tensor was; the holds of it that came with this message are told of when they go back."""
        self._nbytes += nbytes
        self._modes |= 1 << COPY_MODES.index(mode)
        for lease in leases:
            if lease.sequence == self._of[0]:
                borrow.gate_of(lease).traced = self._of

    def done(self) -> None:
        """The call returns. Whether the device has copied by then depends on the mode."""
        if self._modes:
            (sequence, trace), now_ns = self._of, time.monotonic_ns()
            what = self._nbytes << MODE_BITS | self._modes
            self._probe.detail(Event.TO_DEVICE, sequence, now_ns, now_ns - self._began_ns, what, trace)


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Say that work on `stream` uses this tensor: its block is not reused before what is queued there when the tensor
    dies is over. For copies of your own from a dequeued tensor; `to_device` sees to its own, and after it has moved a
    tensor as a whole, no other stream is waited for unless it is said here.

    The meaning is that of `torch.Tensor.record_stream`, and a tensor on a device is handed on to that.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(stream)
        return
    copies = copies_in_use()
    if copies is not None:  # else there is no stream that anything could be queued on
        for lease in borrow.leases_of(tensor):
            borrow.gate_of(lease).remember(copies, stream)


def map_tensors(message: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The message with `move` called on each of its tensors, once for one that is in it twice.

    Goes into dicts, lists, tuples and dataclasses, which are made anew with what is inside them; all else stays.
    """
    return _Walk(move)(message)


class _Walk:
    def __init__(self, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._move = move
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # an id says nothing once its object is gone

    def __call__(self, item: Any) -> Any:
        if id(item) in self._done:
            return self._done[id(item)]
        if isinstance(item, torch.Tensor):
            return self._note(item, self._move(item))
        if isinstance(item, tuple):
            values = [self(value) for value in item]
            return self._note(item, type(item)(*values) if hasattr(item, "_fields") else type(item)(values))
        if isinstance(item, (dict, list)) or (dataclasses.is_dataclass(item) and not isinstance(item, type)):
            made = self._note(item, copy.copy(item))  # noted before it is filled: it may contain itself
            self._fill(made, item)
            return made
        return item

    def _fill(self, made: Any, item: Any) -> None:
        if isinstance(item, dict):
            for key, value in item.items():
                made[key] = self(value)
        elif isinstance(item, list):
            made[:] = [self(value) for value in item]
        else:
            for field in dataclasses.fields(item):
                object.__setattr__(made, field.name, self(getattr(item, field.name)))

    def _note(self, item: Any, made: Any) -> Any:
        self._kept.append(item)
        self._done[id(item)] = made
        return made
