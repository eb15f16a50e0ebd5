"""Serve a request: generate its answer and send it, whole or streamed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
from aiohttp import web

from rollout_sched.live.ports import Output
from rollout_sched.simulators.fake_instance import errors
from rollout_sched.simulators.fake_instance.dialects import (
    ChoiceChunk,
    EndpointDialect,
    Json,
    usage,
    versions,
)
from rollout_sched.simulators.fake_instance.engine import Engine
from rollout_sched.simulators.fake_instance.errors import Refusal
from rollout_sched.simulators.fake_instance.request_parsing import ParsedRequest, RequestLimits

_SSE = {"Content-Type": "text/event-stream; charset=utf-8"}
_DONE = b"data: [DONE]\n\n"


async def serve(
    request: web.Request,
    dialect: EndpointDialect,
    engine: Engine,
    limits: RequestLimits,
    fault: str,
) -> web.StreamResponse:
    """Serve, with the fault of this answer, if any. Raises Refusal if nothing was sent yet."""
    if request.content_type != "application/json":
        raise Refusal(400, "Unsupported Media Type: Only 'application/json' is allowed")
    asked = dialect.parse(await request.read(), request.headers, limits)
    if fault == "another":
        asked.id = _next_id(asked.id)
    answering = _Answering(request, dialect, engine, asked, fault)
    return await (answering.stream() if asked.stream else answering.whole())


class _Answering:
    """One request while it is served."""

    def __init__(
        self,
        request: web.Request,
        dialect: EndpointDialect,
        engine: Engine,
        asked: ParsedRequest,
        fault: str,
    ) -> None:
        self.request = request
        self.dialect = dialect
        self.engine = engine
        self.asked = asked
        self.fault = fault
        self.made: Counter[int] = Counter()  # tokens sent of each choice

    # -- whole -----------------------------------------------------------------------------

    async def whole(self) -> web.StreamResponse:
        orders = self.asked.orders
        if len(orders) == 1:
            outputs = [await self.engine.generate(orders[0])]
        else:
            outputs = await _all([self.engine.generate(order) for order in orders])
        chunks = [self._chunk(i, o, o.token_ids, o.logprobs, True) for i, o in enumerate(outputs)]
        made = sum(len(output.token_ids) for output in outputs)
        answer = self.dialect.whole(self.asked, chunks, usage(self.asked.prompt_tokens, made))
        body = msgspec.json.encode(answer)
        if self.fault == "cut":
            return await self._cut(body, len(body) // 2)
        if self.fault == "unfinished":
            return await self._cut(body, len(body) - 2)
        response = web.Response(body=body, content_type="application/json")
        if self.fault == "twice":
            await response.prepare(self.request)
            await response.write_eof()
            _repeat(self.request, body)
        return response

    async def _cut(self, body: bytes, sent: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(body)
        await response.prepare(self.request)
        await response.write(body[:sent])
        return hang_up(self.request, response)

    # -- streamed --------------------------------------------------------------------------

    async def stream(self) -> web.StreamResponse:
        """Tokens that arrive faster than they can be sent are sent together."""
        orders = self.asked.orders
        news = _News()
        runs = [asyncio.ensure_future(self._follow(index, news)) for index in range(len(orders))]
        response = web.StreamResponse(headers=_SSE)
        open_choices = set(range(len(orders)))
        try:
            while open_choices:
                for index, (token_ids, logprobs, end) in (await news.take()).items():
                    if isinstance(end, Exception):
                        return await self._break_off(response, end)
                    first = index in open_choices and not news.seen(index)
                    if end is not None:
                        open_choices.discard(index)
                    values = logprobs if self.asked.logprobs else None
                    chunk = self._chunk(index, end, token_ids, values, first)
                    await self._send(response, self._events(chunk))
                if self.fault == "cut":
                    return hang_up(self.request, response)
            if self.asked.include_usage:
                told = usage(self.asked.prompt_tokens, self.made.total())
                await self._send(response, [self.dialect.usage_event(self.asked, told)])
            if self.fault == "unfinished":
                return hang_up(self.request, response)
            await response.write(_DONE)
        finally:
            for run in runs:
                run.cancel()
        return response

    async def _follow(self, index: int, news: _News) -> None:
        order = self.asked.orders[index]
        try:
            output = await self.engine.generate(
                order, lambda ids, logprobs: news.add(index, ids, logprobs)
            )
        except Refusal as refusal:
            news.end(index, refusal)
        else:
            news.end(index, output)

    def _events(self, chunk: ChoiceChunk) -> list[Json]:
        """The events for a chunk; the last one has the usage with the chunk's tokens."""
        asked, events = self.asked, self.dialect.events(self.asked, chunk)
        for event in events:
            if event is events[-1]:
                self.made[chunk.choice] += len(chunk.token_ids)
            if asked.counts:
                prompt_tokens = len(asked.prompts[chunk.choice // asked.n])
                event["usage"] = usage(prompt_tokens, self.made[chunk.choice])
        return events

    async def _send(self, response: web.StreamResponse, events: Sequence[Json]) -> None:
        if not response.prepared:
            await response.prepare(self.request)
        data = b"".join(_event(event) for event in events)
        await response.write(data)
        if self.fault == "twice":
            await response.write(data)

    async def _break_off(
        self, response: web.StreamResponse, error: Exception
    ) -> web.StreamResponse:
        assert isinstance(error, Refusal)
        if not response.prepared:
            raise error
        await response.write(_event(errors.content(error)) + _DONE)
        return response

    # -- both ------------------------------------------------------------------------------

    def _chunk(
        self,
        index: int,
        output: Output | None,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        first: bool,
    ) -> ChoiceChunk:
        if output is None:
            return ChoiceChunk(index, token_ids, logprobs, None, None, first)
        spans = versions(output, self._label)
        prompt = output.prompt
        if prompt is not None and self.fault == "short_prompt":
            prompt = prompt[:-1]
        return ChoiceChunk(index, token_ids, logprobs, output.finish, spans, first, prompt)

    def _label(self, version: int) -> str:
        label = self.engine.weights.label_of(version)
        if self.fault != "wrong_version":
            return label
        return str(int(label) + 1) if label.isdecimal() else f"not {label}"


Newest = tuple[list[int], list[float], Output | Exception | None]


class _News:
    """What the choices of a stream have produced since the last read."""

    def __init__(self) -> None:
        self._news: dict[int, Newest] = {}
        self._event = asyncio.Event()
        self._seen: set[int] = set()
        self._taken: set[int] = set()

    def add(self, index: int, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        known, values, end = self._news.get(index, ([], [], None))
        self._news[index] = ([*known, *ids], [*values, *(logprobs or ())], end)
        self._event.set()

    def end(self, index: int, end: Output | Exception) -> None:
        known, values, _ = self._news.get(index, ([], [], None))
        self._news[index] = (known, values, end)
        self._event.set()

    async def take(self) -> dict[int, Newest]:
        await self._event.wait()
        self._event.clear()
        news, self._news = self._news, {}
        self._seen |= self._taken
        self._taken = set(news)
        return news

    def seen(self, index: int) -> bool:
        """Whether something of that choice was read before."""
        return index in self._seen


def _event(content: Json) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(content)


def _next_id(answer_id: str) -> str:
    """The id with the next number, as if of a request that came directly after this one."""
    name = answer_id.rstrip("0123456789")
    return f"{name}{int(answer_id[len(name) :] or 0) + 1}"


def hang_up(request: web.Request, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """Close the connection as it is; the returned response is not sent."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response() if response is None else response


def _repeat(request: web.Request, body: bytes) -> None:
    """Send a whole answer that was not requested."""
    if request.transport is not None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        request.transport.write(head.encode() + b"\r\n\r\n" + body)


async def _all(jobs: Sequence[Coroutine[Any, Any, Output]]) -> list[Output]:
    """Like gather, but if one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
