"""A running system of one writer and four readers, whose processes are stopped, continued and killed at random.

    python -m tests.stress.signals --rounds 2000
    python -m tests.stress.signals --minutes 10

In each round one of the five gets SIGKILL, or one or two get SIGSTOP and, a moment later, SIGCONT, while messages of
all kinds pass: small ones, tables, blocks, fragments, and lent tensors. Afterwards each survivor is right (every
message that it was due, in order, byte for byte) or has been told (`PeerDied` with rank and signal).
A killed reader is replaced by a new process that joins the running queue, a killed writer by a new queue; then the
readers keep no descriptor and no mapping, and the run directory is empty.

What is measured is the time from just before the kill until a survivor was told: by the wall clock, and in the
survivor's own runnable time, which leaves out how long the kernel kept it waiting for a core (`/proc/PID/schedstat`).
No survivor is stopped in a round that kills. More than a second of its own time is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from arena import MessageQueue, QueueConfig
from arena.errors import ArenaError, NoReader, PeerDied, QueueTimeout
from arena.probe import collect_garbage
from tests.support.fleet import Fleet, Here, Worker, arena_maps, attach, create, eventually, open_fds, shut_down

READERS = 4
TOLD_WITHIN_S = 1.0  # of the survivor's own runnable time
KINDS = ("kill reader", "kill writer", "stop reader", "stop writer", "stop two")
WEIGHTS = (30, 10, 30, 15, 15)
CONFIG = {
    "slots": 8,
    "slot_bytes": 4096,
    "segment_bytes": 1 << 18,
    "max_arena_bytes": 1 << 19,
    "max_holds": 16,
    "on_reader_death": "raise",
}


def message(number: int) -> Any:
    """Each path in turn: inline, a table, a block, a block and fragments, fragments."""
    fill = number % 251
    match number % 5:
        case 1:
            return [number, torch.full((300,), fill)]
        case 2:
            return [number, torch.full((9_000,), fill)]
        case 3:
            return [number, torch.full((9_000,), fill), bytes([fill]) * 9_000]
        case 4:
            return [number, bytes([fill]) * 9_000]
        case _:
            return [number]


def is_right(obj: Any) -> bool:
    """Whether a message is what its number says, to the last byte."""
    wanted = message(obj[0])
    pairs = list(zip(obj, wanted, strict=True)) if len(obj) == len(wanted) else [(0, 1)]
    return all(torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b for a, b in pairs)


# ── what the processes do ────────────────────────────────────────────────────────────────────────
def write_for(here: Here, seconds: float) -> dict[str, Any]:
    """Send numbered messages; deaths are told, and the message that was refused is sent again."""
    ends, told, waits = time.monotonic() + seconds, [], 0
    here.number = getattr(here, "number", 0)
    while time.monotonic() < ends:
        try:
            if here.number % 5 == 2:
                with here.queue.lend((9_000,), torch.int64, or_private=True) as lent:
                    lent.fill_(here.number % 251)
                    here.queue.enqueue([here.number, lent], timeout=0.25)
                del lent
            else:
                here.queue.enqueue(message(here.number), timeout=0.25)
            here.number += 1
        except PeerDied as error:
            told.append((error.rank, error.signal, time.monotonic(), kept_waiting_s()))
        except QueueTimeout:
            waits += 1
        except NoReader:
            break
    return {"told": told, "waits": waits, "next": here.number}


def read_for(here: Here, seconds: float) -> dict[str, Any]:
    """Take messages; what was wrong with them, and of what it was told."""
    ends, wrong, told, taken = time.monotonic() + seconds, 0, None, 0
    while time.monotonic() < ends and told is None:
        try:
            obj = here.queue.dequeue(timeout=0.1)
        except QueueTimeout:
            continue
        except ArenaError as error:
            told = (type(error).__name__, getattr(error, "signal", None), time.monotonic(), kept_waiting_s())
            break
        last = getattr(here, "last", None)
        # A message that was given up half-way is numbered again when it is sent again: no number is left out.
        wrong += not is_right(obj) or (last is not None and obj[0] != last + 1)
        here.last = obj[0]
        taken += 1
        del obj
    return {"wrong": wrong, "told": told, "taken": taken, "last": getattr(here, "last", None)}


def kept_waiting_s(pid: int | None = None) -> float:
    """How long a process's main thread has been ready to run, so far, without a core to run on."""
    return int(Path(f"/proc/{pid or os.getpid()}/schedstat").read_text().split()[1]) / 1e9


