"""The prompts that a trainer submits and the batches that it gets, with the ecosystem's names.

A sample is a superset that converts without recomputation to the records of verl (prompts,
responses, response_mask, rollout_log_probs, min/max_global_steps), AReaL (versions per token),
slime (weight_versions, status) and prime-rl; ragged, without padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Annotated, Any, Literal

import msgspec

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import model
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.core.model.records import (
    MAX_COUNT,
    MAX_SERIAL,
    MAX_SIZE,
    Count,
    Serial,
    Size,
)
from rollout_sched.live.requests import continuation
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.requests.trajectories import Tool, Trajectory

# ------------------------------------------------------------------------------------------
# Divides a batch into sets of about equal weight, because ranks wait for the fullest set.
#
# The largest differencing method (Karmarkar and Karp 1982) for any number of sets: the two least
# even partial divisions are merged, the fullest set of one with the emptiest of the other, until
# one division is left. A merged division is at most as uneven as the less even of the two, so in
# the end no two sets differ by more than the heaviest item.

#: (weight, items): a set. The items are a number, a nested pair of items, or None, so that joining
#: two sets costs nothing.
_Set = tuple[int, Any]


def balanced(weights: Sequence[int], sets: int) -> list[list[int]]:
    """Divide the indices of `weights` into `sets` lists, each ascending; some are empty if there
    are too few. Raises CallerError for less than one set."""
    if sets < 1:
        raise CallerError(f"a batch needs at least one rank, not {sets}")
    if not weights:
        return [[] for _ in range(sets)]
    empty: list[_Set] = [(0, None)] * (sets - 1)
    divisions: list[tuple[int, int, list[_Set]]] = [
        (-weight if sets > 1 else 0, place, [(weight, place), *empty])
        for place, weight in enumerate(weights)
    ]
    heapify(divisions)
    serial = len(weights)
    while len(divisions) > 1:
        first, second = heappop(divisions)[2], heappop(divisions)[2]
        laid = [_joined(full, lean) for full, lean in zip(first, reversed(second), strict=True)]
        laid.sort(key=_weight, reverse=True)
        heappush(divisions, (laid[-1][0] - laid[0][0], serial, laid))
        serial += 1
    return [sorted(_places(items)) for _, items in divisions[0][2]]


def _weight(one: _Set) -> int:
    return one[0]


def _joined(first: _Set, second: _Set) -> _Set:
    if first[1] is None or second[1] is None:
        return first if second[1] is None else second
    return first[0] + second[0], (first[1], second[1])


def _places(items: Any) -> list[int]:
    places, todo = [], [items]
    while todo:
        one = todo.pop()
        if isinstance(one, tuple):
            todo += one
        elif one is not None:
            places.append(one)
    return places


#: A group's id, which is stored, journaled and shown.
Uid = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]

#: How many samples a group may have: far more than any trainer uses, few enough to be harmless.
Samples = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]

#: Response lengths of one prompt: enough for a long training, few enough to be journaled.
History = Annotated[list[Count], msgspec.Meta(max_length=4096)]

#: The version of a token; OBSERVED: a tool returned it.
Version = Annotated[int, msgspec.Meta(ge=-1, le=MAX_SERIAL)]
OBSERVED = -1


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One group to generate: `samples` responses to one prompt, each of at most `max_tokens`.

    uid              the group's id, used once; at most 256 characters, without control characters
    sampling         vLLM SamplingParams by name, without n and max_tokens; {"logprobs": 0} for
                     log-probs
    each             overrides of `sampling` for each sample, such as the seed; over-sampling reuses
                     them from the first
    extra            returned with every sample
    prompt_key       names the prompt, the same in every epoch; "": its lengths are not learnt
    history          lengths of its responses from before this run, in tokens
    expected_tokens  expected length of its responses; 0: unknown
    min_samples      it is delivered without the samples that fail, as long as so many are left; 0:
                     all of them, so that one that fails, fails the group
    """

    uid: Uid
    prompt_ids: Annotated[list[Count], msgspec.Meta(min_length=1)]
    samples: Samples
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    sampling: dict[str, Any] = {}
    each: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}
    prompt_key: Uid = ""
    history: History = []
    expected_tokens: Count = 0
    min_samples: Size = 0

    @property
    def submitted(self) -> GroupSubmitted:
        """The event for the scheduler."""
        return GroupSubmitted(
            self.uid,
            self.samples,
            len(self.prompt_ids),
            self.max_tokens,
            self.prompt_key,
            tuple(self.history),
            self.expected_tokens,
            resumable=not any(
                continuation.hindrance(own, searched=True) for own in (self.sampling, *self.each)
            ),
            min_samples=self.min_samples,
        )

    def sampling_of(self, index: int) -> dict[str, Any]:
        """The sampling parameters of the sample with this index. One `seed` for all is counted up
        by the index, as vLLM does for its `n`: otherwise all samples would be equal."""
        own = self.each[index % len(self.each)] if self.each else {}
        sampling = {**self.sampling, **own}
        seed = self.sampling.get("seed")
        if seed is not None and seed != -1 and "seed" not in own:
            sampling["seed"] = seed + index
        return sampling


