"""What a reader borrows from the tensor arena, and how it gives it back.

A hold is given back when the last view of its bytes dies, and only if the frame that brought it has been released by
then. If it has not, an interrupt struck: the frame will be taken again, and with it the hold. So there is one moment,
the store to `consumed`, from which on a message's holds are in its reader's hands; no interrupt can tear that.

The callback runs anywhere: in the garbage collector, in another thread, inside the endpoint's lock. So it is one look
and one aligned store, and the writer looks for it when it next needs room. An interrupt within it is lost, and with it
the store (Python reports what a callback raises, and goes on); `sweep` makes up for that. It may come by in another
thread while the callback is under way, and two that store would be one too many: by the time of the second, the hold's
number may be another hold's. So whoever gives a lease back *claims* it, in one step; only an interrupt drops a claim.

A hold whose bytes a device may still read has a *gate*, and goes back by way of it (`arena.gate`): if need be on
*tickets*, which the device writes by itself (`arena.tickets`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from arena import memory
from arena.device import copies_in_use
from arena.errors import CorruptFrame
from arena.held import HeldLock
from arena.memory import Mapping, Segment, Words
from arena.tickets import Tickets, give_back

if TYPE_CHECKING:
    import torch

    from arena.device import Copies, Stream
    from arena.device_log import DeviceLog
    from arena.gate import Gate
    from arena.pin import Pins


_NEVER: Final = 1 << 64  # as sequence of a frame: no reader has released it

ALIGN_SLACK_BYTES: Final = 16
"""In front of a tensor in its hold there may be fewer bytes than this (`arena.codec`)."""


class Borrower:
    """A reader's end of the arena: maps segments as frames name them, and gives holds back."""

    def __init__(  # noqa: PLR0913 - what a reader has
        self,
        segment: Callable[[int], tuple[int, int] | None],
        drop_segment: Callable[[int], None],
        consumed: Words,
        returned: Words,
        max_holds: int,
        *,
        views: str,
        pin: str = "auto",
        log: DeviceLog | None = None,
        tickets: Tickets | None = None,
    ) -> None:
        self._segment = segment
        self._drop_segment = drop_segment
        self._returned = returned
        self.log = log
        self._home = _Home(consumed, returned, self, pin, tickets)
        self._max_holds = max_holds
        self._views = views
        self._mappings: dict[int, Mapping] = {}

    def borrow(self, words: tuple[int, int, int, int, int], sequence: int) -> memoryview:
        """The bytes of a hold that came with frame `sequence`, writable; see the head of this file.

        Raises:
            CorruptFrame: the hold names memory that does not exist.
        """
        number, offset, nbytes, hold, generation = words
        self._check_hold(hold, generation)
        view, owner = self._mapping(number).exported(offset, nbytes)
        lease = Lease(owner, _give_back)
        home = self._home
        lease.home = home
        lease.sequence = sequence
        lease.words = words
        lease.gate = None
        lease.claim = {}
        lease.epoch = memory.fork_epoch()
        _leases[id(lease)] = lease
        if home.pins is not None:  # looked at with the lease in its place: see `use`
            _remember_stream(lease)
        return view

    def use(self, copies: Copies) -> None:
        """This process uses a device: from now on segments are pinned, and whatever is borrowed has a gate.

        What was borrowed before may be read by anything: nobody knows what its users queued, or will queue once its
        segment is pinned. Such a lease is in its place by now, or its `borrow` sees the pins.
        """
        pins = self._home.use(copies)
        for lease in list(_leases.values()):
            if getattr(lease, "home", None) is self._home and lease.epoch == memory.fork_epoch():
                owner = lease()  # lives while we are at it
                if owner is not None:
                    gate_of(lease).remember_everything(copies)
        for number, mapping in list(self._mappings.items()):
            pins.want(number, mapping)

    def leases(self, sequence: int) -> dict[tuple[int, int, int, int, int], Lease]:
        """What was borrowed with a frame that is being taken, by the holds."""
        found = [lease for lease in list(_leases.values()) if getattr(lease, "home", None) is self._home]
        return {lease.words: lease for lease in found if lease.sequence == sequence}

    def remember(self, leases: Iterable[Lease], copies: Copies, stream: Stream) -> None:
        """All that is queued on this stream when their views die has to pass before these go back."""
        for lease in leases:
            gate_of(lease).remember(copies, stream)

    def void(self, sequence: int) -> None:
        """A frame was not taken after all: what was borrowed with it gives nothing back, whenever its views die."""
        for lease in self.leases(sequence).values():
            lease.sequence = _NEVER

    def see_to_device(self) -> None:
        """Begin to pin if this process has begun to use a device. Asked now and then, off the way of a message."""
        if self._home.pins is None and self._home.policy != "off":
            copies = copies_in_use()
            if copies is not None:
                self.use(copies)

    def prepare(self, copies: Copies) -> None:
        """What is dequeued next is copied to this device: its tickets should be ready by then."""
        if self._home.tickets is not None:
            self._home.tickets.prepare(copies)

    @property
    def pins(self) -> Pins | None:
        """The segments as the device sees them; None while this process uses none."""
        return self._home.pins

    @property
    def lends(self) -> bool:
        """Whether anything that was borrowed is still in use."""
        leases = list(_leases.values())
        return any(getattr(one, "home", None) is self._home and one() is not None for one in leases)

    def prefault(self, numbers: list[int]) -> None:
        """Map these segments now, with all their pages, rather than when a frame first names them."""
        for number in numbers:
            mapping = self._mapping(number)
            mapping.populate(0, mapping.nbytes)

    def sweep(self) -> None:
        """Give back what died while an interrupt kept the callback from doing it."""
        for lease in list(_leases.values()):
            if getattr(lease, "home", None) is self._home and lease() is None:
                _give_back(lease)

    def close(self) -> None:
        """Let the segments go. Views of them stay valid, and the memory goes with the last one that dies."""
        self._mappings.clear()

    def _check_hold(self, hold: int, generation: int) -> None:
        if hold >= self._max_holds or generation == 0:
            raise CorruptFrame(
                "a frame names a hold that does not exist",
                expected=f"a hold below {self._max_holds} and a generation above 0",
                found=f"hold {hold}, generation {generation}",
                remedy="something else wrote into the ring; shut the queue down and start both ends anew",
            )

    def _mapping(self, number: int) -> Mapping:
        mapping = self._mappings.get(number)
        if mapping is None:
            handed_over = self._segment(number)
            if handed_over is None:
                raise CorruptFrame(
                    f"a frame names segment {number}, which was never handed over",
                    expected="the writer to push a segment before it publishes a frame that names it",
                    found="no such segment on the attach socket",
                    remedy="something else wrote into the ring; shut the queue down and start both ends anew",
                )
            nbytes, fd = handed_over
            segment = Segment.attach(os.dup(fd), nbytes, writable=self._views == "shared")
            segment.close()
            mapping = self._mappings[number] = segment.mapping
            self._drop_segment(number)  # not before it is in its place: an interrupt must find it here or there
            if self._home.pins is not None:
                self._home.pins.want(number, mapping)
            else:
                self.see_to_device()
        return mapping


