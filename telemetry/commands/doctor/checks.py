"""What Arena needs of a machine: tried where it can be tried, read where it can't; each with what to do."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from arena import probe
from arena.errors import ArenaError
from arena.memory import headroom_bytes
from telemetry.commands.doctor import kernel
from telemetry.monitor.facts import Moment
from telemetry.monitor.lines import Line, Span
from telemetry.monitor.units import size

PAGES_BYTES = 4 << 20  # room for the probe pages of a few engines
SEGMENT_BYTES = 64 << 20  # the default of QueueConfig


class Level(str, Enum):
    """How a check ended. Only a failed one counts in the exit code."""

    OK = "ok"
    NOTE = "note"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Check:
    """One thing: what was found, what is needed, and what to do where these differ."""

    name: str
    level: Level
    found: str
    needed: str = ""
    todo: str = ""

    @property
    def failed(self) -> bool:
        """Whether Arena can't work like this."""
        return self.level is Level.FAILED

    def as_json(self) -> dict[str, Any]:
        """As a program reads it."""
        return {
            "check": self.name,
            "level": self.level.value,
            "found": self.found,
            "needed": self.needed,
            "try": self.todo,
        }


def lines_of(checks: Sequence[Check]) -> list[Line]:
    """As they are printed."""
    styles = {Level.OK: "green", Level.NOTE: "yellow", Level.FAILED: "bold red", Level.NOT_CHECKED: "dim"}
    lines: list[Line] = []
    for check in checks:
        lines.append((Span(f"  {check.level.value:<12}", styles[check.level]), Span(f"{check.name}: {check.found}")))
        if check.level is not Level.OK:
            lines += [(Span(f"{'':14}needs {check.needed}", "dim"),)] if check.needed else []
            lines += [(Span(f"{'':14}try: ", "cyan"), Span(check.todo))] if check.todo else []
    return lines


def of_machine(moment: Moment) -> list[Check]:
    """Everything but the devices."""
    return [
        _run_directory(moment),
        *_kernel(),
        _hand_over(moment),
        _memory(),
        _memlock(moment),
        _cpus(moment),
        _numa(),
    ]


def _run_directory(moment: Moment) -> Check:
    name, path = "run directory", Path(moment.source)
    try:
        probe.observed_directory(moment.source)
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        status = os.statvfs(there)
    except (ArenaError, OSError) as error:
        return Check(name, Level.FAILED, str(error), todo="set ARENA_RUN_DIR to a directory of yours on a tmpfs")
    free = status.f_bavail * status.f_frsize
    found = f"{path}, {size(free)} free"
    if free < PAGES_BYTES:
        todo = "free some, `arena gc`, or set ARENA_RUN_DIR to another tmpfs (docker: --shm-size)"
        return Check(name, Level.FAILED, found, f"{size(PAGES_BYTES)} for probe pages; tensors are not there", todo)
    if probe.is_degraded(there):
        todo = "set ARENA_RUN_DIR or XDG_RUNTIME_DIR to a tmpfs"
        return Check(name, Level.NOTE, f"{found}, on a disk", "a tmpfs: writing back a page can hold its owner", todo)
    return Check(name, Level.OK, found)


def _kernel() -> list[Check]:
    checks = []
    for feature in kernel.features():
        level = Level.OK if feature.works else Level.FAILED if feature.required else Level.NOTE
        found = "works" if feature.works else feature.found
        checks.append(Check(feature.name, level, found, feature.needed, feature.todo))
    return checks


def _hand_over(moment: Moment) -> Check:
    name, works = "descriptors over a socket, pid namespace", kernel.hands_over_descriptors()
    ends = [end for queue in moment.queues for end in (queue.writer, *queue.readers) if end is not None]
    unknown = sum(1 for end in ends if not end.process)
    if works is not True:
        return Check(
            name, Level.FAILED, str(works), "SCM_RIGHTS on a unix socket", "allow sendmsg in the seccomp profile"
        )
    if unknown:
        found = f"{unknown} of {len(ends)} processes are of another pid namespace, or hidden by /proc"
        todo = "share it: docker --pid, Kubernetes shareProcessNamespace; or look from where they run"
        return Check(name, Level.NOTE, found, "the same pid namespace, to see whether they live", todo)
    return Check(name, Level.OK, "works")


def _memory() -> Check:
    free = headroom_bytes()
    found = f"{size(free)} until the host or this cgroup is full"
    if free < 2 * SEGMENT_BYTES:
        needed = f"{size(2 * SEGMENT_BYTES)}: the arena takes at most half of what is left for a segment"
        todo = "raise the cgroup's memory limit; until then large messages go in fragments (memory_headroom)"
        return Check("memory", Level.NOTE, found, needed, todo)
    return Check("memory", Level.OK, found)


def _memlock(moment: Moment) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = max([SEGMENT_BYTES, *(queue.arena.budget for queue in moment.queues)])
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return Check("memlock limit", Level.OK, "unlimited" if soft == resource.RLIM_INFINITY else size(soft))
    needed = f"{size(wanted)}, what the arena may grow to, where memory is pinned for a GPU"
    todo = "ulimit -l unlimited; docker --ulimit memlock=-1; systemd LimitMEMLOCK=infinity"
    return Check("memlock limit", Level.NOTE, size(soft), needed, todo)


def _cpus(moment: Moment) -> Check:
    usable, quota = len(os.sched_getaffinity(0)), kernel.cpu_quota()
    ends = sum(1 + len(queue.readers) for queue in moment.queues if not queue.dead)
    found = f"{usable} usable" + (f", a quota of {quota:g}" if quota is not None else "")
    if min(usable, quota or usable) < 2:
        needed = f"2, better one for each of the {ends} ends of the queues" if ends else "2"
        return Check("CPUs", Level.NOTE, found, needed, "raise the quota; a throttled writer looks like a stall")
    return Check("CPUs", Level.OK, found)


def _numa() -> Check:
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) <= 1:
        return Check("NUMA", Level.OK, "one node" if nodes else "not told by this kernel")
    todo = "start each worker on its GPU's node (numactl --cpunodebind --membind), the writer on the one with most GPUs"
    return Check(
        "NUMA", Level.NOTE, f"{len(nodes)} nodes", "workers near their GPU and the arena near the writer", todo
    )
