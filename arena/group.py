"""Queues over a torch.distributed group: who writes is agreed, the handle travels by the group's own broadcast."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arena.config import QueueConfig, RemoteConfig, check_remote
from arena.errors import ArenaError, InvalidArgument
from arena.message_queue import MessageQueue, Warn
from arena.peers import host_id
from arena.probe import run_directory

if TYPE_CHECKING:
    import torch


def create_from_process_group(
    group: torch.distributed.ProcessGroup | None,
    *,
    writer_rank: int,
    config: QueueConfig | None,
    remote: RemoteConfig | str | None,
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
    remote = check_remote(remote)
    beside = _who_is_beside(group, writer_rank, config)
    queue: MessageQueue | None = None
    offer: list[Any] = [None]
    if rank == writer_rank:
        try:
            if not all(beside.values()):
                remote = remote or _address_for([host for host, here in beside.items() if not here])
            local = sum(beside.values()) - 1
            queue = MessageQueue(world - 1, local, config=config, remote=remote, on_warning=on_warning)
            offer = [queue.export_handle()]
        except ArenaError as error:
            offer = [error]  # the others must hear of it, not wait for a handle
    dist.broadcast_object_list(offer, src=_global_rank(group, writer_rank), group=group)
    if isinstance(offer[0], ArenaError):
        raise offer[0]
    if queue is None:
        reader_rank = rank - (rank > writer_rank)
        queue = MessageQueue.create_from_handle(offer[0], reader_rank, on_warning=on_warning)
    try:
        queue.wait_until_ready(timeout)
    except BaseException:
        queue.shutdown()
        raise
    return queue


def _global_rank(group: torch.distributed.ProcessGroup | None, rank: int) -> int:
    import torch.distributed as dist

    return rank if group is None else dist.get_global_rank(group, rank)


def _who_is_beside(
    group: torch.distributed.ProcessGroup | None, writer_rank: int, config: QueueConfig | None
) -> dict[str, bool]:
    """Of every rank, "rank (host)", whether it shares memory with the writer: the same host, a file of its in sight.

    Two containers of one host have one boot, and need not have one run directory.
    """
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    with _token(config) if rank == writer_rank else contextlib.nullcontext(None) as token:
        offer: list[Any] = [(host_id(), token)]
        dist.broadcast_object_list(offer, src=_global_rank(group, writer_rank), group=group)
        host, path = offer[0]
        beside = rank == writer_rank or (host == host_id() and (path is None or Path(path).exists()))
        found: list[Any] = [None] * world
        dist.all_gather_object(found, (os.uname().nodename, beside), group=group)
    return {f"{one} ({name})": here for one, (name, here) in enumerate(found)}


@contextlib.contextmanager
def _token(config: QueueConfig | None) -> Iterator[str | None]:
    """A file in the run directory that nobody can have by chance; None where none can be: the queue will say why."""
    try:
        path = run_directory((config or QueueConfig()).from_environment().run_dir) / f"probe-{secrets.token_hex(16)}"
        path.touch(mode=0o600, exist_ok=False)
    except (ArenaError, OSError):
        yield None
        return
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


def _address_for(elsewhere: list[str]) -> RemoteConfig:
    """This host's address on its way to the master's, which every rank of the job can reach."""
    master = os.environ.get("MASTER_ADDR", "")
    address = ""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, where = socket.getaddrinfo(master or None, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as route:
            route.connect(where)  # sends nothing: the kernel only chooses the way
            address = route.getsockname()[0]
    if not master or not address or address.startswith("127.") or address == "::1":
        raise InvalidArgument(
            f"ranks {', '.join(elsewhere)} do not share memory with the writer, and it has no address for them",
            expected="remote, an address of the writer's host, or a MASTER_ADDR that is not this host's loopback",
            found=f"MASTER_ADDR={master!r}",
            remedy="pass remote='10.0.0.1'; where it is one host, give its ranks one run directory (ARENA_RUN_DIR)",
        )
    return RemoteConfig(f"[{address}]" if ":" in address else address)
