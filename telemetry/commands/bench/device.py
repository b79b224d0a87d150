"""`arena bench device`: from a writer's tensor to a reader's device, in bare pinned copies of the same bytes.

A message that is copied to shared memory and from there to the device can't be faster than both copies, unless it is
streamed: then not than the longer one of them; one that was lent, not than the second. Where there are two devices, two
readers get the same, each alone and shared out. What comes back is timed, too: a block's release after its copy.

Where there is no typer: ``python -m telemetry.commands.bench.device [--device cpu] [--quick] [--json] [--check]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rich.console import Console

from telemetry.commands.bench.children import BlockFailed, run_apart
from telemetry.commands.bench.contenders import preload
from telemetry.commands.bench.device_moves import (
    BARE,
    HOST,
    LENT,
    MOVES,
    PINNED,
    RELEASED_BYTES,
    RELEASES,
    STREAMED,
    Plan,
    device_name,
    measure,
    why_not,
)
from telemetry.commands.bench.device_shared import LENT_SHARDED, SHARED, TWO_STREAMED, devices, measure_shared
from telemetry.commands.bench.harness import Block, p50s, p99s, paired, spread
from telemetry.commands.bench.report import Figure, Report, show
from telemetry.commands.bench.settings import COMPARABLE_PAIRS, Settings, note

DEVICES: Final = ("cuda", "cpu")
SIZES: Final = (1_000_000, 23_000_000, 96_000_000, 213_000_000)
QUICK_SIZES: Final = (20_000_000,)
_REPEATS: Final = 5
_QUICK_ROUNDS: Final = 2
_QUICK_REPEATS: Final = 1
_RELEASES_A_ROUND: Final = 50
_QUICK_RELEASES: Final = 4
_LEAST_JUDGED: Final = 20_000_000  # below that the wake-ups count, not the copies
_LEAST_STREAMED: Final = 200_000_000  # likewise: what streaming takes by itself counts at less
_SHARED_BYTES: Final = 200_000_000
_QUICK_SHARED_BYTES: Final = 20_000_000
_DEADLINE_S: Final = 600.0


@dataclass(frozen=True)
class DeviceSettings(Settings):
    """What one run measures."""

    readers: tuple[int, ...] = (1,)
    device: str = "cuda"


def settings(*, device: str, pairs: int, quick: bool) -> DeviceSettings:
    """Settings from the command line."""
    return DeviceSettings(device=device, pairs=min(pairs, _QUICK_ROUNDS) if quick else pairs, quick=quick)


def measured(chosen: Settings) -> Report:
    """Every size in turn, then the releases.

    Raises:
        BlockFailed: there is no such device, or a block gave no result.
    """
    assert isinstance(chosen, DeviceSettings)
    preload("arena", "torch")
    trouble = run_apart(partial(why_not, chosen.device), _DEADLINE_S)
    if trouble:
        raise BlockFailed(trouble)
    report = Report("device", chosen, against=BARE)
    report.machine["device"] = run_apart(partial(device_name, chosen.device), _DEADLINE_S)
    report.remarks.append(f"device: {report.machine['device']}")
    sizes = QUICK_SIZES if chosen.quick else SIZES
    repeats = _QUICK_REPEATS if chosen.quick else _REPEATS
    for nbytes in sizes:
        _report_moves(report, Plan(chosen.device, nbytes, MOVES, chosen.pairs, repeats))
    _report_shared(report, chosen)
    _report_releases(report, chosen)
    return report


def _report_moves(report: Report, plan: Plan) -> None:
    case = f"{plan.nbytes / 1e6:g} MB to the device"
    note(case)
    blocks = run_apart(partial(measure, plan), _DEADLINE_S)
    bare, host = p50s(blocks[BARE]), p50s(blocks[HOST])
    report.figures += [_figure(case, name, found, bare) for name, found in blocks.items()]
    if plan.nbytes >= _LEAST_JUDGED or report.settings.quick:
        both = [there + here for there, here in zip(bare, host, strict=True)]
        limit = 1.1 if plan.nbytes >= _LEAST_STREAMED else 1.25
        report.require(f"{case}: lent, over a bare pinned copy", limit, "x", paired(p50s(blocks[LENT]), bare))
        report.require(
            f"{case}: pinned, over a host copy + a pinned one", 1.25, "x", paired(p50s(blocks[PINNED]), both)
        )
    if plan.nbytes >= _LEAST_STREAMED or report.settings.quick:
        longer = list(map(max, bare, host))
        report.require(
            f"{case}: streamed, over the longer of the two bare copies",
            1.25,
            "x",
            paired(p50s(blocks[STREAMED]), longer),
        )


def _report_shared(report: Report, chosen: DeviceSettings) -> None:
    """Two readers, a device each."""
    found = run_apart(partial(devices, chosen.device), _DEADLINE_S)
    if found < 2:
        report.remarks.append(f"two readers: not measured, {found} device here")
        return
    nbytes = _QUICK_SHARED_BYTES if chosen.quick else _SHARED_BYTES
    case = f"{nbytes / 1e6:g} MB to two devices, the slower reader"
    note(case)
    repeats = _QUICK_REPEATS if chosen.quick else _REPEATS
    blocks = run_apart(partial(measure_shared, Plan(chosen.device, nbytes, SHARED, chosen.pairs, repeats)), _DEADLINE_S)
    bare, host = p50s(blocks[BARE]), p50s(blocks[HOST])
    report.figures += [_figure(case, name, one, bare) for name, one in blocks.items()]
    longer = list(map(max, bare, host))
    report.require(
        f"{case}: streamed, over the longer of the two bare copies",
        1.35,
        "x",
        paired(p50s(blocks[TWO_STREAMED]), longer),
    )
    report.require(
        f"{case}: lent and sharded, over a bare pinned copy", 0.85, "x", paired(p50s(blocks[LENT_SHARDED]), bare)
    )


def _report_releases(report: Report, chosen: DeviceSettings) -> None:
    case = "a block's release after its copy"
    note(case)
    repeats = _QUICK_RELEASES if chosen.quick else _RELEASES_A_ROUND
    plan = Plan(chosen.device, RELEASED_BYTES, RELEASES, chosen.pairs, repeats)
    blocks = run_apart(partial(measure, plan), _DEADLINE_S)
    report.figures += [_figure(case, name, found, None) for name, found in blocks.items()]
    if chosen.device == "cuda":  # the CPU's engine is a thread of the reader, and waits for its GIL
        for name in RELEASES:
            if name.startswith("ticket"):
                found = spread([p50 / 1e3 for p50 in p50s(blocks[name])])
                report.require(f"{case}: {name}, p50", 20, "µs", found)


def _figure(case: str, name: str, blocks: list[Block], yardstick: list[float] | None) -> Figure:
    ratio = "" if yardstick is None else f"{paired(p50s(blocks), yardstick).median:.2f}"
    return Figure(case, name, spread(p50s(blocks)).median, spread(p99s(blocks)).median, remark=ratio)


def main(arguments: list[str] | None = None) -> int:
    """The same as the command, with the standard library's parser."""
    parser = argparse.ArgumentParser(prog="python -m telemetry.commands.bench.device", description=__doc__)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--pairs", type=int, default=COMPARABLE_PAIRS, help="rounds in which the contenders alternate")
    for name in ("quick", "json", "check"):
        parser.add_argument(f"--{name}", action="store_true")
    options: Any = parser.parse_args(arguments)
    chosen = settings(device=options.device, pairs=options.pairs, quick=options.quick)
    if options.check and not chosen.comparable:
        parser.error("--check: a shortened run is not comparable, and checks nothing")
    try:
        report = measured(chosen)
    except BlockFailed as failure:
        print(f"arena bench: {failure}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 100))
    return int(options.check and not all(one.passed for one in report.requirements))


if __name__ == "__main__":
    sys.exit(main())
