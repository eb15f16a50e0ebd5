"""Ends requests and groups, and informs the trainer or the client that waits for them."""

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
#: Called with a group that can never be complete, and the reason.
OnGroupFailed = Callable[[str, Exception | None], None]
#: Called with a group that was judged and will not be trained.
OnGroupFiltered = Callable[[str], None]

#: Discard reasons that are reported to the responder of the request.
_TOLD = ("failed", "withdrawn", "oversized")

#: Discard reasons that apply to a whole group.
OF_GROUP = ("failed", "filtered")


class Afterwards(Protocol):
    """The part of the link to the scheduler that this uses (`live.scheduler_link`)."""

    @property
    def afterwards(self) -> Callable[..., None]: ...
    def fail(self, error: Exception) -> None: ...


class Endings:
    """Carries out the scheduler's orders for requests that end or start over: their payloads leave
    the book, and the responder is called after the event."""

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
        except Exception as error:  # the samples are lost: the trainer must not wait for them
            self._link.fail(error)

    def answer(self, action: Answer) -> None:
        self._link.afterwards(_answer, self._payloads.take(action.sample), action.sample)

    def discard(self, action: Discard) -> None:
        """Discard an attempt's tokens, all tokens of a request, or the request itself."""
        payload = self._payloads.get(action.request)
        if action.reason == "rejected":
            # A request begun in an earlier epoch has tokens, but was never dispatched here.
            self._payloads.of(action).transcript.cut(action.tokens)
        elif payload is not None:
            drop(payload, action.attempt)
        if not action.ends:
            return
        error = self._payloads.forget(action.request)
        if action.reason == "oversized":
            error = RequestRejected("prompt + max_tokens do not fit any instance's KV cache")
        if payload is not None and action.reason in _TOLD:
            reason = "withdrawn" if action.reason == "withdrawn" else "failed"
            self._link.afterwards(payload.responder.fail, reason, error)
        if action.reason in OF_GROUP and self._payloads.has_group(action.group):
            self._lose_group(action.group, filtered=action.reason == "filtered")

    def _lose_group(self, group: str, *, filtered: bool) -> None:
        """The group will never be delivered; report that."""
        error = self._payloads.forget_group(group)
        if not filtered:
            why = "unknown reason" if error is None else unquoted(error)
            log.error("group %s failed: %s", group, why)
            if self.on_group_failed is not None:
                self._link.afterwards(self.on_group_failed, group, error)
        elif self.on_group_filtered is not None:
            self._link.afterwards(self.on_group_filtered, group)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests and groups."""
        payloads, groups = self._payloads.take_all()
        for payload in payloads:
            self._link.afterwards(payload.responder.fail, "failed", error)
        if self.on_group_failed is not None:
            for group in groups:
                self._link.afterwards(self.on_group_failed, group, error)


def _answer(payload: Payload, sample: DeliveredSample) -> None:
    """Call the responder, with a failure if the answer cannot be put together."""
    try:
        payload.responder.answer(sample)
    except Exception as error:
        log.exception("request %s was finished but could not be answered", sample.request)
        payload.responder.fail("failed", error)
