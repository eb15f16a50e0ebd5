"""A fuzz target, and how its inputs are made: by a grammar, or by mutation of a corpus."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

#: Longest input that is made; the growth check (see bounds) repeats a part beyond it.
LONGEST = 8192

_BYTES = [b"\x00", b"\x0b", b"\x7f", b"\x80", b"\xff", b"\xc3\xa9", b"\xed\xa0\x80"]
_NUMBERS = [b"0", b"-1", b"1e999", b"9" * 19, b"9" * 400, b"1.0", b"-0", b"18446744073709551616"]


class Target(Protocol):
    """One part of the program with the laws that it must keep.

    corpus   initial inputs; each is tried unchanged
    words    elements of its language, which mutation inserts
    """

    name: str
    corpus: Sequence[bytes]
    words: Sequence[bytes]

    def make(self, dice: random.Random) -> bytes:
        """An input from the grammar, more or less well-formed."""

    def check(self, data: bytes) -> None:
        """Raises `laws.Broken`; any other error counts as a broken law, too."""

    def spend(self, data: bytes) -> None:
        """Process the input once in small packets, without checking the result."""


def next_input(target: Target, dice: random.Random) -> bytes:
    """An input decided by the state of the random generator."""
    if dice.random() < 0.5:
        data = target.make(dice)
        times = dice.choice((0, 0, 1, 2))
    else:
        data = dice.choice(target.corpus)
        times = dice.randint(1, 4)
    for _ in range(times):
        data = mutated(target, data, dice)
    return data[:LONGEST]


def mutated(target: Target, data: bytes, dice: random.Random) -> bytes:
    """The input cut, doubled, spliced, or with a misplaced word or number of its language."""
    start = dice.randrange(len(data) + 1)
    end = min(len(data), start + int(dice.expovariate(1 / 12)))
    kind = dice.randrange(8)
    if kind == 0:
        return data[:start] + data[end:]
    if kind == 1:
        return data[:end] + data[start:end] * dice.choice((1, 2, 30)) + data[end:]
    if kind == 2:
        other = dice.choice(target.corpus)
        return data[:start] + other[dice.randrange(len(other) + 1) :]
    if kind == 3:
        return data[:start] + dice.choice(target.words) + data[start:]
    if kind == 4:
        return data[:start] + dice.choice(target.words) + data[end:]
    if kind == 5:
        return data[:start] + dice.choice(_NUMBERS) + data[end:]
    if kind == 6:
        return data[:start] + dice.choice(_BYTES) + data[start + 1 :]
    return data[:start]


def repeated(data: bytes, start: int, end: int, size: int) -> bytes:
    """The input with its part from start to end repeated until it is about `size` bytes long."""
    part = data[start:end]
    return data[:start] + part * max(1, (size - len(data)) // max(1, len(part))) + data[end:]
