"""The shared memory of a communicator: each rank writes its own segment, and all read it.

Ranks go in *steps*. In a step each rank puts something into its slot, *arrives* by storing the step's number, waits
until all others have arrived, and reads their slots. Two slots are used in turn, and there is no barrier at the end of
a step: whoever has seen all others arrive at step n knows that they are done reading step n - 1, and so may write
step n + 1 into the slot of step n - 1. (The same credit that DeepSpeed's shared-memory all-reduce goes by.)

A rank that brings another tensor than the others is found by its *tag*: the first step of an operation carries one
word that says what was brought. A rank that dies, closes or gives up half-way is noticed by whoever waits for it.
"""

from __future__ import annotations

import torch

from arena import layout, memory
from arena.device.cpu.tag import Tag
from arena.errors import ArenaError, CommunicatorClosed, OperandMismatch, PeerDied
from arena.memory import Mapping
from arena.peers import Process
from arena.wait import Waiter

OPEN, CLOSED, BROKEN = 0, 1, 2


class Peer:
    """Another rank's segment, read-only, and its process."""

    __slots__ = ("arrived", "futex", "mapping", "process", "rank", "words")

    def __init__(self, rank: int, mapping: Mapping, process: Process) -> None:
        self.rank = rank
        self.mapping = mapping
        self.process = process
        self.words = mapping.words(layout.LIVE_OFFSET, layout.BOARD_WORDS)
        self.arrived = mapping.words(layout.LIVE_OFFSET + layout.ARRIVED * layout.WORD, 1)
        self.futex = mapping.futex(layout.LIVE_OFFSET + layout.ARRIVED * layout.WORD)


