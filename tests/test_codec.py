"""Whatever is sent arrives, bit by bit, by every path, under every kind of views, at every reader."""

import collections
import contextlib
import dataclasses
import pickle
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arena import MessageQueue, QueueConfig, layout
from arena.codec import IN_BAND_BYTES, Encoder, Message, build_payload, decode, read_table
from arena.errors import CorruptFrame, EncodeFailed
from arena.writer import Writer

PATHS = ["inline", "block", "fragments"]
VIEWS = ["readonly", "shared", "private"]
MIB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


# --- what is sent ----------------------------------------------------------------------------------------------------


def noise(nbytes: int, seed: int = 1) -> torch.Tensor:
    """Bytes of every value: as floats, there are NaNs with payloads, infinities and subnormal numbers among them."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape))
    if dtype is torch.bool:
        return (noise(count) & 1).bool().view(shape)
    return noise(count * torch.empty((), dtype=dtype).element_size()).view(dtype).view(shape)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]
FLOATS = noise(4 * 12 * 20).view(torch.float32).view(12, 20)
COMPLEX = torch.view_as_complex(torch.arange(60, dtype=torch.float32).view(5, 6, 2))


class Tagged(torch.Tensor):
    """A subclass that Arena knows nothing of."""


class Step(collections.namedtuple("Step", "number tensors")):
    """A tuple with names."""


@dataclasses.dataclass
class Batch:
    """A class of the user's."""

    name: str
    tensors: list[torch.Tensor]
    extra: Any = None


def tagged() -> torch.Tensor:
    return torch.arange(30.0).as_subclass(Tagged)


def with_attribute() -> torch.Tensor:
    tensor = torch.arange(30.0)
    tensor.note = "mine"  # type: ignore[attr-defined]
    return tensor


def non_leaf() -> torch.Tensor:
    return FLOATS.clone().requires_grad_() * 2


