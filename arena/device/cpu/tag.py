"""What a rank brings to an operation, and to which, in one word that the others compare."""

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch

_OPERATIONS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Tag(NamedTuple):
    """From the lowest bit: 16 of a hash of the shape, 6 of the dtype, 2 of the path, 2 of the operation; the size."""

    word: int

    @classmethod
    def of(cls, x: torch.Tensor, path: int, operation: str = "all_reduce") -> Tag:
        """The tag of a tensor on its way through path number `path`."""
        number = path | _OPERATIONS.index(operation) << 2
        return cls(hash(x.shape) & 0xFFFF | dtype_code(x.dtype) << 16 | number << 22 | x.nbytes << 26)

    def __str__(self) -> str:
        word = self.word
        operation = _OPERATIONS[(word >> 24) & 3]
        dtypes = _dtypes()
        code = (word >> 16) & 63
        name = str(dtypes[code]).removeprefix("torch.") if code < len(dtypes) else "unknown"
        brought = f"{word >> 26} bytes of {name} to {operation}"
        return f"{brought} (shape hash {word & 0xFFFF:04x}, path {(word >> 22) & 3})"


_codes: dict[torch.dtype, int] = {}


@cache
def _dtypes() -> list[torch.dtype]:
    return sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)[:64]


def dtype_code(dtype: torch.dtype) -> int:
    """A small number for a dtype, the same on every rank of one torch."""
    if not _codes:
        _codes.update({one: code for code, one in enumerate(_dtypes())})
    return _codes.get(dtype, 63)
