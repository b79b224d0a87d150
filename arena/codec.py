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

import ctypes
import pickle
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from arena.errors import ArenaError, CorruptFrame, EncodeFailed
from arena.layout import HOLD, HOLD_BYTES
from arena.memory import copy_bytes, copy_from

if TYPE_CHECKING:
    import torch

IN_BAND_BYTES: Final = 4096  # a plain buffer up to this size stays in the pickle
_NEW_PICKLER_BYTES: Final = 1 << 20  # after a message this large, the pickler's memo table would stay large
_SPARSE: Final = 2  # a storage span this many times larger than its elements is gathered, not copied
_MERGE_SLACK_BYTES: Final = 1 << 20
_PARALLEL_COPY_BYTES: Final = 16 << 20
_MAX_BUFFERS: Final = 1 << 20
_ALIGN: Final = 64

_TABLE: Final = struct.Struct("QQQ")  # buffers, bytes of item specs, bytes of pickle
_HOLD: Final = struct.Struct(HOLD)
_IN_PAYLOAD: Final = 0  # as segment number of a table entry: the buffer lies in the payload itself

HoldWords = tuple[int, int, int, int, int]


# ── what a message consists of ───────────────────────────────────────────────────────────────────
class Source:
    """Bytes to be moved, from a plain buffer."""

    __slots__ = ("_buffer", "nbytes")

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.nbytes = buffer.nbytes

    @property
    def address(self) -> int | None:
        """Where a tensor's bytes lie, if they can be referred to in place."""
        return None

    def write_to(self, target: memoryview) -> None:
        """The one copy."""
        copy_bytes(target, self._buffer)

    def piece(self) -> memoryview:
        """The bytes in one piece, for a payload that is cut up."""
        return self._buffer


class TensorSource(Source):
    """Bytes to be moved, from a tensor's storage: a span of it, or one tensor's elements gathered."""

    __slots__ = ("_start", "_tensor")

    def __init__(self, tensor: torch.Tensor, nbytes: int, *, start: int | None) -> None:
        self._tensor = tensor
        self._start = start  # first byte of the span in the tensor's storage; None: gather the elements
        self.nbytes = nbytes

    @property
    def address(self) -> int | None:
        """Where the span lies; None for elements that are gathered."""
        return None if self._start is None else self._tensor.untyped_storage().data_ptr() + self._start

    def write_to(self, target: memoryview) -> None:
        """The one copy: without the GIL, resolving strides and conj and neg bits, multi-threaded where that helps.

        It does not below some MiB: waking torch's threads then takes longer than the copy, and where the cores are
        busy, up to milliseconds longer (7.7 ms instead of 0.1 for 200 KB on two cores).
        """
        import torch

        address = self.address
        if address is not None and self.nbytes < _PARALLEL_COPY_BYTES:
            copy_from(target, address)
            return
        source = self._tensor.detach() if self._start is None else self._span()
        flat = torch.frombuffer(target, dtype=source.dtype, count=source.numel())
        flat.view(source.shape).copy_(source)

    def piece(self) -> memoryview:
        """The bytes in one piece; gathers first where they are spread."""
        import torch

        if self._start is None:
            flat = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, device="cpu")
            flat.copy_(self._tensor.detach())
        else:
            flat = self._span()
        array: Any = (ctypes.c_ubyte * self.nbytes).from_address(flat.data_ptr())
        array.tensor = flat  # the bytes live as long as the piece
        return memoryview(array).cast("B")

    def _span(self) -> torch.Tensor:
        import torch

        start = self._start or 0
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.set_(self._tensor.untyped_storage(), start, (self.nbytes,), (1,))


Spec = tuple[str, int, tuple[int, ...], tuple[int, ...], bool, bool]
"""How a placeholder's tensor lies in its buffer: dtype, offset in elements, shape, stride, requires_grad, Parameter."""


