"""The kernels for worlds of any size, on one GPU: all ranks are streams of one process, beside each other."""

import os
import random
import time
from typing import Any

import pytest
import torch

from arena.device import Place
from arena.errors import CommunicatorClosed, PeerDied
from tests.support.gpus import CUDA
from tests.support.processes import run
from tests.support.sums import DTYPES, MIB, MOVES, NAN, bits, moved, same_values, special, sum_of

pytestmark = pytest.mark.gpu


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

    def each(self, operation: str, operands: list[tuple[Any, ...]], order: list[int]) -> list[Any]:
        """One operation of all ranks, which begin in this order; the results by rank."""
        CUDA.synchronize()
        outs: list[Any] = [None] * len(operands)
        for rank in order:
            with CUDA.stream(self.streams[rank]):
                outs[rank] = getattr(self.paths[rank], operation)(*operands[rank])
        self.wait()
        return outs

    def wait(self) -> None:
        ends = time.monotonic() + 10
        events = [stream.record_event() for stream in self.streams]
        while not all(event.query() for event in events):
            if time.monotonic() > ends:
                for path in self.paths:
                    path.abort()
                raise TimeoutError("an operation does not end")


def on_one_gpu() -> None:
    """Before CUDA begins: as many streams as there may be ranks run beside each other, and none waits in a queue."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"


def try_world(world: int, trials: int) -> int:
    on_one_gpu()
    from arena.device.cuda import shapes
    from arena.device.cuda.one_shot import OneShot
    from arena.device.cuda.two_shot import TwoShot

    shapes.SPLIT_ABOVE_BYTES = MIB  # type: ignore[misc]  # so that small tensors come to every kernel
    rng = random.Random(world)
    for kind in (OneShot, TwoShot):
        ranks = OnOneGpu(kind, world, 4 * MIB)
        for trial in range(trials):
            dtype = rng.choice(DTYPES)
            most = rng.choice([20, 5000, 200_000, 4 * MIB // dtype.itemsize])
            parts = [torch.randn(rng.randrange(1, most), device="cuda").to(dtype)]
            parts += [torch.randn_like(parts[0]) for _ in range(world - 1)]
            for out in ranks.each("all_reduce", [(part,) for part in parts], rng.sample(range(world), world)):
                assert torch.equal(bits(out), bits(sum_of(parts))), (kind, dtype, parts[0].shape, trial)
        for dtype in DTYPES:
            parts = [special(dtype, rank).to("cuda") for rank in range(world)]
            outs = ranks.each("all_reduce", [(part,) for part in parts], list(range(world)))
            assert all(torch.equal(bits(out), bits(outs[0])) for out in outs)
            assert same_values(outs[0], sum_of(parts))
    return trials


@pytest.mark.parametrize("world", range(2, 9))
def test_a_world_of_any_size_gets_the_same_bits_on_every_rank(world) -> None:
    if not CUDA.is_available():
        pytest.skip("needs a GPU")
    assert run(try_world, world, 200, timeout_s=50) == 200


NORM = "all_reduce_rms_norm"
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}  # of a result, relative


def try_move(ranks: OnOneGpu, operation: str, dtype: torch.dtype, rng: random.Random) -> None:
    world, element = len(ranks.paths), 16 // dtype.itemsize
    rows = element * rng.randrange(1, rng.choice([4, 300, 10_000, (8 * MIB // 16) // world]))
    count = rows if operation == "all_gather" else rows * world
    parts = [torch.randn(count, device="cuda").to(dtype) for _ in range(world)]
    if rng.random() < 0.2:
        parts = [part.view(-1, element).t() for part in parts] if operation == "all_gather" else parts
    assert {path.declines(parts[0], operation) for path in ranks.paths} == {None}
    outs = ranks.each(operation, [(part,) for part in parts], rng.sample(range(world), world))
    for rank, out in enumerate(outs):
        assert torch.equal(bits(out), bits(moved(operation, rank, parts))), (operation, dtype, count, rank)


def try_norm(ranks: OnOneGpu, dtype: torch.dtype, rng: random.Random) -> bool:
    """Whether it was one for the kernel."""
    world, element = len(ranks.paths), 16 // dtype.itemsize
    shape = (rng.randrange(0, 200) if rng.random() < 0.5 else 1, element * rng.randrange(1, rng.choice([5, 130, 1100])))
    parts = [torch.randn(shape, device="cuda").to(dtype) for _ in range(world)]
    residual, weight = torch.randn(shape, device="cuda").to(dtype), torch.randn(shape[-1], device="cuda").to(dtype)
    reasons = {path.declines(parts[0], NORM) for path in ranks.paths}
    if reasons != {None}:
        assert reasons == {"too_large"}
        return False
    outs = ranks.each(NORM, [(part, residual, weight, 1e-5) for part in parts], rng.sample(range(world), world))
    summed = (sum_of(parts).float() + residual.float()).to(dtype)
    wide = summed.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    for normed, new_residual in outs:
        assert torch.equal(bits(new_residual), bits(summed)), (dtype, shape)
        assert torch.equal(bits(normed), bits(outs[0][0]))
        error = (normed.double() - exact).abs() / exact.abs().clamp_min(1e-3)
        assert not error.numel() or error.max().item() <= ROUNDING[dtype] * 1.05, (dtype, shape, error.max())
    return True


def try_relatives(world: int, trials: int) -> tuple[int, int]:
    """Every operation of one path, in any order, so that their slots and generations come between each other's."""
    on_one_gpu()
    from arena.device.cuda.one_shot import OneShot

    rng = random.Random(world)
    ranks = OnOneGpu(OneShot, world, 4 * MIB)
    normed = 0
    for _ in range(trials):
        dtype, operation = rng.choice(DTYPES), rng.choice((*MOVES, NORM, NORM, "all_reduce"))
        if operation == NORM:
            normed += try_norm(ranks, dtype, rng)
        elif operation != "all_reduce":
            try_move(ranks, operation, dtype, rng)
        else:
            parts = [torch.randn(rng.randrange(1, 50_000), device="cuda").to(dtype)]
            parts += [torch.randn_like(parts[0]) for _ in range(world - 1)]
            for out in ranks.each(operation, [(part,) for part in parts], rng.sample(range(world), world)):
                assert torch.equal(bits(out), bits(sum_of(parts)))
    for dtype in DTYPES:
        try_special_moves(ranks, dtype)
    return trials, normed


