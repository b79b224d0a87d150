"""How much shared memory a queue has before its first large tensor: all that its processes map, counted once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from telemetry.commands.bench.children import fork_reader, reap
from telemetry.commands.bench.contenders import READY_TIMEOUT_S
from telemetry.commands.bench.floor import OBJ

_BYTES_A_BLOCK = 512  # the unit of st_blocks, whatever the file system's own


@dataclass(frozen=True)
class Footprint:
    """`size_bytes` is what the files may come to without growing, `allocated_bytes` what has been touched so far."""

    size_bytes: int
    allocated_bytes: int


class SharedMap(NamedTuple):
    """One shared mapping, as a line of /proc/<pid>/maps gives it. Device and inode say which file."""

    device: str
    inode: int
    start: int
    end: int
    offset: int
    path: str


def footprint(readers: int) -> Footprint:
    """A queue with `readers` attached readers after one small message: every shared file that was not there before."""
    from arena import MessageQueue, QueueConfig

    known = {_file_of(mapping) for mapping in shared_maps(_maps_of(os.getpid()))}
    pipes = [Pipe() for _ in range(readers)]
    pids = [fork_reader(partial(_attend, theirs, rank)) for rank, (_, theirs) in enumerate(pipes)]
    with MessageQueue(readers, readers, config=QueueConfig(name="bench-footprint")) as queue:
        for ours, _ in pipes:
            ours.send(queue.export_handle())
        queue.wait_until_ready(READY_TIMEOUT_S)
        queue.enqueue(OBJ)
        for ours, _ in pipes:
            ours.recv()
        found = _measure([os.getpid(), *pids], known)
        for ours, _ in pipes:
            ours.send("enough")
        reap(pids)
    return found


def shared_maps(lines: Iterable[str]) -> list[SharedMap]:
    """The shared mappings of files among the lines of a maps file."""
    found = []
    for line in lines:
        addresses, permissions, offset, device, inode, *path = line.split(maxsplit=5)
        if permissions[3] == "s" and inode != "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append(SharedMap(device, int(inode), start, end, int(offset, 16), "".join(path)))
    return found


def _attend(connection: Connection, rank: int) -> None:
    from arena import MessageQueue

    with MessageQueue.create_from_handle(connection.recv(), rank) as reader:
        reader.wait_until_ready(READY_TIMEOUT_S)
        connection.send(reader.dequeue())
        connection.recv()


def _measure(pids: list[int], known: set[tuple[str, int]]) -> Footprint:
    mappings = [mapping for pid in pids for mapping in shared_maps(_maps_of(pid)) if _file_of(mapping) not in known]
    statuses = _open_files(pids)
    files: dict[tuple[str, int], Footprint] = {}
    for mapping in mappings:
        status = statuses.get(_file_of(mapping)) or _named_file(mapping)
        if status is not None:
            files[_file_of(mapping)] = Footprint(status.st_size, status.st_blocks * _BYTES_A_BLOCK)
        else:  # closed and without a name: what is mapped of it counts in full, which can only be too much
            mapped = mapping.offset + mapping.end - mapping.start
            before = files.get(_file_of(mapping), Footprint(0, 0))
            files[_file_of(mapping)] = Footprint(max(before.size_bytes, mapped), max(before.allocated_bytes, mapped))
    return Footprint(
        size_bytes=sum(found.size_bytes for found in files.values()),
        allocated_bytes=sum(found.allocated_bytes for found in files.values()),
    )


def _open_files(pids: list[int]) -> dict[tuple[str, int], os.stat_result]:
    """Every file that one of the processes has open; a memfd has no other name."""
    found = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                status = descriptor.stat()
            except FileNotFoundError:  # closed meanwhile: the listing itself is one
                continue
            found[_file_of(status)] = status
    return found


def _named_file(mapping: SharedMap) -> os.stat_result | None:
    path = Path(mapping.path)
    return path.stat() if path.is_file() else None


def _file_of(file: SharedMap | os.stat_result) -> tuple[str, int]:
    if isinstance(file, SharedMap):
        return file.device, file.inode
    return f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", file.st_ino


def _maps_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()
