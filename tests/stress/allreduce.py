"""Back-to-back all-reduces of random size, with a rank that stalls now and then; every sum checked, on every rank.

Sizes are log-uniform across all thresholds: nothing at all, one-shots, two-shots of one step and of several, and what
only gloo takes. Inputs are whole numbers, whose sum is known exactly, and now and then arbitrary ones, whose sum has to
have the same bits on every rank. A result's memory is filled with NaN before it is given back, so that a later result
that was not written would show.

    python -m tests.stress.allreduce --operations 100000 --world 2
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from arena import AllReduce

LARGEST = 3 << 20
MAX_SIZE = 2 << 20  # above it gloo serves
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)
STALL_ONE_IN = 8
LONGEST_STALL_S = 0.005


def plan(seed: int, operations: int, world: int) -> Iterator[tuple[torch.dtype, int, int, bool, int, float]]:
    """Dtype, count, offset, exact or not, and the rank that stalls for how long; the same on every rank."""
    draw = random.Random(seed)
    for _ in range(operations):
        dtype = draw.choice(DTYPES)
        nbytes = int(LARGEST ** draw.random()) - 1
        count = nbytes // dtype.itemsize
        stall_s = draw.random() * LONGEST_STALL_S if draw.randrange(STALL_ONE_IN) == 0 else 0.0
        yield dtype, count, draw.randrange(16), draw.random() < 0.5, draw.randrange(world), stall_s


def sources(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whole numbers, what they have in common, and arbitrary ones; inputs are slices of them."""
    pattern = torch.arange(LARGEST // 2 + 16, dtype=torch.int32) % 16
    noise = torch.randn(len(pattern), generator=torch.Generator().manual_seed(rank)) * 1000
    return (pattern + rank).to(dtype), pattern, noise.to(dtype)


def expected(pattern: torch.Tensor, world: int, dtype: torch.dtype) -> torch.Tensor:
    """The exact sum."""
    return (pattern * world + sum(range(world))).to(dtype)


def checksum(x: torch.Tensor, so_far: int) -> int:
    """Of every bit, in a chain."""
    return zlib.crc32((ctypes.c_char * x.nbytes).from_address(x.data_ptr()), so_far) if x.nbytes else so_far


def poison(x: torch.Tensor) -> None:
    """The next result may well get this memory."""
    x.fill_(-1 if x.dtype is torch.int32 else float("nan"))


def reduce(rank: int, world: int, store: str, operations: int, seed: int, result) -> None:
    """One rank."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    known = {dtype: sources(rank, dtype) for dtype in DTYPES}
    sums = {dtype: expected(known[dtype][1], world, dtype) for dtype in DTYPES}
    wrong, chain = 0, 0
    with AllReduce(None, "cpu", max_size=MAX_SIZE) as comm:
        for dtype, count, offset, exact, stalls, stall_s in plan(seed, operations, world):
            whole, _, noise = known[dtype]
            if stalls == rank and stall_s:
                time.sleep(stall_s)
            out = comm.all_reduce((whole if exact else noise)[offset : offset + count])
            if exact:
                wrong += not torch.equal(out, sums[dtype][offset : offset + count])
            chain = checksum(out, chain)
            poison(out)
        statistics = comm.statistics()
    result.send({"wrong": wrong, "checksum": chain, "by_path": statistics.operations_by_path})


def run(operations: int, world: int, seed: int) -> dict:
    """One run; the result says what was wrong, if anything."""
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="arena-stress-", dir="/dev/shm") as run_dir:
        os.environ["ARENA_RUN_DIR"] = run_dir
        store = str(Path(run_dir) / "store")
        receivers, ranks = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=reduce, args=(rank, world, store, operations, seed, theirs), daemon=True)
            process.start()
            receivers.append(ours)
            ranks.append(process)
        outcomes = [receiver.recv() for receiver in receivers]
        for process in ranks:
            process.join(60)
        leaks = [name for name in os.listdir(run_dir) if name != "store"]
    seconds = time.monotonic() - began
    return {
        "operations": operations,
        "world": world,
        "seed": seed,
        "wrong": sum(outcome["wrong"] for outcome in outcomes),
        "same_bits": len({outcome["checksum"] for outcome in outcomes}) == 1,
        "by_path": outcomes[0]["by_path"],
        "leaks": leaks,
        "exit_codes": [process.exitcode for process in ranks],
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcome = run(options.operations, options.world, options.seed)
    print(json.dumps(outcome))
    good = not outcome["wrong"] and outcome["same_bits"] and not outcome["leaks"] and not any(outcome["exit_codes"])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
