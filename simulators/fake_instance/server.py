"""The application of a simulated server: endpoints, API key, faults."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

import msgspec
from aiohttp import web

from rollout_sched.live.ports import InstanceError
from rollout_sched.simulators.fake_instance import tokens
from rollout_sched.simulators.fake_instance.answers import CountedOutput
from rollout_sched.simulators.fake_instance.control import (
    Adapters,
    ControlEndpoints,
    SharedEndpoints,
    Status,
    Tokenizer,
)
from rollout_sched.simulators.fake_instance.dialects import (
    Chat,
    CompletionsDialect,
    Dialect,
    GenerateDialect,
    SkyRLGenerate,
)
from rollout_sched.simulators.fake_instance.engine import (
    Engine,
    EngineSettings,
    Fault,
    Switchboard,
    Where,
)
from rollout_sched.simulators.fake_instance.fields import OutputText, Said
from rollout_sched.simulators.fake_instance.requests import (
    ChoiceChunk,
    Json,
    ParsedRequest,
    Refusal,
    RequestLimits,
    decode,
    error_body,
    reply,
    usage,
    versions,
)
from rollout_sched.simulators.fake_instance.sglang import SglangDialect, SglangEndpoints
from rollout_sched.simulators.fake_instance.trainer_paths import TrainerPaths, Updates

# ------------------------------------------------------------------------------------------
# Serve a request: generate its answer and send it, whole or streamed.

_SSE = {"Content-Type": "text/event-stream; charset=utf-8"}
_DONE = b"data: [DONE]\n\n"


async def serve(
    request: web.Request,
    dialect: Dialect,
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


@dataclass
class _Answering:
    """One request while it is served; `made`: tokens sent of each choice, `outputs`: its text;
    `cached`: tokens of the prompt that were in the prefix cache, if the usage has them."""

    request: web.Request
    dialect: Dialect
    engine: Engine
    asked: ParsedRequest
    fault: str
    made: Counter[int] = field(default_factory=Counter)
    outputs: dict[int, OutputText] = field(default_factory=dict)
    cached: int | None = None

    # -- whole -----------------------------------------------------------------------------

    async def whole(self) -> web.StreamResponse:
        orders = self.asked.orders
        if len(orders) == 1:
            outputs = [await self.engine.generate(orders[0])]
        else:
            outputs = await _all([self.engine.generate(order) for order in orders])
        chunks = [self._chunk(i, o, o.token_ids, o.logprobs, True) for i, o in enumerate(outputs)]
        made = sum(len(output.token_ids) for output in outputs)
        self._count_cached(outputs[-1])
        told = usage(self.asked.prompt_tokens, made, self.cached)
        answer = self.dialect.whole(self.asked, chunks, told)
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
                        self._count_cached(end)
                    values = logprobs if self.asked.logprobs else None
                    chunk = self._chunk(index, end, token_ids, values, first)
                    await self._send(response, self._events(chunk))
                if self.fault == "cut":
                    return hang_up(self.request, response)
            if self.asked.include_usage:
                told = usage(self.asked.prompt_tokens, self.made.total(), self.cached)
                await self._send(response, [self.dialect.answer(self.asked, [], told)])
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
        await response.write(_event(error_body(error)) + _DONE)
        return response

    # -- both ------------------------------------------------------------------------------

    def _count_cached(self, output: CountedOutput) -> None:
        if self.engine.settings.prompt_details:
            self.cached = output.cached_tokens

    def _chunk(
        self,
        index: int,
        output: CountedOutput | None,
        token_ids: Sequence[int],
        logprobs: Sequence[float] | None,
        first: bool,
    ) -> ChoiceChunk:
        finish = None if output is None else output.finish
        spans = None
        if output is not None and self.engine.settings.as_vllm != "0.23":
            spans = versions(output, self._label)
        text = self.outputs.get(index)
        if text is None:
            text = self.outputs[index] = self._output_of(index)
        chunk = ChoiceChunk(index, token_ids, logprobs, finish, spans, first)
        if text.plain and not self.dialect.texts:
            return chunk
        asked = self.asked
        said = Said(self._prefix(index)) if asked.silent else text.read(token_ids, finish)
        names = text.names(token_ids) if logprobs is not None and self.dialect.texts else ()
        return chunk._replace(said=said, names=names)

    def _output_of(self, index: int) -> OutputText:
        order, parses = self.asked.orders[index], self.dialect.parses
        prefix, vocabulary = self._prefix(index), self.asked.vocabulary
        return OutputText(order.sampling, order.token_ids, vocabulary, prefix=prefix, parses=parses)

    def _prefix(self, index: int) -> str:
        """vLLM leaves the text of an echoed prompt out of an answer with token ids."""
        asked = self.asked
        if not asked.echo or asked.return_token_ids:
            return ""
        return tokens.decode(asked.prompt_of(index), asked.vocabulary)

    def _label(self, version: int) -> str:
        label = self.engine.weights.label_of(version)
        if self.fault != "wrong_version":
            return label
        return str(int(label) + 1) if label.isdecimal() else f"not {label}"


Newest = tuple[list[int], list[float], CountedOutput | Exception | None]


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

    def end(self, index: int, end: CountedOutput | Exception) -> None:
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


async def _all(jobs: Sequence[Coroutine[Any, Any, CountedOutput]]) -> list[CountedOutput]:
    """Wait for all of them. If one fails, the others are cancelled and its error is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


