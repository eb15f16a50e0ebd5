"""Publishes new weights for a trainer, and waits until the fleet has loaded them."""

from __future__ import annotations

import asyncio
import contextlib

from rollout_sched.core.errors import CallerError
from rollout_sched.core.events import Event, InstanceJoined, InstanceLost, WeightsUpdated
from rollout_sched.core.model import InstanceStatus
from rollout_sched.live.driver import Driver
from rollout_sched.live.ports import WeightLoader
from rollout_sched.live.stored_session import StoredSession

#: In these states no update is running.
_LOADED = (InstanceStatus.SERVING, InstanceStatus.GATED)

#: Seconds between two checks, during a wait, that the scheduler is not broken.
_LOOK_S = 1.0

_FLEET_EVENTS = (InstanceJoined, InstanceLost, WeightsUpdated)


class WeightPublisher:
    """One sequence of versions for all trainers. `stored`: the store that each version is written
    to before `publish` returns."""

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
                "with a store, weights must be loadable after a restart, and a coroutine cannot "
                "be stored; pass Reload(path), Transfer(...) or Applied(), or run without a store"
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
        """Whether all joined instances, and at least one, have loaded `version` or a newer one.

        The core counts an instance without work as updated when its update begins, because it
        makes no tokens meanwhile. A caller that wants to delete the weights must know that the
        update is over, so no update may be running.
        """
        here = self._driver.view.instances
        return bool(here) and all(
            instance.version >= version and instance.status in _LOADED for instance in here
        )

    def _fleet_event(self, event: Event) -> None:
        self._fleet_changed.set()
