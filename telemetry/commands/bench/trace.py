"""`arena bench trace`: what tracing costs a small step: not installed, sampling a little, sampling everything.

There is no build without the hooks to compare with, so what tracing costs where it is not installed is measured by
itself: the checks as they stand in `enqueue`, in a loop, less the same loop without them. (`dequeue` has none: a
sampled frame has another tag, and leaves the short path by that.)

The sides take turns in the same processes, which install and remove tracing between them: two pairs of processes differ
by more than tracing costs. A turn lasts seconds, many times as long as spans wait for being made and sent.

Spans go over OTLP/HTTP to a thread of the command's own process, which takes them and keeps nothing. On a machine with
few cores, it and the threads that make and send spans take their time from the two ends that are measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from telemetry.commands.bench import floor, options
from telemetry.commands.bench.children import BlockFailed, run_apart
from telemetry.commands.bench.contenders import Arena, Ends, crew, preload
from telemetry.commands.bench.harness import Block, p50s, paired, spread, summarise
from telemetry.commands.bench.options import Settings
from telemetry.commands.bench.report import Report, figure, run

OFF, SOME, ALL = "not installed", "1 % sampled", "100 % sampled"
RATIOS = {OFF: None, SOME: 0.01, ALL: 1.0}

_CHECKS_LIMIT_NS = 60
_SOME_LIMIT = 1.05
_LOOPS = 200_000
_TIMES_MESSAGES = 16  # a turn has so many times the messages of a block of the other benches


def command(
    readers: options.Readers = "1",
    pairs: options.Pairs = options.COMPARABLE_PAIRS,
    messages: options.Messages = options.COMPARABLE_MESSAGES,
    quick: options.Quick = False,
    as_json: options.Json = False,
    check: options.Check = False,
) -> None:
    """Round trip of a small step without tracing, with 1 % of the messages traced, and with all of them."""
    settings = options.settings(readers=readers, pairs=pairs, messages=messages, peers=False, quick=quick)
    run(measure, settings, as_json=as_json, check=check)


@dataclass(frozen=True)
class _Turn:
    """A turn's times, and what its writer sampled and had no room for."""

    block: Block
    sampled: int
    dropped: int


def measure(settings: Settings) -> Report:
    """The checks by themselves; then, for every number of readers, rounds of the three sides."""
    try:
        preload("arena", "telemetry.traces", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        raise BlockFailed("this needs an OTLP exporter; run: pip install 'arena-dataplane[otlp]'") from None
    report = Report("trace", settings)
    checks = [run_apart(_checks_ns, settings.block_deadline_s) for _ in range(settings.pairs)]
    report.require("not installed: the checks in one enqueue and dequeue", _CHECKS_LIMIT_NS, "ns", spread(checks))
    with _collector() as url:
        for readers in settings.readers:
            _measure_readers(report, settings, readers, url)
    return report


def _measure_readers(report: Report, settings: Settings, readers: int, url: str) -> None:
    case = f"{readers} reader{'s' if readers > 1 else ''}"
    messages = settings.messages * _TIMES_MESSAGES
    turns: dict[str, list[_Turn]] = {name: [] for name in RATIOS}
    for index in range(settings.pairs):
        options.note(f"{case}, round {index + 1} of {settings.pairs}")
        order = tuple(RATIOS) if index % 2 == 0 else tuple(reversed(RATIOS))
        result = run_apart(partial(_round, order, readers, messages, url), settings.block_deadline_s * _TIMES_MESSAGES)
        for name, turn in result.items():
            turns[name].append(turn)
    blocks = {name: [turn.block for turn in own] for name, own in turns.items()}
    report.figures += [figure(case, name, own, blocks[OFF]) for name, own in blocks.items()]
    over = paired(p50s(blocks[SOME]), p50s(blocks[OFF]))
    report.require(f"{case}: round trip p50 with 1 % traced over without tracing", _SOME_LIMIT, "x", over)
    for name in (SOME, ALL):
        sampled, dropped = (sum(getattr(turn, what) for turn in turns[name]) for what in ("sampled", "dropped"))
        report.remarks.append(f"{case}, {name}: {sampled} messages traced, {dropped} that there was no room for")


def _round(order: tuple[str, ...], readers: int, messages: int, url: str) -> dict[str, _Turn]:
    """One turn of each side, and one before that is not counted: caches, page tables and spins find their pace."""
    clock = time.perf_counter_ns
    found = {}
    contender = Arena()
    with crew(contender, readers, partial(_answer, order, messages, url)) as at_work:
        tracing = _Tracing(url)
        send, receives = at_work.ends.send, at_work.ends.receives
        for name in (OFF, *order):
            tracing.switch(RATIOS[name])
            at_work.exchange(name)  # the readers have switched, too
            before = _outcome(contender.queue)
            times = []
            for _ in range(messages):
                start = clock()
                send(floor.OBJ)
                for receive in receives:
                    receive()
                times.append(clock() - start)
            sampled, dropped = (now - then for now, then in zip(_outcome(contender.queue), before, strict=True))
            found[name] = _Turn(summarise(times), sampled, dropped)
    return found


def _answer(order: tuple[str, ...], messages: int, url: str, ends: Ends) -> None:
    (receive,) = ends.receives
    answer = ends.send
    tracing = _Tracing(url)
    for name in (OFF, *order):
        tracing.switch(RATIOS[name])
        answer(receive())
        for index in range(messages):
            receive()
            answer(index)


class _Tracing:
    """Installs tracing in this process, and removes it."""

    def __init__(self, url: str) -> None:
        from telemetry import traces

        self._traces = traces
        self._provider = traces.otlp_provider(url)

    def switch(self, ratio: float | None) -> None:
        if ratio is None:
            self._traces.uninstall()
        else:
            self._traces.install(self._provider, ratio=ratio)


def _outcome(queue: Any) -> tuple[int, int]:
    """What a writer sampled and dropped so far, from its probe page."""
    probe = queue._probe
    sampled, dropped = (probe.values[probe.word(name)] for name in ("traces_sampled_total", "traces_dropped_total"))
    return sampled, dropped


def _checks_ns() -> float:
    """The checks that `enqueue` makes for tracing, as they stand there, less an empty loop; the best of seven."""
    from arena.probe import hooks

    clock = time.perf_counter_ns
    best = float("inf")
    for _ in range(7):
        start = clock()
        for _ in range(_LOOPS):
            sending = None
            if (source := hooks.trace_source) is not None:
                sending = source(0)
            if sending is not None:
                raise AssertionError
            if sending is None:
                pass
        between = clock()
        for _ in range(_LOOPS):
            pass
        best = min(best, (between - start) - (clock() - between))
    return best / _LOOPS


@contextmanager
def _collector() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Taker)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Taker(BaseHTTPRequestHandler):
    """Answers that it has taken everything: an empty message says so."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""
