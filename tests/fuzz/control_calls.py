"""Calls of trainers and administrators, as JSON and msgpack: answered or refused, never a 500.

An input is two bytes, which select the call and the format, and the body.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import msgspec
from aiohttp import StreamReader, web, web_app
from aiohttp.base_protocol import BaseProtocol
from aiohttp.test_utils import make_mocked_request

from rollout_sched.client.remote import MSGPACK
from rollout_sched.config import parse_policy
from rollout_sched.integrations.gateway.control_plane.app import make_app
from rollout_sched.integrations.gateway.control_plane.auth import AccessControl
from rollout_sched.integrations.gateway.control_plane.gateway import Gateway, NewInstance
from rollout_sched.integrations.gateway.data_plane.data_plane import DataPlane
from rollout_sched.live.live_scheduler import LiveScheduler
from rollout_sched.live.ports import InstanceGone
from rollout_sched.live.settings import Settings
from tests import virtual_loop
from tests.fuzz import json_words
from tests.fuzz.fixtures import Instance, good_answer
from tests.fuzz.laws import hold

CALLS = (
    "/rollout/v1/groups",
    "/rollout/v1/groups/unknown",
    "/rollout/v1/batches/next",
    "/rollout/v1/weights",
    "/rollout/v1/mismatch",
    "/admin/instances",
    "/admin/pause",
    "/admin/resume",
    "/workers",
    "/collective_rpc",
    "/finish_session",
)
FORMATS = (b"j", b"m")
FIRST = ord("a")

#: Most bytes of a body, and most samples in the gateway.
MAX_BYTES = 2**20
MAX_SAMPLES = 10_000

PROMPT = {"uid": "p", "prompt_ids": [1, 2], "samples": 2, "max_tokens": 9}
BODIES: tuple[tuple[str, Any], ...] = (
    (CALLS[0], [PROMPT]),
    (CALLS[0], [PROMPT, PROMPT]),
    (
        CALLS[0],
        [{**PROMPT, "sampling": {"seed": 1}, "each": [{"seed": 2}, {}], "extra": {"a": []}}],
    ),
    (CALLS[0], [{**PROMPT, "prompt_key": "k", "history": [3, 4], "expected_tokens": 5}]),
    (CALLS[0], [{**PROMPT, "samples": 65_536}]),
    (CALLS[0], [{**PROMPT, "max_tokens": 2**31 - 1}]),
    (CALLS[0], []),
    (CALLS[1], ["p", "q"]),
    (CALLS[2], {"timeout_s": 1.0}),
    (CALLS[2], {"ack": 0, "part": 0, "parts": True, "timeout_s": 0}),
    (CALLS[2], {"ack": 2**63, "timeout_s": 600}),
    (CALLS[3], {"version": 1, "applied": True}),
    (CALLS[3], {"version": 1, "reload": {"path": "/nowhere/{version}"}, "wait": True}),
    (
        CALLS[3],
        {"version": 2**53, "transfer": {"update_info": [{}], "init_info": {"rank_offset": 1}}},
    ),
    (CALLS[4], {"url": "http://c:1", "slots": 4, "kv_tokens": 100, "api_key": "k"}),
    (CALLS[4], {"url": "http://a:1"}),
    (CALLS[5], {"mode": "abort", "clear_cache": True, "instances": ["http://a:1"]}),
    (CALLS[6], {"instances": ["\udcff"]}),
    (CALLS[7], {"url": "http://[::1]:1"}),
    (CALLS[8], {"method": "reload_weights", "kwargs": {"weights_path": "/x"}}),
    (CALLS[9], {}),
)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _msgpack(value: Any) -> bytes:
    """The value as msgpack; empty if msgpack cannot encode it."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return b""


