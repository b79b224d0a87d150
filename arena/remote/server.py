"""The forwarder's work: one loop around a router socket and the ring.

It sleeps on the socket and the writer's bell (`arena.remote.bell`), and says so in a seat's word like any reader that
parks. Awake, it sends all there is room for and receives all that has come.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final

from arena.config import RemoteConfig, split_address
from arena.errors import ArenaError
from arena.extras import require
from arena.peers import Handle
from arena.remote import wire
from arena.remote.door import Door, check_hello
from arena.remote.peer import Peer, Unreachable
from arena.remote.standin import Latest, StandIn
from arena.wait import usable_cores

_HANDSHAKE_MS: Final = 5000
_SNDMORE: Final = 2  # as zmq has it; its own is an enum, which costs with every call
_STRANGERS: Final = 64  # so many identities are remembered of readers that are gone
_SEATING: Final = 32  # so many hand-shakes at a time
_TICK_S: Final = 0.25
_monotonic_ns = time.monotonic_ns


class Server:
    """Everything that readers on other hosts talk to.

    Args:
        handle: of the queue.
        config: where to listen.
        bell: what the writer rings.
        keys: the forwarder's secret key and the readers' public one, in Z85.
        is_writer_gone: whether the writer's process has ended, or has closed the queue.
        report: called with counts of what was refused, by reason.
        first: whether it is the queue's first; else there may be readers about that had another.

    Raises:
        OSError: nothing can be bound there.
    """

    def __init__(
        self,
        handle: Handle,
        config: RemoteConfig,
        bell: int,
        keys: tuple[str, str],
        is_writer_gone: Callable[[], bool],
        report: Callable[[dict[str, int]], None],
        *,
        first: bool = True,
    ) -> None:
        self._zmq = zmq = require("zmq")
        self._handle, self._config, self._bell = handle, config, bell
        self._is_writer_gone, self._report, self._first = is_writer_gone, report, first
        self._context = zmq.Context(max(1, min(4, usable_cores() // 2)))
        self._door = Door(zmq, self._context, keys[1], self._count)
        self._router = self._context.socket(zmq.ROUTER)
        self.port = self._bind(keys[0])
        self._poll = select.poll()
        for fd in (int(self._router.getsockopt(zmq.FD)), self._door.fd, self._door.news_fd, bell):
            self._poll.register(fd, select.POLLIN)
        self._events, self._pollin = zmq.EVENTS, int(zmq.POLLIN)
        # pyzmq's own `send` looks at options for other kinds of sockets first, and somebody waits.
        self._send_part = super(zmq.Socket, self._router).send  # type: ignore[misc]
        self._tick_ms = max(10, int(min(config.timeout_s / 20, _TICK_S) * 1000))
        self._rung = False
        self._lock = threading.Lock()
        self._peers: dict[bytes, Peer] = {}
        self._order: tuple[Peer, ...] = ()  # the same, for whoever goes through them
        self._latest = Latest()
        self._seating: dict[bytes, float] = {}
        self._gone: OrderedDict[bytes, str] = OrderedDict()  # readers that were taken for dead
        self._refused: Counter[str] = Counter()
        self._ended: dict[str, Any] | None = None
        self._stopping = False
        self._trouble: BaseException | None = None
        self._pinged_ns = self._tick_ns = 0

    def _bind(self, secret: str) -> int:
        zmq, router = self._zmq, self._router
        heartbeat_ms = max(20, int(self._config.timeout_s * 200))
        host, port = split_address("bind", self._config.bind)
        options = {
            zmq.CURVE_SERVER: 1,
            zmq.CURVE_SECRETKEY: secret.encode(),
            zmq.ZAP_DOMAIN: b"arena",
            zmq.ROUTER_MANDATORY: 1,
            zmq.ROUTER_HANDOVER: 1,
            zmq.SNDHWM: 0,  # windows bound it, reader by reader
            zmq.MAXMSGSIZE: wire.MAX_CONTROL_BYTES,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: 2 * heartbeat_ms,
            zmq.LINGER: 1000,
            zmq.IPV6: ":" in host,
        }
        for option, value in options.items():
            router.setsockopt(option, value)
        self._door.watch(router)
        router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        return int(router.getsockopt(zmq.LAST_ENDPOINT).rpartition(b":")[2].rstrip(b"\0"))

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────
    def serve(self) -> None:
        """Forward until the queue has ended and no reader is left."""
        try:
            self._door.authenticate()  # before its first look at a socket nobody is told
            self._door.note_connections()
            while not self._stopping:
                watched = self._order[0].stand_in if self._order else None  # one sleeps for all
                seen = 0 if watched is None else watched.published
                self._turn()
                self._tick()
                self._sleep(watched, seen)
        finally:
            self._stopping = True
            for peer in self._order:
                peer.stand_in.shutdown()
            self._context.destroy(linger=1000)
        if self._trouble is not None:
            raise self._trouble

    def _sleep(self, watched: StandIn | None, seen: int) -> None:
        """Until something has come over the network, more than `seen` frames are published, or it is time to tick.

        One short frame is handed on at once, what else woke us is seen to by the next turn; then the bell is reset.
        """
        if self._rung:
            self._rung = False
            os.eventfd_read(self._bell)
        if watched is not None and not watched.park(seen):
            watched.unpark()
            return
        try:
            # zmq tells once of what has come, and may have told whoever sent meanwhile
            ready = [] if self._has_come(self._router) else self._poll.poll(self._tick_ms)
            if watched is not None:
                self._hand_on(watched, seen)
        finally:
            if watched is not None:
                watched.unpark()
        for fd, _ in ready:
            if fd == self._bell:
                self._rung = True
            elif fd == self._door.fd:
                self._door.authenticate()
            elif fd == self._door.news_fd:
                self._door.note_connections()

    def _hand_on(self, watched: StandIn, seen: int) -> None:
        """What woke us is most often one short frame for everybody, and they wait: nothing comes before that.

        Whatever it is, and whoever can't be sent it now, is seen to by the next turn.
        """
        if watched.published == seen + 1 and (tail := watched.short(seen)) is not None:
            with self._lock:
                for peer in self._order:
                    peer.send_short(seen, tail)

    def _has_come(self, socket: Any) -> bool:
        return bool(socket.getsockopt(self._events) & self._pollin)

    def _turn(self) -> None:
        """Send and receive all there is, but for what `_hand_on` has sent: first what is published.

        Ends with a look at what has come: zmq tells of that only once.
        """
        with self._lock:
            while self._send() | self._receive():
                pass

    # ── sending ──────────────────────────────────────────────────────────────────────────────────
    def _post(self, identity: bytes, head: bytes, data: memoryview | None = None) -> None:
        send = self._send_part
        try:
            send(identity, _SNDMORE)
        except self._zmq.ZMQError as error:
            if error.errno == self._zmq.EHOSTUNREACH:
                raise Unreachable from None
            raise
        if data is None:
            send(head)
        else:
            send(head, _SNDMORE)
            send(data, copy=False)

    def _send(self) -> bool:
        """Everybody in turn, a frame or a chunk each, so that nobody waits for another's large message."""
        sent = False
        for peer in self._order:
            sent |= peer.send_some()
        if self._ended is not None or not sent:
            sent |= self._send_end()
        return sent

    def _send_end(self) -> bool:
        """Say that nothing more will come to whoever has been sent all, once that is so."""
        peers = self._order
        if self._ended is None and peers and peers[0].stand_in.is_closed:
            self._has_ended()
        return self._ended is not None and any([peer.send_end(self._ended) for peer in peers])

    def _has_ended(self) -> bool:
        """Whether nothing more will be published. Not asked on the way of a message."""
        if self._ended is None:
            self._ended = self._order[0].stand_in.end() if self._order else None
        return self._ended is not None

    # ── receiving ────────────────────────────────────────────────────────────────────────────────
    def _receive(self) -> bool:
        zmq, router, any_received = self._zmq, self._router, False
        while self._has_come(router):
            identity, message, *rest = router.recv_multipart(zmq.NOBLOCK)
            any_received = True
            try:
                if rest:
                    raise wire.Malformed(f"{len(rest)} frames too many")
                self._on_message(identity, message)
            except wire.Malformed:
                self._refused["malformed"] += 1
        return any_received

    def _on_message(self, identity: bytes, message: bytes) -> None:
        kind, peer = message[:1], self._peers.get(identity)
        if kind == wire.HELLO:
            self._on_hello(identity, message)
        elif peer is None:
            self._refuse_stranger(identity, kind)
        elif kind == wire.TAKEN:
            peer.on_taken(wire.unpack_taken(message))
        elif kind == wire.RESUME:
            peer.on_resume(*wire.unpack_resume(message))
        elif kind == wire.BYE and len(message) == 1:
            self._remove(peer)
            peer.stand_in.forget()
            peer.stand_in.shutdown()
        else:
            raise wire.Malformed(f"a message of kind {kind!r} and {len(message)} bytes")

    def _refuse_stranger(self, identity: bytes, kind: bytes) -> None:
        """Somebody we know nothing of, or no longer."""
        text = self._gone.get(identity)
        if text is None and not self._first and identity not in self._seating and kind in (wire.TAKEN, wire.RESUME):
            text = (
                f"this reader of queue {self._handle.name!r} died with the forwarder on the writer's host, which was "
                "killed; another has taken its place; attach again"
            )
        if text is not None:
            self._answer(identity, wire.REFUSED, {"kind": "PeerDied", "text": text})
        elif identity not in self._seating:
            self._refused["malformed"] += 1

    def _answer(self, identity: bytes, kind: bytes, content: dict[str, Any]) -> None:
        try:
            self._post(identity, wire.pack_json(kind, content))
        except Unreachable:
            pass

    # ── who comes ────────────────────────────────────────────────────────────────────────────────
    def _count(self, reason: str) -> None:
        with self._lock:
            self._refused[reason] += 1

    def _on_hello(self, identity: bytes, message: bytes) -> None:
        hello = wire.unpack_json(message)
        peer = self._peers.get(identity)
        if peer is not None:
            self._welcome(peer)
            return
        if identity in self._seating or len(self._seating) >= _SEATING:
            return
        try:
            rank, where = check_hello(self._handle, hello)
        except ArenaError as error:
            self._refused["secret"] += 1
            self._answer(identity, wire.REFUSED, {"kind": type(error).__name__, "text": str(error)})
            return
        self._seating[identity] = time.monotonic()
        # The writer's process answers when it can, and nobody else should wait for that.
        threading.Thread(target=self._seat, args=(identity, rank, where), daemon=True).start()

    def _seat(self, identity: bytes, rank: int, where: str) -> None:
        """Attach on behalf of a reader, in a thread of its own, and tell it how that went."""
        try:
            self._wait_for_predecessor(rank)
            stand_in = StandIn(self._handle, rank, where, self._latest, timeout=30.0)
        except ArenaError as error:
            with self._lock:
                self._seating.pop(identity, None)
                self._refused["seat"] += 1
                self._answer(identity, wire.REFUSED, {"kind": type(error).__name__, "text": str(error)})
            return
        except BaseException as error:
            self._trouble, self._stopping = error, True
            return
        with self._lock:
            self._seating.pop(identity, None)
            peer = Peer(identity, stand_in, self._config.window_bytes, self._post)
            self._peers[identity] = peer
            self._order = tuple(self._peers.values())
            self._welcome(peer)
        os.eventfd_write(self._bell, 1)  # it is to be sent what is there

    def _wait_for_predecessor(self, rank: int) -> None:
        """A reader of this rank whose connection broke may be dead, which is known only after a while."""
        until = time.monotonic() + 2 * self._config.timeout_s
        while time.monotonic() < until and not self._stopping:
            with self._lock:
                if not any(peer.lost_ns and peer.stand_in.rank == rank for peer in self._peers.values()):
                    return
            time.sleep(0.02)

    def _welcome(self, peer: Peer) -> None:
        self._answer(peer.identity, wire.WELCOME, {})

    # ── who is gone ──────────────────────────────────────────────────────────────────────────────
    def _tick(self) -> None:
        """Housekeeping, a few times within the time that anybody may be silent."""
        now_ns = _monotonic_ns()
        if now_ns < self._tick_ns:
            return
        timeout_ns = int(self._config.timeout_s * 1e9)
        self._tick_ns = now_ns + min(timeout_ns // 20, int(_TICK_S * 1e9)) // 2
        with self._lock:
            due = now_ns - self._pinged_ns >= timeout_ns // 5
            for peer in self._order:
                peer.copy_out(now_ns)
                if peer.lost_ns or now_ns < self._door.unsettled_until_ns:
                    peer.probe()
                elif due:
                    peer.ping()
                if peer.lost_ns and now_ns - peer.lost_ns > timeout_ns * 2 // 5:
                    self._bury(peer)
            if due:
                self._pinged_ns = now_ns
                refused, self._refused = dict(self._refused), Counter()
            else:
                refused = {}
            gone = self._has_ended() or self._is_writer_gone()
            if gone and not self._peers and not self._seating:
                self._stopping = True
        if refused or self._stopping:
            self._report(refused)

    def _bury(self, peer: Peer) -> None:
        """Take a reader for dead, once zmq has let go of all that was under way to it: its blocks are free then."""
        peer.stand_in.forget()
        peer.forget()
        if peer.stand_in.on_loan:
            return
        self._remove(peer)
        text = (
            f"this reader was taken for dead: rank {peer.stand_in.rank} of queue {self._handle.name!r} was out of "
            f"reach for too long (RemoteConfig.timeout_s = {self._config.timeout_s}); attach again"
        )
        self._gone[peer.identity] = text
        while len(self._gone) > _STRANGERS:
            self._gone.popitem(last=False)
        peer.stand_in.die()

    def _remove(self, peer: Peer) -> None:
        del self._peers[peer.identity]
        self._order = tuple(self._peers.values())
