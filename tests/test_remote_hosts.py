"""Two hosts, made of network namespaces: a pulled cable, and queues over a process group that spans both."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arena import MessageQueue, RemoteConfig
from arena.errors import InvalidArgument, PeerDied
from telemetry.commands.bench.cable import Host
from tests.support import remotes
from tests.support.fleet import Fleet, Here, Worker, attach, dequeue, drain, enqueue, eventually, statistics
from tests.support.netns import Hosts, enter, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Two hosts and the cable."""
    with two_hosts() as both:
        yield both


@pytest.fixture
def cable(hosts: Hosts) -> Iterator[Hosts]:
    """The same, with the cable plugged in again afterwards."""
    yield hosts
    hosts.heal()


def writer_and_readers(fleet: Fleet, hosts: Hosts, **settings: Any) -> tuple[Worker, Worker, Worker]:
    """A writer and a reader on host a, and a reader on host b."""
    writer, near, far = [fleet.start() for _ in range(3)]
    for worker, host in ((writer, hosts.a), (near, hosts.a), (far, hosts.b)):
        worker.call(enter, host)
    remote = RemoteConfig(hosts.a.address, timeout_s=settings.pop("timeout_s", 5.0))
    handle = writer.call(remotes.create, 2, remote, **settings)
    near.call(attach, handle, 0)
    far.call(attach, handle, 1)
    return writer, near, far


def kind(here: Here) -> str:
    return type(here.queue).__name__


def test_a_reader_across_the_cable_reads_like_one_beside_the_writer(fleet, hosts):
    writer, near, far = writer_and_readers(fleet, hosts)
    assert (near.call(kind), far.call(kind)) == ("Reader", "RemoteReader")
    writer.call(enqueue, 1, torch.full((1_000_000,), 2, dtype=torch.int32), "three")
    for worker in (near, far):
        first, tensor, third = worker.call(drain, 3)
        assert (first, int(tensor.sum()), third) == (1, 2_000_000, "three")


def test_after_a_cut_that_heals_in_time_the_reader_goes_on_where_it_was(fleet, cable):
    writer, near, far = writer_and_readers(fleet, cable, slots=64, timeout_s=20.0)
    writer.call(enqueue, *range(10))
    assert far.call(drain, 10) == list(range(10))
    cable.cut()
    writer.call(enqueue, *range(10, 20), torch.full((500_000,), 20), *range(21, 30))
    taking = far.begin(drain, 20)
    assert near.call(drain, 20) == list(range(20)), "the reader beside it is not held up"
    cable.heal()
    taken = taking.result(within=60)
    assert [one if isinstance(one, int) else int(one[0]) for one in taken] == list(range(10, 30))
    assert writer.call(statistics).peers == {0: "attached", 1: "attached"}


def test_after_a_cut_that_lasts_both_ends_know_and_neither_goes_on(fleet, cable):
    writer, near, far = writer_and_readers(fleet, cable, slots=8, timeout_s=1.0)
    writer.call(enqueue, *range(4))
    assert far.call(drain, 4) == list(range(4))
    cable.cut()
    taking = far.begin(dequeue, None)
    with pytest.raises(PeerDied, match=f"reader 1 \\({os.uname().nodename}:{far.pid}\\)"):
        writer.call(enqueue, *range(4, 100))  # the ring is full, for the one beside it too
    with pytest.raises(PeerDied, match="nothing was heard from the writer's host"):
        taking.result()
    cable.heal()
    with pytest.raises(PeerDied):
        far.call(dequeue)
    assert near.call(drain, 8) == list(range(8))
    writer.call(enqueue, "goes on")
    assert eventually(lambda: near.call(dequeue) == "goes on")


# ── process groups ───────────────────────────────────────────────────────────────────────────────
def join(here: Here, host: Host, master: str, port: int, rank: int, world: int) -> None:
    """As torchrun starts it."""
    import torch.distributed as dist

    enter(here, host)
    os.environ.update(MASTER_ADDR=master, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")


def broadcast(here: Here, writer_rank: int, remote: str | None, run_dir: str | None = None) -> tuple[str, int, str]:
    import torch.distributed as dist

    if run_dir is not None:
        os.environ["ARENA_RUN_DIR"] = run_dir
    mine = dist.get_rank() == writer_rank
    with MessageQueue.create_from_process_group(None, writer_rank=writer_rank, remote=remote, timeout=20) as queue:
        tensor = queue.broadcast_object(torch.arange(100_000) if mine else None)
        told = queue.broadcast_object("told" if mine else None)
        dist.barrier()
        return type(queue).__name__, int(tensor.sum()), told


def together(workers: list[Worker], function: Any, *args: Any) -> list[Any]:
    calls = [worker.begin(function, *args) for worker in workers]
    return [call.result() for call in calls]


def test_a_group_over_both_hosts_shares_memory_where_it_can(fleet, hosts, tmp_path):
    workers = [fleet.start() for _ in range(3)]
    places = [hosts.a, hosts.a, hosts.b]
    port = 20_000 + os.getpid() % 20_000
    calls = [
        worker.begin(join, place, hosts.a.address, port, rank, 3)
        for rank, (worker, place) in enumerate(zip(workers, places, strict=True))
    ]
    for call in calls:
        call.result()
    total = 100_000 * 99_999 // 2
    assert together(workers, broadcast, 0, None) == [
        ("Writer", total, "told"),
        ("Reader", total, "told"),
        ("RemoteReader", total, "told"),
    ], "the writer's address is that of MASTER_ADDR"
    assert [name for name, _, _ in together(workers, broadcast, 2, None)] == ["RemoteReader", "RemoteReader", "Writer"]
    assert [name for name, _, _ in together(workers, broadcast, 1, hosts.a.address)][2] == "RemoteReader"
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    calls = [worker.begin(broadcast, 0, None, str(own) if rank == 1 else None) for rank, worker in enumerate(workers)]
    assert [call.result()[0] for call in calls][1] == "Reader", (
        "what counts is the writer's directory, if it is in sight"
    )


def alone(here: Here, rank: int, store: str) -> str:
    import torch.distributed as dist

    remotes.elsewhere(here, f"host {rank}")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        MessageQueue.create_from_process_group(None, timeout=20)
    except InvalidArgument as error:
        return str(error)
    return "made"


def test_a_group_without_an_address_for_those_elsewhere_says_so_on_every_rank(fleet, tmp_path):
    workers = [fleet.start() for _ in range(2)]
    calls = [worker.begin(alone, rank, str(tmp_path / "store")) for rank, worker in enumerate(workers)]
    first, second = (call.result() for call in calls)
    assert first == second
    assert "ranks 1 (" in first
    assert "pass remote=" in first
