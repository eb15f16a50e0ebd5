"""The envelope of a client's request: only what the scheduler must know.

A rollout request carries thousands of token ids and gets thousands back. Only the fields named in
`fields` are read; the rest of the body passes through unchanged, as bytes.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from rollout_sched.integrations.gateway.data_plane.fields import (
    BadRequest,
    Fields,
    boolean,
    fields_of,
    hindrance,
    integer,
    number,
    text,
)
from rollout_sched.integrations.vllm.protocol.endpoints import (
    COMPLETIONS_MAX_TOKENS,
    INPUT,
    Endpoint,
)

# ------------------------------------------------------------------------------------------
# Replaces a few values in a client's body in place; all other bytes stay unchanged.
#
# Nothing else is decoded, so numbers keep their spelling, and a change needs memory only for the
# new values. If a field occurs twice, its last occurrence is changed, which is the one that JSON
# parsers use.

#: JSON values by the name of their field.
Values = Mapping[str, bytes | memoryview]

#: No changes.
NONE: Values = {}

_NO_FIELDS = msgspec.Raw(b"{}")
_OPENING = re.compile(rb"\s*\{(\s*\})?")


class ClientBody:
    """A client's body, read once for all the bodies that are made from it.

    `nested`: its sampling parameters are in an object of their own. Raises BadRequest.
    """

    __slots__ = ("_own", "fields", "nested", "raw", "sampling")

    def __init__(self, raw: bytes, *, nested: bool) -> None:
        if not raw.isascii():
            _check_utf8(raw)
        self.raw = raw
        self.nested = nested
        self.fields = fields_of(raw)
        own = self.fields.get("sampling_params", _NO_FIELDS) if nested else _NO_FIELDS
        self._own = _NO_FIELDS if bytes(own) == b"null" else own
        self.sampling = fields_of(self._own) if nested else self.fields

    def changed(self, values: Values, sampling: Values) -> bytes:
        """The body with these values, and with these sampling parameters."""
        if not self.nested:
            values = {**values, **sampling}
        elif sampling:
            values = {**values, "sampling_params": _spliced(self._own, self.sampling, sampling)}
        return _spliced(self.raw, self.fields, values)


def _spliced(text: bytes | msgspec.Raw, found: Fields, values: Values) -> bytes:
    """A JSON object with new values in place of the old ones; new fields go in front."""
    start = _address(text)
    whole = memoryview(text)
    places, new = [], []
    for name, value in values.items():
        old = found.get(name)
        if old is None:
            new.append(b"".join((b'"', name.encode(), b'":', value)))
        else:
            at = _address(old) - start
            places.append((at, at + len(memoryview(old)), value))
    opening = _OPENING.match(whole)
    assert opening is not None  # otherwise decoding it would have failed
    at = opening.end() if opening[1] is None else opening.start(1)
    parts: list[Any] = [whole[:at], b",".join(new)]
    if new and opening[1] is None:
        parts.append(b",")
    for begin, end, value in sorted(places):
        parts += (whole[at:begin], value)
        at = end
    parts.append(whole[at:])
    return b"".join(parts)


def _address(text: bytes | msgspec.Raw) -> int:
    """A text's address in memory: a decoded Raw lies inside the buffer it was decoded from."""
    address: int = np.frombuffer(text, np.uint8).__array_interface__["data"][0]
    return address


#: More than any model makes.
MAX_TOKENS = 2**31 - 1

#: Longest name of a group, session or request, in bytes: names are kept and written to the journal.
LONGEST_NAME = 256

#: Rough value for English text in byte-pair tokens; used only to estimate prompts given as text.
BYTES_PER_TOKEN = 4

#: Of a prompt given as embeddings: some thousand numbers of two bytes, in base64.
BYTES_PER_EMBEDDING = 8192

#: Values of `prompt` that give none beside `prompt_embeds`, and the reverse.
_EMPTY = (b"null", b'""', b"[]")


