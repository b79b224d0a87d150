"""Object <-> message. A tensor becomes a reference to a buffer, never bytes in a pickle.

Pickling runs once, with protocol 5 (PEP 574). Tensors, numpy arrays and other large buffers go out of band:
the pickle holds a placeholder, `Message.items` says what each placeholder stands for, and `Message.sources`
are the bytes to be moved, once, straight to where they will be read.

PEP 574 lets `loads(buffers=...)` yield any object for a placeholder, so a tensor is rebuilt *before* the main
pickle is read and handed in as that object: no thread-local context, no global registry.

Tensors that share a storage keep sharing it: their byte spans are merged into one buffer where they lie close
together. A tensor whose elements are spread thin over its storage is gathered instead, in the one copy.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from arena import copying, filling
from arena.device import Copies, copies_from
from arena.errors import ArenaError, CorruptFrame, DecodeFailed, EncodeFailed, MessageTooLarge
from arena.layout import HOLD, HOLD_BYTES
from arena.memory import copy_bytes, copy_from, view_of

if TYPE_CHECKING:
    import torch

IN_BAND_BYTES: Final = 4096  # a plain buffer up to this size stays in the pickle
_NEW_PICKLER_BYTES: Final = 1 << 20  # after a message this large, the pickler's memo table would stay large
_SPARSE: Final = 2  # a storage span this many times larger than its elements is gathered, not copied
_MERGE_SLACK_BYTES: Final = 1 << 20
_PARALLEL_COPY_BYTES: Final = 16 << 20
_MET: Final = 4  # pieces of ours that torch copies at a time: all its threads have to meet at the end
_MAX_BUFFERS: Final = 1 << 20
_ALIGN: Final = 64
_ELEMENT_BYTES: Final = 16  # a processor may refuse an element at an address that is no multiple of its size

_TABLE: Final = struct.Struct("QQQ")  # buffers, bytes of item specs, bytes of pickle
_HOLD: Final = struct.Struct(HOLD)
TABLE_HEAD_BYTES: Final = _TABLE.size
_IN_PAYLOAD: Final = 0  # as segment number of a table entry: the buffer lies in the payload itself

HoldWords = tuple[int, int, int, int, int]


# ── what a message consists of ───────────────────────────────────────────────────────────────────
class Source:
    """Bytes to be moved, from a plain buffer. `address` is None: only a tensor's bytes may lie in the arena already."""

    __slots__ = ("_buffer", "address", "nbytes")

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.nbytes = buffer.nbytes
        self.address: int | None = None

    @property
    def is_worth_following(self) -> bool:
        """Whether a reader's device gains from copying the first bytes while the last ones are still to come."""
        return False

    def write_to(self, target: memoryview) -> None:
        """The one copy."""
        copy_bytes(target, self._buffer)

    def write_in_order(self, target: memoryview, reached: Callable[[int], None]) -> None:
        """The same, from the first byte to the last; `reached` hears again and again how many are there."""
        for begin, end in copying.pieces(self.nbytes, copying.PIECE_BYTES):
            copy_bytes(target[begin:end], self._buffer[begin:end])
            reached(end)

    def piece(self) -> memoryview:
        """The bytes in one piece, for a payload that is cut up; they live as long as the source."""
        return self._buffer


