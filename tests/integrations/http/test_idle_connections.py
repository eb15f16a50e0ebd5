"""Which idle connection is used, and when the others are closed."""

from __future__ import annotations

import asyncio
import socket

from rollout_sched.integrations.http import Exchange, Pool
from rollout_sched.integrations.http.client import MAX_BODY
from rollout_sched.integrations.http.client_connection import ClientConnection
from rollout_sched.simulators.replay import virtual_loop
from tests.integrations.http.wires import Heard, Wire

KEEPALIVE_S = 4.0


class Open(Wire):
    """A transport whose socket has nothing to be read, until the other side closes."""

    def __init__(self) -> None:
        super().__init__()
        self._socket.close()
        self._socket, self.other = socket.socketpair()

    def abort(self):
        super().abort()
        self.other.close()


def idle(pool: Pool) -> tuple[ClientConnection, Open]:
    """A new connection that nobody has asked for, so that it is idle at once."""
    connection, wire = ClientConnection(pool), Open()
    connection.connection_made(wire)
    return connection, wire


def sent() -> Exchange:
    return Exchange(b"GET / HTTP/1.1\r\n\r\n", b"", False, Heard(), MAX_BODY)


def play(scene):
    async def run():
        pool = Pool("http://127.0.0.1:1", keepalive_s=KEEPALIVE_S)
        await scene(pool._idle, pool)
        pool.close()

    virtual_loop.run(run())


def test_the_one_used_last_goes_first():
    async def scene(connections, pool):
        _, old = idle(pool)
        _, new = idle(pool)
        assert connections.carry(sent())
        assert (bool(old.written), bool(new.written)) == (False, True)
        assert len(connections) == 1
        connections.close()

    play(scene)


def test_one_that_the_server_closes_is_passed_over():
    async def scene(connections, pool):
        _, gone = idle(pool)
        gone.other.close()
        assert not connections.carry(sent())
        assert not gone.written
        connections.close()

    play(scene)


def test_each_is_closed_when_it_was_idle_too_long():
    async def scene(connections, pool):
        _, first = idle(pool)
        await asyncio.sleep(3.0)
        forgotten, left = idle(pool)
        _, last = idle(pool)
        connections.forget(forgotten)
        await asyncio.sleep(1.5)
        assert [wire.closing for wire in (first, left, last)] == [True, False, False]
        await asyncio.sleep(3.0)
        assert [wire.closing for wire in (first, left, last)] == [True, False, True]

    play(scene)


def test_one_whose_time_is_over_is_not_used_though_the_timer_is_late():
    async def scene(connections, pool):
        _, wire = idle(pool)
        connections.close()  # no timer
        await asyncio.sleep(KEEPALIVE_S)
        assert not connections.carry(sent())
        assert wire.closing

    play(scene)
