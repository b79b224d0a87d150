"""All-reduce on GPUs, one rank's part: every path and every peer, at every size, in one run, without dispatch.

A cell is one contender at one size: calls in a CUDA graph, the result checked first, then timed in rounds in which the
contenders alternate. What a peer is, and a bare contender, `allreduce_peers` says.

    torchrun --nproc-per-node 2 -m telemetry.commands.bench.allreduce_graphs OUT.json
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from arena.device import Declined, Place, ReducePath
from arena.device.cuda import CudaDevice, driver, measure, on_its_device
from arena.device.cuda.streams import cuda
from arena.joining import meet, rounds_of
from arena.lockstep import Budget, set_up
from telemetry.commands.bench.allreduce_cuda import BACKEND
from telemetry.commands.bench.allreduce_peers import (
    IN_PLACE,
    PATHS,
    Contender,
    Peers,
    nccl_in_place,
    symmetric_variants,
)

KIB: Final = 1 << 10
SIZES: Final = tuple(KIB * kib for kib in (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536))
OWN: Final = ("one_shot", "two_shot")
ROUNDS: Final = 15
HOST_CALLS: Final = 100
DEADLINE_S: Final = 60.0


@dataclass(frozen=True)
class Cell:
    """One contender at one size: microseconds a call, of the slower rank, in each round."""

    size_bytes: int
    contender: str
    kind: str
    correct: bool | None
    rounds_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """What counts."""
        return statistics.median(self.rounds_us)


class Bench:
    """One rank of a run. The ranks talk through `group`, which has to speak gloo for CPU tensors."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, largest_bytes: int) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._device = device
        self._stream = cuda.Stream(device)
        self._place = Place(self.rank, self.world, device, dist.group.WORLD)
        self._rounds = rounds_of(group)
        meet(group, self._rounds, None, DEADLINE_S)
        self.paths: dict[str, ReducePath] = {}
        self.declined: dict[str, str] = {}
        for name, make in CudaDevice().paths().items():
            try:
                self.paths[name] = self._set_up(name, make(self._place, largest_bytes))
            except Declined as declined:
                self.declined[name] = f"{declined.reason}: {declined.text}"
        copies = on_its_device(measure.PeerCopy.set_up, self._place, largest_bytes)
        self._copy: measure.PeerCopy = self._set_up("peer copies", copies)
        self._peers = Peers(group, device, largest_bytes)
        self.contenders = self._contenders()
        values = torch.Generator().manual_seed(1)
        count = largest_bytes // 2
        parts = [torch.randint(-8, 9, (count,), generator=values).to(torch.bfloat16) for _ in range(self.world)]
        self._mine = parts[self.rank].to(device)
        self._sum = torch.stack(parts).float().sum(0).to(torch.bfloat16).to(device)
        cuda.synchronize()

    def cells(self, size_bytes: int, rounds: int) -> list[Cell]:
        """Every contender at one size."""
        with cuda.stream(self._stream):  # a graph can't be captured on the default stream
            return self._cells(size_bytes, rounds)

    def _cells(self, size_bytes: int, rounds: int) -> list[Cell]:
        count = size_bytes // 2
        calls = 60 if size_bytes <= 1 << 20 else 20 if size_bytes <= 8 << 20 else 8
        runs, correct = {}, {}
        for contender in self.contenders:
            repeated = measure.Repeated(contender.operation, [self._mine[:count].clone()], calls)
            self._meet()
            looked_at = contender.kind in ("own", "peer") and contender.name != IN_PLACE
            correct[contender.name] = torch.equal(repeated.run(), self._sum[:count]) if looked_at else None
            runs[contender.name] = repeated
        rotating = measure.Repeated(
            self.paths["one_shot"].all_reduce, [self._mine[:count].clone() for _ in range(calls)], calls
        )
        times: dict[str, list[float]] = {name: [] for name in (*runs, "one_shot, rotating inputs")}
        for _ in range(rounds):
            for name, repeated in (*runs.items(), ("one_shot, rotating inputs", rotating)):
                times[name].append(repeated.time_us())
        everybody = self._exchange((times, correct))
        kinds = {contender.name: contender.kind for contender in self.contenders}
        return [
            Cell(
                size_bytes,
                name,
                kinds.get(name, "rotating"),
                None if correct.get(name) is None else all(answer[1][name] for answer in everybody),
                tuple(max(rank_times) for rank_times in zip(*(answer[0][name] for answer in everybody), strict=True)),
            )
            for name in times
        ]

    def host_us(self, rounds: int) -> dict[str, float]:
        """Microseconds of the host that an eager call costs, and what it can't do without."""
        x = self._mine[:4096].clone()
        calls: dict[str, Callable[[], object]] = {
            "empty_like": lambda: torch.empty_like(x),
            "bare launch": measure.empty_launch(self.world, self._device),
            **{name: (lambda path=path: path.all_reduce(x)) for name, path in self.paths.items()},  # type: ignore[misc]
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                self._meet()
                times[name].append(measure.host_us(call, HOST_CALLS))
        return {name: statistics.median(found) for name, found in times.items()}

    def close(self) -> None:
        """Give everything back."""
        self._meet()
        self._copy.close()
        self._peers.close()
        for path in self.paths.values():
            path.close()

    def _contenders(self) -> list[Contender]:
        found = [
            Contender(name, "own" if name in OWN else "peer", self.paths[name].all_reduce)
            for name in PATHS
            if name in self.paths
        ]
        found += [
            Contender(IN_PLACE, "peer", nccl_in_place),
            Contender("copy engine", "limit", self._copy),
        ]
        found += [Contender(name, "peer", operation) for name, operation in self._peers.operations.items()]
        symmetric: Any = self.paths.get("symm_mem_two_shot")
        return found + (symmetric_variants(symmetric) if symmetric is not None else [])

    def _set_up(self, name: str, steps: Generator[Any, Any, Any]) -> Any:
        return set_up(name, steps, self._rounds, self.rank, Budget(DEADLINE_S))

    def _exchange(self, said: Any) -> list[Any]:
        answers: list[Any] = [None] * self.world
        dist.all_gather_object(answers, said, group=self._group)
        return answers

    def _meet(self) -> None:
        dist.barrier(self._group)


def required_ratio(size_bytes: int) -> float:
    """How much faster than the best peer `one_shot` has to be, at two ranks."""
    return 1.6 if size_bytes <= 1 << 20 else 1.3 if size_bytes <= 8 << 20 else 1.2


def summary(cells: list[Cell]) -> str:
    """A line for each size, then whether everything was right."""
    lines = [
        "     size   one_shot   two_shot   best peer                            ratio  needed  bare    copy  rotating"
    ]
    for size in sorted({cell.size_bytes for cell in cells}):
        here = {cell.contender: cell for cell in cells if cell.size_bytes == size}
        own = here["one_shot"].median_us
        peer = min((cell for cell in here.values() if cell.kind == "peer"), key=lambda cell: cell.median_us)
        bare = min((cell.median_us for cell in here.values() if cell.kind == "bare"), default=float("nan"))
        ratio, needed = peer.median_us / own, required_ratio(size)
        lines.append(
            f"{size // KIB:6d} KiB {own:8.2f} {here['two_shot'].median_us:10.2f}   {peer.median_us:7.2f} "
            f"{peer.contender:28s} {ratio:5.2f}  {needed:4.1f} {'ok' if ratio >= needed else 'NO'}"
            f" {bare:7.2f} {here['copy engine'].median_us:7.2f} {here['one_shot, rotating inputs'].median_us:7.2f}"
        )
    wrong = [f"{cell.contender} at {cell.size_bytes}" for cell in cells if cell.correct is False]
    return "\n".join([*lines, f"wrong results: {', '.join(wrong) or 'none'}"])


def main() -> None:
    """One rank under torchrun."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    cuda.set_device(device)
    dist.init_process_group(BACKEND)
    group = dist.new_group(backend="gloo")
    traits = CudaDevice().traits(device)
    bench = Bench(group, device, max(SIZES))
    cells = [cell for size in SIZES for cell in bench.cells(size, ROUNDS)]
    host = bench.host_us(ROUNDS)
    if rank == 0:
        facts = {"device": asdict(traits), "torch": torch.__version__, "world": bench.world, "driver": driver.version()}
        rows = [{**asdict(cell), "median_us": cell.median_us} for cell in cells]
        Path(sys.argv[1]).write_text(json.dumps({**facts, "declined": bench.declined, "host_us": host, "cells": rows}))
        print(facts, bench.declined, summary(cells), host, sep="\n")
    bench.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
