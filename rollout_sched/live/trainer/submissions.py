"""The prompts of a run: submitted, made into samples, and kept until acknowledged.

Submitting is idempotent: after a batch is acknowledged, its uids and digests of its prompts remain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import msgspec

from rollout_sched.config import nearest
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.core.model import model
from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import GroupSubmitted
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import PayloadOf
from rollout_sched.live.requests.payloads import PayloadFactory
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.requests.trajectories import Tool, TrajectoryPayload
from rollout_sched.live.trainer import records
from rollout_sched.live.trainer.lengths import LengthStore
from rollout_sched.live.trainer.rewards import RewardFunction
from rollout_sched.live.trainer.samples import (
    LostGroup,
    NamedTools,
    Prompt,
    Reward,
    Sample,
    sample_of,
)
from rollout_sched.live.trainer.stored import Recovered, StoredSession


class SamplePayloads:
    """Creates the payloads of a trainer's samples. `stream_every`: tokens between partial results;
    `max_model_len`: tokens that some instance takes, 0 if unknown."""

    def __init__(self, stream_every: int, max_model_len: Callable[[], int]) -> None:
        self.stream_every = stream_every
        self._max_model_len = max_model_len

    def new(self, prompt: Prompt, index: int, tool: Tool | None = None) -> TokenPayload:
        """The payload of the sample with this index of a prompt."""
        sampling, stream_every = prompt.sampling_of(index), self.stream_every
        if tool is None:
            return TokenPayload(prompt.prompt_ids, sampling, stream_every=stream_every)
        return TrajectoryPayload(
            prompt.uid,
            index,
            prompt.prompt_ids,
            sampling,
            tool,
            self._max_model_len,
            stream_every=stream_every,
            extra=prompt.extra,
        )


class Rewards:
    """Holds the rewards of a trainer's samples from their computation to their delivery. It judges
    them (`live.ports.SampleJudge`) by a reward function.

    `prompts`: of the open groups, by uid. `stored`: the store that each reward is written to as
    soon as it is known, so that a continued run does not compute it again.
    """

    def __init__(
        self,
        function: RewardFunction,
        prompts: Mapping[str, Prompt],
        stored: StoredSession | None = None,
    ) -> None:
        self._function = function
        self._prompts = prompts
        self._stored = stored
        self._known: dict[str, Reward] = {}  # by request

    def __len__(self) -> int:
        return len(self._known)

    def restore(self, known: Mapping[str, Reward]) -> None:
        """Take over the rewards of an earlier epoch of the run."""
        self._known.update(known)

    def take(self, request: str) -> Reward | None:
        """Remove and return the reward of a sample that is delivered."""
        return self._known.pop(request, None)

    async def judge(self, sample: model.DeliveredSample, payload_of: PayloadOf) -> Reward:
        known = self._known.get(sample.request)
        if known is not None:  # from an earlier epoch of the run
            return known
        return await self._function.reward(self._sample(sample, payload_of))

    def note(self, sample: model.DeliveredSample, worth: Reward) -> None:
        if self._stored is not None and sample.request not in self._known:
            self._stored.rewarded(sample.request, worth)
        self._known[sample.request] = worth

    def forget(self, request: str) -> None:
        if self._known.pop(request, None) is not None and self._stored is not None:
            self._stored.forget_reward(request)

    async def keeps(self, samples: Sequence[model.DeliveredSample], payload_of: PayloadOf) -> bool:
        if not self._function.filters:
            return True
        return await self._function.keeps([self._sample(sample, payload_of) for sample in samples])

    def _sample(self, sample: model.DeliveredSample, payload_of: PayloadOf) -> Sample:
        payload, prompt = cast(TokenPayload, payload_of(sample)), self._prompts[sample.group]
        return sample_of(sample, payload, prompt, self._known.get(sample.request))


# ------------------------------------------------------------------------------------------
# Checks at submission that a prompt can be generated at all.

#: Fields of vLLM 0.32's SamplingParams that a caller may set. An endpoint would ignore any other
#: field, or refuse it only when the prompt is dispatched.
SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "prompt_logprob_start",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "repetition_detection",
        "repetition_penalty",
        "routed_experts_prompt_start",
        "seed",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "trace_decode_token_ids",
        "watermarking",
    }
)

#: SamplingParams that are changed for each attempt (`live.requests.continuation`).
_INTEGERS = ("min_tokens", "seed")

#: SamplingParams that are fields of Prompt instead.
_OURS = {"n": "Prompt.samples", "max_tokens": "Prompt.max_tokens"}


def check_prompt(prompt: Prompt, *, max_model_len: int, turns: bool) -> None:
    """Raises CallerError with the group, the error and the remedy.

    max_model_len  tokens of prompt and response that some instance takes; 0 if unknown
    turns          a tool answers its turns: the response ends when there is no more room
    """
    wrong = _names(prompt) or _length(prompt, max_model_len, turns)
    if prompt.min_samples > prompt.samples:
        wrong = f"min_samples, {prompt.min_samples}, is more than samples, {prompt.samples}"
    for sampling in (prompt.sampling, *prompt.each):
        wrong = wrong or _sampling(sampling)
    if wrong:
        raise CallerError(f"group {prompt.uid!a}: {wrong}")


def _names(prompt: Prompt) -> str:
    for field, name in (("uid", prompt.uid), ("prompt_key", prompt.prompt_key)):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            return f"{field} is not text that can be written: {error}"
    return ""


def _length(prompt: Prompt, most: int, turns: bool) -> str:
    asked, room = len(prompt.prompt_ids), most - len(prompt.prompt_ids)
    if not most or room >= (1 if turns else prompt.max_tokens):
        return ""
    if room < 1:
        return f"its prompt of {asked} tokens leaves no room in max_model_len, {most}; shorten it"
    return (
        f"prompt_ids and max_tokens are {asked} + {prompt.max_tokens} tokens, and the instances' "
        f"max_model_len is {most}; max_tokens can be {room}"
    )


def _sampling(sampling: Mapping[str, Any]) -> str:
    for name, value in sampling.items():
        if name in _OURS:
            return f"sampling: {name} is not allowed there; set {_OURS[name]}"
        if name not in SAMPLING:
            return f"sampling: vLLM has no parameter {name!r}{nearest(str(name), SAMPLING)}"
        if name in _INTEGERS and not isinstance(value, int | None):
            return f"sampling: {name} must be an integer, not {value!r}"
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return f"sampling: {name} has more than 64 bits"
        if isinstance(value, float) and not math.isfinite(value):
            return f"sampling: {name} is {value}, which JSON cannot say"
    return ""


# ------------------------------------------------------------------------------------------
# Groups that are not generated again.

#: The last groups that are remembered at least: some 200 bytes of memory each, 40 in a store.
REMEMBERED = 1_000_000

_ENCODER = msgspec.msgpack.Encoder(order="sorted")


def digest_of(prompt: Prompt) -> int:
    """64 bits of a prompt. What cannot be written as data, such as objects in `extra`, does not
    count."""
    try:
        data = _ENCODER.encode(prompt)
    except (TypeError, ValueError, OverflowError, RecursionError):
        typed = msgspec.structs.replace(prompt, sampling={}, each=[], extra={})
        data = _ENCODER.encode(typed)
    return int.from_bytes(blake2b(data, digest_size=8).digest())


class AcknowledgedGroups:
    """The digests of the prompts of acknowledged groups, delivered or filtered, by uid. Batches are
    forgotten in the order of their acknowledgement, but none of the last `remembered` groups."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._digests: dict[str, int] = {}
        self._batches: dict[int, list[str]] = {}  # uids

    def __contains__(self, uid: str) -> bool:
        return uid in self._digests

    def digest(self, uid: str) -> int | None:
        return self._digests.get(uid)

    def add(self, batch: int, digests: Mapping[str, int]) -> list[int]:
        """Remember the groups of a batch. Returns the batches that are forgotten."""
        self._digests.update(digests)
        self._batches[batch] = list(digests)
        forgotten = []
        for old, uids in self._batches.items():
            if len(self._digests) - len(uids) < self._remembered:
                break
            forgotten.append(old)
            for uid in uids:
                self._digests.pop(uid, None)
        for old in forgotten:
            del self._batches[old]
        return forgotten


