"""What a remote reader receives, put together: a pure machine, fed with messages, that knows no socket.

In one epoch frames come in order, each followed by the chunks of its buffers. Whatever does not continue what is there
means that something was lost, and is answered by asking for the first frame that is missing: once an epoch for what
comes amiss, and whenever the forwarder says that it has sent more. A frame that is there already, sent again because
nobody knew, is dropped. So the frames that leave here have every sequence once and in order, whatever the network does.
"""

from __future__ import annotations

import mmap
from collections import deque
from typing import Final

from arena.memory import copy_bytes
from arena.remote.wire import CHUNK_BYTES, Chunk, Frame, Malformed, unpack_short

_MAPPED_BYTES: Final = 1 << 20  # larger buffers are mapped, not zeroed by hand first


Arrived = tuple[Frame, list[memoryview]]
"""A frame that has come, with its buffers, which are the reader's own."""


class _Coming:
    """A frame whose buffers are on their way."""

    __slots__ = ("at", "buffer", "buffers", "frame")

    def __init__(self, frame: Frame, buffers: list[memoryview]) -> None:
        self.frame = frame
        self.buffers = buffers
        self.buffer = 0  # where the next chunk belongs
        self.at = 0

    def skip_empty(self) -> None:
        """Buffers without bytes have no chunks."""
        while self.buffer < len(self.buffers) and not self.buffers[self.buffer].nbytes:
            self.buffer += 1

    @property
    def complete(self) -> bool:
        """Whether all its chunks have come."""
        return self.buffer == len(self.buffers)


class Inlet:
    """What has come, and what is missing. Each method that is fed returns False for a gap: ask for `expected`.

    Args:
        max_bytes: no frame brings more.
    """

    def __init__(self, max_bytes: int) -> None:
        self.epoch = 0
        self.received = 0  # bytes in this epoch
        self.expected = 0  # the first frame that has not come whole
        self.complete: deque[Arrived] = deque()
        self._max_bytes = max_bytes
        self._coming: _Coming | None = None
        self._asked = -1  # the epoch in which something was missed

    @property
    def midway(self) -> bool:
        """Whether a frame has come in part."""
        return self._coming is not None

    def on_short(self, message: bytes) -> bool:
        """Take a message in one step if it is the frame that is expected, without buffers and not traced: most are.

        Returns False if it is anything else, and nothing has happened.
        """
        if self._coming is not None:
            return False
        frame = unpack_short(message, self.epoch, self.expected)
        if frame is None:
            return False
        self.received += frame.payload.nbytes
        self.expected += 1
        self.complete.append((frame, []))
        return True

    def on_frame(self, frame: Frame) -> bool:
        """A frame without its buffers.

        Raises:
            Malformed: it announces more than any message may have.
        """
        if not self._counts(frame.epoch):
            return True
        self.received += frame.payload.nbytes
        self.expected = max(self.expected, frame.first)
        if frame.sequence < self.expected:
            return True
        if frame.sequence > self.expected or self._coming is not None:
            return self._missed()
        if sum(frame.sizes) > self._max_bytes:
            raise Malformed(f"a frame of {sum(frame.sizes)} bytes, where {self._max_bytes} are allowed")
        self._coming = _Coming(frame, [_buffer(size) for size in frame.sizes])
        self._settle(self._coming)
        return True

    def on_chunk(self, chunk: Chunk, data: memoryview) -> bool:
        """Bytes of a buffer.

        Raises:
            Malformed: more than there is room for.
        """
        if not self._counts(chunk.epoch):
            return True
        self.received += data.nbytes
        if chunk.sequence < self.expected:
            return True
        coming = self._coming
        if coming is None or (coming.frame.sequence, coming.buffer, coming.at) != chunk[1:]:
            return self._missed()
        target = coming.buffers[coming.buffer]
        if not 0 < data.nbytes <= min(CHUNK_BYTES, target.nbytes - coming.at):
            raise Malformed(f"a chunk of {data.nbytes} bytes at {coming.at} of {target.nbytes}")
        copy_bytes(target[coming.at : coming.at + data.nbytes], data)
        coming.at += data.nbytes
        if coming.at == target.nbytes:
            coming.buffer, coming.at = coming.buffer + 1, 0
            self._settle(coming)
        return True

    def on_progress(self, epoch: int, sent: int) -> bool:
        """The forwarder says how many bytes of this epoch it has sent: all of them come before this does.

        Asks each time: what was asked for may have been lost with its connection, and asking twice does no harm.
        """
        return not self._counts(epoch) or sent == self.received

    def _counts(self, epoch: int) -> bool:
        """Whether a message counts; with a new epoch, what had come in part counts no longer."""
        if epoch > self.epoch:
            self._coming = None
            self.epoch, self.received = epoch, 0
        return epoch == self.epoch

    def _settle(self, coming: _Coming) -> None:
        coming.skip_empty()
        if coming.complete:
            self.complete.append((coming.frame, coming.buffers))
            self.expected = coming.frame.sequence + 1
            self._coming = None

    def _missed(self) -> bool:
        if self._asked == self.epoch:
            return True
        self._asked = self.epoch
        return False


def _buffer(nbytes: int) -> memoryview:
    """Writable memory of the reader's own. What is mapped needs no zeros before it is filled with what came."""
    if nbytes < _MAPPED_BYTES:
        return memoryview(bytearray(nbytes))
    mapped = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without; small pages do
            pass
    return memoryview(mapped)
