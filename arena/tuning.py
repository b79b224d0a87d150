"""Autotuning: every path at every size, verified, then timed; the slowest rank's median counts.

Candidates, sizes and order come from arguments that all ranks share, and what is measured is exchanged before anything
is decided, so that all ranks come to the same plan. (FlashInfer's tuner works like this; the idea is from there.)
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from arena.device import Device, ReducePath
from arena.plan import Plan, from_times
from arena.rounds import Rounds, Statement

SIZES: Final = tuple(1 << power for power in range(13, 27))
_WARM_UPS: Final = 3
_DEADLINE_S: Final = 120.0


def tune(
    paths: Mapping[str, ReducePath],
    device: Device,
    where: torch.device,
    rounds: Rounds,
    sizes: Sequence[int] | None,
    repeats: int,
) -> Plan:
    """The plan that measurement suggests; collective."""
    fast = [path.max_bytes for name, path in paths.items() if name != device.fallback]
    chosen = sizes if sizes is not None else [size for size in SIZES if size <= max(fast, default=0)]
    times: dict[int, dict[str, float]] = {}
    for size in sorted(set(chosen)):
        operand, total = _operand(size, rounds, where)
        times[size] = {}
        for name, path in paths.items():
            if path.declines(operand) is None:
                mine = _median_ns(path, device, operand, total, repeats)
                answers = rounds.exchange(f"tuning {name} at {size} bytes", Statement("said", mine), _DEADLINE_S)
                if all(answer.said is not None for answer in answers):
                    times[size][name] = max(answer.said for answer in answers)
    return from_times(times, device.fallback)


def _operand(nbytes: int, rounds: Rounds, where: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank brings, in bfloat16, and the sum: small whole numbers, which every order of adding gets right."""
    pattern = torch.arange(nbytes // 2, device=where) % 16
    total = pattern * rounds.world + sum(range(rounds.world))
    return (pattern + rounds.rank).to(torch.bfloat16), total.to(torch.bfloat16)


def _median_ns(
    path: ReducePath, device: Device, operand: torch.Tensor, total: torch.Tensor, repeats: int
) -> float | None:
    """This rank's median; None where the sum was wrong once, though the operations go on, as the others' do."""
    right = True
    for _ in range(_WARM_UPS):
        right &= torch.equal(path.all_reduce(operand), total)
    stopwatches = [device.stopwatch() for _ in range(repeats)]
    for stopwatch in stopwatches:
        stopwatch.start()
        path.all_reduce(operand)
        stopwatch.stop()
    device.synchronize()
    took = [ns for stopwatch in stopwatches if (ns := stopwatch.elapsed_ns()) is not None]
    return statistics.median(took) if right and took else None
