"""What the workers of a fleet do so that there is something to measure: send at a pace, take at a pace."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from arena.errors import ArenaError
from tests.support.fleet import Here

TRAFFIC_ENDS_S = 90.0  # the fleet ends it long before


def send(here: Here, pause_s: float, nbytes: int) -> None:
    """Enqueue a tensor and a small message in turn, for as long as there is anybody."""
    pixels = torch.zeros(nbytes, dtype=torch.uint8)
    deadline = time.monotonic() + TRAFFIC_ENDS_S
    step = 0
    while time.monotonic() < deadline:
        message = {"step": step, "pixels": pixels} if step % 2 else {"step": step}
        try:
            here.queue.enqueue(message, timeout=TRAFFIC_ENDS_S)
        except ArenaError:  # a reader died; the queue goes on without it
            continue
        step += 1
        time.sleep(pause_s)


def take(here: Here, slow_while: Path | None = None, pause_s: float = 0.0) -> None:
    """Dequeue until the fleet ends; come back late each time, for as long as a file is there."""
    while True:
        here.kept["newest"] = here.queue.dequeue(timeout=TRAFFIC_ENDS_S)
        if slow_while is not None and slow_while.exists():
            time.sleep(pause_s)


def add_up(here: Here, rank: int) -> None:
    """All-reduce a small tensor, and one that only the fallback takes, and gather, in turn, until the fleet ends."""
    share = torch.ones(4096)
    counts = torch.ones(16, dtype=torch.int64)
    deadline = time.monotonic() + TRAFFIC_ENDS_S
    while time.monotonic() < deadline:
        here.comm.all_reduce(share)
        here.comm.all_reduce(counts)
        here.comm.all_gather(share)
        time.sleep(0.02)


def send_at_once(here: Here, count: int) -> float:
    """Enqueue `count` messages; when the last of them was begun."""
    for number in range(count - 1):
        here.queue.enqueue(number)
    began = time.monotonic()
    here.queue.enqueue(count)
    return began


def take_one_at(here: Here, when: float) -> float:
    """Dequeue one message at a time; when its slot was released."""
    time.sleep(max(0.0, when - time.monotonic()))
    here.queue.dequeue()
    return time.monotonic()
