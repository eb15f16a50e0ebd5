"""Whatever a client sends to the control plane, it hears what is wrong: no answer is a 500."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from typing import Any

import pytest

from rollout_sched.integrations.gateway.control_plane.gateway import NewInstance
from tests.integrations.gateway.gateway_fixture import House, Upstream

A = "http://a:1"
DEEP = 100_000

JSON = ("Content-Type: application/json",)
MSGPACK = ("Content-Type: application/msgpack", "Accept: application/msgpack")

HOSTILE: dict[str, tuple[tuple[str, ...], bytes]] = {
    "nothing": (JSON, b""),
    "zeros": (JSON, b"\0" * 64),
    "no JSON": (JSON, b"{what"),
    "a list": (JSON, b"[]"),
    "a list of lists": (JSON, b"[[]]"),
    "a list of nothing": (JSON, b"[null]"),
    "a number": (JSON, b"7"),
    "null": (JSON, b"null"),
    "a text": (JSON, b'"text"'),
    "an object": (JSON, b"{}"),
    "deep lists": (JSON, b"[" * DEEP + b"]" * DEEP),
    "deep objects": (JSON, b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "deep lists that do not end": (JSON, b"[" * DEEP),
    "a deep field": (JSON, b'{"extra":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "a deep prompt": (
        JSON,
        b'[{"uid":"a","prompt_ids":[1],"samples":1,"max_tokens":1,"extra":{"x":'
        + b"[" * DEEP
        + b"]" * DEEP
        + b"}}]",
    ),
    "a deep update": (
        JSON,
        b'{"version":1,"transfer":{"update_info":{"x":' + b"[" * DEEP + b"]" * DEEP + b"}}}",
    ),
    "bad UTF-8": (JSON, b'{"url":"\xff\xfe\xfd"}'),
    "bad UTF-8 in a key": (JSON, b'{"\xff":1}'),
    "half a surrogate": (JSON, rb'{"url":"http://\ud800:1"}'),
    "NaN": (JSON, b'{"timeout_s":NaN}'),
    "an infinite number": (JSON, b'{"timeout_s":1e999,"version":1e999}'),
    "a huge version": (JSON, b'{"version":' + b"9" * 30 + b',"applied":true}'),
    "an endless number": (JSON, b'{"version":' + b"9" * 5000 + b',"applied":true}'),
    "a negative version": (JSON, b'{"version":-1,"applied":true}'),
    "huge slots": (JSON, b'{"url":"http://a:1/x","slots":' + b"9" * 30 + b"}"),
    "huge samples": (
        JSON,
        b'[{"uid":"h","prompt_ids":[1],"samples":' + b"9" * 30 + b',"max_tokens":1}]',
    ),
    "huge tokens": (
        JSON,
        b'[{"uid":"t","prompt_ids":[' + b"9" * 30 + b'],"samples":1,"max_tokens":1}]',
    ),
    "a huge acknowledgement": (JSON, b'{"ack":' + b"9" * 30 + b',"timeout_s":0}'),
    "an unknown charset": (("Content-Type: application/json; charset=nonsense",), b"{}"),
    "an empty charset": (("Content-Type: application/json; charset=",), b"{}"),
    "UTF-16": (("Content-Type: application/json; charset=utf-16",), "{}".encode("utf-16")),
    "no content type": (("Content-Type: ;;;=,",), b"{}"),
    "an unknown encoding": ((*JSON, "Content-Encoding: nonsense"), b"{}"),
    "an encoding that is not so": ((*JSON, "Content-Encoding: gzip"), b"{}"),
    "brotli": ((*JSON, "Content-Encoding: br"), b"{}"),
    "zstd": ((*JSON, "Content-Encoding: zstd"), b"{}"),
    "a bomb in gzip": ((*JSON, "Content-Encoding: gzip"), gzip.compress(b" " * 2**24)),
    "a form": (("Content-Type: multipart/form-data",), b"--x\r\n\r\n"),
    "msgpack of nothing": (MSGPACK, b""),
    "msgpack: deep lists": (MSGPACK, b"\x91" * DEEP),
    "msgpack: deep maps": (MSGPACK, b"\x81\xa1a" * DEEP),
    "msgpack: a deep field": (MSGPACK, b"\x81\xa5extra" + b"\x91" * DEEP),
    "msgpack: a list of four thousand million": (MSGPACK, b"\xdd\xff\xff\xff\xff"),
    "msgpack: a map of as many": (MSGPACK, b"\xdf\xff\xff\xff\xff"),
    "msgpack: a text of as many": (MSGPACK, b"\xdb\xff\xff\xff\xff"),
    "msgpack: NaN": (MSGPACK, b"\x81\xa9timeout_s\xcb\x7f\xf8\0\0\0\0\0\0"),
    "msgpack: a key that is no text": (MSGPACK, b"\x81\x91\x01\x01"),
    "msgpack: bad UTF-8": (MSGPACK, b"\x81\xa3url\xa2\xff\xfe"),
    "msgpack: an extension": (MSGPACK, b"\xc7\x01\x05\x01"),
    "msgpack that is JSON": (MSGPACK, b'{"a": 1}'),
}


async def ask_raw(house: House, sent: bytes) -> tuple[int, bytes]:
    """(status, body) of the answer to these bytes, on a connection of their own."""
    host, _, port = house.service.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            whole = length is not None and not sent.startswith(b"HEAD")
            body = await (reader.readexactly(int(length[1])) if whole else reader.read())
    finally:
        writer.close()
    return int(head.split()[1]), body


def request(method: str, target: str, headers: tuple[str, ...] = (), body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def routes(house: House) -> list[tuple[str, str]]:
    """(method, path) of everything that can be asked for, with an instance where one is named."""
    found = set()
    for route in house.service.app.router.routes():
        assert route.resource is not None
        path = re.sub(r"\{id[^}]*\}", "http%3A%2F%2Fa%3A1", route.resource.canonical)
        path = re.sub(r"\{path[^}]*\}", "v1/score", path)
        methods = ("GET", "POST", "DELETE") if route.method == "*" else (route.method,)
        found.update((method, path) for method in methods)
    return sorted(found)


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_body_on_every_route(name: str, caplog: pytest.LogCaptureFixture) -> None:
    headers, body = HOSTILE[name]
    async with House(Upstream(A)) as house:
        house.service.gateway.trainer.close_submissions()  # else who asks for a batch waits
        for method, path in routes(house):
            if A not in house.driver.supervisors:  # a route has removed it
                await house.service.gateway.add(NewInstance(A))
            status, said = await ask_raw(house, request(method, path, headers, body))
            assert status != 500, (method, path, said)
            if 400 <= status < 500 and method != "HEAD":
                assert refused(said), (method, path)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


TARGETS = {
    "a file": "file:///etc/passwd",
    "another scheme": "ftp://x/v1/models",
    "another host": "http://evil.example/health",
    "an authority": "evil.example:80",
    "a star": "*",
    "no slash": "health",
    "a scheme and nothing": "http:",
    "a port that is none": "http://localhost:99999999/health",
    "half an IPv6 address": "http://[::1/health",
    "no host": "http:///health",
    "a user": "http://me:secret@localhost/health",
    "two slashes": "//health",
    "three slashes": "///admin/state",
    "a per cent that is none": "/admin/instances/%zz",
    "bad UTF-8": "/admin/instances/%ff%fe",
    "zero": "/admin/instances/%00",
    "a line end": "/admin/instances/http%3A%2F%2Fa%3A1%0D%0AX-Evil%3A%201",
    "a query of that": "/add_worker?url=http%3A%2F%2Fa%3A2%0AX-Evil%3A1",
    "a fragment": "/admin/state#there",
    "a long path": "/v1/" + "x" * 8000,
    "a selector that is none": "/v1/rl/engine/is_paused?selector=%ff",
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "HEAD", "OPTIONS", "CONNECT", "PUT"])
async def test_a_hostile_target(method: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    async with House(Upstream(A)) as house:
        status, said = await ask_raw(house, request(method, TARGETS[name]))
        assert status != 500, said
        assert b"\nX-Evil" not in said
        assert (await house.ask("GET", "/health"))[0] == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def refused(body: Any) -> str:
    return str(json.loads(body)["error"]["message"])


@pytest.mark.parametrize(
    ("path", "name", "says"),
    [
        ("/rollout/v1/groups", "a deep prompt", "nested too deeply"),
        ("/admin/weights", "a deep update", "nested too deeply"),
        ("/admin/pause", "an unknown encoding", "without Content-Encoding"),
        ("/admin/pause", "a bomb in gzip", "without Content-Encoding"),
        ("/admin/pause", "UTF-16", "byte 0"),
        ("/admin/instances", "bad UTF-8", "UTF-8"),
        ("/admin/pause", "a list", "Expected `object`, got `array`"),
        ("/admin/weights", "a huge version", "$.version"),
        ("/admin/instances", "huge slots", "$.slots"),
        ("/rollout/v1/groups", "an object", "Expected `array`"),
        ("/rollout/v1/batches/next", "msgpack: NaN", "$.timeout_s"),
    ],
)
async def test_a_refusal_names_the_fault(path: str, name: str, says: str, house) -> None:
    headers, body = HOSTILE[name]
    headers = tuple(line for line in headers if not line.startswith("Accept"))
    status, said = await ask_raw(house, request("POST", path, headers, body))
    assert status in (400, 415)
    assert says in refused(said)


FRAMES = {
    "a chunk that is none": ("Transfer-Encoding: chunked", b"what?\r\n"),
    "a chunk longer than it says": ("Transfer-Encoding: chunked", b"2\r\n{}{}\r\n0\r\n\r\n"),
    "a chunk of everything": ("Transfer-Encoding: chunked", b"ffffffffffffffffff\r\n{}"),
    "a negative chunk": ("Transfer-Encoding: chunked", b"-1\r\n{}\r\n0\r\n\r\n"),
    "an unknown coding": ("Transfer-Encoding: nonsense", b"{}"),
    "two lengths": ("Content-Length: 2\r\nContent-Length: 3", b"{}"),
    "a length and chunks": ("Content-Length: 2\r\nTransfer-Encoding: chunked", b"0\r\n\r\n"),
    "a negative length": ("Content-Length: -2", b"{}"),
    "a length that is none": ("Content-Length: two", b"{}"),
    "a huge length": ("Content-Length: " + "9" * 40, b"{}"),
    "an unknown expectation": ("Expect: wonders\r\nContent-Length: 2", b"{}"),
    "a header without a name": (": x\r\nContent-Length: 2", b"{}"),
    "a folded header": ("A: b\r\n c\r\nContent-Length: 2", b"{}"),
    "NUL in a header": ("A: b\0c\r\nContent-Length: 2", b"{}"),
    "a header of Latin letters": ("A: \xe9\r\nContent-Length: 2", b"{}"),
    "a websocket": (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nContent-Length: 0",
        b"",
    ),
}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("path", ["/admin/pause", "/pause", "/v1/embeddings", "/health"])
async def test_a_hostile_frame(path: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    header, body = FRAMES[name]
    async with House(Upstream(A)) as house:
        sent = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode("latin-1")
        try:
            status, said = await ask_raw(house, sent + body)
        except asyncio.IncompleteReadError:
            return  # what cannot be read is also refused by hanging up
        assert status != 500, said
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
