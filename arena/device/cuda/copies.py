"""Copies by the GPU's own engines, in the order of torch's streams."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Final

import torch

from arena.device import Passage, WordWriter
from arena.device.cuda import driver, pins
from arena.device.cuda.stopwatch import EventPair
from arena.device.cuda.streams import On, cuda, current_device, current_stream


class CudaPassage:
    """An event behind everything that was queued on a stream."""

    __slots__ = ("_event",)

    def __init__(self, event: Any) -> None:
        self._event = event

    def passed(self) -> bool:
        """See `arena.device.Passage`."""
        try:
            with driver.Relaxed():
                return bool(self._event.query())
        except RuntimeError:  # the device is lost (AcceleratorError is one, too)
            return True

    def wait(self) -> None:
        """See `arena.device.Passage`."""
        self._event.synchronize()


class _EveryStream:
    """Everything that is queued on any GPU.

    Streams of torch's pool don't order themselves behind any other, so there is only one way to find out, and that is
    to wait. Only what was borrowed before this process used a GPU is waited for like this, and by the helper.
    """

    __slots__ = ()

    def passed(self) -> bool:
        """See `arena.device.Passage`; a capture under way forbids the wait, so it is tried again after that."""
        try:
            self.wait()
        except RuntimeError as error:
            return "captur" not in str(error)  # else the device is lost
        return True

    def wait(self) -> None:
        """See `arena.device.Passage`."""
        for index in range(torch.cuda.device_count()):
            if driver.has_context(index):
                torch.cuda.synchronize(index)


class _StreamWord:
    """One word, and the stream that writes it. See `arena.device.WordWriter`."""

    __slots__ = ("_address", "_device", "_handle", "_identity", "_stream")

    def __init__(self, stream: Any, address: int, offset: int) -> None:
        self._stream = stream  # the object, for as long as torch ties a stream to it
        self._handle: int = stream.cuda_stream
        self._device: int = stream.device.index
        with torch.cuda.device(self._device):
            self._address = driver.device_address(address) + offset
            self._identity = driver.stream_id(self._handle)

    def __call__(self, number: int) -> bool:
        if current_device() == self._device:
            return self._write(number)
        with torch.cuda.device(self._device):  # the default stream's handle means that of the current device
            return self._write(number)

    def _write(self, number: int) -> bool:
        try:
            if driver.stream_id(self._handle) != self._identity:
                return False
            driver.write_word(self._handle, self._address, number)
        except driver.DriverError:
            return False
        return True


@cache
def _can_write_words(index: int) -> bool:
    try:
        return driver.can_write_words(index)
    except driver.DriverError:
        return False


class CudaCopies:
    """See `arena.device.Copies`."""

    kind = "cuda"

    def in_use(self) -> bool:
        """Since torch initialised CUDA, and not in a process that was forked after that."""
        return bool(cuda.is_initialized())

    def enter_helper(self) -> None:
        """Make a context current, and stay out of the way of captures."""
        driver.exchange_capture_mode(driver.RELAXED)
        torch.cuda.set_device(_device_of_helper())
        torch.cuda.current_stream().query()  # the runtime makes the context current with its first call

    def current_stream(self, device: torch.device | None = None) -> Any:
        """See `arena.device.Copies`."""
        return current_stream() if device is None else torch.cuda.current_stream(device)

    def is_capturing(self, stream: Any) -> bool:
        """See `arena.device.Copies`."""
        return driver.is_capturing(stream.cuda_stream, stream.device_index)

    def record(self, stream: Any) -> Passage:
        """See `arena.device.Copies`."""
        event = cuda.Event()
        event.record(stream)
        return CudaPassage(event)

    def record_everything(self) -> Passage:
        """See `arena.device.Copies`."""
        return _EveryStream()

    def stopwatch(self, stream: Any) -> EventPair:
        """See `arena.device.Copies`."""
        return EventPair(stream)

    def to_device(self, source: torch.Tensor, device: torch.device, stream: Any, *, pinned: bool) -> torch.Tensor:
        """See `arena.device.Copies`."""
        with On(stream):
            made = torch.empty(source.shape, dtype=source.dtype, device=device)
            if pinned and not (source.is_conj() or source.is_neg()) and _copied(source, made, stream):
                return made
            return made.copy_(source, non_blocking=pinned)

    def room(self, nbytes: int, device: torch.device, stream: Any) -> torch.Tensor:
        """See `arena.device.Copies`."""
        with On(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def copy_bytes(self, source: torch.Tensor, target: torch.Tensor, stream: Any, *, pinned: bool) -> None:
        """See `arena.device.Copies`."""
        if not (pinned and _copied(source, target, stream)):
            with On(stream):
                target.copy_(source, non_blocking=pinned)

    def behind(self, stream: Any) -> AbstractContextManager[Any]:
        """See `arena.device.Copies`."""
        return On(stream)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `arena.device.Copies`."""
        with torch.cuda.device(source.device):
            target.copy_(source, non_blocking=True)
            event = cuda.Event(blocking=True)
            event.record()
            event.synchronize()

    def register(self, address: int, nbytes: int, *, writable: bool) -> None:
        """See `arena.device.Copies`."""
        pins.register(address, nbytes, writable=writable)

    def word_writer(self, stream: Any, address: int, offset: int) -> WordWriter | None:
        """See `arena.device.Copies`."""
        if not _can_write_words(stream.device.index):
            return None
        try:
            return _StreamWord(stream, address, offset)
        except driver.DriverError:
            return None

    def unregister(self, address: int) -> None:
        """See `arena.device.Copies`."""
        pins.unregister(address)


def _copied(source: torch.Tensor, target: torch.Tensor, stream: Any) -> bool:
    """Queue a copy of contiguous bytes by the driver itself: torch's way there is long for a reader that has just woken
    and has cold caches (250 us of 330, where this takes 70). False where the thread is on another device, or where the
    driver refuses: torch's way tells why, then."""
    if current_device() != stream.device_index or not (source.is_contiguous() and target.is_contiguous()):
        return False
    try:
        driver.copy(target.data_ptr(), source.data_ptr(), source.nbytes, stream.cuda_stream)
    except driver.DriverError:
        return False
    return True


COPIES: Final = CudaCopies()


def _device_of_helper() -> int:
    """A GPU that this process uses already: it should not get a context on another for the helper's sake."""
    return next((index for index in range(torch.cuda.device_count()) if driver.has_context(index)), 0)