class Envelope:
    """What a body asks for.

    prompt       the prompt, messages or token ids as raw JSON from the body
    embeds       prompts as embeddings; None if there are none
    limit        new tokens the client allows; None: as many as fit
    limit_field  the field that sets the limit
    samples      how many responses are asked for, per prompt, each by a request of its own
    beams        how many responses a request has: a beam search makes them together
    keep_ids     the client wants token ids in the answer
    echo         the client wants the prompt's text in the answer
    says_ours    whether the body already has a field that the gateway sets
    priority     the lowest number goes first
    hindrance    the field with which the response cannot be resumed; "" if it can
    """

    __slots__ = (
        "beams",
        "body",
        "echo",
        "embeds",
        "group",
        "hindrance",
        "keep_ids",
        "limit",
        "limit_field",
        "priority",
        "prompt",
        "salt",
        "samples",
        "says_ours",
        "session",
        "stream",
    )

    def __init__(self, body: ClientBody, endpoint: Endpoint) -> None:
        self.body = body
        found, sampling = body.fields, body.sampling
        self.embeds = None
        if "prompt_embeds" in found and endpoint == "completions":
            self.embeds = _given(found, "prompt_embeds")
        prompt = found.get(INPUT[endpoint])
        if self.embeds is not None and _given(found, "prompt") is None:
            self.prompt = self.embeds
        elif prompt is None:
            raise BadRequest(f"`{INPUT[endpoint]}` is missing")
        else:
            self.prompt = memoryview(prompt)
        self.limit_field = "max_tokens"
        limit = integer(sampling, "max_tokens")
        if endpoint == "completions" and "max_tokens" not in sampling:
            limit = COMPLETIONS_MAX_TOKENS
        if endpoint == "chat" and "max_completion_tokens" in found:
            own = integer(found, "max_completion_tokens")
            if own is not None:
                limit, self.limit_field = own, "max_completion_tokens"
        self.echo = bool(boolean(found, "echo"))
        if limit == 0 and endpoint == "completions" and self.echo:
            limit = 1  # vLLM answers with the prompt alone, for which it makes a token
        self.limit = limit
        n = integer(sampling, "n")
        self.samples = 1 if n is None else n
        self.beams = 1
        if "use_beam_search" in found and boolean(found, "use_beam_search"):
            self.samples, self.beams = 1, self.samples
        self.stream = bool(boolean(found, "stream"))
        returned = boolean(found, "return_token_ids")
        self.keep_ids = endpoint == "generate" or returned is True
        self.salt = text(found, "cache_salt") or None
        self.says_ours = "cache_salt" in found or not (
            self.keep_ids or "return_token_ids" not in found
        )
        self.group = text(found, "group_id") or ""
        self.session = text(found, "session_id") or ""
        self.priority = integer(found, "priority") or 0
        self.hindrance = hindrance(found, sampling, endpoint, streams=self.stream)


def _given(found: Fields, name: str) -> memoryview | None:
    """A prompt in one of its two forms; None if it is missing, or empty."""
    value = memoryview(found.get(name, _EMPTY[0]))
    return None if value in _EMPTY else value


_FLAT_IDS = re.compile(rb"\[\s*\d")

#: Below this many bytes, Python counts faster than numpy.
_LARGE = 2048

_NO_PROMPTS = re.compile(rb"\[\s*\]")

#: One of several prompts, a text or a flat list of ids, in a list that is valid JSON.
_ONE_OF_SEVERAL = re.compile(
    rb'[\[,]\s*("(?:[^"\\]++|\\.)*+"|\[[^\]\["{]*+\])\s*(?=[,\]])', re.DOTALL
)

#: Bytes at each end of a prompt that are hashed to identify it.
_TELLING = 2048

#: Bytes of text that are checked at a time.
_STRETCH = 2**20
_Utf8 = codecs.getincrementaldecoder("utf-8")


def read(raw: bytes, endpoint: Endpoint) -> Envelope:
    """The envelope of a body. Raises BadRequest naming the field."""
    envelope = Envelope(ClientBody(raw, nested=endpoint == "generate"), endpoint)
    if min(envelope.samples, envelope.beams) < 1:
        raise BadRequest("`n` must be at least 1")
    if envelope.beams > 1 and envelope.stream:
        raise BadRequest("`use_beam_search` with `n` cannot be streamed; leave out `stream`")
    if envelope.limit is not None and not 1 <= envelope.limit <= MAX_TOKENS:
        least = "at least 1" if envelope.limit < 1 else f"at most {MAX_TOKENS}"
        raise BadRequest(f"`{envelope.limit_field}` must be {least}")
    if envelope.group:
        check_name("group_id", envelope.group)
    if envelope.session:
        check_name("session_id", envelope.session)
    return envelope


def check_name(field: str, name: str) -> None:
    """Raises BadRequest for a name that is too long or not printable."""
    if len(name) > LONGEST_NAME or len(name.encode()) > LONGEST_NAME:
        raise BadRequest(f"`{field}` is longer than {LONGEST_NAME} bytes; give it a shorter name")
    if not name.isprintable():
        raise BadRequest(f"`{field}` contains a character that is not printable; leave it out")


def _check_utf8(body: bytes) -> None:
    whole, decoder = memoryview(body), _Utf8()
    for start in range(0, len(body), _STRETCH):
        end = start + _STRETCH
        try:
            decoder.decode(whole[start:end], final=end >= len(body))
        except UnicodeDecodeError as error:
            near = start + error.start
            raise BadRequest(f"the body is not UTF-8 near byte {near}: {error.reason}") from None


def are_token_ids(raw: bytes | memoryview) -> bool:
    """True for a flat list of token ids, False for text, messages or a list of prompts."""
    return _FLAT_IDS.match(raw) is not None


def several_prompts(raw: memoryview, limit: int) -> list[memoryview] | None:
    """The prompts if `raw` is a list of prompts; None for one prompt. They are not copied.

    Raises BadRequest as soon as it finds more than `most`.
    """
    if raw[0] != ord("[") or are_token_ids(raw):
        return None
    if _NO_PROMPTS.match(raw) is not None:
        raise BadRequest("`prompt` is empty")
    prompts: list[memoryview] = []
    at, end = 0, len(raw) - 1
    while at < end:
        found = _ONE_OF_SEVERAL.match(raw, at)
        if found is None:
            break
        if len(prompts) == limit:
            raise BadRequest(f"`prompt` has more than {limit} prompts; send them in several calls")
        prompts.append(raw[found.start(1) : found.end(1)])
        at = found.end()
    if at < end:
        raise BadRequest("`prompt` must be text, token ids, or a list of either")
    return prompts


