"""Estimate the tokens of sources without token counts, from texts or seconds of generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_sched.simulators.traces.model import TOKENIZER, TraceError

#: Thinking text of open models runs at 2.8-3.7 characters per token.
CHARS_PER_TOKEN = 3.3

#: For one request in a busy batch: a 32B model on two H100 generates 57 at 32 sequences
#: (DESIGN.md), and fewer at more.
TOKENS_PER_S = 40.0


@dataclass(frozen=True)
class Counting:
    """How to count the tokens of a text: with a tokenizer, or by its characters.

    tokenizer: text -> number of tokens; None counts characters.
    chars_per_token: characters in one token, used without a tokenizer.
    tokens_per_s: generated per second, for sources that have only times.
    """

    tokenizer: Callable[[str], int] | None = None
    chars_per_token: float = CHARS_PER_TOKEN
    tokens_per_s: float = TOKENS_PER_S

    def __call__(self, text: str) -> int:
        """Tokens of the text, at least 1: even an empty output ended with a stop token."""
        if self.tokenizer is not None:
            return max(1, self.tokenizer(text))
        return max(1, math.ceil(len(text) / self.chars_per_token))

    def of_seconds(self, seconds: float) -> int:
        """Tokens generated in this time, at least 1."""
        return max(1, round(seconds * self.tokens_per_s))

    @property
    def label(self) -> str:
        if self.tokenizer is not None:
            return TOKENIZER
        return f"characters / {self.chars_per_token:g}"

    @property
    def label_of_seconds(self) -> str:
        return f"seconds * {self.tokens_per_s:g}"


def with_tokenizer(path: Path, counting: Counting | None = None) -> Counting:
    """Count by a tokenizer.json file, or the one in a model's folder. Needs the extra `tokenizer`.

    Raises TraceError if there is none, or it cannot be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TraceError(
            str(path), "no tokenizer.json", "name that of the model, or the folder that has it"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TraceError(
            str(path), "tokenizers is not installed", "pip install 'rollout-sched[tokenizer]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise TraceError(
            str(file), f"no tokenizer ({error})", "name a tokenizer.json of the tokenizers library"
        ) from error

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    base = counting or Counting()
    return Counting(count, base.chars_per_token, base.tokens_per_s)