class TensorSource(Source):
    """Bytes to be moved, from a tensor's storage: a span of it, or one tensor's elements gathered."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor, nbytes: int, *, address: int | None) -> None:
        self._tensor = tensor
        self.nbytes = nbytes
        self.address = address  # of the span, which lies in the tensor's storage; None: gather the elements

    @property
    def is_worth_following(self) -> bool:
        """See `Source.is_worth_following`."""
        return self.address is not None and self.nbytes >= filling.STREAMED_BYTES

    def write_to(self, target: memoryview) -> None:
        """The one copy, without the GIL; torch's, where it has to resolve strides and conj and neg bits.

        By several threads where that helps. It does not below some MiB: waking them then takes longer than the copy,
        and where the cores are busy, up to milliseconds longer (7.7 ms instead of 0.1 for 200 KB on two cores).
        """
        import torch

        if self.address is not None and self.nbytes < _PARALLEL_COPY_BYTES:
            copy_from(target, self.address)
        elif self.address is not None and copying.is_better(torch.get_num_threads()):
            there = torch.frombuffer(target, dtype=torch.uint8)
            copying.copy(there.data_ptr(), self.address, self.nbytes)
        else:
            source = self._tensor.detach() if self.address is None else self._span(self.address)
            flat = torch.frombuffer(target, dtype=source.dtype, count=source.numel())
            flat.view(source.shape).copy_(source)

    def write_in_order(self, target: memoryview, reached: Callable[[int], None]) -> None:
        """See `Source.write_in_order`."""
        if self.address is None or self.nbytes < _PARALLEL_COPY_BYTES:
            self.write_to(target)
            reached(self.nbytes)
            return
        import torch

        there = torch.frombuffer(target, dtype=torch.uint8)
        if copying.is_better(torch.get_num_threads()):
            copying.copy_in_order(there.data_ptr(), self.address, self.nbytes, reached)
            return
        source = self._span(self.address)
        for begin, end in copying.pieces(self.nbytes, _MET * copying.PIECE_BYTES):
            there[begin:end].copy_(source[begin:end])
            reached(end)

    def piece(self) -> memoryview:
        """The bytes in one piece; gathers first where they are spread."""
        import torch

        if self.address is None:
            gathered = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device="cpu")
            self._tensor = gathered.copy_(self._tensor.detach())
            self.address = gathered.data_ptr()
        return view_of(self.address, self.nbytes)

    def _span(self, address: int) -> torch.Tensor:
        import torch

        storage = self._tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.set_(storage, address - storage.data_ptr(), (self.nbytes,), (1,))


class DeviceSource(Source):
    """Bytes to be moved, from a tensor on a device: by its own copy engine, straight to where they will be read."""

    __slots__ = ("_copies", "_kept", "_tensor")

    def __init__(self, tensor: torch.Tensor, copies: Copies) -> None:
        self._tensor = tensor.detach()
        self._copies = copies
        self._kept: torch.Tensor | None = None
        self.nbytes = tensor.numel() * tensor.element_size()
        self.address = None

    @property
    def copies(self) -> Copies:
        """Who copies."""
        return self._copies

    def write_to(self, target: memoryview) -> None:
        """The one copy, after what is queued on the current stream. Done when this returns: readers may look."""
        import torch

        flat = torch.frombuffer(target, dtype=self._tensor.dtype, count=self._tensor.numel())
        self._copies.to_host(self._tensor, flat.view(self._tensor.shape))

    def piece(self) -> memoryview:
        """The bytes in one piece."""
        import torch

        if self._kept is None:
            self._kept = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device="cpu")
            if self.nbytes:
                self._copies.to_host(self._tensor, self._kept)
        return view_of(self._kept.data_ptr(), self.nbytes)


Piece = bytes | memoryview
"""Bytes of a payload. A memoryview is one of bytes, so that its `len` is its length."""

Spec = tuple[str, int, tuple[int, ...], tuple[int, ...], bool, bool]
"""How a placeholder's tensor lies in its buffer: dtype, offset in elements, shape, stride, requires_grad, Parameter."""


class Message:
    """An encoded object: a pickle in pieces, the buffers it refers to, and what its placeholders stand for."""

    __slots__ = ("fallbacks", "pickle_bytes", "pieces", "sources", "specs")

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces
        self.pickle_bytes = sum(map(len, pieces))
        self.sources: list[Source] = []
        self.specs: list[tuple[int, Spec | None]] = []  # buffer, and None for the buffer itself
        self.fallbacks = 0

    @property
    def nbytes(self) -> int:
        """All bytes that must be moved."""
        return self.pickle_bytes + sum([source.nbytes for source in self.sources])


# ── encoding ─────────────────────────────────────────────────────────────────────────────────────
class _Sink:
    """The file a pickler writes to: a list of pieces. One piece, unless the pickle is longer than 64 KiB."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        self.write = write


def _same(item: object) -> object:
    """What a placeholder unpickles to: itself."""
    return item


class _Pickler(pickle.Pickler):
    """A pickler that hands tensors to its encoder."""

    encoder: Encoder

    def reducer_override(self, obj: Any) -> Any:
        """PEP 574's hook; called only for what pickle has no built-in code for."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):
            return self.encoder.reduce_tensor(obj)
        return NotImplemented