class Message:
    """An encoded object: a pickle in pieces, the buffers it refers to, and what its placeholders stand for."""

    __slots__ = ("fallbacks", "pieces", "sources", "specs")

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces
        self.sources: list[Source] = []
        self.specs: list[tuple[int, Spec | None]] = []  # buffer, and None for the buffer itself
        self.fallbacks = 0

    @property
    def pickle_bytes(self) -> int:
        """Length of the pickle."""
        return sum(len(piece) for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """All bytes that must be moved."""
        return self.pickle_bytes + sum(source.nbytes for source in self.sources)


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
        import torch

        plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
        if (
            not plain
            or tensor.layout is not torch.strided
            or tensor.device.type != "cpu"
            or tensor.is_quantized
            or tensor.__dict__
        ):
            self._items.append(None)
            return NotImplemented
        self._awaiting = tensor  # the pickler reaches the placeholder's buffer next
        return _same, (pickle.PickleBuffer(bytearray()),)

    def _message(self) -> Message:
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
        _lay_out_tensors(message, tensors)
        return message


class _Placed(NamedTuple):
    """A tensor, the number of its placeholder, and the bytes of its storage that it spans."""

    number: int
    tensor: torch.Tensor
    start: int
    end: int


def _lay_out_tensors(message: Message, tensors: list[tuple[int, torch.Tensor]]) -> None:
    """Decide which bytes travel for each tensor, and where in them it lies."""
    by_storage: dict[int, list[_Placed]] = {}
    for index, tensor in tensors:
        if tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
            _gather(message, index, tensor)
        else:
            placed = _Placed(index, tensor, *_span(tensor))
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(placed)
    for group in by_storage.values():
        if len(group) == 1 and _is_sparse(group[0]):
            _gather(message, group[0].number, group[0].tensor)
        else:
            for cluster in _clusters(group):
                _share(message, cluster)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last-plus-one byte of a non-empty tensor in its storage."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * size


def _is_sparse(placed: _Placed) -> bool:
    return placed.end - placed.start > _SPARSE * placed.tensor.numel() * placed.tensor.element_size()


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
    start = cluster[0].start
    start -= start % 16  # every member must stay aligned to its element size
    end = max(placed.end for placed in cluster)
    for placed in cluster:
        tensor = placed.tensor
        offset = (placed.start - start) // tensor.element_size()
        message.specs[placed.number] = (len(message.sources), _spec(tensor, offset, tuple(tensor.stride())))
    # One address may have several storages, of several lengths: two tensors over one numpy array.
    longest = cluster[0].tensor
    if len(cluster) > 1:
        longest = max((placed.tensor for placed in cluster), key=lambda tensor: tensor.untyped_storage().nbytes())
    message.sources.append(TensorSource(longest, end - start, start=start))


def _gather(message: Message, index: int, tensor: torch.Tensor) -> None:
    """One buffer for one tensor's elements, packed."""
    stride, step = [], 1
    for n in reversed(tensor.shape):
        stride.append(step)
        step *= max(n, 1)
    message.specs[index] = (len(message.sources), _spec(tensor, 0, tuple(reversed(stride))))
    message.sources.append(TensorSource(tensor, tensor.numel() * tensor.element_size(), start=None))


def _spec(tensor: torch.Tensor, offset: int, stride: tuple[int, ...]) -> Spec:
    parameter = type(tensor).__name__ == "Parameter"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype, offset, tuple(tensor.shape), stride, tensor.requires_grad, parameter


# ── the payload ──────────────────────────────────────────────────────────────────────────────────
def build_payload(message: Message, placed: Sequence[HoldWords | None]) -> list[memoryview]:
    """The payload in pieces: table, specs, then the buffers that got no block, then the pickle.

    Args:
        message: the message.
        placed: for each source, the hold that carries it, or None if it rides in the payload.
    """
    specs = pickle.dumps(message.specs, 5) if message.specs else b""
    head = _TABLE.size + len(message.sources) * HOLD_BYTES + len(specs)
    at = _round_up(head)
    entries, pieces = [], []
    for source, hold in zip(message.sources, placed, strict=True):
        if hold is not None:
            entries.append(_HOLD.pack(*hold))
            continue
        entries.append(_HOLD.pack(_IN_PAYLOAD, at, source.nbytes, 0, 0))
        padded = _round_up(source.nbytes)
        pieces += [source.piece(), memoryview(bytes(padded - source.nbytes))]
        at += padded
    table = _TABLE.pack(len(message.sources), len(specs), message.pickle_bytes) + b"".join(entries) + specs
    front = memoryview(table + bytes(_round_up(head) - head))
    return [piece for piece in (front, *pieces, *map(_as_bytes, message.pieces)) if piece.nbytes]


def _as_bytes(piece: Any) -> memoryview:
    view = memoryview(piece)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


# ── decoding ─────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Table:
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
            inside = all(segment != _IN_PAYLOAD or at + n <= pickle_at for segment, at, n, _, _ in entries)
            if inside:
                return Table(payload, entries, (specs_at, specs_at + specs_bytes), (pickle_at, total))
    raise CorruptFrame(
        "a frame's buffer table is damaged",
        expected=f"lengths that fit a payload of {total} bytes",
        remedy="something else wrote into the ring; shut the queue down and start both ends anew",
    )


def decode(table: Table, borrowed: Mapping[HoldWords, memoryview], views: str) -> object:
    """The object.

    Args:
        table: what `read_table` gave. Small buffers are copied out of its payload, unless that is writable: then it is
            the reader's own already.
        borrowed: the bytes of each of its holds, writable.
        views: "readonly", "shared" or "private".
    """
    buffers = [_buffer(table, entry, borrowed, views) for entry in table.entries]
    items = _items(table, buffers, views)
    # torch's own reduction of a sparse tensor leaves it in a list for torch.load to check: it would never die.
    kept: list[Any] = getattr(sys.modules.get("torch._utils"), "_sparse_tensors_to_validate", [])
    before = len(kept)
    try:
        return pickle.loads(table.payload[slice(*table.pickle)], buffers=items)
    finally:
        del kept[before:]


def _buffer(table: Table, entry: HoldWords, borrowed: Mapping[HoldWords, memoryview], views: str) -> memoryview:
    segment, at, nbytes, _, _ = entry
    if segment == _IN_PAYLOAD:
        inside = table.payload[at : at + nbytes]
        return _copied_out(inside) if inside.readonly else inside
    return _copied_out(borrowed[entry]) if views == "private" else borrowed[entry]


def _copied_out(view: memoryview) -> memoryview:
    own = memoryview(bytearray(view.nbytes))
    copy_bytes(own, view)
    return own


def _items(table: Table, buffers: list[memoryview], views: str) -> Iterable[object]:
    start, end = table.specs
    if start == end:
        return ()
    storages: dict[int, Any] = {}
    items: list[object] = []
    for buffer, spec in pickle.loads(table.payload[start:end]):
        if spec is not None:
            items.append(_tensor(buffer, buffers[buffer], spec, storages))
        else:
            borrowed = table.entries[buffer][0] != _IN_PAYLOAD
            items.append(buffers[buffer].toreadonly() if borrowed and views == "readonly" else buffers[buffer])
    return items


def _tensor(buffer: int, view: memoryview, spec: tuple[Any, ...], storages: dict[int, Any]) -> torch.Tensor:
    import torch

    name, offset, shape, stride, requires_grad, parameter = spec
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptFrame("a frame names a dtype that does not exist", found=str(name))
    if buffer not in storages:
        # The device by name, here as everywhere: the caller may have set another default.
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        flat = torch.frombuffer(view, dtype=torch.uint8) if view.nbytes else none
        storages[buffer] = flat.untyped_storage()
    with torch.no_grad():
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storages[buffer], offset, shape, stride)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor
