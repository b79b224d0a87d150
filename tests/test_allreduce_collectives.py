"""The relatives of all-reduce: every bit of what is moved, the sums of all-reduce, and no rank left waiting."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from arena.errors import CommunicatorClosed, InvalidArgument, OperandMismatch, PeerDied
from arena.plan import LARGEST, Plan, Row
from arena.probe import ProbeReader
from tests.support.fleet import Here, Worker, within
from tests.support.ranks import close, group, make, together

OPERATIONS = ("all_gather", "reduce_scatter", "all_to_all")
SUMMED = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32)
MOVED = (*SUMMED, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
SLOT = 1 << 20
SOON_S = 5.0


@pytest.fixture(params=[2, 3, 4])
def ranks(request, run_dir, tmp_path) -> Iterator[list[Worker]]:
    with group(request.param, tmp_path / "store") as workers:
        yield workers


def brought(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all of what is moved; of floats that are added, numbers whose order of adding shows."""
    generator = torch.Generator().manual_seed(rank)
    if dtype in SUMMED and dtype is not torch.int32:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def expected(operation: str, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """By torch's own words, from what every rank brought."""
    world = len(parts)
    if operation == "all_gather":
        return torch.cat(parts)
    if operation == "all_to_all":
        return torch.cat([part.chunk(world)[rank] if len(part) else part for part in parts])
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    rows = len(total) // world
    return total[rank * rows : (rank + 1) * rows].to(parts[0].dtype)


def wrong(here: Here, rank: int, shapes: list[tuple[int, ...]], *, exact_sums: bool = True) -> list[str]:
    """Every operation, dtype and shape; what was not, bit for bit, what it should be."""
    found, world = [], here.comm.world
    for operation in OPERATIONS:
        for dtype in SUMMED if operation == "reduce_scatter" else MOVED:
            for rows, *rest in shapes:
                shape = (rows * world, *rest)
                parts = [brought(each, shape, dtype) for each in range(world)]
                if operation == "reduce_scatter" and not exact_sums:  # a library's order, so numbers without one
                    parts = [
                        (torch.arange(part.numel()) % 16 + each).view(shape).to(dtype)
                        for each, part in enumerate(parts)
                    ]
                x, right = parts[rank], expected(operation, rank, parts)
                out = getattr(here.comm, operation)(x)
                same = out.shape == right.shape and out.dtype == dtype and torch.equal(bits(out), bits(right))
                kept = torch.equal(bits(x), bits(brought(rank, shape, dtype))) or not exact_sums
                if not (same and kept and out.is_contiguous()):
                    found.append(f"{operation} {dtype} {shape}")
    return found


SHAPES = [(0,), (1,), (7,), (64,), (65,), (3, 5), (0, 4), (4, 0), (2, 3, 1), (1000,)]


def test_every_dtype_and_shape_comes_out_bit_for_bit(ranks):
    together(ranks, make)
    assert together(ranks, wrong, SHAPES, within=60) == [[]] * len(ranks)
    assert together(ranks, like_all_reduce) == [[True] * len(SUMMED)] * len(ranks)
    together(ranks, close)


def like_all_reduce(here: Here, rank: int) -> list[bool]:
    """A scattered sum has the bits of all-reduce."""
    found, world = [], here.comm.world
    for dtype in SUMMED:
        x = brought(rank, (world * 1001,), dtype)
        found.append(torch.equal(bits(here.comm.reduce_scatter(x)), bits(here.comm.all_reduce(x).chunk(world)[rank])))
    return found


def test_gloo_does_the_same(three):
    together(three, make, force_path="gloo")
    shapes = [(0,), (1,), (7,), (3, 5), (0, 4)]
    assert together(three, wrong, shapes, exact_sums=False, within=60) == [[]] * 3
    for worker in three:
        counted = worker.call(collectives)
        assert {path for one in counted.values() for path in one[0]} == {"gloo"}


def collectives(here: Here) -> dict[str, tuple[dict[str, int], dict[str, int], dict[str, int]]]:
    found = here.comm.statistics().collectives
    return {name: (one.operations_by_path, one.bytes_by_path, one.fallbacks) for name, one in found.items()}


def large(here: Here, rank: int) -> list[bool]:
    """More than a slot, by little and by much, in a dtype that does not divide a slot's rows evenly."""
    found, world = [], here.comm.world
    for count in (SLOT // 8 // world + 1, SLOT // 4 + 7):
        parts = [brought(each, (world * count,), torch.float64) for each in range(world)]
        for operation in OPERATIONS:
            out = getattr(here.comm, operation)(parts[rank])
            found.append(torch.equal(bits(out), bits(expected(operation, rank, parts))))
    return found


def test_what_does_not_fit_into_a_slot_goes_in_steps(three):
    together(three, make)
    assert together(three, large) == [[True] * 6] * 3


def laid_out(here: Here, rank: int) -> list[bool]:
    """Transposed, strided, expanded and unaligned; a scalar; a parameter; inference mode on and off."""
    found = []
    whole = torch.arange(64, dtype=torch.float32)
    for view in (
        lambda x: x.view(8, 8).t(),
        lambda x: x[::2],
        lambda x: x[:1].expand(6),
        lambda x: x[1:7],
        lambda x: torch.nn.Parameter(x[:4]),
    ):
        parts = [view(whole + each) for each in range(2)]
        for operation in OPERATIONS:
            for inference in (False, True, False):
                with torch.inference_mode(inference):
                    out = getattr(here.comm, operation)(parts[rank])
                right = expected(operation, rank, [part.detach() for part in parts])
                found.append(torch.equal(out, right) and not out.requires_grad)
    found.append(here.comm.all_gather(torch.tensor(float(rank))).tolist() == [0.0, 1.0])
    return found


def test_any_layout_goes_in(two):
    together(two, make)
    for found in together(two, laid_out):
        assert found == [True] * 46


def uneven(here: Here, rank: int, operation: str) -> list[str]:
    told = []
    for x in (torch.ones(5), torch.ones(())):
        with pytest.raises(InvalidArgument) as refused:
            getattr(here.comm, operation)(x)
        told.append(str(refused.value))
    return told


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_to_all"])
def test_what_can_not_be_cut_is_refused_and_the_next_operation_works(two, operation):
    together(two, make)
    for told in together(two, uneven, operation):
        assert all("multiple of 2, the number of ranks" in one for one in told)
    assert together(two, outcome, ["all_gather"] * 2, [3, 3]) == [6.0, 6.0]


# --- dispatch and counts --------------------------------------------------------------------------------------------


def decided(here: Here, rank: int) -> list[tuple[str, str, tuple[Any, ...], bool]]:
    """What is said beforehand; and that it is what happens."""
    found = []
    for operation, dtype in [(each, torch.float32) for each in OPERATIONS] + [("reduce_scatter", torch.int64)]:
        x = torch.ones(here.comm.world * 4, dtype=dtype)
        decision = here.comm.explain(x, operation)
        before = collectives(here)[operation][0]
        getattr(here.comm, operation)(x)
        after = collectives(here)[operation][0]
        assert {path for path in after if after[path] != before.get(path, 0)} == {decision.path}
        found.append((operation, decision.path, decision.reasons, decision.fused))
    return found


def test_what_is_said_beforehand_happens_and_is_counted(two, run_dir):
    together(two, make)
    for found in together(two, decided):
        assert found == [
            *((operation, "cpu_one_shot", (), False) for operation in OPERATIONS),
            ("reduce_scatter", "gloo", (("cpu_one_shot", "dtype"),), False),
        ]
    for worker in two:
        counted = worker.call(collectives)
        assert counted["all_gather"] == ({"cpu_one_shot": 1}, {"cpu_one_shot": 64}, {})  # of the result
        assert counted["all_to_all"] == ({"cpu_one_shot": 1}, {"cpu_one_shot": 32}, {})
        assert counted["reduce_scatter"] == (
            {"cpu_one_shot": 1, "gloo": 1},
            {"cpu_one_shot": 32, "gloo": 64},
            {"dtype": 1},
        )
        assert worker.call(all_reduces) == {}
    (directory,) = run_dir.iterdir()
    with ProbeReader(directory / "rank-1") as page:
        values = {(one.name, *one.labels.values()): one for one in page.samples()}
        assert page.sequence == 4
        assert values["collective_total", "reduce_scatter", "gloo"].value == 1
        assert values["collective_fallback_total", "reduce_scatter", "dtype"].value == 1
        assert sum(values["collective_seconds", "all_gather"].buckets) == 1


def all_reduces(here: Here) -> dict[str, int]:
    return here.comm.statistics().operations_by_path


@pytest.mark.parametrize(
    ("options", "path", "reasons"),
    [
        ({"max_size": 16}, "gloo", (("cpu_one_shot", "too_large"),)),
        ({"force_path": "cpu_two_shot"}, "gloo", (("cpu_two_shot", "disabled"), ("cpu_one_shot", "disabled"))),
        ({"plan": Plan((Row(LARGEST, ("cpu_two_shot", "gloo")),))}, "gloo", (("cpu_one_shot", "disabled"),)),
        ({"force_path": "cpu_one_shot"}, "cpu_one_shot", ()),
    ],
    ids=str,
)
def test_options_hold_for_every_operation(two, options, path, reasons):
    together(two, make, **options)
    for found in together(two, decided):
        assert found[0] == ("all_gather", path, reasons, False)


def no_such_operation(here: Here, rank: int) -> str:
    with pytest.raises(InvalidArgument) as refused:
        here.comm.explain(torch.ones(2), "all_the_best")
    return str(refused.value)


def test_an_operation_that_does_not_exist_is_refused(two):
    together(two, make)
    assert "all_reduce or all_gather" in together(two, no_such_operation)[0]


# --- losses ---------------------------------------------------------------------------------------------------------


def outcome(here: Here, rank: int, operations: list[str], counts: list[int], dtype: torch.dtype = torch.float32) -> Any:
    try:
        return getattr(here.comm, operations[rank])(torch.ones(counts[rank], dtype=dtype)).sum().item()
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("operations", "counts"),
    [
        (["all_gather"] * 3, [4, 5, 4]),
        (["all_to_all"] * 3, [6, 6, 9]),
        (["all_gather", "all_to_all", "all_gather"], [6, 6, 6]),
        (["all_reduce", "all_reduce", "reduce_scatter"], [6, 6, 6]),
        (["reduce_scatter"] * 3, [3, 3, 3 * SLOT]),
    ],
    ids=str,
)
def test_different_operands_or_operations_are_told_to_every_rank_and_the_next_one_works(three, operations, counts):
    together(three, make)
    for error in together(three, outcome, operations, counts):
        assert isinstance(error, OperandMismatch), error
    assert together(three, outcome, ["all_gather"] * 3, [7, 7, 7]) == [21.0] * 3


@pytest.mark.parametrize(
    ("operation", "path"), [*((each, "cpu_one_shot") for each in OPERATIONS), ("all_to_all", "gloo")]
)
def test_a_rank_killed_between_two_operations_is_named_by_the_rest(three, operation, path):
    together(three, make, max_size=0 if path == "gloo" else None)
    before = together(three, outcome, [operation] * 3, [9, 9, 9])
    assert all(isinstance(one, float) for one in before), before
    three[1].kill(signal.SIGKILL)
    with within(SOON_S):
        calls = [three[rank].begin(outcome, rank, [operation] * 3, [9, 9, 9]) for rank in (0, 2)]
        errors = [call.result() for call in calls]
    for error in errors:
        assert isinstance(error, PeerDied), error
        assert (error.rank, error.pid) == (1, three[1].pid)


def checked(here: Here, rank: int) -> Any:
    try:
        return here.comm.check()
    except Exception as error:
        return error


def test_check_says_nothing_while_all_is_well_and_the_loss_afterwards(two):
    together(two, make)
    assert together(two, checked) == [None, None]
    two[1].kill()
    assert isinstance(two[0].call(outcome, 0, ["all_gather"] * 2, [4, 4]), PeerDied)
    assert isinstance(two[0].call(checked, 0), PeerDied)
    two[0].call(close, 0)
    assert isinstance(two[0].call(checked, 0), CommunicatorClosed)


class _Asynchronous:
    """A CPU whose operations fail afterwards, as kernels do whose peer is gone."""

    asynchronous = True

    def __init__(self) -> None:
        from arena.device import open_device

        self._real = open_device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def failing_afterwards(here: Here, rank: int) -> list[Any]:
    """The loss is that of a path which the next operation does not take."""
    make(here, rank, opened=_Asynchronous())
    before = outcome(here, rank, ["all_gather"] * 2, [3, 3])
    lost = here.comm._joined.paths["cpu_two_shot"]
    lost._board.lost = CommunicatorClosed("given up in a replay", found="a test")
    return [before, outcome(here, rank, ["all_gather"] * 2, [3, 3]), checked(here, rank)]


def test_what_a_path_lost_after_its_call_is_heard_of_at_the_next_one(two):
    for before, after, told in together(two, failing_afterwards):
        assert before == 6.0
        assert "given up in a replay" in str(after)
        assert "given up in a replay" in str(told)


# --- sum, residual and norm ------------------------------------------------------------------------------------------


def oracle(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, Any]:
    """In fp64 but for the two roundings that are promised."""
    summed = (total.double() + residual.double()).to(total.dtype)
    wide = summed.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double(), summed


HALF_A_STEP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20, torch.float64: 1e-12}