def cycle() -> list[Any]:
    loop: list[Any] = [torch.arange(30)]
    loop.append({"back": loop})
    return loop


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    **{str(dtype).removeprefix("torch."): lambda dtype=dtype: of_dtype(dtype, 5, 7) for dtype in DTYPES},
    "zero_d": lambda: torch.tensor(2.5, dtype=torch.bfloat16),
    "one_element": lambda: torch.tensor([[[7]]]),
    "expanded": lambda: torch.arange(7).expand(40, 7),
    "expanded_scalar": lambda: torch.tensor(3.0).expand(30, 2),
    "transposed": FLOATS.t,
    "permuted": lambda: torch.arange(120).view(2, 3, 4, 5).permute(3, 1, 0, 2),
    "sliced": lambda: FLOATS[3:9, 2:18],
    "every_third": lambda: torch.arange(90, dtype=torch.int16)[1::3],
    "one_column": lambda: FLOATS[:, 3],
    "strided_windows": lambda: torch.arange(30).as_strided((10, 5), (2, 1), 3),
    "odd_offset": lambda: noise(99)[1:],
    "odd_offset_of_wide": lambda: of_dtype(torch.complex128, 9)[1:],
    "channels_last": lambda: torch.arange(240.0).view(2, 3, 5, 8).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.arange(96.0).view(1, 2, 3, 4, 4).contiguous(memory_format=torch.channels_last_3d),
    "conjugated": COMPLEX.conj,
    "conjugated_slice": lambda: COMPLEX.conj()[1:4, ::2],
    "negated": lambda: COMPLEX.conj().imag,
    "negated_slice": lambda: COMPLEX.conj().imag[2:, 1:5],
    "real_part": lambda: COMPLEX.real,
    "requires_grad": lambda: FLOATS.clone().requires_grad_(),
    "requires_grad_non_leaf": non_leaf,
    "requires_grad_view": lambda: FLOATS.clone().requires_grad_()[2:5],
    "parameter": lambda: torch.nn.Parameter(FLOATS.clone()),
    "frozen_parameter": lambda: torch.nn.Parameter(torch.arange(30), requires_grad=False),
    "parameter_over_slice": lambda: torch.nn.Parameter(FLOATS[2:9, 4:10]),
    "reinterpreted": lambda: FLOATS.view(torch.int16)[:, 5:9],
    "from_numpy": lambda: torch.from_numpy(np.arange(50, dtype=np.int16)[5:40]),
    "inference": torch.inference_mode()(lambda: FLOATS + 1),
    "large_storage_small_view": lambda: noise(3 * MIB)[MIB : MIB + 60],
}
EMPTY: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(0, dtype=torch.float16),
    "empty_shape": lambda: torch.empty(3, 0, 5, dtype=torch.int32),
    "empty_slice": lambda: FLOATS[4:4],
    "empty_parameter": lambda: torch.nn.Parameter(torch.empty(0, 4)),
    "empty_conjugated": COMPLEX[:0].conj,
}
UNSUPPORTED: dict[str, Callable[[], torch.Tensor]] = {
    "sparse_coo": lambda: torch.eye(9).to_sparse(),
    "sparse_csr": lambda: torch.eye(9).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.arange(12.0), 0.5, 3, torch.qint8),
    "meta": lambda: torch.empty(4, 5, device="meta", dtype=torch.float16),
    "subclass": tagged,
    "with_attribute": with_attribute,
}
ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "c_order": lambda: np.arange(6000, dtype=np.int16).reshape(60, 100),
    "fortran_order": lambda: np.asfortranarray(np.arange(6000, dtype=np.float32).reshape(60, 100)),
    "structured": lambda: np.array(
        [(i, i / 3, b"x" * (i % 4)) for i in range(500)], dtype=[("a", "<i4"), ("b", ">f8"), ("c", "S3")]
    ),
    "big_endian": lambda: np.arange(3000, dtype=">u4"),
    "halves": lambda: np.frombuffer(noise(6000).numpy().tobytes(), np.float16),
    "bools": lambda: noise(6000).numpy() > 127,
    "complexes": lambda: np.arange(500) * (1 + 2j),
    "texts": lambda: np.array(["α", "beta", ""] * 500),
    "read_only": lambda: np.frombuffer(noise(6000).numpy().tobytes(), np.uint8),
}
IN_BAND_ARRAYS: dict[str, Callable[[], np.ndarray]] = {
    "strided": lambda: np.arange(6000)[::3],
    "transposed_slice": lambda: np.arange(6000).reshape(60, 100)[3:9, 2:50].T,
    "small": lambda: np.arange(10),
    "zero_size": lambda: np.empty((3, 0, 2), np.float32),
    "zero_d": lambda: np.array(3.5),
    "scalar": lambda: np.float32(2.5),
    "dates": lambda: np.arange("2020-01-01", "2023-01-01", dtype="datetime64[D]"),
    "objects": lambda: np.array([{"a": 1}, None, "text"], dtype=object),
}
BUFFERS: dict[str, Callable[[], Any]] = {
    "bytes": lambda: noise(6000).numpy().tobytes(),
    "bytearray": lambda: bytearray(noise(6000).numpy().tobytes()),
    "picklebuffer": lambda: pickle.PickleBuffer(bytearray(noise(6000).numpy().tobytes())),
    "read_only_picklebuffer": lambda: pickle.PickleBuffer(noise(6000).numpy().tobytes()),
    "picklebuffer_of_a_matrix": lambda: pickle.PickleBuffer(np.arange(3000, dtype=np.int32).reshape(30, 100)),
    "small_bytes": lambda: b"abc",
    "small_bytearray": lambda: bytearray(b"abc"),
    "small_picklebuffer": lambda: pickle.PickleBuffer(b"abc"),
    "no_bytes": lambda: b"",
    "empty_picklebuffer": lambda: pickle.PickleBuffer(bytearray()),
}
CONTAINERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.arange(30), 1, "two", None, FLOATS],
    "dict": lambda: {"a": {"b": {"c": [FLOATS[:3]]}}, 3: (torch.arange(9), torch.arange(5.0))},
    "namedtuple": lambda: Step(3, [FLOATS, COMPLEX.conj()]),
    "dataclass": lambda: Batch("x", [FLOATS, torch.tensor(1)], extra=np.arange(2000)),
    "ordered": lambda: collections.OrderedDict(z=FLOATS, a=torch.arange(4)),
    "module": lambda: torch.nn.Linear(6, 4),
    "many": lambda: [torch.full((i % 5,), i) for i in range(100)],
    "mixed": lambda: [
        FLOATS,
        np.arange(2000),
        b"y" * 5000,
        pickle.PickleBuffer(bytearray(b"z" * 5000)),
        torch.empty(0),
    ],
    "types": lambda: [torch.float8_e5m2, torch.Size([1, 2]), torch.device("cpu"), FLOATS.shape, FLOATS],
    "cycle": cycle,
}


