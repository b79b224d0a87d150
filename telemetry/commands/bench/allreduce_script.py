"""`arena bench allreduce` for machines that have torch and nothing else: the same cells, without typer and rich.

python -m telemetry.commands.bench.allreduce_script --device cuda --world 2 --sizes 8,256,65536 --json report.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from telemetry.commands.bench.allreduce_cells import RIGS
from telemetry.commands.bench.allreduce_report import (
    COMPARABLE_ROUNDS,
    KIB,
    QUICK_ROUNDS,
    QUICK_SIZES,
    SIZES,
    Line,
    inputs_of,
    measured,
    report_of,
    size_of,
    us,
)
from telemetry.commands.bench.children import BlockFailed


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--device", choices=sorted(RIGS), default="cpu")
    parser.add_argument("--world", type=int, default=int(os.environ.get("WORLD_SIZE", "2")))
    parser.add_argument("--sizes", default="", help="in KiB, separated by commas")
    parser.add_argument("--rounds", type=int, default=COMPARABLE_ROUNDS)
    parser.add_argument("--quick", action="store_true", help="only show that everything works")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    given = parser.parse_args()
    sizes = tuple(int(size) * KIB for size in given.sizes.split(",") if size)
    try:
        chosen, rounds = (QUICK_SIZES, QUICK_ROUNDS) if given.quick else (SIZES, given.rounds)
        lines = measured(given.device, given.world, sizes or chosen, rounds)
    except BlockFailed as failure:
        print(f"arena bench: {failure}", file=sys.stderr)
        return 1
    if os.environ.get("RANK", "0") != "0":
        return 0
    comparable = not given.quick and given.rounds >= COMPARABLE_ROUNDS
    report = report_of(given.device, given.world, comparable, lines)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=2))
    print(
        f"{report['machine']}\n{'' if comparable else 'NOT COMPARABLE: a shortened run. '}us, p50 of the slowest rank"
    )
    print(*_table(lines), *(str(one) for one in report["requirements"]), sep="\n")
    return 0


def _table(lines: Sequence[Line]) -> Iterable[str]:
    names = list(lines[0].cells)
    yield " ".join([f"{'size':>10} {'inputs':9}", *(f"{name:>18}" for name in names), "best"])
    for line in lines:
        times = (f"{us(line.p50(name)):>18}" for name in names)
        yield " ".join([f"{size_of(line.case.nbytes):>10} {inputs_of(line.case):9}", *times, line.best])


if __name__ == "__main__":
    sys.exit(main())
