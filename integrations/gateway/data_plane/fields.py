"""The fields of a client's request that the gateway reads from its body."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

#: Stands for a field that the body does not have.
NOTHING = msgspec.Raw(b"")


class BadRequest(Exception):
    """The client's request cannot be used; the text says what to change."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


#: A request's priority, with vLLM's range. The lowest number goes first.
Priority = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class SamplingFields(msgspec.Struct):
    """The part of vLLM's SamplingParams that the gateway reads."""

    max_tokens: int | None = None
    n: int | None = None


class Fields(msgspec.Struct):
    """The fields of all three endpoints; no endpoint has all of them."""

    prompt: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    token_ids: msgspec.Raw = NOTHING
    sampling_params: SamplingFields | None = None
    max_tokens: int | UnsetType | None = UNSET
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    return_token_ids: bool | UnsetType | None = UNSET
    cache_salt: str | UnsetType | None = UNSET
    group_id: str | None = None
    session_id: str | None = None
    tools: msgspec.Raw = NOTHING
    priority: Priority | None = None


#: A seed, with vLLM's range.
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Changeable(msgspec.Struct):
    """The fields of a body, and of its sampling_params, that may be changed before it is sent."""

    prompt: msgspec.Raw = NOTHING
    messages: msgspec.Raw = NOTHING
    token_ids: msgspec.Raw = NOTHING
    sampling_params: msgspec.Raw = NOTHING
    max_tokens: msgspec.Raw = NOTHING
    max_completion_tokens: msgspec.Raw = NOTHING
    n: msgspec.Raw = NOTHING
    seed: msgspec.Raw = NOTHING
    return_token_ids: msgspec.Raw = NOTHING
    cache_salt: msgspec.Raw = NOTHING
