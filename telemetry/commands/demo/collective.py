"""The sum over the workers: Arena's all-reduce, and now and then gloo's of the same shares, to compare.

Both add up the same numbers one after the other, right after a sum that counted: every worker has come by then, so
neither pays for one that is late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from arena import AllReduce
from arena.errors import ArenaError
from telemetry.commands.demo.wire import Compared, Summed

DEADLINE_S = 10.0
COMPARED_EVERY = 16  # steps


class GroupBroken(Exception):
    """A worker of the group is gone, or did not come."""


class Collective:
    """One worker's place in a group that adds up its shares."""

    def __init__(self, part: int, parts: int, rendezvous: str) -> None:
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=part,
                world_size=parts,
                timeout=timedelta(seconds=DEADLINE_S),
            )
            self._communicator = AllReduce(None, "cpu", deadline_s=DEADLINE_S)
        except (ArenaError, RuntimeError) as error:
            _leave_group()
            raise GroupBroken(f"worker {part} of {parts} found no group: {error}") from error

    def add_up(self, share: Tensor, step: int) -> tuple[Tensor, Summed]:
        """Sum the shares of all workers, and say how; all of them have to give the number of the same step.

        Raises:
            GroupBroken: for good.
        """
        try:
            total = self._communicator.all_reduce(share)
            compared = self._compare(share, step) if step % COMPARED_EVERY == 0 else None
        except (ArenaError, RuntimeError) as error:
            raise GroupBroken(str(error)) from error
        return total, Summed(self._communicator.explain(share).path, compared)

    def close(self) -> None:
        """Leave; whoever waits for this worker hears of it."""
        self._communicator.close()
        _leave_group()

    def _compare(self, share: Tensor, step: int) -> Compared:
        spare = share.clone()  # gloo adds up in place
        ways: list[Callable[[], object]] = [
            lambda: self._communicator.all_reduce(share),
            lambda: dist.all_reduce(spare),
        ]
        swapped = step // COMPARED_EVERY % 2 == 1  # neither always has the other's caches
        took_s = [_timed(way) for way in (reversed(ways) if swapped else ways)]
        arena_s, gloo_s = reversed(took_s) if swapped else took_s
        return Compared(arena_s, gloo_s)


def _timed(way: Callable[[], object]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
