"""The cells of `arena bench allreduce`: what the ranks do and time. A cell is one size with hot or rotating inputs.

In a cell the contenders alternate, block by block, and only blocks of one round are compared. Every block ends with a
check of what it computed. An operation takes as long as its slowest rank: times are put together by operation.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from telemetry.commands.bench.children import BlockFailed, fork_reader, reap
from telemetry.commands.bench.harness import Block, summarise

if TYPE_CHECKING:
    import torch

HIDDEN = 8192
_ROTATING_BYTES = 64 << 20  # more than the caches that a rank could have for itself
_MOST_INPUTS = 64
_OPERATION_BYTES = 8 << 20  # a block moves about as much, and never less than a few operations
_FEWEST, _MOST = 3, 50
_GROUP_TIMEOUT_S = 120


class Rig(Protocol):
    """A kind of device, at one rank, with everything that can all-reduce on it."""

    device: torch.device
    contenders: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]

    def times(self, run: Callable[[torch.Tensor], torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[int]:
        """One operation an input, each timed, in ns."""

    def close(self) -> None:
        """Give everything back."""


RIGS = {"cpu": "telemetry.commands.bench.allreduce_cpu", "cuda": "telemetry.commands.bench.allreduce_cuda"}
"""A module each, with ``BACKEND``, the process group's, ``FALLBACK``, the contender to beat, and ``open_rig``."""


@dataclass(frozen=True)
class Case:
    """One row: tokens of `HIDDEN` bfloat16 numbers, or a part of one token."""

    nbytes: int
    rotating: bool

    @property
    def tokens(self) -> float:
        """How many tokens that is."""
        return self.nbytes / (2 * HIDDEN)


@dataclass(frozen=True)
class Cell:
    """What one contender did in one case: a block a round of the slowest rank's times, and each rank's own median."""

    case: Case
    contender: str
    blocks: list[Block]
    by_rank: list[float]


def measure(device: str, world: int, cases: Sequence[Case], rounds: int) -> list[Cell]:
    """All cells, measured by `world` ranks forked from this process, or by the ranks that torchrun started.

    Under torchrun every rank returns them.
    """
    if "RANK" in os.environ:
        return _as_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", device, cases, rounds)
    with tempfile.TemporaryDirectory(prefix="arena-bench-") as directory:
        store = f"file://{Path(directory) / 'store'}"
        receiver, sender = Pipe(duplex=False)
        pids = [
            fork_reader(partial(_tell, sender, rank, partial(_as_rank, rank, world, store, device, cases, rounds)))
            for rank in range(world)
        ]
        cells: list[Cell] = receiver.recv()
        reap(pids)
    return cells


def _tell(sender: Connection, rank: int, work: Callable[[], list[Cell]]) -> None:
    """All ranks know all cells; one of them tells."""
    cells = work()
    if rank == 0:
        sender.send(cells)


def _as_rank(rank: int, world: int, store: str, device: str, cases: Sequence[Case], rounds: int) -> list[Cell]:
    import torch.distributed as dist

    module = import_module(RIGS[device])
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    dist.init_process_group(module.BACKEND, init_method=store, rank=rank, world_size=world, timeout=timeout)
    try:
        with _rig(module.open_rig, rank, world, max(case.nbytes for case in cases)) as rig:
            return [cell for case in cases for cell in _cells(rig, rank, world, case, rounds)]
    finally:
        dist.destroy_process_group()


@contextmanager
def _rig(open_rig: Callable[[int, int, int], Rig], rank: int, world: int, largest: int) -> Iterator[Rig]:
    rig = open_rig(rank, world, largest)
    try:
        yield rig
    finally:
        rig.close()


def _cells(rig: Rig, rank: int, world: int, case: Case, rounds: int) -> list[Cell]:
    import torch.distributed as dist

    inputs, expected = _inputs(rig, rank, world, case)
    mine: dict[str, list[list[int]]] = {name: [] for name in rig.contenders}
    for number in range(rounds):
        names = list(rig.contenders)
        for name in names if number % 2 == 0 else reversed(names):
            run = rig.contenders[name]
            mine[name].append(rig.times(run, inputs)[1:])  # the first one still waits for the slowest check
            _check(name, case, run(inputs[0].clone()), expected)
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, mine)
    return [_cell(case, name, [times[name] for times in everybody]) for name in rig.contenders]


def _inputs(rig: Rig, rank: int, world: int, case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Small whole numbers, whose sum every order of adding gets right; and that sum."""
    import torch

    pattern = torch.arange(case.nbytes // 2, device=rig.device) % 16
    x = (pattern + rank).to(torch.bfloat16)
    total = (pattern * world + sum(range(world))).to(torch.bfloat16)
    operations = max(_FEWEST, min(_MOST, _OPERATION_BYTES // case.nbytes)) + 1
    if not case.rotating:
        return [x] * operations, total
    different = max(2, min(_MOST_INPUTS, _ROTATING_BYTES // case.nbytes))
    copies = [x.clone() for _ in range(different)]
    return [copies[number % different] for number in range(operations)], total


def _check(name: str, case: Case, out: torch.Tensor, expected: torch.Tensor) -> None:
    import torch

    if not torch.equal(out, expected):
        raise BlockFailed(f"{name} added up wrong at {case.nbytes} bytes")


def _cell(case: Case, name: str, by_rank: list[list[list[int]]]) -> Cell:
    """From each rank's times, by round and operation."""
    slowest = [[max(operation) for operation in zip(*block, strict=True)] for block in zip(*by_rank, strict=True)]
    medians = [summarise([time for block in blocks for time in block]).p50 for blocks in by_rank]
    return Cell(case, name, [summarise(block) for block in slowest], medians)
