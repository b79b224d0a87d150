"""Stamped tensors that a reader's device follows while they are written: late at random at either end, given up now and
then, and waited for in vain.

Every byte of each copy is compared once it has passed; a message that was given up must not come, any other must. Both
ends are processes of their own, and holds go back on tickets.

    python -m tests.stress.streamed --tensors 100000
    python -m tests.stress.streamed --tensors 3000 --without-gate     # has to find corrupted bytes
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from arena import MessageQueue, QueueConfig, codec, copying, filling
from arena.codec import TensorSource
from arena.device.cpu.copies import CpuStream
from arena.errors import QueueTimeout
from arena.gate import Gate
from arena.probe.metrics import COPY_MODES, GATE_WAYS
from tests.support.streams import metric_of, pins

BLOCKS = 4
COUNT = 8 << 10
BLOCK_BYTES = COUNT * 8
STREAMS = 2
IN_FLIGHT = 8
CONFIG = QueueConfig(
    name="streamed",
    slots=4,
    max_arena_bytes=BLOCKS * BLOCK_BYTES,
    segment_bytes=BLOCKS * BLOCK_BYTES,
    min_block_bytes=BLOCK_BYTES,
)


class Unreadable(Exception):
    """What a source raises that is given up."""


def small_sizes() -> None:
    """64 KiB are streamed, in eight pieces."""
    filling.STREAMED_BYTES = BLOCK_BYTES  # type: ignore[misc]
    copying.PIECE_BYTES = 8 << 10  # type: ignore[misc]
    codec._PARALLEL_COPY_BYTES = 0  # type: ignore[misc]


# ── the writer ───────────────────────────────────────────────────────────────────────────────────
class Moody:
    """The writer's copies: late at random, and now and then one that fails."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed).random
        self._write = TensorSource.write_in_order
        moody = self

        def write_in_order(source: TensorSource, target: memoryview, reached: Callable[[int], None]) -> None:
            moody.write(source, target, reached)

        TensorSource.write_in_order = write_in_order  # type: ignore[method-assign]

    def write(self, source: TensorSource, target: memoryview, reached: Callable[[int], None]) -> None:
        late, fails = self._draw() < 0.1, self._draw() < 0.02

        def moodily(end: int) -> None:
            if late:
                time.sleep(self._draw() * 0.0005)
            if fails and self._draw() < 0.5:
                raise Unreadable
            reached(end)

        self._write(source, target, moodily)


# ── the reader ───────────────────────────────────────────────────────────────────────────────────
class Taker:
    """Takes, lets go at once, and compares later."""

    def __init__(self, reader: Any, seed: int) -> None:
        self.reader = reader
        self.wrong = self.timeouts = 0
        self.came = 0
        self._streams = [CpuStream() for _ in range(STREAMS)]
        self._draw = random.Random(seed).random
        self._pending: deque[tuple[int, torch.Tensor, Any]] = deque()

    def take(self) -> bool:
        """One message; False for the last."""
        stream = self._streams[int(self._draw() * STREAMS)]
        if self._draw() < 0.2:
            stream.delay(self._draw() * 0.001)
        try:
            got = self._taken(stream, 0.0002 if self._draw() < 0.05 else 60)
        except QueueTimeout:
            self.timeouts += 1
            return True
        if got is None:
            return False
        self.came += 1
        self._pending.append((got["number"], got["it"], stream.record()))
        while len(self._pending) > IN_FLIGHT:
            self._compare()
        return True

    def _taken(self, stream: CpuStream, timeout: float) -> Any:
        if self._draw() < 0.15:
            got = self.reader.dequeue(timeout=timeout)
            return self.reader.to_device(got, "cpu", stream)
        return self.reader.dequeue_to("cpu", timeout, stream=stream)

    def finish(self) -> None:
        """Compare the rest."""
        while self._pending:
            self._compare()
        for stream in self._streams:
            stream.close()

    def _compare(self) -> None:
        number, made, passage = self._pending.popleft()
        passage.wait()
        self.wrong += not bool((made == number).all())


def read(handle: Any, seed: int, gated: bool, result: Any) -> None:
    """The reader's process."""
    torch.set_num_threads(1)
    if not gated:
        Gate.is_empty = lambda self: True  # type: ignore[method-assign]
    with MessageQueue.create_from_handle(handle, 0) as reader:
        taker = Taker(reader, seed)
        taker.take()
        pins(reader)
        result.send("ready")
        while taker.take():
            pass
        taker.finish()
        counts = {mode: metric_of(reader, "device_copies_total", mode).value for mode in COPY_MODES}
        ways = {way: metric_of(reader, "gate_releases_total", way).value for way in GATE_WAYS}
        result.send(
            {"wrong": taker.wrong, "came": taker.came, "timeouts": taker.timeouts, "copies": counts, "ways": ways}
        )
        reader.dequeue(timeout=60)  # idle until the writer has seen everything come back


def run(tensors: int, seed: int, *, gated: bool = True) -> dict[str, Any]:
    """One run; the result says what was wrong, if anything."""
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="arena-streamed-", dir="/dev/shm") as run_dir:
        os.environ["ARENA_RUN_DIR"] = run_dir
        with MessageQueue(1, config=CONFIG) as queue:
            ours, theirs = context.Pipe(duplex=False)
            reader = context.Process(target=read, args=(queue.export_handle(), seed, gated, theirs), daemon=True)
            reader.start()
            small_sizes()
            source, sent = torch.empty(COUNT, dtype=torch.int64), 1
            queue.enqueue({"number": -1, "it": source.fill_(-1)}, timeout=60)
            ours.recv()
            Moody(seed)
            for number in range(tensors):
                with contextlib.suppress(Unreadable):
                    queue.enqueue({"number": number, "it": source.fill_(number)}, timeout=120)
                    sent += 1
            queue.enqueue(None, timeout=60)
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
        "sent": sent,
        **outcome,
        "held_at_end": statistics.arena_used_bytes,
        "exit_code": reader.exitcode,
        "seconds": round(seconds, 1),
        "microseconds_a_tensor": round(seconds / tensors * 1e6, 1),
    }


def is_right(outcome: dict[str, Any]) -> bool:
    """Whether everything that was sent came, as it was, and all blocks came back."""
    whole = outcome["sent"] == outcome["came"] and not outcome["wrong"]
    return whole and not outcome["held_at_end"] and not outcome["exit_code"]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-gate", action="store_true")
    options = parser.parse_args()
    outcome = run(options.tensors, options.seed, gated=not options.without_gate)
    print(json.dumps(outcome))
    return 0 if is_right(outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