class Span(msgspec.Struct, frozen=True):
    """Response tokens [start, end) made by one version on one instance.

    `masked`: they are older than the policy allows, and must not be trained.
    """

    version: Serial
    instance: str
    start: Count
    end: Count
    masked: bool = False


class Reward(msgspec.Struct, frozen=True):
    """The reward of a sample: its total, and the values by name if there are several."""

    total: float
    named: dict[str, float] = {}


class Sample(msgspec.Struct, frozen=True):
    """A finished response. Lists have one entry per response token, except `prompt_ids`.

    index              of the sample within its group
    response_mask      1 for generated tokens; 0 for tokens that a tool returned or that are older
                       than the policy allows (`when_stale = "mask"`)
    rollout_log_probs  under the version in `versions`; 0.0 for tokens that a tool returned; None if
                       not requested
    versions           policy version that made the token; -1 if a tool returned it
    segments           of generated tokens only
    staleness          the trainer's version at delivery minus the oldest version of a token to be
                       trained
    status             as in slime: COMPLETED, or TRUNCATED at max_tokens
    reward             the reward function's value, or the total of named values; None: there is no
                       reward function
    rewards            the named values
    """

    uid: str
    index: Count
    prompt_ids: list[Count]
    response_ids: list[Count]
    response_mask: list[Count]
    rollout_log_probs: list[float] | None
    versions: list[Version]
    segments: list[Span]
    staleness: Serial
    finish_reason: Literal["stop", "length"]
    status: Literal["COMPLETED", "TRUNCATED"]
    num_interruptions: Count
    extra: dict[str, Any] = {}
    reward: float | None = None
    rewards: dict[str, float] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def oldest_version(self) -> int | None:
        """verl's min_global_steps, over the tokens to be trained; None if there are none."""
        return min((span.version for span in self.segments if not span.masked), default=None)

    @property
    def newest_version(self) -> int | None:
        """verl's max_global_steps."""
        return max((span.version for span in self.segments), default=None)


class FailedGroup(msgspec.Struct, frozen=True):
    """A group that can never be complete; the trainer may submit its prompt again."""

    uid: str
    reason: str


class LostGroup(msgspec.Struct, frozen=True):
    """A group that will never be delivered. `reason`: why it has failed; None: it was filtered.
    `digest`: of the prompt of a filtered group (`submissions.digest_of`)."""

    uid: str
    reason: str | None
    digest: int | None = None


class Batch(msgspec.Struct, frozen=True):
    """The samples of complete groups; `version` is the trainer's at delivery.

    A trainer that asks for parts gets one `part` of the batch, which is complete with the `last`
    one. The last part may have no samples.

    failed          groups that have failed since the previous batch
    filtered        uids of complete groups that the filter dropped; do not submit them again
    missing         groups that the batch is short of, because no more are coming
    failed_samples  how many samples have failed, by uid, of the groups that lack some
    """

    number: Serial
    version: Serial
    samples: list[Sample]
    failed: list[FailedGroup] = []
    part: Size = 0
    last: bool = True
    filtered: list[str] = []
    missing: Count = 0
    failed_samples: dict[str, Size] = {}

    def groups(self) -> dict[str, list[Sample]]:
        """Samples by the uid of their prompt."""
        groups: dict[str, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.uid, []).append(sample)
        return groups

    def balanced(self, ranks: int, *, whole_groups: bool = True) -> list[list[Sample]]:
        """Divide the samples among `ranks` ranks with about equal numbers of tokens, prompts
        included.

        No two ranks differ by more tokens than the largest group has, or the longest sample if
        `whole_groups` is false. Some ranks get no samples if there are too few. Raises CallerError
        for less than one rank.
        """
        units = list(self.groups().values()) if whole_groups else [[one] for one in self.samples]
        weights = [sum(sample.tokens for sample in unit) for unit in units]
        return [
            [sample for place in places for sample in units[place]]
            for places in balanced(weights, ranks)
        ]


