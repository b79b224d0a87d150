"""The paths over shared memory: the right sum, the same bits everywhere, and no rank left waiting for ever."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arena.device.cpu.two_shot import parts_of
from arena.errors import CommunicatorClosed, InvalidArgument, OperandMismatch, PeerDied, ReentrantUse, UseAfterFork
from tests.support.fleet import Here, Worker, arena_maps, eventually, open_fds, within
from tests.support.ranks import close, group, make, together

PATHS = ["cpu_one_shot", "cpu_two_shot"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32]
SLOT = 1 << 20
COUNTS = [0, 1, 7, 8, 63, 64, 65, 1000, 4099]
SOON_S = 5.0  # far above the 0.1 s in which a sleeping rank looks up


@pytest.fixture(params=[2, 3, 8])
def ranks(request, run_dir, tmp_path) -> Iterator[list[Worker]]:
    with group(request.param, tmp_path / "store") as workers:
        yield workers


def contribution(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order in which they are added, where the dtype has such."""
    generator = torch.Generator().manual_seed(rank)
    if dtype is torch.int32:
        return torch.randint(-(1 << 31), (1 << 31) - 1, (count,), dtype=dtype, generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 100).to(dtype)


def reference(world: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """In rank order, in fp32 for 16-bit floats."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = contribution(0, count, dtype).to(wide)
    for rank in range(1, world):
        total = total + contribution(rank, count, dtype).to(wide)
    return total.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


# --- sums -----------------------------------------------------------------------------------------------------------


def sums(here: Here, rank: int, world: int, counts: list[int]) -> list[str]:
    """Every dtype and count; what was not, bit for bit, the reference."""
    wrong = []
    for dtype in DTYPES:
        for count in counts:
            x = contribution(rank, count, dtype)
            before = x.clone()
            out = here.comm.all_reduce(x)
            same = torch.equal(bits(out), bits(reference(world, count, dtype)))
            if not same or not torch.equal(bits(x), bits(before)) or out.data_ptr() == x.data_ptr() != 0:
                wrong.append(f"{dtype} {count}")
    return wrong


@pytest.mark.parametrize("path", PATHS)
def test_the_sum_is_in_rank_order_and_in_fp32_bit_for_bit_on_every_rank(ranks, path):
    together(ranks, make, force_path=path)
    assert together(ranks, sums, len(ranks), COUNTS, within=60) == [[]] * len(ranks)
    together(ranks, close)


@pytest.mark.parametrize("path", PATHS)
def test_a_tensor_larger_than_a_slot_goes_in_steps(three, path):
    together(three, make, force_path=path)
    counts = [SLOT // 4 - 1, SLOT // 4, SLOT // 4 + 1, 3 * SLOT // 4 + 5]  # around the edge in fp32
    assert together(three, sums, 3, counts, within=60) == [[]] * 3


def laid_out(here: Here, rank: int, dtype: torch.dtype) -> list[bool]:
    """Views that are not contiguous, not aligned, of any rank, and a slice that starts inside an element's line."""
    world = here.comm.world
    x = torch.arange(24, dtype=dtype) + rank
    inputs = [
        x.view(4, 6).t(), x[1:], x[::2], x.view(2, 3, 4).permute(2, 0, 1), x[3], x[:1].expand(5), x.view(4, 6)[:, 1:4],
    ]  # fmt: skip
    outs = [here.comm.all_reduce(one) for one in inputs]
    return [
        out.is_contiguous() and out.shape == one.shape and torch.equal(out, world * (one - rank) + sum(range(world)))
        for one, out in zip(inputs, outs, strict=True)
    ]


@pytest.mark.parametrize("path", PATHS)
def test_any_layout_goes_in_and_a_contiguous_tensor_comes_out(three, path):
    together(three, make, force_path=path)
    for dtype in (torch.float32, torch.bfloat16):
        for right in together(three, laid_out, dtype):
            assert right == [True] * 7


def in_modes(here: Here, rank: int) -> list[tuple[list[float], bool]]:
    """A parameter, and inference mode on and off again; the same size each time, so that what is kept is used again."""
    x = torch.nn.Parameter(torch.full((3,), float(rank)))
    found = [here.comm.all_reduce(x)]
    with torch.inference_mode():
        found += [here.comm.all_reduce(x), here.comm.all_reduce(torch.full((5,), float(rank)))]
    found += [here.comm.all_reduce(x), here.comm.all_reduce(torch.full((5,), float(rank)))]
    return [(out.tolist(), out.requires_grad) for out in found]


@pytest.mark.parametrize("path", PATHS)
def test_no_gradient_flows_and_inference_mode_comes_and_goes(two, path):
    together(two, make, force_path=path)
    for found in together(two, in_modes):
        assert [values for values, _ in found] == [[1.0] * 3, [1.0] * 3, [1.0] * 5, [1.0] * 3, [1.0] * 5]
        assert not any(tracked for _, tracked in found)


NAN = float("nan")
INF = float("inf")
SPECIAL = [
    # rank 0, rank 1, sum
    (0.0, 0.0, 0.0), (-0.0, -0.0, -0.0), (-0.0, 0.0, 0.0), (0.0, -0.0, 0.0), (1.0, -1.0, 0.0),
    (INF, 1.0, INF), (-INF, -INF, -INF), (INF, -INF, NAN), (NAN, 1.0, NAN), (1.0, NAN, NAN), (NAN, NAN, NAN),
]  # fmt: skip


def special(here: Here, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return here.comm.all_reduce(torch.tensor([row[rank] for row in SPECIAL] * 9, dtype=dtype))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_signed_zeros_infinities_and_nans_come_out_as_documented(two, path, dtype):
    together(two, make, force_path=path)
    first, second = together(two, special, dtype)
    expected = torch.tensor([row[2] for row in SPECIAL] * 9, dtype=dtype)
    assert torch.equal(bits(first), bits(second))
    assert torch.equal(first.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(bits(first[numbers]), bits(expected[numbers]))


def sentinel(here: Here, rank: int) -> torch.Tensor:
    """All ones, which GPU paths use as a mark: a NaN here, an ordinary -1 among integers."""
    x = torch.full((64,), -1, dtype=torch.int32)
    return torch.cat([here.comm.all_reduce(x), here.comm.all_reduce(x.view(torch.float32)).view(torch.int32)])


def test_all_ones_is_a_value_like_any_other(two):
    together(two, make)
    first, second = together(two, sentinel)
    assert torch.equal(first, second)
    assert first[:64].tolist() == [-2] * 64
    assert first[64:].view(torch.float32).isnan().all()


def other_dtypes(here: Here, rank: int) -> list[tuple[str, list[float]]]:
    found = []
    for dtype in (torch.int64, torch.uint8, torch.float8_e4m3fn):
        x = torch.tensor([1.0, 2.0], dtype=torch.float32).to(dtype)
        found.append((here.comm.explain(x).path, here.comm.all_reduce(x).to(torch.float32).tolist()))
    return found


def test_other_dtypes_go_to_gloo_and_are_counted(two):
    together(two, make)
    for found in together(two, other_dtypes):
        assert found == [("gloo", [2.0, 4.0])] * 3
    assert two[0].call(fallbacks) == {"dtype": 3}


def fallbacks(here: Here) -> dict[str, int]:
    return here.comm.statistics().fallbacks


@pytest.mark.parametrize(("count", "world"), [(0, 2), (1, 2), (64, 2), (129, 2), (1000, 3), (64, 8), (1 << 20, 7)])
def test_parts_cover_a_tensor_and_start_on_cache_lines(count, world):
    sizes = parts_of(count, world)
    assert (len(sizes), sum(sizes)) == (world, count)
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % 64 == 0 for size in sizes if size == sizes[0] and count > 64 * world)


# --- skew -----------------------------------------------------------------------------------------------------------


def skewed(here: Here, rank: int, operations: int) -> int:
    """Operations back to back; now and then this rank is late. Exact sums; how many were not."""
    generator = torch.Generator().manual_seed(77)
    wrong = 0
    for number in range(operations):
        count = int(torch.randint(0, 3000, (), generator=generator))
        if int(torch.randint(0, 6, (), generator=generator)) == rank:
            time.sleep(0.001)
        out = here.comm.all_reduce(torch.full((count,), float(rank + number % 50)))
        wrong += not torch.equal(out, torch.full((count,), float(2 * (number % 50) + 1)))
    return wrong


@pytest.mark.parametrize("path", PATHS)
def test_a_fast_rank_never_overwrites_what_a_slow_one_still_reads(two, path):
    together(two, make, force_path=path)
    assert together(two, skewed, 400) == [0, 0]


# --- misuse ---------------------------------------------------------------------------------------------------------


def reduce(here: Here, rank: int, shapes: list[Any], dtype: torch.dtype = torch.float32) -> Any:
    """What comes out, or the error, of a tensor of this rank's shape."""
    try:
        return here.comm.all_reduce(torch.ones(shapes[rank], dtype=dtype)).sum().item()
    except Exception as error:
        return error


@pytest.mark.parametrize(
    "shapes",
    [[4, 5, 4], [(2, 3), (2, 3), (3, 2)], [0, 1, 1], [100, 100, SLOT], [SLOT // 4, SLOT // 4 + 1, SLOT // 4]],
    ids=str,
)
def test_different_shapes_are_told_to_every_rank_and_the_next_operation_works(three, shapes):
    together(three, make)
    for error in together(three, reduce, shapes):
        assert isinstance(error, OperandMismatch), error
        assert error.expected
        assert error.found
        assert error.remedy
    assert together(three, reduce, [7, 7, 7]) == [21.0] * 3


def reduce_dtypes(here: Here, rank: int, dtypes: list[torch.dtype]) -> Any:
    return reduce(here, rank, [16] * 3, dtypes[rank])


@pytest.mark.parametrize(
    "dtypes", [[torch.float32, torch.int32, torch.float32], [torch.float32, torch.float32, torch.int64]], ids=str
)
def test_different_dtypes_are_told_to_every_rank_also_where_one_goes_to_gloo(three, dtypes):
    together(three, make)
    for error in together(three, reduce_dtypes, dtypes):
        assert isinstance(error, OperandMismatch), error
    assert together(three, reduce, [7, 7, 7]) == [21.0] * 3


def on_meta(here: Here, rank: int) -> str:
    with pytest.raises(InvalidArgument) as refused:
        here.comm.all_reduce(torch.ones(4, device="meta"))
    return str(refused.value)


def test_a_tensor_of_another_device_is_refused_and_said_what_to_do(two):
    together(two, make)
    for told in together(two, on_meta):
        assert "expected a dense tensor on cpu; found torch.strided on meta; move it there with x.to('cpu')" in told


def after_close(here: Here, rank: int) -> list[str]:
    here.comm.close()
    here.comm.close()
    told = []
    for call in (here.comm.all_reduce, here.comm.explain):
        with pytest.raises(CommunicatorClosed) as refused:
            call(torch.ones(4))
        told.append(str(refused.value))
    return told


def test_a_closed_communicator_says_so_and_leaves_nothing(two, run_dir):
    before = [(len(worker.call(fds)), len(worker.call(maps))) for worker in two]
    together(two, make)
    for told in together(two, after_close):
        assert all("this communicator is closed" in one for one in told)
    assert list(run_dir.iterdir()) == []
    together(two, forget)
    assert [(len(worker.call(fds)), len(worker.call(maps))) for worker in two] == before


def fds(here: Here) -> dict[int, str]:
    return open_fds()


def maps(here: Here) -> list[str]:
    return arena_maps()


def forget(here: Here, rank: int) -> None:
    import gc

    del here.comm
    gc.collect()


def in_a_fork(here: Here, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            here.comm.all_reduce(torch.ones(4))
        except UseAfterFork:
            here.comm.close()  # and closes nothing of the parent's
            os._exit(7)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_is_refused_and_harms_nobody(two):
    together(two, make)
    assert together(two, in_a_fork) == [7, 7]
    assert together(two, reduce, [4, 4]) == [8.0, 8.0]


def in_two_threads(here: Here, rank: int) -> str:
    """A second thread comes while the first one waits for the other rank, which has not been told to come yet."""
    first = threading.Thread(target=here.comm.all_reduce, args=(torch.ones(4),))
    first.start()
    eventually(here.comm._lock.locked)
    try:
        here.comm.all_reduce(torch.ones(4))
    except ReentrantUse as refused:
        here.first = first
        return str(refused)
    return "let in"


def test_a_second_thread_is_refused(two):
    together(two, make)
    assert "another thread" in two[0].call(in_two_threads, 0)
    assert two[1].call(reduce, 1, [4, 4]) == 8.0
    two[0].call(wait_for_the_first)
    assert together(two, reduce, [5, 5]) == [10.0, 10.0]


def wait_for_the_first(here: Here) -> None:
    here.first.join(10)


# --- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_killed_between_two_operations_is_named_by_the_rest_in_bounded_time(three, path):
    together(three, make, force_path=path)
    assert together(three, reduce, [9, 9, 9]) == [27.0] * 3
    three[1].kill(signal.SIGKILL)
    with within(SOON_S):
        calls = [(rank, three[rank].begin(reduce, rank, [9, 9, 9])) for rank in (0, 2)]
        errors = [call.result() for _, call in calls]
    for error in errors:
        assert isinstance(error, PeerDied), error
        assert (error.rank, error.pid) == (1, three[1].pid)
        assert "SIGKILL" in str(error) or error.signal in (None, signal.SIGKILL)
    again = three[0].call(reduce, 0, [9, 9, 9])
    assert isinstance(again, PeerDied)


@pytest.mark.parametrize(("path", "named"), [(None, True), ("gloo", False)])
def test_a_dead_rank_does_not_hang_gloo_either(three, path, named):
    together(three, make, force_path=path)
    assert together(three, reduce, [9, 9, 9], torch.int64) == [27] * 3
    three[1].kill(signal.SIGKILL)
    with within(SOON_S):
        calls = [three[rank].begin(reduce, rank, [9, 9, 9], torch.int64) for rank in (0, 2)]
        errors = [call.result() for call in calls]
    for error in errors:
        assert isinstance(error, PeerDied if named else CommunicatorClosed), error


@pytest.mark.parametrize("nbytes", [64, 8 * SLOT])
def test_a_rank_killed_while_the_others_wait_for_it_is_named(two, nbytes):
    together(two, make)
    waiting = two[0].begin(reduce, 0, [nbytes // 4] * 2)
    time.sleep(0.2)  # asleep by now, most likely; the outcome is the same if not
    two[1].kill()
    with within(SOON_S):
        error = waiting.result()
    assert isinstance(error, PeerDied)
    assert error.rank == 1


def test_a_rank_that_closes_ends_the_wait_of_the_others(three):
    together(three, make)
    waiting = three[0].begin(reduce, 0, [4, 4, 4])
    three[2].call(close, 2)
    with within(SOON_S):
        error = waiting.result()
    assert isinstance(error, CommunicatorClosed)
    assert "rank 2 closed" in str(error)


def closed_by_another_thread(here: Here, rank: int) -> Any:
    threading.Timer(0.2, here.comm.close).start()
    return reduce(here, rank, [4, 4])


def test_closing_ends_a_wait_in_another_thread(two):
    together(two, make)
    with within(SOON_S):
        error = two[0].call(closed_by_another_thread, 0)
    assert isinstance(error, CommunicatorClosed)


def interrupted(here: Here, rank: int) -> Any:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGUSR1, interrupt)
    try:
        here.comm.all_reduce(torch.ones(4))
    except KeyboardInterrupt:
        return reduce(here, rank, [4, 4])
    return "not interrupted"


def test_an_interrupted_rank_gives_up_for_all_and_everybody_hears_of_it(two):
    together(two, make)
    call = two[0].begin(interrupted, 0)
    time.sleep(0.3)
    os.kill(two[0].pid, signal.SIGUSR1)
    later = call.result()
    assert isinstance(later, CommunicatorClosed)
    assert "half-way" in str(later)
    with within(SOON_S):
        error = two[1].call(reduce, 1, [4, 4])
        if not isinstance(error, Exception):  # rank 0 had arrived before it was interrupted: this one is whole
            error = two[1].call(reduce, 1, [4, 4])
    assert isinstance(error, CommunicatorClosed)
    assert "rank 0 gave up" in str(error)


def test_a_frozen_rank_is_waited_for(two):
    together(two, make)
    two[1].freeze()
    waiting = two[0].begin(reduce, 0, [4, 4])
    time.sleep(0.3)
    assert not waiting.done()
    two[1].thaw()
    assert two[1].call(reduce, 1, [4, 4]) == 8.0
    assert waiting.result() == 8.0