def try_special_moves(ranks: OnOneGpu, dtype: torch.dtype) -> None:
    """Signed zeros and infinities keep their bits; the sentinel comes out as some NaN, the same on every rank."""
    world = len(ranks.paths)
    parts = [special(dtype, rank).to("cuda").repeat(world) for rank in range(world)]
    for operation in MOVES:
        outs = ranks.each(operation, [(part,) for part in parts], list(range(world)))
        for rank, out in enumerate(outs):
            assert same_values(out, moved(operation, rank, parts)), (operation, dtype)
        if operation == "all_gather":
            assert all(torch.equal(bits(out), bits(outs[0])) for out in outs)


@pytest.mark.parametrize("world", [2, 3, 4, 6, 8])
def test_what_is_gathered_scattered_exchanged_and_normed_is_exact_in_any_order_of_operations(world) -> None:
    if not CUDA.is_available():
        pytest.skip("needs a GPU")
    trials, normed = run(try_relatives, world, 250, timeout_s=55)
    assert trials == 250
    assert normed > 20


def declining(world: int) -> list[Any]:
    from arena.device.cuda.one_shot import OneShot

    path = OnOneGpu(OneShot, world, 4 * MIB).paths[0]
    whole = 8 * MIB // 4 // world // 4 * 4 * world
    return [
        path.declines(torch.empty(8, dtype=torch.int32, device="cuda"), "all_gather"),
        path.declines(torch.empty(5, device="cuda"), "all_gather"),
        path.declines(torch.empty(4 * world, device="cuda"), "all_to_all"),
        path.declines(torch.empty(2 * world, device="cuda"), "reduce_scatter"),
        path.declines(torch.empty(whole, device="cuda"), "reduce_scatter"),
        path.declines(torch.empty(whole + 4 * world, device="cuda"), "reduce_scatter"),
        path.declines(torch.empty(3, 7, device="cuda"), NORM),
        path.declines(torch.empty(3, 8, device="cuda"), NORM),
        path.declines(torch.empty(8, dtype=torch.float64, device="cuda"), NORM),
    ]


