"""Makes each of the trainer's orders as one call with tokens in and tokens out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from rollout_sched.integrations.http import ExchangeError, Headers, Pool
from rollout_sched.integrations.vllm.control import ControlAnswer, Throttle
from rollout_sched.integrations.vllm.dialects import AnswerAssembler, Dialect
from rollout_sched.integrations.vllm.protocol.answers import EventStream
from rollout_sched.integrations.vllm.protocol.refusals import refusal_of_request
from rollout_sched.integrations.vllm.proxy import as_instance_error
from rollout_sched.live.ports import InstanceError, Order, Output, RequestRejected

# ------------------------------------------------------------------------------------------
# One POST on an instance's pool whose answer is received as it arrives, up to a size.
#
# It is never repeated here. The pool sends it again only if the server had closed the idle
# connection before the request arrived. vLLM aborts a request that loses its connection.


async def post(
    pool: Pool,
    target: str,
    header_lines: bytes,
    body: bytes,
    *,
    largest: int,
    receive: Callable[[bytes], None] | None = None,
    limit_s: float | None = None,
) -> ControlAnswer:
    """The answer, of at most `largest` bytes, within `limit_s` seconds; else InstanceError.

    If `receive` is given, it gets the body of a 200 as it arrives, and its exceptions are raised
    from this call. Cancelling closes the connection.
    """
    answer = _Answer(target, largest, receive)
    exchange = pool.send("POST", target, header_lines, body, answer)
    try:
        async with asyncio.timeout(limit_s):
            return await answer.whole
    except TimeoutError as error:
        raise InstanceError(f"{target} did not answer within {limit_s:g} s") from error
    except ExchangeError as error:
        raise as_instance_error(error, f"{target} failed: ") from error
    finally:
        exchange.cancel()


class _Answer:
    """A receiver (`integrations.http.client_connection.Receiver`) with a size limit."""

    def __init__(self, target: str, largest: int, receive: Callable[[bytes], None] | None) -> None:
        self.whole: asyncio.Future[ControlAnswer] = asyncio.get_running_loop().create_future()
        self._target = target
        self._left = largest
        self._receive = receive
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        if self.whole.done():
            return
        self._left -= len(data)
        try:
            if self._left < 0:
                raise InstanceError(f"{self._target} sent an answer that is too large")
            if self._receive is not None and self._status == 200:
                self._receive(data)
            else:
                self._body += data
        except Exception as error:  # raised where the answer is awaited
            self.whole.set_exception(error)

    def on_end(self) -> None:
        if not self.whole.done():
            self.whole.set_result(ControlAnswer(self._status, bytes(self._body)))

    def on_error(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)


# ------------------------------------------------------------------------------------------
# The header lines with a trace context (W3C Trace Context), which vLLM reads.

#: Matches (name, value) of each such line, among header lines that end with CRLF.
TRACE_LINE = re.compile(rb"(?im)^(traceparent|tracestate): ?([^\r\n]*)\r\n")

#: The lines for an order, by its id.
TraceLines = Callable[[str], bytes]


def no_trace(order_id: str) -> bytes:
    """For runs without tracing."""
    return b""


def renamed(header_lines: bytes, trace: bytes) -> bytes:
    """The header lines with `trace` in place of the client's trace; unchanged if `trace` is
    empty."""
    return TRACE_LINE.sub(b"", header_lines) + trace if trace else header_lines


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

    async def make(
        self, order: Order, dialect: Dialect, model: str, assembly: AnswerAssembler
    ) -> Output:
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
        self, order: Order, dialect: Dialect, model: str, assembly: AnswerAssembler
    ) -> Output:
        """Make an order at a server without abort: `cut` ends the answer with the tokens so far."""
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