class _Home:
    """Where a lease goes back to: its reader's words, which outlive the reader, and its device, if there is one."""

    __slots__ = ("_borrower", "consumed", "pins", "policy", "returned", "tickets")

    def __init__(
        self, consumed: Words, returned: Words, borrower: Borrower, policy: str, tickets: Tickets | None
    ) -> None:
        self.consumed = consumed
        self.returned = returned
        self.pins: Pins | None = None
        self._borrower = weakref.ref(borrower)
        self.policy = policy
        self.tickets = tickets

    @property
    def _log(self) -> DeviceLog | None:
        """Its page, for as long as the reader is there: a view that outlives it should not keep that mapped."""
        borrower = self._borrower()
        return None if borrower is None else borrower.log

    def use(self, copies: Copies) -> Pins:
        """The pins, made at the first call."""
        from arena.pin import Pins

        if self.pins is None:
            with _making:
                if self.pins is None:
                    self.pins = Pins(copies, self.policy, self._log)
        return self.pins

    def pinned(self, copies: Copies) -> Pins:
        """The pins, of every segment there is."""
        borrower = self._borrower()
        if self.pins is None and borrower is not None:
            borrower.use(copies)
        return self.use(copies)

    def new_gate(self, mapped: object) -> Gate:
        """A gate for one of its leases."""
        from arena.gate import Gate

        return Gate(mapped, self._log, self.tickets)


