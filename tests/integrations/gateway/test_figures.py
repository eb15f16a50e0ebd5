"""What an instance is doing, in the words of the metrics."""

from __future__ import annotations

import asyncio
import json

from tests.integrations.gateway.house import House, Upstream, run
from tests.integrations.gateway.scripted import completion
from tests.integrations.gateway.test_prometheus import BODY
from tests.live.scripted import until

A = "http://a:1"


def test_the_states_of_an_instance() -> None:
    async def scene() -> None:
        upstream = Upstream(A)
        upstream.stream = asyncio.Queue()
        async with House(upstream) as house:
            figures, driver = house.service.gateway.figures, house.driver
            state_of = figures._state_of
            assert state_of("nobody") == ""
            assert state_of(A) == "idle"
            asking = asyncio.create_task(house.session.post("/v1/completions", json=BODY))
            await until(lambda: upstream.asked)
            assert state_of(A) == "busy"
            figures.fleet.seconds(driver.pump.now)
            upstream.stream.put_nowait(json.dumps(completion([5])).encode())
            upstream.stream.put_nowait(None)
            assert (await asking).status == 200
            assert state_of(A) == "idle"
            driver.versions.close_gate(A, "somebody loads weights")
            assert state_of(A) == "closed"
            await driver.supervisors[A].pauses.hold("keep", False)
            assert state_of(A) == "held"
            assert set(figures.fleet.seconds(driver.pump.now)) == {"idle", "busy", "closed"}

    run(scene())
