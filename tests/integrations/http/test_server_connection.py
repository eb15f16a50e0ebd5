"""What a connection makes of packets, without a socket."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.integrations.http import ServerLimits
from rollout_sched.integrations.http.bodies import MAX_CHUNK_LINE
from rollout_sched.integrations.http.heads import MAX_LINES
from rollout_sched.integrations.http.server import HttpServer
from tests.integrations.http.test_bodies import cut
from tests.integrations.http.wires import (
    Echo,
    Wire,
    post,
)

Heard = list[tuple[bytes, bytes, list, bytes]]


def hear(data: bytes, at: list[int], later: bool, **limits) -> tuple[Heard, bytes]:
    """The requests that a server makes of packets, and what it writes; answered at once or after
    each packet."""
    app = Echo(None if not later else lambda request: None)
    wire = Wire()

    async def run():
        server = HttpServer(app, limits=ServerLimits(**limits))
        connection = server()
        connection.connection_made(wire)
        for packet in cut(data, at):
            if packet:
                (wire.protocol or connection).data_received(packet)
            for request in app.requests:
                if not request.begun:
                    request.answer(200, (), request.body)
        while app.requests and not app.requests[-1].begun:
            app.requests[-1].answer(200, (), app.requests[-1].body)
        await server.close(0.0)
        (wire.protocol or connection).connection_lost(None)
        assert not server.connections.served
        assert not server.bodies.used

    asyncio.run(run())
    return [(r.method, r.target, r.headers, r.body) for r in app.requests], bytes(wire.written)


HOST = b"\r\nhost: x\r\n"
EXTENSIONS = st.integers(MAX_CHUNK_LINE - 8, MAX_CHUNK_LINE + 8).map(lambda n: b"1;" + b"e" * n)
HEADS = st.integers(470, 530).map(lambda n: b"GET /hot HTTP/1.1" + HOST + b"a: " + b"b" * n)
MESSAGES = st.sampled_from(
    [
        post("/hot", b"abc", "Expect: 100-continue\r\n"),
        post("/hot", b"", "Expect: 100-continue\r\n"),
        post("/hot", b"abc", "Expect: more\r\n"),
        b"POST /hot HTTP/1.0\r\nexpect: 100-continue\r\nconnection: keep-alive\r\n\r\n",
        b"POST /hot HTTP/1.1" + HOST + b"transfer-encoding: chunked\r\n\r\n",
        b"PUT /hot HTTP/1.1" + HOST + b"Expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /hot HTTP/1.1" + HOST + b"a: b\r\n" * (MAX_LINES - 1) + b"\r\n",
        b"GET /hot HTTP/1.1" + HOST + b"a: b\r\n" * MAX_LINES + b"\r\n",
        b"3\r\nabc\r\n",
        b"64\r\n" + b"x" * 100 + b"\r\n",
        b"0\r\n\r\n",
        b"\r\n",
        b"\n",
        b"1;",
    ]
)


@given(
    st.lists(MESSAGES | EXTENSIONS | HEADS | st.binary(max_size=3), min_size=1, max_size=8).map(
        b"".join
    ),
    st.lists(st.integers(0, 9999), max_size=30),
    st.booleans(),
)
def test_no_split_into_packets_changes_what_is_read_or_answered(data, at, later):
    limits = {"max_body": 120, "max_head": 1024}
    assert hear(data, at, later, **limits) == hear(data, [], False, **limits)
