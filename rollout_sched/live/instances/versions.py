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

import msgspec

from rollout_sched.core import SchedulerView
from rollout_sched.core.model.events import (
    GateClosed,
    GateOpened,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.core.model.model import InstanceStatus
from rollout_sched.live.event_pump import EventPump

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
