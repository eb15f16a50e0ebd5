"""Scripted peers over real loopback sockets, a transport without a kernel, and recorders."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from rollout_sched.integrations.http import Pool, ReceivedRequest, ServerLimits
from rollout_sched.integrations.http.server import HttpServer

PEM = Path(__file__).with_name("loopback.pem")
WAIT_S = 60.0

#: How an answer of chunks begins.
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def on_both_loops(test):
    """Run a coroutine test on asyncio's own loop and on uvloop, never for long."""

    @pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
    def run(loop, **arguments):
        async def bounded():
            async with asyncio.timeout(WAIT_S):
                await test(**arguments)

        factory = uvloop.new_event_loop if loop == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    own = inspect.signature(test)
    loop = inspect.Parameter("loop", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = own.replace(parameters=[*own.parameters.values(), loop])
    return run


@contextlib.asynccontextmanager
async def scripted(peer: Peer, **options) -> AsyncIterator[str]:
    """The URL of a server whose every connection is `peer(reader, writer)`."""

    async def guarded(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await peer(reader, writer)
        writer.close()

    host = options.pop("host", "127.0.0.1")
    server = await asyncio.start_server(guarded, host, 0, **options)
    port = server.sockets[0].getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    try:
        yield f"{'https' if options.get('ssl') else 'http'}://{name}:{port}"
    finally:
        server.close()


@contextlib.asynccontextmanager
async def pooled(peer: Peer, **options) -> AsyncIterator[Pool]:
    """A pool before a server whose every connection is `peer(reader, writer)`."""
    async with scripted(peer) as url:
        pool = Pool(url, **options)
        try:
            yield pool
        finally:
            pool.close()


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """One request with its Content-Length body."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = head.lower().partition(b"content-length: ")[2]
    length = int(fields.partition(b"\r\n")[0]) if fields else 0
    return head + await reader.readexactly(length)


def answering(answer: bytes, opened: list[int] | None = None):
    """A peer that gives one answer and waits for the client to go."""

    async def peer(reader, writer):
        if opened is not None:
            opened.append(1)
        await read_message(reader)
        writer.write(answer)
        await reader.read()

    return peer


def repeating(answer: bytes):
    """A peer that gives the same answer to every request."""

    async def peer(reader, writer):
        while True:
            await read_message(reader)
            writer.write(answer)

    return peer


def ok(body: bytes = b"ok", fields: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (fields, len(body), body)


def post(target: str, body: bytes = b"", fields: str = "") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\n{fields}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def server_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


def client_tls() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(PEM))


class Heard:
    """A receiver that keeps what it hears."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.error: Exception | None = None
        self.over = asyncio.Event()

    def on_head(self, status, headers):
        self.calls.append("head")
        self.status, self.headers = status, headers

    def on_data(self, data):
        self.calls.append("data")
        self.body += data

    def on_end(self):
        self.calls.append("end")
        self.over.set()

    def on_error(self, error):
        self.calls.append("error")
        self.error = error
        self.over.set()


class Echo:
    """An app: wants /hot..., keeps every request, answers as `react` says."""

    def __init__(self, react: Callable[[ReceivedRequest], None] | None = None) -> None:
        self.requests: list[ReceivedRequest] = []
        self.came = asyncio.Condition()
        self.react = react or (lambda request: request.answer(200, (), request.body))

    def wants(self, method, target):
        return target.startswith(b"/hot")

    def refusal(self, method, target, fields):
        return None

    def handle(self, request):
        self.requests.append(request)
        self.react(request)


@contextlib.asynccontextmanager
async def serving(app, fallback=None, ssl=None, **limits) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server of ours and its port."""
    server = HttpServer(app, fallback, ServerLimits(**limits))
    listener = await server.listen("127.0.0.1", 0, ssl=ssl)
    try:
        yield server, listener.sockets[0].getsockname()[1]
    finally:
        await server.close(0.0)


@contextlib.asynccontextmanager
async def dialled(port: int):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that shows only in state."""
    while not condition():
        await asyncio.sleep(0.001)


class Wire(asyncio.Transport):
    """A transport without a kernel: what is written is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closing = False
        self.reading = True
        self.protocol: asyncio.BaseProtocol | None = None
        self._socket = socket.socket()

    def write(self, data):
        self.written += data

    def writelines(self, data):
        for part in data:
            self.written += part

    def get_extra_info(self, name, default=None):
        return self._socket if name == "socket" else default

    def is_closing(self):
        return self.closing

    def get_write_buffer_size(self):
        return 0

    def can_write_eof(self):
        return False

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def set_protocol(self, protocol):
        self.protocol = protocol

    def close(self):
        self.closing = True

    def abort(self):
        self.closing = True
        self._socket.close()


class Quiet(asyncio.Protocol):
    """A fallback that only takes, or does not even do that."""

    made: list[Quiet]

    def __init__(self, *, reading=True):
        self.reading = reading
        self.got = b""
        self.lost = asyncio.Event()

    def connection_made(self, transport):
        self.transport = transport
        if not self.reading:
            transport.pause_reading()

    def data_received(self, data):
        self.got += data

    def connection_lost(self, exc):
        self.lost.set()


def quiet(made, **how):
    def make():
        made.append(Quiet(**how))
        return made[-1]

    return make
