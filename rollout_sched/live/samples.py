"""What a trainer submits and what it gets back, by the names the ecosystem uses.

The record is a superset that converts without recomputation to those of verl (prompts, responses,
response_mask, rollout_log_probs, min/max_global_steps), AReaL (versions per token), slime
(weight_versions, status) and prime-rl; ragged, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.core import model
from rollout_sched.core.actions import Deliver
from rollout_sched.core.events import GroupSubmitted
from rollout_sched.live.balance import balanced
from rollout_sched.live.payloads import TokenPayload

#: A group's id, which is kept, journaled and shown.
Uid = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]

#: How many samples a group may have: far more than any trainer compares, far less than hurts.
Samples = Annotated[int, msgspec.Meta(ge=1, le=65_536)]

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]

#: Response lengths of one prompt: as many as a long training has made, few enough to be journaled.
History = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(max_length=4096)
]

#: The version of a token that no version made: a tool returned it.
OBSERVED = -1


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One group to generate: `samples` responses to one prompt, each of at most `max_tokens`.

    uid              the group's id, used once; at most 256 characters, without control characters
    sampling         vLLM SamplingParams by name, less n and max_tokens; {"logprobs": 0} for
                     log-probs
    each             what differs from that by sample, such as the seed; over-sampling begins anew
    extra            comes back with every sample
    prompt_key       names the prompt, and is equal in every epoch; "": nothing is learnt of it
    history          lengths of responses to it that are known from before this run, in tokens
    expected_tokens  how long its responses may be expected to be; 0: no idea
    """

    uid: Uid
    prompt_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    samples: Samples
    max_tokens: Tokens
    sampling: dict[str, Any] = {}
    each: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    prompt_key: Uid = ""
    history: History = []
    expected_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0

    @property
    def submitted(self) -> GroupSubmitted:
        """What the scheduler is told of it."""
        return GroupSubmitted(
            self.uid,
            self.samples,
            len(self.prompt_ids),
            self.max_tokens,
            self.prompt_key,
            tuple(self.history),
            self.expected_tokens,
        )

    def sampling_of(self, index: int) -> dict[str, Any]:
        """The sampling parameters of the sample with this index."""
        return (
            {**self.sampling, **self.each[index % len(self.each)]} if self.each else self.sampling
        )


class Span(msgspec.Struct, frozen=True):
    """Response tokens [start, end) made by one version on one instance.

    `verified`: older versions have made them, and this one has passed them. `masked`: they are
    older than the policy allows, and are not to be trained.
    """

    version: int
    instance: str
    start: int
    end: int
    verified: bool = False
    masked: bool = False


class Reward(msgspec.Struct, frozen=True):
    """What a sample is worth: in all, and by name where there are several."""

    total: float
    named: dict[str, float] = {}


class Sample(msgspec.Struct, frozen=True):
    """A finished response. Lists are one entry per response token, but for `prompt_ids`.

    index              of the sample within its group
    response_mask      1 for every generated token, 0 for those that a tool returned and those that
                       are older than the policy allows (`when_stale = "mask"`)
    rollout_log_probs  by the version that the token counts as, None if none were asked for; 0.0
                       where a tool returned the token
    versions           policy version that made the token, or has verified it; -1 where a tool
                       returned it
    drawn_log_probs    by the version that drew the token: differs where a newer one has verified
                       it; None if none was verified
    segments           of generated tokens only
    staleness          the trainer's version at delivery less the oldest that made a token to be
                       trained
    status             as in slime: COMPLETED, or TRUNCATED at max_tokens
    reward             what the reward function said of it, of named ones the total; None: there is
                       no such function
    rewards            the named ones
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
    drawn_log_probs: list[float] | None = None
    reward: float | None = None
    rewards: dict[str, float] = {}

    @property
    def tokens(self) -> int:
        """Of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def oldest_version(self) -> int | None:
        """verl's min_global_steps, of what is to be trained; None where nothing is."""
        return min((span.version for span in self.segments if not span.masked), default=None)

    @property
    def newest_version(self) -> int | None:
        """verl's max_global_steps."""
        return max((span.version for span in self.segments), default=None)


