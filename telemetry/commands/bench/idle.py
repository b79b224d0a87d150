"""`arena bench idle`: what a reader costs while nothing happens, and how fast it is back when something does."""

from __future__ import annotations

from functools import partial

from telemetry.commands.bench import options
from telemetry.commands.bench.children import BlockFailed, run_apart
from telemetry.commands.bench.contenders import Arena, Contender, preload, why_missing
from telemetry.commands.bench.footprint import Footprint, footprint
from telemetry.commands.bench.options import Settings
from telemetry.commands.bench.peers import MultiprocessingPipe, Pyzmq, VllmMessageQueue
from telemetry.commands.bench.quiet import Plan, Quiet, quiet
from telemetry.commands.bench.report import Figure, Report, run
from telemetry.commands.bench.waking import BareFutex

PEERS: tuple[type[Contender], ...] = (BareFutex, MultiprocessingPipe, Pyzmq, VllmMessageQueue)

_FULL = Plan(idle_s=10.0, pause_s=1.0, pauses=20, long_pause_s=60.0, long_pauses=0, rate_hz=200, rate_s=5.0)
_LONG = Plan(idle_s=10.0, pause_s=1.0, pauses=20, long_pause_s=60.0, long_pauses=3, rate_hz=200, rate_s=5.0)
_QUICK = Plan(idle_s=0.5, pause_s=0.1, pauses=5, long_pause_s=0.5, long_pauses=1, rate_hz=200, rate_s=0.5)
_FOOTPRINT_READERS = 4
_MIB = 1 << 20


def command(
    peers: options.Peers = True,
    long: options.Long = False,
    quick: options.Quick = False,
    as_json: options.Json = False,
    check: options.Check = False,
) -> None:
    """CPU of an idle reader, the first message after a pause, a slow stream, and memory before the first tensor."""
    run(measure, options.settings(peers=peers, quick=quick, long=long), as_json=as_json, check=check)


def measure(settings: Settings) -> Report:
    """One quiet run a contender, one after the other: side by side they would wake each other's cores."""
    preload("arena")
    report = Report("idle", settings)
    plan = _QUICK if settings.quick else _LONG if settings.long else _FULL
    arena = _quiet(settings, plan, Arena)
    results: dict[str, Quiet | str] = {Arena.name: arena}
    for peer in PEERS if settings.peers else ():
        results[peer.name] = why_missing(peer) or _quiet_guest(settings, plan, peer)
    _add_figures(report, plan, results)
    _require(report, plan, arena)
    _require_footprint(report, _footprint(settings))
    return report


def _quiet(settings: Settings, plan: Plan, contender: type[Contender]) -> Quiet:
    options.note(f"{contender.name}: about {plan.seconds:.0f} s")
    return run_apart(partial(quiet, contender, plan), settings.block_deadline_s + plan.seconds)


def _quiet_guest(settings: Settings, plan: Plan, contender: type[Contender]) -> Quiet | str:
    try:
        return _quiet(settings, plan, contender)
    except BlockFailed as failure:
        return f"failed: {failure.reason}"


def _footprint(settings: Settings) -> Footprint:
    return run_apart(partial(footprint, _FOOTPRINT_READERS), settings.block_deadline_s)


def _add_figures(report: Report, plan: Plan, results: dict[str, Quiet | str]) -> None:
    arena = results[Arena.name]
    for index, label in enumerate(plan.labels):
        for name, result in results.items():
            if isinstance(result, str) or isinstance(arena, str):
                report.figures.append(Figure(label, name, remark=str(result)))
                continue
            delay = result.delays[index]
            report.figures.append(Figure(label, name, delay.p50, delay.p99, delay.p50 / arena.delays[index].p50))
    for name, result in results.items():
        if not isinstance(result, str):
            report.remarks.append(
                f"CPU of {name}'s reader: {result.idle_cpu:.2%} of a core idle, "
                f"{result.rate_cpu:.2%} at {plan.rate_hz} messages a second"
            )


def _require(report: Report, plan: Plan, arena: Quiet) -> None:
    after_pause, stream, *after_long = arena.delays
    report.require(f"CPU of a reader idle for {plan.idle_s:g} s, of a core", 0.5, "%", 100 * arena.idle_cpu)
    report.require(f"first message after {plan.pause_s:g} s: delay p50", 100, "µs", after_pause.p50 / 1e3)
    for delay in after_long:
        report.require(f"first message after {plan.long_pause_s:g} s: delay p50", 100, "µs", delay.p50 / 1e3)
    report.require(f"{plan.rate_hz} messages a second: CPU of the reader, of a core", 10, "%", 100 * arena.rate_cpu)
    report.require(f"{plan.rate_hz} messages a second: delay p99", 1000, "µs", stream.p99 / 1e3)


def _require_footprint(report: Report, found: Footprint) -> None:
    what = f"shared memory with {_FOOTPRINT_READERS} readers before the first large tensor"
    report.require(f"{what}: size", 4, "MiB", found.size_bytes / _MIB)
    report.require(f"{what}: allocated", 4, "MiB", found.allocated_bytes / _MIB)
