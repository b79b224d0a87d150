"""Where a memory cgroup ends: the arena stops growing before, and whoever the kernel kills is told to the others."""

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from arena.errors import PeerDied
from arena.memory import headroom_bytes
from tests.support import fleet as hand
from tests.support.fleet import Here

pytestmark = pytest.mark.usefixtures("run_dir")
CGROUPS = Path("/sys/fs/cgroup")
MIB = 1 << 20


class MemoryCgroup:
    """A cgroup of our own with a memory limit, of either version."""

    def __init__(self, path: Path, limit: str, usage: str) -> None:
        self.path, self._limit, self._usage = path, path / limit, path / usage

    def join(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    def allow(self, nbytes: int) -> None:
        """So much more than is used now."""
        self._limit.write_text(str(self.used() + nbytes))

    def used(self) -> int:
        return int(self._usage.read_text())

    def remove(self) -> None:
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        hand.eventually(self._removed)

    def _removed(self) -> bool:
        with contextlib.suppress(OSError):  # its processes are on their way out
            self.path.rmdir()
        return not self.path.exists()


def memory_cgroup() -> MemoryCgroup:
    name = f"arena-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        if (CGROUPS / "memory/memory.limit_in_bytes").exists():
            path = CGROUPS / "memory" / name
            path.mkdir()
            return MemoryCgroup(path, "memory.limit_in_bytes", "memory.usage_in_bytes")
        (CGROUPS / "cgroup.subtree_control").write_text("+memory")
        path = CGROUPS / name
        path.mkdir()
        return MemoryCgroup(path, "memory.max", "memory.current")
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    made = memory_cgroup()
    yield made
    made.remove()


def filled(number: int) -> torch.Tensor:
    return torch.full((4 * MIB,), number, dtype=torch.uint8)


def send(here: Here, count: int) -> dict[str, int]:
    for number in range(count):
        here.queue.enqueue(filled(number), timeout=30)
    fallbacks: dict[str, int] = here.queue.statistics().fallbacks
    return fallbacks


def keep_all(here: Here, count: int) -> bool:
    """Take messages and keep them, so that the arena has to grow for each; whether all are right."""
    here.kept["all"] = [here.queue.dequeue(timeout=60) for _ in range(count)]
    return all(torch.equal(tensor, filled(number)) for number, tensor in enumerate(here.kept["all"]))


def room(here: Here) -> int:
    return headroom_bytes()


def use_up(here: Here, nbytes: int) -> None:
    """Private memory, page by page; the kernel ends this process on the way."""
    here.kept["pages"] = pages = mmap.mmap(-1, nbytes)
    for offset in range(0, nbytes, mmap.PAGESIZE):
        pages[offset] = 1


def told_while_waiting(here: Here) -> int | None:
    with pytest.raises(PeerDied) as told:
        here.queue.dequeue(timeout=60)
    return told.value.signal


def told_while_sending(here: Here) -> tuple[int, int | None]:
    with pytest.raises(PeerDied) as told:
        while True:
            here.queue.enqueue("on", timeout=30)
    return told.value.rank, told.value.signal


def lend(here: Here, nbytes: int) -> None:
    here.lending = here.queue.lend((nbytes,), torch.uint8)
    here.tensor = here.lending.__enter__()


def fill_and_send(here: Here) -> None:
    here.queue.enqueue(here.tensor.fill_(1), timeout=30)


def test_an_arena_stops_growing_before_its_cgroup_s_limit_and_every_message_arrives(fleet, cgroup):
    writer, reader = fleet.start(), fleet.start()
    reader.call(hand.attach, writer.call(hand.create, 1, segment_bytes=4 * MIB, max_arena_bytes=256 * MIB), 0)
    cgroup.join(writer.pid)
    cgroup.allow(40 * MIB)
    assert writer.call(room) <= 40 * MIB
    taking = reader.begin(keep_all, 12)
    assert set(writer.call(send, 12)) == {"memory_headroom"}
    assert taking.result()
    assert writer.call(hand.statistics).arena_used_max_bytes >= 8 * MIB  # it had grown, while there was room


@pytest.mark.parametrize("killed", ["writer", "reader"])
def test_who_is_killed_for_want_of_memory_is_told_to_the_other(fleet, cgroup, killed):
    writer, reader = fleet.start(), fleet.start()
    reader.call(hand.attach, writer.call(hand.create, 1, on_reader_death="raise"), 0)
    victim = writer if killed == "writer" else reader
    cgroup.join(victim.pid)
    cgroup.allow(16 * MIB)
    if killed == "writer":
        waiting = reader.begin(told_while_waiting)
        victim.begin(use_up, 64 * MIB)
        assert waiting.result() == signal.SIGKILL
    else:
        victim.begin(use_up, 64 * MIB)
        assert writer.call(told_while_sending) == (0, signal.SIGKILL)
    assert victim.wait_end() == -signal.SIGKILL


def test_a_lent_tensor_whose_pages_the_cgroup_no_longer_has_is_a_death_that_is_told(fleet, cgroup):
    """Without huge pages, memory is taken at the first touch: others may have it by then, and the kernel kills."""
    writer, reader = fleet.start(), fleet.start()
    reader.call(hand.attach, writer.call(hand.create, 1, huge_pages=False), 0)
    cgroup.join(writer.pid)
    cgroup.allow(256 * MIB)
    writer.call(lend, 48 * MIB)
    cgroup.allow(8 * MIB)
    waiting = reader.begin(told_while_waiting)
    writer.begin(fill_and_send)
    assert waiting.result() == signal.SIGKILL
    assert writer.wait_end() == -signal.SIGKILL
