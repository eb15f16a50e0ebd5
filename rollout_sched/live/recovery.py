"""What an earlier scheduler of the run has left in the store, as far as it is whole."""

from __future__ import annotations

import logging
from collections.abc import Container

import msgspec

from rollout_sched.core.actions import Deliver
from rollout_sched.core.events import Restored
from rollout_sched.core.rounds import DeliveredGroup
from rollout_sched.core.run_state import GroupFacts, PromptFacts, RunFacts, RunState
from rollout_sched.live import stored_facts as facts
from rollout_sched.live.leases import LeaseFacts
from rollout_sched.live.samples import LostGroup, Prompt, Reward
from rollout_sched.live.stored_facts import ONE, StoredLoss, StoredPrompt, StoredWeights, decoded
from rollout_sched.live.stored_transcripts import StoredTranscripts
from rollout_sched.live.tools import ToolGone
from rollout_sched.store.errors import PieceDamaged, StoreError
from rollout_sched.store.store import Store
from rollout_sched.store.tokens import decode

log = logging.getLogger(__name__)

_DAMAGED = "what the store held of it is damaged: submit it again"


class Recovered(msgspec.Struct):
    """What a new epoch begins with.

    state       the scheduler's; None: the store was new
    prompts     of the groups that are here, and of those delivered and not acknowledged, by uid
    tools       the names of their tools, given again or not; "" of one that has none
    deliveries  not acknowledged, in order
    rewards     of the finished samples that have one and are here, by request
    unrewarded  requests of groups from which nothing is gone on, whose rewards are there
    leases      whose these are, and who may believe to have others, by batch
    unleased    names of leases of batches that are not there
    lost        groups that their trainer is to be told of
    told        likewise, with a batch that is delivered again, by its number
    telling     the number of the last batch that only told of such groups; -1: there was none
    untold      names of losses that were to be told with a batch that is not
    weights     the newest that were published; None: none were
    paused      instances that were being updated
    running     attempts that may still run somewhere: (instance, attempt)
    gone        groups of which nothing is gone on from, though their facts are there
    anew        requests whose tokens are not gone on from
    """

    state: RunState | None = None
    prompts: dict[str, Prompt] = {}
    tools: dict[str, str] = {}
    deliveries: list[Deliver] = []
    rewards: dict[str, Reward] = {}
    unrewarded: list[str] = []
    leases: dict[int, LeaseFacts] = {}
    unleased: list[str] = []
    lost: list[LostGroup] = []
    told: dict[int, list[LostGroup]] = {}
    telling: int = -1
    untold: list[str] = []
    weights: StoredWeights | None = None
    paused: set[str] = set()
    running: list[tuple[str, int]] = []
    gone: list[str] = []
    anew: list[str] = []

    @property
    def event(self) -> Restored | None:
        return None if self.state is None else Restored(self.state)


def recover(store: Store, transcripts: StoredTranscripts, tools: Container[str] = ()) -> Recovered:
    """Read it; `tools`: names of those that are given again. What was damaged starts over, or is
    among `lost`, and is logged. Raises StoreError where nothing can be gone on from."""
    for line in store.losses.told():
        log.error("store %s: %s", store.folder, line)
    try:
        return _Recovery(store, transcripts, tools).recovered()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(
            f"store {store.folder}: a fact cannot be understood ({error}); open it with the "
            "version that wrote it, or name another folder"
        ) from error


