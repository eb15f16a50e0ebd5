"""Which weights every instance has, who brings them there, and whose gate is closed.

Three ways to drive weights: *we* load them, the trainer does so *through us* (its calls pass the
gateway), or *around us* (it talks to the instances itself, and we see what has become of it). The
scheduler knows versions alone; here is who is behind them, and the one way to tell it of weights
that are not ours.
"""

from __future__ import annotations

import logging
from collections import Counter
from enum import StrEnum
from typing import Protocol

import msgspec

from rollout_sched.core.events import (
    Event,
    GateClosed,
    GateOpened,
    WeightsPublished,
    WeightsUpdated,
)
from rollout_sched.core.model import InstanceStatus
from rollout_sched.core.view import SchedulerView

log = logging.getLogger(__name__)


class DrivenBy(StrEnum):
    """Who brings an instance its weights."""

    US = "us"
    THROUGH_US = "the trainer, through us"
    AROUND_US = "the trainer, around us"


US, THROUGH_US, AROUND_US = DrivenBy

#: Its version is then the one that it will have.
_IN_OUR_HANDS = (InstanceStatus.UPDATING, InstanceStatus.LENT)


class Known(StrEnum):
    """A version that an instance says it has, beside the one that is known of it."""

    AS_IT_IS = "as known, or being changed just now"
    NEWER = "newer"
    OLDER = "older"


class ServedVersion(msgspec.Struct, frozen=True):
    """What an instance serves: `version` is None while it is away. `gate` says why nothing new is
    sent there by whom; "" while it is open."""

    version: int | None
    driven_by: DrivenBy
    gate: str


class Told(Protocol):
    """What this needs of the driver (`live.event_pump`)."""

    def tell(self, event: Event) -> None: ...


class FleetVersions:
    """Of all instances by name, those that are away too.

    adopts          the trainer begins with whatever version the instances say they have, as long
                    as it has published none itself
    contradictions  answers that said other versions than were known here, by kind
    """

    def __init__(self, pump: Told, view: SchedulerView, *, adopts: bool = False) -> None:
        self.adopts = adopts
        self.contradictions: Counter[str] = Counter()
        self._pump = pump
        self._view = view
        self._driven_by: dict[str, DrivenBy] = {}
        self._gates: dict[str, list[str]] = {}

    def of(self, instance: str) -> ServedVersion:
        known = self._view.instance(instance)
        return ServedVersion(
            None if known is None else known.version,
            self._driven_by.get(instance, US),
            self.gate(instance),
        )

    # -- gates -----------------------------------------------------------------------------

    def gate(self, instance: str, besides: str = "") -> str:
        """Why nothing new is sent there, `besides` this; "" while its gate is open."""
        return ", and ".join(why for why in self._gates.get(instance, ()) if why != besides)

    def close_gate(self, instance: str, why: str) -> None:
        """Nothing new is sent there until every `why` it was closed for is over; what runs there
        goes on. One that is away does not join meanwhile."""
        reasons = self._gates.setdefault(instance, [])
        if why in reasons:
            return
        reasons.append(why)
        if len(reasons) == 1 and self._view.instance(instance) is not None:
            self._pump.tell(GateClosed(instance))

    def open_gate(self, instance: str, why: str) -> None:
        """This is over; harmless if it was not closed for it."""
        reasons = self._gates.get(instance, [])
        if why not in reasons:
            return
        reasons.remove(why)
        if not reasons:
            del self._gates[instance]
            if self._view.instance(instance) is not None:
                self._pump.tell(GateOpened(instance))

    def forget(self, instance: str) -> None:
        """It was removed."""
        self._gates.pop(instance, None)
        self._driven_by.pop(instance, None)

    # -- versions --------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether a version that is newer than the trainer's is taken for the trainer's: it loads
        the weights itself, so we are the last to hear of it."""
        return self.adopts or not self._view.loads_newest

    def may_publish(self, version: int) -> bool:
        """Versions grow; what the trainer has brought to some itself may become ours to load."""
        newest = self._view.run.version
        return version > newest or (version == newest and not self._view.loads_newest)

    def compare(self, instance: str, told: int | None) -> Known:
        """`told`: what the instance says it has. While we load others there it proves nothing."""
        known = self._view.instance(instance)
        if known is None or told is None or known.status in _IN_OUR_HANDS:
            return Known.AS_IT_IS
        if told == known.version:
            return Known.AS_IT_IS
        return Known.NEWER if told > known.version else Known.OLDER

    def published(self) -> None:
        """The newest version is ours to load, for we were told how."""
        self.adopts = False
        self._driven_by.clear()

    def adopt(self, version: int) -> None:
        """The trainer is at this version, if it is newer than what we knew."""
        if version > self._view.run.version:
            self._pump.tell(WeightsPublished(version, loads=False))

    def moved(self, instance: str, version: int, driven_by: DrivenBy) -> bool:
        """The trainer has brought an instance this version; False if that is no news.

        Nothing is told of an instance that we load ourselves just now: what it has then it says
        when that is over.
        """
        self.adopt(version)
        known = self._view.instance(instance)
        before = self._driven_by.get(instance, US)
        if known is None or known.version >= version or known.status is InstanceStatus.UPDATING:
            if before is not US:  # it was seen before it was said
                self._driven_by[instance] = driven_by
            return False
        self._driven_by[instance] = driven_by
        log.log(
            logging.INFO if before is driven_by else logging.WARNING,
            "instance %s: version %d was brought there by %s; its version follows",
            instance,
            version,
            driven_by,
        )
        self._pump.tell(WeightsUpdated(instance, version))
        return True
