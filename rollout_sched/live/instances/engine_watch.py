"""Detects what somebody else does to an instance, such as a trainer that loads weights around us.

An instance is asked whether it is paused and which weights it has only when it makes no tokens, or
when something suggests that somebody else is at work: the question goes through the engine. The
answer proves nothing about its health.

So a pause by somebody else is noticed when tokens stop, or when it refuses a request: a pause that
waits for running requests lets them make tokens. A pause that was found explains silence only as
long as the engine itself confirms it: what the API server of a dead engine answers does not keep
the instance alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollout_sched.live.instances.instance import FOUND_PAUSED, FleetInstance
from rollout_sched.live.instances.pause import FIND, RELEASE, PausedBy
from rollout_sched.live.instances.versions import AROUND_US, VersionSource
from rollout_sched.live.ports import Description, Gauges, with_timeout

log = logging.getLogger(__name__)

T = TypeVar("T")


class EngineWatch:
    """Watches one instance, poll by poll.

    on_wrong  called with the reason why it must not serve with its current weights
    """

    def __init__(self, instance: FleetInstance, on_wrong: Callable[[str], None]) -> None:
        self._instance = instance
        self._client = instance.client
        self._versions = instance.fleet.versions
        self._settings = instance.settings
        self._pause = instance.pause
        self._on_wrong = on_wrong
        self._made = -1  # tokens, by the last poll
        self._suspected = False
        self._unanswered = 0

    def suspect(self) -> None:
        """Something suggests that somebody else changes the instance."""
        self._suspected = True

    def joined(self) -> None:
        """The instance has joined and is not paused: start over."""
        self._made = -1
        self._suspected = False
        self._unanswered = 0

    async def look(self, description: Description, gauges: Gauges) -> None:
        """Called after a poll, while no order of ours runs on the instance."""
        moved, self._made = gauges.generated_tokens != self._made, gauges.generated_tokens
        suspected, self._suspected = self._suspected, False
        paused = self._pause.by is PausedBy.SOMEBODY_ELSE
        others = self._versions.gate(self._client.name, besides=FOUND_PAUSED)
        if (
            others
            or self._instance.control_lock.locked()
            or (moved and not suspected and not paused)
        ):
            return
        async with self._instance.control_lock:  # our own orders run before or after, not meanwhile
            if "pause" in description.capabilities and await self._is_paused():
                self._found()
                return
            if "weight_info" in description.capabilities:
                await self._compare()
            self._went_on()

    async def _is_paused(self) -> bool:
        """Without an answer the last state holds, but not for `misses` polls: a dead engine is not
        paused."""
        told = await self._asked(self._client.is_paused())
        self._unanswered = 0 if told is not None else self._unanswered + 1
        if told is None and self._unanswered < self._settings.misses:
            return self._pause.by is PausedBy.SOMEBODY_ELSE
        return bool(told)

    async def _asked(self, question: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await with_timeout(question, self._settings.poll_timeout_s)
        except Exception as error:  # the polls decide whether it is alive
            log.debug("instance %s did not answer: %s", self._client.name, error)
            return None

    def _found(self) -> None:
        if self._pause.by is PausedBy.NOBODY:
            log.info("instance %s: somebody else has paused it", self._client.name)
            self._pause.move(FIND)

    def _went_on(self) -> None:
        if self._pause.by is PausedBy.SOMEBODY_ELSE:
            log.info("instance %s is no longer paused", self._client.name)
            self._pause.move(RELEASE)
            self._instance.health.forget_progress()

    async def _compare(self) -> None:
        name = self._client.name
        before = self._versions.version_of(name).version
        told = await self._asked(self._client.weight_version())
        known = self._versions.compare(name, told)
        if told is None or known is VersionSource.AS_IT_IS:
            return
        if known is VersionSource.OLDER and self._versions.version_of(name).version != before:
            return  # an answer reported newer weights while this call ran
        if known is VersionSource.NEWER and self._settings.on_contradiction == "server":
            self._versions.moved(name, told, AROUND_US)
        else:
            self._on_wrong(
                f"it reports weights of version {told}, but version "
                f"{self._versions.version_of(name).version} was loaded"
            )
