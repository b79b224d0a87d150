"""One communicator, one stream: operations that come on another one are ordered behind those before."""

from __future__ import annotations

from typing import Any, Final

import torch

cuda: Final[Any] = torch.cuda
"""The same module, for those of its classes that carry no annotations."""

current_stream_of: Final[Any] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # none in a torch without CUDA
"""The handle of a device's current stream, without making an object of it (a fifth of a microsecond)."""


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
