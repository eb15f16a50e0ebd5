"""All connections of a server."""

from __future__ import annotations

import asyncio
import math

import pytest

from rollout_sched.integrations.http.connections import Connections, ServerLimits


class Client:
    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.calls: list[str] = []

    def expire(self):
        self.calls.append("expire")
        self.deadline = math.inf

    def retire(self):
        self.calls.append("retire")

    def drop(self):
        self.calls.append("drop")


class Failing(Client):
    def expire(self):
        super().expire()
        raise RuntimeError("on purpose")


def test_handed_ones_count_as_well():
    connections = Connections(ServerLimits(max_connections=2))
    one, two, three = Client(), Client(), Client()
    assert connections.join(one)
    connections.hand_over(one, two)
    assert connections.join(one)
    assert not connections.join(three)
    assert connections.refused == 1
    del connections.handed[two]
    assert connections.join(three)
    assert (list(connections.served), list(connections.handed)) == ([one, three], [])


def test_only_one_that_was_counted_is_counted_on():
    connections = Connections(ServerLimits())
    one, other, last = Client(), Client(), Client()
    connections.join(one)
    connections.replace(one, last)
    connections.replace(other, Client())
    assert list(connections.served) == [last]


def test_whoever_is_late_expires_whatever_another_raises():
    async def run():
        said = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told))
        connections = Connections(ServerLimits(idle_s=0.01))
        late, failing, handed, early = Client(0.0), Failing(0.0), Client(0.0), Client()
        for one in (failing, late, early):
            connections.join(one)
        connections.handed[handed] = None
        connections.start()
        connections.start()
        connections.stop()
        assert [one.calls for one in (late, failing, handed, early)] == [["expire"]] * 3 + [[]]
        assert len(said) == 1

    asyncio.run(run())


@pytest.mark.parametrize("in_time", [True, False])
def test_at_the_end_all_may_finish_for_a_while(in_time):
    async def run():
        connections, one = Connections(ServerLimits()), Client()
        connections.join(one)
        ending = asyncio.create_task(connections.end(10.0 if in_time else 0.01))
        await asyncio.sleep(0)
        assert one.calls == ["retire"]
        if in_time:
            connections.leave(one)
        await ending
        assert one.calls == ["retire"] + ["drop"] * (not in_time)

    asyncio.run(run())


def test_a_body_may_take_the_longer_the_more_of_it_has_come():
    connections = Connections(ServerLimits(stall_s=60.0, body_rate=1000.0))
    connections.now = 100.0
    assert connections.put_off(110.0, 5000) == 115.0
    assert connections.put_off(159.0, 5000) == 160.0
