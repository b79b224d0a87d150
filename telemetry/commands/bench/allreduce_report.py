"""What `arena bench allreduce` makes of its cells: lines, the report, the requirements. Without typer and rich."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

from telemetry.commands.bench import machine
from telemetry.commands.bench.allreduce_cells import RIGS, Case, Cell, measure
from telemetry.commands.bench.children import run_apart
from telemetry.commands.bench.contenders import preload
from telemetry.commands.bench.harness import Spread, p50s, p99s, paired, spread

KIB: Final = 1 << 10
MIB: Final = 1 << 20
TOKEN_BYTES: Final = 16 * KIB
SIZES: Final = (
    *(8 * KIB << power for power in range(6)),  # decoding
    *(TOKEN_BYTES * tokens for tokens in (32, 64, 96, 128, 192, 256, 1024, 2048, 3062, 4096)),
)
QUICK_SIZES: Final = (8 * KIB, 256 * KIB, 4 * MIB)
COMPARABLE_ROUNDS: Final = 7
QUICK_ROUNDS: Final = 2
_DEADLINE_S: Final = 1800

REQUIRED_ON_CPU: Final = ((256 * KIB, 10.0), (4 * MIB, 3.0), (64 * MIB, 2.0))
"""Up to so many bytes, at two ranks, so many times as fast as gloo."""


@dataclass(frozen=True)
class Line:
    """One case, all contenders: what the table shows."""

    case: Case
    cells: dict[str, Cell]
    fallback: str

    @property
    def best(self) -> str:
        """The fastest contender, by the median of its rounds, but for those that give no new tensor."""
        return min((name for name in self.cells if "in place" not in name), key=self.p50)

    def p50(self, name: str) -> float:
        """The median, in ns."""
        return spread(p50s(self.cells[name].blocks)).median

    def p99(self, name: str) -> float:
        """The 99th percentile, in ns."""
        return spread(p99s(self.cells[name].blocks)).median

    def speed_up(self, name: str) -> Spread:
        """How many times as fast as the fallback, round by round."""
        return paired(p50s(self.cells[self.fallback].blocks), p50s(self.cells[name].blocks))


def measured(device: str, world: int, sizes: Sequence[int], rounds: int) -> list[Line]:
    """Every case, hot and rotating.

    Raises:
        BlockFailed: a rank failed.
    """
    preload("arena", "torch", "torch.distributed")
    cases = [Case(nbytes, rotating) for nbytes in sizes for rotating in (False, True)]
    work = partial(measure, device, world, cases, rounds)
    cells = work() if "RANK" in os.environ else run_apart(work, _DEADLINE_S)
    fallback = import_module(RIGS[device]).FALLBACK
    return [Line(case, {cell.contender: cell for cell in cells if cell.case == case}, fallback) for case in cases]


# ── the report ───────────────────────────────────────────────────────────────────────────────────
def report_of(device: str, world: int, comparable: bool, lines: Sequence[Line]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "bench": "allreduce",
        "comparable": comparable,
        "settings": {"device": device, "world": world},
        "machine": machine.facts(),
        "rows": [row for line in lines for row in _rows(line)],
        "requirements": list(_requirements(device, world, lines)),
    }


def _rows(line: Line) -> Iterable[dict[str, Any]]:
    for name, cell in line.cells.items():
        yield {
            "bytes": line.case.nbytes,
            "tokens": line.case.tokens,
            "inputs": inputs_of(line.case),
            "contender": name,
            "p50_ns": line.p50(name),
            "p99_ns": line.p99(name),
            "p50_ns_by_rank": cell.by_rank,
            "speed_up": asdict(line.speed_up(name)),
            "best": name == line.best,
        }


def _requirements(device: str, world: int, lines: Sequence[Line]) -> Iterable[dict[str, Any]]:
    """Lower bounds on how many times as fast as the fallback Arena's own choice is."""
    if device != "cpu" or world != 2:
        return
    for line in lines:
        required = next((times for up_to, times in REQUIRED_ON_CPU if line.case.nbytes <= up_to), None)
        if required is not None:
            measured = line.speed_up("arena")
            yield {
                "text": f"{size_of(line.case.nbytes)}, {inputs_of(line.case)}: times as fast as {line.fallback}",
                "required": required,
                **asdict(measured),
                "passed": measured.median >= required,
            }


def inputs_of(case: Case) -> str:
    """In a word."""
    return "rotating" if case.rotating else "hot"


def size_of(nbytes: int) -> str:
    """As people write it."""
    return f"{nbytes / MIB:.4g} MiB" if nbytes >= MIB else f"{nbytes / KIB:.4g} KiB"


def us(ns: float) -> str:
    """Microseconds, as many digits as mean something."""
    return f"{ns / 1e3:.1f}" if ns < 1e5 else f"{ns / 1e3:.0f}"
