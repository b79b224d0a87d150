"""Who is attached, alive, gone: the roster, the attach hand-shake, and memory handed over by fd.

*Attach* needs nobody's attention: a daemon thread of the writer's process answers on a unix socket in the
queue's directory, so a reader may come while the writer's own thread is loading a model. Engines create
readers long before the writer looks at them, in any order, by fork and by spawn.

*Hand-over.* The connection stays open, and the writer pushes the fd of each new segment through it before it
publishes the first frame that names the segment. What is in the socket outlives the writer, so nothing
published ever depends on the writer living on.

*Liveness* is a pidfd, taken from the socket itself (SO_PEERPIDFD) where the kernel has that, so that no pid
can have been reused in between. File locks would not do: a forked child of the peer keeps them held.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import select
import selectors
import signal as _signal
import socket
import struct
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from arena import layout
from arena.errors import ArenaError, AttachRefused, CorruptFrame, HandleMismatch, PeerDied, QueueClosed, QueueTimeout
from arena.layout import Geometry
from arena.memory import Futex, Mapping, Segment, Words, ordered_words
from arena.probe import Identity, identity, is_alive
from arena.state import Peer, move

PROTOCOL: Final = 1
MAGIC: Final = "arena-queue"
MAX_SEGMENTS: Final = 128
_MAX_HELLO_BYTES: Final = 1 << 16
_HELLO_TIMEOUT_S: Final = 5.0
_SO_PEERPIDFD: Final = 77
_PIDFD_INFO_EXIT: Final = 1 << 3
_BACKLOG: Final = 512
_DYING_MS: Final = 200
_WORD_MASK: Final = (1 << 64) - 1


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
    probes: bool

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


# ── processes ────────────────────────────────────────────────────────────────────────────────────
class Process:
    """A peer's process, watched through a pidfd where there is one."""

    __slots__ = ("_fd", "_poll", "_seen_dead", "_signal", "who")

    def __init__(self, who: Identity, fd: int | None) -> None:
        self.who = who
        self._fd = fd
        self._seen_dead = False
        self._signal: int | None = None  # what ended it, once the pidfd is given back
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
        """The signal that ended it; None where the kernel can't tell: reaped already, before Linux 6.15."""
        if self._fd is None:
            return self._signal
        try:
            status = os.waitid(os.P_PIDFD, self._fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except OSError:  # not a child of ours
            # Its parent may reap it between the two looks, so look once more.
            fd = self._fd
            return _signal_from_kernel(fd) or _signal_of_zombie(self.who) or _signal_from_kernel(fd)
        if status is None or status.si_code not in (os.CLD_KILLED, os.CLD_DUMPED):
            return None
        return status.si_status

    def close(self) -> None:
        """Give the pidfd back."""
        if self._seen_dead:
            self._signal = self.signal()
        fd, self._fd = self._fd, None
        if fd is not None:
            self._poll.unregister(fd)
            os.close(fd)


def _peer_pidfd(connection: socket.socket, who: Identity) -> int | None:
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return int(struct.unpack("i", raw)[0])
    except OSError:
        pass
    pid, _, _ = _credentials(connection)
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


def _signal_from_kernel(fd: int) -> int | None:
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
    status = struct.unpack_from("=i", info, 60)[0]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def _signal_of_zombie(who: Identity) -> int | None:
    """The same from /proc, which tells it until the process is reaped."""
    if who.pid_namespace != identity().pid_namespace:
        return None
    try:
        fields = Path(f"/proc/{who.pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    state, start_ticks, status = fields[0], int(fields[19]), int(fields[49])
    if state not in (b"Z", b"X") or start_ticks != who.start_ticks:
        return None
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("iII", raw)
    return pid, uid, gid


def signal_name(number: int | None) -> str:
    """`SIGKILL` for 9; words for what is not known."""
    if number is None:
        return "an unknown cause"
    try:
        return _signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ── the roster ───────────────────────────────────────────────────────────────────────────────────
class Seat:
    """One incarnation of one rank, as the writer sees it.

    Until the reader attaches, its words are zeros of our own: it counts, and has consumed nothing.
    """

    __slots__ = ("connection", "first", "futex", "pid", "process", "rank", "released", "returned", "state", "words")

    def __init__(self, rank: int, state: Peer, geometry: Geometry) -> None:
        self.rank = rank
        self.state = state
        self.first = 0
        self.pid: int | None = None
        self.process: Process | None = None
        self.connection: socket.socket | None = None
        absent = memoryview(array("Q", bytes(layout.READER_WORDS * layout.WORD)))
        self.words: Words = ordered_words(absent)
        self.futex: Futex | None = None
        self.released: Words = memoryview(array("Q", bytes(geometry.slots * layout.WORD)))
        self.returned: Words = memoryview(array("Q", bytes(geometry.max_holds * layout.WORD)))

    @property
    def consumed(self) -> int:
        """Frames released, counting those from before a joiner's time."""
        # SYNC POINT slot-reusable (observe): what the reader did with the slot came before its store
        return max(self.words[layout.CONSUMED], self.first)

    def describe(self) -> str:
        """`reader 2 (pid 4711)`, or that nobody came."""
        if self.pid is None:
            return f"reader {self.rank} (not attached yet)"
        return f"reader {self.rank} (pid {self.pid})"


class Roster:
    """All seats, and the rules by which they change. Two threads of the writer's process change it, under `lock`."""

    def __init__(self, n_reader: int, ring: Mapping, geometry: Geometry) -> None:
        self.lock = threading.Lock()
        self.geometry = geometry
        self._ranks = ring.words(layout.RANKS_OFFSET, layout.MAX_READERS)
        self._live = ring.words(layout.LIVE_OFFSET, layout.WRITER_WORDS)
        self.seats = [Seat(rank, Peer.EXPECTED, geometry) for rank in range(n_reader)]
        self.counted: list[Seat] = list(self.seats)
        self.words: list[Words] = [seat.words for seat in self.seats]
        self.departed: list[Seat] = []  # left, but may still hold blocks
        self.deaths: list[Seat] = []  # not reported yet
        self.changed = False  # something for the writer's thread to see to
        self.news: list[tuple[str, Seat]] = []
        self.everyone_came = threading.Event()

    # ── the attach thread's part ─────────────────────────────────────────────────────────────────
    def seat_reader(self, rank: int, control: Mapping, process: Process, connection: socket.socket) -> Seat:
        """Give a rank to a reader that has shown the secret.

        Raises:
            AttachRefused: the rank does not exist, or somebody alive has it.
        """
        with self.lock:
            if not 0 <= rank < len(self.seats):
                raise AttachRefused(
                    f"there is no rank {rank} in this queue",
                    expected=f"a rank from 0 to {len(self.seats) - 1}",
                    found=str(rank),
                    remedy="create the queue with a larger n_reader, or correct the rank",
                )
            self._reap()
            seat = self.seats[rank]
            if seat.state in (Peer.ATTACHED, Peer.JOINING):
                raise AttachRefused(
                    f"rank {rank} is taken",
                    expected="one process per rank",
                    found=f"{seat.describe()} attached as {rank} and alive",
                    remedy="give each worker its own rank, or end that process first",
                )
            if seat.state is not Peer.EXPECTED:
                seat = self.seats[rank] = Seat(rank, seat.state, self.geometry)
                self._ranks[rank] = layout.NOT_ADMITTED
            seat.state = move(seat.state, "attach")
            self._fill(seat, control, process, connection)
            self.news.append(("attach", seat))
            self._recount()
            if all(one.state is not Peer.EXPECTED for one in self.seats):
                self._live[layout.READY] = 1
                self.everyone_came.set()
            return seat

    def _fill(self, seat: Seat, control: Mapping, process: Process, connection: socket.socket) -> None:
        seat.pid = process.who.pid
        seat.process = process
        seat.connection = connection
        seat.words = control.words(layout.LIVE_OFFSET, layout.READER_WORDS)
        seat.released = control.raw_words(layout.RELEASED_OFFSET, self.geometry.slots)
        seat.returned = control.words(self.geometry.returned_offset, self.geometry.max_holds)
        seat.futex = control.futex(layout.LIVE_OFFSET + layout.CONSUMED * layout.WORD)

    # ── the writer's part ────────────────────────────────────────────────────────────────────────
    def admit(self, sequence: int) -> None:
        """Between two messages: readers that joined take part from `sequence` on."""
        with self.lock:
            for seat in self.seats:
                if seat.state is Peer.JOINING:
                    seat.first = sequence
                    self._ranks[seat.rank] = sequence
                    seat.state = move(seat.state, "admit")
            self._recount()
            self.changed = False

    def reap(self) -> bool:
        """Notice who left or died; True if anybody did."""
        with self.lock:
            return self._reap()

    def take_death(self) -> Seat:
        """The first death not reported yet."""
        with self.lock:
            return self.deaths.pop(0)

    def take_news(self) -> list[tuple[str, Seat]]:
        """Arrivals and departures since the last call, for the event ring."""
        with self.lock:
            news, self.news = self.news, []
            return news

    def missing(self) -> list[int]:
        """Ranks that have not attached."""
        with self.lock:
            return [seat.rank for seat in self.seats if seat.state is Peer.EXPECTED]

    def connections(self) -> list[tuple[Seat, socket.socket]]:
        """The open connections of readers that may need new segments."""
        with self.lock:
            return [(seat, seat.connection) for seat in self.seats if seat.connection is not None]

    def close(self) -> None:
        """Drop every connection and pidfd."""
        with self.lock:
            for seat in [*self.seats, *self.departed]:
                self._hang_up(seat)
                if seat.process is not None:
                    seat.process.close()

    def let_go(self, owing: set[Seat]) -> None:
        """Forget who left, once they owe no block; until then their death gives the block back."""
        with self.lock:
            for seat in self.departed:
                if seat not in owing and seat.process is not None:
                    seat.process.close()
            self.departed = [seat for seat in self.departed if seat in owing]

    def _reap(self) -> bool:
        found = False
        for seat in self.seats:
            if seat.state in (Peer.ATTACHED, Peer.JOINING) and seat.process is not None:
                if seat.words[layout.READER_CLOSED]:
                    seat.state = move(seat.state, "leave")
                    self.departed.append(seat)
                elif seat.process.is_alive() is False:
                    seat.state = move(seat.state, "die")
                    self.deaths.append(seat)
                    seat.process.close()
                else:
                    continue
                self.news.append(("leave" if seat.state is Peer.LEFT else "death", seat))
                self._hang_up(seat)
                found = True
        if found:
            self._recount()
        return found

    def _hang_up(self, seat: Seat) -> None:
        connection, seat.connection = seat.connection, None
        if connection is not None:
            connection.close()

    def _recount(self) -> None:
        self.counted = [seat for seat in self.seats if seat.state in (Peer.EXPECTED, Peer.ATTACHED)]
        self.words = [seat.words for seat in self.counted]
        self.changed = True


# ── messages on the socket ───────────────────────────────────────────────────────────────────────
def _send(connection: socket.socket, message: dict[str, Any], fds: list[int], *, flags: int = 0) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    connection.sendmsg([json.dumps(message).encode()], rights, flags | socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One message and its fds; None at the end of the stream.

    Raises:
        HandleMismatch: the peer speaks something else.
    """
    data, fds, flags, _ = socket.recv_fds(connection, _MAX_HELLO_BYTES, MAX_SEGMENTS + 2, socket.MSG_CMSG_CLOEXEC)
    if not data:
        _close_all(fds)
        return None, []
    try:
        message = json.loads(data)
        if not isinstance(message, dict) or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ValueError("not an object, or cut short")
    except ValueError as error:
        _close_all(fds)
        raise HandleMismatch(
            "the other end of the attach socket does not speak Arena's hand-shake", found=str(error)
        ) from error
    return message, fds


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _socket_address(directory: Path, name: str) -> tuple[str, int | None]:
    """The socket's path, through a directory fd where it is too long for a socket address (107 bytes)."""
    path = str(directory / name)
    if len(os.fsencode(path)) <= 107:
        return path, None
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{fd}/{name}", fd


# ── the writer's side of attaching ───────────────────────────────────────────────────────────────
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
        on_attach: Callable[[], None],
    ) -> None:
        self.lock = threading.Lock()
        self._path = directory / name
        self._handle = handle
        self._roster = roster
        self._segments = segments
        self._on_attach = on_attach
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address, directory_fd = _socket_address(directory, name)
        try:
            self._listener.bind(address)
            os.chmod(self._path, 0o600)
            self._listener.listen(_BACKLOG)
        finally:
            if directory_fd is not None:
                os.close(directory_fd)
        self._listener.setblocking(False)
        self._wake_out, self._wake_in = socket.socketpair()
        self._greeting: dict[socket.socket, float] = {}
        self._thread = threading.Thread(target=self._serve, name=f"arena-attach:{handle.name}", daemon=True)
        _servers.add(self)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and remove the socket."""
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
                _send(connection, {"segment": [segment, nbytes]}, [fd], flags=socket.MSG_DONTWAIT)
            except (BrokenPipeError, ConnectionResetError):
                continue  # it is dead or leaving; liveness will say which
            except OSError:
                delivered = False
        return delivered

    # ── the thread ───────────────────────────────────────────────────────────────────────────────
    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while True:
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
            return
        if _credentials(connection)[1] != os.getuid():
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
                _send(connection, refusal, [], flags=socket.MSG_DONTWAIT)
            except OSError:
                pass
            connection.close()
        except Exception:  # whatever a stranger sends, the thread serves the next one
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        message, fds = _receive(connection)
        if message is None:
            connection.close()
            return
        try:
            self._check_hello(message, fds)
            control = Segment.attach(fds.pop(0), self._handle.geometry.control_bytes)
        finally:
            _close_all(fds)
        control.close()
        self._check_control(control.mapping, message["rank"])
        who = Identity(*message["who"])
        process = Process.of_peer(connection, who)
        with self.lock:  # from here on, either the answer or a push carries each segment
            try:
                self._roster.seat_reader(message["rank"], control.mapping, process, connection)
            except ArenaError:
                process.close()
                raise
            segments = self._segments()
            table = [[number, nbytes] for number, nbytes, _ in segments]
            _send(connection, {"segments": table}, [fd for _, _, fd in segments])
        self._on_attach()

    def _check_hello(self, message: dict[str, Any], fds: list[int]) -> None:
        expected = (MAGIC, PROTOCOL, self._handle.instance)
        found = (message.get("magic"), message.get("version"), message.get("instance"))
        secret = message.get("secret")
        if found != expected or not isinstance(secret, str):
            raise HandleMismatch("the reader's handle is for another queue", expected=str(expected), found=str(found))
        if not hmac.compare_digest(secret.encode(), self._handle.secret.encode()):
            raise HandleMismatch(
                "the reader does not know this queue's secret",
                expected="the secret in the handle",
                found="another one",
                remedy="send the reader the handle that export_handle() gave",
            )
        who = message.get("who")
        shape = isinstance(who, list) and len(who) == 3 and all(isinstance(one, int) for one in who)
        rank = message.get("rank")
        if not shape or not isinstance(rank, int) or isinstance(rank, bool) or len(fds) != 1:
            raise HandleMismatch("the reader's hello is malformed", expected="rank, identity and one control segment")

    def _check_control(self, control: Mapping, rank: int) -> None:
        words = control.raw_words(0, layout.IDENTITY_WORDS)
        found = (words[layout.IDENTITY_MAGIC], words[layout.IDENTITY_VERSION], words[layout.IDENTITY_RANK])
        if found != (layout.CONTROL_MAGIC, layout.VERSION, rank & _WORD_MASK):
            raise HandleMismatch("the reader's control segment is not one", found=str(found))
        if control.words(layout.LIVE_OFFSET, layout.READER_WORDS)[layout.READER_CLOSED]:
            raise QueueClosed("the reader has given up waiting for this answer")


def _abandon_inherited_sockets() -> None:
    for server in list(_servers):
        server.abandon()
        for _, connection in [(s, s.connection) for s in server._roster.seats if s.connection is not None]:
            connection.close()


os.register_at_fork(after_in_child=_abandon_inherited_sockets)


# ── the reader's side ────────────────────────────────────────────────────────────────────────────
class Attachment:
    """A reader's connection to its writer: liveness, and segments as they arrive."""

    def __init__(self, handle: Handle, rank: int, control: Segment, *, timeout_s: float | None) -> None:
        self._connection = self._connect(handle)
        self._segments: dict[int, tuple[int, int]] = {}
        try:
            self.process = Process.of_peer(self._connection, _peer_identity(self._connection))
            own = identity()
            hello = {
                "magic": handle.magic,
                "version": handle.version,
                "instance": handle.instance,
                "secret": handle.secret,
                "rank": rank,
                "who": [own.pid, own.start_ticks, own.pid_namespace],
            }
            try:
                _send(self._connection, hello, [control.fd])
            except OSError:
                pass  # the writer hung up; what it said, or that it died, is for the answer to tell
            self._take_answer(timeout_s)
        except BaseException:
            self.close()
            raise

    def take_segment(self, number: int) -> tuple[int, int] | None:
        """Size and fd of a segment handed over; the caller owns the fd. None if no such segment has arrived.

        The writer pushes before it publishes, so what a frame names is already in the socket.
        """
        while number not in self._segments:
            self._connection.setblocking(False)
            try:
                message, fds = _receive(self._connection)
            except (BlockingIOError, ConnectionResetError):
                return None
            if message is None:
                return None
            self._keep([message.get("segment")], fds)
        return self._segments.pop(number)

    def close(self) -> None:
        """Hang up."""
        self._connection.close()
        if hasattr(self, "process"):
            self.process.close()
        _close_all([fd for _, fd in self._segments.values()])
        self._segments.clear()

    def _connect(self, handle: Handle) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            address, directory_fd = _socket_address(Path(handle.directory), "attach")
            try:
                connection.connect(address)
            finally:
                if directory_fd is not None:
                    os.close(directory_fd)
        except FileNotFoundError:
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
        except OSError:
            connection.close()
            raise
        return connection

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
            message, fds = _receive(self._connection)
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
            kind = AttachRefused if message.get("kind") == "AttachRefused" else HandleMismatch
            raise kind(str(message["refused"]))
        self._keep(message.get("segments"), fds)

    def _keep(self, table: Any, fds: list[int]) -> None:
        good = isinstance(table, list) and len(table) == len(fds)
        good = good and all(
            isinstance(row, list) and len(row) == 2 and all(isinstance(n, int) for n in row) for row in table
        )
        if not good:
            _close_all(fds)
            raise CorruptFrame("the writer's hand-over message is malformed", expected="one fd per segment")
        for (number, nbytes), fd in zip(table, fds, strict=True):
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


def _peer_identity(connection: socket.socket) -> Identity:
    pid = _credentials(connection)[0]
    try:
        return identity(pid)
    except ProcessLookupError:
        return Identity(pid, 0, 0)
