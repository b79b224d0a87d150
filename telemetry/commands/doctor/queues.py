"""A queue's case: what is wrong, who waits for whom, since when, what to try, and where the culprit stands."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from telemetry.blame import ALREADY_READ, AWAITING_READERS, AWAITING_WRITE
from telemetry.commands.doctor.stacks import stack_of
from telemetry.commands.sources import Refused, check_name, settled
from telemetry.health import Verdict
from telemetry.monitor import words
from telemetry.monitor.facts import Moment, QueueFacts, ReaderFacts, is_stopped
from telemetry.monitor.lines import Line, Span
from telemetry.monitor.local import Pages
from telemetry.monitor.recent import Recent
from telemetry.monitor.units import seconds
from telemetry.monitor.words import Says, Severity

_STACKS: Final = 2  # culprits whose stack is asked for: each may take its whole deadline


@dataclass(frozen=True)
class Finding:
    """What there is to say of one queue."""

    queue: QueueFacts
    says: Says
    facts: list[str]
    remedies: list[str]
    stacks: dict[int, list[str]] = field(default_factory=dict)

    def lines(self) -> list[Line]:
        """As it is printed."""
        lines: list[Line] = [(Span(self.queue.label, "bold"), Span(f"  {self.says.sentence}."))]
        lines += [(Span(f"  {fact}."),) for fact in self.facts]
        lines += [(Span("  try: ", "cyan"), Span(f"{remedy}.")) for remedy in self.remedies]
        for pid, stack in self.stacks.items():
            lines += [(Span(f"  stack of pid {pid}:", "dim"),), *((Span(f"    {line}"),) for line in stack)]
        return lines

    def as_json(self) -> dict[str, Any]:
        """As a program reads it."""
        return {
            "queue": self.queue.label,
            "instance": self.queue.instance,
            "state": self.says.word,
            "severity": self.says.severity.name.lower(),
            "verdict": self.says.sentence,
            "blocked_s": self.queue.wait.lasted_s,
            "pending": list(self.queue.wait.pending),
            "facts": self.facts,
            "try": self.remedies,
            "stacks": {str(pid): stack for pid, stack in self.stacks.items()},
        }


def examine(run_dir: Path | None, only: str | None, *, with_stacks: bool) -> tuple[Moment, str, list[Finding]]:
    """Look as long as a verdict takes, and explain what was seen: the moment, the verdict on all of it, and the cases.

    Raises:
        Refused: the run directory can't be read, or has no queue of that name.
    """
    source, recent = Pages(run_dir), Recent()
    try:
        first = source.look()
        if first.troubles and not first.queues:
            raise Refused(first.troubles[0], 1)
        check_name(first, only)
        moment = settled(source, first.only(only), recent, only)
    finally:
        source.close()
    found = [_explained(queue, moment, recent, with_stacks=with_stacks) for queue in moment.queues]
    return (
        moment,
        _verdict(moment, recent),
        sorted(found, key=lambda one: (-one.says.severity, one.queue.dead, one.queue.label)),
    )


def _verdict(moment: Moment, recent: Recent) -> str:
    """On all queues at once, so that it can stand behind the word for the exit code."""
    says, queue = words.of_moment(moment, recent)
    if queue is None:
        return "no queue"
    if queue.dead:
        ago = min(one.silent_s for one in moment.queues)
        return f"no queue is alive, and nobody waits; the last process ended {seconds(ago)} ago"
    return says.sentence.removeprefix("OK: ")


def severity(moment: Moment, findings: Sequence[Finding], failed: Sequence[bool]) -> int:
    """The exit code: the worst of the queues, and at least degraded where the machine or a page fails us."""
    worst = max((one.says.severity for one in findings), default=Severity.HEALTHY)
    return max(worst, Severity.DEGRADED if any(failed) or moment.troubles else Severity.HEALTHY)


def _explained(queue: QueueFacts, moment: Moment, recent: Recent, *, with_stacks: bool) -> Finding:
    says = words.of_queue(queue, recent)
    stacks = {}
    if with_stacks and says.severity is not Severity.HEALTHY and not queue.dead:
        culprits = [one.pid for one in _culprits(queue) if one.pid is not None and one.alive is not False]
        stacks = {pid: stack_of(pid) for pid in culprits[:_STACKS]}
    return Finding(queue, says, list(_facts(queue, moment)), list(_remedies(queue, says)), stacks)


def _culprits(queue: QueueFacts) -> list[ReaderFacts]:
    """Who is waited for, or else who is in a bad state."""
    pending = [reader for reader in queue.readers if reader.rank in queue.wait.pending]
    return pending or [reader for reader in queue.readers if reader.verdict is not Verdict.OK]


# ── who waits for whom, and since when ───────────────────────────────────────────────────────────
def _facts(queue: QueueFacts, moment: Moment) -> Iterator[str]:
    if queue.dead:
        published = f"It had published {queue.published} messages. " if queue.writer is not None else ""
        yield f"{published}Nobody waits on it any more"
        return
    if queue.wait.pending:
        since = time.strftime("%H:%M:%S UTC", time.gmtime(moment.wall_s - queue.wait.lasted_s))
        yield f"The writer{_pid(queue)} has waited for a slot since {since}"
    for word in (AWAITING_READERS, ALREADY_READ, AWAITING_WRITE):
        ranks = [reader.rank for reader in queue.readers if reader.relation == word]
        if ranks:
            yield f"{word}: reader{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} ({_MEANING[word]})"
    for reader in queue.readers:
        if reader.verdict is not Verdict.OK:
            yield f"{words.name(reader)} is {words.of_reader(reader)}, {reader.lag} of {queue.slots} slots behind"
    missing = sorted(set(range(queue.n_reader)) - {reader.rank for reader in queue.readers})
    if missing:
        yield f"Not attached: reader{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"


_MEANING: Final = {
    AWAITING_READERS: "the writer waits for them",
    ALREADY_READ: "the writer does not wait for them",
    AWAITING_WRITE: "waiting for the writer",
}


def _pid(queue: QueueFacts) -> str:
    return f" (pid {queue.writer.pid})" if queue.writer and queue.writer.pid is not None else ""


# ── what to try ──────────────────────────────────────────────────────────────────────────────────
def _remedies(queue: QueueFacts, says: Says) -> Iterator[str]:
    if says.word == "DEAD":
        yield "`arena gc` removes what it left, once nobody wants to look at it"
    elif says.word == "ORPHANED":
        yield "the readers raise PeerDied; look for the writer's last words, and for `dmesg | grep -i killed`"
    elif queue.writer is not None and is_stopped(queue.writer.process):
        yield f"kill -CONT {queue.writer.pid}, or detach the debugger"
    if says.word == "FORMING":
        yield "start the missing readers; until then the ring fills up and the writer waits"
    if not queue.dead:
        yield from _remedies_for_readers(queue)
    if says.word == "SLOWED" or (says.word == "BLOCKED" and len(queue.wait.pending) == queue.n_reader > 1):
        yield "`arena top` tells one straggler (EXCESS) from steps that are too long for the ring (FULL): more slots"


def _remedies_for_readers(queue: QueueFacts) -> Iterator[str]:
    told: set[Verdict] = set()
    for reader in _culprits(queue):
        remedy = _remedy(reader)
        if remedy and reader.verdict not in told:
            told.add(reader.verdict)
            yield remedy


def _py_spy(reader: ReaderFacts) -> str:
    host, _, pid = reader.where.rpartition(":")
    return f"on {host}: py-spy dump --pid {pid}" if host else f"py-spy dump --pid {reader.pid}"


def _remedy(reader: ReaderFacts) -> str:
    by_verdict = {
        Verdict.STOPPED: f"kill -CONT {reader.pid}, or detach the debugger",
        Verdict.GONE: f"restart worker {reader.rank}; `dmesg | grep -i killed` tells whether memory ran out",
        Verdict.STALLED: f"{_py_spy(reader)}: {_STANDS.get(reader.state, _STANDS['working'])}",
        Verdict.LAGGING: f"compare HOLD of reader {reader.rank} with the others' in `arena top`: its steps are longer",
    }
    return by_verdict.get(reader.verdict, "")


_STANDS: Final = {
    "working": "it is between two dequeues: a collective, a device sync, or Python that holds the GIL; "
    "long work may call reader.heartbeat()",
    "waiting": "it sleeps in dequeue although there is a message: a lost wake-up, or no CPU to run on",
    "gate": "it waits for a copy to its device: look at the device (nvidia-smi, XID errors in dmesg)",
}
