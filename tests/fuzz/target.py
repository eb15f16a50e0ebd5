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

    def make(self, rng: random.Random) -> bytes:
        """An input from the grammar, more or less well-formed."""

    def check(self, data: bytes) -> None:
        """Raises `laws.Broken`; any other error counts as a broken law, too."""

    def spend(self, data: bytes) -> None:
        """Process the input once in small packets, without checking the result."""


def next_input(target: Target, rng: random.Random) -> bytes:
    """An input decided by the state of the random generator."""
    if rng.random() < 0.5:
        data = target.make(rng)
        times = rng.choice((0, 0, 1, 2))
    else:
        data = rng.choice(target.corpus)
        times = rng.randint(1, 4)
    for _ in range(times):
        data = mutated(target, data, rng)
    return data[:LONGEST]


def mutated(target: Target, data: bytes, rng: random.Random) -> bytes:
    """The input cut, doubled, spliced, or with a misplaced word or number of its language."""
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + int(rng.expovariate(1 / 12)))
    kind = rng.randrange(8)
    if kind == 0:
        return data[:start] + data[end:]
    if kind == 1:
        return data[:end] + data[start:end] * rng.choice((1, 2, 30)) + data[end:]
    if kind == 2:
        other = rng.choice(target.corpus)
        return data[:start] + other[rng.randrange(len(other) + 1) :]
    if kind == 3:
        return data[:start] + rng.choice(target.words) + data[start:]
    if kind == 4:
        return data[:start] + rng.choice(target.words) + data[end:]
    if kind == 5:
        return data[:start] + rng.choice(_NUMBERS) + data[end:]
    if kind == 6:
        return data[:start] + rng.choice(_BYTES) + data[start + 1 :]
    return data[:start]


def repeated(data: bytes, start: int, end: int, size: int) -> bytes:
    """The input with its part from start to end repeated until it is about `size` bytes long."""
    part = data[start:end]
    return data[:start] + part * max(1, (size - len(data)) // max(1, len(part))) + data[end:]
