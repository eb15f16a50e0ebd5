"""Messages of one iteration of the loop are sent together."""

from __future__ import annotations

import asyncio

from rollout_sched.link.transport import Outbox


def test_one_frame_a_turn_in_order_and_none_after_the_end() -> None:
    async def scene() -> None:
        sent: list[list[int]] = []
        outbox: Outbox[int] = Outbox(sent.append)
        outbox.put(1)
        outbox.put(2)
        assert sent == []
        await asyncio.sleep(0)
        outbox.put(3)
        await asyncio.sleep(0)
        assert sent == [[1, 2], [3]]
        outbox.put(4)
        outbox.close()
        await asyncio.sleep(0)
        assert sent == [[1, 2], [3]]

    asyncio.run(scene())
