"""Makes each of the trainer's orders as one call with tokens in and tokens out."""

from __future__ import annotations

import asyncio

from rollout_sched.integrations.http.client import Pool
from rollout_sched.integrations.vllm.answers import Assembly
from rollout_sched.integrations.vllm.dialects import Dialect
from rollout_sched.integrations.vllm.pooled_call import post
from rollout_sched.integrations.vllm.protocol.event_stream import EventStream
from rollout_sched.integrations.vllm.protocol.refusals import refusal_of_request
from rollout_sched.integrations.vllm.throttle import Throttle
from rollout_sched.integrations.vllm.trace_lines import TraceLines, no_trace
from rollout_sched.live.ports import Order, Output, RequestRejected

LARGEST_VOCABULARY = 2**19  # tokens, to limit the size of answers; models have up to 2**18


class OrderCalls:
    """Calls on an instance's pool; `throttle` limits their rate.

    header_lines  header lines of each call
    limit_s       timeout of a call in seconds; None: no timeout
    trace         additional header lines of each call, by the order's id
    """

    def __init__(
        self, pool: Pool, header_lines: bytes, throttle: Throttle, limit_s: float | None
    ) -> None:
        self._pool = pool
        self._header_lines = header_lines
        self._throttle = throttle
        self._limit_s = limit_s
        self.trace: TraceLines = no_trace
        self._cuttable: dict[str, asyncio.Task[Output]] = {}

    async def make(self, order: Order, dialect: Dialect, model: str, assembly: Assembly) -> Output:
        """Raises RequestRejected if the order is at fault, else InstanceError."""
        body = dialect.body(order, model)
        lines = self._header_lines + _session_line(order.session) + self.trace(order.id)
        events = EventStream()

        def receive(data: bytes) -> None:
            for event_data in events.feed(data):
                assembly.add(dialect.read(event_data))

        await self._throttle.acquire()
        answer = await post(
            self._pool,
            dialect.target,
            lines,
            body,
            largest=_largest(order),
            receive=receive if order.stream_every else None,
            limit_s=self._limit_s,
        )
        if answer.status != 200:
            raise refusal_of_request(answer.status, answer.body, dialect.target)
        if not order.stream_every:
            assembly.add(dialect.read(answer.body))
        return assembly.output()

    async def make_cuttable(
        self, order: Order, dialect: Dialect, model: str, assembly: Assembly
    ) -> Output:
        """As `make`, for a server without abort: `cut` ends it with the tokens so far."""
        call = asyncio.create_task(self.make(order, dialect, model, assembly))
        self._cuttable[order.id] = call
        try:
            return await call
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            return assembly.cut()  # `cut` has cancelled it
        finally:
            self._cuttable.pop(order.id, None)

    def cut(self, order_id: str) -> None:
        """Close the connection of an order's call: its answer then has the streamed tokens."""
        call = self._cuttable.get(order_id)
        if call is not None:
            call.cancel()


def _largest(order: Order) -> int:
    """Upper bound for the bytes of a valid answer: a token with one log-prob has about 150."""
    made = (2 + _asked(order, "logprobs")) * order.max_new_tokens
    given = (1 + _asked(order, "prompt_logprobs")) * len(order.token_ids)
    return 2**20 + 512 * (made + given)


def _asked(order: Order, setting: str) -> int:
    """Log-probs asked for each token; -1 stands for the whole vocabulary."""
    number = order.sampling.get(setting) or 0
    if not isinstance(number, int):
        raise RequestRejected(f"sampling parameter {setting} is {number!r}; it must be an integer")
    return number if number >= 0 else LARGEST_VOCABULARY


def _session_line(session: str) -> bytes:
    if not session:
        return b""
    if not (session.isascii() and session.isprintable()):
        raise RequestRejected(f"session {session[:80]!r} cannot be a header: printable ASCII only")
    return b"X-Session-ID: %b\r\n" % session.encode()
