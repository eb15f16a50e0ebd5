"""Holds the payloads of all current requests, from their first dispatch to their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.model.model import DeliveredSample
from rollout_sched.core.model.request_ids import group_of
from rollout_sched.live.ports import Payload, RequestRejected, plain_message
from rollout_sched.live.requests.link import SchedulerLink

log = logging.getLogger(__name__)

#: Makes the payload of the sample with this index of a group.
PayloadFactory = Callable[[int], Payload]


class Payloads:
    """The payloads of requests, the payload factories of groups, and the last error of each.

    A group's payloads are found without looking at those of others: a front that is lost may leave
    hundreds of groups, and each is given to another front with its tokens.
    """

    def __init__(self) -> None:
        self._payloads: dict[str, Payload] = {}
        self._requests: dict[str, dict[str, None]] = {}  # group -> its requests with a payload
        self._factories: dict[str, PayloadFactory] = {}
        self._errors: dict[str, Exception] = {}  # of requests
        self._group_errors: dict[str, Exception] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def __contains__(self, request: str) -> bool:
        return request in self._payloads

    # -- asked for -------------------------------------------------------------------------

    def add(self, request: str, payload: Payload) -> None:
        self._payloads[request] = payload

    def add_group(self, group: str, make: PayloadFactory) -> None:
        if group in self._factories:
            raise CallerError(f"group {group!r} is already here; give each group its own id")
        self._factories[group] = make

    def get(self, request: str) -> Payload | None:
        """The payload of a request; None if it was never dispatched by this front, or has ended."""
        return self._payloads.get(request)

    def payload_of(self, it: Dispatch | Discard | DeliveredSample) -> Payload:
        """The payload of a request, created at the first call: a request that finished in an
        earlier epoch of the run was never dispatched by this process.

        Raises what its factory raises.
        """
        payload = self._payloads.get(it.request)
        return self.of_sample(it.group, it.index, it.request) if payload is None else payload

    def of_sample(self, group: str, index: int, request: str) -> Payload:
        """The payload of a sample of a group, created at the first call."""
        payload = self._payloads.get(request)
        if payload is None:
            payload = self._payloads[request] = self._factories[group](index)
            self._requests.setdefault(group, {})[request] = None
        return payload

    def of_group(self, group: str) -> list[str]:
        """The requests of a group that have a payload, by name."""
        return list(self._requests.get(group, ()))

    # -- what has failed -------------------------------------------------------------------

    def note_error(self, dispatch: Dispatch, error: Exception) -> None:
        """Why an attempt has failed: reported to the responder if it was the last attempt. Errors
        of requests that have ended are ignored."""
        if dispatch.group in self._factories:
            self._group_errors[dispatch.group] = error
        if dispatch.request in self._payloads:
            self._errors[dispatch.request] = error

    def note_group_error(self, group: str, error: Exception) -> None:
        """Why a group cannot be judged."""
        if group in self._factories:
            self._group_errors[group] = error

    # -- what goes -------------------------------------------------------------------------

    def take(self, sample: DeliveredSample) -> Payload:
        """Remove and return the payload of a request that has ended."""
        payload = self.payload_of(sample)
        self.forget(sample.request)
        return payload

    def take_all(self) -> tuple[list[Payload], list[str]]:
        """Remove everything; return all payloads and the names of all groups."""
        payloads, groups = list(self._payloads.values()), list(self._factories)
        self._payloads.clear()
        self._requests.clear()
        self._factories.clear()
        return payloads, groups

    def forget(self, request: str) -> Exception | None:
        """Remove a request that has ended or was not accepted; returns its last error."""
        if self._payloads.pop(request, None) is not None:
            group = group_of(request)
            siblings = self._requests.get(group)
            if siblings is not None:
                siblings.pop(request, None)
                if not siblings:
                    del self._requests[group]
        return self._errors.pop(request, None)

    def has_group(self, group: str) -> bool:
        """Whether the group is neither delivered nor failed."""
        return group in self._factories

    def forget_group(self, group: str) -> Exception | None:
        """Remove a group that was delivered, failed or not accepted; returns its last error."""
        self._factories.pop(group, None)
        return self._group_errors.pop(group, None)

    def release(self, group: str, requests: Iterable[str]) -> None:
        """Remove a group that another process delivers, or that was never accepted."""
        for request in requests:
            self.forget(request)
        self.forget_group(group)


def drop(payload: Payload, attempt: int) -> None:
    """Forget the tokens of an attempt; 0: of all attempts."""
    try:
        payload.transcript.drop(attempt)
    except Exception:  # the payload keeps too much until it ends; nothing else is affected
        log.exception("a payload could not drop attempt %d", attempt)


# ------------------------------------------------------------------------------------------
# Ends requests and groups, and informs the trainer or the client that waits for them.

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


class Completions:
    """Carries out the scheduler's orders for requests that end or start over: their payloads leave
    the book, and the responder is called after the event."""

    def __init__(
        self,
        link: SchedulerLink,
        payloads: Payloads,
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
            self._link.defer(self._hand_over, self.on_deliver, action, payloads)

    def _hand_over(self, on_deliver: OnDeliver, action: Deliver, payloads: list[Payload]) -> None:
        try:
            on_deliver(action, payloads)
        except Exception as error:  # the samples are lost: the trainer must not wait for them
            self._link.fail(error)

    def answer(self, action: Answer) -> None:
        self._link.defer(_answer, self._payloads.take(action.sample), action.sample)

    def discard(self, action: Discard) -> None:
        """Discard an attempt's tokens, all tokens of a request, or the request itself."""
        payload = self._payloads.get(action.request)
        if payload is not None:
            drop(payload, action.attempt)
        if not action.ends:
            return
        error = self._payloads.forget(action.request)
        if action.reason == "oversized":
            error = RequestRejected("prompt + max_tokens are more tokens than any instance takes")
        if payload is not None and action.reason == "sample_failed":
            why = "unknown reason" if error is None else plain_message(error)
            log.warning("sample %s failed, its group goes on without it: %s", action.request, why)
        if payload is not None and action.reason in _TOLD:
            reason = "withdrawn" if action.reason == "withdrawn" else "failed"
            self._link.defer(payload.responder.fail, reason, error)
        if action.reason in OF_GROUP and self._payloads.has_group(action.group):
            self._lose_group(action.group, filtered=action.reason == "filtered")

    def _lose_group(self, group: str, *, filtered: bool) -> None:
        """The group will never be delivered; report that."""
        error = self._payloads.forget_group(group)
        if not filtered:
            why = "unknown reason" if error is None else plain_message(error)
            log.error("group %s failed: %s", group, why)
            if self.on_group_failed is not None:
                self._link.defer(self.on_group_failed, group, error)
        elif self.on_group_filtered is not None:
            self._link.defer(self.on_group_filtered, group)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests and groups."""
        payloads, groups = self._payloads.take_all()
        for payload in payloads:
            self._link.defer(payload.responder.fail, "failed", error)
        if self.on_group_failed is not None:
            for group in groups:
                self._link.defer(self.on_group_failed, group, error)


def _answer(payload: Payload, sample: DeliveredSample) -> None:
    """Call the responder, with a failure if the answer cannot be put together."""
    try:
        payload.responder.answer(sample)
    except Exception as error:
        log.exception("request %s was finished but could not be answered", sample.request)
        payload.responder.fail("failed", error)