def normed(here: Here, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(99)
    residual, weight = (torch.randn(each, generator=generator).to(dtype) for each in (shape, shape[-1:]))
    x = brought(rank, shape, dtype)
    decision = here.comm.explain(x, "all_reduce_rms_norm")
    out, summed = here.comm.all_reduce_rms_norm(x, residual, weight, eps=1e-5)
    exact, new_residual = oracle(here.comm.all_reduce(x), residual, weight, 1e-5)
    error = ((out.double() - exact).abs() / exact.abs().clamp_min(1e-3)).max().item() if out.numel() else 0.0
    kinds = (out.dtype, summed.dtype, out.shape, summed.shape) == (dtype, dtype, x.shape, x.shape)
    return error, torch.equal(bits(summed), bits(new_residual)), kinds, decision


@pytest.mark.parametrize(
    ("shape", "path"), [((1, 4096), "cpu_one_shot"), ((2, 3, 33), "cpu_two_shot"), ((0, 8), "gloo")]
)
def test_the_norm_after_the_sum_is_that_of_plain_torch_in_fp64(three, shape, path):
    together(three, make, force_path=path)
    for dtype, half_a_step in HALF_A_STEP.items():
        for error, same_residual, kinds, decision in together(three, normed, shape, dtype):
            assert error <= half_a_step * 1.01, dtype
            assert same_residual
            assert kinds
            assert (decision.path, decision.fused) == (path, False)
            assert (path, "not_fused") in decision.reasons
    counted = three[0].call(collectives)["all_reduce_rms_norm"]
    assert counted[0] == {path: 4}
    assert counted[2]["not_fused"] == 4


def misfits(here: Here, rank: int) -> list[str]:
    told = []
    x = torch.ones(2, 8)
    for operands in (
        (x, torch.ones(2, 7), torch.ones(8)),
        (x, x.double(), torch.ones(8)),
        (x, x, torch.ones(2, 8)),
        (x.int(), x.int(), torch.ones(8).int()),
        (torch.ones(()), torch.ones(()), torch.ones(())),
    ):
        with pytest.raises(InvalidArgument) as refused:
            here.comm.all_reduce_rms_norm(*operands)
        told.append(str(refused.value))
    return told


def test_operands_that_do_not_fit_together_are_refused(two):
    together(two, make)
    for told in together(two, misfits):
        assert ["residual" in told[0], "residual" in told[1], "weight" in told[2]] == [True] * 3
        assert all("one dimension at least" in one for one in told[3:])
