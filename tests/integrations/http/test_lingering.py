"""The last moments of a connection."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.http.connections import (
    LINGER_S,
    Backlog,
    Connections,
    Lingering,
    ServerLimits,
)
from tests.integrations.http.wires import Wire


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
    connections.join(lingering)
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
def test_one_that_still_reads_its_answer_is_waited_for(left):
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


def test_it_is_counted_until_it_is_lost():
    async def run():
        lingering = make(Closable())
        connections = lingering._connections
        assert list(connections.served) == [lingering]
        lingering.connection_lost(None)
        assert not connections.served

    asyncio.run(run())
