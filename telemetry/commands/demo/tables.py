"""The result for people: one column a run, and the ratio where there are two."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from signal import Signals

from rich.console import Console
from rich.table import Table

from telemetry.commands.demo.engine import STALL_S
from telemetry.commands.demo.results import Fault, Result


def show(console: Console, results: Sequence[Result], load: float) -> None:
    """Print the table, and under it what a table can't say; `load` is how busy the machine was before."""
    sheet = Sheet(results)
    sheet.requests()
    sheet.first_tokens()
    sheet.steps()
    sheet.paths()
    sheet.collective()
    sheet.blame()
    console.print()
    console.print(sheet.table)
    console.print()
    for sentence in _sentences(results, load):
        console.print(sentence[0].upper() + sentence[1:], markup=False, highlight=False, soft_wrap=True)


class Sheet:
    """The table while it is filled, one method for each of its sections."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.results = results
        self.compares = len(results) == 2
        self.table = Table(box=None, pad_edge=False, header_style="bold")
        self.table.add_column("")
        for result in results:
            self.table.add_column(f"arena {result.arena}", justify="right")
        if self.compares:
            self.table.add_column("on / off", justify="right")

    def requests(self) -> None:
        """How many there were, and whether all were served."""
        self._row("requests", [result.offered for result in self.results], _count)
        self._row("  with a picture", [result.with_picture for result in self.results], _count)
        self._row("  completed", [result.completed for result in self.results], _count)
        if any(result.without_first_token for result in self.results):
            self._row("  without a first token", [result.without_first_token for result in self.results], _count)

    def first_tokens(self) -> None:
        """How long users waited, together and by what they sent."""
        for quantile in ("p50", "p90", "p99", "max"):
            self._first_token(f"time to first token, {quantile}", "all", quantile)
        for kind in _keys(result.ttft_ms for result in self.results):
            if kind != "all":
                self._first_token(f"  {kind}, p50", kind, "p50")
                self._first_token(f"  {kind}, max", kind, "max")

    def steps(self) -> None:
        """How evenly tokens came."""
        self._row("steps", [result.steps for result in self.results], _count)
        stalls = f"step stalls (over {STALL_S * 1e3:.0f} ms)"
        self._row(stalls, [result.stalls for result in self.results], _count, ratio=True)
        self._row("  together", [result.stalled_ms for result in self.results], _milliseconds, ratio=True)
        self._row("  longest", [result.longest_stall_ms for result in self.results], _milliseconds, ratio=True)

    def paths(self) -> None:
        """Which way the bytes went, and why not the fast one."""
        for path in _keys(result.bytes_by_path for result in self.results):
            self._row(f"bytes, {path}", [result.bytes_by_path.get(path, 0) for result in self.results], _megabytes)
        reasons = _keys(result.fallbacks for result in self.results)
        for reason in reasons:
            told = "arena off" if reason == "disabled" else reason.replace("_", " ")
            self._row(f"fallbacks, {told}", [result.fallbacks.get(reason, 0) for result in self.results], _count)
        if not reasons:
            self._row("fallbacks", [0 for _ in self.results], lambda _: "none")

    def collective(self) -> None:
        """How the workers' shares were added up, and what the same sums took with gloo."""
        sums = [result.collective for result in self.results]
        for path in _keys(one.operations_by_path for one in sums):
            self._row(f"all-reduces, {path}", [one.operations_by_path.get(path, 0) for one in sums], _count)
        if any(one.compared for one in sums):
            self._row("  one takes, p50", [one.arena_us for one in sums], _microseconds)
            self._row("  the same with gloo", [one.gloo_us for one in sums], _microseconds)
            self._row("  times as fast", [one.times_as_fast for one in sums], _times)

    def blame(self) -> None:
        """For whom the writer waited most; the excess is what that reader took beyond all the others."""
        self._row("writer blocked most by", [result.culprit for result in self.results], lambda rank: f"reader {rank}")
        if any(result.culprit is not None for result in self.results):
            self._row("  blocked", [result.blocked_by_culprit_s for result in self.results], _seconds)
            self._row("  excess", [result.excess_of_culprit_s for result in self.results], _seconds)

    def _first_token(self, name: str, kind: str, quantile: str) -> None:
        spreads = [result.ttft_ms.get(kind) for result in self.results]
        values = [spread and spread._asdict()[quantile] for spread in spreads]
        self._row(name, values, _milliseconds, ratio=True)

    def _row(
        self, name: str, values: Sequence[float | None], write: Callable[[float], str], *, ratio: bool = False
    ) -> None:
        cells = ["–" if value is None else write(value) for value in values]
        if self.compares:
            cells.append(_ratio(*values) if ratio else "")
        self.table.add_row(name, *cells)


def _sentences(results: Sequence[Result], load: float) -> Iterator[str]:
    for result in results:
        where = f"arena {result.arena}: " if len(results) > 1 else ""
        for death in result.deaths:
            yield where + _obituary(death)
        if result.without_first_token:
            yield f"{where}who had no first token when the time was up is counted with the wait so far."
        yield from (where + mismatch for mismatch in result.mismatches[:5])
        if len(result.mismatches) > 5:
            yield f"{where}and {len(result.mismatches) - 5} more differences."
        if result.without_first_token < result.offered and not result.mismatches:
            yield f"{where}every worker found the pixels that were sent, and every token is the layer's."
        if result.interrupted:
            yield f"{where}interrupted after {result.seconds:.1f} s."
    if len(results) == 1 and results[0].uneventful:
        yield "Next, try --compare, --slow-reader 1:30 or --kill-reader 1:3."
    if len(results) > 1:
        yield (
            f"Both runs had the same requests. The machine is not theirs alone: its {os.cpu_count()} "
            f"cores had a load of {load:.1f} before they began. Repeat before you quote a ratio."
        )


def _obituary(death: Fault) -> str:
    cause = f"signal {Signals(death.signal).name}" if death.signal else "a signal the kernel does not tell"
    sentence = f"reader {death.rank} (pid {death.pid}) died: {death.raised} raised, {cause}"
    if death.detected_ms is not None:
        sentence += f", {death.detected_ms:.1f} ms after it was killed"
    if death.resumed_ms is None:
        return sentence + "; nothing was served after that."
    return sentence + (
        f". The others drained the ring, formed a new group, took over its share of the layer and answered again "
        f"after {death.resumed_ms:.0f} ms."
    )


def _keys(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys of all of them, in the order in which they were first seen."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _ratio(off: float | None, on: float | None) -> str:
    return f"{on / off:.2f}" if off and on is not None else "–"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def _microseconds(value: float) -> str:
    return f"{value:,.0f} µs"


def _times(value: float) -> str:
    return f"{value:.1f} x"


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"
