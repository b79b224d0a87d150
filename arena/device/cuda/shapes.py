"""How push.cu's kernels are cut for a size: how many blocks and threads, and how much memory that takes.

Pure, and the same on every rank, because which slot a word goes to follows from it. Tuned on two H200s (132
multiprocessors), bf16, 2026-11-30; `tests/bench/RESULTS.md` has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WARP: Final = 32
VECTOR_BYTES: Final = 16
MAX_THREADS: Final = 1024
MIN_THREADS: Final = 128
"""Spread thinner than this, a block costs more than it does."""

ONE_SHOT_GENERATIONS: Final = 3
GENERATIONS: Final = 2

SPLIT_ABOVE_BYTES: Final = 12 << 20
"""Above, some blocks only push and the others only take; below, getting that going costs more than it gains."""

SPLIT_THREADS: Final = 512
SPLIT_PUSHERS: Final = 26
"""Blocks that push: 22 of them don't fill the link, 32 leave too little to the others."""

MOVED_BYTES: Final = 8 << 20
"""The largest whole tensor that is gathered, scattered or exchanged; not measured yet."""

LARGEST_BYTES: Final = (1 << 32) - VECTOR_BYTES
"""Slots are numbered in 32 bits; this leaves room for eight ranks."""


@dataclass(frozen=True)
class Slots:
    """The slots of one kind of kernel, in one rank's inbox.

    Attributes:
        blocks: how many blocks have slots of their own.
        capacity: vectors that one block can get from one peer in one operation.
        rows: how many of those ranges a generation has for a block.
        generations: how many operations may be in the memory at once.
    """

    blocks: int
    capacity: int
    rows: int
    generations: int

    @property
    def row(self) -> int:
        """Vectors of one row."""
        return self.blocks * self.capacity

    @property
    def generation(self) -> int:
        """Vectors of one generation."""
        return self.row * self.rows

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.generation * self.generations * VECTOR_BYTES


def vectors_of(size_bytes: int) -> int:
    """Vectors that a tensor fills; the last may be cut short."""
    return -(-size_bytes // VECTOR_BYTES)


def shape_for(vectors: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks and threads: one vector a thread as far as they reach, on as many multiprocessors as pay."""
    blocks = max(1, min(multiprocessors, -(-vectors // MIN_THREADS)))
    share = -(-vectors // blocks)
    return blocks, min(MAX_THREADS, max(1, -(-share // WARP)) * WARP)


def slots_for(largest_vectors: int, multiprocessors: int, rows: int, generations: int) -> Slots:
    """Room for every size up to `largest_vectors`: a smaller tensor has fewer vectors a block, or fewer blocks."""
    blocks, _ = shape_for(largest_vectors, multiprocessors)
    return Slots(multiprocessors, max(-(-largest_vectors // blocks), MIN_THREADS), rows, generations)


def one_shot_slots(max_bytes: int, world: int, multiprocessors: int) -> Slots:
    """What `one_shot` needs for tensors up to `max_bytes`, or up to where the split kernel takes over."""
    largest = vectors_of(min(max_bytes, SPLIT_ABOVE_BYTES))
    return slots_for(largest, multiprocessors, world - 1, ONE_SHOT_GENERATIONS)


def split_slots(max_bytes: int, world: int) -> Slots:
    """What the split kernel needs; nothing if no tensor is large enough for it."""
    vectors = vectors_of(max_bytes) if max_bytes > SPLIT_ABOVE_BYTES else 0
    return Slots(1, vectors, world - 1, GENERATIONS)


def split_shape(multiprocessors: int) -> tuple[int, int]:
    """Always the same: all its blocks count their operations alike."""
    return multiprocessors, SPLIT_THREADS


def split_pushers(multiprocessors: int) -> int:
    """How many of its blocks push."""
    return max(1, min(SPLIT_PUSHERS, multiprocessors // 4))


def two_shot_chunk(vectors: int, world: int) -> int:
    """What one rank sums."""
    return -(-vectors // world)


def two_shot_slots(max_bytes: int, world: int, multiprocessors: int) -> Slots:
    """What `two_shot` needs: a row for what is to be summed and one for sums, from each peer."""
    largest = two_shot_chunk(vectors_of(max_bytes), world)
    return slots_for(largest, multiprocessors, 2 * (world - 1), GENERATIONS)


def row_of(size_bytes: int, world: int) -> int:
    """Vectors that go to one rank, of a whole tensor's bytes."""
    return -(-vectors_of(size_bytes) // world)


def move_slots(world: int, multiprocessors: int) -> Slots:
    """What gathering, scattering and exchanging need: a row from each peer."""
    return slots_for(row_of(MOVED_BYTES, world), multiprocessors, world - 1, GENERATIONS)


def norm_shape(vectors: int, row: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks and threads for rows of `row` vectors: whole rows to a block."""
    blocks = max(1, min(multiprocessors, vectors // row))
    return blocks, min(MAX_THREADS, -(-row // WARP) * WARP)


def norm_share(vectors: int, row: int, multiprocessors: int) -> int:
    """Vectors that the fullest of these blocks has."""
    blocks, _ = norm_shape(vectors, row, multiprocessors)
    return -(-(vectors // row) // blocks) * row