# --- what it is compared by ------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in order, as bytes: two NaNs are equal if their bits are."""
    plain = tensor.detach()
    plain = plain.as_subclass(torch.Tensor) if plain.layout is torch.strided else plain.to_dense()
    if plain.is_quantized:
        plain = plain.int_repr()
    plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(got: Any, sent: Any, path: str = "it") -> None:
    """Equal in type, form and every bit."""
    if isinstance(sent, torch.Tensor):
        assert_same_tensor(got, sent, path)
    elif isinstance(sent, np.ndarray | np.generic):
        assert_same_array(got, sent, path)
    elif isinstance(sent, pickle.PickleBuffer):
        assert bytes(memoryview(got)) == bytes(sent.raw()), path
    elif isinstance(sent, torch.nn.Module):
        assert type(got) is type(sent), path
        assert_same(dict(got.named_parameters()), dict(sent.named_parameters()), path)
    elif dataclasses.is_dataclass(sent):
        assert type(got) is type(sent), path
        assert_same(vars(got), vars(sent), path)
    elif isinstance(sent, dict):
        assert type(got) is type(sent), path
        assert list(got) == list(sent), path
        for key, value in sent.items():
            assert_same(got[key], value, f"{path}[{key!r}]")
    elif isinstance(sent, list | tuple):
        assert (type(got), len(got)) == (type(sent), len(sent)), path
        for index, value in enumerate(sent):
            assert_same(got[index], value, f"{path}[{index}]")
    else:
        assert (type(got), got) == (type(sent), sent), path


def assert_same_tensor(got: Any, sent: torch.Tensor, path: str) -> None:
    assert type(got) is type(sent), path
    for what in ("dtype", "shape", "layout", "device", "requires_grad", "is_quantized"):
        assert getattr(got, what) == getattr(sent, what), f"{what} of {path}"
    assert not got.is_conj(), path
    assert not got.is_neg(), path
    if sent.device.type == "cpu":
        assert bits(got) == bits(sent), f"bits of {path}"
    if sent.is_quantized:
        assert (got.q_scale(), got.q_zero_point()) == (sent.q_scale(), sent.q_zero_point())


def assert_same_array(got: Any, sent: Any, path: str) -> None:
    assert (type(got), got.dtype, got.shape) == (type(sent), sent.dtype, sent.shape), path
    if sent.dtype.hasobject:
        assert got.tolist() == sent.tolist(), path
    else:
        assert got.tobytes() == sent.tobytes(), path
    if isinstance(sent, np.ndarray) and sent.flags.f_contiguous:
        assert got.flags.f_contiguous, f"order of {path}"


# --- queues, one for each path and kind of views ---------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "inline": {"slot_bytes": 64 << 10, "min_block_bytes": 1 << 40},
    "block": {"min_block_bytes": 1},
    "fragments": {"max_arena_bytes": 0, "slots": 2048, "slot_bytes": 256},
}


