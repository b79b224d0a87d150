"""What a run says: a row for every contender, then every requirement with what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from telemetry.commands.bench import machine
from telemetry.commands.bench.children import BlockFailed
from telemetry.commands.bench.harness import Block, Spread, p50s, p99s, paired, spread
from telemetry.commands.bench.settings import Settings, note

_WIDTH = 100


@dataclass(frozen=True)
class Figure:
    """One contender in one case. Without times, `remark` says why there are none."""

    case: str
    contender: str
    p50_ns: float | None = None
    p99_ns: float | None = None
    ratio_to_arena: float | None = None
    remark: str = ""


@dataclass(frozen=True)
class Requirement:
    """A promise and what became of it. `low` and `high` are its lowest and highest round."""

    text: str
    limit: float
    unit: str
    measured: float
    low: float
    high: float

    @property
    def passed(self) -> bool:
        """Every requirement here is an upper bound."""
        return self.measured <= self.limit


@dataclass
class Report:
    """Everything one command prints."""

    bench: str
    settings: Settings
    machine: dict[str, Any] = field(default_factory=machine.facts)
    figures: list[Figure] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    against: str = "arena"  # what each contender's p50 is divided by

    def require(self, text: str, limit: float, unit: str, measured: Spread | float) -> None:
        """Adds a requirement; a single measurement is its own spread."""
        found = measured if isinstance(measured, Spread) else Spread(measured, measured, measured)
        self.requirements.append(Requirement(text, limit, unit, found.median, found.low, found.high))

    def as_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "bench": self.bench,
            "comparable": self.settings.comparable,
            "settings": self.settings.as_json(),
            "machine": self.machine,
            "contenders": [asdict(figure) for figure in self.figures],
            "requirements": [{**asdict(item), "passed": item.passed} for item in self.requirements],
            "remarks": self.remarks,
        }


def figure(case: str, name: str, blocks: list[Block], arena: list[Block]) -> Figure:
    """Medians over a contender's blocks, and over their ratios to Arena's blocks of the same rounds."""
    ratio = paired(p50s(blocks), p50s(arena)).median
    return Figure(case, name, spread(p50s(blocks)).median, spread(p99s(blocks)).median, ratio)


def absent(case: str, missing: Mapping[str, str], failed: Mapping[str, str]) -> list[Figure]:
    """A row for each contender without figures, with the reason."""
    reasons = {name: why for name, why in missing.items() if why}
    reasons |= {name: f"failed: {why}" for name, why in failed.items()}
    return [Figure(case, name, remark=why) for name, why in reasons.items()]


def run(measure: Callable[[Settings], Report], settings: Settings, *, as_json: bool, check: bool) -> None:
    """Measures and prints. Exit code 1: a block failed, or with `check` a requirement was missed."""
    import typer  # only here: a report can be made without it

    if check and not settings.comparable:
        raise typer.BadParameter("a shortened run is not comparable, and checks nothing", param_hint="--check")
    try:
        report = measure(settings)
    except BlockFailed as failure:
        note("")
        typer.echo(f"arena bench: {failure}", err=True)
        raise typer.Exit(1) from None
    note("")
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else _WIDTH))
    if check and not all(requirement.passed for requirement in report.requirements):
        raise typer.Exit(1)


def show(report: Report, console: Console) -> None:
    """Two tables; the machine comes first, because without it no figure means anything."""
    facts = report.machine
    console.print(
        f"{facts['cpu']}, {facts['usable_cores']} of {facts['cores']} cores, load {facts['load_1min']}, "
        f"Linux {facts['kernel']}, Python {facts['python']}, {facts['date']}",
        highlight=False,
    )
    if not report.settings.comparable:
        console.print(
            "NOT COMPARABLE: a shortened run only shows that everything works, so no requirement is judged by it.",
            style="yellow",
        )
    for remark in report.remarks:
        console.print(remark, highlight=False)
    console.print(_figures(report))
    console.print(_requirements(report))


def duration(ns: float) -> str:
    """Three digits and the unit that suits."""
    for limit, divisor, unit in ((1e6, 1e3, "µs"), (1e9, 1e6, "ms")):
        if ns < limit:
            return f"{_three_digits(ns / divisor)} {unit}"
    return f"{_three_digits(ns / 1e9)} s"


def _figures(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"arena bench {report.bench}", title_justify="left")
    table.add_column("case")
    table.add_column("contender")
    for heading in ("p50", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(f"p50 / {report.against}", justify="right")
    previous = ""
    for item in report.figures:
        times = [duration(ns) if ns is not None else "" for ns in (item.p50_ns, item.p99_ns)]
        ratio = f"{item.ratio_to_arena:.2f}" if item.ratio_to_arena is not None else item.remark
        table.add_row(item.case if item.case != previous else "", item.contender, *times, ratio)
        previous = item.case
    return table


def _requirements(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="requirements", title_justify="left")
    table.add_column("requirement")
    verdict = ["pass"] if report.settings.comparable else []
    for heading in ["required", "measured", "(rounds)", *verdict]:
        table.add_column(heading, justify="right", no_wrap=True)
    for item in report.requirements:
        rounds = f"{_three_digits(item.low)}–{_three_digits(item.high)}" if item.low != item.high else ""
        table.add_row(
            item.text,
            f"<= {item.limit:g} {item.unit}",
            f"{_three_digits(item.measured)} {item.unit}",
            rounds,
            *(("yes" if item.passed else "NO") for _ in verdict),
        )
    return table


def _three_digits(value: float) -> str:
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f}"
