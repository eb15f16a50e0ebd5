"""A trainer that loads weights into the instances itself, with the instances' own calls."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Seconds between two looks at an instance, for one call, and until all have the new weights;
#: instances that are away get them when they return.
POLL_S, CALL_S, PATIENCE_S = 0.5, 4.0, 15.0


#: Errors of an instance that is away or gives a wrong answer.
_ASKED_AGAIN = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


class WeightsAroundUs:
    """Pauses an instance, sets its version (simulated weights have nothing else) and resumes it.
    Its state is in the trainer's checkpoint."""

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
        """Wait until every instance has the weights, except those that are away for too long."""
        waited_s = 0.0
        while self._lacking and waited_s < PATIENCE_S:
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S

    async def keep_up(self) -> None:
        """Forever: give the newest weights to each instance that returns with other ones."""
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:
            while True:
                for instance in self._world.instances:
                    with contextlib.suppress(*_ASKED_AGAIN):
                        await self._look(session, instance.url)
                await asyncio.sleep(POLL_S)

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
