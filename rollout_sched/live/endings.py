"""The ends of requests and groups: whoever waits is told, the trainer or a client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from rollout_sched.core.actions import Answer, Deliver, Discard
from rollout_sched.core.model import DeliveredSample
from rollout_sched.live.asking import unquoted
from rollout_sched.live.payload_book import PayloadBook, drop
from rollout_sched.live.ports import Payload, RequestRejected

log = logging.getLogger(__name__)

#: Called with a delivered batch and the payloads of its samples, in their order.
OnDeliver = Callable[[Deliver, list[Payload]], None]
#: Called with a group that can never be whole, and why.
OnGroupFailed = Callable[[str, Exception | None], None]
#: Called with a group that was judged, and is not to be trained.
OnGroupFiltered = Callable[[str], None]

#: Reasons of a discard of which whoever waits for the request hears.
_TOLD = ("failed", "withdrawn", "oversized")

#: Reasons of a discard that a whole group has in common.
OF_GROUP = ("failed", "filtered")


class Afterwards(Protocol):
    """What this needs of the link to the scheduler (`live.scheduler_link`)."""

    @property
    def afterwards(self) -> Callable[..., None]: ...
    def fail(self, error: Exception) -> None: ...


class Endings:
    """Carries out what the scheduler orders of requests that are over, or begin anew: their
    payloads leave the book, and who is answered is told after the event."""

    def __init__(
        self,
        link: Afterwards,
        payloads: PayloadBook,
        on_deliver: OnDeliver | None,
        on_group_failed: OnGroupFailed | None,
    ) -> None:
        self.on_deliver = on_deliver
        self.on_group_failed = on_group_failed
        self.on_group_filtered: OnGroupFiltered | None = None
        self._link = link
        self._payloads = payloads

    def deliver(self, action: Deliver) -> None:
        payloads = [self._payloads.take(sample) for sample in action.samples]
        for sample in action.samples:
            self._payloads.forget_group(sample.group)
        if self.on_deliver is not None:
            self._link.afterwards(self._hand_over, self.on_deliver, action, payloads)

    def _hand_over(self, on_deliver: OnDeliver, action: Deliver, payloads: list[Payload]) -> None:
        try:
            on_deliver(action, payloads)
        except Exception as error:  # the samples are gone: the trainer must not wait for them
            self._link.fail(error)

    def answer(self, action: Answer) -> None:
        self._link.afterwards(_answer, self._payloads.take(action.sample), action.sample)

    def discard(self, action: Discard) -> None:
        """Of an attempt, of all that a request has, or of the request itself."""
        payload = self._payloads.get(action.request)
        if action.reason == "rejected":
            # One that an earlier epoch has begun has tokens, but was never dispatched here.
            self._payloads.of(action).transcript.cut(action.tokens)
        elif payload is not None:
            drop(payload, action.attempt)
        if not action.ends:
            return
        error = self._payloads.forget(action.request)
        if action.reason == "oversized":
            error = RequestRejected("prompt and max_tokens fit into no instance's KV cache")
        if payload is not None and action.reason in _TOLD:
            reason = "withdrawn" if action.reason == "withdrawn" else "failed"
            self._link.afterwards(payload.responder.fail, reason, error)
        if action.reason in OF_GROUP and self._payloads.has_group(action.group):
            self._lose_group(action.group, filtered=action.reason == "filtered")

    def _lose_group(self, group: str, *, filtered: bool) -> None:
        """It will never be delivered, and whoever waits for it hears so."""
        error = self._payloads.forget_group(group)
        if not filtered:
            why = "no reason is known" if error is None else unquoted(error)
            log.error("group %s failed: %s", group, why)
            if self.on_group_failed is not None:
                self._link.afterwards(self.on_group_failed, group, error)
        elif self.on_group_filtered is not None:
            self._link.afterwards(self.on_group_filtered, group)

    def fail_all(self, error: Exception) -> None:
        """Nothing of what is here will ever be made."""
        payloads, groups = self._payloads.take_all()
        for payload in payloads:
            self._link.afterwards(payload.responder.fail, "failed", error)
        if self.on_group_failed is not None:
            for group in groups:
                self._link.afterwards(self.on_group_failed, group, error)


def _answer(payload: Payload, sample: DeliveredSample) -> None:
    """Whoever waits hears something, even where the answer cannot be put together."""
    try:
        payload.responder.answer(sample)
    except Exception as error:
        log.exception("request %s was finished but could not be answered", sample.request)
        payload.responder.fail("failed", error)
