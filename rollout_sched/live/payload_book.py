"""Holds the payloads of all current requests, from their first dispatch to their end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rollout_sched.core.actions import Discard, Dispatch
from rollout_sched.core.errors import CallerError
from rollout_sched.core.model import DeliveredSample
from rollout_sched.live.ports import Payload

log = logging.getLogger(__name__)

#: Makes the payload of the sample with this index of a group.
PayloadFactory = Callable[[int], Payload]


class PayloadBook:
    """The payloads of requests, the payload factories of groups, and the last error of each."""

    def __init__(self) -> None:
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

    def add_group(self, group: str, make: PayloadFactory) -> None:
        if group in self._factories:
            raise CallerError(f"group {group!r} is already here; give each group its own id")
        self._factories[group] = make

    def get(self, request: str) -> Payload | None:
        """None if it was never dispatched here, or has ended."""
        return self._payloads.get(request)

    def of(self, it: Dispatch | Discard | DeliveredSample) -> Payload:
        """The payload of a request, created at the first call: a request that finished in an
        earlier epoch of the run was never dispatched here.

        Raises what its factory raises.
        """
        payload = self._payloads.get(it.request)
        return self.of_sample(it.group, it.index, it.request) if payload is None else payload

    def of_sample(self, group: str, index: int, request: str) -> Payload:
        """The same, for the sample that the request makes."""
        payload = self._payloads.get(request)
        if payload is None:
            payload = self._payloads[request] = self._factories[group](index)
        return payload

    def of_group(self, group: str) -> list[str]:
        """The requests of a group that have a payload, by name."""
        return [name for name in self._payloads if name.rpartition("/")[0] == group]

    # -- what has failed -------------------------------------------------------------------

    def note_error(self, dispatch: Dispatch, error: Exception) -> None:
        """Why an attempt has failed: reported to the responder if it was the last attempt. Errors
        of requests that have ended are ignored."""
        if dispatch.group in self._factories:
            self._group_errors[dispatch.group] = error
        elif dispatch.request in self._payloads:
            self._errors[dispatch.request] = error

    def note_group_error(self, group: str, error: Exception) -> None:
        """Why a group cannot be judged."""
        if group in self._factories:
            self._group_errors[group] = error

    # -- what goes -------------------------------------------------------------------------

    def take(self, sample: DeliveredSample) -> Payload:
        """Remove and return the payload of a request that has ended."""
        payload = self.of(sample)
        self.forget(sample.request)
        return payload

    def take_all(self) -> tuple[list[Payload], list[str]]:
        """Remove everything; return all payloads and the names of all groups."""
        payloads, groups = list(self._payloads.values()), list(self._factories)
        self._payloads.clear()
        self._factories.clear()
        return payloads, groups

    def forget(self, request: str) -> Exception | None:
        """Remove a request that has ended or was not accepted; returns its last error if it belongs
        to no group."""
        self._payloads.pop(request, None)
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
