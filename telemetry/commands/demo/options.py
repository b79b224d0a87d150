"""What the user may ask for, checked before anything heavy is loaded; every refusal is one line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

MAX_READERS = 16


class Refused(ValueError):
    """An option that makes no sense; the message says which one and why."""


@dataclass(frozen=True)
class Options:
    """A valid request. A slow reader is its rank and how late it is in seconds; a killed one, its rank and when."""

    readers: int
    seconds: float
    seed: int
    compare: bool
    images: Path | None
    slow_reader: tuple[int, float] | None
    kill_reader: tuple[int, float] | None
    metrics_port: int | None

    def __post_init__(self) -> None:
        if not 1 <= self.readers <= MAX_READERS:
            raise Refused(f"--readers takes 1 to {MAX_READERS}, not {self.readers}")
        if not 0 < self.seconds < math.inf:
            raise Refused(f"--seconds takes a number above 0, not {self.seconds:g}")
        if self.images is not None and not self.images.is_dir():
            raise Refused(f"--images takes a directory, and {self.images} is none")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise Refused(f"--metrics-port takes a port, or 0 for a free one, not {self.metrics_port}")
        self._check_rank("--slow-reader", self.slow_reader)
        self._check_rank("--kill-reader", self.kill_reader)
        if self.kill_reader and self.readers == 1:
            raise Refused("--kill-reader needs --readers 2 or more: nobody would be left to answer")
        if self.kill_reader and self.kill_reader[1] >= self.seconds:
            raise Refused(f"--kill-reader takes a time before the end of the run, {self.seconds:g} s")

    def _check_rank(self, option: str, fault: tuple[int, float] | None) -> None:
        if fault and fault[0] >= self.readers:
            raise Refused(f"{option} names reader {fault[0]}, and the readers are 0 to {self.readers - 1}")


def rank_and_number(option: str, form: str, given: str | None) -> tuple[int, float] | None:
    """Read "RANK:NUMBER"; `form` is how the help writes it."""
    if given is None:
        return None
    rank, _, number = given.partition(":")
    try:
        pair = int(rank), float(number)
    except ValueError:
        raise Refused(f"{option} takes {form}, such as 1:20, not {given!r}") from None
    if pair[0] < 0 or not 0 <= pair[1] < math.inf:
        raise Refused(f"{option} takes {form}, neither of them negative, not {given!r}")
    return pair
