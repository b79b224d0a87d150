"""Registering host memory with the driver, so that a GPU's copy engine reads it by itself.

By the driver's own calls and not the runtime's: a runtime call that fails leaves its error behind, and the next kernel
launch of whoever comes next in that thread reports it. The driver leaves nothing.
"""

from __future__ import annotations

from typing import Final

from arena.device import PinRefused
from arena.device.cuda import driver

_PORTABLE: Final = 1  # for every context of the process, so for all its GPUs
_DEVICE_MAP: Final = 2  # where the device may write to it, it also has an address there
_READ_ONLY: Final = 8  # for a mapping that the process itself may not write to

_REASONS: Final = {
    2: "memlock_limit",  # out of memory: pages that may be locked, most likely
    3: "no_device",  # not initialised
    4: "no_device",  # deinitialised
    100: "no_device",
    101: "no_device",
    201: "no_device",  # no context
    712: "already_registered",
    800: "unsupported",  # not permitted
    801: "unsupported",
}
_NOT_REGISTERED: Final = 713
_RANGE_GONE: Final = (3, 4, 201, 709)  # the context is destroyed, and its registrations with it


def register(address: int, nbytes: int, *, writable: bool) -> None:
    """See `arena.device.Copies`."""
    flags = _PORTABLE | (_DEVICE_MAP if writable else _READ_ONLY)
    try:
        driver.register(address, nbytes, flags)
    except driver.DriverError as error:
        raise PinRefused(_REASONS.get(error.status, "driver"), str(error)) from None


def unregister(address: int) -> None:
    """See `arena.device.Copies`."""
    try:
        driver.unregister(address)
    except driver.DriverError as error:
        if error.status not in (_NOT_REGISTERED, *_RANGE_GONE):
            raise PinRefused("driver", str(error)) from None
