"""A cache of parsed header texts; in its own module because subclasses of dict are not compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

#: Most texts in a cache; a further one clears it.
MAX_ENTRIES = 4096

#: Fields that are never cached.
_SECRET = re.compile(rb"(?im)^(?:(?:proxy-)?authorization|(?:set-)?cookie|x-api-key)[ \t]*:")

Meaning = TypeVar("Meaning")


class ParseCache(dict[bytes, Meaning]):
    """Parsed header texts; a text that is not in the cache is parsed by `parse`.

    A text that is longer than `longest` bytes, or contains a secret, is parsed each time.
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