def test_what_the_kernels_can_not_do_is_declined_with_a_reason() -> None:
    if not CUDA.is_available():
        pytest.skip("needs a GPU")
    told = run(declining, 4)
    assert told == ["dtype", "alignment", None, "alignment", None, "too_large", "alignment", None, "dtype"]


def given_up_in_a_replay(operation: str, dead: bool) -> tuple[str, str, bool]:
    """One rank's graph alone, replayed: nobody answers, until the watch would say that the other one has died."""
    on_one_gpu()
    from arena.device.cuda.one_shot import OneShot

    ranks = OnOneGpu(OneShot, 2, 4 * MIB)
    path = ranks.paths[0]
    x, weight = torch.ones(64, 512, device="cuda"), torch.ones(512, device="cuda")
    operands = (x, x, weight, 1e-6) if operation == NORM else (x,)
    ranks.each(operation, [operands, operands], [0, 1])  # what is made at the first call
    graph = CUDA.CUDAGraph()
    with CUDA.graph(graph, stream=ranks.streams[0]):
        out = getattr(path, operation)(*operands)
    path.check()
    with CUDA.stream(ranks.streams[0]):
        graph.replay()
    time.sleep(0.2)
    path.check()  # busy is not dead
    if dead:
        path._note_death(1)
    else:
        path.abort()
    ranks.wait()
    told = []
    for call in (path.check, lambda: getattr(path, operation)(*operands)):
        with pytest.raises(PeerDied if dead else CommunicatorClosed) as caught:
            call()
        told.append(str(caught.value))
    nothing = (out[1] if operation == NORM else out).isnan().any()
    return told[0], told[1], bool(nothing)


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("operation", ["all_reduce", *MOVES, NORM])
def test_what_was_given_up_in_a_replay_is_heard_of_afterwards(operation, dead) -> None:
    if not CUDA.is_available():
        pytest.skip("needs a GPU")
    checked, called, nothing = run(given_up_in_a_replay, operation, dead)
    assert checked == called
    assert ("rank 1 died" in checked) == dead
    assert nothing


def replayed(world: int, replays: int) -> int:
    """Graphs of several operations, one a rank, replayed in any order of ranks."""
    on_one_gpu()
    from arena.device.cuda.one_shot import OneShot

    ranks = OnOneGpu(OneShot, world, 4 * MIB)
    parts = [(torch.arange(world * 4096, device="cuda") % 7 + rank).float().view(-1, 64) for rank in range(world)]
    weight = torch.ones(64, device="cuda")
    for operation in (*MOVES, "all_reduce"):
        ranks.each(operation, [(part,) for part in parts], list(range(world)))
    ranks.each(NORM, [(part, part, weight, 1e-6) for part in parts], list(range(world)))
    graphs, outs = [], []
    for rank, path in enumerate(ranks.paths):
        graphs.append(CUDA.CUDAGraph())
        with CUDA.graph(graphs[-1], stream=ranks.streams[rank]):
            x = parts[rank]
            scattered = path.reduce_scatter(x)
            outs.append(
                (path.all_gather(scattered), path.all_to_all(x), path.all_reduce_rms_norm(x, x, weight, 1e-6)[1])
            )
    rng = random.Random(5)
    for _ in range(replays):
        for rank in rng.sample(range(world), world):
            with CUDA.stream(ranks.streams[rank]):
                graphs[rank].replay()
        ranks.wait()
        for rank, (total, swapped, summed) in enumerate(outs):
            assert torch.equal(total, sum_of(parts))
            assert torch.equal(swapped, moved("all_to_all", rank, parts))
            assert torch.equal(summed, sum_of(parts) + parts[rank])
            for out in (total, swapped, summed):
                out.fill_(NAN)
        CUDA.synchronize()
    return replays


@pytest.mark.parametrize("world", [2, 4, 8])
def test_graphs_of_all_operations_may_be_replayed(world) -> None:
    if not CUDA.is_available():
        pytest.skip("needs a GPU")
    assert run(replayed, world, 60) == 60
