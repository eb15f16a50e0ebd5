"""What somebody else does to an instance: a trainer that drives its weights around us.

Whether it is paused, and which weights it has, is asked only where its tokens stand still, or where
something suggests that somebody else is at work: the question goes through the engine, and one that
makes tokens need not be asked whether it is paused. What it answers proves nothing of its health.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollout_sched.live.asking import ask
from rollout_sched.live.fleet_versions import AROUND_US, FleetVersions, Known
from rollout_sched.live.pause import FIND, RELEASE, InstancePause, PausedBy
from rollout_sched.live.ports import Description, Gauges, InstanceClient
from rollout_sched.live.settings import Settings

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Why the gate is closed of an instance that is found paused.
PAUSED = "somebody else has paused it"


class EngineWatch:
    """Of one instance, poll by poll.

    on_resumed      called when it goes on after somebody else's pause
    on_wrong        called with why it must not serve with the weights that it has
    """

    def __init__(
        self,
        client: InstanceClient,
        versions: FleetVersions,
        settings: Settings,
        pause: InstancePause,
        lock: asyncio.Lock,
        *,
        on_resumed: Callable[[], None],
        on_wrong: Callable[[str], None],
    ) -> None:
        self._client = client
        self._versions = versions
        self._settings = settings
        self._pause = pause
        self._lock = lock
        self._on_resumed = on_resumed
        self._on_wrong = on_wrong
        self._made = -1  # tokens, by the last poll
        self._suspected = False
        self._unanswered = 0

    def suspect(self) -> None:
        """Something suggests that somebody else does something to it."""
        self._suspected = True

    def joined(self) -> None:
        """It begins anew, and is not paused."""
        self._made = -1
        self._suspected = False
        self._unanswered = 0
        self._versions.open_gate(self._client.name, PAUSED)

    async def look(self, description: Description, gauges: Gauges) -> None:
        """After a poll of an instance that we do nothing to ourselves."""
        moved, self._made = gauges.generated_tokens != self._made, gauges.generated_tokens
        suspected, self._suspected = self._suspected, False
        paused = self._pause.by is PausedBy.SOMEBODY_ELSE
        others = self._versions.gate(self._client.name, besides=PAUSED)
        if others or self._lock.locked() or (moved and not suspected and not paused):
            return
        async with self._lock:  # whatever we order ourselves comes before or after
            if not moved and "pause" in description.capabilities:
                paused = await self._is_paused()
            elif moved:
                paused = False
            if paused:
                self._found()
                return
            if "weight_info" in description.capabilities:
                await self._compare()
            self._went_on()

    async def _is_paused(self) -> bool:
        """One that does not say it is as it was, until it has said nothing for too long: a dead
        engine is not paused."""
        told = await self._asked(self._client.is_paused())
        self._unanswered = 0 if told is not None else self._unanswered + 1
        if told is None and self._unanswered < self._settings.misses:
            return self._pause.by is PausedBy.SOMEBODY_ELSE
        return bool(told)

    async def _asked(self, question: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await ask(question, self._settings.poll_timeout_s)
        except Exception as error:  # its polls say whether it is alive
            log.debug("instance %s does not say: %s", self._client.name, error)
            return None

    def _found(self) -> None:
        if self._pause.by is PausedBy.NOBODY:
            log.info("instance %s: somebody else has paused it", self._client.name)
            self._pause.move(FIND)
            self._versions.close_gate(self._client.name, PAUSED)

    def _went_on(self) -> None:
        if self._pause.by is PausedBy.SOMEBODY_ELSE:
            log.info("instance %s goes on", self._client.name)
            self._pause.move(RELEASE)
            self._on_resumed()
            self._versions.open_gate(self._client.name, PAUSED)

    async def _compare(self) -> None:
        name = self._client.name
        before = self._versions.of(name).version
        told = await self._asked(self._client.weight_version())
        known = self._versions.compare(name, told)
        if told is None or known is Known.AS_IT_IS:
            return
        if known is Known.OLDER and self._versions.of(name).version != before:
            return  # an answer has told of newer ones while this was asked
        if known is Known.NEWER and self._settings.on_contradiction == "server":
            self._versions.moved(name, told, AROUND_US)
        else:
            self._on_wrong(
                f"it says that its weights are version {told}, where "
                f"{self._versions.of(name).version} is what was loaded"
            )
