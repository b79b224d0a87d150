"""The paths on GPUs: exact, the same bits everywhere, in graphs and out of them, whoever stalls or dies."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from arena.device import Declined, Place
from arena.errors import CommunicatorClosed, PeerDied
from tests.support.gpus import CUDA, Rank, on_gpus
from tests.support.processes import run

pytestmark = pytest.mark.gpu

MIB = 1 << 20
OWN = ("one_shot", "two_shot")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
NAN = float("nan")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS[x.dtype])


def sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """As the kernels promise it: in fp32, in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def special(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Every pair of special values, whatever the other ranks shift theirs by."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), NAN, 6e4, -6e4]).to(dtype)
    sentinels = torch.full((7,), -1, dtype=BITS[dtype]).view(dtype)  # all bits set, in pairs and alone
    few = torch.cat([values, sentinels])
    return torch.cat([few.roll(shift * (rank + 1)) for shift in range(len(few))])


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, with the sign of zeros; any NaN is like any other."""
    equal = (a == b) & (torch.signbit(a) == torch.signbit(b))
    return bool((equal | (a.isnan() & b.isnan())).all())


# --- worlds of any size, all ranks on one GPU and in one process ------------------------------------------------------


class OnOneGpu:
    """The ranks of a world as streams of one process. Their kernels run beside each other, so each gets few blocks."""

    def __init__(self, kind: Any, world: int, max_bytes: int) -> None:
        from arena.device.cuda import cards
        from arena.device.cuda.inbox import Inbox

        device = torch.device("cuda", 0)
        CUDA.set_device(device)
        card = cards._card_of(device)._replace(multiprocessors=132 // world)
        self.paths = [kind(Place(rank, world, device, None), [card] * world, max_bytes) for rank in range(world)]
        slots = self.paths[0]._slots()
        boxes = [Inbox(rank, sum(each.size_bytes for each in slots)) for rank in range(world)]
        for rank, (path, box) in enumerate(zip(self.paths, boxes, strict=True)):
            box.arm()
            box.peers = tuple(other.address for other in boxes if other is not box)
            path._mails = list(path._address(path._slots(), box))
            path._inbox = None  # it is not this path's to close
            assert path._place.rank == rank
        self.streams = [CUDA.Stream() for _ in range(world)]
        CUDA.synchronize()

    def all_reduce(self, parts: list[torch.Tensor], order: list[int]) -> list[torch.Tensor]:
        CUDA.synchronize()
        outs = [torch.empty(0)] * len(parts)
        for rank in order:
            with CUDA.stream(self.streams[rank]):
                outs[rank] = self.paths[rank].all_reduce(parts[rank])
        ends = time.monotonic() + 10
        events = [stream.record_event() for stream in self.streams]
        while not all(event.query() for event in events):
            if time.monotonic() > ends:
                for path in self.paths:
                    path.abort()
                raise TimeoutError("an operation does not end")
        return outs


def try_world(world: int, trials: int) -> int:
    from arena.device.cuda import push, shapes

    shapes.SPLIT_ABOVE_BYTES = MIB  # type: ignore[misc]  # so that small tensors come to every kernel
    rng = random.Random(world)
    for kind in (push.OneShot, push.TwoShot):
        ranks = OnOneGpu(kind, world, 4 * MIB)
        for trial in range(trials):
            dtype = rng.choice(DTYPES)
            most = rng.choice([20, 5000, 200_000, 4 * MIB // dtype.itemsize])
            parts = [torch.randn(rng.randrange(1, most), device="cuda").to(dtype)]
            parts += [torch.randn_like(parts[0]) for _ in range(world - 1)]
            for out in ranks.all_reduce(parts, rng.sample(range(world), world)):
                assert torch.equal(bits(out), bits(sum_of(parts))), (kind, dtype, parts[0].shape, trial)
        for dtype in DTYPES:
            parts = [special(dtype, rank).to("cuda") for rank in range(world)]
            outs = ranks.all_reduce(parts, list(range(world)))
            assert all(torch.equal(bits(out), bits(outs[0])) for out in outs)
            assert same_values(outs[0], sum_of(parts))
    return trials


@pytest.mark.parametrize("world", range(2, 9))
def test_a_world_of_any_size_gets_the_same_bits_on_every_rank(world) -> None:
    if not CUDA.is_available():
        pytest.skip("needs a GPU")
    assert run(try_world, world, 200, timeout_s=50) == 200


# --- two GPUs ---------------------------------------------------------------------------------------------------------


def special_values(rank: Rank, name: str) -> list[bool]:
    path = rank.set_up(name, MIB)
    good = []
    for dtype in DTYPES:
        if path.declines(torch.empty(0, dtype=dtype)):
            continue
        parts = [special(dtype, each).to(rank.device) for each in range(rank.world)]
        out = path.all_reduce(parts[rank.rank])
        everybody = rank.tell(bits(out).cpu())
        good += [same_values(out, sum_of(parts)), all(torch.equal(everybody[0], other) for other in everybody)]
    return good


@pytest.mark.parametrize("name", OWN)
def test_zeros_keep_their_sign_and_the_sentinel_is_just_a_nan(tmp_path, name) -> None:
    for good in on_gpus(special_values, tmp_path / "store", name):
        assert good == [True] * 6


def odd_tensors(rank: Rank, name: str) -> int:
    path = rank.set_up(name, MIB)
    whole = [torch.arange(4096, device=rank.device, dtype=torch.float32) % 9 + each for each in range(2)]
    checked = 0
    for dtype in DTYPES:
        for view in (
            lambda x: x[1:1000],  # not aligned
            lambda x: x[:3],  # less than a vector
            lambda x: x[:0],
            lambda x: x.view(64, 64).t(),
            lambda x: x.view(64, 64)[:, ::3],
            lambda x: x[:1].view(()),
            lambda x: x[:640].view(10, 64).expand(2, 10, 64),
        ):
            parts = [view(each.to(dtype)) for each in whole]
            kept = parts[rank.rank].clone()
            out = path.all_reduce(parts[rank.rank])
            assert out.shape == kept.shape and out.is_contiguous() and out.dtype == dtype
            assert torch.equal(out, sum_of(parts)), (dtype, out.shape)
            assert torch.equal(parts[rank.rank], kept)
            checked += 1
    assert path.declines(torch.empty(8, dtype=torch.int32, device=rank.device)) == "dtype"
    assert path.declines(torch.empty(MIB // 4, device=rank.device)) is None
    assert path.declines(torch.empty(MIB // 4 + 1, device=rank.device)) == "too_large"
    return checked


@pytest.mark.parametrize("name", OWN)
def test_any_layout_alignment_and_size_is_added_up(tmp_path, name) -> None:
    assert on_gpus(odd_tensors, tmp_path / "store", name) == [21, 21]


def in_graphs(rank: Rank, name: str) -> int:
    path = rank.set_up(name, 32 * MIB)
    stream = CUDA.Stream()
    graphs: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    inputs = []  # a graph reads them again
    with CUDA.stream(stream):
        for operations in (1, 2, 3):
            for count in (4096, 50_000, 9 << 20):
                x = (torch.arange(count, device=rank.device) % 5 + rank.rank).bfloat16()
                inputs.append(x)
                CUDA.synchronize()
                graph = CUDA.CUDAGraph()
                with CUDA.graph(graph, stream=stream):
                    out = x
                    for _ in range(operations):
                        out = path.all_reduce(out)
                expected = (torch.arange(count, device=rank.device) % 5 * 2 + 1) * 2 ** (operations - 1)
                graphs.append((graph, out, expected.bfloat16()))
        rng = random.Random(3)
        for _ in range(300):
            graph, out, expected = rng.choice(graphs)
            out.fill_(NAN)
            graph.replay()
            assert torch.equal(out, expected)
            if rng.random() < 0.3:
                path.all_reduce(torch.ones(rng.randrange(1, 100_000), device=rank.device))  # eager, between replays
    return len(graphs)


@pytest.mark.parametrize("name", OWN)
def test_graphs_may_be_replayed_in_any_order_after_any_other_operation(tmp_path, name) -> None:
    assert on_gpus(in_graphs, tmp_path / "store", name) == [9, 9]


def on_two_streams(rank: Rank) -> int:
    path = rank.set_up("one_shot", 8 * MIB)
    streams = [CUDA.Stream() for _ in range(2)]
    x = (torch.arange(2 * MIB, device=rank.device) % 7).float()
    CUDA.synchronize()
    outs = []
    for turn in range(200):
        with CUDA.stream(streams[turn % 2]):
            if turn % 5 == rank.rank:
                CUDA._sleep(100_000)
            outs.append(path.all_reduce(x[: 1 + turn * 1000]))
    CUDA.synchronize()
    return sum(torch.equal(out, 2 * x[: len(out)]) for out in outs)


def test_a_second_stream_is_ordered_behind_the_first(tmp_path) -> None:
    assert on_gpus(on_two_streams, tmp_path / "store") == [200, 200]


def on_another_device(rank: Rank) -> bool:
    path = rank.set_up("one_shot", MIB)
    x = torch.full((4096,), rank.rank + 1.0, device=rank.device)
    with CUDA.device(1 - rank.rank):
        return bool((path.all_reduce(x) == 3).all())


def test_the_current_device_need_not_be_the_tensors(tmp_path) -> None:
    assert on_gpus(on_another_device, tmp_path / "store") == [True, True]


# --- stress -----------------------------------------------------------------------------------------------------------


def storm(rank: Rank, name: str, operations: int, graph: bool) -> tuple[int, int]:
    """Sums of random sizes, outputs full of NaN before, stalls now and then. How many are wrong, of how many."""
    largest = 64 * MIB
    path = rank.set_up(name, largest)
    values = torch.Generator().manual_seed(7)
    parts = [torch.randint(-60, 61, (largest // 2,), generator=values).bfloat16() for _ in range(2)]
    x, expected = parts[rank.rank].to(rank.device), sum_of(parts).to(rank.device)
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    rng, own = random.Random(11), random.Random(rank.rank)
    stream = CUDA.Stream()
    CUDA.synchronize()

    def one() -> None:
        count = min(int(2 ** rng.uniform(0, 25)), largest // 2)
        if rng.random() < 0.8:
            count = -(-count // 8) * 8  # whole vectors, as engines bring them
        first = rng.randrange(0, largest // 2 - count + 1) // 8 * 8
        part = x[first : first + count]
        poison = torch.full_like(part, NAN)  # its memory is what the result is allocated from next
        del poison
        wrong.add_((path.all_reduce(part) != expected[first : first + count]).any())

    def stall() -> None:
        if own.random() < 0.004:
            time.sleep(own.uniform(0, 0.005))

    done = 0
    with CUDA.stream(stream):
        if not graph:
            while done < operations:
                one()
                done += 1
                stall()
        else:
            graphs = []
            for _ in range(25):
                graphs.append(CUDA.CUDAGraph())
                with CUDA.graph(graphs[-1], stream=stream):
                    for _ in range(40):
                        one()
            while done < operations:
                rng.choice(graphs).replay()
                done += 40
                stall()
                if own.random() < 0.05:
                    CUDA._sleep(int(own.uniform(0, 0.005) * 1.9e9))
        CUDA.synchronize()
    return int(wrong), done


@pytest.mark.stress
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", OWN)
def test_a_hundred_thousand_sums_are_exact_whoever_stalls(tmp_path, name, graph) -> None:
    assert on_gpus(storm, tmp_path / "store", name, 100_000, graph) == [(0, 100_000)] * 2


# --- faults -----------------------------------------------------------------------------------------------------------


def until_over(seconds: float) -> float:
    """How long what is queued takes; at most so long."""
    event, began = CUDA.current_stream().record_event(), time.monotonic()
    while not event.query():
        assert time.monotonic() < began + seconds, "what was queued does not end"
    return time.monotonic() - began


def die_between(rank: Rank, name: str, graph: bool) -> tuple[float, str, bool, float]:
    path = rank.set_up(name, 32 * MIB)
    small, large = torch.ones(4096, device=rank.device), torch.ones(6 << 20, device=rank.device)
    captured, stream = CUDA.CUDAGraph(), CUDA.Stream()
    with CUDA.graph(captured, stream=stream):
        outs = [path.all_reduce(small), path.all_reduce(large)]
    for x in (small, large):
        path.all_reduce(x)
    rank.meet()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if graph:
        captured.replay()
    else:
        outs = [path.all_reduce(small), path.all_reduce(large)]
    took = until_over(5)
    with pytest.raises(PeerDied) as caught:
        path.all_reduce(small)
    assert caught.value.rank == 1
    nothing = all(bool(out.isnan().all()) for out in outs)
    alive = torch.ones(1000, device=rank.device).sum().item()
    path.close()
    return took, str(caught.value), nothing, alive


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", OWN)
def test_a_rank_that_is_killed_ends_the_waiting_of_the_other_and_its_context_lives(tmp_path, name, graph) -> None:
    survivor, victim = on_gpus(die_between, tmp_path / "store", name, graph)
    assert victim is None
    took, text, nothing, alive = survivor
    assert took < 1 and "rank 1 died" in text and nothing and alive == 1000


def close_early(rank: Rank, name: str) -> bool:
    path = rank.set_up(name, MIB)
    x = torch.ones(4096, device=rank.device)
    path.all_reduce(x)
    rank.meet()
    if rank.rank == 1:
        path.close()
        rank.tell("closed")
        return True
    out = path.all_reduce(x)
    until_over(5)
    with pytest.raises(CommunicatorClosed):
        path.all_reduce(x)
    rank.tell("noticed")
    path.close()
    return bool(out.isnan().all())


@pytest.mark.parametrize("name", OWN)
def test_a_rank_that_closes_is_heard_of_by_who_waits_for_it(tmp_path, name) -> None:
    assert on_gpus(close_early, tmp_path / "store", name) == [True, True]


def busy(rank: Rank) -> bool:
    path = rank.set_up("one_shot", MIB)
    x = torch.ones(4096, device=rank.device)
    rank.meet()
    if rank.rank == 1:
        time.sleep(3)
    return bool((path.all_reduce(x) == 2).all()) and not path.lost


def test_a_rank_that_is_merely_busy_is_waited_for(tmp_path) -> None:
    assert on_gpus(busy, tmp_path / "store") == [True, True]


def declined(rank: Rank, name: str, max_bytes: int) -> tuple[str, str]:
    with pytest.raises(Declined) as caught:
        rank.set_up(name, max_bytes)
    return caught.value.reason, caught.value.text


def test_two_ranks_on_one_gpu_are_told_so(tmp_path) -> None:
    for reason, text in on_gpus(declined, tmp_path / "store", "one_shot", MIB, gpus=(0, 0)):
        assert reason == "no_peer_access"
        assert "ranks 0 and 1 are on the same GPU" in text


def test_without_a_multicast_address_there_is_no_multimem_and_nothing_else_is_lost(tmp_path) -> None:
    for reason, _ in on_gpus(declined, tmp_path / "store", "symm_mem_multimem", MIB):
        assert reason == "no_multicast"


def without_memory(rank: Rank) -> tuple[str, str]:
    free, _ = CUDA.mem_get_info()
    taken = torch.empty(free - (1 << 30) if rank.rank == 1 else 1, dtype=torch.uint8, device=rank.device)
    told = declined(rank, "one_shot", 1 << 30)
    del taken
    return told


def test_an_inbox_that_does_not_fit_on_one_rank_is_a_reason_on_both(tmp_path) -> None:
    for reason, text in on_gpus(without_memory, tmp_path / "store"):
        assert reason == "setup_failed"
        assert "inbox" in text


def seeing_one_gpu(rank: Rank) -> str:
    try:
        path = rank.set_up("one_shot", MIB)
    except Declined as why:
        return why.reason
    x = torch.full((5000,), rank.rank + 1.0, device=rank.device)
    return "works" if bool((path.all_reduce(x) == 3).all()) else "wrong"


def test_ranks_that_see_only_their_own_gpu_work_or_are_told_so(tmp_path) -> None:
    first, second = on_gpus(seeing_one_gpu, tmp_path / "store", hidden=True)
    assert first == second
    assert first in ("works", "no_peer_access")
    print("ranks that see only their own GPU:", first)


def dispatched(rank: Rank, run_directory: Path) -> tuple[list[str], list[bool]]:
    from arena import AllReduce

    os.environ["ARENA_RUN_DIR"] = str(run_directory)
    with AllReduce(rank.gloo, rank.device) as comm:
        sizes = (16, 8192, MIB, 64 * MIB, 64 * MIB + 16)
        tensors = [torch.full((size // 2,), rank.rank + 1, device=rank.device).bfloat16() for size in sizes]
        said = [comm.explain(x).path for x in tensors]
        right = [bool((comm.all_reduce(x) == 3).all()) for x in tensors]
        integers = torch.ones(100, dtype=torch.int32, device=rank.device)
        said.append(comm.explain(integers).path)
        right.append(bool((comm.all_reduce(integers) == 2).all()))
        rank.meet()
    return said, right


def test_the_default_plan_takes_the_one_shot_up_to_its_ceiling_and_nccl_for_the_rest(tmp_path, run_dir) -> None:
    for said, right in on_gpus(dispatched, tmp_path / "store", run_dir):
        assert all(right)
        assert said[:4] == ["one_shot"] * 4
        assert said[4:] == ["nccl", "nccl"]
