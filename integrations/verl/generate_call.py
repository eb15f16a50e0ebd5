"""Translates a call of verl's `LLMServerClient.generate` for our gateway, and the gateway's answer.

verl 0.9.1: `workers/rollout/llm_server.py` (the client), `vllm_rollout/vllm_async_server.py` (how
verl's own servers treat sampling parameters, limits and stop reasons).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.core.model.records import Count, Serial

#: Names of the response limit in verl's sampling parameters.
_LIMITS = ("max_tokens", "max_new_tokens")

#: Stop reasons of verl's servers.
COMPLETED, ABORTED = "completed", "aborted"


class RolloutLengths(msgspec.Struct, frozen=True):
    """Length limits of verl's rollout configuration, in tokens."""

    prompt_length: int
    response_length: int
    max_model_len: int | None = None

    def room_after(self, prompt_tokens: int, limit: int | None = None) -> int:
        """The most tokens that a response may have: `limit` if the call gives one, else the smaller
        of `response_length` and the rest of `prompt_length + response_length`; never more than
        `max_model_len` allows. At least 1, as in verl's servers."""
        if limit is None:
            both = self.prompt_length + self.response_length
            limit = min(self.response_length, both - prompt_tokens)
        if self.max_model_len is not None:
            limit = min(limit, self.max_model_len - prompt_tokens)
        return max(1, limit)


def sampling_of(sampling_params: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """verl's sampling parameters as vLLM's, and the response limit that they contain.

    verl's `logprobs` is a boolean: the log-probs of the sampled tokens.
    """
    sampling = dict(sampling_params)
    limits = [sampling.pop(key, None) for key in _LIMITS]
    limit = next((limit for limit in limits if limit is not None), None)
    if sampling.pop("logprobs", False):
        sampling["logprobs"] = 0
    return sampling, limit


def body_of(
    model: str,
    prompt_ids: Sequence[int],
    sampling_params: Mapping[str, Any],
    lengths: RolloutLengths,
    priority: int = 0,
) -> bytes:
    """The body of a POST to /inference/v1/generate."""
    sampling, limit = sampling_of(sampling_params)
    sampling["max_tokens"] = lengths.room_after(len(prompt_ids), limit)
    body: dict[str, Any] = {
        "model": model,
        "token_ids": list(prompt_ids),
        "sampling_params": sampling,
    }
    if priority:
        body["priority"] = priority
    return msgspec.json.encode(body)


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Choice(msgspec.Struct):
    token_ids: list[Count]
    finish_reason: str
    logprobs: _Logprobs | None = None


class _Segment(msgspec.Struct):
    version: Serial
    start: Count
    end: Count
    instance: str


class _Ours(msgspec.Struct, frozen=True):
    segments: tuple[_Segment, ...] = ()


class Generated(msgspec.Struct):
    """The fields of an answer that verl uses."""

    choices: list[_Choice]
    rollout_sched: _Ours = _Ours()

    def __post_init__(self) -> None:
        told = sum(max(0, segment.end - segment.start) for segment in self.rollout_sched.segments)
        if told > sum(len(choice.token_ids) for choice in self.choices):
            raise ValueError(f"its segments have {told} tokens, more than it has")

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def log_probs(self) -> list[float] | None:
        """One for each token; None if none were requested."""
        told = self.choices[0].logprobs
        return None if told is None else [token.logprob for token in told.content]

    @property
    def stop_reason(self) -> str:
        return ABORTED if self.choices[0].finish_reason == "abort" else COMPLETED

    @property
    def interruptions(self) -> int:
        """How often the request changed the instance or the weights, counted by its segments."""
        return max(0, len(self.rollout_sched.segments) - 1)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The weight versions that generated it, by verl's names; None if there are no tokens.
        `versions` has one entry for each token."""
        segments = self.rollout_sched.segments
        made = [segment.version for segment in segments]
        oldest, newest = (min(made), max(made)) if made else (None, None)
        return {
            "global_steps": newest,
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "versions": [s.version for s in segments for _ in range(s.start, s.end)],
        }


_decoder = msgspec.json.Decoder(Generated)


def read(answer: bytes) -> Generated:
    """Raises msgspec.DecodeError if this is not an answer of a gateway."""
    return _decoder.decode(answer)
