"""Synthetic tokens: ids that depend on the context alone, like those of a language model.

A response begins with its *name*, an id of its own, drawn from the context (greedy: from nothing
else). Every later token depends on that name and the position in the response. So an interrupted
request continues with the same text on any instance, in any process. A context shows its structure:
the prompt ends at the first name, and a response is in progress if only synthetic ids follow the
last name.

Ids below those of words are left to prompts and observations, whose ids are never in our ranges
unless their vocabulary has more than 262,144 entries. A model with fewer ids than we need has a
`Vocabulary` of its own size; there a prompt may contain ids of ours. It is misread only if it ends
with a name and words: these are taken for a response in progress.

The text of an id is a word, or with `CHARACTERS` some bytes: characters, and parts of characters.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_LOGPROBS = 1 << 62  # no version

#: The smallest vocabulary.
LEAST_SIZE = 64


class Vocabulary(NamedTuple):
    """The ids, all less than `size`: words of responses from `first_word` on, names from
    `first_name` on. Of the ids between words and names only the first is used: it ends the
    reasoning with which a response begins if the model `thinks`. `characters`: a text is UTF-8, and
    an id stands for some of its bytes."""

    size: int = 1 << 31
    first_word: int = 1 << 18
    words: int = 1 << 17
    first_name: int = 1 << 30
    names: int = 1 << 30
    characters: bool = False
    thinks: bool = False

    @classmethod
    def of_size(cls, size: int) -> Vocabulary:
        """The third quarter are words, half of the fourth are names: the ids of chat templates are
        at the very end. Raises ValueError if there are too few."""
        if size < LEAST_SIZE:
            raise ValueError(f"a vocabulary needs at least {LEAST_SIZE} ids, not {size}")
        quarter = size // 4
        return cls(size, 2 * quarter, quarter, 3 * quarter, quarter // 2)

    def are_names(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        return (ids >= self.first_name) & (ids < self.first_name + self.names)

    @property
    def end_of_thought(self) -> int:
        return self.first_word + self.words

    def is_word(self, token: int) -> bool:
        return self.first_word <= token < self.first_word + self.words

    def alike(self, word: int) -> int:
        """Another word, with the same bytes if its text is bytes."""
        step = len(_PIECES) if self.characters else 1
        return self.first_word + (word + step - self.first_word) % (self.words // step * step)

    def are_ours(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each id is a word or a name."""
        return (ids >= self.first_word) & (ids < self.first_name + self.names)


#: As many ids as any model has.
LARGEST = Vocabulary()
CHARACTERS = Vocabulary(characters=True)

#: The bytes of three words in a row: characters of one to three words. The first is without parts.
_GROUPS = (
    (b"a", b"b", b" "),
    (b"b", b"ab", b"a"),
    (b"\xc3", b"\xa9", b"c"),
    (b"\xe2", b"\x82", b"\xac"),
    (b"\xf0\x9f", b"\x98\x80", b"a b"),
    ("é".encode(), b"\xe4\xb8", b"\xad"),
)
_PIECES = tuple(piece for group in _GROUPS for piece in group)
#: The first places of the pieces that give these bytes, one or several of a group.
_RUNS: dict[bytes, range] = {}
for _place in range(len(_PIECES)):
    for _end in range(_place + 1, _place - _place % 3 + 4):
        _RUNS.setdefault(b"".join(_PIECES[_place:_end]), range(_place, _end))
_NAMES = (b"n", b"a", "ü ".encode())
_END_OF_THOUGHT = b"</think>"

Spans = Sequence[tuple[int, int]]
Words = NDArray[np.uint64]


class Context(NamedTuple):
    """The structure of a context.

    digest         of the whole context
    prompt         digest of the tokens before the first response
    prompt_tokens  the number of these tokens
    stream         name of the first response, 0 if there is none
    known_tokens   everything up to the last synthetic token
    name           of the response in progress, 0 if a new one begins
    made_tokens    of the response in progress
    """

    digest: bytes
    prompt: bytes
    prompt_tokens: int
    stream: int = 0
    known_tokens: int = 0
    name: int = 0
    made_tokens: int = 0


