"""The writer's side of attaching: a thread that answers, so that the writer's own need not."""

from __future__ import annotations

import contextlib
import hmac
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from arena import layout
from arena.errors import ArenaError, HandleMismatch, QueueClosed
from arena.held import HeldLock
from arena.memory import Mapping, Segment
from arena.peers.process import Process, credentials
from arena.peers.roster import Roster
from arena.peers.wire import MAGIC, PROTOCOL, Handle, close_all, receive, send, socket_address
from arena.probe import Identity

_HELLO_TIMEOUT_S: Final = 5.0
_BACKLOG: Final = 512
_PAUSE_S: Final = 0.02
_MAX_WHERE: Final = 128  # characters of host:pid
_WORD_MASK: Final = (1 << 64) - 1


_servers: weakref.WeakSet[AttachServer] = weakref.WeakSet()


class AttachServer:
    """Answers readers, from a daemon thread of the writer's process.

    `segments()` gives the segments to hand over, ring first, as (id, bytes, fd); it is called under `lock`, which
    the writer also holds while it adds one, so that a segment is either in the answer or pushed, never neither.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        handle: Handle,
        roster: Roster,
        segments: Callable[[], list[tuple[int, int, int]]],
        on_attach: weakref.WeakMethod[Callable[[], None]],
    ) -> None:
        self.lock = HeldLock()
        self._path = directory / name
        self._handle = handle
        self._roster = roster
        self._segments = segments
        self._on_attach = on_attach
        # Whatever takes a descriptor is taken here, where its want is an error: in the thread nobody would hear of it.
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            address, directory_fd = socket_address(directory, name)
            try:
                self._listener.bind(address)
                undo.callback(self._path.unlink, missing_ok=True)
                os.chmod(self._path, 0o600)
                self._listener.listen(_BACKLOG)
            finally:
                if directory_fd is not None:
                    os.close(directory_fd)
            self._listener.setblocking(False)
            self._wake_out, self._wake_in = socket.socketpair()
            undo.callback(self._wake_out.close)
            undo.callback(self._wake_in.close)
            self._selector = undo.enter_context(selectors.DefaultSelector())
            undo.pop_all()
        self._greeting: dict[socket.socket, float] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name=f"arena-attach:{handle.name}", daemon=True)
        _servers.add(self)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and remove the socket."""
        self._stopped = True  # for a writer that a garbage collection in the thread itself brings down
        self._wake_in.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)
        self.abandon()
        self._path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Close this process's ends; all a forked child does, so that a dead writer's socket refuses."""
        for sock in (self._listener, self._wake_in, self._wake_out, *self._greeting):
            sock.close()
        self._greeting.clear()

    def push(self, segment: int, nbytes: int, fd: int) -> bool:
        """Hand one new segment to every attached reader; False if one of them could not take it."""
        delivered = True
        for _, connection in self._roster.connections():
            try:
                send(connection, {"segment": [segment, nbytes]}, [fd], flags=socket.MSG_DONTWAIT)
            except (BrokenPipeError, ConnectionResetError):
                continue  # it is dead or leaving; liveness will say which
            except OSError:
                delivered = False
        return delivered

    # ── the thread ───────────────────────────────────────────────────────────────────────────────
    def _serve(self) -> None:
        with self._selector as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while not self._stopped:
                timeout_s = 1.0 if self._greeting else None
                for key, _ in selector.select(timeout_s):
                    if key.fileobj is self._wake_out:
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    else:
                        assert isinstance(key.fileobj, socket.socket)
                        self._greet(selector, key.fileobj)
                self._drop_silent(selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            time.sleep(_PAUSE_S)  # it hung up, or we are out of descriptors and would be asked again at once
            return
        if credentials(connection)[1] != os.getuid():
            connection.close()
            return
        self._greeting[connection] = time.monotonic() + _HELLO_TIMEOUT_S
        selector.register(connection, selectors.EVENT_READ)

    def _drop_silent(self, selector: selectors.BaseSelector) -> None:
        """A stranger who connects and says nothing must not cost a connection for ever."""
        for connection in [one for one, until in self._greeting.items() if until < time.monotonic()]:
            self._forget(selector, connection)
            connection.close()

    def _forget(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        self._greeting.pop(connection, None)

    def _greet(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        self._forget(selector, connection)
        try:
            self._answer(connection)
        except ArenaError as error:
            refusal = {"refused": str(error), "kind": type(error).__name__}
            try:
                send(connection, refusal, [], flags=socket.MSG_DONTWAIT)
            except OSError:
                pass
            connection.close()
        except Exception:  # whatever a stranger sends, the thread serves the next one
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        message, fds = receive(connection)
        if message is None:
            connection.close()
            return
        try:
            self._check_hello(message, fds)
            control = Segment.attach(fds.pop(0), self._handle.geometry.control_bytes)
        finally:
            close_all(fds)
        control.close()
        self._check_control(control.mapping, message["rank"])
        who = Identity(*message["who"])
        process = Process.of_peer(connection, who)
        with self.lock:  # from here on, either the answer or a push carries each segment
            try:
                self._roster.seat_reader(message["rank"], control.mapping, process, connection, message["where"])
            except ArenaError:
                process.close()
                raise
            on_attach = self._on_attach()
            if (
                on_attach is not None
            ):  # before the reader knows, so that the next message after its attach is one for it
                on_attach()
            segments = self._segments()
            table = [[number, nbytes] for number, nbytes, _ in segments]
            send(connection, {"segments": table}, [fd for _, _, fd in segments])

    def _check_hello(self, message: dict[str, Any], fds: list[int]) -> None:
        expected = (MAGIC, PROTOCOL, self._handle.instance)
        found = (message.get("magic"), message.get("version"), message.get("instance"))
        secret = message.get("secret")
        if found != expected or not isinstance(secret, str):
            raise HandleMismatch("the reader's handle is for another queue", expected=str(expected), found=str(found))
        if not hmac.compare_digest(secret.encode(errors="replace"), self._handle.secret.encode()):
            raise HandleMismatch(
                "the reader does not know this queue's secret",
                expected="the secret in the handle",
                found="another one",
                remedy="send the reader the handle that export_handle() gave",
            )
        who = message.get("who")
        shape = isinstance(who, list) and len(who) == 3 and all(type(one) is int and 0 <= one < 1 << 64 for one in who)
        rank, where = message.get("rank"), message.setdefault("where", "")
        shape = shape and isinstance(where, str) and len(where) <= _MAX_WHERE
        if not shape or not isinstance(rank, int) or isinstance(rank, bool) or len(fds) != 1:
            raise HandleMismatch("the reader's hello is malformed", expected="rank, identity and one control segment")

    def _check_control(self, control: Mapping, rank: int) -> None:
        words = control.raw_words(0, layout.IDENTITY_WORDS)
        geometry = self._handle.geometry
        expected = {
            layout.IDENTITY_MAGIC: layout.CONTROL_MAGIC,
            layout.IDENTITY_VERSION: layout.VERSION,
            layout.IDENTITY_RANK: rank & _WORD_MASK,
            layout.IDENTITY_SLOTS: geometry.slots,
            layout.IDENTITY_SLOT_BYTES: geometry.slot_bytes,
            layout.IDENTITY_HOLDS: geometry.max_holds,
        }
        found = {index: words[index] for index in expected}
        magic, version = found[layout.IDENTITY_MAGIC], found[layout.IDENTITY_VERSION]
        if magic == layout.CONTROL_MAGIC and version != layout.VERSION:
            raise HandleMismatch(
                f"the reader has another version of Arena than the writer of queue {self._handle.name!r}",
                expected=f"memory layout {layout.VERSION}",
                found=f"memory layout {version}",
                remedy="run the same Arena version in every process of the engine",
            )
        if found != expected:
            raise HandleMismatch(
                "the reader's control segment is not one of this queue's",
                expected=str(tuple(expected.values())),
                found=str(tuple(found.values())),
                remedy="give the reader the handle as export_handle() gave it",
            )
        if control.words(layout.LIVE_OFFSET, layout.READER_WORDS)[layout.READER_CLOSED]:
            raise QueueClosed("the reader has given up waiting for this answer")


def _abandon_inherited_sockets() -> None:
    for server in list(_servers):
        server.abandon()
        server._selector.close()
        for _, connection in [(s, s.connection) for s in server._roster.seats if s.connection is not None]:
            connection.close()


os.register_at_fork(after_in_child=_abandon_inherited_sockets)
