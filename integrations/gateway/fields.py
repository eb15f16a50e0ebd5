"""The fields of a client's request that the gateway reads, as they stand in its body."""

from __future__ import annotations

import msgspec

_NOTHING = msgspec.Raw(b"")


class BadRequest(Exception):
    """The client's request cannot be used; the text says what to change."""


class SamplingFields(msgspec.Struct):
    """The part of vLLM's SamplingParams that matters here."""

    max_tokens: int | None = None
    n: int | None = None


class Fields(msgspec.Struct):
    """Of all three endpoints; none of them has all."""

    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    token_ids: msgspec.Raw = _NOTHING
    sampling_params: SamplingFields | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    group_id: str | None = None
    session_id: str | None = None
