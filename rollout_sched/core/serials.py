"""Serial numbers: the order in which groups and requests came, which breaks ties."""

from __future__ import annotations


class Serials:
    """Numbers from 1. `last` is the last one given out; a restored run continues from it."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last
