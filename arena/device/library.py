"""What the all-reduces of torch.distributed have in common, whichever library does them."""

from __future__ import annotations

from typing import Final

import torch

ANY_SIZE: Final = 1 << 62
"""Their ceiling: they have none."""

DTYPES: Final = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
"""What they add up as it is."""
