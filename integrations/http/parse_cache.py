"""A cache of what header texts mean; its own module because no subclass of dict is compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

#: Most texts in a cache; one more empties it.
MAX_ENTRIES = 4096

#: Fields that are never cached.
_SECRET = re.compile(rb"(?im)^(?:(?:proxy-)?authorization|(?:set-)?cookie|x-api-key)[ \t]*:")

Meaning = TypeVar("Meaning")


class ParseCache(dict[bytes, Meaning]):
    """What header texts mean; one that is not here is parsed by `parse`.

    What is longer than `longest` bytes, or holds a secret, is parsed each time.
    """

    def __init__(self, parse: Callable[[bytes], Meaning], longest: int) -> None:
        self._parse = parse
        self._longest = longest

    def __missing__(self, text: bytes) -> Meaning:
        meaning = self._parse(text)
        if len(text) <= self._longest and _SECRET.search(text) is None:
            if len(self) >= MAX_ENTRIES:
                self.clear()
            self[text] = meaning
        return meaning
