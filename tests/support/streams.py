"""Streams of the CPU's copy engine, gone with the test that made them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from arena import MessageQueue
from arena.device.cpu.copies import COPIES, CpuStream
from arena.probe import ProbeReader, Sample, pages
from tests.support.fleet import eventually


@contextmanager
def cpu_streams(count: int = 1) -> Iterator[list[CpuStream]]:
    """So many; with them this process uses a device, and no longer afterwards."""
    before = COPIES.lockable_bytes
    streams = [CpuStream() for _ in range(count)]
    try:
        yield streams
    finally:
        COPIES.faults.clear()
        COPIES.stuck = False
        COPIES.lockable_bytes = before
        for stream in streams:
            stream.close()


def pins(reader: MessageQueue) -> dict[int, str]:
    """What the reader says of its segments, once that is settled."""

    def settled() -> Any:
        found = reader.statistics().pins
        return found if found and "pinning" not in found.values() else None

    return eventually(settled)


def metric_of(reader: Any, name: str, *labels: str) -> Sample:
    """One series of a reader's page, as others see it."""
    path = next(path for path in pages(reader._directory) if path.name.startswith(f"reader-{reader.rank}"))
    with ProbeReader(path) as page:
        return next(one for one in page.samples() if (one.name, *one.labels.values()) == (name, *labels))
