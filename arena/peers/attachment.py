"""The reader's side of attaching: its connection to the writer, and segments as they arrive."""

from __future__ import annotations

import errno
import os
import select
import socket
from pathlib import Path
from typing import Any, Final

from arena.errors import AttachRefused, CorruptFrame, HandleMismatch, PeerDied, QueueClosed, QueueTimeout
from arena.memory import Segment
from arena.peers.process import Process, credentials, peer_identity
from arena.peers.wire import Handle, close_all, receive, send, socket_address
from arena.probe import identity

_DYING_MS: Final = 200


class Attachment:
    """A reader's connection to its writer: liveness, and segments as they arrive."""

    def __init__(
        self, handle: Handle, rank: int, control: Segment, *, timeout_s: float | None, where: str = ""
    ) -> None:
        self._connection = self._connect(handle)
        self._segments: dict[int, tuple[int, int]] = {}
        try:
            self._check_owner(handle)
            self.process = Process.of_peer(self._connection, peer_identity(self._connection))
            own = identity()
            hello = {
                "magic": handle.magic,
                "version": handle.version,
                "instance": handle.instance,
                "secret": handle.secret,
                "rank": rank,
                "who": [own.pid, own.start_ticks, own.pid_namespace],
                "where": where,  # the reader's host and pid there, if this process only holds its seat
            }
            try:
                send(self._connection, hello, [control.fd])
            except OSError:
                pass  # the writer hung up; what it said, or that it died, is for the answer to tell
            self._take_answer(timeout_s)
        except BaseException:
            self.close()
            raise

    def segment(self, number: int) -> tuple[int, int] | None:
        """Size and fd of a segment handed over, until `drop_segment`. None if no such segment has arrived.

        The writer pushes before it publishes, so what a frame names is already in the socket. It is looked at there
        before it is taken, so that an interrupt in between loses nothing.
        """
        self._connection.setblocking(False)
        while number not in self._segments:
            try:
                message, fds = receive(self._connection, peek=True)
                if message is None:
                    return None
                self._keep([message.get("segment")], fds)
                close_all(receive(self._connection)[1])
            except (BlockingIOError, ConnectionResetError):
                return None
        return self._segments[number]

    def segments(self) -> list[int]:
        """The segments handed over with the answer that are not mapped yet."""
        return list(self._segments)

    def drop_segment(self, number: int) -> None:
        """Close the fd: the segment is mapped."""
        known = self._segments.pop(number, None)
        if known is not None:
            os.close(known[1])

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        if hasattr(self, "process"):
            self.process.close()
        close_all([fd for _, fd in self._segments.values()])
        self._segments.clear()

    def _connect(self, handle: Handle) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            address, directory_fd = socket_address(Path(handle.directory), "attach")
            try:
                connection.connect(address)
            finally:
                if directory_fd is not None:
                    os.close(directory_fd)
        except (FileNotFoundError, NotADirectoryError):
            connection.close()
            raise QueueClosed(
                f"the queue {handle.name!r} of this handle is gone",
                expected=f"its socket in {handle.directory}",
                found="nothing there",
                remedy="it was shut down, or this process sees another file system; create a queue and send its handle",
            ) from None
        except ConnectionRefusedError:
            connection.close()
            raise PeerDied(
                f"the writer of queue {handle.name!r} is dead",
                expected="a process that answers on its attach socket",
                found="a socket that nobody listens on",
                remedy="start the writer anew and send the new handle",
            ) from None
        except OSError as error:
            connection.close()
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise AttachRefused(
                f"can't reach the writer of queue {handle.name!r}",
                expected=f"its socket in {handle.directory}",
                found=error.strerror or str(error),
                remedy="run under the writer's uid, with the same run directory in sight",
            ) from error
        return connection

    def _check_owner(self, handle: Handle) -> None:
        """The secret is for nobody but the writer's user: whoever put a socket there in its stead must not get it."""
        uid = credentials(self._connection)[1]
        if uid != os.getuid():
            raise AttachRefused(
                f"somebody else answers for queue {handle.name!r}",
                expected=f"a process of uid {os.getuid()} on the socket in {handle.directory}",
                found=f"one of uid {uid}",
                remedy="run under the writer's uid; if you do, look at who may write to that directory",
            )

    def _take_answer(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if self.process.fd is not None:
            poll.register(self.process.fd, select.POLLIN)
        ready = dict(poll.poll(None if timeout_s is None else timeout_s * 1000))
        if not ready:
            raise QueueTimeout(
                "the writer's process did not answer the attach request",
                expected=f"an answer within {timeout_s} s",
                found="a process that is alive and silent (stopped, or holding the GIL in a long C call)",
                remedy="look at it with py-spy, or allow more time",
            )
        if self._connection.fileno() not in ready:
            raise self._writer_died()
        try:
            message, fds = receive(self._connection)
        except ConnectionResetError:
            message, fds = None, []
        if message is None and self._died_meanwhile():
            raise self._writer_died()
        if message is None:
            raise QueueClosed(
                "the writer hung up on the attach request",
                remedy="it is shutting down, or this process runs under another uid than the writer",
            )
        if "refused" in message:
            close_all(fds)
            kind = AttachRefused if message.get("kind") == "AttachRefused" else HandleMismatch
            raise kind(str(message["refused"]))
        self._keep(message.get("segments"), fds)

    def _keep(self, table: Any, fds: list[int]) -> None:
        good = isinstance(table, list) and len(table) == len(fds)
        good = good and all(
            isinstance(row, list) and len(row) == 2 and all(isinstance(n, int) for n in row) for row in table
        )
        if not good:
            close_all(fds)
            raise CorruptFrame("the writer's hand-over message is malformed", expected="one fd per segment")
        for (number, nbytes), fd in zip(table, fds, strict=True):
            if number in self._segments:
                os.close(fd)
            else:
                self._segments[number] = (nbytes, fd)

    def _died_meanwhile(self) -> bool:
        """Whether the hang-up was a death: a dying process closes its sockets a moment before its pidfd tells."""
        if self.process.fd is not None:
            poll = select.poll()
            poll.register(self.process.fd, select.POLLIN)
            poll.poll(_DYING_MS)
        return self.process.is_alive() is False

    def _writer_died(self) -> PeerDied:
        return PeerDied(
            "the writer died while this reader attached",
            pid=self.process.who.pid,
            signal=self.process.signal(),
            expected="an answer on its attach socket",
            remedy="start the writer anew and attach to its new queue",
        )
