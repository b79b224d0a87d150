"""What results of the kernels on GPUs are held against: by torch's own words, with every special value."""

import torch

MIB = 1 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
MOVES = ("all_gather", "reduce_scatter", "all_to_all")
NAN = float("nan")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(BITS[x.dtype])


def sum_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """As the kernels promise it: in fp32, in the order of ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def special(dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Every pair of special values, whatever the other ranks shift theirs by."""
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), NAN, 6e4, -6e4]).to(dtype)
    sentinels = torch.full((7,), -1, dtype=BITS[dtype]).view(dtype)  # all bits set, in pairs and alone
    few = torch.cat([values, sentinels])
    return torch.cat([few.roll(shift * (rank + 1)) for shift in range(len(few))])


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, with the sign of zeros; any NaN is like any other."""
    equal = (a == b) & (torch.signbit(a) == torch.signbit(b))
    return bool((equal | (a.isnan() & b.isnan())).all())


def moved(operation: str, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """What a rank gets, by torch's own words."""
    world = len(parts)
    if operation == "all_gather":
        return torch.cat(parts)
    if operation == "all_to_all":
        return torch.cat([part.chunk(world)[rank] for part in parts])
    return sum_of(parts).chunk(world)[rank]
