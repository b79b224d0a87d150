"""How ranks come to a board: each makes a segment, hands it to all others by fd, and maps theirs.

Every rank listens on a socket, then everybody connects to everybody, then each takes what has come. The votes in
between do the waiting, so that nobody blocks.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

from arena import layout
from arena.device import Declined, Place
from arena.device.cpu.board import Board, Peer
from arena.errors import CommunicatorClosed, CorruptFrame
from arena.memory import Segment
from arena.peers import Process
from arena.peers.process import credentials, peer_identity
from arena.peers.wire import close_all, receive, send, socket_address

SLOT_BYTES: Final = 1 << 20  # both slots of both ranks stay in a core's cache; larger tensors take several steps
MAX_WORLD: Final = 8
_SAYING_HELLO_MS: Final = 2000


def meet(place: Place, slot_bytes: int = SLOT_BYTES) -> Generator[object, list[Any], Board]:
    """Make a segment, hand it to every other rank, and map theirs."""
    _check_place(place)
    own = _own_segment(place, slot_bytes)
    peers: list[Peer] = []
    try:
        with _Listener(place) as listener:
            answers = yield _boot_id(), listener.name
            if len({host for host, _ in answers}) > 1:
                raise Declined("not_intra_node", "the ranks run on several hosts")
            _send_to_all(place, own, [name for _, name in answers])
            yield "sent"
            peers += _take_from_all(place, listener.socket, own.nbytes)
            yield "mapped"
    except BaseException:
        for peer in peers:
            peer.process.close()
        raise
    finally:
        own.close()
    return Board(place.rank, own.mapping, sorted(peers, key=lambda peer: peer.rank))


def _check_place(place: Place) -> None:
    if not 2 <= place.world <= MAX_WORLD:
        raise Declined("world_size", f"shared memory is for 2 to {MAX_WORLD} ranks, and this group has {place.world}")
    if place.directory is None:
        raise Declined("setup_failed", "there is no run directory in which the ranks could meet")


def _own_segment(place: Place, slot_bytes: int) -> Segment:
    nbytes = layout.BOARD_SLOTS_OFFSET + layout.BOARD_SLOTS * slot_bytes
    segment = Segment.create(f"board-{place.rank}", nbytes)
    words = segment.mapping.raw_words(0, layout.BOARD_HEAD_WORDS)
    for index, value in enumerate(_head(place.rank, place.world, slot_bytes)):
        words[index] = value
    segment.mapping.populate(0, nbytes)  # no operation should pay for a page's first touch
    return segment


def _head(rank: int, world: int, slot_bytes: int) -> list[int]:
    return [layout.BOARD_MAGIC, layout.VERSION, rank, world, slot_bytes]


class _Listener:
    """A socket in the communicator's directory, for as long as the ranks meet; a name of its own for each meeting."""

    def __init__(self, place: Place) -> None:
        assert place.directory is not None
        self.name = f"meet-{place.rank}-{secrets.token_hex(4)}"
        self._path = place.directory / self.name
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address, directory_fd = socket_address(place.directory, self.name)
        try:
            self.socket.bind(address)
            os.chmod(self._path, 0o600)
            self.socket.listen(MAX_WORLD)
        except OSError:
            self.socket.close()
            raise
        finally:
            if directory_fd is not None:
                os.close(directory_fd)

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._path.unlink(missing_ok=True)


def _send_to_all(place: Place, own: Segment, names: list[str]) -> None:
    """Leave a copy of this rank's fd in each other rank's socket; it is read when all have done so."""
    assert place.directory is not None
    for rank in range(place.world):
        if rank == place.rank:
            continue
        address, directory_fd = socket_address(place.directory, names[rank])
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(address)
                send(connection, {"rank": place.rank}, [own.fd])
            except OSError as error:
                raise _unreachable(rank, error) from error
            finally:
                if directory_fd is not None:
                    os.close(directory_fd)


def _unreachable(rank: int, error: OSError) -> CommunicatorClosed:
    return CommunicatorClosed(
        f"rank {rank} can't be reached",
        expected="its socket in the communicator's directory",
        found=error.strerror or str(error),
        remedy="let all ranks see one run directory (ARENA_RUN_DIR), and look at what went wrong on that rank",
    )


def _take_from_all(place: Place, listener: socket.socket, nbytes: int) -> list[Peer]:
    peers: list[Peer] = []
    try:
        for _ in range(place.world - 1):
            if not select.select([listener], [], [], _SAYING_HELLO_MS / 1e3)[0]:
                raise Declined("setup_failed", "a rank said that it had sent its memory, and it is not here")
            peers.append(_take_one(place, listener, nbytes, {peer.rank for peer in peers}))
    except BaseException:
        for peer in peers:
            peer.process.close()
        raise
    return peers


def _take_one(place: Place, listener: socket.socket, nbytes: int, known: set[int]) -> Peer:
    connection, _ = listener.accept()
    with connection:
        uid = credentials(connection)[1]
        message, fds = receive(connection)
        rank = message.get("rank") if message is not None and uid == os.getuid() else None
        if type(rank) is not int or rank not in range(place.world) or rank in {*known, place.rank} or len(fds) != 1:
            close_all(fds)
            raise Declined("setup_failed", f"a stranger (uid {uid}) came to the meeting of the ranks")
        segment = Segment.attach(fds[0], nbytes)
        segment.close()
        head = segment.mapping.raw_words(0, layout.BOARD_HEAD_WORDS).tolist()
        expected = _head(rank, place.world, (nbytes - layout.BOARD_SLOTS_OFFSET) // layout.BOARD_SLOTS)
        if head != expected:
            raise CorruptFrame("a rank's segment is not a board", expected=str(expected), found=str(head))
        segment.mapping.populate(0, nbytes)
        return Peer(rank, segment.mapping, Process.of_peer(connection, peer_identity(connection)))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
