"""RMSNorm after an all-reduce, as every layer of a tensor-parallel transformer has it twice: in torch's operations.

What is added and normalised is vLLM's ``fused_add_rms_norm``. Both results are rounded to the tensors' dtype, the new
residual before it is normalised; everything between is in fp32 (fp64 for fp64). The kernel that fuses it onto an
all-reduce rounds at the same places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``residual + x``, and that divided by its root mean square over the last dimension, times `weight`.

    Args:
        x: of any shape.
        residual: of the same shape and dtype.
        weight: one number for each of the last dimension, of the same dtype.
        eps: added to the mean square.

    Returns:
        (normed, new residual), contiguous and new.
    """
    summed = (residual + x).contiguous()
    wide = summed.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), summed


def after(
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two one after the other: what serves where no kernel does both."""
    return add_rms_norm(all_reduce(x), residual, weight, eps)
