"""The envelope of a client's request: what the scheduler must know, and no more than that.

A rollout request carries thousands of token ids and gets thousands back. Only the fields
named in `fields` are read; the rest of the body passes through as the bytes it came in.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Literal

import msgspec
import numpy as np

from rollout_sched.integrations.gateway.fields import BadRequest, Fields, SamplingFields

Endpoint = Literal["completions", "chat", "generate"]

#: Hot paths, and what is spoken there.
ENDPOINTS: dict[bytes, Endpoint] = {
    b"/v1/completions": "completions",
    b"/v1/chat/completions": "chat",
    b"/inference/v1/generate": "generate",
}

#: What OpenAI's completions, and vLLM's, take when the client names no limit.
COMPLETIONS_MAX_TOKENS = 16

#: English text as byte-pair tokens, roughly; it only weighs prompts that come as text.
BYTES_PER_TOKEN = 4

#: The field that holds the prompt.
_INPUT = {"completions": "prompt", "chat": "messages", "generate": "token_ids"}


class Envelope:
    """What a body asks for.

    prompt    the prompt, messages or token ids as they stand in the body
    limit     new tokens the client allows; None: as many as fit
    samples   how many responses are asked for
    keep_ids  the client wants token ids in the answer
    """

    __slots__ = ("group", "keep_ids", "limit", "prompt", "salt", "samples", "session", "stream")

    def __init__(self, fields: Fields, endpoint: Endpoint) -> None:
        if endpoint == "generate":
            sampling = fields.sampling_params or SamplingFields()
            self.prompt = bytes(fields.token_ids)
            self.limit, n = sampling.max_tokens, sampling.n
        else:
            self.prompt = bytes(fields.prompt if endpoint == "completions" else fields.messages)
            self.limit, n = fields.max_completion_tokens, fields.n
            if self.limit is None:
                self.limit = fields.max_tokens
            if self.limit is None and endpoint == "completions":
                self.limit = COMPLETIONS_MAX_TOKENS
        self.samples = 1 if n is None else n
        self.stream = bool(fields.stream)
        self.keep_ids = endpoint == "generate" or bool(fields.return_token_ids)
        self.salt = fields.cache_salt
        self.group = fields.group_id or ""
        self.session = fields.session_id or ""


_DECODER = msgspec.json.Decoder(Fields)
_FLAT_IDS = re.compile(rb"\[\s*\d")

#: Bodies above this many bytes are read without their token ids.
_LARGE = 2048
_IDS_FIELD = re.compile(rb'"(?:prompt|token_ids)"\s*:\s*(?=\[\s*\d)')
_PLACEHOLDER = b"[-7]"

#: Bytes at either end of a prompt that tell it from others.
_TELLING = 2048


def read(body: bytes, endpoint: Endpoint) -> Envelope:
    """The envelope of a body. Raises BadRequest naming the field."""
    try:
        fields = _without_ids(body) if len(body) > _LARGE else None
        if fields is None:
            fields = _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(str(error)) from None
    envelope = Envelope(fields, endpoint)
    if not envelope.prompt:
        raise BadRequest(f"`{_INPUT[endpoint]}` is missing")
    if envelope.samples < 1:
        raise BadRequest("`n` must be at least 1")
    if envelope.limit is not None and envelope.limit < 1:
        raise BadRequest("`max_tokens` must be at least 1")
    return envelope


def _without_ids(body: bytes) -> Fields | None:
    """The fields, read around a flat list of ids, which is most of the body and most of the cost.

    None if there is no such list, or it is not the prompt: the body must be read in full then.
    """
    found = _IDS_FIELD.search(body)
    if found is None:
        return None
    start = found.end()
    end = body.find(b"]", start) + 1
    if not end or body.find(b"[", start + 1, end) >= 0 or body.find(b'"', start, end) >= 0:
        return None
    fields = _DECODER.decode(body[:start] + _PLACEHOLDER + body[end:])
    for name in ("prompt", "token_ids"):
        if bytes(getattr(fields, name)) == _PLACEHOLDER:
            setattr(fields, name, msgspec.Raw(body[start:end]))
            return fields
    return None


def are_token_ids(raw: bytes) -> bool:
    """True for a flat list of token ids, False for text, messages or a list of prompts."""
    return _FLAT_IDS.match(raw) is not None


def several_prompts(raw: bytes) -> list[Any] | None:
    """The prompts if `raw` is a list of them; None for one prompt."""
    if not raw.startswith(b"[") or are_token_ids(raw):
        return None
    prompts = msgspec.json.decode(raw)
    if not prompts:
        raise BadRequest("`prompt` is empty")
    return prompts if isinstance(prompts, list) else None


def prompt_tokens(raw: bytes) -> int:
    """Tokens of a prompt: counted if it came as ids, estimated from its bytes if as text."""
    if are_token_ids(raw):
        return int(np.count_nonzero(np.frombuffer(raw, np.uint8) == ord(","))) + 1
    return max(1, len(raw) // BYTES_PER_TOKEN)


def group_of(raw: bytes) -> str:
    """Siblings are known by their prompt where the client names no group: its ends and length."""
    if len(raw) > 2 * _TELLING:
        return f"p{zlib.crc32(raw[:_TELLING] + raw[-_TELLING:]):08x}.{len(raw)}"
    return f"p{zlib.crc32(raw):08x}"


def with_fields(body: bytes, fields: dict[str, Any]) -> bytes:
    """The body with fields put in front; none of them may be in it already."""
    if not fields:
        return body
    start = body.index(b"{") + 1
    return b"{" + msgspec.json.encode(fields)[1:-1] + b"," + body[start:]
