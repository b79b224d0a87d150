"""What the two paths of our own have in common, `one_shot` and `two_shot`, by the kernels in push.cu.

Set-up: `cards` says whether the GPUs can reach each other, `build` makes the kernels, `inbox` the memory that peers
write to; then every kind of kernel is tried on sums that are known. From then on an operation is one launch, with
nothing on the host but the choice of a shape.

A peer that dies while a kernel waits for it is seen by `watch`, which sets a word that the kernel looks at. The kernel
ends, with NaN where something was missing, and the next call on this path says why.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, Final

import torch

from arena.device import Declined, Place, SetUp
from arena.device.cuda import build, driver, shapes
from arena.device.cuda import cards as who
from arena.device.cuda import inbox as inboxes
from arena.device.cuda.cards import Card
from arena.device.cuda.inbox import Inbox
from arena.device.cuda.shapes import VECTOR_BYTES, Slots
from arena.device.cuda.streams import StreamOrder
from arena.device.cuda.watch import Watch
from arena.errors import CommunicatorClosed, PeerDied

DTYPES: Final = {torch.float32: "Float32", torch.float16: "Float16", torch.bfloat16: "BFloat16"}
KERNELS: Final = (
    "one_shot",
    "one_shot_split",
    "one_shot_rms_norm",
    "two_shot",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "nothing",
)

_CHECK_S: Final = 5.0
_DRAIN_S: Final = 2.0
KEPT_LAUNCHES: Final = 4096
_STATE_BYTES: Final = 16
_ABORT, _FAILED = 0, 1


class PushPath(ABC):
    """What both have in common. A subclass says which kernel a size takes, and what memory its kernels need."""

    name = ""
    operations: tuple[str, ...] = ("all_reduce",)

    def __init__(self, place: Place, cards: list[Card], max_bytes: int) -> None:
        self.max_bytes = min(max_bytes, shapes.LARGEST_BYTES)
        self._place = place
        self._cards = cards
        self._multiprocessors = min(card.multiprocessors for card in cards)  # the same shapes on every rank
        self._functions = load(place.world, place.device, cards[place.rank].capability)
        self._launches: dict[tuple[Any, ...], driver.Launch] = {}
        self._order = StreamOrder(place.device)
        self._words = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._failed = ctypes.c_int32.from_address(self._words.data_ptr() + 4 * _FAILED)
        self._dead: int | None = None
        self._states: list[int] = []
        self._mails: list[Any] = []
        self._inbox: Inbox | None = None
        self._watch: Watch | None = None

    def declines(self, x: torch.Tensor, operation: str = "all_reduce") -> str | None:
        """See `ReducePath`. Adds up any shape, layout and alignment."""
        if operation not in self.operations:
            return "disabled"
        if x.dtype not in DTYPES:
            return "dtype"
        return "too_large" if x.nbytes > self.max_bytes else None  # padding takes no more than there is room for

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `ReducePath`. Queued on the current stream.

        Raises:
            PeerDied, CommunicatorClosed: an earlier operation was given up, because a rank is gone.
        """
        if self._failed.value:
            self.check()
        stream = self._order.enter()
        size = x.nbytes
        if size % VECTOR_BYTES:
            return self._padded(x)
        x = in_vectors(x)
        out = torch.empty_like(x)
        if size:
            launch = self._launches.get((x.dtype, size)) or self._prepare(x.dtype, size)
            self._queue(launch, stream, x, out)
        return out

    def _queue(self, launch: driver.Launch, stream: int, x: torch.Tensor, out: torch.Tensor) -> None:
        try:
            launch(stream, x.data_ptr(), out.data_ptr())
        except driver.DriverError:  # nothing was queued: another device may be the current one
            with torch.cuda.device(self._place.device):
                launch(stream, x.data_ptr(), out.data_ptr())

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """The kernels take whole vectors; what the rest of the last one adds up to does not matter."""
        vectors = shapes.vectors_of(x.nbytes)
        padded = x.new_empty(vectors * VECTOR_BYTES // x.itemsize)
        count = x.numel()
        padded[:count].view(x.shape).copy_(x)
        return self.all_reduce(padded)[:count].view(x.shape)

    def abort(self) -> None:
        """End the waiting of every kernel, now and from now on. What they lack becomes NaN, and the path is lost."""
        self._words[_ABORT] = 1

    @property
    def lost(self) -> bool:
        """Whether a kernel has given up, in a graph's replay too; looks at the host's memory alone."""
        return bool(self._failed.value)

    def check(self) -> None:
        """See `ReducePath`."""
        if self._failed.value:
            raise self._loss()

    def close(self) -> None:
        """Wait a little for what is under way, give it up if it isn't over by then, and give everything back."""
        if self._inbox is None:
            return
        with torch.cuda.device(self._place.device):
            event = self._order.last_event()
            if event is None or not _over_within(event, _DRAIN_S):
                self.abort()
            self._give_back()

    # ── how it comes to be ───────────────────────────────────────────────────────────────────────
    def connect(self) -> Generator[object, list[Any], None]:
        """Get memory and try it out, together with the others."""
        try:
            kinds = self._slots()
            self._inbox = yield from inboxes.exchange(self._place, sum(slots.size_bytes for slots in kinds))
            self._mails = list(self._address(kinds, self._inbox))
            peers = {rank: card.who for rank, card in enumerate(self._cards) if rank != self._place.rank}
            self._watch = Watch(peers, self._note_death)
            yield "may check"  # from now on a rank may wait for another
            self._check()
            yield "checked"  # nobody goes on, or back, before all are through
        except BaseException:
            self.abort()
            self._give_back()
            raise

    @abstractmethod
    def _slots(self) -> list[Slots]:
        """What each kind of kernel needs that this path uses."""

    @abstractmethod
    def _choose(self, vectors: int) -> tuple[str, int, tuple[int, int]]:
        """The kernel for a size, the number of its `Mail`, and its shape."""

    def _address(self, kinds: list[Slots], inbox: Inbox) -> Iterator[Any]:
        """A `Mail` for each kind of kernel, with its part of the inboxes and states of its own."""
        rank, offset = self._place.rank, 0
        for slots in kinds:
            states = driver.allocate(self._multiprocessors * _STATE_BYTES)
            self._states.append(states)
            driver.fill(states, 0, self._multiprocessors * _STATE_BYTES)
            mail = mail_type(self._place.world)()
            for index, address in enumerate(inbox.peers):
                peer = index + (index >= rank)
                row = rank - (rank > peer)  # where this rank stands among the peers of that one
                mail.outbox[index] = address + offset + row * slots.row * VECTOR_BYTES
            mail.inbox, mail.states, mail.farewell = inbox.address + offset, states, inbox.farewell
            mail.abort = self._words.data_ptr() + 4 * _ABORT
            mail.failed = self._words.data_ptr() + 4 * _FAILED
            mail.rank, mail.capacity, mail.row, mail.generation = rank, slots.capacity, slots.row, slots.generation
            mail.pushers = shapes.split_pushers(self._multiprocessors)
            offset += slots.size_bytes
            yield mail
        driver.synchronize()

    def _check(self) -> None:
        """Sums that are known, of every dtype and through every kernel, more often than there are generations."""
        results = list(self._tries())
        if not _over_within(torch.cuda.current_stream().record_event(), _CHECK_S):
            self.abort()
            raise Declined("setup_failed", f"{self.name}: a sum to try did not end within {_CHECK_S} s")
        if not all(bool(result) for result in results):
            raise Declined("setup_failed", f"{self.name} added up wrong on rank {self._place.rank}")

    def _tries(self) -> Iterator[torch.Tensor]:
        """Whether each was right, once what has been queued is over."""
        sizes = [size // 4 * 4 for size in (20, 1 << 20, self.max_bytes) if size <= self.max_bytes]
        return (self._try(dtype, size, turn) for dtype in DTYPES for size in sizes for turn in range(4))

    def _try(self, dtype: torch.dtype, size: int, turn: int) -> torch.Tensor:
        pattern = torch.arange(size // dtype.itemsize, device=self._place.device, dtype=torch.int32) * 7 % 13 + turn
        x = (pattern + self._place.rank).to(dtype)
        expected = (pattern * self._place.world + sum(range(self._place.world))).to(dtype)
        return (self.all_reduce(x) == expected).all()

    # ── what goes wrong, and how it ends ─────────────────────────────────────────────────────────
    def _prepare(self, dtype: torch.dtype, size: int) -> driver.Launch:
        self._make_room()
        vectors = shapes.vectors_of(size)
        kernel, mail, shape = self._choose(vectors)
        launch = self._launches[dtype, size] = self._made(kernel, dtype, shape, vectors, self._mails[mail])
        return launch

    def _make_room(self) -> None:
        if len(self._launches) >= KEPT_LAUNCHES:
            self._launches.clear()

    def _made(self, kernel: str, dtype: torch.dtype, shape: tuple[int, int], vectors: int, mail: Any) -> driver.Launch:
        early = self._cards[self._place.rank].capability >= (9, 0)
        return driver.Launch(self._functions[kernel, dtype], shape, vectors, mail, early=early)

    def _note_death(self, rank: int) -> None:
        self._dead = rank
        self.abort()

    def _loss(self) -> Exception:
        if self._dead is None:
            return CommunicatorClosed(
                "an all-reduce was given up half-way",
                expected="every rank to take part until all have closed",
                found="a rank that closed, or gave up, before",
                remedy="results since then may be NaN: make another communicator",
            )
        pid = self._cards[self._dead].who.pid
        return PeerDied(
            f"rank {self._dead} died before it took part in an all-reduce",
            rank=self._dead,
            pid=pid,
            expected="all ranks alive",
            remedy="results since then may be NaN: start the ranks anew",
        )

    def _give_back(self) -> None:
        if self._watch is not None:
            self._watch.close()
        with suppress(driver.DriverError):  # an error of somebody else's kernel must not keep the memory
            driver.synchronize()
        for states in self._states:
            with suppress(driver.DriverError):
                driver.free(states)
        self._states.clear()
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None


def set_up(path_type: Callable[[Place, list[Card], int], PushPath], place: Place, max_bytes: int) -> SetUp:
    """Set up one of the two."""
    cards = yield from who.introduce(place)
    try:
        path = path_type(place, cards, max_bytes)
    except (build.BuildFailed, driver.DriverError) as error:
        raise Declined("setup_failed", str(error)) from None
    yield from path.connect()
    return path


@cache
def mail_type(world: int) -> type[Any]:
    """`Mail` in push.cu for so many ranks."""
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    addresses = [(name, pointer) for name in ("inbox", "states", "farewell", "abort", "failed")]
    numbers = [(name, number) for name in ("rank", "capacity", "row", "generation", "pushers")]
    fields = [("outbox", pointer * (world - 1)), *addresses, *numbers]
    return type("Mail", (ctypes.Structure,), {"_fields_": fields})


@cache
def load(world: int, device: torch.device, capability: tuple[int, int]) -> dict[tuple[str, torch.dtype], int]:
    """The kernels for so many ranks, on this device: by name and dtype."""
    images = build.compile_push(world, capability)
    modules = {dtype: driver.load_module(images[element]) for dtype, element in DTYPES.items()}
    return {
        (kernel, dtype): driver.get_function(module, kernel) for dtype, module in modules.items() for kernel in KERNELS
    }


def in_vectors(x: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernels take it: contiguous, and at an address that is a multiple of a vector's bytes."""
    if x.data_ptr() % VECTOR_BYTES or not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _over_within(event: Any, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > ends:
            return False
        time.sleep(0.0002)
    return True
