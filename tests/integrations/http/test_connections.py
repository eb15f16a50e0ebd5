"""All connections of a server."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.http.connections import (
    LINGER_S,
    Backlog,
    Connections,
    Lingering,
    ServerLimits,
)
from tests.integrations.http.wires import Wire

pytestmark = pytest.mark.real_time


class Client:
    idle = False

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


def test_handed_connections_count_as_well():
    connections = Connections(ServerLimits(max_connections=2))
    one, two, three = Client(), Client(), Client()
    assert connections.join(one, "a")
    connections.transfer(one, two)
    assert connections.join(one, "a")
    assert not connections.join(three, "b")
    assert connections.refused == 1
    del connections.handed[two]
    assert connections.join(three, "b")
    assert (list(connections.served), list(connections.handed)) == ([one, three], [])


@given(data=st.data())
def test_who_has_the_most_makes_room(data):
    """Whoever comes and goes: a connection that is closed for another is idle, its address had the
    most when that was last looked at, and only if there is none is the new one refused."""
    most = data.draw(st.integers(1, 20))
    connections = Connections(ServerLimits(max_connections=most))
    for connections.now in range(25):
        new, address = Client(data.draw(st.floats(0, 9))), data.draw(st.sampled_from("aaab"))
        new.idle = data.draw(st.booleans())
        before, full = dict(connections.served), len(connections.served) == most
        shares = Counter(before.values())
        largest = {name for name, share in shares.items() if share == max(shares.values())}
        joined = connections.join(new, address)
        (*closed,) = before.keys() - connections.served.keys()
        assert joined is (not full or bool(closed))
        assert len(closed) == (full and joined)
        for one in closed:
            assert one.calls == ["retire"]
            assert one.idle
            assert before[one] in largest
        some = [one for one, where in before.items() if where in largest]
        if full and len(some) <= 16 and all(one.idle for one in some):
            assert joined
        if connections.served and data.draw(st.booleans()):
            leaving = data.draw(st.sampled_from(list(connections.served)))
            last = Client()
            connections.replace(leaving, last)
            connections.leave(last)
    for one in list(connections.served):
        connections.leave(one)
    assert not connections._by_address


def test_a_crowd_that_is_partly_busy_makes_room_for_all_who_come():
    connections = Connections(ServerLimits(max_connections=100))
    for number in range(100):
        one = Client(deadline=number)
        one.idle = number >= 50
        connections.join(one, "crowd")
    for number in range(50):
        assert any(connections.join(Client(), f"other {number}") for _ in range(5))
    assert not any(connections.join(Client(), "one too many") for _ in range(5))


def test_only_a_counted_connection_is_replaced():
    connections = Connections(ServerLimits())
    one, other, last = Client(), Client(), Client()
    connections.join(one, "a")
    connections.replace(one, last)
    connections.replace(other, Client())
    assert list(connections.served) == [last]


async def test_late_connections_expire_after_any_exception():
    said = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told))
    connections = Connections(ServerLimits(idle_s=0.01))
    late, failing, handed, early = Client(0.0), Failing(0.0), Client(0.0), Client()
    for one in (failing, late, early):
        connections.join(one, "a")
    connections.handed[handed] = None
    connections.start()
    connections.start()
    connections.stop()
    assert [one.calls for one in (late, failing, handed, early)] == [["expire"]] * 3 + [[]]
    assert len(said) == 1


@pytest.mark.parametrize("in_time", [True, False])
async def test_at_the_end_all_may_finish_for_a_while(in_time):
    connections, one = Connections(ServerLimits()), Client()
    connections.join(one, "a")
    ending = asyncio.create_task(connections.end(10.0 if in_time else 0.01))
    await asyncio.sleep(0)
    assert one.calls == ["retire"]
    if in_time:
        connections.leave(one)
    await ending
    assert one.calls == ["retire"] + ["drop"] * (not in_time)


def test_a_body_may_take_the_longer_the_more_of_it_has_come():
    connections = Connections(ServerLimits(stall_s=60.0, body_rate=1000.0))
    connections.now = 100.0
    assert connections.extend_deadline(110.0, 5000) == 115.0
    assert connections.extend_deadline(159.0, 5000) == 160.0


# -- The last moments of a connection --


class Closable(Wire):
    unsent = 0
    ended = False

    def get_write_buffer_size(self):
        return self.unsent

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.ended = True


def make(wire: Wire) -> Lingering:
    limits = ServerLimits(stall_s=30.0)
    connections = Connections(limits)
    connections.now = 100.0
    lingering = Lingering(connections, limits, wire, Backlog(wire, 100))
    connections.join(lingering, "a")
    return lingering


def test_a_client_has_a_moment_to_read_and_then_none():
    wire = Closable()
    lingering = make(wire)
    lingering.begin()
    assert wire.ended
    assert not wire.closing
    assert lingering.deadline == 100.0 + LINGER_S
    lingering.data_received(b"x" * 1000)
    lingering.retire()
    assert not wire.closing
    lingering.expire()
    assert wire.closing


def test_a_transport_that_cannot_end_is_closed():
    wire = Wire()
    make(wire).begin()
    assert wire.closing


@pytest.mark.parametrize("left", [1, 10])
def test_a_client_that_still_reads_its_answer_is_waited_for(left):
    wire = Closable()
    lingering = make(wire)
    wire.unsent = 10
    lingering.pause_writing()
    assert lingering.deadline == 130.0
    wire.unsent = left
    lingering.expire()
    assert wire.closing is (left == 10)


def test_once_it_has_read_all_the_moment_begins_anew():
    lingering = make(Closable())
    lingering.pause_writing()
    lingering.resume_writing()
    assert lingering.deadline == 100.0 + LINGER_S


async def test_a_lingering_connection_counts_until_it_is_lost():
    lingering = make(Closable())
    connections = lingering._connections
    assert list(connections.served) == [lingering]
    lingering.connection_lost(None)
    assert not connections.served


# -- Slow is not stuck --


class Slow(Wire):
    unsent = 0

    def get_write_buffer_size(self):
        return self.unsent


def test_a_client_that_reads_a_little_is_slow_and_one_that_reads_nothing_is_stuck():
    wire = Slow()
    backlog = Backlog(wire, 100)
    wire.unsent = 100
    backlog.begin()
    assert not backlog.shrinks()
    wire.unsent = 99
    assert backlog.shrinks()
    assert not backlog.shrinks()
    wire.unsent = 200  # more was written meanwhile
    assert not backlog.shrinks()
    wire.unsent = 150
    assert backlog.shrinks()


def test_a_client_that_reads_is_neither():
    wire = Slow()
    backlog = Backlog(wire, 100)
    wire.unsent = 100
    backlog.begin()
    backlog.end()
    wire.unsent = 1
    assert [backlog.throttled, backlog.shrinks()] == [False, False]


def test_a_client_for_whom_too_much_waits_is_cut_off():
    wire = Slow()
    backlog = Backlog(wire, 100)
    wire.unsent = 100
    backlog.cut()
    assert not wire.closing
    wire.unsent = 101
    backlog.cut()
    assert wire.closing
