"""Checks each answer against what is known of its instance, before the answer is used: a version
label that the server contradicts is never delivered.

An attempt's tokens can only come from the version that its instance had when it was sent there, or
from one that was loaded since. If an answer names another version, the instance is asked
(`/weight_info`) before the answer is used. If the instance confirms it,
`Settings.on_contradiction` decides: its versions are accepted, or the answer is refused and made
again. An answer that the instance itself contradicts is never accepted.

Streamed tokens have no label until the end of their stream; if it breaks off, they count as made by
the version at dispatch, the oldest possible one. If tokens turn out to be older than the bound
allows, their group starts over. An answer that is no longer wanted contradicts nothing. Where we
set the labels (vLLM's `/update_weight_version`), the label of a start ("default") means a restart
that was not noticed yet: the answer is made elsewhere, what was streamed before is not used, and
the instance is checked before it gets more work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from rollout_sched.core import SchedulerView
from rollout_sched.core.model.actions import Dispatch
from rollout_sched.core.model.events import Spans
from rollout_sched.live.instances.supervisor import InstanceSupervisor
from rollout_sched.live.instances.versions import AROUND_US, FleetVersions
from rollout_sched.live.ports import (
    AnswerUntrue,
    InstanceError,
    Outcome,
    WeightsUnknown,
    with_timeout,
)
from rollout_sched.live.settings import Settings

log = logging.getLogger(__name__)

Kind = Literal["", "newer", "older", "disordered"]

#: Asks the instance about its answer; the answer is accepted unless this raises InstanceError.
Settle = Callable[[], Coroutine[Any, Any, None]]
#: None: accept the answer. An error: the attempt failed. Else the instance must be asked first.
Verdict = Settle | InstanceError | None


class AnswerChecks:
    """Checks every attempt that has ended by itself or was stopped, and settles contradictions."""

    def __init__(
        self,
        versions: FleetVersions,
        view: SchedulerView,
        settings: Settings,
        supervisors: Mapping[str, InstanceSupervisor],
    ) -> None:
        self._versions = versions
        self._view = view
        self._settings = settings
        self._supervisors = supervisors
        self._incidents: dict[str, tuple[Kind, tuple[int, int]]] = {}

    def judge(self, dispatch: Dispatch, outcome: Outcome, *, stopped: bool) -> Verdict:
        """`stopped`: the driver has aborted the attempt. If an attempt aborts unasked, its instance
        is checked soon."""
        attempt = dispatch.attempt
        if outcome.finish == "abort" and not (stopped or self._view.is_stopping(attempt)):
            self._supervisors[dispatch.instance].suspect("pause")
            if not outcome.tokens:
                return InstanceError("aborted by the instance without a token")
        if self.kind(attempt, outcome.spans):
            instance = self._supervisors[dispatch.instance]
            return partial(self.settle, attempt, outcome.spans, instance)
        return None

    def kind(self, attempt: int, spans: Spans) -> Kind:
        """How an answer contradicts what is known; "" if it does not, or is no longer needed."""
        known = self._view.versions_of(attempt)
        if known is None or not spans:
            return ""
        if any(before[0] >= after[0] for before, after in pairwise(spans)):
            return "disordered"
        if spans[-1][0] > known[1]:
            return "newer"
        return "older" if spans[0][0] < known[0] else ""

    async def settle(self, attempt: int, spans: Spans, instance: InstanceSupervisor) -> None:
        """Accept the answer: afterwards the known versions match it. Raises AnswerUntrue if it
        cannot be accepted, InstanceError if its instance does not answer."""
        instance.suspect("pause")
        kind = self.kind(attempt, spans)
        self._note(kind, attempt, spans, instance.client.name)
        if kind == "disordered":
            raise AnswerUntrue(f"its versions {[version for version, _ in spans]} do not grow")
        told = await self._told(instance)
        if self.kind(attempt, spans) == "newer":
            self._stands_by(spans[-1][0], told, told is not None and told < spans[-1][0])
            latest = max(spans[-1][0], told or 0)
            if not self._versions.moved(instance.client.name, latest, AROUND_US):
                raise WeightsUnknown(f"version {latest}, while we load another version there")
        if self.kind(attempt, spans) == "older":
            known = self._view.versions_of(attempt)
            unlikely = known is not None and told is not None and told >= known[0]
            self._stands_by(spans[0][0], told, unlikely)

    async def _told(self, instance: InstanceSupervisor) -> int | None:
        description = instance.description
        if description is None or "weight_info" not in description.capabilities:
            return None
        try:
            return await with_timeout(
                instance.client.weight_version(), self._settings.poll_timeout_s
            )
        except InstanceError as error:
            raise AnswerUntrue(f"its versions differ from the known ones, and {error}") from error

    def _stands_by(self, version: int, told: int | None, contradicts_itself: bool) -> None:
        """Raises an error if an answer with this version must not be accepted: AnswerUntrue if the
        instance contradicts it, WeightsUnknown if the setting is "refuse"."""
        if contradicts_itself:
            raise AnswerUntrue(
                f"it names version {version}, but the instance reports version {told}"
            )
        if self._settings.on_contradiction == "refuse":
            raise WeightsUnknown(
                f"it was made by version {version}, which is not what was loaded there"
            )

    def _note(self, kind: Kind, attempt: int, spans: Spans, name: str) -> None:
        """Count every contradiction; log each incident once."""
        known = self._view.versions_of(attempt)
        if known is None:
            return
        self._versions.contradictions[kind] += 1
        incident = (kind, known)
        if self._incidents.get(name) == incident:
            return
        self._incidents[name] = incident
        log.warning(
            "instance %s answers with versions %s, but %s are known: asking it (further answers "
            "of this kind are counted, not logged)",
            name,
            [version for version, _ in spans],
            sorted(set(known)),
        )
