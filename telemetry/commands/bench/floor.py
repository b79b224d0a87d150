"""The floor: the shortest ring in shared memory that Python allows, with nothing a queue needs beside it.

It has no lock, no check of what it reads, no dead reader, no timeout, no wake-up and no large message, and it burns a
core while it waits. It is here to be compared with: what a queue costs above it is the price of being one.
Ring 0 goes from the writer to its readers, ring 1 + k from reader k back. A ring is a published word, one consumed word
a reader, and 16 slots.
"""

import mmap
import os
import pickle
import time
from typing import Any

from telemetry.commands.bench.children import die_with_parent

MAX_READERS = 7  # one ring for the broadcast and one an answer, each half a MiB of the 4 MiB below

OBJ: dict[str, Any] = {
    "step": 1,
    "req": [f"req-{i}" for i in range(8)],
    "ids": list(range(64)),
    "blocks": [[i, i + 1, i + 2] for i in range(8)],
}


def block(readers: int, messages: int, dropped: int) -> list[int]:
    """Sorted round trips in ns, the first `dropped` left out: broadcast OBJ, then take an int from each reader."""
    memory = mmap.mmap(-1, 1 << 22)
    view = memoryview(memory)
    words = view.cast("Q")
    slot_bytes = 16384
    slots = 16
    dumps = pickle.dumps
    loads = pickle.loads
    sched_yield = os.sched_yield

    def base(ring: int) -> int:
        return ring * (1 << 19) // 8

    def send(ring: int, sequence: int, obj: Any, readers_of_ring: int) -> None:
        data = dumps(obj, 5)
        n = len(data)
        b = base(ring)
        while sequence - min(words[b + 16 + 8 * i] for i in range(readers_of_ring)) >= slots:
            sched_yield()
        offset = b * 8 + 4096 + (sequence % slots) * slot_bytes
        view[offset + 8 : offset + 8 + n] = data
        words[offset // 8] = n
        words[b] = sequence + 1

    def recv(ring: int, sequence: int, me: int) -> Any:
        b = base(ring)
        while words[b] <= sequence:
            sched_yield()
        offset = b * 8 + 4096 + (sequence % slots) * slot_bytes
        obj = loads(view[offset + 8 : offset + 8 + words[offset // 8]])
        words[b + 16 + 8 * me] = sequence + 1
        return obj

    parent = os.getpid()
    pids = []
    for k in range(readers):
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                for i in range(messages):
                    recv(0, i, k)
                    send(1 + k, i, i, 1)
            finally:
                os._exit(0)
        pids.append(pid)
    times = []
    for i in range(messages):
        start = time.perf_counter_ns()
        send(0, i, OBJ, readers)
        for k in range(readers):
            recv(1 + k, i, 0)
        times.append(time.perf_counter_ns() - start)
    for pid in pids:
        os.waitpid(pid, 0)
    return sorted(times[dropped:])
