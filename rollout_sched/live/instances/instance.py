"""One instance of the fleet, with what the parts of its supervisor share."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from rollout_sched.live.instances.health import HealthChecks
from rollout_sched.live.instances.membership import Membership, MembershipState
from rollout_sched.live.instances.pause import InstancePause
from rollout_sched.live.ports import Description, InstanceClient

if TYPE_CHECKING:
    from rollout_sched.live.instances.fleet import LiveFleet  # which makes the supervisors


#: Why the gate of an instance is closed while its pause is somebody else's.
FOUND_PAUSED = "somebody else has paused it"


class FleetInstance:
    """An instance that belongs to a fleet or may join it.

    membership    whether the instance belongs to the fleet
    pause         who has paused it
    health        its polls, and whether work may be sent to it
    control_lock  held by the code that controls it, so that control calls do not interleave
    description   its description when it last joined; None before
    """

    def __init__(self, client: InstanceClient, fleet: LiveFleet) -> None:
        self.client = client
        self.fleet = fleet
        self.settings = fleet.settings
        self.membership = Membership(client.name)
        self.pause = InstancePause(
            client.name, partial(fleet.resumed, client.name), self._found_paused
        )
        self.health = HealthChecks(client, fleet.settings)
        self.control_lock = asyncio.Lock()
        self.description: Description | None = None

    def _found_paused(self, paused: bool) -> None:
        """Somebody else's pause begins or ends: meanwhile it gets no new work."""
        if paused:
            self.fleet.versions.close_gate(self.name, FOUND_PAUSED)
        else:
            self.fleet.versions.open_gate(self.name, FOUND_PAUSED)

    @property
    def name(self) -> str:
        return self.client.name

    @property
    def joined(self) -> bool:
        return self.membership.state is MembershipState.JOINED

    @property
    def reason(self) -> str:
        """Why it has not joined; "" while it has."""
        return self.membership.reason