class Lease(weakref.ref[Any]):
    """A weak reference to the views of one hold, with all that giving it back takes, and nothing else."""

    __slots__ = ("claim", "epoch", "gate", "home", "sequence", "words")

    home: _Home
    sequence: int
    words: tuple[int, int, int, int, int]
    gate: Gate | None
    claim: dict[None, object]  # whose it is to give back
    epoch: int

    @property
    def segment(self) -> int:
        """The number of the segment that it is in."""
        return self.words[0]

    def is_all_of(self, nbytes: int) -> bool:
        """Whether a tensor of so many bytes is everything in it, but for what aligns its first element."""
        return 0 <= self.words[2] - nbytes < ALIGN_SLACK_BYTES


_leases: dict[int, Lease] = {}
"""Every lease not given back yet: a view may outlive its reader, and a weak reference must be kept to fire."""

_making = HeldLock()
"""Two threads make one gate, not two. Never taken by a callback."""


def _after_fork() -> None:
    global _making  # noqa: PLW0603 - another thread may have had it at the fork
    _making = HeldLock()


os.register_at_fork(after_in_child=_after_fork)


def _give_back(lease: Lease) -> None:
    if getattr(lease, "epoch", None) != memory.fork_epoch():
        return  # a forked child's copy, neither its to give back nor mapped here; or interrupted before it was written
    ours = object()
    try:
        if lease.claim.setdefault(None, ours) is ours:
            _settle(lease)
    except BaseException:  # an interrupt
        if lease.claim.get(None) is ours:
            lease.claim.clear()
        raise


def _settle(lease: Lease) -> None:
    """With the claim: store, or leave that to the helper, who comes back here once the gate opens."""
    home, gate = lease.home, lease.gate
    if home.consumed[0] > lease.sequence:
        names: tuple[int, ...] = ()
        if gate is not None and not gate.is_empty():
            found = gate.names()
            if found is None:
                gate.view_died(partial(_settle, lease))
                return
            names = found
        give_back(home.returned, home.tickets, lease.words[3], lease.words[4], names)
        if names and gate is not None:
            gate.goes_on_tickets()
    elif gate is not None and not gate.is_empty():
        gate.outlives()
    _leases.pop(id(lease), None)


# ── what a device reads ──────────────────────────────────────────────────────────────────────────
def leases_of(tensor: torch.Tensor) -> list[Lease]:
    """The leases that a living tensor's memory is in: none for one that is not in the arena, two for a tensor that
    came in two messages."""
    address, epoch = tensor.untyped_storage().data_ptr(), memory.fork_epoch()
    found = []
    for lease in list(_leases.values()):
        owner = lease()
        if owner is not None and getattr(lease, "epoch", None) == epoch:
            start = memory.address_of(owner) + lease.words[1]
            if start <= address < start + lease.words[2]:
                found.append(lease)
    return found


def gate_of(lease: Lease) -> Gate:
    """The gate of a lease whose view lives, made at the first call."""
    with _making:
        if lease.gate is None:
            owner = lease()
            assert owner is not None, "whoever asks for a gate has the view"
            lease.gate = lease.home.new_gate(owner.mapped)
        return lease.gate


def pins_of(lease: Lease, copies: Copies) -> Pins:
    """How its reader's segments stand with the device that this process uses."""
    return lease.home.pinned(copies)


def _remember_stream(lease: Lease) -> None:
    """The plain ``.to(device, non_blocking=True)``: most likely it is queued where its thread queues things now."""
    assert lease.home.pins is not None
    copies = lease.home.pins.copies
    stream = copies.current_stream()
    if stream is not None:
        gate_of(lease).guess(copies, stream)
