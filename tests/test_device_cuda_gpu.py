"""The paths on GPUs: exact, the same bits everywhere, in graphs and out of them, whoever stalls or dies."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from arena.device import Declined
from arena.errors import CommunicatorClosed, PeerDied
from tests.support.gpus import CUDA, Rank, on_gpus
from tests.support.sums import DTYPES, MIB, MOVES, NAN, bits, moved, same_values, special, sum_of

pytestmark = pytest.mark.gpu

OWN = ("one_shot", "two_shot")


# --- the libraries, on one GPU or more --------------------------------------------------------------------------------


def by_nccl(rank: Rank) -> list[str]:
    """Every operation of the fallback, in dtypes that no kernel of ours takes too; what was wrong."""
    path = rank.set_up("nccl", MIB)
    wrong = []
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn):
        pattern = torch.arange(rank.world * 48, device=rank.device).view(-1, 3)
        parts = [((pattern + each) % 2).float().to(dtype) for each in range(rank.world)]
        for operation in MOVES:
            if path.declines(parts[0], operation):
                wrong += [] if operation == "reduce_scatter" else [f"{operation} {dtype} declined"]
                continue
            out, right = getattr(path, operation)(parts[rank.rank]), parts
            if operation != "reduce_scatter":
                right = [part.view(torch.uint8) for part in parts]  # not everything can be done with narrow floats
                out = out.view(torch.uint8)
            if not torch.equal(out, moved(operation, rank.rank, right)):
                wrong.append(f"{operation} {dtype}")
    return wrong


@pytest.mark.parametrize("gpus", [(0,), (0, 1)], ids=str)
def test_nccl_moves_every_dtype(tmp_path, gpus) -> None:
    assert on_gpus(by_nccl, tmp_path / "store", gpus=gpus) == [[]] * len(gpus)


def compiled(rank: Rank, run_directory: Path) -> list[bool]:
    from arena import AllReduce

    os.environ["ARENA_RUN_DIR"] = str(run_directory)
    ops = torch.ops.arena
    with AllReduce(rank.gloo, rank.device) as comm:
        name, world = comm.name, comm.world

        def layer(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            summed = ops.all_reduce(x * 2, name) + 1
            normed, residual = ops.all_reduce_rms_norm(x, summed, weight, 1e-6, name)
            return summed, normed, residual, ops.all_gather(x, world, name), ops.all_to_all(x, name)

        x = torch.full((8, 64), rank.rank + 1.0, device=rank.device)
        weight = torch.ones(64, device=rank.device)
        backend = "inductor" if shutil.which("cc") else "aot_eager"  # which compiles a launcher
        eager, found = layer(x, weight), torch.compile(layer, fullgraph=True, backend=backend)(x, weight)
        right = [torch.allclose(one, other) for one, other in zip(eager, found, strict=True)]
        comm.check()
        rank.meet()
    return right


@pytest.mark.parametrize("gpus", [(0,), (0, 1)], ids=str)
def test_torch_compile_keeps_the_operators_whole_on_a_gpu(tmp_path, run_dir, gpus) -> None:
    assert on_gpus(compiled, tmp_path / "store", run_dir, gpus=gpus) == [[True] * 5] * len(gpus)


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
