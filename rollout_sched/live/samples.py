"""What a trainer submits and what it gets back, by the names the ecosystem uses.

The record is a superset that converts without recomputation to those of verl (prompts, responses,
response_mask, rollout_log_probs, min/max_global_steps), AReaL (versions per token), slime
(weight_versions, status) and prime-rl; ragged, without padding.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.core import model
from rollout_sched.live.payloads import TokenPayload

#: A group's id, which is kept, journaled and shown.
Uid = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]

#: How many samples a group may have: far more than any trainer compares, far less than hurts.
Samples = Annotated[int, msgspec.Meta(ge=1, le=65_536)]

Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group to generate: `samples` responses to one prompt, each of at most `max_tokens`.

    uid       the group's id, used once; at most 256 characters, without control characters
    sampling  vLLM SamplingParams by name, less n and max_tokens; {"logprobs": 0} for log-probs
    each      what differs from that by sample, such as the seed; over-sampling begins anew
    extra     comes back with every sample
    """

    uid: Uid
    prompt_ids: Annotated[list[int], msgspec.Meta(min_length=1)]
    samples: Samples
    max_tokens: Tokens
    sampling: dict[str, Any] = {}
    each: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}

    def sampling_of(self, index: int) -> dict[str, Any]:
        """The sampling parameters of the sample with this index."""
        return (
            {**self.sampling, **self.each[index % len(self.each)]} if self.each else self.sampling
        )


class Span(msgspec.Struct, frozen=True):
    """Response tokens [start, end) made by one version on one instance."""

    version: int
    instance: str
    start: int
    end: int


class Sample(msgspec.Struct, frozen=True):
    """A finished response. Lists are one entry per response token, but for `prompt_ids`.

    index              of the sample within its group
    response_mask      1 for every generated token, which are all of them
    rollout_log_probs  None if none were asked for
    versions           policy version that made the token
    staleness          the trainer's version at delivery less the oldest of `versions`
    status             as in slime: COMPLETED, or TRUNCATED at max_tokens
    """

    uid: str
    index: int
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float] | None
    versions: list[int]
    segments: list[Span]
    staleness: int
    finish_reason: Literal["stop", "length"]
    status: Literal["COMPLETED", "TRUNCATED"]
    num_interruptions: int
    extra: dict[str, Any] = {}

    @property
    def oldest_version(self) -> int | None:
        """verl's min_global_steps; None for an empty response."""
        return min(self.versions, default=None)

    @property
    def newest_version(self) -> int | None:
        """verl's max_global_steps."""
        return max(self.versions, default=None)


class FailedGroup(msgspec.Struct, frozen=True):
    """A group that can never be whole; its prompt is the trainer's to submit again."""

    uid: str
    reason: str


class Batch(msgspec.Struct, frozen=True):
    """Whole groups, their samples together; `version` is the trainer's at delivery."""

    number: int
    version: int
    samples: list[Sample]
    failed: list[FailedGroup] = []

    def groups(self) -> dict[str, list[Sample]]:
        """Samples by the uid of their prompt."""
        groups: dict[str, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.uid, []).append(sample)
        return groups


def sample_of(counted: model.Sample, payload: TokenPayload, prompt: Prompt) -> Sample:
    """Join what the core counted with the tokens its payload holds."""
    start, segments, versions = 0, [], []
    for segment in counted.segments:
        end = start + segment.tokens
        segments.append(Span(segment.version, segment.instance, start, end))
        versions += [segment.version] * segment.tokens
        start = end
    response_ids = payload.response_ids
    return Sample(
        uid=counted.group,
        index=counted.index,
        prompt_ids=prompt.prompt_ids,
        response_ids=response_ids,
        response_mask=[1] * len(response_ids),
        rollout_log_probs=payload.logprobs,
        versions=versions,
        segments=segments,
        staleness=counted.staleness,
        finish_reason="length" if counted.finish == "length" else "stop",
        status="TRUNCATED" if counted.finish == "length" else "COMPLETED",
        num_interruptions=max(0, payload.transcript.attempts - 1),
        extra=prompt.extra,
    )
