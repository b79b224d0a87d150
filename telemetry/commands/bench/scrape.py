"""`arena bench scrape`: what watching costs, both who watches and who is watched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from telemetry.commands.bench import options
from telemetry.commands.bench.children import run_apart
from telemetry.commands.bench.contenders import preload
from telemetry.commands.bench.harness import p50s, paired, summarise
from telemetry.commands.bench.options import Settings
from telemetry.commands.bench.report import Report, figure, run
from telemetry.commands.bench.scraping import growth, scrapes, watched

_QUEUES, _READERS = 16, 8


@dataclass(frozen=True)
class Plan:
    """How often everything is measured. Messages are paced, so that one block lasts about a second of 1 Hz."""

    rounds: int
    scrapes: int
    pairs: int
    messages: int
    gap_s: float = 0.002


_FULL = Plan(rounds=21, scrapes=10_000, pairs=40, messages=500)
_QUICK = Plan(rounds=3, scrapes=300, pairs=2, messages=30)


def command(
    quick: options.Quick = False,
    as_json: options.Json = False,
    check: options.Check = False,
) -> None:
    """One scrape against writing constants out, growth over many, and a round trip while it is scraped."""
    run(measure, options.settings(quick=quick), as_json=as_json, check=check)


def measure(settings: Settings) -> Report:
    """A block for the scrape itself, one for many of them, and one for the queue that is scraped."""
    preload("arena", "telemetry.metrics")
    report = Report("scrape", settings)
    plan = _QUICK if settings.quick else _FULL
    _measure_scrape(report, settings, plan)
    _measure_growth(report, settings, plan)
    _measure_watched(report, settings, plan)
    return report


def _measure_scrape(report: Report, settings: Settings, plan: Plan) -> None:
    options.note(f"{plan.rounds} scrapes of {_QUEUES} queues")
    found = run_apart(partial(scrapes, _QUEUES, _READERS, plan.rounds), settings.block_deadline_s)
    case = f"one scrape, {_QUEUES} queues of {_READERS} readers"
    arena, constants = ([summarise([one]) for one in times] for times in (found.arena, found.constants))
    report.remarks.append(f"{case}: {found.samples} samples")
    report.figures.append(figure(case, "arena", arena, arena))
    report.figures.append(figure(case, "generate_latest of constants", constants, arena))
    report.require(f"{case}: over as many constants", 2.0, "x", paired(p50s(arena), p50s(constants)))


def _measure_growth(report: Report, settings: Settings, plan: Plan) -> None:
    options.note(f"{plan.scrapes} scrapes of one queue")
    grown = run_apart(partial(growth, plan.scrapes), settings.block_deadline_s)
    report.require(f"{plan.scrapes} scrapes: growth of the process", 1.0, "MiB", grown.resident_bytes / (1 << 20))
    report.require(f"{plan.scrapes} scrapes: more Python objects", 100, "", grown.objects)


def _measure_watched(report: Report, settings: Settings, plan: Plan) -> None:
    seconds = 2 * plan.pairs * plan.messages * plan.gap_s
    options.note(f"round trips with and without a scrape: about {seconds:.0f} s")
    block = partial(watched, plan.pairs, plan.messages, plan.gap_s)
    turns = run_apart(block, settings.block_deadline_s + 5 * seconds)
    alone, scraped = ([summarise(times) for times in side] for side in (turns.alone, turns.scraped))
    case = f"round trip, {plan.messages} messages a block"
    report.figures.append(figure(case, "arena, not watched", alone, alone))
    report.figures.append(figure(case, "arena, scraped at 1 Hz", scraped, alone))
    report.require(f"{case}: p50 while scraped over p50 alone", 1.05, "x", paired(p50s(scraped), p50s(alone)))
