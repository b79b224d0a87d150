"""Queues over a torch.distributed group: who writes is agreed, the handle travels by the group's own broadcast."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arena.config import QueueConfig
from arena.errors import ArenaError, HandleMismatch, InvalidArgument
from arena.message_queue import MessageQueue, Warn

if TYPE_CHECKING:
    import torch


def create_from_process_group(
    group: torch.distributed.ProcessGroup | None,
    *,
    writer_rank: int,
    config: QueueConfig | None,
    timeout: float | None,
    on_warning: Warn | None,
) -> MessageQueue:
    """See `MessageQueue.create_from_process_group`."""
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if not 0 <= writer_rank < world or world < 2:
        raise InvalidArgument(
            "no such writer", expected=f"a rank of a group of at least two, 0..{world - 1}", found=str(writer_rank)
        )
    _check_one_host(group, world)
    queue: MessageQueue | None = None
    offer: list[Any] = [None]
    if rank == writer_rank:
        try:
            queue = MessageQueue(world - 1, config=config, on_warning=on_warning)
            offer = [queue.export_handle()]
        except ArenaError as error:
            offer = [error]  # the others must hear of it, not wait for a handle
    dist.broadcast_object_list(offer, src=_global_rank(group, writer_rank), group=group)
    if isinstance(offer[0], ArenaError):
        raise offer[0]
    if queue is None:
        reader_rank = rank - (rank > writer_rank)
        queue = MessageQueue.create_from_handle(offer[0], reader_rank, on_warning=on_warning)
    queue.wait_until_ready(timeout)
    return queue


def _global_rank(group: torch.distributed.ProcessGroup | None, rank: int) -> int:
    import torch.distributed as dist

    return rank if group is None else dist.get_global_rank(group, rank)


def _check_one_host(group: torch.distributed.ProcessGroup | None, world: int) -> None:
    """Shared memory reaches one host: all ranks must have booted together."""
    import torch.distributed as dist

    hosts: list[Any] = [None] * world
    dist.all_gather_object(hosts, (_boot_id(), os.uname().nodename), group=group)
    boots = {boot for boot, _ in hosts}
    if len(boots) > 1:
        raise HandleMismatch(
            "the process group spans several hosts",
            expected="every rank on one host",
            found=", ".join(sorted({name for _, name in hosts})),
            remedy="make one group per host, and one queue in each",
        )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
