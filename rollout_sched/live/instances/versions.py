"""Tracks which weights every instance has, who loads them, and which gates are closed.

Weights are loaded in three ways: *we* load them; the trainer loads them *through us* (its calls
pass the gateway); or *around us* (it talks to the instances itself, and we observe the result). The
scheduler knows only versions. This module knows who loaded them, and is the only way to report
weights that we did not load.

Versions only grow: an instance with older weights than this book says is lost and joins again,
because all attempts that were sent to it count with the version in the book. A closed gate
(GateClosed) keeps new work from an instance that another party controls. It has one owner, which
keeps the reasons for closing, so two parties that close it do not open it for each other.
`cache_salt` carries the version: a new version never reads old KV unless the policy says "retain".
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum
from itertools import pairwise
from typing import Literal, Protocol

import msgspec

from rollout_sched.core import SchedulerView
from rollout_sched.core.model.events import (
    GateClosed,
    GateOpened,
    Spans,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.live.event_pump import EventPump
from rollout_sched.live.ports import (
    AnswerUntrue,
    Description,
    InstanceClient,
    InstanceError,
    WeightsUnknown,
)
from rollout_sched.live.settings import Settings
from rollout_sched.live.timeouts import with_timeout

log = logging.getLogger(__name__)


class DrivenBy(StrEnum):
    """Who brings an instance its weights."""

    US = "us"
    THROUGH_US = "the trainer, through us"
    AROUND_US = "the trainer, around us"


US, THROUGH_US, AROUND_US = DrivenBy

#: In these states an instance's known version is the one that it will have.
_IN_OUR_HANDS = (InstanceStatus.UPDATING, InstanceStatus.LENT)


class VersionSource(StrEnum):
    """The version that an instance reports, compared with the known one."""

    AS_IT_IS = "as known, or being changed just now"
    NEWER = "newer"
    OLDER = "older"


class ServedVersion(msgspec.Struct, frozen=True):
    """What an instance serves. `version` is None while it is away. `gate`: the reason why its gate
    is closed; "" while it is open."""

    version: int | None
    driven_by: DrivenBy
    gate: str


class FleetVersions:
    """The versions and gates of all instances by name, including those that are away.

    adopts          the trainer's version is the one that the instances report, until the trainer
                    publishes one itself
    contradictions  number of answers with other versions than were known, by kind
    """

    def __init__(self, pump: EventPump, view: SchedulerView, *, adopts: bool = False) -> None:
        self.adopts = adopts
        self.contradictions: Counter[str] = Counter()
        self._pump = pump
        self._view = view
        self._driven_by: dict[str, DrivenBy] = {}
        self._gates: dict[str, list[str]] = {}

    def version_of(self, instance: str) -> ServedVersion:
        known = self._view.instance(instance)
        return ServedVersion(
            None if known is None else known.version,
            self._driven_by.get(instance, US),
            self.gate(instance),
        )

    # -- gates -----------------------------------------------------------------------------

    def gate(self, instance: str, besides: str = "") -> str:
        """The reasons why its gate is closed, except `besides`; "" while it is open."""
        return ", and ".join(why for why in self._gates.get(instance, ()) if why != besides)

    def close_gate(self, instance: str, why: str) -> None:
        """Send the instance no new work until every reason `why` for closing is gone; running
        requests continue. An instance that is away does not join meanwhile."""
        reasons = self._gates.setdefault(instance, [])
        if why in reasons:
            return
        reasons.append(why)
        if len(reasons) == 1 and self._view.instance(instance) is not None:
            self._pump.tell(GateClosed(instance))

    def open_gate(self, instance: str, why: str) -> None:
        """The reason `why` is gone; no effect if the gate was not closed for it."""
        reasons = self._gates.get(instance, [])
        if why not in reasons:
            return
        reasons.remove(why)
        if not reasons:
            del self._gates[instance]
            if self._view.instance(instance) is not None:
                self._pump.tell(GateOpened(instance))

    def forget(self, instance: str) -> None:
        """The instance was removed."""
        self._gates.pop(instance, None)
        self._driven_by.pop(instance, None)

    # -- versions --------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether a version newer than the known trainer version becomes the trainer's version: the
        trainer loads the weights itself, so we learn of it only from the instances."""
        return self.adopts or not self._view.loads_newest

    def may_publish(self, version: int) -> bool:
        """Whether `version` may be published: it must be newer than the newest, or be the newest if
        the trainer has loaded that one itself and we are to load it now."""
        newest = self._view.run.version
        return version > newest or (version == newest and not self._view.loads_newest)

    def compare(self, instance: str, told: int | None) -> VersionSource:
        """`told`: the version that the instance reports; it proves nothing while we update it."""
        known = self._view.instance(instance)
        if known is None or told is None or known.status in _IN_OUR_HANDS:
            return VersionSource.AS_IT_IS
        if told == known.version:
            return VersionSource.AS_IT_IS
        return VersionSource.NEWER if told > known.version else VersionSource.OLDER

    def published(self) -> None:
        """The newest version was published with a way to load it, so we load it."""
        self.adopts = False
        self._driven_by.clear()

    def adopt(self, version: int) -> None:
        """Take `version` as the trainer's if it is newer than the known one."""
        if version > self._view.run.version:
            self._pump.tell(WeightsPublished(version, loads=False))

    def moved(self, instance: str, version: int, driven_by: DrivenBy) -> bool:
        """The trainer has loaded this version into an instance; False if that was known.

        Nothing is reported for an instance that we are updating: its version is known afterwards.
        """
        self.adopt(version)
        known = self._view.instance(instance)
        before = self._driven_by.get(instance, US)
        if known is None or known.version >= version or known.status is InstanceStatus.UPDATING:
            if before is not US:  # we saw the version before the trainer reported it
                self._driven_by[instance] = driven_by
            return False
        self._driven_by[instance] = driven_by
        log.log(
            logging.INFO if before is driven_by else logging.WARNING,
            "instance %s: version %d was loaded by %s; its known version is updated",
            instance,
            version,
            driven_by,
        )
        self._pump.tell(WeightsUpdated(instance, version))
        return True