class Encoder:
    """Encodes for one endpoint; keeps its pickler, which is worth a microsecond a message."""

    __slots__ = ("_awaiting", "_dump", "_forget", "_items", "_pickler", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[Any] = []
        self._items: list[Any] = []  # what went out of band; None for a tensor that went torch's own way
        self._awaiting: torch.Tensor | None = None
        self._renew()

    def _renew(self) -> None:
        pickler = _Pickler(_Sink(self._pieces.append), 5, buffer_callback=self._on_buffer)
        pickler.encoder = self
        self._pickler = pickler
        self._dump = pickler.dump
        self._forget = pickler.clear_memo

    def encode(self, obj: object) -> bytes | Message:
        """The object as one short pickle, or as a message of several parts.

        Raises:
            EncodeFailed: the object, or something in it, can't be pickled.
        """
        pieces = self._pieces
        if pieces or self._items or self._awaiting is not None:
            self._reset()  # an interrupt struck while the last message was being forgotten
        try:
            self._dump(obj)
            last = pieces.pop()
            if not pieces and not self._items:
                return last  # type: ignore[no-any-return]
            pieces.append(last)
            return self._message()
        except ArenaError:
            raise
        except Exception as error:
            raise EncodeFailed(
                f"can't encode a {type(obj).__name__}",
                expected="an object that pickle protocol 5 takes",
                found=f"{type(error).__name__}: {error}",
                remedy="send plain data, tensors or arrays, or give the type a __reduce__",
            ) from error
        finally:
            self._forget()
            if pieces or self._items or self._awaiting is not None:
                self._reset()

    def _reset(self) -> None:
        """Forget a message of several parts, or one that failed."""
        if sum(map(len, self._pieces)) > _NEW_PICKLER_BYTES:
            self._renew()
        self._pieces.clear()
        self._items.clear()
        self._awaiting = None

    def _on_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        if self._awaiting is not None:
            self._items.append(self._awaiting)
            self._awaiting = None
            return False
        raw = buffer.raw()
        if raw.nbytes <= IN_BAND_BYTES:
            return True
        self._items.append(raw)
        return False

    def reduce_tensor(self, tensor: torch.Tensor) -> Any:
        """A placeholder for a tensor we can lay out ourselves; torch's own reduction for the rest."""
        if not travels_as_bytes(tensor):
            self._items.append(None)
            return NotImplemented
        self._awaiting = tensor  # the pickler reaches the placeholder's buffer next
        return _same, (pickle.PickleBuffer(bytearray()),)

    def _message(self) -> Message:
        if len(self._items) > _MAX_BUFFERS:
            raise MessageTooLarge(
                "a message with too many tensors and buffers",
                expected=f"at most {_MAX_BUFFERS}",
                found=str(len(self._items)),
                remedy="send it in parts, or stack what belongs together",
            )
        message = Message(list(self._pieces))
        tensors: list[tuple[int, torch.Tensor]] = []
        for item in self._items:
            if item is None:
                message.fallbacks += 1
                continue
            message.specs.append((len(message.sources), None))
            if isinstance(item, memoryview):
                message.sources.append(Source(item))
            else:
                tensors.append((len(message.specs) - 1, item))
        lay_out_tensors(message, tensors)
        return message


def travels_as_bytes(tensor: torch.Tensor) -> bool:
    """Whether its bytes, with how they lie, are all there is to it."""
    import torch

    return (
        (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter)
        and tensor.layout is torch.strided
        and (tensor.is_cpu or copies_from(tensor) is not None)
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor._is_zerotensor()  # it has no bytes
        and not tensor.__dict__
    )


class _Placed(NamedTuple):
    """A tensor, the number of its placeholder, the bytes of its storage that it spans, and how many it uses of them."""

    number: int
    tensor: torch.Tensor
    start: int
    end: int
    nbytes: int


def lay_out_tensors(message: Message, tensors: list[tuple[int, torch.Tensor]]) -> None:
    """Decide which bytes travel for each tensor, and where in them it lies."""
    by_storage: dict[int, list[_Placed]] = {}
    for number, tensor in tensors:
        if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
            _gather(message, number, tensor)
        else:
            storage = tensor.untyped_storage().data_ptr() if len(tensors) > 1 else 0
            by_storage.setdefault(storage, []).append(_placed(number, tensor))
    for group in by_storage.values():
        if len(group) == 1 and group[0].end - group[0].start > _SPARSE * group[0].nbytes:
            _gather(message, group[0].number, group[0].tensor)
        else:
            for cluster in _clusters(group):
                _share(message, cluster)


def _placed(number: int, tensor: torch.Tensor) -> _Placed:
    """Where a non-empty tensor lies in its storage."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    nbytes = tensor.numel() * size
    if tensor.is_contiguous():
        end = start + nbytes
    else:
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (reach + 1) * size
    held = tensor.untyped_storage().nbytes()
    if end > held:
        raise EncodeFailed(
            f"a tensor of shape {tuple(tensor.shape)} reaches beyond its storage",
            expected=f"a storage of {end} bytes or more",
            found=f"one of {held}: it was resized, as sharded training does with what is not needed at the moment",
            remedy="send it while its storage is whole",
        )
    return _Placed(number, tensor, start, end, nbytes)


def _clusters(group: list[_Placed]) -> list[list[_Placed]]:
    """Views of one storage that travel in one buffer: those whose spans touch, and near neighbours."""
    if len(group) == 1:
        return [group]
    clusters: list[list[_Placed]] = []
    end = 0
    for placed in sorted(group, key=lambda one: (one.start, one.end)):
        if clusters and placed.start <= end + _MERGE_SLACK_BYTES:
            clusters[-1].append(placed)
            end = max(end, placed.end)
        else:
            clusters.append([placed])
            end = placed.end
    return clusters


def _share(message: Message, cluster: list[_Placed]) -> None:
    """One buffer for the bytes from the first to the last element of a cluster, which is sorted by start."""
    number, first, start, end, _ = cluster[0]
    slack = start % 16  # every member must stay aligned to its element size
    if len(cluster) == 1:
        specs = _spec(first, slack // first.element_size(), first.stride())
        message.specs[number] = (len(message.sources), specs)
        longest = first
    else:
        end = max([placed.end for placed in cluster])
        for placed in cluster:
            tensor = placed.tensor
            offset = (placed.start - start + slack) // tensor.element_size()
            message.specs[placed.number] = (len(message.sources), _spec(tensor, offset, tensor.stride()))
        # One address may have several storages, of several lengths: two tensors over one numpy array.
        longest = max([placed.tensor for placed in cluster], key=lambda tensor: tensor.untyped_storage().nbytes())
    message.sources.append(TensorSource(longest, end - start + slack, address=first.data_ptr() - slack))


def _gather(message: Message, number: int, tensor: torch.Tensor) -> None:
    """One buffer for one tensor's elements, packed."""
    stride, step = [], 1
    for n in reversed(tensor.shape):
        stride.append(step)
        step *= max(n, 1)
    message.specs[number] = (len(message.sources), _spec(tensor, 0, tuple(reversed(stride))))
    copies = copies_from(tensor)
    if copies is not None:
        message.sources.append(DeviceSource(tensor, copies))
    else:
        message.sources.append(TensorSource(tensor, tensor.numel() * tensor.element_size(), address=None))


def _spec(tensor: torch.Tensor, offset: int, stride: tuple[int, ...]) -> Spec:
    parameter = type(tensor).__name__ == "Parameter"
    return _dtype_name(tensor.dtype), offset, tuple(tensor.shape), stride, tensor.requires_grad, parameter


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ── the payload ──────────────────────────────────────────────────────────────────────────────────
def build_payload(message: Message, placed: Sequence[HoldWords | None]) -> list[Piece]:
    """The payload in pieces: table, specs, then the buffers that got no block, then the pickle.

    Args:
        message: the message.
        placed: for each source, the hold that carries it, or None if it rides in the payload.
    """
    specs = pickle.dumps(message.specs, 5) if message.specs else b""
    head = _TABLE.size + len(message.sources) * HOLD_BYTES + len(specs)
    at = _round_up(head)
    entries: list[bytes] = []
    pieces: list[Piece] = []
    for source, hold in zip(message.sources, placed, strict=True):
        if hold is not None:
            entries.append(_HOLD.pack(*hold))
            continue
        entries.append(_HOLD.pack(_IN_PAYLOAD, at, source.nbytes, 0, 0))
        padded = _round_up(source.nbytes)
        pieces += [source.piece(), bytes(padded - source.nbytes)]
        at += padded
    table = _TABLE.pack(len(entries), len(specs), message.pickle_bytes)
    front = b"".join([table, *entries, specs, bytes(_round_up(head) - head)])
    pickled = [piece if type(piece) is bytes else memoryview(piece).cast("B") for piece in message.pieces]
    return [front, *pieces, *pickled]


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────
class Table(NamedTuple):
    """A payload's table: the holds it names, and where the rest lies."""

    payload: memoryview
    entries: list[HoldWords]
    specs: tuple[int, int]
    pickle: tuple[int, int]

    @property
    def holds(self) -> list[HoldWords]:
        """The holds this payload carries."""
        return [entry for entry in self.entries if entry[0] != _IN_PAYLOAD]


def read_table(payload: memoryview) -> Table:
    """Parse and bounds-check a payload.

    Raises:
        CorruptFrame: a length or an offset leads outside it.
    """
    total = payload.nbytes
    if total >= _TABLE.size:
        n_buffers, specs_bytes, pickle_bytes = _TABLE.unpack_from(payload, 0)
        specs_at = _TABLE.size + n_buffers * HOLD_BYTES
        pickle_at = total - pickle_bytes
        if n_buffers <= _MAX_BUFFERS and specs_at + specs_bytes <= pickle_at <= total:
            entries = [_HOLD.unpack_from(payload, _TABLE.size + i * HOLD_BYTES) for i in range(n_buffers)]
            if all([segment != _IN_PAYLOAD or at + n <= pickle_at for segment, at, n, _, _ in entries]):
                return Table(payload, entries, (specs_at, specs_at + specs_bytes), (pickle_at, total))
    raise CorruptFrame(
        "a frame's buffer table is damaged",
        expected=f"lengths that fit a payload of {total} bytes",
        remedy="something else wrote into the ring; shut the queue down and start both ends anew",
    )


def whole_tensors(table: Table) -> set[int]:
    """Which of a table's buffers are one contiguous tensor, no more and no less. Reads no buffer."""
    start, end = table.specs
    return whole_ones(table, pickle.loads(table.payload[start:end]) if end > start else [])


def whole_ones(table: Table, specs: Iterable[tuple[int, Any]]) -> set[int]:
    """The same, with the specs read."""
    import torch

    found = set()
    for buffer, spec in specs:
        if spec is None or not 0 <= buffer < len(table.entries):
            continue
        name, offset, shape, stride, _, _ = spec
        dtype, nbytes = getattr(torch, name, None), table.entries[buffer][2]
        if not isinstance(dtype, torch.dtype) or offset or prod(shape) * dtype.itemsize != nbytes:
            continue
        step = 1
        for n, found_step in zip(reversed(shape), reversed(stride), strict=True):
            if n != 1 and found_step != step:
                break
            step *= n
        else:
            found.add(buffer)
    return found


def table_bytes(front: bytes | bytearray | memoryview) -> int:
    """How many of a payload's first bytes its table takes; at least `TABLE_HEAD_BYTES` of them must be there."""
    n_buffers = _TABLE.unpack_from(front)[0]
    return int(_TABLE.size + min(n_buffers, _MAX_BUFFERS) * HOLD_BYTES)


def holds_in(front: memoryview) -> list[HoldWords]:
    """The holds that a payload names, from its first bytes alone: for whoever passes it on without reading it.

    Raises:
        CorruptFrame: its table does not end there.
    """
    end = table_bytes(front) if front.nbytes >= TABLE_HEAD_BYTES else TABLE_HEAD_BYTES
    if end > front.nbytes:
        raise CorruptFrame("a frame's buffer table is cut", expected=f"{end} bytes", found=str(front.nbytes))
    entries = [_HOLD.unpack_from(front, at) for at in range(_TABLE.size, end, HOLD_BYTES)]
    return [entry for entry in entries if entry[0] != _IN_PAYLOAD]


def decode(table: Table, borrowed: Mapping[HoldWords, memoryview], views: str) -> object:
    """The object.

    Args:
        table: what `read_table` gave. Small buffers are copied out of its payload, unless that is writable: then it is
            the reader's own already.
        borrowed: the bytes of each of its holds, writable.
        views: "readonly", "shared" or "private".
    """
    buffers = [buffer_of(table, entry, borrowed, views) for entry in table.entries]
    items = _items(table, buffers, views)
    # torch's own reduction of a sparse tensor leaves it in a list for torch.load to check: it would never die.
    kept: list[Any] = getattr(sys.modules.get("torch._utils"), "_sparse_tensors_to_validate", [])
    before = len(kept)
    try:
        return pickle.loads(table.payload[slice(*table.pickle)], buffers=items)
    finally:
        del kept[before:]


def buffer_of(table: Table, entry: HoldWords, borrowed: Mapping[HoldWords, memoryview], views: str) -> memoryview:
    """The bytes of one entry, as `views` wants them; see `decode`."""
    segment, at, nbytes, _, _ = entry
    crooked = at % _ELEMENT_BYTES != 0
    if segment == _IN_PAYLOAD:
        inside = table.payload[at : at + nbytes]
        return _copied_out(inside) if inside.readonly or crooked else inside
    return _copied_out(borrowed[entry]) if views == "private" or crooked else borrowed[entry]


def _copied_out(view: memoryview) -> memoryview:
    own = memoryview(bytearray(view.nbytes))
    copy_bytes(own, view)
    return own


def _items(table: Table, buffers: list[memoryview], views: str) -> Iterable[object]:
    start, end = table.specs
    if start == end:
        return ()
    storages: dict[int, torch.UntypedStorage] = {}
    items: list[object] = []
    for buffer, spec in pickle.loads(table.payload[start:end]):
        if spec is not None:
            items.append(tensor_of(buffer, buffers[buffer], spec, storages))
        else:
            borrowed = table.entries[buffer][0] != _IN_PAYLOAD
            items.append(buffers[buffer].toreadonly() if borrowed and views == "readonly" else buffers[buffer])
    return items


def tensor_of(buffer: int, view: memoryview, spec: Spec, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """A tensor over its buffer, whose storage is that of the others over the same; torch checks the bounds.

    Raises:
        CorruptFrame: no such dtype.
    """
    import torch

    name, offset, shape, stride, requires_grad, parameter = spec
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptFrame("a frame names a dtype that does not exist", found=str(name))
    _check_reach(view.nbytes, dtype.itemsize, spec)
    storage = storages.get(buffer)
    if storage is None and view.nbytes and not view.nbytes % dtype.itemsize:
        # The first tensor of a buffer takes it as it is: two calls instead of five.
        tensor = torch.frombuffer(view, dtype=dtype).as_strided_(shape, stride, offset)
        storages[buffer] = tensor.untyped_storage()
    else:
        if storage is None:
            storage = storages[buffer] = _storage(view)
        # The device by name, here as everywhere: the caller may have set another default.
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _check_reach(nbytes: int, itemsize: int, spec: Spec) -> None:
    """Whether every element lies in the buffer, in whole numbers: torch's own check takes what overflows 64 bits."""
    _, offset, shape, stride, _, _ = spec
    reach = offset + sum([(n - 1) * step for n, step in zip(shape, stride, strict=True)])
    if 0 not in shape and not (0 <= reach < nbytes // itemsize and prod(shape) < 1 << 63):
        raise CorruptFrame(
            "a frame's tensor reaches beyond its buffer",
            expected=f"elements of {itemsize} bytes inside {nbytes}",
            found=f"shape {shape}, stride {stride}, offset {offset}",
        )


def _storage(view: memoryview) -> torch.UntypedStorage:
    import torch

    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


def decoder_of(serializer: str) -> Callable[[Table, Mapping[HoldWords, memoryview], str], object]:
    """`decode`, or what stands in its place on a queue without pickles.

    Raises:
        MissingLibrary: that takes a library which is not installed.
    """
    if serializer == "pickle":
        return decode
    from arena.restricted import decode as decode_restricted

    return decode_restricted


def finder_of(serializer: str) -> Callable[[Table], set[int]]:
    """`whole_tensors`, or what stands in its place on a queue without pickles."""
    if serializer == "pickle":
        return whole_tensors
    from arena.restricted import whole_tensors as whole_tensors_restricted

    return whole_tensors_restricted


def decode_failed(queue: str, error: Exception) -> DecodeFailed:
    """The error for a message that can't be made an object of here.

    The frames of `error` hold half-built tensors; their memory goes back now, and not with the traceback.
    """
    traceback.clear_frames(error.__traceback__)
    return DecodeFailed(
        f"a message of queue {queue!r} could not be unpickled",
        expected="types that this process can import and build",
        found=f"{type(error).__name__}: {error}",
        remedy="the message is consumed; make its types importable here",
    )


# ── before the first message ─────────────────────────────────────────────────────────────────────
def rehearse() -> None:
    """Encode and decode a small tensor, so that a first message finds torch's code, and ours, already in memory.

    In a process that has not used torch yet, that is 2 ms of it, and torch's import if need be.
    """
    with contextlib.suppress(ImportError):
        import torch

        message = Encoder().encode(torch.zeros(1, dtype=torch.uint8, device="cpu"))
        assert isinstance(message, Message)
        payload = bytearray().join(build_payload(message, [None] * len(message.sources)))
        decode(read_table(memoryview(payload)), {}, "readonly")
