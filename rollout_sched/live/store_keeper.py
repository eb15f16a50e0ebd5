"""Keeps the store of a live scheduler: what must outlive it is written as it comes about."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from rollout_sched.core.actions import Action, Deliver, Discard
from rollout_sched.core.events import Event, WeightsPublished
from rollout_sched.core.facts import FactRecorder
from rollout_sched.core.model import Request
from rollout_sched.core.scheduler import Scheduler
from rollout_sched.live import stored_facts as facts
from rollout_sched.live.open_transaction import OpenTransaction
from rollout_sched.live.pieces import Piece
from rollout_sched.live.ports import Payload
from rollout_sched.live.recovery import Recovered
from rollout_sched.live.stored_facts import ONE, encoded
from rollout_sched.live.stored_session import StoredSession
from rollout_sched.live.stored_transcripts import StoredTranscripts
from rollout_sched.live.transcript import TokenTranscript
from rollout_sched.store.changes import Transaction
from rollout_sched.store.store import Store

log = logging.getLogger(__name__)


class StoredPayloads(Protocol):
    """What this needs of the payloads (`live.payload_book`)."""

    def get(self, request: str) -> Payload | None: ...


class StoreKeeper:
    """An observer of the event pump. Make it inside a running event loop, before the first event.

    What is written at a time is the state between two events: facts of the scheduler, and the
    tokens that they count. `session`: what trainers have a part in. `on_broken` is called in the
    loop, once, when nothing can be written any more.
    """

    def __init__(
        self,
        store: Store,
        scheduler: Scheduler,
        payloads: StoredPayloads,
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
        self.session = StoredSession(self._open, scheduler.books.groups, transcripts)
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
                self._open.durably()  # it was seen at an instance, and may be said by nobody
            else:
                self._open.soon()
        except Exception as error:  # a store with holes must not be gone on from
            log.exception("what happened could not be put down")
            self._on_broken(error)
            raise

    async def pausing(self, instance: str) -> None:
        """It is about to be paused by us: who goes on after a crash is to resume it. Returns when
        that is durable. Raises StoreBroken."""
        self._open.changes.put(facts.PAUSED, instance, b"")
        await self._open.promise()

    def resumed(self, instance: str) -> None:
        """It goes on; that this was ordered is not enough, for a crash may come in between."""
        self._open.changes.drop(facts.PAUSED, instance)
        self._open.soon()  # no event need follow

    def take_up(self, found: Recovered) -> None:
        """Go on from what an earlier epoch has left; what nothing is gone on from goes."""
        self.session.take_up(found)
        for request in found.anew:
            self.session.forget(request)
        changes = self._open.changes
        for uid in found.gone:
            changes.drop(facts.GROUP, uid)
            changes.drop(facts.PROMPT, uid)
        known = {facts.prompt_owner(uid) for uid in found.prompts} | self._transcripts.owners()
        for owner in self.store.owners():
            if owner not in known:
                changes.clear(owner)

    async def close(self) -> None:
        """Write what is left, and close the store."""
        await self._open.close()

    # -- what is put down at once ----------------------------------------------------------

    def _deliver(self, action: Deliver) -> None:
        """Its payloads leave the book at once, so their last tokens are written now."""
        self.session.delivered(action)
        for sample in action.samples:
            self._touched.pop(sample.request, None)
            self._write(sample.request, (), self._open.changes)

    def _discard(self, action: Discard) -> None:
        if not action.group:
            return  # a direct request's
        if action.ends or not (action.attempt or action.reason == "rejected"):
            # At once: it may be dispatched anew in the same breath.
            self.session.forget(action.request)
        if not action.ends:
            self._touched[action.request] = None

    # -- what is put together for all that has happened ------------------------------------

    def _complete(self, changes: Transaction) -> None:
        self._put_facts(changes)
        for name in self._touched:
            request = self._scheduler.work.requests.get(name)
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
        self.session.forget_groups(changed.gone)

    def _streamed(self, request: Request) -> tuple[tuple[int, Piece], ...]:
        """What the scheduler knows of an attempt under way."""
        attempt, payload = request.attempt, self._payloads.get(request.id)
        if payload is None or attempt is None or not attempt.tokens:
            return ()
        piece: Piece = payload.transcript.partial(attempt.id, attempt.tokens)
        logprobs = None if piece.logprobs is None else piece.logprobs[: attempt.tokens]
        return ((attempt.id, Piece(piece.token_ids[: attempt.tokens], logprobs)),)

    def _write(
        self, request: str, streamed: tuple[tuple[int, Piece], ...], changes: Transaction
    ) -> None:
        """What was never made here, since it was taken up, is as it was."""
        payload = self._payloads.get(request)
        if payload is not None:
            assert isinstance(payload.transcript, TokenTranscript)
            self._transcripts.write(request, payload.transcript, changes, streamed)