# ------------------------------------------------------------------------------------------
# Checks the versions in answers: a version label that the server contradicts is never delivered.
#
# An attempt's tokens can only come from the version that its instance had when it was sent there,
# or from one that was loaded since. If an answer names another version, the instance is asked
# (`/weight_info`) before the answer is used. If the instance confirms it,
# `Settings.on_contradiction` decides: its versions are accepted, or the answer is refused and made
# again. An answer that the instance itself contradicts is never accepted.
#
# Streamed tokens have no label until the end of their stream; if it breaks off, they count as made
# by the version at dispatch, the oldest possible one. If tokens turn out to be older than the bound
# allows, their group starts over. An answer that is no longer wanted contradicts nothing. Where we
# set the labels (vLLM's `/update_weight_version`), the label of a start ("default") means a restart
# that was not noticed yet: the answer is made elsewhere, what was streamed before is not used, and
# the instance is checked before it gets more work.

Kind = Literal["", "newer", "older", "disordered"]


class AnswerSource(Protocol):
    """The instance an answer came from (`live.instances.supervisor`)."""

    @property
    def client(self) -> InstanceClient: ...
    @property
    def description(self) -> Description | None: ...
    def suspect(self) -> None: ...


class Contradictions:
    """Finds and settles contradictions in the answers of all instances."""

    def __init__(self, versions: FleetVersions, view: SchedulerView, settings: Settings) -> None:
        self._versions = versions
        self._view = view
        self._settings = settings
        self._incidents: dict[str, tuple[Kind, tuple[int, int]]] = {}

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

    async def settle(self, attempt: int, spans: Spans, source: AnswerSource) -> None:
        """Accept the answer: afterwards the known versions match it. Raises AnswerUntrue if it
        cannot be accepted, InstanceError if its instance does not answer."""
        source.suspect()
        kind = self.kind(attempt, spans)
        self._note(kind, attempt, spans, source.client.name)
        if kind == "disordered":
            raise AnswerUntrue(f"its versions {[version for version, _ in spans]} do not grow")
        told = await self._told(source)
        if self.kind(attempt, spans) == "newer":
            self._stands_by(spans[-1][0], told, told is not None and told < spans[-1][0])
            latest = max(spans[-1][0], told or 0)
            if not self._versions.moved(source.client.name, latest, AROUND_US):
                raise WeightsUnknown(f"version {latest}, while we load another version there")
        if self.kind(attempt, spans) == "older":
            known = self._view.versions_of(attempt)
            unlikely = known is not None and told is not None and told >= known[0]
            self._stands_by(spans[0][0], told, unlikely)

    async def _told(self, source: AnswerSource) -> int | None:
        description = source.description
        if description is None or "weight_info" not in description.capabilities:
            return None
        try:
            return await with_timeout(source.client.weight_version(), self._settings.poll_timeout_s)
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
