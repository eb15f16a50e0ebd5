"""Peers that vanish without a word: what the system is asked to do, and that it does it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from rollout_sched.integrations.http import Pool
from rollout_sched.integrations.http.errors import watch_peer
from tests.integrations.http import silence
from tests.integrations.http.wires import (
    Echo,
    client_tls,
    dialled,
    ok,
    on_both_loops,
    post,
    read_message,
    repeating,
    scripted,
    server_tls,
    serving,
)

TCP = socket.IPPROTO_TCP


def watched(sock) -> tuple[int, ...]:
    """What a socket was asked: keep-alive, and the seconds in which it takes a peer for gone."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("only Linux names all of these options")
    idle, every, count = (
        sock.getsockopt(TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    on = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return on, idle + every * count, sock.getsockopt(TCP, socket.TCP_USER_TIMEOUT)


def socket_of(connections) -> socket.socket:
    (connection,) = connections
    return connection._transport.get_extra_info("socket")


@on_both_loops
async def test_a_pool_watches_its_servers():
    for tls in (None, server_tls()):
        async with scripted(repeating(ok()), ssl=tls) as url:
            for given, expected in (({}, 30), ({"dead_s": 12.0}, 12)):
                pool = Pool(url, ssl=client_tls() if tls else None, **given)
                await pool.request("GET", "/")
                assert watched(socket_of(pool._connections)) == (1, expected, expected * 1000)
                pool.close()
            pool = Pool(url, ssl=client_tls() if tls else None, dead_s=0)
            await pool.request("GET", "/")
            assert watched(socket_of(pool._connections))[::2] == (0, 0)
            pool.close()


@on_both_loops
async def test_a_server_watches_its_clients():
    for given, expected in (({}, 60), ({"dead_s": 12.0}, 12)):
        async with serving(Echo(), **given) as (server, port), dialled(port) as (reader, writer):
            writer.write(post("/hot"))
            await read_message(reader)
            assert watched(socket_of(server.connections.served)) == (1, expected, expected * 1000)


def test_a_socket_that_is_closed_is_left_as_it_is():
    sock = socket.socket()
    sock.close()
    watch_peer(sock, 30.0)


def test_times_below_a_second_are_a_second():
    with socket.socket() as sock:
        watch_peer(sock, 0.1)
        on, seconds, _ = watched(sock)
    assert (on, seconds) == (1, 1 + 3)


def namespaces() -> str:
    """Why there is no network to be had here that could fall silent; "" if there is."""
    if any(shutil.which(tool) is None for tool in ("ip", "unshare", "nsenter")):
        return "needs ip, unshare and nsenter"
    if os.geteuid() != 0:
        return "needs to be root"
    tried = subprocess.run(
        ["unshare", "-n", "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"],
        capture_output=True,
        text=True,
    )
    return tried.stderr.strip()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_peer_that_falls_silent_is_noticed(loop):
    """For real: a network of its own, from which the far side stops answering, without a reset."""
    if why := namespaces():
        pytest.skip(why)
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-m", silence.__name__, loop],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    took = dict(line.split() for line in done.stdout.splitlines())
    assert set(took) == {"waiting", "sending"}
    for seconds in took.values():
        assert 1 <= float(seconds) < 4 * silence.DEAD_S
