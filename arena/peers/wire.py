"""What is said on the attach socket, and the handle that leads there."""

from __future__ import annotations

import json
import os
import socket
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from arena.errors import HandleMismatch
from arena.layout import Geometry

PROTOCOL: Final = 1
MAGIC: Final = "arena-queue"
MAX_SEGMENTS: Final = 128
_MAX_HELLO_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Handle:
    """What a reader needs to find and trust a queue. Small and picklable; send it over any channel you trust.

    Whoever holds it, runs under the same uid and can reach the run directory can attach, so it carries a secret.
    """

    magic: str
    version: int
    name: str
    instance: str
    directory: str
    secret: str = field(repr=False)
    n_reader: int
    n_local_reader: int
    geometry: Geometry
    views: str
    max_message_bytes: int
    max_arena_bytes: int
    prefault: bool
    probes: bool
    pin: str = "auto"

    def check(self) -> None:
        """Refuse a handle of another Arena.

        Raises:
            HandleMismatch: wrong magic or version.
        """
        if self.magic != MAGIC or self.version != PROTOCOL:
            raise HandleMismatch(
                "this handle was made by another version of Arena",
                expected=f"{MAGIC} protocol {PROTOCOL}",
                found=f"{self.magic} protocol {self.version}",
                remedy="run the same Arena version in every process of the engine",
            )


def send(connection: socket.socket, message: dict[str, Any], fds: list[int], *, flags: int = 0) -> None:
    """Send one message with its fds."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    connection.sendmsg([json.dumps(message).encode()], rights, flags | socket.MSG_NOSIGNAL)


def receive(connection: socket.socket, *, peek: bool = False) -> tuple[dict[str, Any] | None, list[int]]:
    """One message and its fds; None at the end of the stream. Peeking leaves it there, and gives copies of the fds.

    Raises:
        HandleMismatch: the peer speaks something else.
    """
    wanted = socket.MSG_CMSG_CLOEXEC | (socket.MSG_PEEK if peek else 0)
    # Not socket.recv_fds, which in many releases forgets the flags: the fds would leak into every subprocess.
    data, ancillary, flags, _ = connection.recvmsg(_MAX_HELLO_BYTES, socket.CMSG_LEN((MAX_SEGMENTS + 2) * 4), wanted)
    fds = [fd for _, kind, rights in ancillary if kind == socket.SCM_RIGHTS for fd in _unpacked(rights)]
    if not data:
        close_all(fds)
        return None, []
    try:
        message = json.loads(data)
        if not isinstance(message, dict) or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("not an object, or cut short")
    except ValueError as error:
        close_all(fds)
        raise HandleMismatch(
            "the other end of the attach socket does not speak Arena's hand-shake", found=str(error)
        ) from error
    return message, fds


def _unpacked(rights: bytes) -> list[int]:
    return array("i", rights[: len(rights) // 4 * 4]).tolist()


def close_all(fds: list[int]) -> None:
    """Close what a message brought and nobody wants."""
    for fd in fds:
        os.close(fd)


def socket_address(directory: Path, name: str) -> tuple[str, int | None]:
    """The socket's path, through a directory fd where it is too long for a socket address (107 bytes)."""
    path = str(directory / name)
    if len(os.fsencode(path)) <= 107:
        return path, None
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{fd}/{name}", fd
