"""What the trainers' part of a run writes to its store, and what it continues from.

Changes are collected for 20 ms, because the facts of a group change with each event; nothing is
promised in that time. A call that is promised something (a submission, delivery, publication or
acknowledgement) waits for a thread that commits; the event loop never waits for a disk.

A batch certainly belongs to the trainer when the trainer asks for the next one. Until then its
samples stay in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from rollout_sched.core.model.actions import Deliver
from rollout_sched.core.model.events import Restored
from rollout_sched.core.model.records import RunState, Serial
from rollout_sched.core.state.groups import Groups
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer.delivery import LeaseFacts
from rollout_sched.live.trainer.records import ONE, StoredLoss, StoredTranscripts, encoded
from rollout_sched.live.trainer.samples import LostGroup, Prompt, Reward
from rollout_sched.store import Store, StoreBroken, StoreWriter
from rollout_sched.store.transaction import Transaction

log = logging.getLogger(__name__)


class StoredWeights(msgspec.Struct, frozen=True):
    """The newest published version, and how to load it, as encoded by the code that loads it."""

    version: Serial
    loader: bytes


class Recovered(msgspec.Struct):
    """The state that a new epoch begins with.

    state         the scheduler's; None: the store was new
    prompts       of open groups, and of groups delivered but not acknowledged, by uid
    tools         names of the tools of these groups, whether given again or not; "": without a
                  name
    deliveries    not acknowledged, in order
    rewards       of the finished samples that have one, by request
    leases        of these deliveries, and of batches that a former holder may still claim, by
                  batch
    lost          lost groups that must be reported to the trainer
    reported      lost groups that are reported with a batch that is delivered again, by its
                  number
    acknowledged  digests of the prompts of acknowledged groups, by batch and uid
    last_report   number of the last batch that only reported lost groups; -1: there was none
    weights       the newest published; None: none were
    paused        instances that were being updated
    model         what the instances served; "": unknown
    running       attempts that may still run somewhere: (instance, attempt)
    cleanup       removes what is stored and not continued
    """

    state: RunState | None = None
    prompts: dict[str, Prompt] = {}
    tools: dict[str, str] = {}
    deliveries: list[Deliver] = []
    rewards: dict[str, Reward] = {}
    leases: dict[int, LeaseFacts] = {}
    lost: list[LostGroup] = []
    reported: dict[int, list[LostGroup]] = {}
    acknowledged: dict[int, dict[str, int]] = {}
    last_report: int = -1
    weights: StoredWeights | None = None
    paused: set[str] = set()
    model: str = ""
    running: list[tuple[str, int]] = []
    cleanup: Transaction = msgspec.field(default_factory=Transaction)

    @property
    def event(self) -> Restored | None:
        return None if self.state is None else Restored(self.state)


#: Seconds for which events are collected that need no durability promise, so that facts that change
#: with each event are written once.
GATHER_S = 0.02

#: Seconds between two looks whether the disk answers, while a caller waits for it.
LOOK_S = 10.0


class OpenTransaction:
    """The changes that have not gone to the writer's thread yet. Create it inside a running event
    loop.

    `complete` is called with the changes before they are written, to add what is written once for
    all events. `on_broken` is called once, in the loop, when the store can no longer be written.
    """

    def __init__(
        self,
        store: Store,
        complete: Callable[[Transaction], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.changes = Transaction()
        self._complete = complete
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self.writer = StoreWriter(store, self._broken)
        self._wait_s = 0.0 if store.durable == "event" else GATHER_S
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._promised = 0  # and not answered yet

    def soon(self) -> None:
        """Write the changes soon."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._wait_s, self._write)

    def durably(self) -> None:
        """Write the changes durably now, though no caller waits: the event will not be repeated."""
        self._write()
        self.writer.promise()

    def promise(self) -> Awaitable[None]:
        """Done when all changes so far are durable. Awaiting it may raise StoreBroken."""
        self._write()
        kept = asyncio.wrap_future(self.writer.promise(), loop=self._loop)
        self._watch(kept)
        return kept

    async def close(self) -> None:
        """Write the rest, and close the store."""
        self._write()
        closed = self._loop.run_in_executor(None, self.writer.close)
        self._watch(closed)
        await closed

    def _watch(self, promised: asyncio.Future[None]) -> None:
        """Look regularly whether the disk answers, as long as anything is promised."""
        self._promised += 1
        promised.add_done_callback(self._answered)
        if self._looking is None:
            self._looking = self._loop.call_later(LOOK_S, self._look)

    def _answered(self, _: asyncio.Future[None]) -> None:
        self._promised -= 1
        if not self._promised and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        self._looking = self._loop.call_later(LOOK_S, self._look)
        hangs_s = self.writer.hangs_s
        if hangs_s > LOOK_S / 2:
            log.error(
                "store %s: its disk has not answered for %.0f s; submissions, deliveries, "
                "publications and acknowledgements wait",
                self.writer.store.folder,
                hangs_s,
            )

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._complete(self.changes)
        if self.changes:
            self.writer.write(self.changes)
            self.changes = Transaction()

    def _broken(self, error: StoreBroken) -> None:
        """Called in the writer's thread."""
        self._loop.call_soon_threadsafe(self._on_broken, error)


