"""`arena bench trace`: what tracing costs a small step: not installed, sampling a little, sampling everything.

There is no build without the hooks to compare with, so what tracing costs where it is not installed is measured by
itself: the checks as they stand in `enqueue`, in a loop, less the same loop without them. (`dequeue` has none: a
sampled frame has another tag, and leaves the short path by that.) Everything else alternates, as in the other benches.

Spans go over OTLP/HTTP to a thread of the command's own process, which takes them and keeps nothing.
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

from telemetry.commands.bench import options
from telemetry.commands.bench.children import BlockFailed, run_apart
from telemetry.commands.bench.contenders import Arena, Ends, preload
from telemetry.commands.bench.harness import Block, Side, alternate, p50s, paired, spread, summarise
from telemetry.commands.bench.options import Settings
from telemetry.commands.bench.queue import round_trips
from telemetry.commands.bench.report import Report, figure, run

OFF, SOME, ALL = "not installed", "1 % sampled", "100 % sampled"
RATIOS = {OFF: None, SOME: 0.01, ALL: 1.0}

_CHECKS_LIMIT_NS = 60
_SOME_LIMIT = 1.05
_LOOPS = 200_000


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
class _Result:
    """A block's times, and what its writer sampled and had no room for."""

    block: Block
    sampled: int
    dropped: int


def measure(settings: Settings) -> Report:
    """The checks by themselves; then, for every number of readers, the three sides in turn."""
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
    sides = [
        Side(name, partial(_block_apart, settings, readers, ratio, url), settings.pairs)
        for name, ratio in RATIOS.items()
    ]
    turns = alternate(sides, lambda text: options.note(f"{case}, {text}"))
    blocks = {name: [result.block for result in results] for name, results in turns.blocks.items()}
    report.figures += [figure(case, name, own, blocks[OFF]) for name, own in blocks.items()]
    over = paired(p50s(blocks[SOME]), p50s(blocks[OFF]))
    report.require(f"{case}: round trip p50 with 1 % traced over without tracing", _SOME_LIMIT, "x", over)
    for name in (SOME, ALL):
        sampled, dropped = (sum(getattr(one, what) for one in turns.blocks[name]) for what in ("sampled", "dropped"))
        report.remarks.append(f"{case}, {name}: {sampled} messages traced, {dropped} dropped for want of room")


def _block_apart(settings: Settings, readers: int, ratio: float | None, url: str) -> _Result:
    return run_apart(partial(_block, settings, readers, ratio, url), settings.block_deadline_s)


def _block(settings: Settings, readers: int, ratio: float | None, url: str) -> _Result:
    contender = _Traced(ratio, url)
    times = round_trips(lambda: contender, readers, settings.messages, settings.dropped)
    return _Result(summarise(times), *contender.outcome)


class _Traced(Arena):
    """Arena with tracing installed in every process, or in none."""

    def __init__(self, ratio: float | None, url: str) -> None:
        super().__init__()
        self._ratio = ratio
        self._url = url
        self.outcome = (0, 0)

    def open_writer(self) -> Ends:
        self._install()
        return super().open_writer()

    def open_reader(self, rank: int) -> Ends:
        self._install()
        return super().open_reader(rank)

    def close(self) -> None:
        if self.queue is not None:
            self.outcome = _outcome(self.queue)
        super().close()

    def _install(self) -> None:
        if self._ratio is not None:
            from telemetry import traces

            traces.install(traces.otlp_provider(self._url), ratio=self._ratio)


def _outcome(queue: Any) -> tuple[int, int]:
    """What a writer sampled and dropped so far, from its probe page; a reader has no such words."""
    if queue.statistics().role != "writer":
        return 0, 0
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
            if hooks.trace_source is not None and (sampled := hooks.trace_source(0)) is not None:
                sending = sampled
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
