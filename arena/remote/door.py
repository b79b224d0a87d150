"""Who is let in to the forwarder: by the queue's key, before a byte of theirs is looked at; then by its secret."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from typing import Any, Final

from arena.errors import HandleMismatch
from arena.peers import Handle
from arena.remote import wire

_ZAP: Final = "inproc://zeromq.zap.01"
_A_MOMENT_NS: Final = 500_000_000


class Door:
    """The router's authentication, and what is heard of its connections.

    Args:
        zmq: the library.
        context: the router's; whoever authenticates has to be there before the router listens.
        client_key: the one public key, in Z85, that gets in.
        refused: called with the reason whenever somebody was.

    Attributes:
        fd, news_fd: readable when `authenticate`, or `note_connections`, has something to do. zmq says so once.
        unsettled_until_ns: connections have come or gone, and the router hears of it a moment after us.
    """

    def __init__(self, zmq: Any, context: Any, client_key: str, refused: Callable[[str], None]) -> None:
        self._zmq, self._client_key, self._refused = zmq, client_key, refused
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self.fd = int(self._zap.getsockopt(zmq.FD))
        self.unsettled_until_ns = 0
        self._denied = 0  # connections that are about to end for that
        self._arriving: set[int] = set()  # descriptors of connections that have not got as far as
        self._connected: set[int] = set()  # those behind which somebody with the right key is

    def watch(self, router: Any) -> None:
        """Hear of the router's connections. Before it listens."""
        zmq = self._zmq
        self._monitor = router.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.news_fd = int(self._monitor.getsockopt(zmq.FD))

    def _has_come(self, socket: Any) -> bool:
        return bool(socket.getsockopt(self._zmq.EVENTS) & self._zmq.POLLIN)

    def authenticate(self) -> None:
        """ZeroMQ's authentication protocol (RFC 27): only the key that is in the handle gets in."""
        while self._has_come(self._zap):
            self._let_in()

    def _let_in(self) -> None:
        request = self._zap.recv_multipart()
        version, number, mechanism = request[0], request[1], request[5]
        key = request[6] if len(request) == 7 else b""
        good = mechanism == b"CURVE" and hmac.compare_digest(_encoded(key), self._client_key)
        if not good:
            self._denied += 1
            self._refused("key")
        status = (b"200", b"OK") if good else (b"400", b"unknown key")
        self._zap.send_multipart([version, number, *status, b"", b""])

    def note_connections(self) -> None:
        """See to who came and went; who had no key, and no word of the protocol either, was refused."""
        zmq = self._zmq
        from zmq.utils.monitor import recv_monitor_message

        while self._has_come(self._monitor):
            told = recv_monitor_message(self._monitor)
            event, fd = told["event"], told["value"]
            if event == zmq.EVENT_ACCEPTED:
                self._arriving.add(fd)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED or fd in self._connected:
                if event == zmq.EVENT_DISCONNECTED:
                    self._connected.discard(fd)
                else:  # it is one of these
                    self._connected |= self._arriving
                    self._arriving.clear()
                self.unsettled_until_ns = time.monotonic_ns() + _A_MOMENT_NS
            elif self._denied:  # a stranger, who has been counted by his key
                self._denied -= 1
                self._arriving.discard(fd)
            else:
                self._arriving.discard(fd)
                self._refused("handshake")


def _encoded(key: bytes) -> str:
    from zmq.utils import z85

    return str(z85.encode(key).decode()) if len(key) == 32 else ""


def check_hello(handle: Handle, hello: dict[str, Any]) -> tuple[int, str]:
    """Rank and host:pid of a reader that knows the queue's secret.

    Raises:
        HandleMismatch: it does not, is of another version, or has no business here.
    """
    expected = (handle.magic, handle.version, wire.REMOTE_PROTOCOL, handle.instance)
    found = tuple(hello.get(name) for name in ("magic", "version", "remote", "instance"))
    if found != expected:
        raise HandleMismatch("the reader's handle is for another queue", expected=str(expected), found=str(found))
    if not hmac.compare_digest(str(hello.get("secret")).encode(errors="replace"), handle.secret.encode()):
        raise HandleMismatch(
            "the reader does not know this queue's secret",
            expected="the secret in the handle",
            found="another one",
            remedy="send the reader the handle that export_handle() gave",
        )
    rank, host, pid = (hello.get(name) for name in ("rank", "host", "pid"))
    if not isinstance(rank, int) or not isinstance(pid, int) or not isinstance(host, str):
        raise HandleMismatch("the reader's hello is malformed", expected="rank, host and pid")
    name = "".join(one if one.isprintable() and one != " " else "_" for one in host[:64])
    return rank, f"{name or 'unknown'}:{pid}"
