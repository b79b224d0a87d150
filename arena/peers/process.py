"""A peer's process: alive or not, and what ended it."""

from __future__ import annotations

import fcntl
import os
import select
import signal as _signal
import socket
import struct
from pathlib import Path
from typing import Final

from arena.probe import Identity, identity, is_alive

_SO_PEERPIDFD: Final = 77
_PIDFD_INFO_EXIT: Final = 1 << 3


class Process:
    """A peer's process, watched through a pidfd where there is one."""

    __slots__ = ("_fd", "_poll", "_seen_dead", "_status", "who")

    def __init__(self, who: Identity, fd: int | None) -> None:
        self.who = who
        self._fd = fd
        self._seen_dead = False
        self._status: int | None = None  # how it ended, once the pidfd is given back
        self._poll = select.poll()
        if fd is not None:
            self._poll.register(fd, select.POLLIN)

    @classmethod
    def of_peer(cls, connection: socket.socket, who: Identity) -> Process:
        """The process at the other end of a unix socket."""
        return cls(who, _peer_pidfd(connection, who))

    @property
    def fd(self) -> int | None:
        """The pidfd, readable once the process has ended."""
        return self._fd

    def is_alive(self) -> bool | None:
        """Whether it lives; None where nothing here can tell (another pid namespace, old kernel)."""
        if self._seen_dead:
            return False
        if self._fd is not None:
            try:
                self._seen_dead = bool(self._poll.poll(0))
            except RuntimeError:  # another thread is asking this very moment; the next look will tell
                return True
            return not self._seen_dead
        alive = is_alive(self.who)
        self._seen_dead = alive is False
        return alive

    def signal(self) -> int | None:
        """The signal that ended it; None where there was none, or the kernel can't tell: see `ending`."""
        status = self._wait_status()
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    def ending(self) -> str:
        """How it ended, in words. Reaped already and a kernel before Linux 6.15: nobody can tell any more."""
        status = self._wait_status()
        if status is None:
            return "an unknown cause"
        if os.WIFSIGNALED(status):
            return _signal_name(os.WTERMSIG(status))
        return f"it exited with status {os.WEXITSTATUS(status)} and without shutdown()"

    def halted_by(self) -> str:
        """What keeps it from running at all, in words; empty where nothing does, or nobody here can tell."""
        state = _stat(self.who)[:1]
        return "a signal" if state == [b"T"] else "a debugger" if state == [b"t"] else ""

    def close(self) -> None:
        """Give the pidfd back."""
        if self._seen_dead:
            self._status = self._wait_status()
        fd, self._fd = self._fd, None
        if fd is not None:
            self._poll.unregister(fd)
            os.close(fd)

    def _wait_status(self) -> int | None:
        """As wait(2) gives it."""
        fd = self._fd
        if fd is None:
            return self._status
        try:
            ended = os.waitid(os.P_PIDFD, fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:  # not a child of ours; its parent may reap it between two looks, so look once more
            for status in (_status_from_kernel(fd), _status_of_zombie(self.who), _status_from_kernel(fd)):
                if status is not None:
                    return status
            return None
        if ended is None:
            return None
        return ended.si_status << 8 if ended.si_code == os.CLD_EXITED else ended.si_status


def _peer_pidfd(connection: socket.socket, who: Identity) -> int | None:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    except OSError:
        pass
    pid, _, _ = credentials(connection)
    if pid <= 0:
        return None
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # Between connecting and opening, the pid could have passed to another process.
    if is_alive(Identity(pid, who.start_ticks, identity().pid_namespace)) is False and who.pid == pid:
        os.close(fd)
        return None
    return fd


def _status_from_kernel(fd: int) -> int | None:
    """The exit status that Linux 6.15 and later tells anybody who holds a pidfd (PIDFD_GET_INFO)."""
    size = 64
    info = bytearray(struct.pack("=Q", _PIDFD_INFO_EXIT).ljust(size, b"\0"))
    request = (3 << 30) | (size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
    try:
        fcntl.ioctl(fd, request, info)
    except OSError:
        return None
    mask = struct.unpack_from("=Q", info, 0)[0]
    if not mask & _PIDFD_INFO_EXIT:
        return None
    return int(struct.unpack_from("=i", info, 60)[0])


def _status_of_zombie(who: Identity) -> int | None:
    """The same from /proc, which tells it until the process is reaped."""
    fields = _stat(who)
    return int(fields[49]) if fields and fields[0] in (b"Z", b"X") else None


def _stat(who: Identity) -> list[bytes]:
    """What /proc tells of it, from its state on; nothing where it is gone or belongs to another pid namespace."""
    if who.pid_namespace != identity().pid_namespace:
        return []
    try:
        fields = Path(f"/proc/{who.pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
    return fields if int(fields[19]) == who.start_ticks else []


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Pid, uid and gid of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("iII", raw)
    return pid, uid, gid


def _signal_name(number: int) -> str:
    try:
        return _signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def peer_identity(connection: socket.socket) -> Identity:
    """The process at the other end, as far as this pid namespace knows it."""
    pid = credentials(connection)[0]
    try:
        return identity(pid)
    except ProcessLookupError:
        return Identity(pid, 0, 0)