class StoredSession:
    """The trainers' part of a store: what they have submitted, and what must be delivered to them.
    Prompts and samples stay until their batch is acknowledged, and so do the losses that it
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
        self._reported: dict[int, list[str]] = {}  # lost groups, by the batch that reports them

    def check_room(self) -> None:
        """Raises StoreFull if no new work can be accepted."""
        self._open.writer.check_room()

    def promise(self) -> Awaitable[None]:
        """Awaiting it may raise StoreBroken."""
        return self._open.promise()

    def restore(self, found: Recovered) -> None:
        """Continue from what an earlier epoch has left."""
        for action in found.deliveries:
            self.delivered(action)
        for batch, groups in found.reported.items():
            for group in groups:
                self.lost(group, batch)
        for group in found.lost:  # last: a group that was reported may have failed again
            self.lost(group)
        self._rewarded.update(found.rewards)

    # -- what trainers say -----------------------------------------------------------------

    def submitted(self, uid: str, fact: bytes, tokens: bytes) -> None:
        """`fact` and `tokens` as `records.encoded_prompt` makes them."""
        self._open.changes.put(facts.PROMPT, uid, fact)
        self._open.changes.append(facts.prompt_owner(uid), 0, tokens)

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
        for uid in self._reported.pop(batch, ()):
            self._open.changes.drop(facts.LOST, facts.loss_name(uid, batch))

    def remember(self, batch: int, digests: Mapping[str, int]) -> None:
        """Groups of an acknowledged batch are not generated again; without any, it is forgotten."""
        if digests:
            self._open.changes.put(facts.ACKNOWLEDGED, str(batch), encoded(digests))
        else:
            self._open.changes.drop(facts.ACKNOWLEDGED, str(batch))

    # -- what they are told ----------------------------------------------------------------

    def delivered(self, action: Deliver) -> None:
        name = facts.delivery_name(action)
        self._deliveries[name] = action
        self._open.changes.put(facts.DELIVERED, name, encoded(action))

    def record_report(self, last: Deliver) -> None:
        """A batch after the last that only reports lost groups; its number is not used again."""
        self._open.changes.put(facts.LAST_REPORT, ONE, encoded(last.batch))
        self.delivered(last)

    def lost(self, group: LostGroup, batch: int | None = None) -> None:
        """A group that will never be delivered; `batch`: the batch that reports it."""
        loss = encoded(StoredLoss(group.reason, batch, group.digest))
        self._open.changes.put(facts.LOST, facts.loss_name(group.uid, batch), loss)
        if batch is not None:
            self._open.changes.drop(facts.LOST, facts.loss_name(group.uid, None))
            self._reported.setdefault(batch, []).append(group.uid)

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
