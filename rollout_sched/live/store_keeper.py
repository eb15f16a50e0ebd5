"""Keeps the store of a live scheduler: what must outlive it is written as it comes about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from rollout_sched.core.actions import Action, Deliver, Discard, Lend, Pause, Resume
from rollout_sched.core.events import Event, InstanceReturned
from rollout_sched.core.facts import Changes as FactChanges
from rollout_sched.core.facts import FactRecorder, OfRequest
from rollout_sched.core.model import Request
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live import stored_facts as facts
from rollout_sched.live.leases import LeaseFacts
from rollout_sched.live.ports import Payload
from rollout_sched.live.recovery import Recovered
from rollout_sched.live.samples import LostGroup, Prompt, Reward
from rollout_sched.live.stored_facts import ONE, StoredLoss, StoredWeights, encoded
from rollout_sched.live.stored_transcripts import StoredTranscripts
from rollout_sched.live.transcript import Piece, TokenTranscript
from rollout_sched.store.changes import Changes
from rollout_sched.store.errors import StoreBroken
from rollout_sched.store.store import Store
from rollout_sched.store.writer import StoreWriter

log = logging.getLogger(__name__)

#: Seconds for which events are gathered that nobody is promised: facts that change with each of
#: them are put together once.
GATHER_S = 0.02


class Book(Protocol):
    """What this needs of the payloads (`live.payload_book`)."""

    def get(self, request: str) -> Payload | None: ...


class StoreKeeper:
    """An observer of the event pump. Make it inside a running event loop, before the first event.

    What is written at a time is the state between two events: facts of the scheduler, and the
    tokens that they count. `promise` is for what somebody is told: it is done when all that has
    happened is as durable as `[live] durable` says. `on_broken` is called in the loop, once, when
    nothing can be written any more.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        payloads: Book,
        transcripts: StoredTranscripts,
        on_broken: Callable[[Exception], None],
    ) -> None:
        self.store = store
        self._scheduler = scheduler
        self._payloads = payloads
        self._transcripts = transcripts
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self.writer = StoreWriter(store, self._broken)
        self._recorder = FactRecorder(scheduler)
        self._changes = Changes()
        self._touched: dict[str, None] = {}  # requests whose transcripts may have changed
        self._deliveries: dict[str, Deliver] = {}  # that are not acknowledged
        self._rewarded: set[str] = set()  # requests
        self._told: dict[str, int] = {}  # lost groups, and the batch in which that is said
        self._timer: asyncio.TimerHandle | None = None

    # -- what happens ----------------------------------------------------------------------

    def observe(self, now: float, event: Event, actions: list[Action]) -> None:
        try:
            self._observe(now, event, actions)
        except Exception as error:  # a store with holes must not be gone on from
            log.exception("what happened could not be put down")
            self._on_broken(error)
            raise

    def _observe(self, now: float, event: Event, actions: list[Action]) -> None:
        self._recorder.observe(now, event, actions)
        if isinstance(event, OfRequest):
            self._touched[event.request] = None
        elif isinstance(event, InstanceReturned):
            self._changes.drop(facts.PAUSED, event.instance)
        for action in actions:
            if isinstance(action, Deliver):
                self._deliver(action)
            elif isinstance(action, Discard):
                self._discard(action)
            elif isinstance(action, Pause | Lend):
                self._changes.put(facts.PAUSED, action.instance, b"")
            elif isinstance(action, Resume):
                self._changes.drop(facts.PAUSED, action.instance)
        self._flush_soon()

    def submitted(self, prompt: Prompt, tool: str | None) -> None:
        """`tool`: its name, "" for one without; None: it has none."""
        fact, tokens = facts.encoded_prompt(prompt, tool=tool)
        self._changes.put(facts.PROMPT, prompt.uid, fact)
        self._changes.append(facts.prompt_owner(prompt.uid), 0, tokens)

    def rewarded(self, request: str, reward: Reward) -> None:
        """A finished sample is worth this."""
        self._rewarded.add(request)
        self._changes.put(facts.REWARD, request, encoded(reward))
        self._flush_soon()  # no event need follow

    def forget_reward(self, request: str) -> None:
        if request in self._rewarded:
            self._rewarded.discard(request)
            self._changes.drop(facts.REWARD, request)

    def lost(self, group: LostGroup, batch: int | None = None) -> None:
        """A group that will never be delivered; `batch`: in which its trainer is told so."""
        self._changes.put(facts.LOST, group.uid, encoded(StoredLoss(group.reason, batch)))
        if batch is not None:
            self._told[group.uid] = batch

    def published(self, version: int, loader: bytes) -> None:
        weights = StoredWeights(version, loader)
        self._changes.put(facts.WEIGHTS, ONE, encoded(weights))

    def take_up(self, found: Recovered) -> None:
        """Go on from what an earlier epoch has left; what nothing is gone on from goes."""
        for action in found.deliveries:
            self._deliver(action)
        for group in found.lost:
            self.lost(group)
        for batch, groups in found.told.items():
            for group in groups:
                self.lost(group, batch)
        for name in found.unleased:
            self._changes.drop(facts.LEASE, name)
        self._rewarded.update(found.rewards)
        for request in found.rewards:
            if request.rpartition("/")[0] not in found.prompts:
                self.forget_reward(request)
        for request in found.anew:
            self._forget(request)
        for uid in found.gone:
            self._changes.drop(facts.GROUP, uid)
            self._changes.drop(facts.PROMPT, uid)
        known = {facts.prompt_owner(uid) for uid in found.prompts} | self._transcripts.owners()
        for owner in self.store.owners():
            if owner not in known:
                self._changes.clear(owner)

    def leased(self, batch: int, lease: LeaseFacts | None) -> None:
        """Whose a batch is now; None: nobody has to be told any more."""
        if lease is None:
            self._changes.drop(facts.LEASE, str(batch))
        else:
            self._changes.put(facts.LEASE, str(batch), encoded(lease))

    def acknowledged(self, batch: int) -> None:
        """A trainer has all of it."""
        for name, action in list(self._deliveries.items()):
            if action.batch == batch:
                del self._deliveries[name]
                self._changes.drop(facts.DELIVERED, name)
                for sample in action.samples:
                    self._forget(sample.request)
                for uid in {sample.group for sample in action.samples}:
                    self._forget_prompt(uid)
        for uid, told in list(self._told.items()):
            if told == batch:
                del self._told[uid]
                self._changes.drop(facts.LOST, uid)

    # -- what is promised ------------------------------------------------------------------

    def promise(self) -> Awaitable[None]:
        """Done when all that has happened is durable. Raises StoreBroken there."""
        self._flush()
        return asyncio.wrap_future(self.writer.promise(), loop=self._loop)

    def check_room(self) -> None:
        """Raises StoreFull if no new work is to be taken."""
        self.writer.check_room()

    async def close(self) -> None:
        """Write what is left, and close the store."""
        self._flush()
        await self._loop.run_in_executor(None, self.writer.close)

    # -- what is put down ------------------------------------------------------------------

    def _deliver(self, action: Deliver) -> None:
        """Its payloads leave the book at once, so their last tokens are written now."""
        name = facts.delivery_name(action)
        self._deliveries[name] = action
        self._changes.put(facts.DELIVERED, name, encoded(action))
        for sample in action.samples:
            self._touched.pop(sample.request, None)
            self._write(sample.request, [])

    def _discard(self, action: Discard) -> None:
        if not action.group:
            return  # a direct request's
        if action.ends or not (action.attempt or action.reason == "rejected"):
            # At once: it may be dispatched anew in the same breath.
            self._forget(action.request)
        if not action.ends:
            self._touched[action.request] = None

    def _flush_soon(self) -> None:
        if self._timer is None:
            wait_s = 0.0 if self.store.durable == "event" else GATHER_S
            self._timer = self._loop.call_later(wait_s, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        changes = self._recorder.changes()
        if changes is not None:
            self._put_facts(changes)
        for name in self._touched:
            request = self._scheduler.requests.get(name)
            if request is not None and request.group is not None:
                self._write(name, self._streamed(request))
        self._touched.clear()
        if self._changes:
            self.writer.write(self._changes)
            self._changes = Changes()

    def _put_facts(self, changed: FactChanges) -> None:
        changes = self._changes
        changes.put(facts.RUN, ONE, encoded(changed.run))
        for group in changed.groups:
            changes.put(facts.GROUP, group.group, encoded(group))
        for prompt in changed.prompts:
            changes.put(facts.LENGTHS, prompt.prompt, encoded(prompt))
        if changed.recent is not None:
            changes.put(facts.RECENT, ONE, encoded(changed.recent))
        self._put_gone(changed.gone)

    def _put_gone(self, groups: tuple[str, ...]) -> None:
        """Those that were delivered keep their prompts, until that is acknowledged."""
        if not groups:
            return
        kept = {sample.group for action in self._deliveries.values() for sample in action.samples}
        for name in groups:
            self._changes.drop(facts.GROUP, name)
            if name not in kept:
                self._forget_prompt(name)

    def _forget(self, request: str) -> None:
        """What it has made, and what that was worth."""
        self._transcripts.forget(request, self._changes)
        self.forget_reward(request)

    def _forget_prompt(self, uid: str) -> None:
        if uid not in self._scheduler.groups:  # else it was submitted anew
            self._changes.drop(facts.PROMPT, uid)
            self._changes.clear(facts.prompt_owner(uid))

    def _streamed(self, request: Request) -> list[tuple[int, Piece]]:
        """What the scheduler knows of an attempt under way."""
        attempt, payload = request.attempt, self._payloads.get(request.id)
        if payload is None or attempt is None or not attempt.tokens:
            return []
        piece: Piece = payload.transcript.partial(attempt.id, attempt.tokens)
        logprobs = None if piece.logprobs is None else piece.logprobs[: attempt.tokens]
        return [(attempt.id, Piece(piece.token_ids[: attempt.tokens], logprobs))]

    def _write(self, request: str, streamed: list[tuple[int, Piece]]) -> None:
        """What was never made here, since it was taken up, is as it was."""
        payload = self._payloads.get(request)
        if payload is not None:
            assert isinstance(payload.transcript, TokenTranscript)
            self._transcripts.write(request, payload.transcript, self._changes, streamed)

    def _broken(self, error: StoreBroken) -> None:
        """Called in the writer's thread."""
        self._loop.call_soon_threadsafe(self._on_broken, error)
