"""All-reduce and its relatives for CPU tensors: over shared memory, and over gloo where that can't be.

A product for tensor parallelism on CPUs, and the oracle for the paths on GPUs: the same steps, in Python.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from arena.device import Place, SetUp, Traits
from arena.device.cpu.board import Board
from arena.device.cpu.gloo import set_up as set_up_gloo
from arena.device.cpu.meeting import meet
from arena.device.cpu.one_shot import OneShot
from arena.device.cpu.path import check
from arena.device.cpu.two_shot import TwoShot

if TYPE_CHECKING:
    import torch


class CpuDevice:
    """The CPU of one communicator at one rank. Its paths share one board, met on by whichever is set up first."""

    kind = "cpu"
    fallback = "gloo"
    asynchronous = False

    def __init__(self) -> None:
        self._board: Board | None = None
        self._made: list[tuple[OneShot | TwoShot, Board]] = []
        self._at_work = False  # a set-up is under way, or was left behind in the middle

    def traits(self, device: torch.device) -> Traits:
        """See `arena.device.Device`."""
        import torch

        return Traits("cpu", platform.machine(), f"torch {torch.__version__.partition('+')[0]}")

    def paths(self) -> Mapping[str, Callable[[Place, int], SetUp]]:
        """See `arena.device.Device`."""

        return {
            "cpu_one_shot": partial(self._set_up, OneShot),
            "cpu_two_shot": partial(self._set_up, TwoShot),
            "gloo": self._set_up_gloo,
        }

    def broken(self) -> Mapping[str, str]:
        """See `arena.device.Device`."""
        return {path.name: str(board.lost) for path, board in self._made if board.lost is not None}

    def stopwatch(self) -> WallClock:
        """See `arena.device.Device`."""
        return WallClock()

    def synchronize(self) -> None:
        """Nothing is under way when a call has returned."""

    def _set_up(self, make: type[OneShot | TwoShot], place: Place, max_bytes: int) -> SetUp:
        self._let_go()
        self._at_work = True
        if self._board is None:
            self._board = yield from meet(place)
        board, path = self._board, make(self._board, max_bytes)
        try:
            yield "may check"  # all are here: from now on a rank may wait for another
            try:
                yield from check(path, place, board.slot_bytes // 2)  # two steps, in fp32: every byte of both slots
            except BaseException as error:
                board.give_up(error)  # the ranks' steps may differ by now
                raise
        except BaseException:
            path.close()
            raise
        finally:
            self._at_work = False
        self._made.append((path, board))
        return path

    def _set_up_gloo(self, place: Place, max_bytes: int) -> SetUp:
        self._let_go()
        return (yield from set_up_gloo(place, max_bytes, self._board))

    def _let_go(self) -> None:
        """Forget a board that is lost. A set-up that hangs has been left behind with one: then it is lost."""
        if self._board is not None and self._at_work:
            self._board.give_up(TimeoutError("a set-up that hung"))
        if self._board is not None and self._board.lost is not None:
            self._board = None


class WallClock:
    """On the CPU an operation is over when the call returns."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._took_ns: int | None = None

    def start(self) -> None:
        """Right before the operation."""
        self._began_ns = time.monotonic_ns()

    def stop(self) -> None:
        """Right after it."""
        self._took_ns = time.monotonic_ns() - self._began_ns

    def elapsed_ns(self) -> int | None:
        """How long it took."""
        return self._took_ns
