"""The trainers' part of a store: what they have submitted, and what must be delivered to them."""

from __future__ import annotations

from collections.abc import Awaitable

from rollout_sched.core.actions import Deliver
from rollout_sched.core.groups import Groups
from rollout_sched.live import stored_facts as facts
from rollout_sched.live.leases import LeaseFacts
from rollout_sched.live.open_transaction import OpenTransaction
from rollout_sched.live.recovery import Recovered
from rollout_sched.live.samples import LostGroup, Prompt, Reward
from rollout_sched.live.stored_facts import ONE, StoredLoss, StoredWeights, encoded
from rollout_sched.live.stored_transcripts import StoredTranscripts


class StoredSession:
    """Prompts and samples stay until their batch is acknowledged, and so do the losses that it
    reports.

    `groups`: the scheduler's. Await `promise` before an answer to a caller: it is done when all
    events so far are as durable as `[live] durable` says.
    """

    def __init__(
        self,
        transaction: OpenTransaction,
        groups: Groups,
        transcripts: StoredTranscripts,
    ) -> None:
        self._open = transaction
        self._groups = groups
        self._transcripts = transcripts
        self._deliveries: dict[str, Deliver] = {}  # not acknowledged
        self._rewarded: set[str] = set()  # requests
        self._told: dict[int, list[str]] = {}  # lost groups, by the batch that reports them

    def check_room(self) -> None:
        """Raises StoreFull if no new work can be accepted."""
        self._open.writer.check_room()

    def promise(self) -> Awaitable[None]:
        """Awaiting it may raise StoreBroken."""
        return self._open.promise()

    def take_up(self, found: Recovered) -> None:
        """Continue from what an earlier epoch has left, and drop what is not continued."""
        for action in found.deliveries:
            self.delivered(action)
        for group in found.lost:
            self.lost(group)
        for batch, groups in found.told.items():
            for group in groups:
                self.lost(group, batch)
        for name in found.untold:
            self._open.changes.drop(facts.LOST, name)
        for name in found.unleased:
            self._open.changes.drop(facts.LEASE, name)
        for request in found.unrewarded:
            self._open.changes.drop(facts.REWARD, request)
        self._rewarded.update(found.rewards)

    # -- what trainers say -----------------------------------------------------------------

    def submitted(self, prompt: Prompt, tool: str | None, *, judged: bool = False) -> None:
        """`tool`: the tool's name, "" without a name; None: no tool. `judged`: its samples get
        rewards."""
        fact, tokens = facts.encoded_prompt(prompt, tool=tool, judged=judged)
        self._open.changes.put(facts.PROMPT, prompt.uid, fact)
        self._open.changes.append(facts.prompt_owner(prompt.uid), 0, tokens)

    def published(self, version: int, loader: bytes) -> None:
        weights = StoredWeights(version, loader)
        self._open.changes.put(facts.WEIGHTS, ONE, encoded(weights))

    def rewarded(self, request: str, reward: Reward) -> None:
        """Store the reward of a finished sample."""
        self._rewarded.add(request)
        self._open.changes.put(facts.REWARD, request, encoded(reward))
        self._open.soon()  # there may be no event after this

    def acknowledged(self, batch: int) -> None:
        """A trainer has acknowledged all of the batch."""
        for name, action in list(self._deliveries.items()):
            if action.batch == batch:
                del self._deliveries[name]
                self._open.changes.drop(facts.DELIVERED, name)
                for sample in action.samples:
                    self.forget(sample.request)
                for uid in {sample.group for sample in action.samples}:
                    self.forget_prompt(uid)
        for uid in self._told.pop(batch, ()):
            self._open.changes.drop(facts.LOST, facts.loss_name(uid, batch))

    # -- what they are told ----------------------------------------------------------------

    def delivered(self, action: Deliver) -> None:
        name = facts.delivery_name(action)
        self._deliveries[name] = action
        self._open.changes.put(facts.DELIVERED, name, encoded(action))

    def telling(self, last: Deliver) -> None:
        """A batch after the last that only reports lost groups; its number is not used again."""
        self._open.changes.put(facts.TELLING, ONE, encoded(last.batch))
        self.delivered(last)

    def lost(self, group: LostGroup, batch: int | None = None) -> None:
        """A group that will never be delivered; `batch`: the batch that reports it."""
        loss = encoded(StoredLoss(group.reason, batch))
        self._open.changes.put(facts.LOST, facts.loss_name(group.uid, batch), loss)
        if batch is not None:
            self._open.changes.drop(facts.LOST, facts.loss_name(group.uid, None))
            self._told.setdefault(batch, []).append(group.uid)

    def leased(self, batch: int, lease: LeaseFacts | None) -> None:
        """The lease of a batch has changed; None: it is no longer needed."""
        if lease is None:
            self._open.changes.drop(facts.LEASE, str(batch))
        else:
            self._open.changes.put(facts.LEASE, str(batch), encoded(lease))

    # -- what goes -------------------------------------------------------------------------

    def forget(self, request: str) -> None:
        """Drop the tokens and the reward of a request."""
        self._transcripts.forget(request, self._open.changes)
        self.forget_reward(request)

    def forget_reward(self, request: str) -> None:
        if request in self._rewarded:
            self._rewarded.discard(request)
            self._open.changes.drop(facts.REWARD, request)

    def forget_groups(self, groups: tuple[str, ...]) -> None:
        """The scheduler no longer has these groups. The prompts of delivered groups stay until the
        delivery is acknowledged."""
        if not groups:
            return
        kept = {sample.group for action in self._deliveries.values() for sample in action.samples}
        for name in groups:
            self._open.changes.drop(facts.GROUP, name)
            if name not in kept:
                self.forget_prompt(name)

    def forget_prompt(self, uid: str) -> None:
        if uid not in self._groups:  # else it was submitted again
            self._open.changes.drop(facts.PROMPT, uid)
            self._open.changes.clear(facts.prompt_owner(uid))