class FailedGroup(msgspec.Struct, frozen=True):
    """A group that can never be whole; its prompt is the trainer's to submit again."""

    uid: str
    reason: str


class LostGroup(msgspec.Struct, frozen=True):
    """A group that will never be delivered. `reason`: why it has failed; None: it was filtered."""

    uid: str
    reason: str | None


class Batch(msgspec.Struct, frozen=True):
    """Whole groups, their samples together; `version` is the trainer's at delivery.

    To who asks for parts it is one `part` of the batch, which is whole with the `last`. That one
    may be without samples.

    failed    groups that can never be whole, since the batch before
    filtered  groups that were whole and are not worth training, by uid: there is nothing to submit
              again
    missing   groups that the batch is short of, because no more are coming
    """

    number: int
    version: int
    samples: list[Sample]
    failed: list[FailedGroup] = []
    part: int = 0
    last: bool = True
    filtered: list[str] = []
    missing: int = 0

    def groups(self) -> dict[str, list[Sample]]:
        """Samples by the uid of their prompt."""
        groups: dict[str, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.uid, []).append(sample)
        return groups

    def balanced(self, ranks: int, *, whole_groups: bool = True) -> list[list[Sample]]:
        """The samples for each of so many ranks, with about as many tokens, prompts included.

        No two differ by more than the largest group has; where `whole_groups` is false, than the
        longest sample. Ranks may be without samples if there are too few. Raises CallerError for
        less than one rank.
        """
        units = list(self.groups().values()) if whole_groups else [[one] for one in self.samples]
        weights = [sum(sample.tokens for sample in unit) for unit in units]
        return [
            [sample for place in places for sample in units[place]]
            for places in balanced(weights, ranks)
        ]


def batch_of(action: Deliver, samples: list[Sample], lost: Sequence[LostGroup]) -> Batch:
    """What is delivered, and what is said with it of groups that are not."""
    return Batch(
        action.batch,
        action.version,
        samples,
        [FailedGroup(group.uid, group.reason) for group in lost if group.reason is not None],
        action.part,
        action.last,
        [group.uid for group in lost if group.reason is None],
        action.missing,
    )


def sample_of(
    counted: model.DeliveredSample,
    payload: TokenPayload,
    prompt: Prompt,
    reward: Reward | None = None,
) -> Sample:
    """Join what the core counted with the tokens its payload holds."""
    transcript, joined = payload.transcript, payload.transcript.joined
    mask = joined.mask
    segments = _spans(counted.segments, mask)
    versions = [OBSERVED] * len(mask)
    for span in segments:
        length = span.end - span.start
        versions[span.start : span.end] = [span.version] * length
        if span.masked:
            mask[span.start : span.end] = [0] * length
    return Sample(
        uid=counted.group,
        index=counted.index,
        prompt_ids=prompt.prompt_ids,
        response_ids=payload.response_ids,
        response_mask=mask,
        rollout_log_probs=payload.logprobs,
        versions=versions,
        segments=segments,
        staleness=counted.staleness,
        finish_reason="length" if counted.finish == "length" else "stop",
        status="TRUNCATED" if counted.finish == "length" else "COMPLETED",
        num_interruptions=max(0, transcript.attempts - joined.turns - 1),
        extra=prompt.extra,
        drawn_log_probs=joined.drawn_logprobs if counted.verified_tokens else None,
        reward=None if reward is None else reward.total,
        rewards={} if reward is None else reward.named,
    )


def _spans(segments: Sequence[model.Segment], mask: Sequence[int]) -> list[Span]:
    """The core's segments, which count generated tokens, laid over the response."""
    spans: list[Span] = []
    counted, generated = sum(segment.tokens for segment in segments), sum(mask)
    assert counted == generated, f"counted {counted} tokens, {generated} are here"
    at = 0
    for segment in segments:
        todo = segment.tokens
        while todo:
            while not mask[at]:
                at += 1
            end = at
            while end < at + todo and end < len(mask) and mask[end]:
                end += 1
            spans.append(
                Span(segment.version, segment.instance, at, end, segment.verified, segment.masked)
            )
            todo -= end - at
            at = end
    return spans
