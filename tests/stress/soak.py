"""One writer, four readers, mixed sizes, an arena that is nine tenths full, and a reader that is killed and replaced.

    python -m tests.stress.soak --minutes 30

Every `--restart` seconds reader 3 is killed, and a new process joins the running queue in its place; the writer's
choice is `on_reader_death="continue"`. Every byte of every message is compared. Reader 0 keeps as many tensors as fill
nine tenths of the arena, and lets the oldest go when a new one comes. Memory is looked at once a second: the resident
bytes of writer and readers, descriptors, mappings, and what is in the run directory must not grow once all is warm.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from arena.errors import QueueTimeout
from tests.stress.messages import SOURCE_BYTES, memcmp, source
from tests.stress.signals import machine
from tests.support.fleet import Fleet, Here, Worker, arena_maps, attach, create, open_fds, shut_down, statistics

READERS = 4
RESTARTED = READERS - 1
ARENA_BYTES = 8 << 20
KEPT_BYTES = ARENA_BYTES * 9 // 10
LARGEST = 400_000
SLICE_S = 1.0
WARM_S = 10.0
SEGMENT_BYTES = 1 << 20
ROOM = {
    "resident": 24 << 20,  # allocators breathe
    "fds": 8,
    "maps": 8 + ARENA_BYTES // SEGMENT_BYTES,  # the arena may have all its segments only after the first look
}
CONFIG = {
    "name": "soak",
    "slots": 32,
    "max_arena_bytes": ARENA_BYTES,
    "segment_bytes": SEGMENT_BYTES,
    "max_holds": 256,
    "on_reader_death": "continue",
}


def cut(seed: int, number: int) -> tuple[int, int]:
    """Where message `number` begins in the source, and its length: the same draw at both ends."""
    draw = random.Random(seed * 1_000_003 + number).random
    nbytes = int(LARGEST ** draw())
    return int(draw() * (SOURCE_BYTES - nbytes)), nbytes


def write_for(here: Here, seed: int, seconds: float) -> dict[str, Any]:
    """Send for a while."""
    if not hasattr(here, "source"):
        here.source, here.number, here.refused = source(seed), 0, 0
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        at, nbytes = cut(seed, here.number)
        try:
            here.queue.enqueue((here.number, here.source[at : at + nbytes]), timeout=1)
        except QueueTimeout:  # on a busy machine the readers' part of the slice may be over before ours: sent again
            here.refused += 1
            continue
        here.number += 1
    told = here.queue.statistics()
    numbers = {"next": here.number, "refused": here.refused}
    return {**numbers, "used": told.arena_used_bytes, "used_max": told.arena_used_max_bytes, **footprint()}


def read_for(here: Here, seed: int, seconds: float, keeping: int) -> dict[str, Any]:
    """Take for a while, and compare; keep tensors of so many bytes."""
    if not hasattr(here, "source"):
        here.source, here.kept_tensors, here.kept_bytes, here.last = source(seed), deque(), 0, None
    ends, wrong, taken = time.monotonic() + seconds, 0, 0
    while time.monotonic() < ends:
        try:
            number, body = here.queue.dequeue(timeout=0.05)
        except QueueTimeout:
            continue
        at, nbytes = cut(seed, number)
        same = body.shape == (nbytes,) and not memcmp(body.data_ptr(), here.source.data_ptr() + at, nbytes)
        wrong += not same or (here.last is not None and number != here.last + 1)
        here.last = number
        taken += 1
        if nbytes >= 1 << 16:
            here.kept_tensors.append((at, body))
            here.kept_bytes += nbytes
        del body
        while here.kept_bytes > keeping:
            at, oldest = here.kept_tensors.popleft()
            wrong += bool(memcmp(oldest.data_ptr(), here.source.data_ptr() + at, oldest.numel()))
            here.kept_bytes -= oldest.numel()
            del oldest
    return {"taken": taken, "wrong": wrong, "last": here.last, **footprint()}


def live_for(here: Here, seconds: float) -> None:
    """A worker of the tests ends after two minutes; here it is to live longer."""
    signal.alarm(int(seconds) + 600)


def let_go(here: Here) -> None:
    """Drop what is kept."""
    here.kept_tensors.clear()
    gc.collect()


def footprint() -> dict[str, int]:
    """Private resident bytes, descriptors, mappings of this process."""
    pages = Path("/proc/self/statm").read_text().split()
    resident = (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
    return {"resident": resident, "fds": len(open_fds()), "maps": len(arena_maps())}


class Soak:
    """A system, and what was seen of it."""

    def __init__(self, fleet: Fleet, run_dir: Path, seed: int, seconds: float) -> None:
        self.fleet, self.run_dir, self.seed, self.seconds = fleet, run_dir, seed, seconds
        self.writer = self._start()
        self.handle = self.writer.call(create, READERS, **CONFIG)
        self.readers: list[Worker] = [self._start() for _ in range(READERS)]
        for rank, reader in enumerate(self.readers):
            reader.call(attach, self.handle, rank)
        self.faults: list[str] = []
        self.messages = self.refused = self.restarts = self.used_max = 0
        self.first: dict[str, dict[str, int]] = {}
        self.worst: dict[str, dict[str, int]] = {}
        self.last: dict[str, dict[str, int]] = {}

    def _start(self) -> Worker:
        worker = self.fleet.start()
        worker.call(live_for, self.seconds)
        return worker

    def slice(self, seconds: float, *, warm: bool) -> None:
        """So many seconds of traffic."""
        keeping = [KEPT_BYTES if rank == 0 else 0 for rank in range(READERS)]
        reading = [
            r.begin(read_for, self.seed, seconds + 0.2, keep) for r, keep in zip(self.readers, keeping, strict=True)
        ]
        written = self.writer.begin(write_for, self.seed, seconds).result(within=90)
        self.used_max = max(self.used_max, written["used"])
        self.messages, self.refused = written["next"], written["refused"]
        results = {f"reader {rank}": call.result() for rank, call in enumerate(reading)}
        for who, result in results.items():
            if result["wrong"]:
                self.faults.append(f"{who}: {result['wrong']} wrong messages before {result['last']}")
        if warm:
            results["writer"] = written
            del results[f"reader {RESTARTED}"]
            for who, result in results.items():
                self._compare(who, {name: result[name] for name in ("resident", "fds", "maps")})

    def _compare(self, who: str, seen: dict[str, int]) -> None:
        self.last[who] = seen
        first = self.first.setdefault(who, seen)
        worst = self.worst.setdefault(who, dict(seen))
        for name, value in seen.items():
            worst[name] = max(worst[name], value)
            if value > first[name] + ROOM[name]:
                self.faults.append(f"{who}: {name} grew from {first[name]} to {value}")

    def restart(self) -> None:
        """Kill a reader, and let another process join in its place."""
        os.kill(self.readers[RESTARTED].pid, signal.SIGKILL)
        self.readers[RESTARTED].clean_up()
        self.fleet.workers.remove(self.readers[RESTARTED])
        self.readers[RESTARTED] = self._start()
        self.readers[RESTARTED].call(attach, self.handle, RESTARTED)
        self.restarts += 1
        entries = sum(1 for _ in self.run_dir.rglob("*"))
        if entries > READERS + 8:
            self.faults.append(f"{entries} entries in the run directory")

    def finish(self) -> int:
        """The last messages arrive; all blocks come back. How many bytes did not."""
        for rank, reader in enumerate(self.readers):
            result = reader.call(read_for, self.seed, 1.0, 0)
            if result["wrong"] or (result["last"] is not None and result["last"] != self.messages - 1):
                self.faults.append(f"at the end: reader {rank} has {result} of {self.messages}")
            reader.call(let_go)
        held: int = self.writer.call(statistics).arena_used_bytes
        for worker in [*self.readers, self.writer]:
            worker.call(shut_down)
        if rest := os.listdir(self.run_dir):
            self.faults.append(f"left in the run directory: {rest}")
        return held


def run(seconds: float, seed: int, restart_s: float) -> dict[str, Any]:
    """Traffic for so long."""
    began = time.monotonic()
    before = os.environ.get("ARENA_RUN_DIR")
    with tempfile.TemporaryDirectory(prefix="arena-soak-", dir="/dev/shm") as place:
        os.environ["ARENA_RUN_DIR"] = place
        try:
            with Fleet() as fleet:
                soak = Soak(fleet, Path(place), seed, seconds)
                next_restart = began + restart_s
                while time.monotonic() < began + seconds:
                    soak.slice(SLICE_S, warm=time.monotonic() > began + min(WARM_S, seconds / 2))
                    if time.monotonic() > next_restart:
                        soak.restart()
                        next_restart += restart_s
                held = soak.finish()
        finally:
            os.environ.pop("ARENA_RUN_DIR")
            if before is not None:
                os.environ["ARENA_RUN_DIR"] = before
    return {
        "seconds": round(time.monotonic() - began, 1),
        "messages": soak.messages,
        "refused_for_a_while": soak.refused,
        "restarts": soak.restarts,
        "faults": soak.faults[:20],
        "held_at_end": held,
        "arena_used_max_share": round(soak.used_max / ARENA_BYTES, 3),
        "when_warm": soak.first,
        "most": soak.worst,
        "at_the_end": soak.last,
        "seed": seed,
        "machine": machine(),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--restart", type=float, default=10.0, help="seconds between two kills of reader 3")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    outcome = run(options.minutes * 60, options.seed, options.restart)
    print(json.dumps(outcome))
    return 1 if outcome["faults"] or outcome["held_at_end"] else 0


if __name__ == "__main__":
    sys.exit(main())
