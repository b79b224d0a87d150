"""Mutations of bytes: those that find mistakes in code which trusts a length, an offset, a tag or a shape."""

from __future__ import annotations

import contextlib
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

MAX_BYTES = 1 << 17
NUMBERS = (0, 1, 2, 3, 7, 8, 15, 16, 63, 64, 255, 256, 4095, 4096, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40,
           (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 2, (1 << 64) - 1)  # fmt: skip
TOKENS = (
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'""',
    b"[" * 200,
    b"\xff\xfe",
    b"\x00" * 8,
    b"NaN",
    b"\\ud800",
)

VALUES = (*NUMBERS, -1, True, None, 0.5, 10**30, "", "x", "\ud800", "\0", "a" * 300, "9" * 5000, [], {}, [0], [[]])

_DIGIT = re.compile(rb"[0-9]")

Mutation = Callable[[random.Random, bytearray], None]


def _flip(chance: random.Random, data: bytearray) -> None:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _byte(chance: random.Random, data: bytearray) -> None:
    data[chance.randrange(len(data))] = chance.randrange(256)


def _word(chance: random.Random, data: bytearray) -> None:
    """An aligned word becomes an interesting number, or moves a little."""
    if len(data) >= 8:
        at = chance.randrange(len(data) // 8) * 8
        (old,) = struct.unpack_from("=Q", data, at)
        new = chance.choice(NUMBERS) if chance.random() < 0.6 else old + chance.randint(-9, 9)
        struct.pack_into("=Q", data, at, new % (1 << 64))


def _cut(chance: random.Random, data: bytearray) -> None:
    del data[chance.randrange(len(data)) :]


def _remove(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.randint(1, 16)]


def _insert(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(TOKENS) if chance.random() < 0.5 else chance.randbytes(chance.randint(1, 16))


def _repeat(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data))
    piece = data[at : at + chance.randint(1, 64)]
    data[at:at] = piece * chance.randint(1, 4)


def _digits(chance: random.Random, data: bytearray) -> None:
    """A decimal number in a text becomes another one."""
    found = _DIGIT.search(data, chance.randrange(len(data))) or _DIGIT.search(data)
    if found:
        data[found.start() : found.end()] = str(chance.choice(NUMBERS)).encode()


def _field(chance: random.Random, data: bytearray) -> None:
    """One value somewhere in JSON becomes another: so what is behind the parser gets to see it, too."""
    if data[:1] not in (b"{", b"["):
        return
    with contextlib.suppress(ValueError, RecursionError):
        whole = at = json.loads(data)
        inside: Any = None
        while isinstance(at, dict | list) and at and (inside is None or chance.random() < 0.7):
            inside, key = at, chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
            at = inside[key]
        if inside is not None:
            inside[key] = chance.choice(VALUES)
            data[:] = json.dumps(whole).encode()


IN_PLACE: tuple[Mutation, ...] = (_flip, _byte, _word, _word)
MUTATIONS: tuple[Mutation, ...] = (*IN_PLACE, _word, _cut, _remove, _insert, _repeat, _digits, _field, _field)


def mutated(chance: random.Random, corpus: list[bytes], *, in_place: bool = False) -> bytes:
    """A case: one of the corpus with a few changes; now and then the head of one and the tail of another."""
    data = bytearray(chance.choice(corpus))
    changes = IN_PLACE if in_place and chance.random() < 0.95 else MUTATIONS
    if not in_place and chance.random() < 0.1:
        other = chance.choice(corpus)
        data[chance.randrange(len(data) + 1) :] = other[chance.randrange(len(other) + 1) :]
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        if not data:
            data += b"\0"
        chance.choice(changes)(chance, data)
    return bytes(data[:MAX_BYTES])
