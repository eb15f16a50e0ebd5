"""Writes the store of a live scheduler: everything that must outlive it, as it happens.

One transaction holds the state between two events, facts together with the tokens that they count,
so there is nothing to reconcile. Changes are collected for 20 ms, because the facts of a group
change with each event; nothing is promised in that time. A call that is promised something (a
submission, delivery, publication or acknowledgement) waits for a thread that commits; the event
loop never waits for a disk. It gives that thread lists of tokens that no longer change: encoding
them took a third of the loop's cost for a store.

A batch certainly belongs to the trainer when the trainer asks for the next one. Until then its
samples stay in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from rollout_sched.core import FactRecorder
from rollout_sched.core.model.actions import Action, Deliver, Discard
from rollout_sched.core.model.events import Event, WeightsPublished
from rollout_sched.core.model.model import Request
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.core.state.groups import Groups
from rollout_sched.live.durable import records as facts
from rollout_sched.live.durable.records import ONE, StoredLoss, StoredTranscripts, encoded
from rollout_sched.live.requests.payloads import Payloads
from rollout_sched.live.requests.token_payload import Piece, TokenTranscript
from rollout_sched.live.trainer.delivery import LeaseFacts
from rollout_sched.live.trainer.samples import LostGroup, Prompt, Reward
from rollout_sched.live.trainer.stored import Recovered, StoredWeights
from rollout_sched.store import Store, StoreBroken, StoreWriter
from rollout_sched.store.transaction import Transaction

log = logging.getLogger(__name__)


#: Seconds for which events are collected that need no durability promise, so that facts that change
#: with each event are written once.
GATHER_S = 0.02


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
        return asyncio.wrap_future(self.writer.promise(), loop=self._loop)

    async def close(self) -> None:
        """Write the rest, and close the store."""
        self._write()
        await self._loop.run_in_executor(None, self.writer.close)

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
        for group in found.lost:
            self.lost(group)
        for batch, groups in found.reported.items():
            for group in groups:
                self.lost(group, batch)
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
        for uid in self._reported.pop(batch, ()):
            self._open.changes.drop(facts.LOST, facts.loss_name(uid, batch))

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
        loss = encoded(StoredLoss(group.reason, batch))
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


class RunRecorder:
    """An observer of the event pump. Create it inside a running event loop, before the first event.

    Each write is the state between two events: facts of the scheduler, and the tokens that they
    count. `session`: the trainers' part. `on_broken` is called once, in the loop, when the store
    can no longer be written.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        payloads: Payloads,
        transcripts: StoredTranscripts,
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.store = store
        self._scheduler = scheduler
        self._payloads = payloads
        self._transcripts = transcripts
        self._on_broken = on_broken
        self._open = OpenTransaction(store, self._complete, on_broken)
        self.writer = self._open.writer
        self.session = StoredSession(self._open, scheduler.state.groups, transcripts)
        self._recorder = FactRecorder(scheduler)
        self._touched: dict[str, None] = {}  # requests whose transcripts may have changed
        self._put_down: dict[type[Any], Callable[[Any], None]] = {
            Deliver: self._deliver,
            Discard: self._discard,
        }

    def observe(self, now: float, event: Event, actions: list[Action]) -> None:
        try:
            request = self._recorder.observe(now, event, actions)
            if request is not None:
                self._touched[request] = None
            for action in actions:
                put_down = self._put_down.get(type(action))
                if put_down is not None:
                    put_down(action)
            if isinstance(event, WeightsPublished) and not event.loads:
                self._open.durably()  # seen at an instance; no caller may ever report it
            else:
                self._open.soon()
        except Exception as error:  # a run must not continue from a store with gaps
            log.exception("an event could not be recorded for the store")
            self._on_broken(error)
            raise

    async def pausing(self, instance: str) -> None:
        """We are about to pause the instance: record it, so that it is resumed after a crash.
        Returns when that is durable. Raises StoreBroken."""
        self._open.changes.put(facts.PAUSED, instance, b"")
        await self._open.promise()

    def resumed(self, instance: str) -> None:
        """The instance was resumed; called after the resume, because a crash may come before it."""
        self._open.changes.drop(facts.PAUSED, instance)
        self._open.soon()  # there may be no event after this

    def serves(self, model: str) -> None:
        """The instances serve this model, and those of the next process should."""
        self._open.changes.put(facts.MODEL, ONE, model.encode())
        self._open.soon()

    def restore(self, found: Recovered) -> None:
        """Continue from what an earlier epoch has left, and drop what is not continued."""
        changes = self._open.changes
        changes.add(found.cleanup)
        self.session.restore(found)
        known = {facts.prompt_owner(uid) for uid in found.prompts} | self._transcripts.owners()
        for owner in self.store.owners():
            if owner not in known:
                changes.clear(owner)

    async def close(self) -> None:
        """Write the rest, and close the store."""
        await self._open.close()

    # -- what is put down at once ----------------------------------------------------------

    def _deliver(self, action: Deliver) -> None:
        """The payloads of a delivered batch leave the book at once, so their last tokens are
        written now."""
        self.session.delivered(action)
        for sample in action.samples:
            self._touched.pop(sample.request, None)
            self._write(sample.request, (), self._open.changes)

    def _discard(self, action: Discard) -> None:
        if not action.group:
            return  # a direct request's
        if action.ends or not action.attempt:
            # At once: the same event may dispatch it again.
            self.session.forget(action.request)
        if not action.ends:
            self._touched[action.request] = None

    # -- what is put together for all that has happened ------------------------------------

    def _complete(self, changes: Transaction) -> None:
        self._put_facts(changes)
        for name in self._touched:
            request = self._scheduler.parts.requests.get(name)
            if request is not None and request.group is not None:
                self._write(name, self._streamed(request), changes)
        self._touched.clear()

    def _put_facts(self, changes: Transaction) -> None:
        changed = self._recorder.changes()
        if changed is None:
            return
        changes.put(facts.RUN, ONE, encoded(changed.run))
        for group in changed.groups:
            changes.put(facts.GROUP, group.group, encoded(group))
        for prompt in changed.prompts:
            changes.put(facts.LENGTHS, prompt.prompt, encoded(prompt))
        if changed.recent is not None:
            changes.put(facts.RECENT, ONE, encoded(changed.recent))
        self.session.forget_groups(changed.dropped)

    def _streamed(self, request: Request) -> tuple[tuple[int, Piece], ...]:
        """The tokens of the running attempt that the scheduler knows of."""
        attempt, payload = request.attempt, self._payloads.get(request.id)
        if payload is None or attempt is None or not attempt.tokens:
            return ()
        piece: Piece = payload.transcript.partial(attempt.id, attempt.tokens)
        logprobs = None if piece.logprobs is None else piece.logprobs[: attempt.tokens]
        return ((attempt.id, Piece(piece.token_ids[: attempt.tokens], logprobs)),)

    def _write(
        self, request: str, streamed: tuple[tuple[int, Piece], ...], changes: Transaction
    ) -> None:
        """A request without a payload was not touched since it was restored, so it is unchanged."""
        payload = self._payloads.get(request)
        if payload is not None:
            assert isinstance(payload.transcript, TokenTranscript)
            self._transcripts.write(request, payload.transcript, changes, streamed)