class Rig:
    """A writer and two readers, in this process."""

    def __init__(self, run_dir: str, views: str, **config: Any) -> None:
        self.views = views
        self.writer = MessageQueue(2, config=QueueConfig(run_dir=run_dir, views=views, huge_pages=False, **config))
        handle = self.writer.export_handle()
        self.readers = [MessageQueue.create_from_handle(handle, rank) for rank in range(2)]
        self.path: str | None = None
        self.fallbacks: dict[str, int] = {}

    def round_trip(self, obj: Any) -> list[Any]:
        """What each reader gets; `path` and `fallbacks` say how."""
        before = self.writer.statistics()
        self.writer.enqueue(obj, timeout=5)
        after = self.writer.statistics()
        (self.path,) = (
            path for path, count in after.messages_by_path.items() if count != before.messages_by_path[path]
        )
        rises = {reason: count - before.fallbacks.get(reason, 0) for reason, count in after.fallbacks.items()}
        self.fallbacks = {reason: count for reason, count in rises.items() if count}
        return [reader.dequeue(timeout=5) for reader in self.readers]

    def trouble(self) -> str:
        """What a test has left behind."""
        if any(self.writer.statistics().lag_by_reader.values()):
            return "a message that was not taken"
        return "a block that was not given back" if self.used_bytes() else ""

    def used_bytes(self) -> int:
        assert isinstance(self.writer, Writer)
        self.writer._pool.collect()
        return self.writer.statistics().arena_used_bytes

    def close(self) -> None:
        for queue in (*self.readers, self.writer):
            queue.shutdown()


@pytest.fixture(scope="module")
def rigs() -> Iterator[Callable[[str, str], Rig]]:
    made: dict[tuple[str, str], Rig] = {}
    with tempfile.TemporaryDirectory(prefix="arena-") as run_dir:

        def rig(path: str, views: str) -> Rig:
            if (path, views) in made and made[path, views].trouble():
                made.pop((path, views)).close()  # one test's failure is not the next one's
            if (path, views) not in made:
                made[path, views] = Rig(run_dir, views, **SETTINGS[path])
            return made[path, views]

        yield rig
        for one in made.values():
            one.close()


@pytest.fixture
def rig(rigs, path, views) -> Iterator[Rig]:
    one = rigs(path, views)
    yield one
    assert one.trouble() == ""


matrix = pytest.mark.parametrize(("path", "views"), [(path, views) for path in PATHS for views in VIEWS])
on_every_path = pytest.mark.parametrize(("path", "views"), [(path, "readonly") for path in PATHS])