class Board:
    """All segments of a communicator, as one rank sees them. Not for two threads at once, but for `leave`.

    Attributes:
        step: the step this rank arrived at last.
        slot_bytes: the most that one step carries.
        users: how many paths use it; the last one that leaves closes it.
        lost: why there will be no further step.
    """

    def __init__(self, rank: int, own: Mapping, peers: list[Peer]) -> None:
        self.rank = rank
        self.world = len(peers) + 1
        self.step = 0
        self.users = 0
        self.closed = False
        self.lost: ArenaError | None = None
        self.waiter = Waiter(self.world)
        self._peers = peers
        self._words = own.words(layout.LIVE_OFFSET, layout.BOARD_WORDS)
        self._arrived = own.words(layout.LIVE_OFFSET + layout.ARRIVED * layout.WORD, 1)
        self._parked = own.words(layout.LIVE_OFFSET + layout.BOARD_PARKED * layout.WORD, 1)
        self._futex = own.futex(layout.LIVE_OFFSET + layout.ARRIVED * layout.WORD)
        mappings = {peer.rank: peer.mapping for peer in peers} | {rank: own}
        self._slots = [_slots_of(mappings[one]) for one in range(self.world)]
        self.slot_bytes = self._slots[0][0].nbytes

    def slots(self, step: int) -> list[torch.Tensor]:
        """Everybody's slot of a step, by rank, as bytes. Only this rank's own may be written to."""
        return [slots[step % layout.BOARD_SLOTS] for slots in self._slots]

    # ── a step ───────────────────────────────────────────────────────────────────────────────────
    def arrive(self, tag: Tag | None = None) -> None:
        """Let the others see this rank's slot of the next step, with a tag if the step is an operation's first.

        Raises:
            PeerDied, CommunicatorClosed: as at the first loss; see `wait`.
        """
        if self.lost is not None:
            self.check()
        step = self.step + 1
        if tag is not None:
            self._words[layout.TAGS + step % 2 * layout.LINE_WORDS] = tag.word
        self.step = step
        # SYNC POINT contribution-read (publish): the slots of the step before have been read before this store
        # SYNC POINT contribution-visible (publish): this rank's slot was written before this store
        self._arrived[0] = step
        memory.fence()  # or a peer could look for this step and go to sleep between our store and our look
        self._wake()

    def wait(self, tag: Tag | None = None) -> None:
        """Wait until all others have arrived at this step, and compare what they brought with `tag`.

        Raises:
            OperandMismatch: another rank brought something else. Every rank is told in the same step.
            PeerDied: a rank's process ended.
            CommunicatorClosed: a rank closed, or gave up.
        """
        floor = self.step - 1
        for peer in self._peers:
            # SYNC POINT contribution-visible (observe): what is read from a slot below was there when this was seen
            # SYNC POINT contribution-read (observe): so this rank's slot of the step before is free again
            if peer.arrived[0] <= floor:
                self._wait_for(peer, floor)
        if tag is not None:
            at = layout.TAGS + self.step % 2 * layout.LINE_WORDS
            for peer in self._peers:
                if peer.words[at] != tag.word:
                    raise self._mismatch(peer, tag, Tag(peer.words[at]))

    def _wait_for(self, peer: Peer, floor: int) -> None:
        if not self.waiter.spin(peer.arrived, floor):
            self.waiter.park(
                peer.arrived,
                floor,
                futex=peer.futex,
                parked=self._parked,
                code=peer.rank + 1,
                look=self._look,
                deadline_ns=None,  # busy is not dead: only a loss ends the wait
            )

    def _wake(self) -> None:
        code = self.rank + 1
        for peer in self._peers:
            if peer.words[layout.BOARD_PARKED] == code:
                self._futex.wake()  # all sleepers at once: they sleep on the same word
                return

    def check(self) -> None:
        """Raise the first loss, if there was one."""
        if self.lost is not None:
            raise self.lost.with_traceback(None)

    # ── losses ───────────────────────────────────────────────────────────────────────────────────
    def _look(self, now_ns: int) -> None:
        """Ask whether waiting still makes sense."""
        if self.lost is not None:  # from another thread
            raise self.lost
        for peer in self._peers:
            gone = peer.process.is_alive() is False
            state = peer.words[layout.BOARD_STATE]
            if (gone or state != OPEN) and peer.arrived[0] < self.step:
                raise self._lose(self._death() or _parting(peer, state))

    def _death(self) -> PeerDied | None:
        """A rank that died; it may have taken down the one that is waited for."""
        for peer in self._peers:
            if peer.process.is_alive() is False and peer.words[layout.BOARD_STATE] != CLOSED:
                return PeerDied(
                    f"rank {peer.rank} died before it took part in an operation",
                    rank=peer.rank,
                    pid=peer.process.who.pid,
                    signal=peer.process.signal(),
                    expected=f"rank {peer.rank} (pid {peer.process.who.pid}) at the same operation",
                    found=peer.process.ending(),
                    remedy="close this communicator and make another one over a new group",
                )
        return None

    def _lose(self, error: ArenaError) -> ArenaError:
        self.lost = error
        self._part(BROKEN)
        return error

    def give_up(self, error: BaseException) -> None:
        """This rank leaves an operation half-way: nobody will find it at the next step. Ends the board for all."""
        if self.lost is None:
            self._lose(
                CommunicatorClosed(
                    "an earlier operation was left half-way",
                    found=f"{type(error).__name__}: {error}",
                    remedy="close this communicator and make another one",
                )
            )

    def leave(self) -> None:
        """One user less; the last one closes the board, from any thread."""
        self.users -= 1
        if self.users > 0 or self.closed:
            return
        self.closed = True
        if self.lost is None:
            self.lost = _closed_here()
        self._part(CLOSED)
        for peer in self._peers:
            peer.process.close()

    def _part(self, state: int) -> None:
        if self._words[layout.BOARD_STATE] == OPEN:
            self._words[layout.BOARD_STATE] = state
        memory.fence()
        self._wake()

    def _mismatch(self, peer: Peer, mine: Tag, theirs: Tag) -> OperandMismatch:
        return OperandMismatch(
            f"rank {peer.rank} and rank {self.rank} brought different tensors to one operation",
            expected=f"{mine} as on rank {self.rank}",
            found=f"{theirs} on rank {peer.rank}",
            remedy="call the same operations on every rank in the same order, with the same shapes and dtypes",
        )


def _slots_of(mapping: Mapping) -> list[torch.Tensor]:
    first, nbytes = layout.BOARD_SLOTS_OFFSET, (mapping.nbytes - layout.BOARD_SLOTS_OFFSET) // layout.BOARD_SLOTS
    views = [mapping.exported(first + number * nbytes, nbytes)[0] for number in range(layout.BOARD_SLOTS)]
    return [torch.frombuffer(view, dtype=torch.uint8) for view in views]


def _closed_here() -> CommunicatorClosed:
    return CommunicatorClosed(
        "this communicator is closed", expected="a call before close()", remedy="make another communicator"
    )


def _parting(peer: Peer, state: int) -> CommunicatorClosed:
    what = "closed its communicator" if state == CLOSED else "gave up an operation half-way"
    return CommunicatorClosed(
        f"rank {peer.rank} {what}",
        expected=f"rank {peer.rank} (pid {peer.process.who.pid}) at the same operation",
        found="a rank that will not come any more",
        remedy="close this communicator; make another one if all ranks are to go on",
    )
