"""`arena bench allreduce`: every way to all-reduce, at every size, in one run; the best and its speed-up come last.

The sizes are tokens of 8192 bfloat16 numbers, from half a token to 4096 of them: those of the public benchmark that
Arena's figures are held against, and the small ones of decoding that it leaves out.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from telemetry.commands.bench import options
from telemetry.commands.bench.allreduce_cells import RIGS
from telemetry.commands.bench.allreduce_report import (
    COMPARABLE_ROUNDS,
    KIB,
    MIB,
    QUICK_ROUNDS,
    QUICK_SIZES,
    SIZES,
    TOKEN_BYTES,
    Line,
    inputs_of,
    measured,
    report_of,
    size_of,
    us,
)
from telemetry.commands.bench.children import BlockFailed
from telemetry.commands.bench.plot import svg

__all__ = ["KIB", "MIB", "SIZES", "TOKEN_BYTES", "Line", "command"]

_WIDTH: Final = 200

Device = Annotated[str, typer.Option(help=f"{' or '.join(RIGS)}.")]
World = Annotated[int, typer.Option(min=2, max=8, help="Ranks; under torchrun its own number counts.")]
Sizes = Annotated[str, typer.Option(help="Sizes in KiB, separated by commas; all of them if empty.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the medians by size, as SVG.")]
Against = Annotated[Path | None, typer.Option(help="A CSV file with published figures, shown beside ours.")]


def command(  # noqa: PLR0913, PLR0917 - an option each
    device: Device = "cpu",
    world: World = 2,
    sizes: Sizes = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the contenders alternate.")] = COMPARABLE_ROUNDS,
    against: Against = None,
    plot: Plot = None,
    quick: options.Quick = False,
    as_json: options.Json = False,
    check: options.Check = False,
) -> None:
    """Sum a tensor over the ranks: Arena's choice, each of its paths, and the library behind it."""
    if device not in RIGS:
        raise typer.BadParameter(f"expected {' or '.join(RIGS)}, found {device!r}", param_hint="--device")
    world = int(os.environ.get("WORLD_SIZE", world))
    chosen = _sizes(sizes) or (QUICK_SIZES if quick else SIZES)
    comparable = not quick and rounds >= COMPARABLE_ROUNDS
    if check and not comparable:
        raise typer.BadParameter("a shortened run is not comparable, and checks nothing", param_hint="--check")
    if plot is not None and not plot.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {plot.parent}", param_hint="--plot")
    published = _published(against, world) if against is not None else {}
    try:
        lines = measured(device, world, chosen, min(rounds, QUICK_ROUNDS) if quick else rounds)
    except BlockFailed as failure:
        typer.echo(f"arena bench: {failure}", err=True)
        raise typer.Exit(1) from None
    if os.environ.get("RANK", "0") != "0":
        return
    report = report_of(device, world, comparable, lines)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report, lines, published, Console(width=None if sys.stdout.isatty() else _WIDTH))
    if plot is not None:
        plot.write_text(_plot(report, lines))
    if check and not all(one["passed"] for one in report["requirements"]):
        raise typer.Exit(1)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) * KIB for part in text.split(",") if part}))
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 8,256, found {text!r}", param_hint="--sizes") from None
    if sizes and sizes[0] <= 0:
        raise typer.BadParameter(f"expected sizes from 1 KiB, found {text!r}", param_hint="--sizes")
    return sizes


def _show(
    report: dict[str, Any], lines: Sequence[Line], published: dict[int, dict[str, str]], console: Console
) -> None:
    facts = report["machine"]
    console.print(
        f"{facts['cpu']}, {facts['usable_cores']} of {facts['cores']} cores, load {facts['load_1min']}, "
        f"Linux {facts['kernel']}, torch {facts['versions']['torch']}, {facts['date']}",
        highlight=False,
    )
    if not report["comparable"]:
        console.print("NOT COMPARABLE: a shortened run only shows that everything works.", style="yellow")
    console.print(_table(report, lines, published))
    if report["requirements"] and report["comparable"]:
        console.print(_verdicts(report["requirements"]))


def _table(report: dict[str, Any], lines: Sequence[Line], published: dict[int, dict[str, str]]) -> Table:
    settings = report["settings"]
    title = f"all-reduce, {settings['device']}, {settings['world']} ranks: µs of the slowest rank, p50 (p99)"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    names = list(lines[0].cells)
    others = list(next(iter(published.values()), {}))
    for heading in ("tokens", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("inputs", no_wrap=True)
    for heading in (*names, *others):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("best", no_wrap=True)
    table.add_column(f"over {lines[0].fallback}", justify="right", no_wrap=True)
    for line in lines:
        theirs = published.get(line.case.nbytes, {})
        table.add_row(
            f"{line.case.tokens:g}",
            size_of(line.case.nbytes),
            inputs_of(line.case),
            *(f"{us(line.p50(name))} ({us(line.p99(name))})" for name in names),
            *(theirs.get(name, "") for name in others),
            line.best,
            f"{line.speed_up(line.best).median:.1f} x",
        )
    return table


def _plot(report: dict[str, Any], lines: Sequence[Line]) -> str:
    settings, facts = report["settings"], report["machine"]
    chip = facts["cpu"] if settings["device"] == "cpu" else settings["device"]
    title = f"all-reduce, {settings['world']} ranks, {chip}, {facts['date']}: p50 of the slowest rank, hot inputs"
    hot = [line for line in lines if not line.case.rotating]
    return svg(title, {name: [(line.case.nbytes, line.p50(name)) for line in hot] for name in hot[0].cells})


def _verdicts(requirements: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="requirements", title_justify="left")
    table.add_column("requirement")
    for heading in ("required", "measured", "(rounds)", "pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in requirements:
        rounds = f"{one['low']:.1f}–{one['high']:.1f}"
        passed = "yes" if one["passed"] else "NO"
        table.add_row(one["text"], f">= {one['required']:g} x", f"{one['median']:.1f} x", rounds, passed)
    return table


# ── published figures ────────────────────────────────────────────────────────────────────────────
def _published(path: Path, world: int) -> dict[int, dict[str, str]]:
    """Of each GPU in the file, at this world size, by bytes: NCCL's figure and the best one."""
    found: dict[int, dict[str, str]] = {}
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if int(row["tp"]) == world:
                    columns = found.setdefault(int(row["tokens"]) * TOKEN_BYTES, {})
                    columns[f"{row['gpu']}: nccl, best"] = f"{row['nccl_us']}, {_fastest(row)}"
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise typer.BadParameter(f"no table of published figures: {error!r}", param_hint="--against") from None
    return found


def _fastest(row: dict[str, str]) -> str:
    return min((row[name] for name in row if name.endswith("_us") and row[name]), key=float)
