"""Messages of every size through four readers, every byte of each compared, nothing left behind.

Sizes are log-uniform from 1 byte to 1 MB, so inline frames, payload blocks, tensor blocks and, with the arena kept
small, fragments all get their share. Both sides draw the same sequence from the same seed: a reader knows what each
message must be, and compares it with its own copy of the source bytes, which no checksum could do better.

    python -m tests.stress.messages --messages 10000000 --cpus 0,1
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from arena import MessageQueue, QueueConfig

LARGEST = 1_000_000
READERS = 4
SOURCE_BYTES = 4 << 20
PROGRESS_MESSAGES = 250_000
memcmp = ctypes.CDLL(None).memcmp  # 25 times as fast as torch.equal on one thread, so that the queue is what is busy
memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
CONFIG = QueueConfig(name="stress", max_arena_bytes=3 << 20, segment_bytes=1 << 20, max_holds=64)


def source(seed: int) -> torch.Tensor:
    """The bytes that every message is cut from."""
    return torch.randint(0, 256, (SOURCE_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def plan(seed: int, messages: int) -> Iterator[tuple[int, int, int]]:
    """Number, offset and length of each message."""
    draw = random.Random(seed).random
    for number in range(messages):
        nbytes = int(LARGEST ** draw())
        yield number, int(draw() * (SOURCE_BYTES - nbytes)), nbytes


def leftovers() -> tuple[int, int, int]:
    """What a leak would show in: open files, shared memory mapped, and its bytes."""
    shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:arena" in line]
    spans = [line.split(maxsplit=1)[0].split("-") for line in shared]
    return len(os.listdir("/proc/self/fd")), len(shared), sum(int(end, 16) - int(start, 16) for start, end in spans)


def read(handle, rank: int, seed: int, messages: int, result) -> None:
    """One reader: every message, in order, byte for byte."""
    torch.set_num_threads(1)
    before = leftovers()
    wrong, missed_wakes = compare(handle, rank, seed, messages)
    after = leftovers()
    leaks = [] if after == before else [before, after]
    result.send({"rank": rank, "wrong": wrong, "missed_wakes": missed_wakes, "leaks": leaks})


def compare(handle, rank: int, seed: int, messages: int) -> tuple[int, int]:
    """How many messages were not what they had to be, and how many wake-ups were missed."""
    own = source(seed)
    raw = own.numpy().tobytes()
    wrong = 0
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for number, offset, nbytes in plan(seed, messages):
            got, body = reader.dequeue(timeout=300)
            if isinstance(body, bytes):
                same = len(body) == nbytes and raw.startswith(body, offset)
            else:
                same = body.shape == (nbytes,) and not memcmp(body.data_ptr(), own.data_ptr() + offset, nbytes)
            wrong += got != number or not same
            del body
        return wrong, reader.statistics().missed_wakes


def write(queue: MessageQueue, seed: int, messages: int) -> None:
    """Every second message carries a tensor, the others bytes."""
    own = source(seed)
    raw = own.numpy().tobytes()
    began = time.monotonic()
    for number, offset, nbytes in plan(seed, messages):
        if number and number % PROGRESS_MESSAGES == 0:
            print(f"{number:,} of {messages:,} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if number % 2:
            queue.enqueue((number, own[offset : offset + nbytes]), timeout=300)
        else:
            queue.enqueue((number, raw[offset : offset + nbytes]), timeout=300)


def broadcast(context, messages: int, seed: int):
    """Start the readers, send everything, and collect what they found."""
    with MessageQueue(READERS, config=CONFIG) as queue:
        results, readers = [], []
        for rank in range(READERS):
            ours, theirs = context.Pipe(duplex=False)
            reader = context.Process(
                target=read, args=(queue.export_handle(), rank, seed, messages, theirs), daemon=True
            )
            reader.start()
            results.append(ours)
            readers.append(reader)
        queue.wait_until_ready(120)
        write(queue, seed, messages)
        outcomes = [result.recv() for result in results]
        for reader in readers:
            reader.join(60)
        return queue.statistics(), outcomes, [reader.exitcode for reader in readers]


def run(messages: int, seed: int) -> dict:
    """One run; the result says what was wrong, if anything."""
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="arena-stress-", dir="/dev/shm") as run_dir:
        os.environ["ARENA_RUN_DIR"] = run_dir
        before = leftovers()
        statistics, outcomes, exit_codes = broadcast(context, messages, seed)
        after = leftovers()
        # multiprocessing keeps pipes of its own open; the maps must be as they were.
        leaks = [] if after[1:] == before[1:] else [before, after]
        leaks += os.listdir(run_dir)
    seconds = time.monotonic() - began
    return {
        "messages": messages,
        "seed": seed,
        "cpus": sorted(os.sched_getaffinity(0)),
        "wrong": sum(outcome["wrong"] for outcome in outcomes),
        "leaks": leaks + [leak for outcome in outcomes for leak in outcome["leaks"]],
        "missed_wakes": statistics.missed_wakes + sum(outcome["missed_wakes"] for outcome in outcomes),
        "messages_by_path": statistics.messages_by_path,
        "fallbacks": statistics.fallbacks,
        "held_at_end": statistics.arena_used_bytes,
        "exit_codes": exit_codes,
        "seconds": round(seconds, 1),
        "microseconds_a_message": round(seconds / messages * 1e6, 1),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpus", help="as for taskset: 0 or 0,1")
    options = parser.parse_args()
    if options.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    outcome = run(options.messages, options.seed)
    print(json.dumps(outcome))
    return 0 if not outcome["wrong"] and not outcome["leaks"] and not any(outcome["exit_codes"]) else 1


if __name__ == "__main__":
    sys.exit(main())