def prompt_tokens(raw: bytes | memoryview) -> int:
    """Tokens of a prompt: counted if given as ids, estimated from its bytes if given as text."""
    if not are_token_ids(raw):
        return max(1, len(raw) // BYTES_PER_TOKEN)
    if len(raw) < _LARGE:
        return bytes(raw).count(b",") + 1
    return int(np.count_nonzero(np.frombuffer(raw, np.uint8) == ord(","))) + 1


def group_of(raw: memoryview) -> str:
    """The group's name if the client gives none: made from the ends and the length of the prompt,
    so that requests of one prompt are siblings."""
    if len(raw) > 2 * _TELLING:
        ends = zlib.crc32(raw[-_TELLING:], zlib.crc32(raw[:_TELLING]))
        return f"p{ends:08x}.{len(raw)}"
    return f"p{zlib.crc32(raw):08x}"


def with_fields(body: bytes, fields: dict[str, Any]) -> bytes:
    """The body with fields added in front; the body must not have any of them yet."""
    if not fields:
        return body
    rest = memoryview(body)[body.index(b"{") + 1 :]  # copied once
    return b"".join((msgspec.json.encode(fields)[:-1], b",", rest))


# ------------------------------------------------------------------------------------------
# Splits a call that asks for several responses: each becomes a request of its own.
#
# So the samples of one prompt may run on different instances, and the scheduler sees each of them.


class SubRequest:
    """One of the responses of a call: its prompt, and values that differ from the call's body."""

    __slots__ = ("prompt", "sampling", "tokens", "values")

    def __init__(
        self, prompt: memoryview, tokens: int, values: Values = NONE, sampling: Values = NONE
    ) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.values = values
        self.sampling = sampling


def split(body: ClientBody, endpoint: Endpoint, envelope: Envelope, limit: int) -> list[SubRequest]:
    """The responses of a call, in order of their index; samples of one prompt share it.

    They are counted before anything is built: raises BadRequest for more than `most`.
    """
    samples, prompt = envelope.samples, envelope.prompt
    prompts = None
    if envelope.embeds is not None:
        prompts = _with_embeddings(envelope, envelope.embeds, limit)
    elif endpoint == "completions":
        several = several_prompts(prompt, limit)
        if several is not None:
            prompts = [(each, prompt_tokens(each), {"prompt": each}) for each in several]
    if prompts is None:
        prompts = [(prompt, prompt_tokens(prompt), NONE)]
    if samples == 1 and len(prompts) == 1 and not prompts[0][2]:
        return [SubRequest(prompt, prompts[0][1])]
    count = samples * envelope.beams * len(prompts)
    if count > limit:
        raise BadRequest(
            f"the call asks for {count} responses (`n` is {samples * envelope.beams}), the limit "
            f"per call is {limit}; send it as several calls"
        )
    samplings = [NONE] if envelope.beams > 1 else _samplings(body, samples)
    return [
        SubRequest(each, tokens, values, sampling)
        for each, tokens, values in prompts
        for sampling in samplings
    ]


def _with_embeddings(
    envelope: Envelope, embeds: memoryview, limit: int
) -> list[tuple[memoryview, int, Values]]:
    """The prompts of a call, their estimated lengths, and what makes a body of each; vLLM answers
    those given as embeddings first."""
    prompts: list[tuple[memoryview, int, Values]] = []
    for each in several_prompts(embeds, limit) or [embeds]:
        tokens = max(1, len(each) // BYTES_PER_EMBEDDING)
        prompts.append((each, tokens, {"prompt_embeds": each, "prompt": b"null"}))
    if envelope.prompt is embeds:
        return prompts
    for each in several_prompts(envelope.prompt, limit) or [envelope.prompt]:
        prompts.append((each, prompt_tokens(each), {"prompt": each, "prompt_embeds": b"null"}))
    return prompts


#: vLLM samples greedily below this temperature.
_GREEDY = 1e-5


def _samplings(body: ClientBody, samples: int) -> list[Values]:
    """The sampling parameters that differ between the samples and the client's body. Raises
    BadRequest for several greedy ones, which vLLM refuses, and would not if they were split."""
    if samples > 1 and 0 <= number(body.sampling, "temperature", 1.0) < _GREEDY:
        raise BadRequest(f"n must be 1 when using greedy sampling, got {samples}.")
    seed = integer(body.sampling, "seed") if samples > 1 else None
    if seed is None or seed == -1:  # -1: none
        return [{"n": b"1"}] * samples
    # As vLLM does; otherwise all samples would be identical.
    return [{"n": b"1", "seed": b"%d" % (seed + index)} for index in range(samples)]
