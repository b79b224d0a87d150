"""Which host a process is on: what decides whether memory can be shared."""

from __future__ import annotations

import os
from pathlib import Path

from arena.errors import HandleMismatch
from arena.peers.wire import Handle
from arena.probe.directory import SOCKET


def host_id() -> str:
    """The same for two processes exactly if they can share memory: this boot of this kernel.

    ``ARENA_HOST_ID`` overrides it, for containers of one kernel that are to be taken for hosts of their own. An address
    would not do: containers have several, and several hosts behind one NAT have one.
    """
    chosen = os.environ.get("ARENA_HOST_ID")
    if chosen:
        return chosen
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (FileNotFoundError, PermissionError):
        return os.uname().nodename


def is_elsewhere(handle: Handle) -> bool:
    """Whether this process has to reach the queue of a handle over the network.

    Raises:
        HandleMismatch: it has to, and the queue has no address.
    """
    here = not handle.host or handle.host == host_id()
    if here and (handle.remote is None or os.path.exists(os.path.join(handle.directory, SOCKET))):
        return False
    if handle.remote is None:
        raise HandleMismatch(
            f"queue {handle.name!r} is on another host, and has no address for readers on other hosts",
            expected=f"a process on host {handle.host}",
            found=f"host {host_id()}",
            remedy="create the queue with remote='an address of its host'; if it is one host, set ARENA_HOST_ID alike",
        )
    return True