#: Paths that vLLM 0.23 does not have.
_NOT_BEFORE_0_28 = (
    *("/abort_requests", "/inference/v1/abort_requests", "/update_weight_version"),
    *("/weight_info", "/start_draft_weight_update"),
)

EngineName = Literal["vllm", "sglang"]


class _Endpoints(Protocol):
    def routes(self) -> list[web.RouteDef]: ...


def _endpoints(name: EngineName, engine: Engine) -> list[_Endpoints]:
    if name == "sglang":
        return [SglangEndpoints(engine), SharedEndpoints(engine)]
    vllm: Sequence[type[Any]] = (
        Status,
        SharedEndpoints,
        ControlEndpoints,
        Updates,
        TrainerPaths,
        Adapters,
        Tokenizer,
    )
    return [endpoints(engine) for endpoints in vllm]


def _dialects(name: EngineName, engine: Engine) -> list[Dialect]:
    if name == "sglang":
        return [SglangDialect(engine)]
    return [GenerateDialect(), SkyRLGenerate(), CompletionsDialect(), Chat()]


#: Paths that need the key; SGLang's need it for all but its health.
_GUARDED = ("/v1", "/inference", "/generate", "/model_info")
_NEVER_STRUCK = ("/health", "/v1/models", "/fake/")
_WEIGHT_CALLS = ("/collective_rpc", "/update_weights", "/areal_update_weights")
_LARGEST_BODY = 1 << 28
#: As vLLM's VLLM_HTTP_TIMEOUT_KEEP_ALIVE, seconds.
_KEEP_ALIVE_S = 5.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Restart(msgspec.Struct, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    weight_version: str = ""  # that of its first start


class _Weights(msgspec.Struct, forbid_unknown_fields=True):
    """Set from outside: the label, without any call that a fleet sees; and the reported label."""

    weight_version: str = ""  # "": unchanged
    says: str | None = ""  # "": the true label; None: no label


class FakeServer:
    """One simulated server, of either engine. Make it in a running event loop; `app` is the
    application."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        api_key: str = "",
        faults: Sequence[Fault] = (),
        dialect: EngineName = "vllm",
    ) -> None:
        self.engine = Engine(settings)
        self.switchboard = Switchboard(settings.seed)
        for fault in faults:
            self.switchboard.set(fault)
        self._authorization = f"Bearer {api_key}".encode() if api_key else b""
        self._limits = RequestLimits(
            settings.model,
            settings.spec.max_model_len,
            settings.stream_interval,
            self.engine.adapters,
            settings.vocabulary,
        )
        self._open: dict[asyncio.Transport | None, None] = {}  # of the requests in flight
        self._down = False
        self._runner: web.AppRunner | None = None
        self.dialects: dict[str, Dialect] = {
            dialect.path: dialect for dialect in _dialects(dialect, self.engine)
        }
        self.app = web.Application(
            client_max_size=_LARGEST_BODY, middlewares=[self._answer_errors, self._let_in]
        )
        missing = _NOT_BEFORE_0_28 if settings.as_vllm == "0.23" else ()
        for endpoints in _endpoints(dialect, self.engine):
            self.app.add_routes([one for one in endpoints.routes() if one.path not in missing])
        self.app.add_routes([web.post(path, self._generate) for path in self.dialects])
        self.app.add_routes(
            [
                web.get("/fake/fault", self._list_faults, allow_head=False),
                web.post("/fake/fault", self._set_fault),
                web.delete("/fake/fault", self._clear_faults),
                web.post("/fake/restart", self._restart_now),
                web.post("/fake/weights", self._set_weights),
            ]
        )

    # -- life ------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which the system chooses if it is 0."""
        self._runner = web.AppRunner(
            self.app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=_KEEP_ALIVE_S,
            shutdown_timeout=0.0,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=1024).start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop at once: waiting requests get no answer."""
        self._hang_up_all()
        await self.engine.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def restart(self, seconds: float, label: str = "") -> None:
        """Close every connection, stay away for `seconds`, and start again with the initial weights
        or those of another label."""
        self._down = True
        self._hang_up_all()
        await self.engine.restart(label)
        asyncio.get_running_loop().call_later(seconds, self._come_back)

    def _come_back(self) -> None:
        self._down = False

    def _hang_up_all(self) -> None:
        for transport in tuple(self._open):
            if transport is not None:
                transport.abort()

    # -- every request ---------------------------------------------------------------------

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self._open[transport] = None
        try:
            return await handler(request)
        except Refusal as refusal:
            return _refused(refusal)
        except InstanceError as error:
            return _refused(Refusal(500, str(error)))
        finally:
            self._open.pop(transport, None)

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._down:
            return hang_up(request)
        if self._authorization and request.path.startswith(_GUARDED):
            told = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not secrets.compare_digest(told, self._authorization):
                return web.json_response({"error": "Unauthorized"}, status=401)
        if self.switchboard.faults and not request.path.startswith(_NEVER_STRUCK):
            fault = self.switchboard.draw(self._where(request))
            if fault is not None:
                return await self._struck(fault, request, handler)
        return await handler(request)

    def _where(self, request: web.Request) -> Where:
        if request.path in self.dialects:
            return "generate"
        return "weights" if request.path.startswith(_WEIGHT_CALLS) else "control"

    async def _struck(
        self, fault: Fault, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        match fault.fault:
            case "silent":
                await asyncio.Event().wait()
            case "garbage":
                return web.Response(body=b"\x15\x03<garbage", content_type="application/json")
            case "reset":
                return hang_up(request)
            case "restart":
                await self.restart(fault.seconds)
                return hang_up(request)
            case "error_500" | "error_503":
                raise Refusal(int(fault.fault[-3:]), f"{fault.fault}, as ordered")
            case "update_500":
                raise self.engine.weights.tear("the weights could not be loaded, as ordered")
            case "slow":
                await asyncio.sleep(fault.seconds)
            case "twice" | "cut" | "another" | "unfinished" | "wrong_version":
                if request.path in self.dialects:
                    return await self._generate(request, fault.fault)
        return await handler(request)

    async def _generate(self, request: web.Request, fault: str = "") -> web.StreamResponse:
        dialect = self.dialects[request.path]
        return await serve(request, dialect, self.engine, self._limits, fault)

    # -- switches --------------------------------------------------------------------------

    async def _list_faults(self, _: web.Request) -> web.Response:
        return reply({"faults": list(self.switchboard.faults.values())})

    async def _set_fault(self, request: web.Request) -> web.Response:
        self.switchboard.set(decode(await request.read(), Fault))
        return await self._list_faults(request)

    async def _restart_now(self, request: web.Request) -> web.StreamResponse:
        asked = decode(await request.read(), _Restart)
        await self.restart(asked.seconds, asked.weight_version)
        return hang_up(request)

    async def _set_weights(self, request: web.Request) -> web.StreamResponse:
        asked = decode(await request.read(), _Weights)
        weights = self.engine.weights
        if asked.weight_version:
            await weights.set_label(asked.weight_version)
        weights.says = asked.says
        return reply({"weight_version": weights.label, "says": weights.reported_label})

    async def _clear_faults(self, request: web.Request) -> web.Response:
        self.switchboard.faults.clear()
        return await self._list_faults(request)


def _refused(refusal: Refusal) -> web.Response:
    return reply(error_body(refusal), refusal.status)
