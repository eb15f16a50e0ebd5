"""New weights: published by a trainer, and waited for until the fleet has them."""

from __future__ import annotations

import asyncio
import contextlib

from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import Event, InstanceJoined, InstanceLost, WeightsUpdated
from rollout_sched.core.model import InstanceStatus
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import WeightLoader
from rollout_sched.live.stored_session import StoredSession

#: No update is under way.
_LOADED = (InstanceStatus.SERVING, InstanceStatus.GATED)

#: Seconds between two looks at whether a scheduler that is waited for can still go on.
_LOOK_S = 1.0

_FLEET_EVENTS = (InstanceJoined, InstanceLost, WeightsUpdated)


class WeightPublisher:
    """One line of versions, whoever publishes the next. `stored`: where each is before it
    counts."""

    def __init__(self, driver: Driver, stored: StoredSession | None) -> None:
        self._driver = driver
        self._stored = stored
        self._fleet_changed = asyncio.Event()
        driver.pump.watch(self._fleet_event, *_FLEET_EVENTS)

    @property
    def newest(self) -> int:
        """The newest version published."""
        return self._driver.view.run.version

    async def publish(
        self, version: int, apply: WeightLoader, said: bytes | None, *, wait: bool
    ) -> None:
        """See `TrainerSession.publish_weights`."""
        if self._stored is not None and said is None:
            raise CallerError(
                "a coroutine cannot be stored, and weights must outlive this process; give "
                "Reload(path), Transfer(...) or Applied(), or run without a store"
            )
        self._driver.publish(version, apply)
        if self._stored is not None and said is not None:
            self._stored.published(version, said)
            await self._stored.promise()
        while wait and not self.has_loaded(version):
            self._fleet_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._fleet_changed.wait()
            if self._driver.broken is not None:
                raise self._driver.broken

    def has_loaded(self, version: int) -> bool:
        """Whether every instance that is here, and at least one, has loaded `version` or a newer
        one.

        The core counts one without work as new once its update has begun, for it makes nothing
        with what it has; who wants to take the weights away again must know that it is over.
        """
        here = self._driver.view.instances
        return bool(here) and all(
            instance.version >= version and instance.status in _LOADED for instance in here
        )

    def _fleet_event(self, event: Event) -> None:
        self._fleet_changed.set()
