"""What each operation asks of its operands, beside the right device; the same answer wherever shapes are the same."""

from __future__ import annotations

import torch

from arena.errors import InvalidArgument

SCATTERING = ("reduce_scatter", "all_to_all")
"""Operations that cut their operand into one part a rank."""


def with_rows(x: torch.Tensor, operation: str, world: int) -> torch.Tensor:
    """`x` with a first dimension that can be gathered along, or cut into `world` equal parts.

    Raises:
        InvalidArgument: it can't be cut.
    """
    if operation in SCATTERING:
        if x.dim() == 0 or x.shape[0] % world:
            raise InvalidArgument(
                f"{operation} can't cut that into equal parts",
                expected=f"a first dimension that is a multiple of {world}, the number of ranks",
                found=f"a tensor of shape {tuple(x.shape)}",
                remedy="pad it, on every rank alike",
            )
        return x
    return x if x.dim() else x.reshape(1)


def gathered_bytes(x: torch.Tensor, operation: str, world: int) -> int:
    """The size that a plan goes by: of the whole tensor, once gathered or before it is cut."""
    return x.nbytes * world if operation == "all_gather" else x.nbytes


def check_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    """Whether these can be added and normalised.

    Raises:
        InvalidArgument: they can't.
    """
    if not x.is_floating_point() or x.dim() == 0:
        raise _no_norm("a tensor of floats with one dimension at least", x, "x")
    for name, other, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[-1:])):
        if (other.shape, other.dtype, other.device) != (shape, x.dtype, x.device):
            expected = f"{name} of shape {tuple(shape)} and {x.dtype} on {x.device}, as x has it"
            raise _no_norm(expected, other, name)


def _no_norm(expected: str, found: torch.Tensor, name: str) -> InvalidArgument:
    return InvalidArgument(
        "these can't be added up and normalised",
        expected=expected,
        found=f"{name} of shape {tuple(found.shape)} and {found.dtype} on {found.device}",
        remedy="bring x and residual of one shape, and a weight for the last dimension",
    )
