"""A loop that is held up is seen."""

from __future__ import annotations

import asyncio
import time

from rollout_sched.integrations.gateway.control_plane.counts import EVERY_S, LoopLag
from tests.live.scripted import until


def test_a_loop_that_is_held_up_is_seen_and_nothing_is_left() -> None:
    async def scene() -> None:
        lag = LoopLag()
        lag.start()
        time.sleep(EVERY_S + 0.2)  # the loop is held up
        await until(lambda: sum(lag.seconds.counts))
        assert lag.seconds.sum >= 0.2
        lag.stop()
        seen = sum(lag.seconds.counts)
        await asyncio.sleep(2 * EVERY_S)
        assert sum(lag.seconds.counts) == seen

    asyncio.run(scene())