class _Recovery:
    def __init__(self, store: Store, transcripts: StoredTranscripts, given: Container[str]) -> None:
        self._store = store
        self._transcripts = transcripts
        self._given = given
        self._found = Recovered()
        self._prompts = {
            uid: decoded(data, StoredPrompt) for uid, data in store.facts(facts.PROMPT).items()
        }

    def recovered(self) -> Recovered:
        store, found = self._store, self._found
        groups = [decoded(data, GroupFacts) for data in store.facts(facts.GROUP).values()]
        self._read_prompts()
        self._read_losses()
        deliveries = [decoded(data, Deliver) for data in store.facts(facts.DELIVERED).values()]
        run = store.facts(facts.RUN).get(ONE)
        if run is None and (groups or deliveries):
            raise StoreError(
                f"store {store.folder}: the counters of its run are lost; move the folder away and "
                f"submit again what it held: {', '.join(sorted(found.prompts)) or 'nothing'}"
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
        weights = store.facts(facts.WEIGHTS).get(ONE)
        found.weights = None if weights is None else decoded(weights, StoredWeights)
        telling = store.facts(facts.TELLING).get(ONE)
        found.telling = -1 if telling is None else decoded(telling, int)
        self._find_running(groups)
        self._fail_what_is_left(groups)
        self._give_up_rewards()
        delivered = {action.batch for action in found.deliveries}
        for batch in found.told.keys() - delivered:
            lost = found.told.pop(batch)
            found.lost += lost
            found.untold += [facts.loss_name(group.uid, batch) for group in lost]
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
                self._found.unleased.append(name)

    def _read_losses(self) -> None:
        for name, data in self._store.facts(facts.LOST).items():
            loss = decoded(data, StoredLoss)
            group = LostGroup(facts.lost_group(name), loss.reason)
            if loss.batch is None:
                self._found.lost.append(group)
            else:
                self._found.told.setdefault(loss.batch, []).append(group)

    def _take_deliveries(self, deliveries: list[Deliver]) -> None:
        """A group that lacks tokens or a reward is not delivered again, but told to have failed."""
        for action in deliveries:
            spoilt = {
                sample.group
                for sample in action.samples
                if sample.group not in self._found.prompts
                or self._generated(sample.request) != sample.response_tokens
                or self._lacks_reward(sample.group, sample.request)
            }
            for uid in sorted(spoilt):
                self._found.told.setdefault(action.batch, []).append(self._lost(uid, _DAMAGED))
            self._found.anew += [s.request for s in action.samples if s.group in spoilt]
            samples = tuple(sample for sample in action.samples if sample.group not in spoilt)
            self._found.deliveries.append(msgspec.structs.replace(action, samples=samples))

    def _whole(self, group: GroupFacts) -> GroupFacts | None:
        """As it can be gone on from; None if it cannot."""
        uid = group.group
        if uid not in self._found.prompts:
            self._fail(uid, _DAMAGED)
            return None
        names = [f"{uid}/{request.index}" for request in group.requests]
        made = [self._generated(name) for name in names]
        whole = made == [request.response_tokens for request in group.requests]
        needs_tool = not whole or group.state not in ("judging", "complete")
        tool = self._found.tools.get(uid)
        if needs_tool and tool is not None and tool not in self._given:
            self._found.anew += names
            self._fail(uid, str(ToolGone(tool)))
            return None
        if whole:
            return self._judged(group, names)
        log.warning("store %s: group %s starts over: tokens are lost", self._store.folder, uid)
        self._found.anew += names
        return group.anew()

    def _fail_what_is_left(self, groups: list[GroupFacts]) -> None:
        """Prompts of which nothing says any more whether they wait or were delivered."""
        delivered = {s.group for action in self._found.deliveries for s in action.samples}
        known = delivered.union(self._found.gone, (group.group for group in groups))
        for uid in sorted(self._prompts.keys() - known):
            self._fail(uid, _DAMAGED)

    def _judged(self, group: GroupFacts, requests: list[str]) -> GroupFacts:
        """Of one that was kept the rewards are there, or it is judged again."""
        lost = group.judged and not self._found.rewards.keys() >= set(requests)
        if group.state != "complete" or not lost:
            return group
        return msgspec.structs.replace(group, state="judging")

    def _fail(self, uid: str, why: str) -> None:
        self._found.lost.append(self._lost(uid, why))

    def _lost(self, uid: str, why: str) -> LostGroup:
        """Nothing of it is gone on from."""
        log.error("store %s: group %s: %s", self._store.folder, uid, why)
        self._found.gone.append(uid)
        self._found.prompts.pop(uid, None)
        return LostGroup(uid, why)

    def _generated(self, request: str) -> int:
        """Tokens of it that are whole; -1 if they are damaged."""
        try:
            return self._transcripts.take_up(request)[0]
        except PieceDamaged:
            return -1

    def _lacks_reward(self, group: str, request: str) -> bool:
        return self._prompts[group].judged and request not in self._found.rewards

    def _give_up_rewards(self) -> None:
        found = self._found
        gone = (name for name in found.rewards if name.rpartition("/")[0] not in found.prompts)
        found.unrewarded = sorted(gone)
        for request in found.unrewarded:
            del found.rewards[request]

    def _recent(self) -> tuple[DeliveredGroup, ...]:
        data = self._store.facts(facts.RECENT).get(ONE)
        return () if data is None else decoded(data, tuple[DeliveredGroup, ...])

    def _find_running(self, groups: list[GroupFacts]) -> None:
        """Those of which an answer was outstanding, as far as that was written."""
        for group in groups:
            for request in group.requests:
                if request.state == "waiting" and request.last_instance is not None:
                    self._found.running.append((request.last_instance, request.last_attempt))


def _with_every_part(found: list[Deliver], run: RunFacts) -> list[Deliver]:
    """In order. Those whose rows were damaged stand there without samples, for parts are known by
    their number, and a batch is over with its last."""
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