def left_behind(here: Here) -> tuple[int, int]:
    """Descriptors and mappings of Arena's in this process."""
    gc.collect()
    fds = sum("memfd:arena" in target or "pidfd" in target for target in open_fds().values())
    return fds, len(arena_maps())


def forget(here: Here) -> None:
    """Be ready for another queue."""
    here.queue.shutdown()
    here.queue = None
    here.number = 0
    here.last = None
    gc.collect()


# ── a system, and rounds over it ─────────────────────────────────────────────────────────────────
class System:
    """One writer and four readers, and what became of them."""

    def __init__(self, fleet: Fleet, run_dir: Path, seed: int) -> None:
        self.fleet = fleet
        self.run_dir = run_dir
        self.chance = random.Random(seed)
        self.kinds: Counter[str] = Counter()
        self.faults: list[str] = []
        self.slowest: dict[str, tuple[float, float]] = {}
        self.messages = 0
        self.readers: list[Worker] = [fleet.start() for _ in range(READERS)]
        self._new_queue()

    def _new_queue(self) -> None:
        self.writer = self.fleet.start()
        self.handle = self.writer.call(create, READERS, name="signals", **CONFIG)
        self._each([(reader, attach, self.handle, rank) for rank, reader in enumerate(self.readers)])

    def _each(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        begun = [worker.begin(*what) for worker, *what in calls]
        return [call.result() for call in begun]

    def round(self, number: int) -> None:
        """One disturbance."""
        kind = self.chance.choices(KINDS, WEIGHTS)[0]
        self.kinds[kind] += 1
        lasts = self.chance.uniform(0.12, 0.3)
        reading = [reader.begin(read_for, lasts + 0.35) for reader in self.readers]
        writing = self.writer.begin(write_for, lasts)
        time.sleep(self.chance.uniform(0.0, 0.1))
        if kind == "kill reader":
            self._kill_reader(number, reading, writing)
        elif kind == "kill writer":
            self._kill_writer(number, reading)
        else:
            self._stop(number, kind, reading, writing)

    def _kill_reader(self, number: int, reading: list[Any], writing: Any) -> None:
        victim = self.chance.randrange(READERS)
        waited = kept_waiting_s(self.writer.pid)
        killed = time.monotonic()
        os.kill(self.readers[victim].pid, signal.SIGKILL)
        self.readers[victim].clean_up()
        outcome = writing.result()
        for rank, call in enumerate(reading):
            if rank != victim:
                self._judge(number, f"reader {rank}", call.result(), may_be_told=False)
        told = outcome["told"] or self.writer.call(write_for, 0.5)["told"]
        if [entry[:2] for entry in told] != [(victim, signal.SIGKILL)]:
            self.faults.append(f"round {number}: the writer was told {told} of reader {victim}")
        else:
            self._note(number, "kill reader", told[0], killed, waited)
        self.readers[victim] = self.fleet.start()
        self.readers[victim].call(attach, self.handle, victim)

    def _kill_writer(self, number: int, reading: list[Any]) -> None:
        waited = [kept_waiting_s(reader.pid) for reader in self.readers]
        killed = time.monotonic()
        os.kill(self.writer.pid, signal.SIGKILL)
        self.writer.clean_up()
        lasts = []
        for rank, call in enumerate(reading):
            result = call.result()
            if result["told"] is None:
                result = self.readers[rank].call(read_for, 5.0)
            if result["told"] is None or result["told"][:2] != ("PeerDied", signal.SIGKILL):
                self.faults.append(f"round {number}: reader {rank} was told {result['told']}")
            else:
                self._note(number, "kill writer", result["told"], killed, waited[rank])
            self._judge(number, f"reader {rank}", result, may_be_told=True)
            lasts.append(result["last"])
        self._each([(reader, forget) for reader in self.readers])
        for rank, left in enumerate(self._each([(reader, left_behind) for reader in self.readers])):
            if left != (0, 0):
                self.faults.append(f"round {number}: reader {rank} keeps {left} descriptors and mappings")
        collect_garbage(self.run_dir)
        if rest := os.listdir(self.run_dir):
            self.faults.append(f"round {number}: {rest} in the run directory")
        self._new_queue()

    def _stop(self, number: int, kind: str, reading: list[Any], writing: Any) -> None:
        everyone = [*self.readers, self.writer]
        victims = {"stop writer": [self.writer], "stop reader": [self.chance.choice(self.readers)]}.get(
            kind, self.chance.sample(everyone, 2)
        )
        for worker in victims:
            os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.0, 0.2))
        for worker in victims:
            os.kill(worker.pid, signal.SIGCONT)
        outcome = writing.result()
        if outcome["told"]:
            self.faults.append(f"round {number}: {kind}, and the writer was told {outcome['told']}")
        for rank, call in enumerate(reading):
            self._judge(number, f"reader {rank}", call.result(), may_be_told=False)

    def _judge(self, number: int, who: str, result: dict[str, Any], *, may_be_told: bool) -> None:
        self.messages += result["taken"]
        if result["wrong"]:
            self.faults.append(f"round {number}: {who} got {result['wrong']} wrong messages")
        if result["told"] is not None and not may_be_told:
            self.faults.append(f"round {number}: {who} was told {result['told']}")

    def _note(self, number: int, kind: str, told: tuple[Any, ...], killed: float, waited: float) -> None:
        took = told[2] - killed
        own = took - (told[3] - waited)
        wall, runnable = self.slowest.get(kind, (0.0, 0.0))
        self.slowest[kind] = max(wall, took), max(runnable, own)
        if own > TOLD_WITHIN_S:
            self.faults.append(f"round {number}: {kind}, told after {own:.3f} s of its own time, {took:.3f} s in all")

    def finish(self) -> None:
        """Everything that was published arrives, an orderly end leaves nothing, and the next queue starts."""
        final = self.writer.call(write_for, 0.0)["next"]
        reading = [reader.begin(read_for, 1.5) for reader in self.readers]
        for rank, call in enumerate(reading):
            result = call.result()
            self._judge(-1, f"reader {rank}", result, may_be_told=False)
            if result["last"] is not None and result["last"] != final - 1:
                self.faults.append(f"at the end: reader {rank} has {result['last']} of {final}")
        self._each([(worker, shut_down) for worker in [*self.readers, self.writer]])
        eventually(lambda: not os.listdir(self.run_dir))
        with (
            MessageQueue(1, config=QueueConfig(name="signals")) as queue,
            MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
        ):
            queue.enqueue("the next one")
            assert reader.dequeue(timeout=20) == "the next one"


