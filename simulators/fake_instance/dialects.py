"""What the three endpoints that generate have in common: they word the same things differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rollout_sched.live.ports import Output, PromptToken
from rollout_sched.simulators.fake_instance.request_parsing import ParsedRequest, RequestLimits

Json = dict[str, Any]


class ChoiceChunk(NamedTuple):
    """Tokens of one choice that are sent together: all of them, or what a stream brings next.

    finish    None while there is more to come
    versions  where it is known, with the finish
    first     the first that is sent of this choice
    prompt    what the model thinks of the tokens of its prompt, if that was asked for
    """

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    finish: str | None
    versions: list[Json] | None
    first: bool
    prompt: Sequence[PromptToken] | None = None


class EndpointDialect(Protocol):
    """An endpoint's wording."""

    path: str

    def parse(self, raw: bytes, headers: Mapping[str, str], limits: RequestLimits) -> ParsedRequest:
        """Raises Refusal."""

    def whole(self, asked: ParsedRequest, chunks: Sequence[ChoiceChunk], usage: Json) -> Json:
        """The answer that is not streamed; `chunks` has one for each choice."""

    def events(self, asked: ParsedRequest, chunk: ChoiceChunk) -> list[Json]:
        """What a stream says of a chunk."""

    def usage_event(self, asked: ParsedRequest, usage: Json) -> Json: ...


def usage(prompt_tokens: int, made: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + made,
        "completion_tokens": made,
        "prompt_tokens_details": None,
    }


def versions(output: Output, label: Any) -> list[Json]:
    """The spans of an answer as vLLM words them; `label` turns a number into its label."""
    spans: list[Json] = []
    start = 0
    for version, count in output.spans:
        spans.append({"version": label(version), "start": start, "end": start + count})
        start += count
    return spans


def prompt_logprobs(prompt: Sequence[int], chunk: ChoiceChunk) -> list[Json | None] | None:
    """What is thought of each token of a prompt, by its id; nothing of the first."""
    if chunk.prompt is None:
        return None
    told: list[Json | None] = [None]
    for token, thought in zip(prompt[1:], chunk.prompt, strict=False):
        entry = {"logprob": thought.logprob, "rank": thought.rank, "decoded_token": None}
        told.append({str(token): entry})
    return told
