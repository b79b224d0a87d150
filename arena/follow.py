"""A reader's device follows a message that is still being written: what is there by now is on its way already.

See `arena.filling` for the word that says how much that is. Here is how it is kept up with: at most two copies are on
their way, one that is made and one that waits behind it, and each takes all that has come since the last. So where the
writer is the slower one, its chunks are copied as they come; where the device is, copies grow until it keeps up, and
there are few of them: each costs the reader some 50 us of calls.

A hold's gate has all of the stream in it until its last copy is queued (`arena.gate`), so whatever ends the following
in the middle, an abort, a timeout or an interrupt, the hold waits until the copies under way have passed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from arena import borrow
from arena.device import Copies, Stream, copies_in_use

if TYPE_CHECKING:
    from collections.abc import Mapping

    from arena.device import Passage
    from arena.filling import Fill
    from arena.shard import Room, Shard

_ON_THE_WAY: Final = 2
HoldWords = tuple[int, int, int, int, int]


class Arrival(NamedTuple):
    """A hold's bytes on the device; or, where there is a `part`, one rank's part of them."""

    room: torch.Tensor
    part: Room | None


class Follower:
    """Follows one message after the other to a device.

    Args:
        device: where to.
        copies: the device's.
        stream: on which.
        shard: with whom the work is shared, if it is.

    Attributes:
        arrived: what of the message followed last is on its way, by its holds.
    """

    def __init__(self, device: torch.device, copies: Copies, stream: Stream, shard: Shard | None) -> None:
        self.copies, self.stream = copies, stream
        self._device = device
        self._shard = shard
        self.arrived: dict[HoldWords, Arrival] = {}

    def follow(
        self,
        fill: Fill,
        holds: list[tuple[HoldWords, bool]],
        leases: Mapping[HoldWords, borrow.Lease],
        views: Mapping[HoldWords, memoryview],
    ) -> None:
        """Copy what comes, until all that can be followed is queued. Of some holds the rest may be to come then.

        Args:
            fill: how far the frame is.
            holds: the frame's, in their order, each with whether it is one contiguous tensor.
            leases, views: of them.

        Raises:
            as `arena.filling.Fill.beyond`.
        """
        self.arrived = {}
        before = 0
        for hold, is_tensor in holds:
            if is_tensor and self._is_pinned(leases[hold]):
                self._follow_one(fill, before, leases[hold], torch.frombuffer(views[hold], dtype=torch.uint8))
            before += hold[2]

    def _is_pinned(self, lease: borrow.Lease) -> bool:
        return copies_in_use() is self.copies and borrow.pins_of(lease, self.copies).has(lease.segment)

    def _follow_one(self, fill: Fill, before: int, lease: borrow.Lease, source: torch.Tensor) -> None:
        begin, end, part = 0, source.nbytes, None
        if self._shard is not None and self._shard.takes(source):
            begin, end, length = self._shard.part(source.nbytes)
            part = self._shard.room(length, self.copies, self._device, self.stream)
        room = self.copies.room(end, self._device, self.stream) if part is None else part.mine
        with borrow.gate_of(lease).copying(self.copies, self.stream):
            self._keep_up(fill, before + begin, source[begin:end], room)
        self.arrived[lease.words] = Arrival(room, part)

    def _keep_up(self, fill: Fill, before: int, source: torch.Tensor, room: torch.Tensor) -> None:
        end = source.nbytes
        under_way: deque[Passage] = deque()

        def may_queue(filled: int) -> bool:
            while under_way and under_way[0].passed():
                under_way.popleft()
            return filled >= before + end or len(under_way) < _ON_THE_WAY

        done = 0
        while done < end:
            there = min(fill.beyond(before + done, may_queue) - before, end)
            self.copies.copy_bytes(source[done:there], room[done:there], self.stream, pinned=True)
            done = there
            if done < end:
                under_way.append(self.copies.record(self.stream))
