"""Ways to damage a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

REACH = 200
"""How far from a mark the things that it marks may lie."""


def mutated(content: bytes, dice: random.Random, marks: Sequence[bytes] = ()) -> bytes:
    """``content`` with some damage: to its metadata, which ``marks`` begin, or anywhere."""
    found = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        dice.choice(_KINDS)(found, _place(found, dice, marks), dice)
    return bytes(found)


def _place(content: bytearray, dice: random.Random, marks: Sequence[bytes]) -> int:
    """Half of all places lie behind a mark, a quarter near the beginning."""
    size = max(1, len(content))
    near = [at for mark in marks for at in _occurrences(content, mark)]
    if near and dice.random() < 0.5:
        return min(size - 1, dice.choice(near) + dice.randrange(REACH))
    return dice.randrange(min(size, 2048) if dice.random() < 0.5 else size)


def _occurrences(content: bytearray, mark: bytes) -> list[int]:
    found: list[int] = []
    at = content.find(mark)
    while at >= 0 and len(found) < 100:
        found.append(at)
        at = content.find(mark, at + 1)
    return found


def _flip(content: bytearray, place: int, dice: random.Random) -> None:
    if place < len(content):
        content[place] ^= 1 << dice.randrange(8)


def _overwrite(content: bytearray, place: int, dice: random.Random) -> None:
    content[place : place + 1] = dice.randbytes(1)


def _zero(content: bytearray, place: int, dice: random.Random) -> None:
    count = min(dice.choice([1, 4, 8, 64, 512, 4096]), len(content) - place)
    content[place : place + count] = bytes(max(0, count))


def _extreme(content: bytearray, place: int, dice: random.Random) -> None:
    """A number of 1 to 8 bytes becomes its largest, the largest signed, or one near."""
    size = dice.choice([1, 2, 4, 8])
    bits = dice.choice([8 * size, 8 * size - 1, 8 * size - 2])
    number = (2**bits - dice.choice([1, 1, 2, 8])) % 256**size
    stored = number.to_bytes(size, "little")[:: dice.choice([1, -1])]
    content[place : place + size] = stored[: max(0, len(content) - place)]


def _truncate(content: bytearray, place: int, dice: random.Random) -> None:
    del content[dice.choice([place, len(content) - dice.randint(1, 64)]) :]


def _duplicate(content: bytearray, place: int, dice: random.Random) -> None:
    """A block from elsewhere lies here too."""
    source, size = dice.randrange(len(content) or 1), dice.choice([4, 8, 64, 512])
    block = content[source : source + size][: len(content) - place]
    content[place : place + len(block)] = block


def _remove(content: bytearray, place: int, dice: random.Random) -> None:
    del content[place : place + dice.randint(1, 16)]


def _insert(content: bytearray, place: int, dice: random.Random) -> None:
    content[place:place] = dice.randbytes(dice.randint(1, 16))


_KINDS: Sequence[Callable[[bytearray, int, random.Random], None]] = (
    *(_flip, _flip, _flip, _overwrite, _overwrite, _zero, _zero, _extreme, _extreme),
    *(_truncate, _duplicate, _duplicate, _remove, _insert),
)
