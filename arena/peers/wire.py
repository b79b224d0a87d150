"""What is said on the attach socket, and the handle that leads there."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from arena.errors import HandleMismatch, OutOfDescriptors
from arena.layout import MAX_READERS, Geometry

PROTOCOL: Final = 2
MAGIC: Final = "arena-queue"
MAX_SEGMENTS: Final = 128
_MAX_HELLO_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class RemoteAddress:
    """How readers on other hosts find a queue, and show that they may: in its handle, so as secret as that.

    Attributes:
        endpoint: ``tcp://host:port``.
        server_key, client_key: public CURVE keys of the forwarder and of all its readers, in Z85.
        client_secret: what goes with the latter.
        timeout_s, window_bytes: as in `arena.config.RemoteConfig`.
    """

    endpoint: str
    server_key: str
    client_key: str
    client_secret: str = field(repr=False)
    timeout_s: float
    window_bytes: int


@dataclass(frozen=True)
class Handle:
    """What a reader needs to find and trust a queue. Small and picklable; send it over any channel you trust.

    Whoever holds it, runs under the same uid and can reach the run directory can attach, so it carries a secret. With
    `remote`, whoever holds it and reaches that address can.
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
    serializer: str = "pickle"
    host: str = ""  # the writer's, see `arena.peers.host`
    remote: RemoteAddress | None = None

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
        wrong = [name for name, kind in _KINDS.items() if type(getattr(self, name)) is not kind]
        if not wrong:
            shape = vars(self.geometry)
            wrong = [f"geometry.{name}" for name, value in shape.items() if type(value) is not int or value <= 0]
        if not wrong:
            wrong = [name for name, (least, most) in self._bounds().items() if not least <= getattr(self, name) <= most]
        if not wrong:
            wrong = [name for name, kind in _KINDS.items() if kind is str and not _is_text(getattr(self, name))]
        if wrong:
            raise HandleMismatch(
                f"this handle is damaged, or for another queue: {', '.join(wrong)}",
                expected="fields as export_handle() made them",
                found=", ".join(f"{getattr(self, name, None)!r}"[:40] for name in wrong),
                remedy="send the reader the handle as export_handle() gave it",
            )

    def _bounds(self) -> dict[str, tuple[int, int]]:
        return {
            "n_reader": (1, MAX_READERS),
            "n_local_reader": (0, self.n_reader),
            "max_message_bytes": (1, _LARGEST),
            "max_arena_bytes": (0, _LARGEST),
        }


def _is_text(value: str) -> bool:
    """Whether it may stand in a path, and be sent."""
    try:
        return "\0" not in value and len(value.encode()) <= _MAX_TEXT_BYTES
    except UnicodeEncodeError:
        return False


_LARGEST: Final = 1 << 62
_MAX_TEXT_BYTES: Final = 4096
_KINDS: Final[dict[str, type]] = {
    **dict.fromkeys(("name", "instance", "directory", "secret", "views", "pin", "serializer", "host"), str),
    **dict.fromkeys(("n_reader", "n_local_reader", "max_message_bytes", "max_arena_bytes"), int),
    **dict.fromkeys(("prefault", "probes"), bool),
    "geometry": Geometry,
}


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
    if flags & socket.MSG_CTRUNC:  # the kernel could not install the descriptors that came with it
        close_all(fds)
        raise out_of_descriptors("segments of shared memory came that can't be opened")
    try:
        message = json.loads(data)
        if not isinstance(message, dict) or flags & socket.MSG_TRUNC:
            raise ValueError("not an object, or cut short")
    except ValueError as error:
        close_all(fds)
        raise HandleMismatch(
            "the other end of the attach socket does not speak Arena's hand-shake", found=str(error)
        ) from error
    return message, fds


def out_of_descriptors(what: str) -> OutOfDescriptors:
    """The error for whoever has no descriptor left."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OutOfDescriptors(
        what,
        expected="a free file descriptor for each segment, and three or four for a queue",
        found=f"a limit of {limit}, or the host's, reached",
        remedy="raise `ulimit -n`, or close what this process does not need",
    )


@contextmanager
def naming_descriptors(what: str) -> Iterator[None]:
    """Around what opens files: that no more may be opened is an error of our own."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise out_of_descriptors(what) from error
        raise


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
