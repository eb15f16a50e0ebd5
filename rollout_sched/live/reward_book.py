"""Holds the rewards of a trainer's samples from their computation to their delivery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from rollout_sched.core import model
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.ports import PayloadOf
from rollout_sched.live.reward_function import RewardFunction
from rollout_sched.live.samples import Prompt, Reward, Sample, sample_of
from rollout_sched.live.stored_session import StoredSession


class RewardBook:
    """A judge of samples (`live.ports.SampleJudge`) by a reward function.

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

    def take_up(self, known: Mapping[str, Reward]) -> None:
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
