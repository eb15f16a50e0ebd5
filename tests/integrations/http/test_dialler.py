"""Connections that come about or not."""

from __future__ import annotations

import asyncio

from rollout_sched.integrations.http import Exchange, NotConnected, Pool
from rollout_sched.integrations.http.client import MAX_BODY, Dialler, Origin
from tests.integrations.http.wires import Heard, answering, ok, on_both_loops, scripted, until


def asked(heard: Heard) -> Exchange:
    return Exchange(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"", False, heard, MAX_BODY)


@on_both_loops
async def test_the_exchange_it_was_made_for_is_the_first():
    async with scripted(answering(ok(b"abc"))) as url:
        pool, heard, done = Pool(url), Heard(), []
        dialler = Dialler(pool, Origin(url, None), 5.0, lambda: done.append(len(dialler)))
        dialler.dial(asked(heard))
        assert len(dialler) == 1
        await heard.over.wait()
        await until(lambda: bool(done))
        assert heard.body == b"abc"
        assert done == [0]
        pool.close()


@on_both_loops
async def test_an_unreachable_peer_is_named_by_its_url():
    pool, heard, done = Pool("http://127.0.0.1:1"), Heard(), []
    dialler = Dialler(pool, Origin(pool.url, None), 5.0, lambda: done.append(True))
    dialler.dial(asked(heard))
    await heard.over.wait()
    assert isinstance(heard.error, NotConnected)
    assert "http://127.0.0.1:1: no connection" in str(heard.error)
    await until(lambda: bool(done))


@on_both_loops
async def test_an_exchange_that_is_given_up_ends_once():
    pool, heard, cancelled = Pool("http://127.0.0.1:1"), Heard(), Heard()
    dialler = Dialler(pool, Origin(pool.url, None), 5.0, lambda: None)
    dialler.dial(asked(heard))
    gone = asked(cancelled)
    dialler.dial(gone)
    gone.cancel()
    dialler.close("the pool was closed")
    assert "the pool was closed" in str(heard.error)
    await until(lambda: not len(dialler))
    await asyncio.sleep(0)
    assert (heard.calls, cancelled.calls) == (["error"], [])
