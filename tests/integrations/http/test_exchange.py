"""Whoever cancels, pauses or raises: what its exchange and the others hear."""

from __future__ import annotations

import asyncio

import pytest

from rollout_sched.integrations.http import Pool
from rollout_sched.integrations.http.errors import AnswerBroken
from tests.integrations.http.test_bodies import cut
from tests.integrations.http.wires import (
    CHUNKED,
    Heard,
    answering,
    ok,
    on_both_loops,
    pooled,
    read_message,
    repeating,
    scripted,
    until,
)

pytestmark = pytest.mark.real_time


@on_both_loops
async def test_cancelling_closes_the_connection_and_silences_it():
    gone = asyncio.Event()

    async def peer(reader, writer):
        await read_message(reader)
        writer.write(CHUNKED + b"1\r\na\r\n")
        await reader.read()
        gone.set()

    async with pooled(peer) as pool:
        heard = Heard()
        exchange = pool.send("POST", "/", (), b"", heard)
        await until(lambda: bool(heard.body))
        exchange.cancel()
        exchange.cancel()
        await gone.wait()
        assert heard.calls == ["head", "data"]
        assert exchange.done


@pytest.mark.parametrize("when", ["head", "data", "end"])
async def test_cancelling_from_a_callback(when, caplog):
    class Canceller(Heard):
        def on_head(self, status, headers):
            super().on_head(status, headers)
            self.see("head")

        def on_data(self, data):
            super().on_data(data)
            self.see("data")

        def on_end(self):
            super().on_end()
            self.see("end")

        def see(self, what):
            if what == when:
                exchange.cancel()
                self.over.set()

    heard = Canceller()
    async with pooled(answering(ok(b"abc"))) as pool:
        exchange = pool.send("GET", "/", (), b"", heard)
        await heard.over.wait()
        await asyncio.sleep(0.01)
        assert heard.calls == ["head", "data", "end"][: ["head", "data", "end"].index(when) + 1]
        assert not caplog.records, "compiled, it raised after `on_data` had cancelled"


@pytest.mark.parametrize(
    ("first", "reusable", "second", "opened"),
    [
        (False, True, False, 1),
        (False, False, False, 2),
        (True, True, False, 1),
        (False, True, True, 2),
    ],
)
@on_both_loops
async def test_on_end_decides_whether_the_connection_carries_others(
    first, reusable, second, opened
):
    """`first`, `second`: sent with `alone`."""
    connections: list[int] = []

    class Decides(Heard):
        def on_end(self):
            exchange.reusable = reusable
            super().on_end()

    async def peer(reader, writer):
        connections.append(1)
        while True:
            await read_message(reader)
            writer.write(ok())

    async with pooled(peer) as pool:
        exchange = pool.send("GET", "/1", (), b"", heard := Decides(), alone=first)
        await heard.over.wait()
        later = pool.send("GET", "/2", (), b"", heard := Heard(), alone=second)
        await heard.over.wait()
        assert (len(connections), exchange.alone, later.alone) == (opened, True, opened == 2)


@on_both_loops
async def test_a_paused_exchange_makes_the_server_wait():
    sent = 0

    async def peer(reader, writer):
        nonlocal sent
        await read_message(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(512):
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with pooled(peer) as pool:
        heard = Heard()
        exchange = pool.send("GET", "/", (), b"", heard)
        exchange.pause()
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.05)
        assert not heard.body
        assert sent < 512 * 65536
        exchange.resume()
        await heard.over.wait()
        assert len(heard.body) == 512 * 65536


class Raising(Heard):
    """A receiver that raises in one of its callbacks, after hearing it."""

    def __init__(self, where, error):
        super().__init__()
        self.where, self.raised = where, error

    def trip(self, where):
        if where == self.where:
            raise self.raised

    def on_head(self, status, headers):
        super().on_head(status, headers)
        self.trip("head")

    def on_data(self, data):
        super().on_data(data)
        self.trip("data")

    def on_end(self):
        self.calls.append("end")
        self.trip("end")

    def on_error(self, error):
        super().on_error(error)
        self.trip("error")


