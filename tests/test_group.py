"""Queues over a process group: three processes and gloo."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from arena import MessageQueue
from arena.errors import InvalidArgument, QueueClosed, QueueTimeout, RunDirectoryError
from tests.support.fleet import Here, Worker

WORLD = 3


@pytest.fixture
def ranks(fleet, tmp_path) -> list[Worker]:
    """Workers that are the ranks of one group."""
    workers = [fleet.start() for _ in range(WORLD)]
    together(workers, join, tmp_path / "store")
    return workers


def together(workers: list[Worker], function: Any, *args: Any) -> list[Any]:
    """The same command everywhere, at once, each with its rank first; the results in rank order."""
    calls = [worker.begin(function, rank, *args) for rank, worker in enumerate(workers)]
    return [call.result() for call in calls]


def join(here: Here, rank: int, store: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)


def broadcast(here: Here, rank: int, writer_rank: int, subgroup: list[int] | None = None) -> Any:
    """Make a queue over the group and send one tensor and one object through it."""
    import torch.distributed as dist

    group = dist.new_group(subgroup) if subgroup is not None else None
    if subgroup is not None and rank not in subgroup:
        return None
    me = dist.get_rank(group)
    with MessageQueue.create_from_process_group(group, writer_rank=writer_rank, timeout=20) as queue:
        mine = me == writer_rank
        tensor = queue.broadcast_object(torch.arange(100_000) if mine else None)
        told = queue.broadcast_object({"from": rank} if mine else None)
        role, readers = queue.statistics().role, sorted(queue.statistics().lag_by_reader)
        dist.barrier(group)
    return int(tensor.sum()), told["from"], role, readers


@pytest.mark.parametrize("writer_rank", range(WORLD))
def test_any_rank_of_a_group_writes_and_the_others_read_in_group_order(ranks, writer_rank):
    results = together(ranks, broadcast, writer_rank)
    total = 100_000 * 99_999 // 2
    assert {result[:2] for result in results} == {(total, writer_rank)}
    readers = [rank for rank in range(WORLD) if rank != writer_rank]
    assert results[writer_rank][2:] == ("writer", [0, 1])
    assert [results[rank][2:] for rank in readers] == [("reader", [0]), ("reader", [1])]


def test_a_subgroup_counts_its_own_ranks(ranks):
    results = together(ranks, broadcast, 1, [0, 2])
    assert results[1] is None
    assert results[2][1:] == (2, "writer", [0])
    assert results[0][1:] == (2, "reader", [0])


def refused(here: Here, rank: int, writer_rank: int) -> str:
    try:
        MessageQueue.create_from_process_group(None, writer_rank=writer_rank, timeout=20)
    except InvalidArgument as error:
        return str(error)
    return "made"


@pytest.mark.parametrize("writer_rank", [-1, WORLD, 100])
def test_a_writer_outside_the_group_is_refused_everywhere(ranks, writer_rank):
    for told in together(ranks, refused, writer_rank):
        assert "no such writer" in told


def fails(here: Here, rank: int, run_dir: str) -> tuple[str, str]:
    os.environ["ARENA_RUN_DIR"] = run_dir
    try:
        MessageQueue.create_from_process_group(None, writer_rank=0, timeout=20)
    except RunDirectoryError as error:
        return type(error).__name__, str(error)
    return "made", ""


def test_when_the_writer_cannot_make_the_queue_every_rank_hears_why(ranks, tmp_path):
    file = tmp_path / "not a directory"
    file.write_text("")
    told = together(ranks, fails, str(file))
    assert told == [told[0]] * WORLD
    assert told[0][0] == "RunDirectoryError"
    assert str(file) in told[0][1]


def comes_late(here: Here, rank: int) -> str:
    """Rank 2 hands its place to somebody who never attaches."""
    import torch.distributed as dist

    if rank == 2:
        MessageQueue.create_from_handle = staticmethod(lambda *_, **__: _Absent())  # type: ignore[method-assign]
    try:
        MessageQueue.create_from_process_group(None, writer_rank=0, timeout=0.5)
    except (QueueTimeout, QueueClosed) as error:  # whoever's time is over first: the writer's queue goes with it
        outcome = str(error)
    else:
        outcome = "made"
    dist.barrier()
    return outcome


class _Absent:
    def wait_until_ready(self, timeout: float | None) -> None:
        pass


def test_a_rank_that_does_not_attach_is_named(ranks):
    writer, reader, absent = together(ranks, comes_late)
    assert "readers [1]" in writer
    assert "not every reader" in reader or "shut down by its writer" in reader
    assert absent == "made"
