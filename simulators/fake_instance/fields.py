"""How an engine applies the fields of a request, as vLLM 0.32 does: per request, not per response.

A request that continues a response is a new one: `min_tokens`, stop strings, grammars, penalties
and seeds begin again, and its text begins after its prompt. The engine applies some fields when it
draws a token (`Sampler`); stop strings, held-back text and unfinished characters belong to the
output (`Detokenizer`, `OutputText`).

All is decided when a request arrives: its tokens do not depend on time. So requests without such
fields cost nothing, and the simulated instance only learns their length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.tokens import Vocabulary

Sampling = Mapping[str, Any]

#: The argument that distinguishes a prompt with media from one with the same ids without them.
MEDIA = "fake_media"

_REPLACEMENT = "\ufffd"


class Limits(msgspec.Struct, frozen=True):
    """The fields that end a response, checked as vLLM's SamplingParams are."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False

    @property
    def strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


#: Fields that change which tokens a response has; without them it depends on its name alone.
_APPLIED = (
    *("stop", "stop_token_ids", "structured_outputs", "response_format"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
)


def limits_of(sampling: Sampling) -> Limits:
    """Raises ValueError."""
    told = {name: sampling[name] for name in Limits.__struct_fields__ if sampling.get(name)}
    limits = msgspec.convert(told, Limits)
    if "" in limits.strings:
        raise ValueError("stop cannot contain an empty string.")
    if not all(word.strip() for word in sampling.get("bad_words") or ()):
        raise ValueError("bad_words entries must tokenize to at least one token.")
    if limits.min_tokens < 0:
        raise ValueError(f"min_tokens must be greater than or equal to 0, got {limits.min_tokens}.")
    return limits


def are_applied(sampling: Sampling) -> bool:
    """Whether the tokens of a request need a `Sampler`."""
    penalty = sampling.get("repetition_penalty")  # 1 changes nothing
    return penalty not in (None, 1) or any(sampling.get(name) for name in _APPLIED)


# ------------------------------------------------------------------------------------------
# Which tokens are drawn.


def draw(sampling: Sampling, attempt: str) -> str:
    """What a new response depends on besides its context; nothing if it is greedy."""
    media = (sampling.get("extra_args") or {}).get(MEDIA, "")
    seed = sampling.get("seed")
    if sampling.get("temperature") == 0:
        return str(media)
    return f"{attempt}{media}" if seed is None else f"seed {seed}{media}"


class Draws(NamedTuple):
    """The random numbers of a request: those of `numbers` from `place` on.

    A greedy one draws by the response alone. A seed begins again with each request. Media change
    every word, and a prompt of ids does not have them.
    """

    numbers: int
    place: int


def draws(sampling: Sampling, name: int, made: int) -> Draws:
    """For a request whose context has `made` tokens of the response `name`."""
    seed = sampling.get("seed") if sampling.get("temperature") != 0 else None
    media = (sampling.get("extra_args") or {}).get(MEDIA)
    if seed is None and media is None:
        return Draws(name, made)
    mixed = blake2b(f"{name} {seed} {media}".encode(), digest_size=7).digest()
    # Its first word has the second number, as the first one gives the name of a new response.
    place = made if seed is None else min(made, 1)
    return Draws(int.from_bytes(mixed, "little"), place)


def constrained(sampling: Sampling, context: bytes) -> str | None:
    """The text of a response with a grammar, from the digest of its context; None without one."""
    grammar = sampling.get("structured_outputs")
    asked = sampling.get("response_format")
    if isinstance(grammar, dict) and grammar.get("choice"):
        choices = grammar["choice"]
        return str(choices[context[0] % len(choices)])
    if grammar or (asked and asked.get("type") != "text"):
        return f'{{"answer": {context[0]}}}'
    return None


class Sampler:
    """Draws the tokens of one request. Raises ValueError.

    `context` has its prompt and the response so far, `fresh` if the response begins.
    """

    def __init__(
        self, sampling: Sampling, context: Sequence[int], vocabulary: Vocabulary, *, fresh: bool
    ) -> None:
        self._limits = limits_of(sampling)
        self._vocabulary = vocabulary
        self._fresh = fresh
        self._penalised = {*context} if sampling.get("repetition_penalty", 1.0) != 1.0 else set()
        self._counts = bool(sampling.get("presence_penalty") or sampling.get("frequency_penalty"))
        self._counts |= bool(self._penalised)
        biases: Mapping[str, float] = sampling.get("logit_bias") or {}
        self._penalised |= {int(token) for token, bias in biases.items() if bias < 0}
        allowed = sampling.get("allowed_token_ids") or ()
        self._allowed_words = [token for token in allowed if vocabulary.is_word(token)]
        bad: Sequence[str] = sampling.get("bad_words") or ()
        self._bad_words = [text.spelled(word.lstrip(), vocabulary) for word in bad]
        self._stops = {*(self._limits.stop_token_ids or ())}
        strings = self._limits.strings
        self._output = Detokenizer(self._limits, context, vocabulary) if strings else None

    @property
    def least(self) -> int:
        return self._limits.min_tokens

    def drawn(self, words: Sequence[int]) -> list[int]:
        """The tokens up to the end of the response, if an engine without these fields would draw
        these words."""
        made: list[int] = []
        for word in words:
            token = word if self._fresh and not made else self._instead_of(word, made)
            made.append(token)
            if self._counts:
                self._penalised.add(token)
            stopped = token in self._stops and len(made) > self.least
            found = self._output is not None and self._output.update([token], stopped)
            if stopped or found:
                break
        return made

    def _instead_of(self, word: int, made: Sequence[int]) -> int:
        """As likely as any other, after those that are penalised, would complete a bad word of the
        request's own tokens, or may not end it yet. The name of a response is always allowed."""
        if self._allowed_words and word not in self._allowed_words:
            word = self._allowed_words[word % len(self._allowed_words)]
        banned = {
            bad[-1] for bad in self._bad_words if made[len(made) - len(bad) + 1 :] == bad[:-1]
        }
        if len(made) < self.least:
            banned |= self._stops
        for _ in range(self._vocabulary.words):
            if word not in self._penalised and word not in banned:
                break
            word = self._vocabulary.alike(word)
        return word


# ------------------------------------------------------------------------------------------
# What becomes of the tokens: vLLM's v1/engine/detokenizer.py.

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """The text of a growing list of ids: that of the library tokenizers (`DecodeStream`).

    A character has no text before its last token. It is also true of the prompt: if that ends
    within a character, the first text repeats the prompt (vLLM 48853).
    """

    def __init__(self, decode: Decode, ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = [*ids]
        self._prefix = ""
        self._read = 0  # ids that the prefix stands for

    def step(self, token: int) -> str:
        """The text that this id completes."""
        if not self._prefix and self._ids:
            before = self._decode(self._ids)
            if not before.endswith(_REPLACEMENT):
                self._prefix, self._read = before, len(self._ids)
        self._ids.append(token)
        said = self._decode(self._ids)
        if said.endswith(_REPLACEMENT) or len(said.encode()) <= len(self._prefix.encode()):
            return ""
        if not said.startswith(self._prefix):  # vLLM 17448
            self._ids, self._prefix, self._read = [], "", 0
            return self.step(token)
        new = said[len(self._prefix) :]
        read = len(self._ids) - self._read
        self._ids = self._ids[self._read :]
        self._prefix, self._read = self._decode(self._ids), read
        return new


class Detokenizer:
    """The text of one request, and the search for stop strings in it."""

    def __init__(self, limits: Limits, prompt: Sequence[int], vocabulary: Vocabulary) -> None:
        self._stops = limits.strings
        self._least = limits.min_tokens
        self._included = limits.include_stop_str_in_output
        held = max(map(len, self._stops), default=1) - 1
        self._held = 0 if self._included else held
        self._step: Decode = lambda ids: text.decode(ids, vocabulary)
        if vocabulary.characters:
            stream = TextStream(self._step, prompt)
            self._step = lambda ids: stream.step(ids[0])
        self._tokens = 0
        self._given = 0
        self.text = ""

    def update(self, ids: Sequence[int], stopped: bool) -> str | None:
        """Add ids; returns the stop string that they complete. `stopped`: the last one is a stop
        token, whose text is not part of the output."""
        ends = [len(self.text)]
        skipped = stopped and not self._included
        for token in ids[:-1] if skipped else ids:
            self.text += self._step([token])
            ends.append(len(self.text))
        before, self._tokens = self._tokens, self._tokens + len(ids)
        if not self._stops or self._tokens <= self._least:
            return None
        if skipped:
            ends.append(len(self.text))
        new = len(self.text) - ends[max(self._least - before, 0)]
        if not new:
            return None
        found = [(self.text.find(one, 1 - new - len(one)), one) for one in self._stops]
        match = min(
            [(at + len(one), place) for place, (at, one) in enumerate(found) if at >= 0],
            default=None,
        )
        if match is None:
            return None
        at, stop = found[match[1]]
        self.text = self.text[: at + len(stop) if self._included else at]
        return stop

    def next_text(self, *, finished: bool) -> str:
        """The text since the last call, without what may begin a stop string."""
        end = len(self.text) - (0 if finished else self._held)
        if end <= self._given:
            return ""
        start, self._given = self._given, end
        return self.text[start:end]


class Said(NamedTuple):
    """The text of some tokens; `stop`: the stop string or token that ended it."""

    text: str
    reasoning: str = ""
    stop: str | int | None = None


class OutputText:
    """The text of one choice, chunk by chunk. `prefix` comes first; `parses`: without the
    reasoning."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        vocabulary: Vocabulary,
        *,
        prefix: str = "",
        parses: bool = False,
    ) -> None:
        self._limits = limits_of(sampling)
        self._vocabulary = vocabulary
        self._prefix = prefix
        self.plain = not (
            self._limits.strings or self._limits.stop_token_ids or vocabulary.characters
        )
        self._output = None if self.plain else Detokenizer(self._limits, prompt, vocabulary)
        self._parser = ReasoningParser(vocabulary) if parses and vocabulary.thinks else None
        self._tokens = 0
        self._before: list[int] = []

    def read(self, ids: Sequence[int], finish: str | None) -> Said:
        """The next ids."""
        stop: str | int | None = None
        if self._output is None:
            said = text.decode(ids, self._vocabulary)
        else:
            self._tokens += len(ids)
            stopped = finish == "stop" and self._ends(ids)
            found = self._output.update(ids, stopped)
            if finish == "stop":
                stop = ids[-1] if stopped and found is None else found
            said = self._output.next_text(finished=finish is not None)
        prefix, self._prefix = self._prefix, ""
        if self._parser is None:
            return Said(prefix + said, "", stop)
        reasoning, content = self._parser.read(said)
        return Said(content, reasoning, stop)

    def names(self, ids: Sequence[int]) -> list[str]:
        """The text of each token in log-probs: that of a character at its last token."""
        return [self._name(token) for token in ids]

    def _name(self, token: int) -> str:
        """vLLM's `LogprobsProcessor._correct_decoded_token`."""
        decode = text.decode
        said = decode([token], self._vocabulary)
        if not self._vocabulary.characters:
            return said
        before, self._before = self._before, [*self._before[-3:], token]
        if not said.endswith(_REPLACEMENT):
            return said
        for count in range(1, len(before) + 1):
            context = before[-count:]
            said = decode([*context, token], self._vocabulary)
            if said.endswith(_REPLACEMENT):
                continue
            while context and decode(context[-1:], self._vocabulary).endswith(_REPLACEMENT):
                context.pop()
            return said.removeprefix(decode(context, self._vocabulary))
        return ""

    def _ends(self, ids: Sequence[int]) -> bool:
        stops: Collection[int] = self._limits.stop_token_ids or ()
        return bool(ids) and ids[-1] in stops and self._tokens > self._limits.min_tokens


class ReasoningParser:
    """Divides the text of a chat's choice: what precedes the end of thought, and the rest."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._mark = text.decode([vocabulary.end_of_thought], vocabulary)
        self._said = ""
        self._ended = False

    def read(self, new: str) -> tuple[str, str]:
        """(reasoning, content) of the next text."""
        if self._ended:
            return "", new
        given, self._said = len(self._said), self._said + new
        reasoning, mark, content = self._said.partition(self._mark)
        self._ended = bool(mark)
        return reasoning[given:], content
