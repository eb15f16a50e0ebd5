"""Attacks of hostile clients, and the allowed answer to each: once, within its time limit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from benchmarks.soak.innocents import CHAT, COMPLETIONS, GENERATE, MODEL
from benchmarks.soak.wire import Line, head, post

#: Seconds over which a slow client sends its request, or does not read.
SLOW_S = 3.0

#: The simulated instance, like a server with a bug, always answers this with 500.
DEADLY = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4, "extra_args": 7}}


class Attack(NamedTuple):
    """`make(key)` is (what is sent, how); `statuses` are the allowed answers; if empty, no answer
    is awaited."""

    make: Callable[[str, random.Random], tuple[bytes, str]]
    statuses: tuple[int, ...]


def _asked(body: object, path: str = COMPLETIONS, *more: str) -> Callable[..., tuple[bytes, str]]:
    return lambda key, rng: (post(path, body, f"authorization: Bearer {key}", *more), "at once")


def _poison(key: str, rng: random.Random) -> tuple[bytes, str]:
    body = rng.choice(
        (
            b'{"prompt":"\xff\xfe","max_tokens":4}',
            b'{"prompt":"a","max_tokens":4',
            b'{"prompt":[[1e999],[2]],"max_tokens":4}',
            b'{"prompt":"a","max_tokens":-1}',
            b'{"prompt":"a","session_id":"\xff"}',
            b"\x00" * 100,
            b"",
        )
    )
    return post(COMPLETIONS, body, f"authorization: Bearer {key}"), "at once"


def _huge_head(key: str, rng: random.Random) -> tuple[bytes, str]:
    lines = ["x: y"] * 8000 if rng.random() < 0.5 else ["x: " + "y" * 60_000]
    return post(COMPLETIONS, {"prompt": "a"}, f"authorization: Bearer {key}", *lines), "at once"


def _slow_body(key: str, rng: random.Random) -> tuple[bytes, str]:
    return head(COMPLETIONS, 1000, f"authorization: Bearer {key}") + b'{"prompt":"aaaa', "drips"


def _slow_head(key: str, rng: random.Random) -> tuple[bytes, str]:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4}
    return post(COMPLETIONS, body, f"authorization: Bearer {key}"), "byte by byte"


def _stream(key: str, rng: random.Random) -> bytes:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    return post(COMPLETIONS, body, f"authorization: Bearer {key}")


def _names(key: str, rng: random.Random) -> tuple[bytes, str]:
    body: dict[str, object] = {"model": MODEL, "prompt": "a", "max_tokens": 4}
    fields = [f"authorization: Bearer {key}"]
    long = "n" * rng.choice((300, 4_000, 20_000))
    where = rng.choice(("x-session-id", "x-group-id", "x-request-id", "session_id", "group_id"))
    if where.startswith("x-"):
        fields.append(f"{where}: {long}")
    else:
        body[where] = long
    return post(COMPLETIONS, body, *fields), "at once"


_DEEP = b'{"prompt":"a","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"

_HUGE_NUMBER = b'{"prompt":"a","max_tokens":4,"cache_salt":"s","x":1e999}'

ATTACKS = {
    "poison": Attack(_poison, (400, 422)),
    # It is valid JSON and passed on unchanged: the server decides whether it is too large.
    "huge number": Attack(_asked(_HUGE_NUMBER), (200, 400, 422)),
    "n bomb": Attack(_asked({"prompt": "a", "n": 2_000_000}), (400, 413, 422, 503)),
    "deep": Attack(_asked(_DEEP), (400, 422)),
    "huge head": Attack(_huge_head, (431,)),
    "slow body": Attack(_slow_body, ()),
    "byte by byte": Attack(_slow_head, (200,)),
    "does not read": Attack(lambda key, rng: (_stream(key, rng), "does not read"), ()),
    "cancelled": Attack(lambda key, rng: (_stream(key, rng), "goes"), ()),
    "bad key": Attack(
        lambda key, rng: (
            post(COMPLETIONS, {"prompt": "a"}, f"authorization: Bearer {'x' * rng.randrange(99)}"),
            "at once",
        ),
        (401,),
    ),
    "long name": Attack(_names, (200, 400, 422, 431)),
    "deadly": Attack(_asked(DEADLY, GENERATE), (400, 422, 500, 502, 503)),
    "chat without": Attack(_asked({"messages": 7}, CHAT), (400, 422)),
}


async def attack(kind: str, key: str, port: int, rng: random.Random) -> int:
    """The status of the answer, 0 if it did not wait for one. Raises wire.WireError."""
    data, how = ATTACKS[kind].make(key, rng)
    line = await Line.open(port, small_buffer=how == "does not read")
    try:
        await _BEHAVIOURS[how](line, data)
        if not ATTACKS[kind].statuses:
            return 0
        return (await line.answer()).status
    finally:
        line.drop()


async def _drips(line: Line, data: bytes) -> None:
    await line.send(data)
    for _ in range(10):
        await asyncio.sleep(SLOW_S / 10)
        await line.send(b"a")


async def _byte_by_byte(line: Line, data: bytes) -> None:
    for start in range(len(data)):
        await line.send(data[start : start + 1])
        await asyncio.sleep(SLOW_S / len(data))


async def _does_not_read(line: Line, data: bytes) -> None:
    await line.send(data)
    await asyncio.sleep(SLOW_S)


async def _goes(line: Line, data: bytes) -> None:
    await line.send(data)
    await line.answer(enough=lambda chunk: True)


_BEHAVIOURS: dict[str, Callable[[Line, bytes], Awaitable[None]]] = {
    "at once": Line.send,
    "drips": _drips,
    "byte by byte": _byte_by_byte,
    "does not read": _does_not_read,
    "goes": _goes,
}
