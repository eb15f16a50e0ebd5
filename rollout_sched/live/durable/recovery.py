"""Reads from the store what an earlier scheduler of the run has left, as far as it is intact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from functools import partial

import msgspec

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.records import (
    DeliveredGroup,
    GroupFacts,
    PromptFacts,
    RunFacts,
    RunState,
    Serial,
)
from rollout_sched.core.model.request_ids import group_of, request_id
from rollout_sched.live.requests.payloads import PayloadFactory
from rollout_sched.live.requests.token_payload import TokenPayload
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer.delivery import LeaseFacts
from rollout_sched.live.trainer.records import (
    ONE,
    StoredLoss,
    StoredPrompt,
    StoredTranscripts,
    decoded,
)
from rollout_sched.live.trainer.samples import (
    Batch,
    LostGroup,
    Prompt,
    Reward,
    ToolGone,
    batch_of,
    sample_of,
)
from rollout_sched.live.trainer.stored import Recovered, StoredWeights
from rollout_sched.store import PieceDamaged, Store, StoreError
from rollout_sched.store.transaction import decode

log = logging.getLogger(__name__)

_DAMAGED = "its data in the store is damaged: submit it again"


def recover(store: Store, transcripts: StoredTranscripts, tools: Container[str] = ()) -> Recovered:
    """Read the store. `tools`: names of the tools that are given again. A damaged group starts over
    or is in `lost`, and is logged. Raises StoreError if the run cannot be continued."""
    for line in store.losses.summary():
        log.error("store %s: %s", store.folder, line)
    try:
        return _Recovery(store, transcripts, tools).recovered()
    except StoreError:
        raise
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreError(
            f"store {store.folder}: a fact cannot be decoded ({error}); open it with the "
            "version that wrote it, or choose another folder"
        ) from error


class _Recovery:
    def __init__(self, store: Store, transcripts: StoredTranscripts, given: Container[str]) -> None:
        self._store = store
        self._transcripts = transcripts
        self._given = given
        self._found = Recovered()
        self._dropped: set[str] = set()  # groups that are not continued
        self._prompts = {
            uid: decoded(data, StoredPrompt) for uid, data in store.facts(facts.PROMPT).items()
        }

    def recovered(self) -> Recovered:
        store, found = self._store, self._found
        groups = [decoded(data, GroupFacts) for data in store.facts(facts.GROUP).values()]
        self._read_prompts()
        self._read_losses()
        deliveries = [decoded(data, Deliver) for data in store.facts(facts.DELIVERED).values()]
        found.acknowledged = {
            int(batch): decoded(data, dict[str, int])
            for batch, data in store.facts(facts.ACKNOWLEDGED).items()
        }
        run = store.facts(facts.RUN).get(ONE)
        if run is None and (groups or deliveries or found.acknowledged):
            raise StoreError(
                f"store {store.folder}: the counters of its run are lost; move the folder away and "
                f"submit its prompts again: {', '.join(sorted(found.prompts)) or 'nothing'}"
            )
        if run is None:
            return found
        rewards = store.facts(facts.REWARD).items()
        found.rewards = {request: decoded(data, Reward) for request, data in rewards}
        self._take_deliveries(_with_every_part(deliveries, decoded(run, RunFacts)))
        self._read_leases()
        kept = [whole for group in groups if (whole := self._whole(group)) is not None]
        found.state = RunState(
            decoded(run, RunFacts).after_losses(groups, kept),
            tuple(sorted(kept, key=lambda group: group.serial)),
            tuple(decoded(data, PromptFacts) for data in store.facts(facts.LENGTHS).values()),
            self._recent(),
        )
        found.paused = set(store.facts(facts.PAUSED))
        found.model = store.facts(facts.MODEL).get(ONE, b"").decode()
        weights = store.facts(facts.WEIGHTS).get(ONE)
        found.weights = None if weights is None else decoded(weights, StoredWeights)
        last_report = store.facts(facts.LAST_REPORT).get(ONE)
        found.last_report = -1 if last_report is None else decoded(last_report, Serial)
        self._find_running(groups)
        self._fail_what_is_left(groups)
        self._give_up_rewards()
        delivered = {action.batch for action in found.deliveries}
        for batch in found.reported.keys() - delivered:
            lost = found.reported.pop(batch)
            found.lost += lost
            for group in lost:
                found.cleanup.drop(facts.LOST, facts.loss_name(group.uid, batch))
        return found

    def _read_prompts(self) -> None:
        for uid, stored in self._prompts.items():
            tokens = self._store.pieces(facts.prompt_owner(uid)).get(0)
            if tokens is None:
                continue  # it was damaged
            ids = list(decode(tokens).ids)
            self._found.prompts[uid] = msgspec.structs.replace(stored.prompt, prompt_ids=ids)
            if stored.tool:
                self._found.tools[uid] = stored.tool_name

    def _read_leases(self) -> None:
        here = {action.batch for action in self._found.deliveries}
        for name, data in self._store.facts(facts.LEASE).items():
            lease = decoded(data, LeaseFacts)
            if lease.acknowledged or int(name) in here:
                self._found.leases[int(name)] = lease
            else:
                self._found.cleanup.drop(facts.LEASE, name)

    def _read_losses(self) -> None:
        for name, data in self._store.facts(facts.LOST).items():
            loss = decoded(data, StoredLoss)
            group = LostGroup(facts.lost_group(name), loss.reason, loss.digest)
            if loss.batch is None:
                self._found.lost.append(group)
            else:
                self._found.reported.setdefault(loss.batch, []).append(group)

    def _take_deliveries(self, deliveries: list[Deliver]) -> None:
        """A group that lacks tokens or a reward is reported as failed, not delivered again."""
        for action in deliveries:
            spoilt = {
                sample.group
                for sample in action.samples
                if sample.group not in self._found.prompts
                or self._generated(sample.request) != sample.response_tokens
                or self._lacks_reward(sample.group, sample.request)
            }
            for uid in sorted(spoilt):
                self._found.reported.setdefault(action.batch, []).append(self._lost(uid, _DAMAGED))
            self._start_over(s.request for s in action.samples if s.group in spoilt)
            samples = tuple(sample for sample in action.samples if sample.group not in spoilt)
            self._found.deliveries.append(msgspec.structs.replace(action, samples=samples))

    def _whole(self, group: GroupFacts) -> GroupFacts | None:
        """The group as it can be continued; None if it cannot."""
        uid = group.group
        if uid not in self._found.prompts:
            self._fail(uid, _DAMAGED)
            return None
        names = [request_id(uid, request.index) for request in group.requests]
        made = [self._generated(name) for name in names]
        whole = made == [request.response_tokens for request in group.requests]
        needs_tool = not whole or group.state not in ("judging", "complete")
        tool = self._found.tools.get(uid)
        if needs_tool and tool is not None and tool not in self._given:
            self._start_over(names)
            self._fail(uid, str(ToolGone(tool)))
            return None
        if whole:
            return self._judged(group, names)
        log.warning("store %s: group %s starts over: tokens are lost", self._store.folder, uid)
        self._start_over(names)
        return group.as_submitted()

    def _fail_what_is_left(self, groups: list[GroupFacts]) -> None:
        """Fail prompts for which the store no longer says whether they wait or were delivered. Of
        some it may have only the tokens."""
        delivered = {s.group for action in self._found.deliveries for s in action.samples}
        known = delivered.union(self._dropped, (group.group for group in groups))
        uids = map(facts.uid_of_owner, self._store.owners())
        submitted = self._prompts.keys() | {uid for uid in uids if uid is not None}
        for uid in sorted(submitted - known):
            self._fail(uid, _DAMAGED)

    def _start_over(self, requests: Iterable[str]) -> None:
        """Do not use what is stored of these requests."""
        for request in requests:
            self._transcripts.forget(request, self._found.cleanup)
            self._found.rewards.pop(request, None)
            self._found.cleanup.drop(facts.REWARD, request)

    def _judged(self, group: GroupFacts, requests: list[str]) -> GroupFacts:
        """A kept group whose rewards are lost is judged again."""
        lost = group.judged and not self._found.rewards.keys() >= set(requests)
        if group.state != "complete" or not lost:
            return group
        return msgspec.structs.replace(group, state="judging")

    def _fail(self, uid: str, why: str) -> None:
        self._found.lost.append(self._lost(uid, why))

    def _lost(self, uid: str, why: str) -> LostGroup:
        """The group is not continued."""
        log.error("store %s: group %s: %s", self._store.folder, uid, why)
        self._dropped.add(uid)
        self._found.cleanup.drop(facts.GROUP, uid)
        self._found.cleanup.drop(facts.PROMPT, uid)
        self._found.prompts.pop(uid, None)
        return LostGroup(uid, why)

    def _generated(self, request: str) -> int:
        """Number of its generated tokens in the store; -1 if they are damaged."""
        try:
            return self._transcripts.restore(request)[0]
        except PieceDamaged:
            return -1

    def _lacks_reward(self, group: str, request: str) -> bool:
        return self._prompts[group].judged and request not in self._found.rewards

    def _give_up_rewards(self) -> None:
        found = self._found
        gone = (name for name in found.rewards if group_of(name) not in found.prompts)
        for request in list(gone):
            del found.rewards[request]
            found.cleanup.drop(facts.REWARD, request)

    def _recent(self) -> tuple[DeliveredGroup, ...]:
        data = self._store.facts(facts.RECENT).get(ONE)
        return () if data is None else decoded(data, tuple[DeliveredGroup, ...])

    def _find_running(self, groups: list[GroupFacts]) -> None:
        """Find attempts without an answer, as far as the store recorded them."""
        for group in groups:
            for request in group.requests:
                if request.state == "waiting" and request.last_instance is not None:
                    self._found.running.append((request.last_instance, request.last_attempt))


def _with_every_part(found: list[Deliver], run: RunFacts) -> list[Deliver]:
    """All parts in order. A damaged part is included without samples, because parts are known by
    their number, and a batch ends with its last part."""
    batches: dict[int, dict[int, Deliver]] = {run.batches: {}} if run.parts else {}
    for action in sorted(found, key=lambda action: (action.batch, action.part)):
        batches.setdefault(action.batch, {})[action.part] = action
    every: list[Deliver] = []
    for batch, parts in sorted(batches.items()):
        newest = parts[max(parts)] if parts else Deliver(batch, run.version, (), -1, False)
        whole = newest.last or batch != run.batches
        number = run.parts if not whole else newest.part + (1 if newest.last else 2)
        every += (
            parts.get(part)
            or Deliver(batch, newest.version, (), part, whole and part == number - 1)
            for part in range(number)
        )
    return every


class RestoredPayloads:
    """The payloads of an earlier run. `make(prompt, index)` creates one without tokens.

    Tokens are read from the store when they are needed: to be sent or delivered.
    """

    def __init__(
        self,
        found: Recovered,
        transcripts: StoredTranscripts,
        make: Callable[[Prompt, int], TokenPayload],
    ) -> None:
        self._found = found
        self._transcripts = transcripts
        self._make = make

    def factories(self) -> dict[str, PayloadFactory]:
        """The factories of the samples of open groups."""
        assert self._found.state is not None
        prompts = self._found.prompts
        open_groups = [group.group for group in self._found.state.groups]
        return {uid: partial(self._payload, prompts[uid]) for uid in open_groups}

    def batches(self) -> list[Batch]:
        """The delivered and unacknowledged batches, part by part. The newest part of each reports
        the groups lost by then; the last part of a batch may not be made yet."""
        newest = {action.batch: action for action in self._found.deliveries}
        return [
            self._batch(action, is_newest=newest[action.batch] is action)
            for action in self._found.deliveries
        ]

    def _batch(self, action: Deliver, *, is_newest: bool) -> Batch:
        prompts = self._found.prompts
        samples = [
            sample_of(
                counted,
                self._payload(prompts[counted.group], counted.index),
                prompts[counted.group],
                self._found.rewards.get(counted.request),
            )
            for counted in action.samples
        ]
        lost = self._found.reported.get(action.batch, []) if is_newest else []
        return batch_of(action, samples, lost, prompts)

    def _payload(self, prompt: Prompt, index: int) -> TokenPayload:
        payload = self._make(prompt, index)
        self._transcripts.read(request_id(prompt.uid, index), payload.transcript)
        return payload
