"""The restricted serializer: plain data, tensors and arrays through msgpack, and never a pickle.

For those who will not unpickle what comes over a network, keys or not: reading it builds values of a closed list of
types, and calls nothing that the bytes name. The list: None, bool, int, float, complex, str, bytes, list, tuple, dict,
dense tensors (Parameters too), numpy arrays and scalars of plain types. An object that is in a message twice arrives as
two equal ones; tensors that share a storage still share it. Whatever else is sent is refused where it is sent.

Tensors and arrays go out of band as with pickle (`arena.codec`), and come as views of the same blocks.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from arena.codec import (
    Encoder,
    HoldWords,
    Message,
    Source,
    Table,
    buffer_of,
    lay_out_tensors,
    tensor_of,
    travels_as_bytes,
    whole_ones,
)
from arena.errors import ArenaError, EncodeFailed
from arena.extras import require

if TYPE_CHECKING:
    import torch

_TUPLE: Final = 1
_BIG_INT: Final = 2
_COMPLEX: Final = 3
_TENSOR: Final = 4
_ARRAY: Final = 5

_NUMBER: Final = struct.Struct("<I")
_PAIR: Final = struct.Struct("<dd")
_PLAIN_DTYPE: Final = re.compile(r"[<>|=]?[biufcSUmM?][0-9]*(\[[0-9A-Za-z]+\])?")
_MAX_DIGITS: Final = 4300  # Python's own limit for reading a number


class RestrictedEncoder(Encoder):
    """What stands in `Encoder`'s place. Every message has several parts, so that no reader takes it for a pickle.

    Raises:
        MissingLibrary: no msgpack.
    """

    __slots__ = ("_building", "_msgpack", "_tensors")

    def __init__(self) -> None:
        super().__init__()
        self._msgpack = require("msgpack")
        self._begin()

    def _begin(self) -> None:
        self._building = Message([])
        self._tensors: list[tuple[int, torch.Tensor]] = []

    def encode(self, obj: object) -> bytes | Message:
        """The object as a message.

        Raises:
            EncodeFailed: something in it is of another type than those above.
        """
        self._begin()
        message = self._building
        try:
            body = self._packed(obj)
            lay_out_tensors(message, self._tensors)
            specs, message.specs = message.specs, []  # these would be pickled
            message.pieces = [self._packed([list(spec) for spec in specs]), body]
            message.pieces.insert(0, _NUMBER.pack(len(message.pieces[0])))
            message.pickle_bytes = sum(map(len, message.pieces))
            return message
        except ArenaError:
            raise
        except Exception as error:
            raise EncodeFailed(
                f"can't encode a {type(obj).__name__} for a queue with serializer='restricted'",
                expected="plain data, tensors and arrays, not too deep",
                found=f"{type(error).__name__}: {error}",
                remedy="convert it, or use serializer='pickle' among hosts that trust each other",
            ) from error
        finally:
            self._begin()

    def _packed(self, obj: object) -> bytes:
        packed: bytes = self._msgpack.packb(obj, default=self._other, strict_types=True)
        return packed

    def _other(self, obj: Any) -> Any:
        """What msgpack has no form for."""
        ext, kind = self._msgpack.ExtType, type(obj)
        if kind is tuple:
            return ext(_TUPLE, self._packed(list(obj)))
        if kind is int and len(digits := str(obj)) <= _MAX_DIGITS:
            return ext(_BIG_INT, digits.encode())
        if kind is complex:
            return ext(_COMPLEX, _PAIR.pack(obj.real, obj.imag))
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None and isinstance(obj, torch.Tensor) and travels_as_bytes(obj):
            self._building.specs.append((0, None))  # its place; filled in once all are known
            self._tensors.append((len(self._building.specs) - 1, obj))
            return ext(_TENSOR, _NUMBER.pack(len(self._building.specs) - 1))
        if numpy is not None and (kind is numpy.ndarray or isinstance(obj, numpy.generic)):
            return ext(_ARRAY, self._array(numpy, obj))
        raise TypeError(f"a {kind.__module__}.{kind.__qualname__} is none of the types that may be sent")

    def _array(self, numpy: Any, obj: Any) -> bytes:
        array = numpy.asarray(obj)
        if not _PLAIN_DTYPE.fullmatch(array.dtype.str):
            raise TypeError(f"an array of {array.dtype} is not one of plain numbers, strings or times")
        shape, order = array.shape, "C"
        if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous:
            array, order = array.T, "F"
        raw = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        self._building.sources.append(Source(memoryview(raw)))
        about = [len(self._building.sources) - 1, array.dtype.str, list(shape), order, isinstance(obj, numpy.generic)]
        return self._packed(about)


def decode(table: Table, borrowed: Mapping[HoldWords, memoryview], views: str) -> object:
    """The object; arguments and meaning as in `arena.codec.decode`."""
    return _Decoder(table, borrowed, views).decode()


def whole_tensors(table: Table) -> set[int]:
    """See `arena.codec.whole_tensors`."""
    msgpack = require("msgpack")

    def plain(kind: int, data: bytes) -> Any:
        if kind != _TUPLE:
            raise ValueError(f"an extension of kind {kind} among the specs")
        return tuple(msgpack.unpackb(data, ext_hook=plain))

    body = table.payload[slice(*table.pickle)]
    start = _NUMBER.size + _NUMBER.unpack_from(body)[0]
    return whole_ones(table, msgpack.unpackb(body[_NUMBER.size : start], ext_hook=plain))


class _Decoder:
    def __init__(self, table: Table, borrowed: Mapping[HoldWords, memoryview], views: str) -> None:
        self._msgpack = require("msgpack")
        self._table, self._views = table, views
        self._buffers = [buffer_of(table, entry, borrowed, views) for entry in table.entries]
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._specs: Any = []

    def decode(self) -> object:
        body = self._table.payload[slice(*self._table.pickle)]
        start = _NUMBER.size + _NUMBER.unpack_from(body)[0]
        self._specs = self._unpacked(body[_NUMBER.size : start])
        return self._unpacked(body[start:])

    def _unpacked(self, packed: memoryview | bytes) -> Any:
        return self._msgpack.unpackb(packed, ext_hook=self._other, strict_map_key=False)

    def _other(self, kind: int, data: bytes) -> Any:
        if kind == _TUPLE:
            return tuple(self._unpacked(data))
        if kind == _BIG_INT and len(data) <= _MAX_DIGITS:
            return int(data)
        if kind == _COMPLEX:
            return complex(*_PAIR.unpack(data))
        if kind == _TENSOR:
            return self._tensor(*_NUMBER.unpack(data))
        if kind == _ARRAY:
            return self._array(*self._unpacked(data))
        raise ValueError(f"an extension of kind {kind}, which nobody sends")

    def _tensor(self, number: int) -> torch.Tensor:
        buffer, (name, offset, shape, stride, requires_grad, parameter) = self._specs[number]
        spec = (str(name), int(offset), tuple(shape), tuple(stride), bool(requires_grad), bool(parameter))
        return tensor_of(buffer, self._buffers[buffer], spec, self._storages)

    def _array(self, buffer: int, dtype: str, shape: list[int], order: str, scalar: bool) -> Any:
        import numpy

        if not _PLAIN_DTYPE.fullmatch(dtype):
            raise ValueError(f"an array of {dtype!r}, which nobody sends")
        view = self._buffers[buffer]
        if self._views == "readonly" and self._table.entries[buffer][0]:
            view = view.toreadonly()
        raw = numpy.frombuffer(view, numpy.uint8) if view.nbytes else numpy.empty(0, numpy.uint8)
        kind = numpy.dtype(dtype)
        flat = raw.view(kind) if kind.itemsize else numpy.empty(tuple(shape), kind).reshape(-1)
        array = flat.reshape(tuple(shape), order="F" if order == "F" else "C")
        return array[()] if scalar else array