def each(kinds: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("make", kinds.values(), ids=kinds.keys())


# --- the matrix ------------------------------------------------------------------------------------------------------


@matrix
@each(TENSORS)
def test_every_kind_of_tensor_arrives_bit_by_bit(rig, path, make):
    sent = make()
    got = rig.round_trip(sent)
    assert rig.path == path
    for one in got:
        assert_same(one, sent)
    assert "unsupported_tensor" not in rig.fallbacks


@matrix
@each(EMPTY)
def test_a_tensor_without_elements_arrives_and_takes_no_block(rig, make):
    sent = make()
    for one in rig.round_trip(sent):
        assert_same(one, sent)
    assert rig.path != "block"


@matrix
@each(UNSUPPORTED)
def test_a_tensor_that_can_not_be_laid_out_takes_torchs_own_way_and_is_counted(rig, make):
    sent = make()
    for one in rig.round_trip(sent):
        assert_same(one, sent)
    assert rig.fallbacks["unsupported_tensor"] == 1
    rig.round_trip([1, torch.arange(3)])
    assert "unsupported_tensor" not in rig.fallbacks, "once, with its own message"


@matrix
@each(ARRAYS)
def test_every_kind_of_array_arrives_byte_by_byte(rig, path, views, make):
    sent = make()
    for one in rig.round_trip(sent):
        assert_same(one, sent)
        in_shared_memory = path == "block" and views == "readonly"
        assert one.flags.writeable == (sent.flags.writeable and not in_shared_memory)
        del one
    assert rig.path == path


@matrix
@each(IN_BAND_ARRAYS)
def test_an_array_that_pickle_has_to_copy_arrives_all_the_same(rig, make):
    sent = make()
    for one in rig.round_trip(sent):
        assert_same(one, sent)


@matrix
@each(BUFFERS)
def test_every_kind_of_buffer_arrives_byte_by_byte(rig, path, views, make):
    sent = make()
    for one in rig.round_trip(sent):
        assert_same(one, sent)
        if isinstance(one, memoryview):
            borrowed = path == "block" and views == "readonly"
            assert one.readonly == (borrowed or memoryview(sent).readonly)
        del one


@matrix
@each(CONTAINERS)
def test_tensors_arrive_wherever_they_are_kept(rig, make):
    sent = make()
    if make is cycle:
        for one in rig.round_trip(sent):
            assert one[1]["back"] is one
            assert_same(one[0], sent[0])
            one.clear()
        return
    for one in rig.round_trip(sent):
        assert_same(one, sent)
        del one


@matrix
@each({name: TENSORS[name] for name in ("transposed", "permuted", "sliced", "channels_last", "expanded")})
def test_a_tensor_keeps_how_it_lies_in_memory(rig, make):
    sent = make()
    for one in rig.round_trip(sent):
        assert one.stride() == sent.stride()


# --- storages --------------------------------------------------------------------------------------------------------


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


VIEWS_OF_ONE = {
    "overlapping": lambda base: [base[0:6], base[3:9]],
    "disjoint": lambda base: [base[0:2], base[8:]],
    "whole_and_part": lambda base: [base, base[5], base.view(-1)[7:9]],
    "of_two_dtypes": lambda base: [base, base.view(torch.int32)[2:], base.view(torch.uint8)],
    "of_two_alignments": lambda base: [base.view(-1).view(torch.uint8)[3:50], base.view(-1)[2:9]],
    "transposed": lambda base: [base.t(), base],
    "two_parameters": lambda base: [torch.nn.Parameter(base), torch.nn.Parameter(base)],
    "with_a_sparse_one": lambda base: [base[:, 0], base[1:3], base[::5]],
}


@matrix
@each(VIEWS_OF_ONE)
def test_views_of_one_storage_stay_views_of_one_storage(rig, make):
    base = FLOATS.clone()
    sent = make(base)
    for one in rig.round_trip(sent):
        assert_same(one, sent)
        assert len({storage_of(tensor) for tensor in one}) == 1
        offsets = [tensor.data_ptr() - one[0].data_ptr() for tensor in one]
        assert offsets == [tensor.data_ptr() - sent[0].data_ptr() for tensor in sent]
        del one


writable = pytest.mark.parametrize(
    ("path", "views"), [(path, views) for path in PATHS for views in ("private", "shared")]
)


@writable
def test_what_is_written_through_one_view_is_seen_through_the_other(rig):
    base = torch.zeros(30)
    for one in rig.round_trip([base[:20], base[10:]]):
        one[0][15] = 7
        assert one[1][5] == 7
        del one


@matrix
def test_a_tensor_sent_twice_stays_one_object(rig):
    tensor, array = torch.arange(30), np.arange(2000)
    for one in rig.round_trip([tensor, array, {"again": tensor, "array": array}]):
        assert one[0] is one[2]["again"]
        assert one[1] is one[2]["array"]
        assert_same(one[0], tensor)
        del one


@matrix
def test_tensors_of_two_storages_stay_apart(rig):
    one, other = torch.zeros(30), torch.zeros(30)
    for got in rig.round_trip([one, other]):
        assert storage_of(got[0]) != storage_of(got[1])
        del got


@matrix
def test_two_storages_over_one_address_are_not_mixed_up(rig):
    # Two tensors over one numpy array: one address, two storages, of two lengths.
    array = np.arange(1000, dtype=np.int32)
    sent = [torch.from_numpy(array[:10]), torch.from_numpy(array), torch.from_numpy(array[:500])]
    for one in (*rig.round_trip(sent), *rig.round_trip(sent[::-1])[::-1]):
        assert_same(one if one[0].numel() == 10 else one[::-1], sent)
        del one


def bytes_sent_for(rig: Rig, obj: Any) -> int:
    before = sum(rig.writer.statistics().bytes_by_path.values())
    rig.round_trip(obj)
    return sum(rig.writer.statistics().bytes_by_path.values()) - before


@pytest.mark.parametrize(("path", "views"), [("inline", "readonly"), ("block", "readonly")])
def test_what_lies_between_two_views_far_apart_is_not_sent(rig):
    base = noise(8 * MIB)
    sent = [base[:500], base[-500:]]
    assert bytes_sent_for(rig, sent) < 4096
    for one in rig.round_trip(sent):
        assert_same(one, sent)
        del one


@pytest.mark.parametrize(("path", "views"), [("inline", "readonly"), ("block", "readonly")])
def test_a_tensor_spread_thin_over_its_storage_is_gathered(rig):
    base = noise(MIB).view(1024, 1024)
    assert bytes_sent_for(rig, base[:, 7]) < 4096
    for one in rig.round_trip(base[:, 7]):
        assert_same(one, base[:, 7])


@on_every_path
def test_only_the_part_that_a_view_shows_is_sent(rig):
    assert bytes_sent_for(rig, noise(8 * MIB)[MIB : MIB + 1000]) < 2048


# --- independence ----------------------------------------------------------------------------------------------------


@matrix
def test_what_happens_to_a_tensor_after_enqueue_does_not_reach_the_readers(rig):
    tensor, array, own = torch.arange(1000), np.arange(2000), bytearray(b"x" * 6000)
    rig.writer.enqueue([tensor, array, pickle.PickleBuffer(own), tensor.view(10, 100).t()])
    tensor.fill_(-1)
    array[:] = -1
    own[:] = b"y" * 6000
    for reader in rig.readers:
        got = reader.dequeue()
        assert_same(got[0], torch.arange(1000))
        assert_same(got[1], np.arange(2000))
        assert bytes(got[2]) == b"x" * 6000
        assert_same(got[3], torch.arange(1000).view(10, 100).t())
        del got


@writable
def test_a_reader_may_write_to_what_it_got(rig, path, views):
    first, second = rig.round_trip(torch.zeros(1000))
    first.fill_(1)
    seen_by_both = path == "block" and views == "shared"
    assert int(second[5]) == int(seen_by_both)


@matrix
def test_one_readers_end_does_not_change_what_another_holds(rig):
    first, second = rig.round_trip(torch.arange(1000))
    del first
    rig.round_trip(torch.zeros(1000, dtype=torch.int64))
    rig.round_trip(torch.zeros(1000, dtype=torch.int64))
    assert_same(second, torch.arange(1000))


# --- the surroundings ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "another_default_device": lambda: torch.device("meta"),
    "another_default_dtype": lambda: default_dtype(torch.float64),
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
}


