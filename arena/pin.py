"""Pins: an endpoint's segments, registered with the device so that it can copy from them by itself.

Registering takes milliseconds to most of a second, so it is the helper's work (`arena.helper`), begun when a segment is
first seen by a process that uses a device, and never waited for unless ``pin="required"``. What can't be registered
stays as it is, with the reason kept and counted: copies from it go the slow way.

Registered pages must not be unmapped, and a range's last buffer may die anywhere, in the garbage collector too. So
before anything is registered the end of the mapping is left to the helper: it unregisters, then unmaps. What a device
won't let go of stays mapped.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from arena import memory
from arena.device import Copies, PinRefused
from arena.errors import PinFailed
from arena.helper import Job, helper
from arena.memory import Mapping
from arena.state import Pin, move
from arena.tickets import Tickets

if TYPE_CHECKING:
    from arena.device_log import DeviceLog

_PATIENCE_S: Final = 60.0
_monotonic_ns = time.monotonic_ns


class Pinned:
    """One segment: whether it is registered, and if not, why."""

    __slots__ = ("decided", "nbytes", "reason", "state", "text")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.state = Pin.UNPINNED
        self.reason = ""  # one of PIN_FAILURES, once it failed
        self.text = ""
        self.decided = threading.Event()

    @property
    def is_pinned(self) -> bool:
        """Whether the device may copy from it by itself."""
        return self.state is Pin.PINNED


class Pins:
    """The segments of one endpoint, at one kind of device."""

    __slots__ = ("_policy", "_segments", "copies", "log")

    def __init__(self, copies: Copies, policy: str, log: DeviceLog | None) -> None:
        self.copies = copies
        self.log = log
        self._policy = policy
        self._segments: dict[int, Pinned] = {}
        helper.start()

    def want(self, number: int, mapping: Mapping) -> None:
        """See to it that this segment gets registered. Returns at once."""
        pinned = self._segments.setdefault(number, Pinned(mapping.nbytes))
        if pinned.state is Pin.UNPINNED and self._policy != "off":
            pinned.state = move(pinned.state, "want")
            helper.do(_registering(self.copies, mapping, pinned, self.log))

    def waits(self, number: int) -> bool:
        """Whether `state` will, for this segment."""
        pinned = self._segments.get(number)
        return self._policy == "required" and pinned is not None and pinned.state is Pin.PINNING

    def has(self, number: int) -> bool:
        """Whether this segment is registered by now."""
        pinned = self._segments.get(number)
        return pinned is not None and pinned.is_pinned

    def state(self, number: int) -> Pinned:
        """How it is with this segment; "required" waits until that is settled.

        Raises:
            PinFailed: it can't be registered, and is required to be.
        """
        pinned = self._segments.get(number) or Pinned(0)
        if self._policy == "required":
            if self.waits(number):
                pinned.decided.wait(_PATIENCE_S)
            if not pinned.is_pinned:
                raise PinFailed(
                    f"segment {number} could not be registered with the device ({pinned.reason or 'not in time'})",
                    reason=pinned.reason,
                    expected='every segment to be pinned, as pin="required" says',
                    found=pinned.text or pinned.state.name.lower(),
                    remedy='raise the limit that refused it, or set pin="auto", which copies the slow way',
                )
        return pinned

    def described(self) -> dict[int, str]:
        """Every segment seen so far, by number: its state, with the reason if it failed."""
        return {
            number: pinned.state.name.lower() + (f": {pinned.reason}" if pinned.reason else "")
            for number, pinned in list(self._segments.items())
        }


# ── in the helper ────────────────────────────────────────────────────────────────────────────────
def _registering(copies: Copies, mapping: Mapping, pinned: Pinned, log: DeviceLog | None) -> Job:
    _register(copies, mapping, pinned, log)
    yield None


def _register(copies: Copies, mapping: Mapping, pinned: Pinned, log: DeviceLog | None) -> None:
    """In one piece: a copy that crosses from one registered range into another is refused, the user's own too."""
    mapping.leave_unmapping_to(_Unmapping(copies, pinned, log))
    began_ns = _monotonic_ns()
    try:
        helper.enter(copies)
        began_ns = _monotonic_ns()
        copies.register(mapping.address, mapping.nbytes, writable=mapping.writable)
    except Exception as error:
        refused = error if isinstance(error, PinRefused) else PinRefused("driver", f"{type(error).__name__}: {error}")
        pinned.reason, pinned.text = refused.reason, refused.text
        pinned.state = move(pinned.state, "refuse")
        if log is not None:
            log.pin_failed(refused.reason, _monotonic_ns() - began_ns)
    else:
        pinned.state = move(pinned.state, "register")
        if log is not None:
            log.pinned(1, pinned.nbytes, _monotonic_ns() - began_ns)
    pinned.decided.set()


def register_tickets(tickets: Tickets, copies: Copies) -> None:
    """Have a reader's tickets registered, so that the device can write them. What can't be goes on events."""
    helper.start()
    helper.do(_opening(tickets, copies))


def _opening(tickets: Tickets, copies: Copies) -> Job:
    pinned = Pinned(tickets.control.nbytes)
    pinned.state = move(pinned.state, "want")
    _register(copies, tickets.control, pinned, None)
    if pinned.is_pinned:
        helper.watches = True
        tickets.open(copies)
    yield None


class _Unmapping:
    """What ends a mapping that was to be registered. Called anywhere: only hands the work on."""

    __slots__ = ("_copies", "_epoch", "_log", "_pinned")

    def __init__(self, copies: Copies, pinned: Pinned, log: DeviceLog | None) -> None:
        self._copies, self._pinned, self._log = copies, pinned, log
        self._epoch = memory.fork_epoch()

    def __call__(self, address: int, nbytes: int) -> None:
        if self._epoch == memory.fork_epoch():
            helper.do(self._ending(address, nbytes))
        else:
            memory.unmap(address, nbytes)  # a forked child's copy: no device knows of it

    def _ending(self, address: int, nbytes: int) -> Job:
        if self._pinned.is_pinned:
            helper.enter(self._copies)
            self._copies.unregister(address)  # raises where it can't: then the helper drops this job, and nothing more
            if self._log is not None:
                self._log.pinned(-1, -nbytes, 0)
        memory.unmap(address, nbytes)
        yield None
