"""Who the ranks are, and whether their GPUs can write into each other's memory: the first stage of set-up.

The verdict is a pure function of what all ranks said, so it is the same on each of them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from arena.device import Declined, Place
from arena.probe import Identity, identity

WORLDS: Final = range(2, 9)
OLDEST_CAPABILITY: Final = (8, 0)
"""The first whose instructions round two floats to bfloat16 at once."""


class Card(NamedTuple):
    """One rank's GPU and process, as it tells the others."""

    boot: str
    uuid: str
    capability: tuple[int, int]
    multiprocessors: int
    unreachable: tuple[str, ...]
    """GPUs that this process sees and that this one has no access to."""
    who: Identity


def introduce(place: Place) -> Generator[Card, list[Card], list[Card]]:
    """Tell the others, hear them, and judge.

    Raises:
        Declined: these GPUs can't work together by stores alone.
    """
    cards = yield _card_of(place.device)
    if objection := objection_to(cards):
        raise Declined(*objection)
    return cards


def objection_to(cards: Sequence[Card]) -> tuple[str, str] | None:
    """The reason why not, and the words for it; None if there is none."""
    uuids = [card.uuid for card in cards]
    if len(cards) not in WORLDS:
        return "world_size", f"{len(cards)} ranks, and the kernels are made for {WORLDS[0]} to {WORLDS[-1]}"
    if len({card.boot for card in cards}) > 1:
        return "not_intra_node", "the ranks run on more than one machine"
    for rank, card in enumerate(cards):
        if card.capability < OLDEST_CAPABILITY:
            return "capability", f"rank {rank}'s GPU has compute capability {card.capability[0]}.{card.capability[1]}"
        if uuids.index(card.uuid) < rank:
            return "no_peer_access", f"ranks {uuids.index(card.uuid)} and {rank} are on the same GPU, {card.uuid}"
        for other, uuid in enumerate(uuids):
            if uuid in card.unreachable:
                return "no_peer_access", f"the GPU of rank {rank} has no access to that of rank {other}"
    return None


def _card_of(device: torch.device) -> Card:
    mine = torch.cuda.get_device_properties(device)
    others = [index for index in range(torch.cuda.device_count()) if index != device.index]
    return Card(
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        uuid=str(mine.uuid),
        capability=(mine.major, mine.minor),
        multiprocessors=mine.multi_processor_count,
        unreachable=tuple(
            str(torch.cuda.get_device_properties(index).uuid)
            for index in others
            if not torch.cuda.can_device_access_peer(device, index)
        ),
        who=identity(),
    )
