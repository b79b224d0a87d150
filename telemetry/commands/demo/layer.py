"""A layer small enough for a laptop, cut over the workers as a tensor-parallel model is.

Weights are -1, 0 or 1, states are small integers and pixels are multiples of 1/128, so every product and every partial
sum is exact in float32. The tokens therefore depend neither on the number of workers nor on the order in which they are
summed, and one comparison with == proves a run, also one in which a worker died and its share went to the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HIDDEN = 512  # the width of a state, and the number of tokens there are
INNER = 2048
PATCH_VALUES = 3 * 2 * 14 * 14  # colours, frames, and the pixels of one patch
SAMPLED_PATCHES = 64  # one patch in so many is embedded; the digest reads them all
SEED = 20


class Layer:
    """One worker's columns of the first matrix and its rows of the second; part 0 of 1 is the whole layer."""

    def __init__(self, part: int, parts: int) -> None:
        seeded = torch.Generator().manual_seed(SEED)
        self.table = torch.randint(-4, 5, (HIDDEN, HIDDEN), generator=seeded).float()
        self.patch_weights = torch.randint(-1, 2, (PATCH_VALUES, HIDDEN), generator=seeded).float()
        up = torch.randint(-1, 2, (HIDDEN, INNER), generator=seeded).float()
        down = torch.randint(-1, 2, (INNER, HIDDEN), generator=seeded).float()
        share = slice(part * INNER // parts, (part + 1) * INNER // parts)
        self.up = up[:, share].contiguous()
        self.down = down[share].contiguous()

    def prompt_state(self, prompt: Sequence[int], picture: Tensor | None) -> Tensor:
        """Return the state from which a request's first token comes; `picture` is what `embed_picture` made."""
        total = self.table[torch.tensor(prompt)].sum(0)
        return _fold(total if picture is None else total + picture)

    def token_state(self, token: int, position: int) -> Tensor:
        """Return the state from which the token after this one comes."""
        return self.table[(token + position) % HIDDEN]

    def embed_picture(self, pixels: Tensor) -> Tensor:
        """Reduce a picture to one state. Its first patch is left out: that one carries the stamp of the step."""
        embedded = pixels[1::SAMPLED_PATCHES] @ self.patch_weights
        return _fold((embedded * 128).sum(0, dtype=torch.float64))

    def partial_sum(self, states: Tensor) -> Tensor:
        """Return this part's share of the output; the shares of all the parts add up to it."""
        return torch.relu(states @ self.up) @ self.down


def sample(output: Tensor) -> list[int]:
    """Return the greedy token of each row."""
    chosen: list[int] = output.argmax(1).tolist()
    return chosen


def digest(pixels: Tensor) -> Tensor:
    """Reduce every byte of a picture to one 64-bit word that also sees patches in the wrong order."""
    return _weighted_sum(pixels, first_row=0)


def digest_but_first(pixels: Tensor) -> Tensor:
    """Return what the digest is without the first patch; adding the first patch's own digest completes it."""
    return _weighted_sum(pixels[1:], first_row=1)


def _weighted_sum(pixels: Tensor, *, first_row: int) -> Tensor:
    row_sums = pixels.view(torch.int64).sum(1)  # integers wrap, so the order of adding can't matter
    weights = torch.arange(first_row, first_row + len(pixels)) * 2 + 1
    return (row_sums * weights).sum()


def _fold(total: Tensor) -> Tensor:
    """Bring a sum of integers back into the range of a state, -4 to 4."""
    return (torch.remainder(total, 9) - 4).float()
