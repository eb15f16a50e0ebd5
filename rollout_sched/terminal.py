"""What people read in a terminal: figures, and text that does nothing there but be read.

Names and reasons come from traces, journals and gateways that others have written. All output of
the commands passes through here, so none of it moves the cursor or sets the terminal's title.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

#: Control characters but tabs and line ends, what reverses the direction of text, and halves of
#: characters, which cannot be encoded.
_ACTIVE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """The text with such characters as escapes, which JSON and TOML read as those characters."""
    return _ACTIVE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _Plain:
    """A standard stream to which text is written as `plain`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return self.stream.write(plain(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self.stream.writelines(map(plain, lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """Within the block, the standard streams are plain."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Plain(stream)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console of rich, which writes escape sequences of its own around plain text."""
    from rich.console import Console  # only some commands need it, and it takes 60 ms

    class PlainConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=plain(segment.text))

    stream = sys.stderr if stderr else sys.stdout
    return PlainConsole(file=getattr(stream, "stream", stream), width=width)


def width() -> int:
    """Of a line: the terminal's, or 100 if the output is not a terminal."""
    found = console()
    return found.width if found.is_terminal else 100


# ------------------------------------------------------------------------------------------
# Figures.


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.1f} k" if value >= 1e4 else f"{value:,.0f}"
