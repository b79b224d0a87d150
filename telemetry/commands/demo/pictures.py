"""The tensors that make an engine's broadcast heavy: pictures cut into patches, as a vision model reads them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from telemetry.commands.demo.layer import PATCH_VALUES, digest, digest_but_first
from telemetry.commands.demo.options import Refused

SYNTHETIC_MB = (23, 96, 213)
PATCH = 14  # pixels along an edge
MERGE = 2 * PATCH  # a model merges two by two patches, so both edges are multiples of this
MAX_PIXELS = 16384 * MERGE * MERGE  # where dynamic resolution stops
MAX_PHOTOGRAPH_BYTES = 1 << 30  # what all the photographs together may take in the engine's memory


class Picture:
    """Patches of one picture. Each step writes its number into them, so that old bytes can't pass for new ones."""

    def __init__(self, kind: str, pixels: Tensor) -> None:
        self.kind = kind
        self.pixels = pixels
        self._rest = digest_but_first(pixels)

    @property
    def nbytes(self) -> int:
        """Bytes of the patches."""
        return self.pixels.numel() * self.pixels.element_size()

    @property
    def tokens(self) -> int:
        """What the picture costs of a step's token budget: four patches merge into one token."""
        return len(self.pixels) // 4

    def stamp(self, step: int) -> int:
        """Write the step's number into the first patch; return the digest that a worker has to find."""
        self.pixels[0, 0] = float(step)
        return int(self._rest + digest(self.pixels[:1]))


def synthetic(megabytes: int) -> Picture:
    """Make noise of the given size in memory, in the values that 8-bit colours have."""
    seeded = torch.Generator().manual_seed(megabytes)
    pixels = torch.empty(megabytes * 1_000_000 // (PATCH_VALUES * 4), PATCH_VALUES)
    pixels.random_(0, 256, generator=seeded)
    return Picture(f"{megabytes} MB", _normalise(pixels))


def photographs(directory: Path, complain: Callable[[str], None]) -> list[Picture]:
    """Decode the photographs of a directory in the order of their names, until they fill the memory they may take."""
    pictures: list[Picture] = []
    taken = 0
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        try:
            picture = Picture("photograph", patches(path))
        except (OSError, ValueError, SyntaxError, _too_large()) as error:
            complain(f"skipped {path.name}: {error}")
            continue
        taken += picture.nbytes
        if pictures and taken > MAX_PHOTOGRAPH_BYTES:
            complain(f"stopped before {path.name}: the first {len(pictures)} photographs fill the memory for them")
            break
        pictures.append(picture)
    if not pictures:
        raise Refused(f"--images: {directory} holds no photograph that can be decoded")
    return pictures


def patches(path: Path) -> Tensor:
    """Decode one photograph and cut it into patches: one row for each, colour by colour, the frame twice."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # large photographs are what this is for
        with Image.open(path) as opened:
            image = opened.convert("RGB")
    image = image.resize(dynamic_resolution(*image.size))
    down, across = image.height // PATCH, image.width // PATCH
    colours = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    tiles = colours.view(down, PATCH, across, PATCH, 3).permute(0, 2, 4, 1, 3)
    frames = tiles.unsqueeze(3).expand(down, across, 3, 2, PATCH, PATCH)  # a photograph is a film that stands still
    return _normalise(frames.reshape(down * across, PATCH_VALUES).float())


def dynamic_resolution(width: int, height: int) -> tuple[int, int]:
    """Return the nearest size a vision model takes: edges in whole merged patches, and not too many of them."""
    scale = min(1.0, (MAX_PIXELS / (width * height)) ** 0.5)
    return _whole_patches(width * scale), _whole_patches(height * scale)


def _whole_patches(edge: float) -> int:
    return max(1, round(edge / MERGE)) * MERGE


def _normalise(pixels: Tensor) -> Tensor:
    """Bring 0…255 to -1…1 in steps of 1/128, which float32 adds exactly."""
    return pixels.div_(128).sub_(1)


def _too_large() -> type[Exception]:
    from PIL import Image

    return Image.DecompressionBombError
