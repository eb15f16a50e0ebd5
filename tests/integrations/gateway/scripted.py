"""A client and an instance that say what a test tells them to, byte by byte, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from rollout_sched.integrations.vllm.proxy import recognize
from tests.live.scripted import Scripted


class Asked(NamedTuple):
    """What the gateway sent to an instance."""

    target: str
    headers: dict[bytes, bytes]
    body: dict[str, Any]
    receiver: Any


class Exchange:
    """A call in flight, on a connection of its own."""

    alone = True
    reusable = False

    def __init__(self, order_id: str = "") -> None:
        self.cancelled = False
        self.paused = 0
        self._order_id = order_id

    def recognize(self, told: str) -> None:
        recognize(self, told, self._order_id)  # type: ignore[arg-type]

    def cancel(self) -> None:
        self.cancelled = True

    def pause(self) -> None:
        self.paused += 1

    def resume(self) -> None:
        self.paused -= 1


class Pool:
    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.exchanges: list[Exchange] = []
        self._came = asyncio.Event()

    def send(self, asked: Asked, order_id: str) -> Exchange:
        self._note(asked)
        self.exchanges.append(Exchange(order_id))
        return self.exchanges[-1]

    def _note(self, asked: Asked) -> None:
        self.asked.append(asked)
        self._came.set()


class Instance(Scripted):
    """An instance that the gateway can forward to."""

    def __init__(self, name: str = "i0", **other: Any) -> None:
        super().__init__(name, **other)
        self.pool = Pool()
        self.names: dict[str, str] = {}

    def pass_on(
        self,
        order_id: str,
        engine_id: str,
        path: str,
        header_lines: bytes,
        body: bytes,
        receiver: Any,
    ) -> Exchange:
        self.names[order_id] = engine_id
        headers = fields_of(header_lines)
        headers[b"authorization"] = b"Bearer secret"
        return self.pool.send(Asked(path, headers, json.loads(body), receiver), order_id)

    async def asked(self, number: int = 0) -> Asked:
        """The so-maniest call, waited for."""
        async with asyncio.timeout(5):
            while len(self.pool.asked) <= number:
                self.pool._came.clear()
                await self.pool._came.wait()
        return self.pool.asked[number]

    async def answer(self, number: int, body: Any, status: int = 200) -> None:  # type: ignore[override]
        asked = await self.asked(number)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked.receiver.on_head(status, [])
        asked.receiver.on_data(raw)
        asked.receiver.on_end()

    async def event(self, number: int, *events: Any, end: bool = False) -> None:
        """Server-sent events of a stream; the first brings the head along."""
        asked = await self.asked(number)
        asked.receiver.on_head(200, [])
        for event in events:
            data = event if isinstance(event, bytes) else b"data: " + compact(event)
            asked.receiver.on_data(data + b"\n\n")
        if end:
            asked.receiver.on_data(b"data: [DONE]\n\n")
            asked.receiver.on_end()


class Call:
    """A client's HTTP request, and what came back."""

    def __init__(self, target: str, body: Any, **headers: str) -> None:
        self.method = b"POST"
        self.target = target.encode()
        self.headers = [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ]
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.peer = "10.0.0.1"
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None
        self.status = 0
        self.answer_headers: dict[bytes, bytes] = {}
        self.data = b""
        self.over = asyncio.Event()

    @property
    def fields(self) -> dict[bytes, bytes]:
        return dict(self.headers)

    def pause(self) -> None:
        assert self.on_pause is not None
        self.on_pause()

    def resume(self) -> None:
        assert self.on_resume is not None
        self.on_resume()

    def hang_up(self) -> None:
        assert self.on_disconnect is not None
        self.on_disconnect()

    def answer(self, status: int, headers: Any, body: bytes) -> None:
        assert not self.status, "answered twice"
        fields = fields_of(headers) if isinstance(headers, bytes) else dict(headers)
        self.status, self.answer_headers, self.data = status, fields, body
        self.over.set()

    def begin(self, status: int, headers: Any) -> None:
        assert not self.status, "begun twice"
        self.status, self.answer_headers = status, dict(headers)

    def write(self, data: bytes) -> None:
        assert not self.over.is_set()
        self.data += data

    def end(self) -> None:
        assert not self.over.is_set()
        self.over.set()

    async def json(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            await self.over.wait()
        answer: dict[str, Any] = json.loads(self.data)
        return answer

    async def events(self) -> list[Any]:
        """The events of a stream that has ended; "[DONE]" as it is."""
        async with asyncio.timeout(5):
            await self.over.wait()
        parts = [part for part in self.data.split(b"\n\n") if part and part[:1] != b":"]
        texts = [part.removeprefix(b"data: ") for part in parts]
        return [text if text == b"[DONE]" else json.loads(text) for text in texts]


def fields_of(lines: bytes) -> dict[bytes, bytes]:
    fields = [line.partition(b": ") for line in lines.split(b"\r\n") if line]
    return {name: value for name, _, value in fields}


def compact(fields: Any) -> bytes:
    """JSON as vLLM writes it."""
    return json.dumps(fields, separators=(",", ":")).encode()


def completion(
    token_ids: list[int],
    finish: str = "stop",
    *,
    prompt: list[int] | None = None,
    logprobs: bool = False,
    **other: Any,
) -> dict[str, Any]:
    """A /v1/completions answer as vLLM gives it with return_token_ids."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": text_of(token_ids),
        "logprobs": None,
        "finish_reason": finish,
        "token_ids": token_ids,
        "prompt_token_ids": prompt,
    }
    if logprobs:
        choice["logprobs"] = {
            "tokens": [f"w{t} " for t in token_ids],
            "token_logprobs": [-t / 10 for t in token_ids],
            "top_logprobs": [{f"w{t} ": -t / 10} for t in token_ids],
            "text_offset": [0] * len(token_ids),
        }
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "tiny",
        "choices": [{**choice, **other}],
        "usage": {"prompt_tokens": 3, "completion_tokens": len(token_ids), "total_tokens": 0},
    }


def chunk(token_ids: list[int], finish: str | None = None, **other: Any) -> dict[str, Any]:
    """One event of a /v1/completions stream."""
    choice = {"index": 0, "text": text_of(token_ids), "token_ids": token_ids}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [{**choice, "finish_reason": finish, **other}],
    }


def text_of(token_ids: list[int]) -> str:
    return "".join(f"w{token} " for token in token_ids)
