"""The prompts of a run: submitted, made into samples, and kept until acknowledged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from rollout_sched.core.actions import Deliver
from rollout_sched.core.errors import CallerError, RolloutError
from rollout_sched.core.events import GroupSubmitted
from rollout_sched.live.driver import Driver
from rollout_sched.live.length_store import LengthStore
from rollout_sched.live.payload_book import PayloadFactory
from rollout_sched.live.payloads import TokenPayload
from rollout_sched.live.prompt_checks import check_prompt
from rollout_sched.live.recovery import Recovered
from rollout_sched.live.reward_book import RewardBook
from rollout_sched.live.reward_function import RewardFunction
from rollout_sched.live.sample_payloads import SamplePayloads
from rollout_sched.live.samples import LostGroup, Prompt, Reward, Sample, sample_of
from rollout_sched.live.stored_session import StoredSession
from rollout_sched.live.tools import NamedTools
from rollout_sched.live.trajectory import Tool

#: Submits a group whose samples another process can also make from its prompt.
Place = Callable[[Prompt, GroupSubmitted, PayloadFactory], None]


class Submissions:
    """Groups by uid, kept until they are delivered or have failed and the trainer has acknowledged
    that.

    A submission is idempotent: the same prompt under the same uid is accepted once. A lost group
    that was not reported to its trainer yet is not accepted again if it was filtered, or if
    submissions are closed.

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
        self._told: dict[int, dict[str, LostGroup]] = {}  # by batch, until acknowledged
        self._rewards: RewardBook | None = None
        if rewards is not None:
            self._rewards = RewardBook(rewards, self.prompts, stored)
            driver.judge_by(self._rewards)

    def submit(self, prompts: Iterable[Prompt], tool: Tool | None) -> None:
        """See `TrainerSession.submit`."""
        if self._stored is not None:
            self._stored.check_room()
        for prompt in prompts:
            loss, known = self._loss(prompt.uid), self.known(prompt.uid)
            if loss is not None and loss.reason is None:
                continue  # it was already made and filtered
            if known is None:
                if loss is None or not self._driver.view.run.closed:
                    self._take(prompt, tool)  # else a batch will report that it has failed
            elif known != prompt:
                raise CallerError(
                    f"group {prompt.uid!r} was already submitted with other values of "
                    f"{', '.join(_differences(known, prompt))}; give each group its own uid"
                )

    def known(self, uid: str) -> Prompt | None:
        """The prompt of an open group, or of one in an unacknowledged batch."""
        here = self.prompts.get(uid)
        if here is not None:
            return here
        return next((b[uid] for b in self._delivered.values() if uid in b), None)

    def restore(self, found: Recovered, made: Mapping[str, PayloadFactory]) -> None:
        """Continue from what an earlier run has left; `made`: the factory of the samples of each
        open group."""
        self._lost = _by_uid(found.lost)
        self._told = {batch: _by_uid(found.told[batch]) for batch in sorted(found.told)}
        if self._rewards is not None:
            self._rewards.take_up(found.rewards)
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

    def acknowledged(self, batch: int) -> None:
        """The whole batch is acknowledged: its uids may be used again."""
        self._delivered.pop(batch, None)
        self._told.pop(batch, None)

    def fail(self, group: str, error: Exception | None) -> None:
        """The group can never be complete; its uid may be submitted again."""
        self._lose(LostGroup(group, _why(error)))

    def filter(self, group: str) -> None:
        """The group is complete, but will not be trained."""
        self._lose(LostGroup(group, None))

    @property
    def lost(self) -> list[LostGroup]:
        """Lost groups that the next batch will report."""
        return list(self._lost.values())

    def told(self) -> dict[str, Any]:
        """The lost groups that the next batch will report: failed with reasons, and filtered."""
        return {
            "failed": {group.uid: group.reason for group in self.lost if group.reason is not None},
            "filtered": [group.uid for group in self.lost if group.reason is None],
        }

    def take_lost(self, batch: int) -> list[LostGroup]:
        """Remove and return the lost groups, which are reported with this batch."""
        lost, self._lost = self.lost, {}
        if lost:
            self._told.setdefault(batch, {}).update(_by_uid(lost))
        if self._stored is not None:
            for group in lost:
                self._stored.lost(group, batch)
        return lost

    def _lose(self, lost: LostGroup) -> None:
        if lost.uid in self.prompts:
            self.open_samples -= self.prompts.pop(lost.uid).samples
        self._lost[lost.uid] = lost
        if self._stored is not None:
            self._stored.lost(lost)

    def _loss(self, uid: str) -> LostGroup | None:
        """The last loss of a group whose report is not acknowledged."""
        unheard = (self._lost, *reversed(self._told.values()))
        return next((groups[uid] for groups in unheard if uid in groups), None)

    def _reward(self, request: str) -> Reward | None:
        return None if self._rewards is None else self._rewards.take(request)

    def _take(self, prompt: Prompt, tool: Tool | None) -> None:
        check_prompt(
            prompt,
            max_model_len=self._driver.max_model_len(),
            turns=tool is not None,
            verified=self.payloads.verified,
        )
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
        if self._stored is not None:
            judged = self._rewards is not None
            self._stored.submitted(prompt, self._tools.name_of(tool), judged=judged)

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
    if error is None:  # no error ended it (see `core.event_handlers.interrupted`)
        return "instances aborted it repeatedly, although we did not request that"
    return str(error) if isinstance(error, RolloutError) else f"{type(error).__name__}: {error}"