def batch_of(
    action: Deliver,
    samples: list[Sample],
    lost: Sequence[LostGroup],
    prompts: Mapping[str, Prompt],
) -> Batch:
    """The batch of a delivery, with the lost groups that are reported with it. `prompts`: at least
    those of its groups."""
    here = Counter(sample.uid for sample in samples)
    return Batch(
        action.batch,
        action.version,
        samples,
        [FailedGroup(group.uid, group.reason) for group in lost if group.reason is not None],
        action.part,
        action.last,
        [group.uid for group in lost if group.reason is None],
        action.missing,
        {uid: prompts[uid].samples - n for uid, n in here.items() if n < prompts[uid].samples},
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
        reward=None if reward is None else reward.total,
        rewards={} if reward is None else reward.named,
    )


def _spans(segments: Sequence[model.Segment], mask: Sequence[int]) -> list[Span]:
    """The core's segments, which count generated tokens, as positions in the response."""
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
            spans.append(Span(segment.version, segment.instance, at, end, segment.masked))
            todo -= end - at
            at = end
    return spans


# ------------------------------------------------------------------------------------------
# What a trainer says of a batch: how far its own log-probs are from those of the rollouts.

#: The largest logarithm of a ratio of probabilities that is told from larger ones, as in verl.
LARGEST_LOG_RATIO = 20.0

_Figure = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class TokenMismatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens of one version in responses of similar length. r is the trainer's probability of a
    token over the rollout's.

    version    that made the tokens
    longest    the most tokens of such a response
    tokens     their number
    k3         mean of r - 1 - log r: Schulman's estimator of the KL divergence of the rollout's
               distribution from the trainer's (joschu.net/blog/kl-approx.html). A difference of d
               in all log-probs gives about d * d / 2
    max_ratio  the largest r
    clipped    share of tokens whose r truncated importance sampling cuts
    """

    version: Serial
    longest: Count
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    k3: _Figure
    max_ratio: _Figure
    clipped: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Mismatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the log-probs that a trainer computes with the weights of `version` differ from the
    rollouts'. Tokens of the same version should have none, but engine and trainer compute
    differently, and the more so the lower the engine's precision; without truncated importance
    sampling quantised rollouts then learn less (FlashRL, fengyao.notion.site/flash-rl; FP8-RL,
    arXiv 2601.18150). Those of older versions differ by their staleness too."""

    version: Serial
    kinds: Annotated[list[TokenMismatch], msgspec.Meta(max_length=1024)]

    def k3(self) -> float:
        """Of the tokens of the trainer's own version; 0 without any."""
        own = [kind for kind in self.kinds if kind.version == self.version]
        tokens = sum(kind.tokens for kind in own)
        return sum(kind.k3 * kind.tokens for kind in own) / tokens if tokens else 0.0


# ------------------------------------------------------------------------------------------
# Tools by name: a coroutine cannot be stored, so a continued run must get its tools again.


class ToolGone(Exception):
    """A trajectory cannot continue: its tool was lost with its process and not passed again."""

    def __init__(self, name: str) -> None:
        if name:
            gone = f"its tool {name!r} was not passed again"
            again = f", and pass from_toml tools={{{name!r}: ...}} next time"
        else:
            gone, again = "its tool was lost with its process", ""
        super().__init__(f"{gone}, in the middle of a trajectory: submit it again{again}")


class NamedTools:
    """The tools that outlive their process: the process that continues the run passes them under
    the same names.

    A store has the name of a tool, not the coroutine. A trajectory goes on from its stored turns,
    and a turn whose tool was running is given to the tool again: that it acts twice is the price of
    not losing its result.
    """

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = dict(tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def tool(self, name: str) -> Tool:
        """The tool of this name; if it was not passed again, one that raises ToolGone."""

        async def gone(trajectory: Trajectory) -> None:
            raise ToolGone(name)

        return self._tools.get(name, gone)

    def name_of(self, tool: Tool | None) -> str | None:
        """The tool's name; "" without a name, None without a tool."""
        if tool is None:
            return None
        return next((name for name, other in self._tools.items() if other == tool), "")
