"""Sharded hand-over: each GPU takes a part of a tensor over its own bus, and the rest from the other GPUs.

The readers of a queue all get the same tensors. Where each of them moves one to a GPU of its own, every byte crosses
the host's memory and a bus once for each GPU; but GPUs that reach each other pass bytes on much faster than that. So
reader r of N copies the r-th part, and an all-gather does the rest.

**All take the same way.** A rank that decides otherwise than the rest would leave them waiting. So whether a tensor is
sharded follows from what is the same for all: its bytes, how they lie, and the group. How a rank comes by its own part
is its own affair: streamed or not, pinned or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from arena.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

    from arena.device import Copies, Stream

SHARDED_BYTES: Final = 16 << 20
"""From this size up: below, a collective takes longer than what it saves."""

_ALIGN: Final = 256


class Part(NamedTuple):
    """One rank's part of a tensor's bytes: from, to, and the length that all parts have but for what is cut off."""

    begin: int
    end: int
    length: int


class Room(NamedTuple):
    """Where a rank's part goes to, and, where parts are received around it, the whole."""

    mine: torch.Tensor
    whole: torch.Tensor | None


class Shard:
    """The ranks that share the work, and how they pass bytes on.

    Args:
        group: an `arena.allreduce.AllReduce` for the device, or a process group of torch's whose backend can
            ``all_gather`` there. Which reader is which rank of it does not matter.
        device: where the tensors go.

    Raises:
        InvalidArgument: it is neither, or for another device.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        import torch.distributed as dist

        self._group = group
        self._is_ours = hasattr(group, "all_gather") and hasattr(group, "explain")
        if self._is_ours:
            if group.device.type != device.type or device.index not in (None, group.device.index):
                raise InvalidArgument(
                    "this communicator can't share a message out",
                    expected=f"one for {device}",
                    found=f"one for {group.device}",
                    remedy="make AllReduce(group, device) for the device that the message goes to",
                )
            self.rank, self.world = group.rank, group.world
        elif dist.is_available() and isinstance(group, dist.ProcessGroup):
            self.rank, self.world = group.rank(), group.size()
        else:
            raise InvalidArgument(
                "a message can't be shared out over that",
                expected="an AllReduce or a torch.distributed.ProcessGroup, the same ranks for every reader",
                found=type(group).__name__,
                remedy="pass what torch.distributed.new_group or arena.AllReduce gave",
            )

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor is shared out. The same on all ranks: the message says how it lies."""
        return self.world > 1 and tensor.nbytes >= SHARDED_BYTES and tensor.is_contiguous()

    def part(self, nbytes: int) -> Part:
        """What of so many bytes this rank copies: equal parts, the last ones cut off where the bytes end."""
        length = -(-nbytes // (self.world * _ALIGN)) * _ALIGN
        begin = min(self.rank * length, nbytes)
        return Part(begin, min(begin + length, nbytes), length)

    def room(self, length: int, copies: Copies, device: torch.device, stream: Stream) -> Room:
        """Where this rank's part goes to: in its place between the others, where they can be received there."""
        if self._is_ours:
            return Room(copies.room(length, device, stream), None)
        whole = copies.room(self.world * length, device, stream)
        return Room(whole[self.rank * length : (self.rank + 1) * length], whole)

    def gather(self, room: Room, copies: Copies, stream: Stream) -> torch.Tensor:
        """All parts, one after the other, once this rank's is in what `room` gave. Collective."""
        import torch.distributed as dist

        with copies.behind(stream):
            if room.whole is None:
                gathered: torch.Tensor = self._group.all_gather(room.mine)
                return gathered
            if room.whole.is_cuda and "cuda:nccl" in dist.get_backend_config(self._group):
                dist.all_gather_into_tensor(room.whole, room.mine, group=self._group)
            else:
                dist.all_gather(list(room.whole.chunk(self.world)), room.mine.clone(), group=self._group)
            return room.whole
