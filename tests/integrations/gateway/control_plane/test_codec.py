"""Bodies of control calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from rollout_sched.client.remote import MSGPACK
from rollout_sched.integrations.gateway.control_plane.codec import refusal, reply

UPDATE = {"version": 1, "applied": True}


def asking(**headers: str) -> web.Request:
    return make_mocked_request("GET", "/", headers)


@pytest.mark.parametrize(
    ("accept", "kind", "decode"),
    [
        ("*/*", "application/json", msgspec.json.decode),
        (MSGPACK, MSGPACK, msgspec.msgpack.decode),
        (f"{MSGPACK};q=1, application/json", MSGPACK, msgspec.msgpack.decode),
    ],
)
def test_an_answer_comes_in_the_format_that_is_accepted(
    accept: str, kind: str, decode: Any
) -> None:
    response = reply(asking(Accept=accept), {"a": [1, None]}, 201)
    assert (response.status, response.content_type) == (201, kind)
    assert decode(response.body) == {"a": [1, None]}


@pytest.mark.parametrize(
    ("status", "name", "value"),
    [(401, "WWW-Authenticate", "Bearer"), (503, "Retry-After", "1"), (404, "Retry-After", None)],
)
def test_a_refusal_is_an_error_of_openais_with_what_goes_with_its_status(
    status: int, name: str, value: str | None
) -> None:
    response = refusal(status, "no")
    assert isinstance(response.body, bytes)
    assert msgspec.json.decode(response.body)["error"]["message"] == "no"
    assert (response.status, response.headers.get(name)) == (status, value)


@pytest.mark.parametrize(
    ("body", "headers", "status", "says"),
    [
        (msgspec.json.encode(UPDATE), {}, 202, ""),
        (msgspec.msgpack.encode(UPDATE), {"Content-Type": MSGPACK}, 202, ""),
        (b"", {}, 400, "version"),
        (b"{", {}, 400, "body: "),
        (b'{"version":"x","applied":true}', {}, 400, "$.version"),
        (b'{"version":1,"applied":true,"other":1}', {}, 400, "other"),
        (b'{"version":1,"reload":{"path":"\xff"}}', {}, 400, "not UTF-8"),
        (b"[" * 100_000, {}, 400, "body: "),
        (msgspec.json.encode(UPDATE), {"Content-Encoding": "br"}, 415, "as it is"),
        (msgspec.json.encode(UPDATE), {"Content-Encoding": "identity"}, 202, ""),
    ],
)
async def test_a_malformed_body_is_refused_with_its_fault(
    body: bytes, headers: dict[str, str], status: int, says: str, house
) -> None:
    url = "/rollout/v1/weights"
    async with house.session.post(
        url, data=body, headers={"Content-Type": "application/json", **headers}
    ) as response:
        assert (response.status, says in await response.text()) == (status, True)
