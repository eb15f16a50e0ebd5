"""What the three generating endpoints have in common; their formats differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rollout_sched.live.ports import Output, PromptToken
from rollout_sched.simulators.fake_instance.request_parsing import ParsedRequest, RequestLimits

Json = dict[str, Any]


class ChoiceChunk(NamedTuple):
    """Tokens of one choice that are sent together: all of them, or the next ones of a stream.

    finish    None if more tokens follow
    versions  set with the finish, if known
    first     whether this is the first chunk of the choice
    prompt    log-probabilities of the prompt's tokens, if requested
    """

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    finish: str | None
    versions: list[Json] | None
    first: bool
    prompt: Sequence[PromptToken] | None = None


class EndpointDialect(Protocol):
    """The format of an endpoint."""

    path: str

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        """Parse a request. Raises Refusal."""

    def whole(self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json) -> Json:
        """The answer without streaming; `chunks` has one for each choice."""

    def events(self, asked: ParsedRequest, chunk: ChoiceChunk) -> list[Json]:
        """The stream's events for a chunk."""

    def usage_event(self, asked: ParsedRequest, usage: Json) -> Json: ...


def usage(prompt_tokens: int, made: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + made,
        "completion_tokens": made,
        "prompt_tokens_details": None,
    }


def versions(output: Output, label: Any) -> list[Json]:
    """The spans of an answer in vLLM's format; `label` turns a number into its label."""
    spans: list[Json] = []
    start = 0
    for version, count in output.spans:
        spans.append({"version": label(version), "start": start, "end": start + count})
        start += count
    return spans


def prompt_logprobs(prompt: Sequence[int], chunk: ChoiceChunk) -> list[Json | None] | None:
    """The log-probability of each token of a prompt, by its id; None for the first."""
    if chunk.prompt is None:
        return None
    told: list[Json | None] = [None]
    for token, thought in zip(prompt[1:], chunk.prompt, strict=False):
        entry = {"logprob": thought.logprob, "rank": thought.rank, "decoded_token": None}
        told.append({str(token): entry})
    return told