def read(token_ids: Sequence[int], vocabulary: Vocabulary = LARGEST) -> Context:
    """One pass over the context. Raises ValueError for values that are not token ids."""
    try:
        ids = np.array(token_ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise ValueError("token ids must be whole numbers") from None
    if ids.ndim != 1 or not len(ids):
        raise ValueError("a context needs at least one token")
    if ids.min() < 0 or ids.max() >= vocabulary.size:
        raise ValueError(f"Token id {ids.max()} is out of vocabulary")
    digest = _digest(ids)
    names = np.flatnonzero(vocabulary.are_names(ids))
    if not len(names):
        return Context(digest, digest, len(ids))
    first, last = int(names[0]), int(names[-1])
    ours = vocabulary.are_ours(ids)
    known = int(np.flatnonzero(ours)[-1]) + 1
    under_way = bool(ours[last:].all())
    return Context(
        digest,
        _digest(ids[:first]),
        first,
        int(ids[first]),
        known,
        int(ids[last]) if under_way else 0,
        len(ids) - last if under_way else 0,
    )


def name(context: Context, draw: str = "", vocabulary: Vocabulary = LARGEST) -> int:
    """The name of a new response to this context; another `draw` gives another response."""
    digest = blake2b(context.digest + draw.encode(), digest_size=8).digest()
    return vocabulary.first_name + int.from_bytes(digest, "little") % vocabulary.names


def tokens(
    response: int,
    start: int,
    spans: Spans,
    vocabulary: Vocabulary = LARGEST,
) -> list[int]:
    """Ids of a response from its token `start` on: (version, tokens) in order. Another version
    gives another text except for the name."""
    ids: list[int] = []
    for version, count in spans:
        ids += words(response, start + len(ids), count, version, vocabulary)
    if ids and not start:
        ids[0] = response
    return ids


def words(numbers: int, start: int, count: int, version: int, vocabulary: Vocabulary) -> list[int]:
    """The words that random `numbers` give at the places from `start` on."""
    if not vocabulary.characters:
        places = (_mixed(numbers, start, count, version) >> np.uint64(40)) % np.uint64(
            vocabulary.words
        )
        return (vocabulary.first_word + places).tolist()  # type: ignore[no-any-return]
    first, last = start // 3, (start + count + 2) // 3
    groups = _mixed(numbers, first, last - first, version) >> np.uint64(40)
    if not first and last:
        groups[0] -= groups[0] % len(_GROUPS)  # no character begins with the name
    alike = np.uint64(vocabulary.words // len(_PIECES))
    rest, group = np.divmod(groups, np.uint64(len(_GROUPS)))
    chosen = group * np.uint64(3) + rest % alike * np.uint64(len(_PIECES))
    ids = np.repeat(chosen, 3) + np.tile(np.arange(3, dtype=np.uint64), len(chosen))
    ours = vocabulary.first_word + ids[start - 3 * first :][:count]
    return ours.tolist()  # type: ignore[no-any-return]


def logprobs(response: int, start: int, count: int) -> list[float]:
    """One for each of the tokens, between -4 and 0."""
    words = _mixed(response, start, count, _LOGPROBS)
    return [word / -1024 for word in (words >> np.uint64(52)).tolist()]


def encode(text: str, vocabulary: Vocabulary = LARGEST) -> list[int]:
    """One id per word: "w623" is 623, any other gets an id below our words' from its spelling. Or
    one id per byte."""
    if vocabulary.characters:
        return list(text.encode())
    return [_word_id(word, vocabulary) for word in text.split()]


def spelled(text: str, vocabulary: Vocabulary = LARGEST) -> list[int]:
    """The words of responses with which a tokenizer writes a text: the longest run at each place.
    Bytes that no word has are as in `encode`."""
    if not vocabulary.characters:
        return encode(text, vocabulary)
    rest = text.encode()
    ids: list[int] = []
    while rest:
        run = max(filter(rest.startswith, _RUNS), key=len, default=rest[:1])
        ids += [vocabulary.first_word + place for place in _RUNS[run]] if run in _RUNS else run
        rest = rest[len(run) :]
    return ids


def decode(token_ids: Sequence[int], vocabulary: Vocabulary = LARGEST) -> str:
    """`encode` gives the ids of words back. Bytes that are no character become U+FFFD."""
    if vocabulary.characters:
        return b"".join([_bytes(token, vocabulary) for token in token_ids]).decode(errors="replace")
    return "".join([f"w{token} " for token in token_ids])


def _bytes(token: int, vocabulary: Vocabulary) -> bytes:
    if token < 256:
        return bytes((token,))
    if token >= vocabulary.first_name:
        return _NAMES[token % len(_NAMES)]
    if token == vocabulary.end_of_thought:
        return _END_OF_THOUGHT
    if token < vocabulary.first_word:
        return b"?"
    return _PIECES[(token - vocabulary.first_word) % len(_PIECES)]


def _word_id(word: str, vocabulary: Vocabulary) -> int:
    if word[0] == "w" and word[1:].isdecimal() and (token := int(word[1:])) < vocabulary.size:
        return token
    return zlib.crc32(word.encode()) % vocabulary.first_word


def _digest(ids: NDArray[np.int64]) -> bytes:
    return blake2b(ids.tobytes(), digest_size=16).digest()


def _mixed(response: int, start: int, count: int, version: int) -> Words:
    """Evenly spread 64-bit words: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    origin = (response * 0x9E3779B97F4A7C15 + version * 0xD1342543DE82EF95) % (1 << 64)
    words = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    words = words * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(origin)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
