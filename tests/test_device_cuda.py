"""What of the paths on GPUs can be known without one: shapes, slots, verdicts, layouts, and watching processes."""

import ctypes
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arena.device import open_device
from arena.device.cuda import build, cards, one_shot, push, shapes
from arena.device.cuda.cards import Card, objection_to
from arena.device.cuda.watch import Watch
from arena.errors import InvalidArgument
from arena.probe import identity
from tests.support.processes import Child

MULTIPROCESSORS = 132  # of an H200
SOURCE = Path(build.__file__).with_name("push.cu").read_text()


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kib", "shape"),
    [
        (8, (4, 128)),
        (32, (16, 128)),
        (128, (64, 128)),
        (256, (128, 128)),
        (512, (132, 256)),
        (1024, (132, 512)),
        (2048, (132, 1024)),
        (12288, (132, 1024)),
    ],
)
def test_on_an_h200_the_shapes_are_those_that_were_fastest(kib, shape) -> None:
    assert shapes.shape_for(kib * 1024 // 16, MULTIPROCESSORS) == shape


@given(st.integers(1, 1 << 24), st.integers(1, 256))
def test_a_shape_is_one_that_can_be_launched(vectors, multiprocessors) -> None:
    blocks, threads = shapes.shape_for(vectors, multiprocessors)
    assert 1 <= blocks <= multiprocessors
    assert threads % 32 == 0
    assert 32 <= threads <= 1024


@given(st.integers(1, 1 << 24), st.integers(0, 1 << 24), st.integers(1, 256))
def test_what_fits_below_the_ceiling_fits_into_the_slots(largest, less, multiprocessors) -> None:
    vectors = max(1, largest - less)
    slots = shapes.slots_for(largest, multiprocessors, 1, 3)
    blocks, _ = shapes.shape_for(vectors, multiprocessors)
    assert blocks <= slots.blocks
    assert -(-vectors // blocks) <= slots.capacity


@pytest.mark.parametrize("size", [shapes.SPLIT_ABOVE_BYTES + each for each in (-16, 0, 16)])
def test_the_split_kernel_has_slots_only_above_its_floor(size) -> None:
    vectors = shapes.split_slots(size, 2).capacity
    assert vectors == (size // 16 if size > shapes.SPLIT_ABOVE_BYTES else 0)


@given(st.integers(1, shapes.LARGEST_BYTES), st.integers(2, 8))
def test_every_slot_has_a_number_of_32_bits(max_bytes, world) -> None:
    for slots in (
        shapes.one_shot_slots(max_bytes, world, MULTIPROCESSORS),
        shapes.split_slots(max_bytes, world),
        shapes.two_shot_slots(max_bytes, world, MULTIPROCESSORS),
        shapes.move_slots(world, MULTIPROCESSORS),
    ):
        assert slots.generation * slots.generations < 1 << 32


@given(st.integers(2, 8), st.integers(1, 256), st.data())
def test_what_is_moved_fits_into_its_slots(world, multiprocessors, data) -> None:
    vectors = data.draw(st.integers(1, shapes.MOVED_BYTES // shapes.VECTOR_BYTES // world))
    slots = shapes.move_slots(world, multiprocessors)
    blocks, _ = shapes.shape_for(vectors, multiprocessors)
    assert blocks <= slots.blocks
    assert -(-vectors // blocks) <= slots.capacity


@given(st.integers(1, 4096), st.integers(1, 5000), st.integers(1, 256))
def test_rows_of_a_norm_are_whole_in_a_block(rows, row, multiprocessors) -> None:
    vectors = rows * row
    (blocks, threads), share = (
        shapes.norm_shape(vectors, row, multiprocessors),
        shapes.norm_share(vectors, row, multiprocessors),
    )
    assert blocks <= min(rows, multiprocessors)
    assert threads % 32 == 0
    assert 32 <= threads <= 1024
    assert share % row == 0
    assert share * blocks >= vectors


@given(st.integers(1, 1 << 20), st.integers(2, 8))
def test_the_parts_of_the_ranks_cover_a_tensor(vectors, world) -> None:
    chunk = shapes.two_shot_chunk(vectors, world)
    assert (world - 1) * chunk < vectors + world * world
    assert world * chunk >= vectors


@pytest.mark.parametrize("multiprocessors", [1, 3, 8, 132])
def test_the_split_kernel_always_has_somebody_who_takes(multiprocessors) -> None:
    assert 1 <= shapes.split_pushers(multiprocessors) <= max(1, multiprocessors - 1)


# --- both sides of the launch -----------------------------------------------------------------------------------------


def test_mail_is_laid_out_as_the_kernels_read_it() -> None:
    body = re.search(r"struct Mail \{(.*?)\};", SOURCE, re.S)
    assert body is not None
    names = re.findall(r"[\w*]\s*(\w+)(?:\[PEERS\])?;", re.sub(r"//.*", "", body[1]))
    for world in range(2, 9):
        mail = push.mail_type(world)
        assert [name for name, _ in mail._fields_] == names
        assert mail.outbox.size == (world - 1) * ctypes.sizeof(ctypes.c_void_p)


def test_what_a_norm_takes_is_laid_out_as_its_kernel_reads_it() -> None:
    body = re.search(r"struct NormMail \{(.*?)\};", SOURCE, re.S)
    assert body is not None
    names = re.findall(r"[\w*]\s*(\w+);", re.sub(r"//.*", "", body[1]))
    for world in range(2, 9):
        norm = one_shot.norm_type(world)
        assert [name for name, _ in norm._fields_] == names
        assert norm.residual.offset == ctypes.sizeof(push.mail_type(world))
        assert norm.eps.offset == norm.row.offset + 4


def test_every_kernel_that_is_loaded_is_in_the_source() -> None:
    assert set(re.findall(r"__global__ void(?: __launch_bounds__\([^{;]*?\))?\s+(\w+)\(", SOURCE)) == set(push.KERNELS)


def test_the_constants_that_python_and_the_kernels_share_agree() -> None:
    def constant(name: str) -> int:
        found = re.search(rf"constexpr u32 {name} = (\d+);", SOURCE)
        assert found is not None
        return int(found[1])

    assert constant("MAX_THREADS") == shapes.MAX_THREADS
    assert constant("SPLIT_THREADS") == shapes.SPLIT_THREADS
    assert constant("ONE_SHOT_GENERATIONS") == shapes.ONE_SHOT_GENERATIONS


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    "options", [("2", "BFloat16", "sm_90"), ("8", "Float16", "sm_90"), ("3", "Float32", "sm_80")], ids="-".join
)
def test_the_kernels_compile_without_a_warning_and_keep_to_registers(options, tmp_path) -> None:
    world, element, chip = options
    command = [
        "nvcc",
        "-cubin",
        f"-arch={chip}",
        "-std=c++17",
        "-Xptxas=-v",
        f"-DWORLD={world}",
        f"-DELEMENT={element}",
        "-o",
        tmp_path / "out",
    ]
    told = subprocess.run(
        [*command, Path(build.__file__).with_name("push.cu")], check=False, capture_output=True, text=True, timeout=100
    )
    assert told.returncode == 0, told.stderr
    assert "warning" not in told.stderr
    assert all(int(spilled) <= 16 for spilled in re.findall(r"(\d+) bytes spill", told.stderr))


def test_without_a_compiler_the_reason_is_told() -> None:
    with pytest.raises(build.BuildFailed):
        build.compile_push(2, (0, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")  # noqa: TID251
def test_without_a_gpu_there_is_an_error_that_says_so() -> None:
    with pytest.raises(InvalidArgument, match="there is no GPU"):
        open_device("cuda")


# --- verdicts ---------------------------------------------------------------------------------------------------------


def card(uuid: str, **changes: object) -> Card:
    return Card("boot", uuid, (9, 0), 132, (), identity())._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "reason", "text"),
    [
        ([card("a"), card("b")], None, ""),
        ([card(name) for name in "abcdefgh"], None, ""),
        ([card("a")], "world_size", "1 ranks"),
        ([card(name) for name in "abcdefghi"], "world_size", "9 ranks"),
        ([card("a"), card("b", boot="another")], "not_intra_node", "more than one machine"),
        ([card("a"), card("b"), card("a")], "no_peer_access", "ranks 0 and 2 are on the same GPU"),
        ([card("a"), card("b", unreachable=("a",))], "no_peer_access", "rank 1 has no access to that of rank 0"),
        ([card("a", unreachable=("somebody's",)), card("b")], None, ""),
        ([card("a"), card("b", capability=(7, 5))], "capability", "rank 1's GPU has compute capability 7.5"),
    ],
)
def test_ranks_that_can_not_reach_each_other_are_told_why(ranks, reason, text) -> None:
    objection = objection_to(ranks)
    if reason is None:
        assert objection is None
    else:
        assert objection is not None
        assert objection[0] == reason
        assert text in objection[1]


def test_the_worlds_are_those_that_the_kernels_are_made_for() -> None:
    assert (cards.WORLDS[0], cards.WORLDS[-1]) == (2, 8)


# --- watching ---------------------------------------------------------------------------------------------------------


def _live() -> None:
    threading.Event().wait(50)


def test_a_death_is_told_once_with_its_rank() -> None:
    told: list[int] = []
    heard = threading.Event()

    def hear(rank: int) -> None:
        told.append(rank)
        heard.set()

    with Child(_live) as one, Child(_live) as other:
        watch = Watch({3: identity(one.pid), 5: identity(other.pid)}, hear)
        other.kill()
        assert heard.wait(10)
        one.kill()
        one.join()
        watch.close()
    assert told == [5]


def test_a_process_that_is_dead_already_is_told_at_once() -> None:
    heard = threading.Event()
    with Child(_live) as child:
        who = identity(child.pid)
        child.kill()
        child.join()
    watch = Watch({1: who}, lambda rank: heard.set())
    assert heard.wait(10)
    watch.close()


def test_closing_a_watch_ends_its_thread_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    told: list[int] = []
    watch = Watch({0: identity()}, told.append)
    watch.close()
    watch.close()
    assert not told
    assert len(os.listdir("/proc/self/fd")) == before
