"""The live driver's client for a vLLM server over HTTP."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from rollout_sched.core.errors import CallerError
from rollout_sched.core.model.records import MAX_SERIAL
from rollout_sched.integrations.http import Pool, Receiver, write_fields
from rollout_sched.integrations.http.server import authorization, check_key
from rollout_sched.integrations.vllm.calls import EngineCalls, EngineLimits, VllmCalls
from rollout_sched.integrations.vllm.control import KEEP_ALIVE_S, ServerControl, Throttle
from rollout_sched.integrations.vllm.detection import (
    MAX_SLOTS,
    Findings,
    Way,
    detect,
    served_models,
)
from rollout_sched.integrations.vllm.dialects import AnswerAssembler
from rollout_sched.integrations.vllm.orders import OrderCalls, TraceLines, renamed
from rollout_sched.integrations.vllm.protocol import endpoints
from rollout_sched.integrations.vllm.proxy import ProxyCall, ProxyCalls
from rollout_sched.live.ports import (
    Description,
    Gauges,
    InstanceGone,
    OnTokens,
    Order,
    Output,
)


class AbortBatch:
    """Sends several aborts, as at the end of a step, to the instance in one call. Collects ids for
    one iteration of the event loop and until the throttle permits a call."""

    def __init__(self, throttle: Throttle, send: Callable[[list[str]], Awaitable[None]]) -> None:
        self._throttle = throttle
        self._send = send
        self._ids: list[str] = []
        self._next: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._closed = False

    async def add(self, engine_id: str) -> None:
        """Returns when the call with the id has been answered. Raises the error of that call, or
        InstanceGone if this is closed, or was meanwhile."""
        if self._closed:
            raise InstanceGone("its connections are closed")
        self._ids.append(engine_id)
        if self._next is None:
            self._next = asyncio.create_task(self._send_all())
            self._calls.add(self._next)
            self._next.add_done_callback(self._over)
        call = self._next
        await asyncio.wait({call})  # cancelling one caller does not stop the others
        if call.cancelled():
            raise InstanceGone("its connections were closed before it answered an abort")
        call.result()

    async def close(self) -> None:
        """Cancel the calls in flight; no more follow."""
        self._closed = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _send_all(self) -> None:
        await asyncio.sleep(0)
        await self._throttle.acquire()
        ids, self._ids, self._next = self._ids, [], None
        await self._send(ids)  # never empty: for vLLM an empty list means every request

    def _over(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # retrieved, as its callers may have been cancelled


#: No user, query or fragment, and no characters that URL parsers drop silently.
_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[\w.~%/-]*)?", re.ASCII)


def checked_url(url: str) -> str:
    """The URL without its last slash. Raises CallerError if it is not the URL of a server."""
    hint = f"instance {url[:200]!r}: write it as http://host:port or https://host:port"
    if not _URL.fullmatch(url):
        raise CallerError(hint)
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise CallerError(hint) from error
    if port == 0:
        raise CallerError(hint)
    if urlsplit(url).path.rstrip("/").endswith("/v1"):
        raise CallerError(f"instance {url[:200]!r}: leave out /v1, it is added automatically")
    return url.rstrip("/")


_JSON = (b"content-type", b"application/json")


class HttpInstance:
    """One vLLM server (`live.ports.InstanceClient`).

    url             http(s)://host:port, with a path before the endpoints if a proxy adds one
    name            the instance's name; the url if not given
    api_key         vLLM's --api-key
    tls             for https, an SSLContext with the authorities and certificates to use; None for
                    the system's
    slots           vLLM's --max-num-seqs, if the server does not report it
    kv_tokens       tokens of its KV cache, if the server does not report them
    labels          of the server: by them weights are loaded (`weight_updates.ByLabel`)
    endpoint        "generate" or "completions" to force one; "auto" takes the better one
    control_rate    control calls per second at most
    dispatch_rate   orders sent per second at most
    control_limit_s timeout of a control call in seconds
    answer_limit_s  timeout of an attempt in seconds; None: no timeout

    `pool` has the connections for orders; every call on it must carry `request_headers`, this
    instance's key. `pass_on` makes an order's call on behalf of the gateway (see `ProxyCalls`).
    `labelled`: until the server is restarted, every token has a label other than the initial one.

    Call `describe` first: it detects what the server offers; `findings` keeps the result.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        slots: int | None = None,
        kv_tokens: int | None = None,
        labels: Iterable[str] = (),
        endpoint: Way = "auto",
        control_rate: int = 100,
        dispatch_rate: int = 10_000,
        control_limit_s: float = 30.0,
        answer_limit_s: float | None = None,
    ) -> None:
        url = checked_url(url)
        _check_size("slots", slots, MAX_SLOTS)
        _check_size("kv_tokens", kv_tokens, MAX_SERIAL)
        self.name = name or url
        self.labels = tuple(labels)
        self.api_key = api_key or ""
        self.request_headers = _key_field(self.name, api_key)
        headers = [_JSON, *self.request_headers]
        self.control = ServerControl(url, headers, tls, control_rate, control_limit_s)
        self.pool = Pool(url, ssl=tls, keepalive_s=KEEP_ALIVE_S)
        throttle = Throttle(dispatch_rate, "dispatch_rate")
        self._orders = OrderCalls(self.pool, write_fields(headers), throttle, answer_limit_s)
        self._proxies = ProxyCalls(self.pool, write_fields(self.request_headers), throttle)
        self.pass_on = self._proxies.pass_on  # unwrapped, because it is on the hot path
        self._aborts = AbortBatch(self.control.throttle, self._send_aborts)
        self._detect = partial(detect, self.control, endpoint, slots, kv_tokens)
        self._calls: EngineCalls = VllmCalls(self.control)
        self._model = ""  # used if it serves several
        self._findings: Findings | None = None
        self.labelled = False
        self.models: tuple[str, ...] = ()  # that it served when it was last asked

    @property
    def findings(self) -> Findings:
        """What the last `describe` found. Raises CallerError before the first."""
        if self._findings is None:
            raise CallerError(f"{self.name}: call describe() first")
        return self._findings

    async def describe(self) -> Description:
        self._findings = await self._detect()
        self._calls = self._findings.calls
        description = self._findings.description
        self.labelled = description.version is not None and self._offers_labels
        self.models = description.models or (description.model,)
        return description

    async def list_models(self) -> tuple[str, ...]:
        """The names that it serves now: adapters come and go. Raises InstanceError."""
        self.models = tuple([model.id for model in await served_models(self.control)])
        return self.models

    @property
    def takes_openai(self) -> bool:
        """Whether a client's OpenAI call can be passed on to it as it is."""
        return self._calls.takes_openai

    @property
    def asks_versions(self) -> bool:
        """Whether it reports weight versions if a request asks for them."""
        return endpoints.ASK_VERSIONS in self.findings.description.capabilities

    @property
    def _offers_labels(self) -> bool:
        return self.findings.description.capabilities >= {"set_version", "weight_versions"}

    def use_model(self, model: str) -> None:
        """The model for our own requests, if it serves several (`Description.models`)."""
        self._model = model

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        found = self.findings
        told, assembly = (
            found.description,
            AnswerAssembler(order, on_tokens, labelled=self.labelled),
        )
        model = self._model if self._model in told.models else told.model
        if found.abort_path is None:
            return await self._orders.make_cuttable(order, found.dialect, model, assembly)
        return await self._orders.make(order, found.dialect, model, assembly)

    async def tokenize(self, text: str) -> list[int] | None:
        """The token ids of a text; None if it cannot be asked."""
        return await self._calls.tokenize(self.findings.description.model, text)

    async def detokenize(self, token_ids: Sequence[int]) -> str | None:
        return await self._calls.detokenize(self.findings.description.model, token_ids)

    def trace_orders(self, trace: TraceLines) -> None:
        """Send each order's own trace context, in place of the client's."""
        pass_on = self._proxies.pass_on

        def pass_on_named(
            order_id: str,
            engine_id: str,
            path: str,
            header_lines: bytes,
            body: bytes,
            receiver: Receiver,
        ) -> ProxyCall:
            named = renamed(header_lines, trace(order_id))
            return pass_on(order_id, engine_id, path, named, body, receiver)

        self.pass_on = pass_on_named
        self._orders.trace = trace

    async def abort(self, order_id: str) -> None:
        """If the server cannot abort, the connection is closed: the answer then has the tokens
        that were streamed."""
        proxy_call = self._proxies.open.get(order_id)
        if self.findings.abort_path is not None:
            engine_id = self.findings.dialect.engine_id(order_id)
            await self._aborts.add(engine_id if proxy_call is None else proxy_call.engine_id)
        elif proxy_call is not None:
            proxy_call.cut()
        else:
            self._orders.cut(order_id)

    async def _send_aborts(self, engine_ids: list[str]) -> None:
        await self._calls.abort(engine_ids)

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        await self._calls.pause(mode, clear_cache)

    async def resume(self) -> None:
        await self._calls.resume()

    async def set_version(self, version: int) -> None:
        if "set_version" in self.findings.description.capabilities:
            await self._calls.set_version(version)
            self.labelled = self._offers_labels

    async def weight_version(self) -> int | None:
        return await self._calls.weight_version()

    async def is_paused(self) -> bool | None:
        return await self._calls.is_paused()

    async def gauges(self) -> Gauges:
        return await self._calls.gauges()

    async def limits(self) -> EngineLimits:
        """Raises InstanceError."""
        return await self._calls.limits()

    @property
    def started_at(self) -> float:
        """Unix seconds, as of the last `describe`."""
        return self.findings.description.started_at

    async def collective_rpc(
        self, method: str, kwargs: Mapping[str, Any], limit_s: float | None = None
    ) -> None:
        """Call a method of every worker, once (`integrations.vllm.weights.WeightClient`)."""
        await self._calls.collective_rpc(method, kwargs, limit_s)

    async def weight_transfer(
        self, step: str, body: Mapping[str, Any], limit_s: float | None = None
    ) -> None:
        """A step of vLLM's weight transfer, by the name of its endpoint. Never repeated."""
        await self._calls.weight_transfer(step, body, limit_s)

    async def world_size(self) -> int:
        """How many ranks it has in a weight transfer (`integrations.vllm.weights.deal`)."""
        return await self._calls.world_size()

    async def close(self) -> None:
        self.pool.close()
        await self._aborts.close()
        await self.control.close()


def _key_field(name: str, api_key: str | None) -> list[tuple[bytes, bytes]]:
    if api_key is None:
        return []
    check_key(f"instance {name}", api_key)
    return [(b"authorization", authorization(api_key))]


def _check_size(setting: str, value: int | None, limit: int) -> None:
    if value is not None and not 0 < value <= limit:
        raise CallerError(f"{setting} is {value}; it must be a number from 1 to {limit}")
