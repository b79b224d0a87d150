"""The oracle: the whole layer on one processor has to give the tokens that the workers gave together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from telemetry.commands.demo.layer import Layer, sample
from telemetry.commands.demo.pictures import Picture
from telemetry.commands.demo.scheduler import Tracked


def wrong_tokens(served: Sequence[Tracked]) -> list[str]:
    """Name every request whose tokens differ from those of the whole layer, and where that begins."""
    with _one_thread():
        return _wrong_tokens(served)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The sums are small; on a busy machine, threads that wait for each other would take seconds over them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _wrong_tokens(served: Sequence[Tracked]) -> list[str]:
    layer = Layer(0, 1)
    embedded: dict[Picture, Tensor] = {}
    states = []
    for tracked in served:
        picture = tracked.request.picture
        if picture and picture not in embedded:
            embedded[picture] = layer.embed_picture(picture.pixels)
        states.append(layer.prompt_state(tracked.request.prompt, embedded[picture] if picture else None))
    wrong: dict[int, str] = {}
    for position in range(max((len(tracked.tokens) for tracked in served), default=0)):
        expected = sample(layer.partial_sum(torch.stack(states)))
        for tracked, token in zip(served, expected, strict=True):
            if position < len(tracked.tokens) and tracked.tokens[position] != token:
                number = tracked.request.number
                wrong.setdefault(number, f"request {number}: token {position} is not the layer's")
        states = [layer.token_state(token, position) for token in expected]
    return list(wrong.values())
