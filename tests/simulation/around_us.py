"""Weights that a trainer brings to the instances itself, by their own calls."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Seconds between two looks at an instance, for one call, and for all to have new weights; those
#: that are away get them when they are back.
LOOK_S, CALL_S, PATIENCE_S = 0.5, 4.0, 15.0


#: Of an instance that is away, or says nothing sensible.
_ASKED_AGAIN = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


class WeightsAroundUs:
    """It pauses an instance, labels it, for that is all there is to these weights, and resumes it.
    What it remembers is in the trainer's checkpoint."""

    def __init__(self, world: World, mode: str) -> None:
        self.version = 0
        self._mode = mode
        self._world = world
        self._paused: set[str] = set()
        self._lacking: set[str] = set()

    def bring(self, version: int) -> None:
        self.version = version
        self._lacking = {instance.url for instance in self._world.instances}

    async def are_there(self) -> None:
        """Until every instance has them that is not away for too long."""
        waited_s = 0.0
        while self._lacking and waited_s < PATIENCE_S:
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S

    async def keep_up(self) -> None:
        """For ever: who comes back with other weights gets the newest."""
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:
            while True:
                for instance in self._world.instances:
                    with contextlib.suppress(*_ASKED_AGAIN):
                        await self._look(session, instance.url)
                await asyncio.sleep(LOOK_S)

    async def _look(self, session: aiohttp.ClientSession, url: str) -> None:
        version = self.version
        if not version:
            return
        async with session.get(f"{url}/weight_info") as answer:
            told: Any = await answer.json()
        if told.get("weight_version") != str(version):
            self._paused.add(url)
            await _post(session, f"{url}/pause?mode={self._mode}&clear_cache=true")
            await _post(session, f"{url}/update_weight_version", {"new_version": str(version)})
        if url in self._paused:
            await _post(session, f"{url}/resume")
            self._paused.discard(url)
        if version == self.version:
            self._lacking.discard(url)


async def _post(session: aiohttp.ClientSession, url: str, body: Any = None) -> None:
    async with session.post(url, json=body) as answer:
        await answer.read()