@on_every_path
@each(SURROUNDINGS)
def test_what_the_caller_has_set_for_its_own_tensors_changes_nothing(rig, make):
    sent = [FLOATS, FLOATS.t(), COMPLEX.conj(), torch.arange(30)[::2], torch.nn.Parameter(FLOATS), torch.empty(0, 3)]
    with make():
        got = rig.round_trip(sent)
    for one in got:
        assert_same(one, sent)
    del one, got


@on_every_path
def test_a_gradient_flows_through_what_was_received(rig):
    weight = torch.nn.Parameter(FLOATS.nan_to_num(0, 0, 0))
    first, _ = rig.round_trip(weight)
    (first * 3).sum().backward()
    assert torch.equal(first.grad, torch.full_like(weight, 3))
    assert weight.grad is None
    del first, _


# --- large messages --------------------------------------------------------------------------------------------------


def ring_bytes(rig: Rig) -> tuple[int, int]:
    """Frames published so far, and payload bytes of the last one."""
    published = rig.writer.statistics().published
    return published, rig.readers[0]._ring.payload(published - 1).nbytes


@pytest.fixture
def large(run_dir) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**config: Any) -> Rig:
        made.append(Rig(str(run_dir), config.pop("views", "readonly"), **config))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("views", VIEWS)
