"""What a rank brings to an operation, in one word that the others compare."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tag(NamedTuple):
    """From the lowest bit up: 16 bits of a hash of the shape, 6 of the dtype, 2 of the path, and the size in bytes."""

    word: int

    @classmethod
    def of(cls, x: torch.Tensor, path: int) -> Tag:
        """The tag of a tensor on its way through path number `path`."""
        return cls(hash(x.shape) & 0xFFFF | dtype_code(x.dtype) << 16 | path << 22 | x.nbytes << 24)

    def __str__(self) -> str:
        word = self.word
        dtypes = _dtypes()
        code = (word >> 16) & 63
        name = str(dtypes[code]).removeprefix("torch.") if code < len(dtypes) else "unknown"
        return f"{word >> 24} bytes of {name} (shape hash {word & 0xFFFF:04x}, path {(word >> 22) & 3})"


_codes: dict[torch.dtype, int] = {}


def _dtypes() -> list[torch.dtype]:
    return sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)[:64]


def dtype_code(dtype: torch.dtype) -> int:
    """A small number for a dtype, the same on every rank of one torch."""
    if not _codes:
        _codes.update({one: code for code, one in enumerate(_dtypes())})
    return _codes.get(dtype, 63)
