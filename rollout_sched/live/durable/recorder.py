"""Writes the store of a live scheduler: everything that must outlive it, as it happens.

One transaction holds the state between two events, facts together with the tokens that they count,
so there is nothing to reconcile. The event loop gives the thread that commits lists of tokens that
no longer change: encoding them took a third of the loop's cost for a store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rollout_sched.core import FactRecorder
from rollout_sched.core.model.actions import Action, Deliver, Discard
from rollout_sched.core.model.events import Event, WeightsPublished
from rollout_sched.core.model.model import Request
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live.requests.payloads import Payloads
from rollout_sched.live.requests.token_payload import Piece, TokenTranscript
from rollout_sched.live.trainer import records as facts
from rollout_sched.live.trainer.records import ONE, StoredTranscripts, encoded
from rollout_sched.live.trainer.stored import OpenTransaction, Recovered, StoredSession
from rollout_sched.store import Store
from rollout_sched.store.transaction import Transaction

log = logging.getLogger(__name__)


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