def test_a_64_mb_tensor_leaves_less_than_4_kb_in_the_ring(large, views):
    rig = large(views=views)
    sent = noise(64 * 1000 * 1000)
    got = rig.round_trip(sent)
    frames, nbytes = ring_bytes(rig)
    assert frames == 1
    assert nbytes < 4096
    assert rig.path == "block"
    assert all(torch.equal(one, sent) for one in got)
    del got
    assert rig.used_bytes() == 0


@pytest.mark.parametrize(
    "make", [lambda data: data, bytearray, pickle.PickleBuffer], ids=["bytes", "bytearray", "buffer"]
)
def test_huge_buffers_leave_no_more_than_a_reference_in_the_ring(large, make):
    rig = large()
    data = noise(5 * MIB + 3).numpy().tobytes()
    for one in rig.round_trip({"data": make(data), "step": 3}):
        assert one["step"] == 3
        assert bytes(one["data"]) == data
        del one
    assert ring_bytes(rig)[1] < 4096
    assert rig.path == "block"


def test_a_message_of_very_many_small_things_goes_to_a_block(large):
    rig = large()
    sent = {f"key {number}": [number, float(number), None] for number in range(20_000)}
    assert rig.round_trip(sent) == [sent, sent]
    assert ring_bytes(rig)[1] < 4096
    assert rig.round_trip({"small": 1}) == [{"small": 1}] * 2


