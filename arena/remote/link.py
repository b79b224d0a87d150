"""A remote reader's socket: encrypted, connected for as long as the reader lives, woken from any thread."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from arena.errors import HandleMismatch
from arena.extras import require
from arena.held import HeldLock
from arena.peers import RemoteAddress
from arena.remote.wire import CHUNK_BYTES

if TYPE_CHECKING:
    import zmq

_NOBLOCK: Final = 1  # as zmq has it; its own is an enum, which costs with every call
_SLACK_BYTES: Final = 1 << 20
_LINGER_MS: Final = 1000
_RECONNECT_MS: Final = 50
_GIVEN_UP_NS: Final = 100_000_000
_RECONNECT_MAX_MS: Final = 500


class Link:
    """The connection to a forwarder. Not for two threads at once, except `wake`.

    Args:
        address: where it is, and the keys.
        max_frame_bytes: what comes in one frame at most; a longer one ends the connection.

    Raises:
        HandleMismatch: the address means nothing on this host.
        MissingLibrary: no zmq.
    """

    def __init__(self, address: RemoteAddress, max_frame_bytes: int) -> None:
        _resolve(address.endpoint)
        zmq = self._zmq = require("zmq")
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket: Any = _context().socket(zmq.DEALER)
        heartbeat_ms = max(20, int(address.timeout_s * 200))
        options = {
            zmq.ROUTING_ID: b"a" + os.urandom(15),  # the first byte must not be zero
            zmq.CURVE_SERVERKEY: address.server_key.encode(),
            zmq.CURVE_PUBLICKEY: address.client_key.encode(),
            zmq.CURVE_SECRETKEY: address.client_secret.encode(),
            # The window bounds what may be on the way. A limit here would stop heartbeats with the rest.
            zmq.RCVHWM: 0,
            zmq.SNDHWM: 0,
            zmq.LINGER: _LINGER_MS,
            zmq.MAXMSGSIZE: max(CHUNK_BYTES, max_frame_bytes) + _SLACK_BYTES,
            zmq.HANDSHAKE_IVL: max(200, heartbeat_ms // 2),  # nothing else ends one in which the wire swallowed a word
            zmq.HEARTBEAT_IVL: heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: 2 * heartbeat_ms,
            zmq.RECONNECT_IVL: _RECONNECT_MS,
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MAX_MS,
            zmq.CONNECT_TIMEOUT: max(100, 2 * heartbeat_ms),
            zmq.IPV6: "[" in address.endpoint,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        watched = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        watched |= zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED
        self._monitor: Any = self._socket.get_monitor_socket(watched)
        self.news_fd = int(self._monitor.getsockopt(zmq.FD))  # readable when `failures` has something to tell
        self._events, self._pollin = zmq.EVENTS, int(zmq.POLLIN)
        self._receive: Any = self._socket.recv
        self._send: Any = self._socket.send
        self._poll = select.poll()
        for fd in (self._socket.getsockopt(zmq.FD), self._wake, self.news_fd):
            self._poll.register(fd, select.POLLIN)
        self._endpoint = address.endpoint
        self._broken_ns = 0  # since when the connection is, unless zmq has begun to make another
        self.news = False  # whether `wait` has seen that `failures` has something to tell
        self._socket.connect(address.endpoint)
        self.failures()  # before its first look nobody is told

    def send(self, message: bytes) -> None:
        """Queue a message, without ever waiting; while the connection is down it goes out once that is back.

        It may be lost with its connection: whoever sends says it again.
        """
        try:
            self._send(message, _NOBLOCK)
        except self._zmq.Again:  # zmq has given the connection up: the next one is ours to make, see `_connect_again`
            self._connect_again()
            try:
                self._send(message, _NOBLOCK)
            except self._zmq.Again:  # and that one too, at once
                self._broken_ns = time.monotonic_ns()

    def receive(self, in_place: bool = False) -> bytes | zmq.Frame | None:
        """The next part of a message that is here; None if there is none.

        Args:
            in_place: leave its bytes where zmq has them, which pays for large ones.
        """
        try:
            return self._receive(_NOBLOCK, not in_place)  # type: ignore[no-any-return]
        except self._zmq.Again:
            return None

    def wait(self, timeout_ms: int) -> None:
        """Until something has come, `wake` was called, there is `news`, or the time is over."""
        if self._socket.getsockopt(self._events) & self._pollin:  # zmq tells of that once
            return
        for fd, _ in self._poll.poll(timeout_ms):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif fd == self.news_fd:
                self.news = True

    @property
    def broken(self) -> bool:
        """Whether the connection is, as far as the last call of `failures` knows, and nobody makes another yet."""
        return self._broken_ns != 0

    def wake(self) -> None:
        """End a `wait` under way, or the next one. From any thread."""
        try:
            os.eventfd_write(self._wake, 1)
        except OSError:  # closed meanwhile
            pass

    def failures(self) -> list[str]:
        """What has gone wrong with connecting since the last call: refused, key, hung_up. Mends what can be mended."""
        zmq, found = self._zmq, []
        names = {zmq.EVENT_CONNECT_RETRIED: "refused", zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "hung_up"}
        names[zmq.EVENT_DISCONNECTED] = "broken"
        while self._monitor.getsockopt(self._events) & self._pollin:
            from zmq.utils.monitor import recv_monitor_message

            found.append(names.get(recv_monitor_message(self._monitor)["event"], "key"))
        if found:
            self._broken_ns = time.monotonic_ns() if found[-1] != "refused" else 0  # else it is trying already
        self.news = False  # only now: an interrupt before this leaves it for the next look
        if self._broken_ns and time.monotonic_ns() - self._broken_ns > _GIVEN_UP_NS:
            self._connect_again()
        return found

    def _connect_again(self) -> None:
        """zmq makes a connection that broke anew, but not one on which something else than its peer's words came.

        Such a one is gone with all that was to be sent, and a send would wait for ever for another.
        """
        self._broken_ns = 0
        try:
            self._socket.disconnect(self._endpoint)
        except self._zmq.ZMQError:  # it has forgotten about it already
            pass
        self._socket.connect(self._endpoint)

    def close(self) -> None:
        """Hang up; what was sent still goes out."""
        self._socket.disable_monitor()
        self._socket.close()
        os.close(self._wake)


def _resolve(endpoint: str) -> None:
    """zmq would try for ever to reach a host that does not exist."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise HandleMismatch(
            f"the address in the handle, {endpoint}, means nothing on this host",
            expected="a host that resolves here",
            found=str(error),
            remedy="let the writer say RemoteConfig(connect=...), an address that this host can reach",
        ) from error


_contexts: dict[int, Any] = {}
_making = HeldLock()


def _context() -> Any:
    """One context a process: a forked child's copy of it has no threads."""
    with _making:
        pid = os.getpid()
        if pid not in _contexts:
            _contexts[pid] = require("zmq").Context(1)
        return _contexts[pid]


def _after_fork() -> None:
    global _making  # noqa: PLW0603 - another thread may have had it at the fork
    _making = HeldLock()


os.register_at_fork(after_in_child=_after_fork)