ENDINGS = {
    "length": ok(b"abc"),
    "chunked": CHUNKED + b"3\r\nabc\r\n0\r\n\r\n",
    "close": b"HTTP/1.1 200 OK\r\n\r\nabc",
}


@pytest.mark.parametrize("in_packets", [False, True])
@pytest.mark.parametrize("framing", ENDINGS)
@pytest.mark.parametrize("where", ["head", "data", "end"])
@pytest.mark.parametrize("raise_", [KeyError, asyncio.CancelledError, AnswerBroken])
@on_both_loops
async def test_a_receiver_that_raises_ends_its_exchange_with_one_error(
    in_packets, framing, where, raise_
):
    raised = raise_("from a test")
    closed = asyncio.Event()

    async def peer(reader, writer):
        await read_message(reader)
        for packet in cut(ENDINGS[framing], [40, 50, 62] if in_packets else []):
            writer.write(packet)
            await asyncio.sleep(0.002)
        if framing == "close":
            writer.write_eof()
        await reader.read()
        closed.set()

    trouble = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: trouble.append(what))
    async with asyncio.timeout(20), scripted(peer) as url:
        pool = Pool(url)
        heard = Raising(where, raised)
        exchange = pool.send("GET", "/", (), b"", heard)
        await heard.over.wait()
        await closed.wait()
        assert heard.calls.count("error") == 1
        assert heard.calls[-2:] == [where, "error"]
        assert heard.error is raised or heard.error.__cause__ is raised
        assert isinstance(heard.error, AnswerBroken)
        assert exchange.done
        await until(lambda: not pool._connections)
        assert [len(pool._idle._idle), len(pool._dialling)] == [0, 0]
        again = Heard()
        pool.send("GET", "/", (), b"", again)
        await again.over.wait()
        assert (again.body, again.calls[-1]) == (b"abc", "end")
        pool.close()
    assert not trouble


@on_both_loops
async def test_a_receiver_that_cannot_bear_its_error_keeps_nobody_from_theirs():
    trouble = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: trouble.append(what))

    async def peer(reader, writer):
        await read_message(reader)
        await reader.read()

    async with scripted(peer) as url:
        nobody = "http://127.0.0.1:1"
        for to in (nobody, url):
            pool = Pool(to)
            heard = [Raising("error", RuntimeError("from a test")) for _ in range(5)]
            exchanges = [pool.send("GET", "/", (), b"", each) for each in heard]
            if to == url:
                await until(lambda pool=pool: len(pool._connections) == 5)
                pool.close()
            for each in heard:
                await each.over.wait()
            assert [each.calls for each in heard] == [["error"]] * 5
            assert all(exchange.done for exchange in exchanges)
            await until(lambda pool=pool: not (pool._connections or pool._dialling))
            pool.close()
    assert not trouble


@on_both_loops
async def test_an_end_that_raises_leaves_the_next_request_of_its_connection_alone():
    second = Heard()

    class Chained(Raising):
        def on_end(self):
            pool.send("GET", "/2", (), b"", second)
            super().on_end()

    async with pooled(repeating(ok())) as pool:
        first = Chained("end", RuntimeError("from a test"))
        pool.send("GET", "/1", (), b"", first)
        await second.over.wait()
        assert (first.calls, second.calls) == (
            ["head", "data", "end", "error"],
            ["head", "data", "end"],
        )


@on_both_loops
async def test_a_receiver_that_cancels_and_then_raises_hears_nothing_more():
    class Cancelling(Raising):
        def on_data(self, data):
            exchange.cancel()
            self.over.set()
            super().on_data(data)

    async with pooled(answering(ok(b"abc"))) as pool:
        heard = Cancelling("data", RuntimeError("from a test"))
        exchange = pool.send("GET", "/", (), b"", heard)
        await heard.over.wait()
        await until(lambda: not pool._connections)
        assert heard.calls == ["head", "data"]
