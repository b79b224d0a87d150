"""A message's tensors to the device: walk the message, copy each tensor, and shut the gate of what it lies in."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from arena import borrow
from arena.device import Copies, Stream, copies_in_use, open_copies
from arena.errors import InvalidArgument
from arena.probe import COPY_MODES, MODE_BITS, Event, Probe

if TYPE_CHECKING:
    from arena.device_log import DeviceLog
    from arena.pin import Pins
    from arena.probe.hooks import Trace


class Mover:
    """Copies tensors to one device, on one stream.

    Args:
        device: where to.
        stream: on which; by default the calling thread's current one there.
        log: counts the copies.
        gated: called around a copy that keeps the caller waiting: it is not from pinned memory.
        moving: takes down what is copied, and through which gates, for a message that is traced.
    """

    def __init__(
        self,
        device: torch.device,
        stream: Stream,
        log: DeviceLog | None,
        gated: Callable[[], Any],
        moving: Moving | None = None,
    ) -> None:
        self._device = device
        self._copies: Copies = open_copies(device.type)
        self._stream = self._copies.current_stream(device) if stream is None else stream
        self._log = log
        self._gated = gated
        self._moving = moving
        if self._copies.is_capturing(self._stream):
            raise InvalidArgument(
                "a copy from the arena can't be part of a graph",
                expected="a stream on which no graph is being captured",
                found="one that is: each replay would read a block that has long been another message's",
                remedy="move the message before the capture, into a tensor that stays, and copy_ into that later",
            )

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
        pinned = bool(leases) and self._is_pinned(leases) and source.is_contiguous()
        if self._log is not None:
            self._log.copied("pinned_async" if pinned else "pageable_sync")
        if self._moving is not None:
            self._moving.copied("pinned_async" if pinned else "pageable_sync", source.nbytes, leases)
        if pinned:
            moved = self._timed(source, leases)
        else:
            with self._gated():
                moved = self._behind_gates(source, leases, pinned=False)
        for lease in leases:
            if lease.is_all_of(source.nbytes):
                borrow.gate_of(lease).moved_whole()
        return moved

    def _timed(self, source: torch.Tensor, leases: list[borrow.Lease]) -> torch.Tensor:
        """A copy from pinned memory, and now and then how long a large one takes the device."""
        nbytes = source.nbytes
        watch = None if self._log is None else self._log.timing(self._copies, self._stream, nbytes)
        if self._log is None or watch is None:
            return self._behind_gates(source, leases, pinned=True)
        watch.start()
        moved = self._behind_gates(source, leases, pinned=True)
        watch.stop()
        self._log.timed(watch, nbytes)
        return moved

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

    def _behind_gates(self, source: torch.Tensor, leases: list[borrow.Lease], *, pinned: bool) -> torch.Tensor:
        if not leases:
            return self._copies.to_device(source, self._device, self._stream, pinned=pinned)
        with borrow.gate_of(leases[0]).copying(self._copies, self._stream):
            return self._behind_gates(source, leases[1:], pinned=pinned)


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
