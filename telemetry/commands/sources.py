"""What `arena top` and `arena doctor` share: a first look, a name that must be right, lines on paper."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Sequence

from telemetry.health import ENOUGH, GAP_NS
from telemetry.monitor.facts import Moment, Source
from telemetry.monitor.lines import Line, in_ascii, text_of
from telemetry.monitor.recent import Recent


class Refused(Exception):
    """What was asked for can't be shown; one sentence, and the exit code for it."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


def settled(source: Source, first: Moment, recent: Recent, only: str | None) -> Moment:
    """Look as often as a verdict needs, and return the last look."""
    moment = first
    recent.add(first)
    for _ in range(ENOUGH - 1):
        time.sleep(1.05 * GAP_NS / 1e9)
        moment = source.look().only(only)
        recent.add(moment)
    return moment


def check_name(moment: Moment, queue: str | None) -> None:
    """Refuse a queue that is not there, and say which one may be meant."""
    labels = [one.label for one in moment.queues]
    if queue is None or queue in labels:
        return
    near = difflib.get_close_matches(queue, labels, n=1, cutoff=0.5)
    there = f"there is {', '.join(labels)}" if labels else "there is none at all"
    raise Refused(f"no queue {queue!r} in {moment.source}; {f'did you mean {near[0]!r}?' if near else there}", 2)


def is_terminal() -> bool:
    """Whether standard output is a terminal that understands more than text."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def speaks_unicode() -> bool:
    """Whether standard output can carry the characters of the pictures."""
    return (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")


def print_lines(lines: Sequence[Line]) -> None:
    """On a terminal with its colours, elsewhere as plain text."""
    shown = list(lines) if speaks_unicode() else [in_ascii(line) for line in lines]
    if not is_terminal():
        print("\n".join(text_of(line) for line in shown))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in shown:
        console.print(Text.assemble(*line), soft_wrap=True)
