"""All-reduce on GPUs, one rank's part: every path and every peer, at every size, in one run.

A cell is one contender at one size: calls in a CUDA graph, the result checked first, then timed in rounds in which the
contenders alternate. A *peer* takes a plain tensor and leaves its result in a new one, copies included; NCCL is also
measured in place, without any copy, and counts as the stricter peer. A *bare* contender wants its input in symmetric
memory, or changes it; it is there to be compared with, and its result is not looked at.

    torchrun --nproc-per-node 2 -m telemetry.commands.bench.allreduce_cuda OUT.json

`open_rig` is the same for `arena bench allreduce --device cuda`, with dispatch and without the peers.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from arena import AllReduce
from arena.device import Declined, Place, ReducePath
from arena.device.cuda import CudaDevice, driver, measure
from arena.device.cuda.streams import cuda

BACKEND: Final = "cpu:gloo,cuda:nccl"
FALLBACK: Final = "nccl"
IN_PLACE: Final = "nccl, in place"
KIB: Final = 1 << 10
SIZES: Final = tuple(KIB * kib for kib in (8, 32, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536))
PATHS: Final = ("one_shot", "two_shot", "symm_mem_one_shot", "symm_mem_two_shot", "nccl")
OWN: Final = ("one_shot", "two_shot")
ROUNDS: Final = 15
HOST_CALLS: Final = 100

Operation = Callable[[torch.Tensor], torch.Tensor]


class CudaRig:
    """One rank of `arena bench allreduce`: Arena with its own choice of path, each of its paths, and NCCL in place."""

    def __init__(self, rank: int, world: int, largest: int) -> None:
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        cuda.set_device(self.device)
        self._stream = cuda.Stream(self.device)
        self._communicators = {"arena": AllReduce(None, self.device, max_size=largest)}
        for path in PATHS:
            communicator = AllReduce(None, self.device, force_path=path, max_size=largest)
            if path in communicator.paths:
                self._communicators[path] = communicator
            else:
                communicator.close()
        self.contenders: dict[str, Operation] = {
            name: communicator.all_reduce for name, communicator in self._communicators.items()
        }
        self.contenders[IN_PLACE] = _nccl_in_place

    def times(self, run: Operation, inputs: Sequence[torch.Tensor]) -> list[int]:
        """See `Rig`. In a graph, as often as there are inputs: one operation is shorter than a clock can tell."""
        cuda.synchronize()
        with cuda.stream(self._stream):
            taken = [x.clone() for x in inputs] if run is _nccl_in_place else inputs  # it spoils them
            repeated = measure.Repeated(run, taken, len(taken))
            times = [round(repeated.time_us() * 1000) for _ in inputs]
        cuda.synchronize()
        return times

    def close(self) -> None:
        """See `Rig`."""
        for communicator in self._communicators.values():
            communicator.close()


def open_rig(rank: int, world: int, largest: int) -> CudaRig:
    """The rig of one rank."""
    return CudaRig(rank, world, largest)


def _nccl_in_place(x: torch.Tensor) -> torch.Tensor:
    """NCCL as most call it. No new tensor, so not the same service; here to show what that part costs."""
    dist.all_reduce(x)
    return x


@dataclass(frozen=True)
class Contender:
    """An operation and what it may be held against."""

    name: str
    kind: str  # "own", "peer", "bare" or "limit"
    operation: Operation


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
        self.paths: dict[str, ReducePath] = {}
        self.declined: dict[str, str] = {}
        for name, set_up in CudaDevice().paths().items():
            try:
                self.paths[name] = self._drive(set_up(self._place, largest_bytes))
            except Declined as declined:
                self.declined[name] = f"{declined.reason}: {declined.text}"
        self._copy: measure.PeerCopy = self._drive(measure.PeerCopy.set_up(self._place, largest_bytes))
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
        for path in self.paths.values():
            path.close()

    def _contenders(self) -> list[Contender]:
        found = [
            Contender(name, "own" if name in OWN else "peer", self.paths[name].all_reduce)
            for name in PATHS
            if name in self.paths
        ]
        found += [
            Contender(IN_PLACE, "peer", _nccl_in_place),
            Contender("copy engine", "limit", self._copy),
        ]
        symmetric: Any = self.paths.get("symm_mem_two_shot")
        return found + (_symmetric_variants(symmetric) if symmetric is not None else [])

    def _drive(self, steps: Generator[Any, Any, Any]) -> Any:
        """A set-up to its end, as `arena.lockstep` does it, with all ranks known to be alive."""
        heard: list[Any] | None = None
        path = None
        while True:
            try:
                said = ("said", next(steps) if heard is None else steps.send(heard))
            except StopIteration as end:
                said = ("done", None)
                path = end.value
            except Declined as declined:
                said = ("failed", (declined.reason, declined.text))
            answers = self._exchange(said)
            for kind, words in answers:
                if kind == "failed":
                    steps.close()
                    raise Declined(*words)
            if said[0] == "done":
                return path
            heard = [words for _, words in answers]

    def _exchange(self, said: Any) -> list[Any]:
        answers: list[Any] = [None] * self.world
        dist.all_gather_object(answers, said, group=self._group)
        return answers

    def _meet(self) -> None:
        dist.barrier(self._group)


def _symmetric_variants(path: Any) -> list[Contender]:
    """What else can be put together from torch's operators, with copies and without."""
    operators, name = torch.ops.symm_mem, path.group_name

    def staged(x: torch.Tensor) -> torch.Tensor:
        return path.staging(x)  # type: ignore[no-any-return]

    def fused(x: torch.Tensor) -> Any:
        return operators.one_shot_all_reduce_copy(staged(x), x, "sum", name)

    def copied(x: torch.Tensor) -> Any:
        return operators.one_shot_all_reduce(staged(x).copy_(x), "sum", name)

    def two_shot_out(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        operators.two_shot_all_reduce_out(staged(x).copy_(x), "sum", name, out)
        return out

    def bare_one_shot(x: torch.Tensor) -> Any:
        return operators.one_shot_all_reduce(staged(x), "sum", name)

    def bare_two_shot(x: torch.Tensor) -> Any:
        return operators.two_shot_all_reduce_(staged(x), "sum", name)

    return [
        Contender("torch one-shot, copy fused", "peer", fused),
        Contender("torch one-shot, copied", "peer", copied),
        Contender("torch two-shot, out", "peer", two_shot_out),
        Contender("torch one-shot, symmetric input", "bare", bare_one_shot),
        Contender("torch two-shot, symmetric, in place", "bare", bare_two_shot),
    ]


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
