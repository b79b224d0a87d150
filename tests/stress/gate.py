"""Stamped tensors through eight blocks, copied by streams that are late at random, and dropped at once or kept a while.

A block that is given back too early is overwritten by the next stamp while its copy is still to come: then the copy has
two stamps in it, or the wrong one. Every byte of each copy is compared once it has passed.

Both ends are processes of their own. The reader copies in turn by `to_device`, by `record_stream` and a copy of its
own, and by a plain copy on the stream that was current at the dequeue.

    python -m tests.stress.gate --tensors 100000
    python -m tests.stress.gate --tensors 100000 --events         # the helper asks; no tickets
    python -m tests.stress.gate --tensors 3000 --without-gate     # has to find corrupted bytes
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import deque
from typing import Any

import torch

import arena
from arena import MessageQueue, QueueConfig
from arena.device.cpu.copies import COPIES, CpuStream
from arena.gate import Gate
from arena.probe.metrics import GATE_WAYS
from tests.support.streams import metric_of, pins

BLOCKS = 8
COUNT = 4 << 10
BLOCK_BYTES = COUNT * 8
STREAMS = 3
IN_FLIGHT = 12
KEPT = 4
CPU = torch.device("cpu")
CONFIG = QueueConfig(
    name="gate",
    slots=4,  # so that the writer waits for the reader, and the reader for its gates
    max_arena_bytes=BLOCKS * BLOCK_BYTES,
    segment_bytes=BLOCKS * BLOCK_BYTES,
    min_block_bytes=BLOCK_BYTES,
)


class Copier:
    """The reader's side: queues copies, lets go of the originals, and compares what came of them."""

    def __init__(self, reader: MessageQueue, seed: int) -> None:
        self.reader = reader
        self.wrong = 0
        self._streams = [CpuStream() for _ in range(STREAMS)]
        self._draw = random.Random(seed)
        self._pending: deque[tuple[int, torch.Tensor, Any]] = deque()
        self._kept: list[torch.Tensor] = []

    def pin(self) -> None:
        """Begin with a segment that is registered."""
        tensor = self.reader.dequeue(timeout=60)
        self.reader.to_device(tensor, "cpu", self._streams[0])
        del tensor
        assert set(pins(self.reader).values()) == {"pinned"}

    def take(self, number: int) -> None:
        """One tensor."""
        draw = self._draw.random
        stream = self._streams[int(draw() * STREAMS)]
        with stream:
            tensor = self.reader.dequeue(timeout=60)
        if draw() < 0.5:
            stream.delay(0.005 if draw() < 0.02 else draw() * 0.0005)
        self._pending.append((number, self._copied(tensor, stream, draw()), stream.record()))
        if draw() < 0.1:
            self._kept.append(tensor)
        if len(self._kept) > KEPT or draw() < 0.02:
            self._kept.clear()
        del tensor
        while len(self._pending) > IN_FLIGHT:
            self._compare()

    def finish(self) -> None:
        """Compare the rest, and leave nothing."""
        while self._pending:
            self._compare()
        self._kept.clear()
        for stream in self._streams:
            stream.close()

    def _copied(self, tensor: torch.Tensor, stream: CpuStream, way: float) -> torch.Tensor:
        if way < 0.5:
            return self.reader.to_device({"it": tensor}, "cpu", stream)["it"]
        if way < 0.75:
            other = self._streams[int(way * 400) % STREAMS]
            arena.record_stream(tensor, other)
            made = COPIES.to_device(tensor, CPU, other, pinned=True)
            other.record().wait() if way < 0.52 else stream.submit(other.record().wait)
            return made
        return COPIES.to_device(tensor, CPU, stream, pinned=True)

    def _compare(self) -> None:
        number, made, passage = self._pending.popleft()
        passage.wait()
        self.wrong += not bool((made == number).all())


def read(handle: Any, tensors: int, seed: int, gated: bool, tickets: bool, result: Any) -> None:
    """The reader's process."""
    torch.set_num_threads(1)
    COPIES.writes_words = tickets
    if not gated:
        Gate.is_empty = lambda self: True  # type: ignore[method-assign]
    with MessageQueue.create_from_handle(handle, 0) as reader:
        copier = Copier(reader, seed)
        copier.pin()
        for number in range(tensors):
            copier.take(number)
        copier.finish()
        ways = {way: metric_of(reader, "gate_releases_total", way).value for way in GATE_WAYS}
        result.send({"wrong": copier.wrong, "ways": ways})
        reader.dequeue(timeout=60)  # idle until the writer has seen everything come back


def run(tensors: int, seed: int, *, gated: bool, tickets: bool = True) -> dict[str, Any]:
    """One run; the result says what was wrong, if anything."""
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="arena-gate-", dir="/dev/shm") as run_dir:
        os.environ["ARENA_RUN_DIR"] = run_dir
        with MessageQueue(1, config=CONFIG) as queue:
            ours, theirs = context.Pipe(duplex=False)
            reader = context.Process(
                target=read, args=(queue.export_handle(), tensors, seed, gated, tickets, theirs), daemon=True
            )
            reader.start()
            source = torch.empty(COUNT, dtype=torch.int64)
            for number in range(-1, tensors):
                queue.enqueue(source.fill_(number), timeout=120)
            outcome: dict[str, Any] = ours.recv()
            ends = time.monotonic() + 20
            while queue.statistics().arena_used_bytes and time.monotonic() < ends:
                time.sleep(0.005)
            statistics = queue.statistics()
            queue.enqueue(None)
            reader.join(60)
    seconds = time.monotonic() - began
    return {
        "tensors": tensors,
        "seed": seed,
        "gated": gated,
        "tickets": tickets,
        **outcome,
        "held_at_end": statistics.arena_used_bytes,
        "messages_by_path": statistics.messages_by_path,
        "exit_code": reader.exitcode,
        "seconds": round(seconds, 1),
        "microseconds_a_tensor": round(seconds / tensors * 1e6, 1),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", action="store_true")
    parser.add_argument("--without-gate", action="store_true")
    options = parser.parse_args()
    outcome = run(options.tensors, options.seed, gated=not options.without_gate, tickets=not options.events)
    print(json.dumps(outcome))
    return 0 if not outcome["wrong"] and not outcome["held_at_end"] and not outcome["exit_code"] else 1


if __name__ == "__main__":
    sys.exit(main())
