"""Pauses and resumes an instance on an administrator's order, and records whose pause it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from rollout_sched.live.asking import ask
from rollout_sched.live.membership import Membership, MembershipState
from rollout_sched.live.pause import HOLD, PAUSE, RELEASE, RELEASE_LATER, InstancePause
from rollout_sched.live.ports import InstanceClient
from rollout_sched.live.settings import Settings


class PauseControl:
    """Holds and releases one instance, for administrators and for code that forwards their calls.

    A hold survives while the instance is away: a held instance is not resumed by a weight update,
    and is paused again before it joins after a restart.

    lock        held while the instance is paused or resumed
    on_resumed  called when the instance should make tokens again
    """

    def __init__(
        self,
        client: InstanceClient,
        settings: Settings,
        membership: Membership,
        pause: InstancePause,
        lock: asyncio.Lock,
        *,
        on_resumed: Callable[[], None],
    ) -> None:
        self._client = client
        self._settings = settings
        self._membership = membership
        self._pause = pause
        self._lock = lock
        self._on_resumed = on_resumed

    @property
    def held(self) -> bool:
        """Paused by an administrator, until released."""
        return self._pause.held

    async def hold(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        """Pause it until `release`. Raises InstanceError."""
        async with self._lock:
            await ask(self._client.pause(mode, clear_cache), self._settings.control_timeout_s)
            self.note_held()

    async def release(self) -> None:
        """Resume it, whoever has paused it. A held instance that is away is resumed when it joins.
        Raises InstanceError."""
        async with self._lock:
            if self.held and self._membership.state is not MembershipState.JOINED:
                self._pause.move(RELEASE_LATER)
                return
            await ask(self._client.resume(), self._settings.control_timeout_s)
            self.note_released()

    def note_left_paused(self) -> None:
        """An earlier run of ours has paused it and did not resume it."""
        self._pause.move(PAUSE)

    def note_held(self) -> None:
        """An administrator has paused it."""
        self._pause.move(HOLD)

    def note_released(self) -> None:
        """An administrator has resumed it."""
        self._pause.move(RELEASE)
        self._on_resumed()
