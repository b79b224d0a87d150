"""Memory that every peer can write to: one allocation at each rank, mapped by all the others.

The handles are CUDA's own for memory between processes. They need no process group and no socket, no multicast, and no
rendezvous that could hang; a rank's memory stays mapped at its peers if it is killed (tried on two H200s, 2026-11-30:
stores into it go on, and the context lives).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import suppress
from typing import Final

from arena.device import Declined, Place
from arena.device.cuda import driver

_GRANULE: Final = 2 << 20
_WORD: Final = 4
_LEAVING_S: Final = 0.5
ARMED_BYTE: Final = 0xFF
_ARMED: Final = 0xFFFFFFFF
_FAREWELL: Final = 0


class Inbox:
    """This rank's memory, and where its peers' is mapped.

    Attributes:
        address: this rank's own.
        peers: the others', in the order of ranks, without this one.
        farewell: the word beside it that any peer overwrites when it closes; after it, one word for each rank.
    """

    def __init__(self, rank: int, size_bytes: int) -> None:
        self._rank = rank
        self._farewell_offset = -(-size_bytes // _GRANULE) * _GRANULE
        self._size_bytes = self._farewell_offset + _GRANULE
        self.peers: tuple[int, ...] = ()
        self.address = driver.allocate(self._size_bytes)
        self._open = True

    @property
    def farewell(self) -> int:
        """Its address."""
        return self.address + self._farewell_offset

    def arm(self) -> None:
        """Fill it with the pattern that means nothing has arrived."""
        driver.fill(self.address, ARMED_BYTE, self._size_bytes)
        driver.synchronize()

    def close(self) -> None:
        """Say farewell to the peers, unmap their memory, and give back this rank's. None of its kernels may be running.

        Memory that a peer could still write to is left to it until this process ends: it would be somebody else's next.
        """
        if not self._open:
            return
        self._open = False
        for peer in self.peers:
            with suppress(driver.DriverError):
                driver.store_word(peer + self._farewell_offset, _FAREWELL)
                driver.store_word(peer + self._farewell_offset + _WORD * (1 + self._rank), _FAREWELL)
                driver.unmap_memory(peer)
        with suppress(driver.DriverError):
            if not self.peers or self._everybody_leaves():
                driver.free(self.address)

    def _everybody_leaves(self) -> bool:
        ends = time.monotonic() + _LEAVING_S
        while True:
            words = driver.read_words(self.farewell + _WORD, len(self.peers) + 1)
            if all(word != _ARMED for rank, word in enumerate(words) if rank != self._rank):
                return True
            if time.monotonic() > ends:
                return False
            time.sleep(0.001)


def exchange(place: Place, size_bytes: int) -> Generator[bytes, list[bytes], Inbox]:
    """Set up `size_bytes` at every rank.

    Raises:
        Declined: there is not enough memory, or a peer's can't be mapped.
    """
    try:
        inbox = Inbox(place.rank, size_bytes)
    except driver.DriverError as error:
        raise Declined("setup_failed", f"no {size_bytes} bytes for an inbox: {error}") from None
    try:
        inbox.arm()
        handles = yield driver.export_memory(inbox.address)
        for rank, handle in enumerate(handles):
            if rank != place.rank:
                inbox.peers += (_map(handle, rank),)
    except BaseException:
        inbox.close()
        raise
    return inbox


def _map(handle: bytes, rank: int) -> int:
    try:
        return driver.map_memory(handle)
    except driver.DriverError as error:
        raise Declined("no_peer_access", f"the memory of rank {rank} can't be mapped: {error}") from None