class ControlCalls:
    name = "control-calls"
    words = (
        *json_words.WORDS,
        *(
            msgspec.msgpack.encode(word)
            for word in (None, True, -1, 2**64 - 1, 1.5, "uid", b"x", {})
        ),
        *(
            b"\x9f",
            b"\xdc\xff\xff",
            b"\xdf\xff\xff\xff\xff",
            b"\x91" * 100,
            b"\xc1",
            b"\xd6\xff\0\0\0\0",
        ),
        *(b"\xc7\xff\x01", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xd9\xff", b"\xa3uid", b"\xa7samples"),
    )
    corpus = tuple(
        b"%c%b%b" % (FIRST + CALLS.index(path), kind, body)
        for path, value in BODIES
        for kind, body in ((b"j", _json(value)), (b"m", _msgpack(value)))
        if body
    )

    def make(self, rng: random.Random) -> bytes:
        path, value = rng.choice(BODIES)
        value = _changed(value, rng)
        kind = rng.choice(FORMATS)
        body = _msgpack(value) if kind == b"m" else _json(value)
        return b"%c%b%b" % (FIRST + CALLS.index(path), kind, body)

    def check(self, data: bytes) -> None:
        asked = _asked(data)
        if asked is not None:
            virtual_loop.run(_call(*asked))

    def spend(self, data: bytes) -> None:
        self.check(data)


def _asked(data: bytes) -> tuple[str, str, bytes] | None:
    number = data[0] - FIRST if data else -1
    if not 0 <= number < len(CALLS) or data[1:2] not in FORMATS:
        return None
    kind = MSGPACK if data[1:2] == b"m" else "application/json"
    return CALLS[number], kind, data[2:]


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with changes in one or two places."""
    if rng.random() < 0.25:
        return rng.choice((None, True, -1, 0, 1, 2**31, 2**64, 1e308, "", "x", "x" * 300, [], {}))
    if isinstance(value, dict):
        changed = {
            key: _changed(each, rng) if rng.random() < 0.4 else each for key, each in value.items()
        }
        if rng.random() < 0.1:
            changed[rng.choice(("uid", "unheard_of", ""))] = 1
        return changed
    if isinstance(value, list):
        times = rng.choice((1, 1, 1, 0, 2, 20))
        return [_changed(each, rng) if rng.random() < 0.4 else each for each in value] * times
    return value


class _Transport:
    """The transport of a program on this machine."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return False


async def _call(path: str, kind: str, body: bytes) -> None:
    live = LiveScheduler(
        parse_policy("fuzzed", {"batching": {"use": "sync"}}), settings=Settings(poll_s=1e6)
    )
    gateway = Gateway(live, DataPlane(live.driver, resumable=False), _nobody)
    app = make_app(gateway, AccessControl(), max_body=MAX_BYTES, max_samples=MAX_SAMPLES)
    app.freeze()
    try:
        for name in ("http://a:1", "http://b:1"):
            await live.driver.add_instance(Instance(name, good_answer, []))
        async with asyncio.timeout(1000):
            response = await _answered(app, path, kind, body)
        hold("never a 500", response.status != 500, getattr(response, "body", b""))
        hold(
            "a refusal has a message",
            response.status < 400 or b"message" in response.body,
            response,
        )
        hold("the scheduler is not broken", live.driver.broken is None, live.driver.broken)
        live.driver.pump.scheduler.check_invariants()
    finally:
        await live.close()
        web_app._cached_build_middleware.cache_clear()  # aiohttp's cache keeps 1,024 applications


async def _answered(app: web.Application, path: str, kind: str, body: bytes) -> Any:
    loop = asyncio.get_running_loop()
    payload = StreamReader(BaseProtocol(loop), 2 * MAX_BYTES, loop=loop)
    payload.feed_data(body)
    payload.feed_eof()
    headers = {"Content-Type": kind, "Content-Length": f"{len(body)}", "Host": "localhost"}
    request = make_mocked_request(
        "POST",
        path,
        headers=headers,
        payload=payload,
        transport=_Transport(),
        app=app,
        loop=loop,
        client_max_size=MAX_BYTES,
    )
    return await app._handle(request)


def _nobody(new: NewInstance) -> Any:
    raise InstanceGone(f"{new.url}: connection refused")