@pytest.mark.parametrize(
    "make", [lambda data: data.numpy().tobytes(), lambda data: data, lambda data: data.view(-1, 2).t()]
)
def test_a_message_larger_than_the_ring_passes_through_it_in_fragments(large, make):
    rig = large(max_arena_bytes=0, slots=4, slot_bytes=4096)
    sent = make(noise(300_000))
    got: list[Any] = [None, None]

    def read(rank: int) -> None:
        got[rank] = rig.readers[rank].dequeue(timeout=30)

    threads = [threading.Thread(target=read, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    rig.writer.enqueue(sent, timeout=30)
    for thread in threads:
        thread.join(30)
    for one in got:
        assert_same(one, sent)
    assert rig.writer.statistics().messages_by_path["fragments"] == 1
    assert rig.writer.statistics().published > 70


def test_a_small_buffer_stays_in_the_pickle_and_a_larger_one_does_not():
    for nbytes, sources in ((IN_BAND_BYTES, 0), (IN_BAND_BYTES + 1, 1)):
        message = Encoder().encode(np.zeros(nbytes, np.uint8))
        assert (0 if isinstance(message, bytes) else len(message.sources)) == sources


# --- what can't be sent ----------------------------------------------------------------------------------------------


class Stubborn:
    """Raises whatever it is told to when it is pickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@matrix
@pytest.mark.parametrize(
    "bad",
    [
        lambda: lambda: None,
        threading.Lock,
        lambda: memoryview(b"x"),
        lambda: pickle.PickleBuffer(np.arange(3000)[::2]),
        lambda: Stubborn(ZeroDivisionError("no")),
        lambda: (number for number in range(3)),
    ],
    ids=["lambda", "lock", "memoryview", "strided_buffer", "raises", "generator"],
)
def test_an_object_that_can_not_be_pickled_leaves_no_trace(rig, bad):
    before = rig.writer.statistics()
    with pytest.raises(EncodeFailed) as caught:
        rig.writer.enqueue([torch.arange(1000), torch.eye(3).to_sparse(), b"x" * 5000, bad(), torch.arange(1000)])
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in caught.value.found
    after = rig.writer.statistics()
    assert (after.published, after.holds_used, rig.used_bytes()) == (before.published, 0, 0)
    sent = [torch.arange(30), "next"]
    for one in rig.round_trip(sent):
        assert_same(one, sent)
        del one
    assert "unsupported_tensor" not in rig.fallbacks, "nothing is left over from the message that failed"


@on_every_path
def test_an_error_of_arenas_own_comes_through_unwrapped(rig):
    with pytest.raises(CorruptFrame, match="mine"):
        rig.writer.enqueue(Stubborn(CorruptFrame("mine")))


@on_every_path
def test_two_messages_never_share_what_was_pickled_once(rig):
    shared = ["a list", torch.arange(30)]
    first = rig.round_trip(shared)
    shared.append("more")
    second = rig.round_trip(shared)
    assert [len(one) for one in first + second] == [2, 2, 3, 3]
    del first, second


def test_an_encoder_does_not_keep_a_large_messages_memory():
    encoder = Encoder()
    encoder.encode(b"small")
    pickler = encoder._pickler
    encoder.encode([f"{number:0100}" for number in range(50_000)])
    assert encoder._pickler is not pickler, "its memo table would stay large"


def test_an_encoder_keeps_nothing_of_what_it_encoded():
    encoder = Encoder()
    sent = [noise(100_000), np.arange(50_000)]
    alive = [weakref.ref(one) for one in sent]
    encoder.encode(sent)
    del sent
    assert [one() for one in alive] == [None, None]


# --- payloads that no encoder made -----------------------------------------------------------------------------------


def payload_of(obj: Any) -> bytes:
    message = Encoder().encode(obj)
    assert isinstance(message, Message)
    return b"".join(build_payload(message, [None] * len(message.sources)))


GOOD = payload_of([FLOATS, FLOATS.t(), np.arange(2000), torch.empty(0)])


def nothing_to_borrow(hold: tuple[int, ...]) -> memoryview:
    raise CorruptFrame("no such hold", found=str(hold))


def test_a_payload_decodes_to_what_was_encoded():
    assert_same(
        decode(read_table(memoryview(GOOD)), nothing_to_borrow, "readonly"),
        [
            FLOATS,
            FLOATS.t(),
            np.arange(2000),
            torch.empty(0),
        ],
    )


@pytest.mark.parametrize("nbytes", [*range(0, 400, 7), len(GOOD) // 2, len(GOOD) - 1])
def test_a_payload_that_was_cut_short_is_corrupt_or_fails_to_unpickle(nbytes):
    with pytest.raises((CorruptFrame, pickle.UnpicklingError, EOFError, ValueError)):
        decode(read_table(memoryview(GOOD[:nbytes])), nothing_to_borrow, "readonly")


@given(word=st.integers(0, 3 + 5 * 3 - 1), value=st.integers(0, (1 << 64) - 1) | st.integers(0, len(GOOD) * 2))
@settings(max_examples=300)
def test_a_table_never_leads_outside_its_payload(word, value):
    damaged = bytearray(GOOD)
    damaged[word * 8 : word * 8 + 8] = value.to_bytes(8, "little")
    try:
        table = read_table(memoryview(damaged))
    except CorruptFrame as error:
        assert error.expected
        return
    assert 0 <= table.specs[0] <= table.specs[1] <= table.pickle[0] <= table.pickle[1] == len(damaged)
    for segment, at, nbytes, _, _ in table.entries:
        assert segment or at + nbytes <= table.pickle[0]


@pytest.mark.parametrize("name", ["no_such_dtype", "Tensor", "nn", "__name__"])
def test_a_dtype_that_does_not_exist_is_corrupt(name):
    spec = [(0, (name, 0, (3,), (1,), False, False))]
    specs = pickle.dumps(spec, 5)
    good = payload_of(torch.arange(3))
    entries = 24 + layout.HOLD_BYTES
    specs_bytes = int.from_bytes(good[8:16], "little")
    head = good[:8] + len(specs).to_bytes(8, "little") + good[16:entries]
    damaged = head + specs + bytes(64) + good[entries + specs_bytes :]
    with pytest.raises(CorruptFrame):
        decode(read_table(memoryview(damaged)), nothing_to_borrow, "readonly")
