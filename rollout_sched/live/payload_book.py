"""The payloads of all requests that are here, from their first dispatch to their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from rollout_sched.core.actions import Answer, Deliver, Discard, Dispatch
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import Sample
from rollout_sched.live.asking import unquoted
from rollout_sched.live.ports import Payload, RequestRejected

log = logging.getLogger(__name__)

#: Makes the payload of the sample with this index of a group.
PayloadFactory = Callable[[int], Payload]
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


class PayloadBook:
    """Who is asked for, and who is told at the end: the trainer, or the client of a request."""

    def __init__(
        self, link: Afterwards, on_deliver: OnDeliver | None, on_group_failed: OnGroupFailed | None
    ) -> None:
        self.on_deliver = on_deliver
        self.on_group_failed = on_group_failed
        self.on_group_filtered: OnGroupFiltered | None = None
        self._link = link
        self._payloads: dict[str, Payload] = {}
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

    def refused(self, request: str) -> None:
        """A request that was added is not taken."""
        del self._payloads[request]

    def add_group(self, group: str, make: PayloadFactory) -> None:
        if group in self._factories:
            raise CallerError(f"group {group!r} is already here; give each group its own id")
        self._factories[group] = make

    def group_refused(self, group: str) -> None:
        del self._factories[group]

    def get(self, request: str) -> Payload | None:
        """None if it was never dispatched here, or has ended."""
        return self._payloads.get(request)

    def of(self, dispatch: Dispatch) -> Payload:
        """The payload of a dispatched request, made when it is first dispatched.

        Raises what its factory raises.
        """
        payload = self._payloads.get(dispatch.request)
        return self._make(dispatch) if payload is None else payload

    def of_sample(self, group: str, index: int, request: str) -> Payload:
        """The same by the sample that the request makes."""
        payload = self._payloads.get(request)
        if payload is None:
            payload = self._payloads[request] = self._factories[group](index)
        return payload

    def of_group(self, group: str) -> list[str]:
        """The requests of a group that have a payload, by name."""
        return [name for name in self._payloads if name.rpartition("/")[0] == group]

    def let_go(self, group: str, requests: Iterable[str]) -> None:
        """It is handed out by somebody else, or was never taken."""
        for request in requests:
            self._payloads.pop(request, None)
        self._forget_group(group)

    def _make(self, of: Dispatch | Discard) -> Payload:
        return self.of_sample(of.group, of.index, of.request)

    # -- told ------------------------------------------------------------------------------

    def note_error(self, dispatch: Dispatch, error: Exception) -> None:
        """Why an attempt has failed: said to whoever waits, should it be the last. Of what is over
        nobody asks any more."""
        if dispatch.group in self._factories:
            self._group_errors[dispatch.group] = error
        elif dispatch.request in self._payloads:
            self._errors[dispatch.request] = error

    def note_group_error(self, group: str, error: Exception) -> None:
        """Why a group cannot be judged."""
        if group in self._factories:
            self._group_errors[group] = error

    def of_finished(self, sample: Sample) -> Payload:
        """Of a sample of a group that is here, and has finished."""
        payload = self._payloads.get(sample.request)
        if payload is None:  # it had finished in an earlier epoch of the run
            payload = self._factories[sample.group](sample.index)
            self._payloads[sample.request] = payload
        return payload

    def deliver(self, action: Deliver) -> None:
        payloads = [self._delivered(sample) for sample in action.samples]
        for sample in action.samples:
            self._forget_group(sample.group)
        if self.on_deliver is not None:
            self._link.afterwards(self._hand_over, self.on_deliver, action, payloads)

    def _delivered(self, sample: Sample) -> Payload:
        """One that was finished in an earlier epoch of the run was never dispatched here."""
        payload = self._payloads.pop(sample.request, None)
        return self._factories[sample.group](sample.index) if payload is None else payload

    def _hand_over(self, on_deliver: OnDeliver, action: Deliver, payloads: list[Payload]) -> None:
        try:
            on_deliver(action, payloads)
        except Exception as error:  # the samples are gone: the trainer must not wait for them
            self._link.fail(error)

    def answer(self, action: Answer) -> None:
        request = action.sample.request
        self._errors.pop(request, None)
        self._link.afterwards(_answer, self._payloads.pop(request), action.sample)

    def discard(self, action: Discard) -> None:
        """Of an attempt, of all that a request has, or of the request itself."""
        payload = self._payloads.get(action.request)
        if action.reason == "rejected":
            # One that an earlier epoch has begun has tokens, but was never dispatched here.
            (payload or self._make(action)).transcript.cut(action.tokens)
        elif payload is not None:
            drop(payload, action.attempt)
        if not action.ends:
            return
        self._payloads.pop(action.request, None)
        error = self._errors.pop(action.request, None)
        if action.reason == "oversized":
            error = RequestRejected("prompt and max_tokens fit into no instance's KV cache")
        if payload is not None and action.reason in _TOLD:
            reason = "withdrawn" if action.reason == "withdrawn" else "failed"
            self._link.afterwards(payload.responder.fail, reason, error)
        if action.reason in OF_GROUP and action.group in self._factories:
            self._lose_group(action.group, filtered=action.reason == "filtered")

    def _lose_group(self, group: str, *, filtered: bool) -> None:
        """It will never be delivered, and whoever waits for it hears so."""
        error = self._forget_group(group)
        if not filtered:
            why = "no reason is known" if error is None else unquoted(error)
            log.error("group %s failed: %s", group, why)
            if self.on_group_failed is not None:
                self._link.afterwards(self.on_group_failed, group, error)
        elif self.on_group_filtered is not None:
            self._link.afterwards(self.on_group_filtered, group)

    def _forget_group(self, group: str) -> Exception | None:
        """It is delivered or failed; returns the last error in it."""
        self._factories.pop(group, None)
        return self._group_errors.pop(group, None)

    def fail_all(self, error: Exception) -> None:
        """Nothing of what is here will ever be made."""
        for payload in self._payloads.values():
            self._link.afterwards(payload.responder.fail, "failed", error)
        self._payloads.clear()
        if self.on_group_failed is not None:
            for group in self._factories:
                self._link.afterwards(self.on_group_failed, group, error)


def _answer(payload: Payload, sample: Sample) -> None:
    """Whoever waits hears something, even where the answer cannot be put together."""
    try:
        payload.responder.answer(sample)
    except Exception as error:
        log.exception("request %s was finished but could not be answered", sample.request)
        payload.responder.fail("failed", error)


def drop(payload: Payload, attempt: int) -> None:
    """Forget what an attempt has made; 0: all."""
    try:
        payload.transcript.drop(attempt)
    except Exception:  # it holds more than it should until it ends; nobody else is concerned
        log.exception("a payload could not let go of attempt %d", attempt)
