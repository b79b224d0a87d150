"""What is said on the attach socket, and the handle that leads there."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from arena.errors import HandleMismatch, OutOfDescriptors
from arena.layout import MAX_READERS, VERSION, Geometry

PROTOCOL: Final = VERSION  # one number for what is said and for how memory is laid out: a handle tells of both
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

    def wrong(self) -> list[str]:
        """The fields that can't be what a writer put there."""
        keys = ("server_key", "client_key", "client_secret")
        good = {name: _is_key(getattr(self, name)) for name in keys}
        good["endpoint"] = _is_endpoint(self.endpoint)
        good["timeout_s"] = type(self.timeout_s) in (int, float) and 0 < self.timeout_s <= _LONGEST_S
        good["window_bytes"] = type(self.window_bytes) is int and 0 < self.window_bytes <= _LARGEST
        return [name for name, is_good in good.items() if not is_good]


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
            wrong = [f"geometry.{name}" for name, value in shape.items() if not _is_count(value)]
        if not wrong and type(self.remote) is RemoteAddress:
            wrong = [f"remote.{name}" for name in self.remote.wrong()]
        elif not wrong and self.remote is not None:
            wrong = ["remote"]
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


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST_COUNT


def _is_text(value: str) -> bool:
    """Whether it may stand in a path, and be sent."""
    try:
        return "\0" not in value and len(value.encode()) <= _MAX_TEXT_BYTES
    except UnicodeEncodeError:
        return False


_LARGEST: Final = 1 << 62
_LARGEST_COUNT: Final = 1 << 30  # of slots, of bytes of a slot, of holds
_LONGEST_S: Final = 1e6
_MAX_TEXT_BYTES: Final = 4096
_ENDPOINT: Final = re.compile(r"tcp://(?:\[[^\s\[\]/]{1,300}\]|[^\s\[\]/:]{1,300}):([0-9]{1,5})", re.ASCII)
_Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_KINDS: Final[dict[str, type]] = {
    **dict.fromkeys(("name", "instance", "directory", "secret", "views", "pin", "serializer", "host"), str),
    **dict.fromkeys(("n_reader", "n_local_reader", "max_message_bytes", "max_arena_bytes"), int),
    **dict.fromkeys(("prefault", "probes"), bool),
    "geometry": Geometry,
}


def _is_endpoint(found: object) -> bool:
    where = _ENDPOINT.fullmatch(found) if isinstance(found, str) else None
    return where is not None and 0 < int(where[1]) < 1 << 16


def _is_key(found: object) -> bool:
    """Whether it is 32 bytes in Z85 (RFC 32 of ZeroMQ): 8 groups of 5 digits, each of them a word."""
    key = found if isinstance(found, str) else ""
    digits = [_Z85.find(one) for one in key]
    groups = [digits[at : at + 5] for at in range(0, len(digits), 5)]
    values = [sum(digit * 85**power for power, digit in enumerate(reversed(group))) for group in groups]
    return len(digits) == 40 and min(digits) >= 0 and max(values) < 1 << 32


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
    except (RecursionError, ValueError) as error:
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
