"""Streams of torch's, by the shortest ways; and one communicator, one stream.

torch.cuda's own functions ask each time whether there is a GPU, look into the environment and make objects: a tenth of
a millisecond for a reader that has just woken, with cold caches, and has a copy to queue.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch

cuda: Final[Any] = torch.cuda
"""The same module, for those of its classes that carry no annotations."""

current_stream_of: Final[Any] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # none in a torch without CUDA
"""The handle of a device's current stream, without making an object of it (a fifth of a microsecond)."""


current_device: Final[Any] = getattr(torch._C, "_cuda_getDevice", None)
"""The thread's device, in a process that uses CUDA already."""

_set_device: Final[Any] = getattr(torch._C, "_cuda_setDevice", None)
_get_stream: Final[Any] = getattr(torch._C, "_cuda_getCurrentStream", None)
_set_stream: Final[Any] = getattr(torch._C, "_cuda_setStream", None)


def current_stream() -> Any:
    """The thread's stream on its device, in a process that uses CUDA already."""
    return _stream_of(*_get_stream(current_device()))


@lru_cache(64)
def _stream_of(stream_id: int, device_index: int, device_type: int) -> Any:
    return cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class On:
    """Around what goes to a stream: ``torch.cuda.stream``, in a process that uses CUDA already."""

    __slots__ = ("_before", "_device", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._device = current_device()
        self._before = _get_stream(stream.device_index)
        _set(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *error: object) -> None:
        _set(*self._before)
        if self._device != self._stream.device_index:
            _set_device(self._device)


def _set(stream_id: int, device_index: int, device_type: int) -> None:
    """Of its device, which becomes the thread's."""
    _set_stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class StreamOrder:
    """Which stream the last operation went to."""

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self._device = device
        self._index: int = device.index
        self._last: int | None = None

    def enter(self) -> int:
        """The current stream's handle, after what was queued on the last one if that was another.

        A capture queues nothing, so it is not ordered; whoever replays a graph has to do it on the stream of the rest.
        """
        stream: int = current_stream_of(self._index)
        if stream != self._last:
            self._move(stream)
        return stream

    def last_event(self) -> Any:
        """Something that is over when the last operation is; None if there was none."""
        return None if self._last is None else cuda.ExternalStream(self._last, self._device).record_event()

    def _move(self, stream: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        before = self.last_event()
        if before is not None:
            torch.cuda.current_stream(self._device).wait_event(before)
        self._last = stream