#: Submits a group whose samples another process can also make from its prompt.
Place = Callable[[Prompt, GroupSubmitted, PayloadFactory], None]


class Submissions:
    """Groups by uid, kept until they are delivered or have failed and the trainer has acknowledged
    that.

    A submission is idempotent: the same prompt under the same uid is generated once, also after its
    batch was acknowledged. A lost group may be submitted again, unless it was filtered, or it was
    not reported to its trainer yet and submissions are closed.

    prompts       of the open groups
    open_samples  samples of these groups, queued or running
    place         submits groups without a tool to the scheduler; None: the driver does
    """

    def __init__(
        self,
        driver: Driver,
        payloads: SamplePayloads,
        *,
        lengths: LengthStore | None,
        stored: StoredSession | None,
        rewards: RewardFunction | None,
        tools: NamedTools,
    ) -> None:
        self.payloads = payloads
        self.prompts: dict[str, Prompt] = {}
        self.open_samples = 0
        self.place: Place | None = None
        self._driver = driver
        self._lengths = lengths
        self._stored = stored
        self._tools = tools
        self._delivered: dict[int, dict[str, Prompt]] = {}  # by batch, until it is acknowledged
        self._lost: dict[str, LostGroup] = {}  # not reported to a trainer yet
        self._reported: dict[int, dict[str, LostGroup]] = {}  # by batch, until acknowledged
        self._acknowledged = AcknowledgedGroups()
        self._rewards: Rewards | None = None
        if rewards is not None:
            self._rewards = Rewards(rewards, self.prompts, stored)
            driver.judge_by(self._rewards)

    def submit(self, prompts: Iterable[Prompt], tool: Tool | None) -> list[str]:
        """Submit each prompt as a group, once. Returns the uids of the acknowledged ones. Raises
        CallerError at the first invalid one."""
        if self._stored is not None:
            self._stored.check_room()
        acknowledged = []
        for prompt in prompts:
            if self.is_new(prompt.uid):
                self._take(prompt, tool)
                continue
            self._check_same(prompt)
            if prompt.uid in self._acknowledged:
                acknowledged.append(prompt.uid)
        return acknowledged

    def is_new(self, uid: str) -> bool:
        """Whether a group that is submitted under this uid is to be generated."""
        if uid in self._acknowledged or self.known(uid) is not None:
            return False
        loss = self._loss(uid)  # a batch will report it, if it is not generated
        return loss is None or (loss.reason is not None and not self._driver.view.run.closed)

    def _check_same(self, prompt: Prompt) -> None:
        """Raises CallerError for another prompt than was submitted under its uid before."""
        known, digest = self.known(prompt.uid), self._acknowledged.digest(prompt.uid)
        if known is not None and known != prompt:
            other = f"submitted with other values of {', '.join(_differences(known, prompt))}"
        elif digest is not None and digest != digest_of(prompt):
            other = "delivered with other values"
        else:
            return
        raise CallerError(f"group {prompt.uid!r} was already {other}; give each group its own uid")

    def known(self, uid: str) -> Prompt | None:
        """The prompt of an open group, or of one in an unacknowledged batch."""
        here = self.prompts.get(uid)
        if here is not None:
            return here
        return next((b[uid] for b in self._delivered.values() if uid in b), None)

    def unknown(self, uids: Iterable[str]) -> list[str]:
        """The groups of these uids that are neither open nor delivered nor lost, or whose failure
        is acknowledged."""
        return [uid for uid in uids if self.is_new(uid) and self._loss(uid) is None]

    def restore(self, found: Recovered, made: Mapping[str, PayloadFactory]) -> None:
        """Continue from what an earlier run has left; `made`: the factory of the samples of each
        open group."""
        self._lost = _by_uid(found.lost)
        self._reported = {batch: _by_uid(found.reported[batch]) for batch in sorted(found.reported)}
        for batch in sorted(found.acknowledged):
            self._remember(batch, found.acknowledged[batch])
        if self._rewards is not None:
            self._rewards.restore(found.rewards)
        for uid, factory in made.items():
            prompt = self.prompts[uid] = found.prompts[uid]
            self.open_samples += prompt.samples
            self._driver.front.payloads.add_group(uid, factory)
        for action in found.deliveries:
            self._note_delivered(action, found.prompts)

    def delivered(self, action: Deliver, payloads: list[TokenPayload]) -> list[Sample]:
        """Remove delivered groups and return their samples."""
        samples = [
            sample_of(counted, payload, self.prompts[counted.group], self._reward(counted.request))
            for counted, payload in zip(action.samples, payloads, strict=True)
        ]
        if self._lengths is not None:
            self._learn(action, self._lengths)
        self._note_delivered(action, self.prompts)
        for uid in {sample.uid for sample in samples}:
            self.open_samples -= self.prompts.pop(uid).samples
        return samples

    def delivered_prompts(self, batch: int) -> Mapping[str, Prompt]:
        """The prompts of the groups in an unacknowledged batch, by uid."""
        return self._delivered[batch]

    def acknowledged(self, batch: int) -> None:
        """The whole batch is acknowledged: its prompts are let go, and their digests remembered."""
        digests = {uid: digest_of(prompt) for uid, prompt in self._delivered.pop(batch, {}).items()}
        for uid, lost in self._reported.pop(batch, {}).items():
            if lost.digest is not None:
                digests[uid] = lost.digest
        if self._stored is not None:
            self._stored.acknowledged(batch)
            self._stored.remember(batch, digests)
        self._remember(batch, digests)

    def fail(self, group: str, error: Exception | None) -> None:
        """The group can never be complete; its uid may be submitted again."""
        self._lose(LostGroup(group, _why(error)))

    def filter(self, group: str) -> None:
        """The group is complete, but will not be trained."""
        self._lose(LostGroup(group, None, digest_of(self.prompts[group])))

    @property
    def lost(self) -> list[LostGroup]:
        """Lost groups that the next batch will report."""
        return list(self._lost.values())

    def summary(self) -> dict[str, Any]:
        """The lost groups that the next batch will report: failed with reasons, and filtered."""
        return {
            "failed": {group.uid: group.reason for group in self.lost if group.reason is not None},
            "filtered": [group.uid for group in self.lost if group.reason is None],
        }

    def take_lost(self, batch: int) -> list[LostGroup]:
        """Remove and return the lost groups, which are reported with this batch."""
        lost, self._lost = self.lost, {}
        if lost:
            self._reported.setdefault(batch, {}).update(_by_uid(lost))
        if self._stored is not None:
            for group in lost:
                self._stored.lost(group, batch)
        return lost

    def _remember(self, batch: int, digests: Mapping[str, int]) -> None:
        for forgotten in self._acknowledged.add(batch, digests):
            if self._stored is not None:
                self._stored.remember(forgotten, {})

    def _lose(self, lost: LostGroup) -> None:
        if lost.uid in self.prompts:
            self.open_samples -= self.prompts.pop(lost.uid).samples
        self._lost[lost.uid] = lost
        if self._stored is not None:
            self._stored.lost(lost)

    def _loss(self, uid: str) -> LostGroup | None:
        """The last loss of a group whose report is not acknowledged."""
        unacknowledged = (self._lost, *reversed(self._reported.values()))
        return next((groups[uid] for groups in unacknowledged if uid in groups), None)

    def _reward(self, request: str) -> Reward | None:
        return None if self._rewards is None else self._rewards.take(request)

    def _take(self, prompt: Prompt, tool: Tool | None) -> None:
        check_prompt(
            prompt,
            max_model_len=self._driver.max_model_len(),
            turns=tool is not None,
        )
        recorded = None
        if self._stored is not None:  # before anything is changed: it may refuse the prompt
            judged, name = self._rewards is not None, self._tools.name_of(tool)
            recorded = records.encoded_prompt(prompt, tool=name, judged=judged)
        self.prompts[prompt.uid] = prompt

        def payload(index: int) -> TokenPayload:
            return self.payloads.new(prompt, index, tool)

        submitted = self._submitted(prompt)
        try:
            if self.place is None or tool is not None:
                self._driver.submit_group(submitted, payload)
            else:
                self.place(prompt, submitted, payload)
        except BaseException:
            del self.prompts[prompt.uid]
            raise
        self.open_samples += prompt.samples
        if self._stored is not None and recorded is not None:
            self._stored.submitted(prompt.uid, *recorded)

    def _submitted(self, prompt: Prompt) -> GroupSubmitted:
        submitted = prompt.submitted
        if self._rewards is not None:
            submitted = msgspec.structs.replace(submitted, judged=True)
        return submitted if self._lengths is None else self._lengths.complete(submitted)

    def _note_delivered(self, action: Deliver, prompts: Mapping[str, Prompt]) -> None:
        batch = self._delivered.setdefault(action.batch, {})
        for sample in action.samples:
            batch[sample.group] = prompts[sample.group]

    def _learn(self, action: Deliver, lengths: LengthStore) -> None:
        by_group: dict[str, list[int]] = {}
        for sample in action.samples:
            by_group.setdefault(sample.group, []).append(sample.response_tokens)
        for group, made in by_group.items():
            lengths.delivered(self.prompts[group].submitted, made)


def _by_uid(lost: Iterable[LostGroup]) -> dict[str, LostGroup]:
    return {group.uid: group for group in lost}


def _differences(one: Prompt, other: Prompt) -> list[str]:
    return [
        field for field in Prompt.__struct_fields__ if getattr(one, field) != getattr(other, field)
    ]


def _why(error: Exception | None) -> str:
    """Why a group has failed, from its last error."""
    if error is None:  # no error ended it (see `core.handlers`)
        return "instances aborted it repeatedly, although we did not request that"
    return str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
