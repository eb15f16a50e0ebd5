"""What texts that come again and again mean, read once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

#: Texts remembered by each reader; all are forgotten at once when there are too many.
MAX_ENTRIES = 4096

#: Fields that are read anew each time.
_SECRET = re.compile(rb"(?im)^(?:(?:proxy-)?authorization|(?:set-)?cookie|x-api-key)[ \t]*:")

_Read = TypeVar("_Read")


class ParseCache(dict[bytes, _Read]):
    """The meaning of header texts; those that were never seen are read by `read`.

    What is longer than `longest` bytes, or holds a secret, is not kept.
    """

    def __init__(self, read: Callable[[bytes], _Read], longest: int) -> None:
        self._read = read
        self._longest = longest

    def __missing__(self, text: bytes) -> _Read:
        meaning = self._read(text)
        if len(text) <= self._longest and _SECRET.search(text) is None:
            if len(self) >= MAX_ENTRIES:
                self.clear()
            self[text] = meaning
        return meaning
