"""Streamed and sharded hand-over on this machine's GPUs: checks, then figures, a short table last.

    python -m tests.gpu.streamed_report            # one GPU: about three minutes
    python -m tests.gpu.streamed_report --two      # two GPUs, likewise
    python -m tests.gpu.streamed_report --device cpu --bytes 20000000 --no-tests    # that it works

Each row of the table says what was measured, against what, what is required, and whether that is met.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from arena import copying
from telemetry.commands.bench import device_shared as shared
from telemetry.commands.bench.children import run_apart
from telemetry.commands.bench.contenders import preload
from telemetry.commands.bench.device_moves import BARE, HOST, LENT, PAGEABLE, PINNED, STREAMED, WRITTEN, Plan, measure
from telemetry.commands.bench.harness import Block, p50s, paired

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20
NBYTES = 200_000_000
PIECES = ((2, 10), (1, 10), (4, 10), (2, 6), (2, 8))  # MiB, threads at most
DEADLINE_S = 300.0
BESIDES = (
    "test_under_a_real_limit_on_locked_memory_a_segment_is_what_the_driver_makes_of_any_memory",
    "test_large_copies_are_timed",
    "test_tickets_on_one_stream_leave_a_capture_on_another_alone",
    "test_cuda_that_is_initialised_late_gets_tickets_as_well",
)


def moves(kind: str, nbytes: int, names: tuple[str, ...], rounds: int, repeats: int) -> dict[str, list[Block]]:
    """One reader's ways, in a process of its own."""
    return run_apart(partial(measure, Plan(kind, nbytes, names, rounds, repeats)), DEADLINE_S)


def _with_pieces(mib: int, threads: int, plan: Plan) -> dict[str, list[Block]]:
    copying.PIECE_BYTES, copying._MOST_THREADS = mib * MIB, threads  # type: ignore[misc]
    return measure(plan)


def piece_table(
    kind: str = "cuda", nbytes: int = NBYTES, *, rounds: int = 2, repeats: int = 5
) -> list[dict[str, float]]:
    """Streamed in pieces of several sizes: milliseconds, and over the longer one of the two bare copies."""
    rows = []
    for mib, threads in PIECES:
        plan = Plan(kind, nbytes, (BARE, HOST, STREAMED), rounds, repeats)
        blocks = run_apart(partial(_with_pieces, mib, threads, plan), DEADLINE_S)
        rows.append({"MiB": mib, "threads": threads, "ms": _ms(blocks[STREAMED]), "ratio": _ratio(blocks)})
    return rows


def _longer(blocks: dict[str, list[Block]]) -> list[float]:
    return list(map(max, p50s(blocks[BARE]), p50s(blocks[HOST])))


def _ratio(blocks: dict[str, list[Block]]) -> float:
    return round(paired(p50s(blocks[STREAMED]), _longer(blocks)).median, 2)


def _ms(blocks: list[Block]) -> float:
    found = sorted(p50s(blocks))
    return round(found[len(found) // 2] / 1e6, 2)


def check(two: bool) -> str:
    """The tests on the GPU; "" or how they ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["-k", f"{'two_gpus' if two else 'not two_gpus'} and not piece_sizes", "tests/gpu/test_streamed.py"]
    command += [] if two else [f"tests/gpu/test_tickets.py::{name}" for name in BESIDES]
    try:
        finished = subprocess.run(command, cwd=ROOT, timeout=150, check=False)
    except subprocess.TimeoutExpired:
        return "pytest was not through after 150 s"
    return "" if finished.returncode == 0 else f"pytest ended with {finished.returncode}"


def one_reader(options: Any) -> list[str]:
    """One reader: every way, and the pieces."""
    names = (BARE, WRITTEN, HOST, PAGEABLE, PINNED, STREAMED, LENT)
    blocks = moves(options.device, options.bytes, names, options.rounds, options.repeats)
    lines = [f"  {name:<42} {_ms(blocks[name]):>8} ms" for name in names]
    lines += [
        f"  in pieces of {row['MiB']} MiB, at most {row['threads']} threads".ljust(44)
        + f" {row['ms']:>8} ms   {row['ratio']:.2f} x the longer bare copy"
        for row in piece_table(options.device, options.bytes)
    ]
    longer, both = _longer(blocks), list(map(sum, zip(p50s(blocks[BARE]), p50s(blocks[HOST]), strict=True)))
    lines += [
        _judged("streamed / the longer of the bare copies", p50s(blocks[STREAMED]), longer, 1.25),
        _judged("pinned / the sum of the bare copies", p50s(blocks[PINNED]), both, 1.25),
        _judged("lent / bare pinned copy", p50s(blocks[LENT]), p50s(blocks[BARE]), 1.1),
        _judged("lent / bare pinned copy, just written", p50s(blocks[LENT]), p50s(blocks[WRITTEN]), 1.1),
    ]
    return lines


def two_readers(options: Any) -> list[str]:
    """Two readers, a device each; the slower one counts."""
    plan = Plan(options.device, options.bytes, shared.SHARED, options.rounds, options.repeats)
    blocks = run_apart(partial(shared.measure_shared, plan), DEADLINE_S)
    lines = [f"  two readers: {name:<29} {_ms(blocks[name]):>8} ms" for name in shared.SHARED]
    bare = p50s(blocks[BARE])
    lines += [
        _judged("two: streamed / the longer bare copy", p50s(blocks[shared.TWO_STREAMED]), _longer(blocks), 1.35),
        _judged(
            "two: streamed+sharded / the longer bare copy", p50s(blocks[shared.STREAMED_SHARDED]), _longer(blocks), 1.35
        ),
        _judged("two: lent+sharded / bare pinned copy", p50s(blocks[shared.LENT_SHARDED]), bare, 0.85),
    ]
    return lines


def _judged(what: str, found: list[float], yardstick: list[float], limit: float) -> str:
    ratio = paired(found, yardstick).median
    return f"  {what:<46} {ratio:.2f} x   required <= {limit} x   {'met' if ratio <= limit else 'NOT MET'}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--two", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bytes", type=int, default=NBYTES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-tests", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    trouble = "" if options.no_tests else check(options.two)
    preload("arena", "torch")
    lines = two_readers(options) if options.two else one_reader(options)
    print(f"\n{options.bytes / 1e6:g} MB to {options.device}, median of {options.rounds} x {options.repeats}:")
    print("\n".join(lines))
    print(
        f"  tests: {trouble or ('left out' if options.no_tests else 'passed')}; {time.monotonic() - began:.0f} s in all"
    )
    return int(bool(trouble))


if __name__ == "__main__":
    sys.exit(main())
