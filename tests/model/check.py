"""Checks every model in this directory with Spin, exhaustively, and prints what came out as a table.

    python -m tests.model.check              # everything: see README.md for what that takes
    python -m tests.model.check --quick      # small bounds, every SYNC POINT left out once; what the tests run

A row is one search of one model: either no property may fail, or, with something left out that the code has, one must.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SYNC_POINT = re.compile(r"SYNC POINT (?P<label>[a-z0-9-]+) \((?P<end>publish|observe)\)")
SEARCH_BYTES = 12_000  # MiB that one search may take
DEPTH = 1_000_000


@dataclass(frozen=True)
class Search:
    """One search: a model, its switches, and whether a property has to fail."""

    model: str
    switches: tuple[str, ...]
    left_out: str = ""
    quick: bool = False

    @property
    def arguments(self) -> list[str]:
        """For Spin, which has a macro processor."""
        names = [*self.switches, f"NO_{self.left_out}"] if self.left_out else list(self.switches)
        return [f"-D{name}" for name in names]


@dataclass(frozen=True)
class Outcome:
    """What a search found. `failed` is the property that fails, "" if none does."""

    failed: str
    states: int
    seconds: float
    complete: bool

    def as_expected(self, search: Search) -> bool:
        """A property fails exactly where something is left out."""
        return bool(self.failed) if search.left_out else not self.failed and self.complete


def holds(model: str, *switches: str, quick: bool = False) -> Search:
    """No property may fail."""
    return Search(model, switches, quick=quick)


def fails(model: str, left_out: str, *switches: str, quick: bool = False) -> Search:
    """With this left out, a property has to fail."""
    return Search(model, switches, left_out, quick)


def labels_left_out(model: str, *switches: str, only: str = "") -> Iterator[Search]:
    """Each end of each SYNC POINT in the model, or of one of them, left out."""
    labels = sorted(sync_points((HERE / f"{model}.pml").read_text()))
    for label, end in [(label, end) for label, end in labels if only in ("", label)]:
        yield fails(model, f"{label.replace('-', '_')}_{end}", *switches, quick=True)


def sync_points(text: str) -> set[tuple[str, str]]:
    """The labels in a model, with their ends."""
    return {(found["label"], found["end"]) for found in SYNC_POINT.finditer(text)}


def searches() -> list[Search]:
    """Every row of the table."""
    small = ("WEAK", "UNBOUNDED")
    two_late = ("WEAK", "BUFFER=2")
    device = (*two_late, "DEVICE")
    # The first two say what memory is like: without them, it is sequentially consistent.
    alone = ("WEAK", "BUFFER=2", "FRAMES=2", "DEVICE", "ALONE")
    return [
        # the ring: every kind of memory, every kind of end
        holds("ring", "UNBOUNDED"),
        holds("ring", "TSO", "UNBOUNDED", "FRAMES=4"),
        holds("ring", *small, "FRAMES=2", quick=True),
        holds("ring", *small),
        holds("ring", *small, "FRAMES=5", "BUFFER=4"),
        holds("ring", "WEAK", "DROP_WAKES"),
        holds("ring", *two_late, "DEATHS"),
        holds("ring", *two_late, "WRITER_DIES"),
        *labels_left_out("ring", *small),
        fails("ring", "writer_fence", *small),
        fails("ring", "reader_fence", *small),
        fails("ring", "parker_fence", *small),
        fails("ring", "writer_fence", "TSO", "UNBOUNDED"),
        fails("ring", "reader_fence", "TSO", "UNBOUNDED"),
        fails("ring", "parker_fence", "TSO", "UNBOUNDED", quick=True),
        fails("ring", "proof_of_death", *two_late, "DEATHS", quick=True),
        fails("ring", "last_look", *two_late, "WRITER_DIES", quick=True),
        fails("ring", "bounded_sleep", "UNBOUNDED", "DROP_WAKES"),
        # the tensor arena
        holds("blocks", "FRAMES=2"),
        holds("blocks", *two_late),
        holds("blocks", *two_late, "LEAVES"),
        holds("blocks", *two_late, "DEATHS"),
        holds("blocks", *alone),
        holds("blocks", *alone[2:], "TICKETS", quick=True),
        holds("blocks", *alone, "TICKETS"),
        holds("blocks", *alone, "TICKETS", "DEATHS"),
        holds("blocks", *alone, "TICKETS", "LEAVES"),
        *labels_left_out("blocks", only="block-reusable"),
        *labels_left_out("blocks", *alone[2:], "TICKETS", only="ticket-reached"),
        fails("blocks", "generation", *two_late),
        fails("blocks", "hold_per_frame", *two_late),
        fails("blocks", "never_taken", *two_late, "LEAVES"),
        fails("blocks", "left_may_hold", *two_late, "LEAVES"),
        fails("blocks", "proof_of_death", *two_late, "DEATHS"),
        fails("blocks", "gate", *alone[2:], quick=True),
        fails("blocks", "hold_ticket_before_returned", *alone, "TICKETS"),
        # messages of several frames, ABORT, joiners
        holds("messages", "MESSAGES=2", quick=True),
        holds("messages", "TSO"),
        holds("messages", "WEAK"),
        fails("messages", "abort", "WEAK"),
        fails("messages", "between_messages", "WEAK"),
        fails("messages", "published_before_first", "WEAK"),
        # streamed hand-over
        holds("streamed", "MESSAGES=2", quick=True),
        holds("streamed", "TSO"),
        holds("streamed", "WEAK"),
        holds("streamed", "WEAK", "WRITER_DIES"),
        *labels_left_out("streamed", "WEAK"),
        fails("streamed", "gate", "WEAK", quick=True),
        fails("streamed", "ended", "WEAK"),
        fails("streamed", "last_look", "WEAK", "WRITER_DIES"),
        # all-reduce: on the CPU, and by pushing
        holds("board", "WEAK", "STEPS=6", quick=True),
        holds("board", "WEAK", "RANKS=3", "STEPS=4"),
        *labels_left_out("board", "WEAK"),
        holds("push", "WEAK", quick=True),
        holds("push", "WEAK", "OPERATIONS=8"),
        *labels_left_out("push", "WEAK"),
        fails("push", "third_generation", "WEAK", "GENERATIONS=2"),
        # the largest ones
        holds("ring", *two_late, "ALL_DIE"),
        holds("ring", *two_late, "DEATHS", "WRITER_DIES"),
        holds("blocks", *device),
        holds("blocks", *device, "TICKETS"),
    ]


def search(one: Search, quick: bool, limit_s: float | None = None) -> Outcome:
    """Let Spin make the search, compile it, and run it to its end, or to the first property that fails.

    One that is not through within `limit_s` is not complete, and so not as expected either.
    """
    with tempfile.TemporaryDirectory(prefix="arena-model-") as place:
        spin = ["spin", "-a", *one.arguments, str(HERE / f"{one.model}.pml")]
        _run(spin, place)
        bounds = ["-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={SEARCH_BYTES}"]
        _run(["gcc", "-w", "-O0" if quick else "-O2", *bounds, "-o", "pan", "pan.c"], place)
        began = time.monotonic()
        limit = ["-n"] if limit_s is None else ["-n", f"-Q{max(1, round(limit_s / 60))}"]
        report = _run(["./pan", f"-m{DEPTH if not quick else 20_000}", f"-w{20 if quick else 24}", *limit], place)
        seconds = time.monotonic() - began
    failed = re.search(r"pan:\d+: (.*?) \(at depth", report)
    states = re.search(r"(\d+) states, stored", report)
    errors = re.search(r"errors: (\d+)", report)
    assert states and errors, report
    truncated = any(said in report for said in ("max search depth too small", "Search not completed", "memory limit"))
    return Outcome(failed[1] if failed else "", int(states[1]), seconds, not truncated)


def _run(command: list[str], place: str) -> str:
    finished = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    text = finished.stdout + finished.stderr
    if finished.returncode or "Error:" in text:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text[-3000:]}")
    return text


def row(one: Search, outcome: Outcome) -> str:
    """A line of the table."""
    what = " ".join(name for name in one.switches) or "–"
    found = outcome.failed or ("holds" if outcome.complete else "not finished")
    verdict = "" if outcome.as_expected(one) else "  <-- NOT EXPECTED"
    without = one.left_out or "–"
    return f"| {one.model} | {what} | {without} | {found} | {outcome.states:,} | {outcome.seconds:.1f} |{verdict}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small bounds only")
    parser.add_argument("--model", help="only this one")
    parser.add_argument("--minutes", type=int, help="end each search after so many")
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))))
    options = parser.parse_args()
    chosen = [one for one in searches() if one.quick or not options.quick]
    chosen = [one for one in chosen if options.model in (None, one.model)]
    print("| model | with | left out | found | states | s |\n|---|---|---|---|---|---|", flush=True)
    bad = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        limit_s = None if options.minutes is None else options.minutes * 60.0
        repeated = itertools.repeat(options.quick), itertools.repeat(limit_s)
        for one, outcome in zip(chosen, pool.map(search, chosen, *repeated), strict=True):
            bad += not outcome.as_expected(one)
            print(row(one, outcome), flush=True)
    print(f"\n{len(chosen)} searches, {bad} not as expected")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