def run(rounds: int, seconds: float, seed: int) -> dict[str, Any]:
    """Rounds, until there have been so many or the time is over."""
    before = os.environ.get("ARENA_RUN_DIR")
    with tempfile.TemporaryDirectory(prefix="arena-signals-", dir="/dev/shm") as place:
        os.environ["ARENA_RUN_DIR"] = place
        try:
            return _run(rounds, seconds, seed, Path(place))
        finally:
            os.environ.pop("ARENA_RUN_DIR")
            if before is not None:
                os.environ["ARENA_RUN_DIR"] = before


def _run(rounds: int, seconds: float, seed: int, run_dir: Path) -> dict[str, Any]:
    began = time.monotonic()
    done = 0
    totals: Counter[str] = Counter()
    slowest: dict[str, tuple[float, float]] = {}
    faults: list[str] = []
    messages = 0
    here = (len(open_fds()), len(arena_maps()))
    while done < rounds and time.monotonic() - began < seconds:
        with Fleet() as fleet:  # a worker lives for less than two minutes
            system = System(fleet, run_dir, seed + done)
            ends = time.monotonic() + 60
            while done < rounds and time.monotonic() < min(ends, began + seconds):
                system.round(done)
                done += 1
            system.finish()
        totals += system.kinds
        messages += system.messages
        faults += system.faults
        for kind, took in system.slowest.items():
            wall, own = slowest.get(kind, (0.0, 0.0))
            slowest[kind] = max(wall, took[0]), max(own, took[1])
    gc.collect()
    now = (len(open_fds()), len(arena_maps()))
    with contextlib.suppress(FileNotFoundError):
        faults += [f"left in the run directory: {name}" for name in os.listdir(run_dir)]
    return {
        "rounds": done,
        "kinds": dict(totals),
        "messages": messages,
        "faults": faults,
        "slowest_detection_s": {kind: round(took[0], 3) for kind, took in slowest.items()},
        "slowest_in_its_own_time_s": {kind: round(took[1], 3) for kind, took in slowest.items()},
        "descriptors_and_maps": [here, now],
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
        "machine": machine(),
    }


def machine() -> str:
    """Where this ran."""
    load = os.getloadavg()[0]
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, load {load:.1f}"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1 << 30)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    outcome = run(options.rounds, options.minutes * 60, options.seed)
    print(json.dumps(outcome))
    return 1 if outcome["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
