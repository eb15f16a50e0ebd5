"""The page at `/`, and what it asks for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from rollout_sched.integrations.gateway.control_plane import live as live_routes
from rollout_sched.integrations.gateway.control_plane.app import WATCH
from rollout_sched.integrations.gateway.control_plane.live import MAX_STREAMS
from tests.integrations.gateway.gateway_fixture import House, Upstream
from tests.live.scripted import until

ROOT = Path(__file__).resolve().parents[4]
STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
def house(tmp_path: Path) -> House:
    (tmp_path / "keys").write_text("secret\n")
    return House(Upstream(), admin_key="secret", admin_key_file=tmp_path / "keys", grace_s=20.0)


async def test_the_page_is_for_everybody_and_what_it_shows_is_not(house) -> None:
    house.auth = {}
    status, page = await house.ask("GET", "/")
    assert status == 200
    assert page.startswith("<!doctype html>")
    assert "http://a:1" not in page
    assert (await house.ask("GET", "/admin/live"))[0] == 401
    async with house.session.get("/") as response:
        assert "frame-ancestors 'none'" in response.headers["Content-Security-Policy"]


async def test_the_live_document_is_described_in_the_docs(house) -> None:
    status, state = await house.ask("GET", "/admin/live")
    assert (status, state["schema"]) == (200, "rollout-sched-live/1")
    [instance] = state["instances"]
    assert (instance["url"], instance["status"]) == ("http://a:1", "serving")
    assert state["requests"] == {"in_flight": 0, "waiting": 0, "parked": 0}
    assert state["policy"] == "round_robin_sync"
    assert "attempts" not in state
    told = (ROOT / "docs/report_page.md").read_text()
    for key in {*state, *state["step"], *instance} - {"schema"}:
        assert f"`{key}" in told, f"{key} is not described"


async def test_a_stream_of_documents(house) -> None:
    async with house.session.get("/admin/live", headers={**house.auth, **STREAM}) as stream:
        assert stream.content_type == "text/event-stream"
        assert await stream.content.readline() == b"event: state\n"
        line = await stream.content.readline()
        assert json.loads(line.removeprefix(b"data: "))["anew"]
    watch = house.service.app[WATCH]
    await until(lambda: watch.streams == 0)  # it is noticed that the browser has gone


async def test_streams_that_nobody_reads_do_not_stop_another(house) -> None:
    asked = {"headers": {**house.auth, **STREAM}}
    unread = [await house.session.get("/admin/live", **asked) for _ in range(MAX_STREAMS)]
    watch = house.service.app[WATCH]
    assert watch.streams == MAX_STREAMS
    async with house.session.get("/admin/live", **asked) as stream:
        assert await stream.content.readline() == b"event: state\n"
        await until(lambda: watch.streams == MAX_STREAMS)
        ended = [each.content.exception() is not None for each in unread]
        assert ended == [True] + [False] * (MAX_STREAMS - 1)
    for each in unread:
        each.close()
    await until(lambda: watch.streams == 0)


async def test_a_browser_that_takes_nothing_is_cut_off(
    house, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_routes, "TAKE_S", 0.05)
    monkeypatch.setattr(live_routes, "_event", lambda data: data + bytes(2**24))
    _, writer = await asyncio.open_connection(
        "127.0.0.1", int(house.service.url.rpartition(":")[2]), limit=1
    )
    writer.write(
        b"GET /admin/live HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        b"Accept: text/event-stream\r\n\r\n"
    )
    watch = house.service.app[WATCH]
    await until(lambda: watch.streams == 1)
    await until(lambda: watch.streams == 0)
    writer.close()


async def test_an_open_page_does_not_hold_up_the_end(house) -> None:
    stream = await house.session.get("/admin/live", headers={**house.auth, **STREAM})
    await stream.content.readline()
    began = asyncio.get_running_loop().time()
    await house.service.close()
    assert asyncio.get_running_loop().time() - began < 10.0
    stream.close()
