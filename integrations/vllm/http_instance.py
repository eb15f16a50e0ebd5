"""A vLLM server behind the live driver's port."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.http.client import Pool, Response
from rollout_sched.integrations.http.errors import ExchangeError
from rollout_sched.integrations.http.exchange import Receiver
from rollout_sched.integrations.http.heads import write_fields
from rollout_sched.integrations.vllm import metrics_text
from rollout_sched.integrations.vllm.abort_batch import AbortBatch
from rollout_sched.integrations.vllm.answers import Assembly
from rollout_sched.integrations.vllm.control import (
    KEEP_ALIVE_S,
    Answer,
    Control,
    excerpt,
    refusal,
)
from rollout_sched.integrations.vllm.detection import MOST_SLOTS, Endpoint, Findings, detect
from rollout_sched.integrations.vllm.event_stream import EventStream
from rollout_sched.integrations.vllm.pooled_call import post
from rollout_sched.integrations.vllm.proxy import ProxyCall
from rollout_sched.integrations.vllm.throttle import Throttle
from rollout_sched.live.ports import (
    Description,
    Gauges,
    InstanceError,
    OnTokens,
    Order,
    Output,
    RequestRejected,
)

#: Headers about one connection (RFC 9110, 7.6.1), and those the pool and the key write anew.
NOT_FORWARDED = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding"}
    | {b"upgrade", b"host", b"content-length", b"authorization", b"proxy-authorization"}
)
LARGEST_VOCABULARY = 2**19  # tokens, to bound answers with; models have up to 2**18
AT_FAULT = (400, 413, 422)  # statuses that blame the request


class HttpInstance:
    """One vLLM server (`live.ports.InstanceClient`).

    url             http(s)://host:port, with a path before the endpoints if a proxy adds one
    name            what it is called; the url if not given
    api_key         vLLM's --api-key
    tls             for https, an SSLContext with the authorities and certificates to use; None for
                    the system's
    slots           vLLM's --max-num-seqs, where the server does not tell it
    kv_tokens       of its KV cache, where the server does not tell
    endpoint        "generate" or "completions" to insist on one; "auto" takes the better one
    control_rate    control calls in a second at most
    dispatch_rate   orders sent in a second at most
    control_limit_s seconds until a control call is given up
    answer_limit_s  seconds until an attempt is given up; None: never

    `pool` holds the connections that orders travel on. `labelled`: every token carries another
    label than that of a start, until the server is restarted.

    `describe` comes first: it finds out what the server offers, `findings` tells what that was.
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
        endpoint: Endpoint = "auto",
        control_rate: int = 100,
        dispatch_rate: int = 10_000,
        control_limit_s: float = 30.0,
        answer_limit_s: float | None = None,
    ) -> None:
        url = _checked_url(url)
        headers = _headers(api_key)
        _check_size("slots", slots, MOST_SLOTS)
        _check_size("kv_tokens", kv_tokens, metrics_text.MOST)
        self.name = name or url
        self.control = Control(url, headers, tls, control_rate, control_limit_s)
        self.pool = Pool(url, ssl=tls, keepalive_s=KEEP_ALIVE_S)
        self._header_lines = b"".join(
            b"%b: %b\r\n" % (k.encode(), v.encode()) for k, v in headers.items()
        )
        self._authorization = headers.get("Authorization", "").encode()
        self._key_line = write_fields(self.request_headers)
        self._answer_limit_s = answer_limit_s
        self._dispatch_throttle = Throttle(dispatch_rate, "dispatch_rate")
        self._aborts = AbortBatch(self.control.throttle, self._send_aborts)
        self._slots = slots
        self._kv_tokens = kv_tokens
        self._model = ""  # where it serves several
        self._endpoint = endpoint
        self._findings: Findings | None = None
        self.labelled = False
        self._cuttable: dict[str, asyncio.Task[Output]] = {}
        self._passing: dict[str, ProxyCall] = {}

    @property
    def findings(self) -> Findings:
        """What the last `describe` found. Raises CallerError before the first."""
        if self._findings is None:
            raise CallerError(f"{self.name}: describe() it before anything else")
        return self._findings

    async def describe(self) -> Description:
        self._findings = await detect(self.control, self._endpoint, self._slots, self._kv_tokens)
        description = self._findings.description
        self.labelled = description.version is not None and self._offers_labels
        return description

    @property
    def _offers_labels(self) -> bool:
        return self.findings.description.capabilities >= {"set_version", "weight_versions"}

    def use_model(self, model: str) -> None:
        """What our own requests are to name, where it serves several (`Description.models`)."""
        self._model = model

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        assembly = Assembly(order, on_tokens, labelled=self.labelled)
        if self.findings.abort_path is not None:
            return await self._attempt(order, assembly)
        task = self._cuttable[order.id] = asyncio.create_task(self._attempt(order, assembly))
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            return assembly.cut()  # it was `abort` that cancelled
        finally:
            self._cuttable.pop(order.id, None)

    async def _attempt(self, order: Order, assembly: Assembly) -> Output:
        dialect, told = self.findings.dialect, self.findings.description
        body = dialect.body(order, self._model if self._model in told.models else told.model)
        lines = self._header_lines + _session_line(order.session)
        events = EventStream()

        def receive(data: bytes) -> None:
            for payload in events.feed(data):
                assembly.add(dialect.read(payload))

        await self._dispatch_throttle.acquire()
        answer = await post(
            self.pool,
            dialect.target,
            lines,
            body,
            largest=_largest(order),
            receive=receive if order.stream_every else None,
            limit_s=self._answer_limit_s,
        )
        _raise_if_refused(dialect.target, answer)
        if not order.stream_every:
            assembly.add(dialect.read(answer.body))
        return assembly.output()

    async def abort(self, order_id: str) -> None:
        """Where the server cannot abort, the connection is cut: the answer then has the tokens
        that were streamed."""
        passing = self._passing.get(order_id)
        if self.findings.abort_path is not None:
            engine_id = self.findings.dialect.engine_id(order_id)
            await self._aborts.add(engine_id if passing is None else passing.engine_id)
        elif passing is not None:
            passing.cut()
        elif task := self._cuttable.get(order_id):
            task.cancel()

    async def _send_aborts(self, engine_ids: list[str]) -> None:
        path = self.findings.abort_path
        assert path is not None
        await self.control.call(path, {"request_ids": engine_ids}, throttled=False)

    async def pause(self, mode: Literal["keep", "abort"], clear_cache: bool) -> None:
        # Left out, clear_cache is true, and drops the KV of everything that runs even with "keep".
        query = {"mode": mode, "clear_cache": "true" if clear_cache else "false"}
        await self.control.call("/pause", query=query)

    async def resume(self) -> None:
        await self.control.call("/resume")

    async def set_version(self, version: int) -> None:
        if "set_version" in self.findings.description.capabilities:
            await self.control.call("/update_weight_version", {"new_version": str(version)})
            self.labelled = self._offers_labels

    @property
    def request_headers(self) -> list[tuple[bytes, bytes]]:
        """What every call on the pool must carry: this instance's key."""
        return [(b"authorization", self._authorization)] if self._authorization else []

    @property
    def started_at(self) -> float:
        """Unix seconds, as `describe` found it last."""
        return self.findings.description.started_at

    async def collective_rpc(
        self, method: str, kwargs: Mapping[str, Any], limit_s: float | None = None
    ) -> None:
        """Call a method of every worker (`integrations.vllm.weights.Workers`). Never repeated."""
        body = {"method": method, "kwargs": kwargs}
        await self.control.call("/collective_rpc", body, repeatable=False, limit_s=limit_s)

    async def weight_transfer(
        self, step: str, body: Mapping[str, Any], limit_s: float | None = None
    ) -> None:
        """A step of vLLM's weight transfer, by the name of its endpoint. Never repeated."""
        await self.control.call(f"/{step}", body, repeatable=False, limit_s=limit_s)

    async def gauges(self) -> Gauges:
        answer = await self.control.get("/metrics")
        if answer.status != 200:
            raise refusal("/metrics", answer)
        return metrics_text.gauges(answer.body)

    async def forward(
        self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> Response:
        """Pass a call on as it came, but for what belongs to the connection it came on, and with
        this instance's key for the caller's. Header names are lower-case."""
        kept = [field for field in headers if field[0] not in NOT_FORWARDED]
        kept += self.request_headers
        await self._dispatch_throttle.acquire()
        try:
            return await self.pool.request(method, target, kept, body, self._answer_limit_s)
        except TimeoutError as error:
            raise InstanceError(f"{target} did not answer in time") from error
        except ExchangeError as error:
            raise InstanceError(f"{target} failed: {error}") from error

    def pass_on(
        self,
        order_id: str,
        engine_id: str,
        path: str,
        header_lines: bytes,
        body: bytes,
        receiver: Receiver,
    ) -> ProxyCall:
        """Make an order's call for somebody else; this instance's key is added to the header
        lines. An abort of the order names `engine_id`. The receiver hears nothing before this has
        returned."""
        passing = ProxyCall(order_id, engine_id, receiver, self._passing)
        lines = self._key_line + header_lines
        send = partial(self.pool.send, "POST", path, lines, body, passing)
        passing.send(self._dispatch_throttle, send)
        return passing

    async def close(self) -> None:
        self.pool.close()
        await self.control.close()


def _raise_if_refused(target: str, answer: Answer) -> None:
    if answer.status in AT_FAULT:
        raise RequestRejected(
            f"{target} answered {answer.status}: {excerpt(answer.body)}", answer.status, answer.body
        )
    if answer.status != 200:
        raise refusal(target, answer)


def _largest(order: Order) -> int:
    """Bytes an honest answer stays below: a token with one log-prob has some 150."""
    made = (2 + _asked(order, "logprobs")) * order.max_new_tokens
    given = (1 + _asked(order, "prompt_logprobs")) * len(order.token_ids)
    return 2**20 + 512 * (made + given)


def _asked(order: Order, setting: str) -> int:
    """Log-probs asked for each token; -1 stands for the whole vocabulary."""
    number = order.sampling.get(setting) or 0
    if not isinstance(number, int):
        raise RequestRejected(f"sampling parameter {setting} is {number!r}; it is an integer")
    return number if number >= 0 else LARGEST_VOCABULARY


def _session_line(session: str) -> bytes:
    if not session:
        return b""
    if not (session.isascii() and session.isprintable()):
        raise RequestRejected(f"session {session[:80]!r} cannot be a header: printable ASCII only")
    return b"X-Session-ID: %b\r\n" % session.encode()


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        if not (api_key and api_key.isascii() and api_key.isprintable()):
            raise CallerError("the API key is empty or not printable ASCII")
        headers["Authorization"] = f"Bearer {api_key}"
    return headers


def _check_size(setting: str, value: int | None, most: int) -> None:
    if value is not None and not 0 < value <= most:
        raise CallerError(f"{setting} is {value}; it is a number from 1 to {most}")


#: No user, no query, no fragment, and nothing that a parser of URLs would take out in silence.
_URL = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[\w.~%/-]*)?", re.ASCII)


def _checked_url(url: str) -> str:
    hint = f"instance {url[:200]!r}: give it as http://host:port or https://host:port"
    if not _URL.fullmatch(url):
        raise CallerError(hint)
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise CallerError(hint) from error
    if port == 0:
        raise CallerError(hint)
    return url.rstrip("/")
