"""Makes each of the trainer's orders as one call with tokens in and tokens out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from rollout_sched.integrations.http import Exchange, ExchangeError, Headers, Pool
from rollout_sched.integrations.vllm.control import Throttle
from rollout_sched.integrations.vllm.dialects import AnswerAssembler, Dialect
from rollout_sched.integrations.vllm.protocol.answers import EventStream
from rollout_sched.integrations.vllm.protocol.refusals import refusal_of_request
from rollout_sched.integrations.vllm.proxy import as_instance_error, recognize
from rollout_sched.live.ports import InstanceError, Order, Output, RequestRejected

# ------------------------------------------------------------------------------------------
# The answer to an order, which is assembled as it arrives.


class _Answer:
    """A receiver (`integrations.http.client_connection.Receiver`) with a size limit. `output` is
    done at the end, with an InstanceError or RequestRejected if there is no valid answer."""

    exchange: Exchange  # set when the request was sent

    def __init__(self, order: Order, dialect: Dialect, assembly: AnswerAssembler) -> None:
        self.output: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self._order_id = order.id
        self._dialect = dialect
        self._assembly = assembly
        self._left = _largest(order)
        self._events = EventStream() if order.stream_every else None
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        if self.output.done():
            return
        self._left -= len(data)
        try:
            if self._left < 0:
                raise InstanceError(f"{self._dialect.target} sent an answer that is too large")
            if self._events is not None and self._status == 200:
                for event_data in self._events.feed(data):
                    self._add(event_data)
            else:
                self._body += data
        except Exception as error:  # raised where the answer is awaited
            self.output.set_exception(error)

    def on_end(self) -> None:
        if self.output.done():
            return
        try:
            if self._status != 200:
                body = bytes(self._body)
                raise refusal_of_request(self._status, body, self._dialect.target)
            if self._events is None:
                self._add(bytes(self._body))
            self.output.set_result(self._assembly.output())
        except Exception as error:
            self.output.set_exception(error)

    def on_error(self, error: Exception) -> None:
        if not self.output.done():
            self.output.set_exception(error)

    def _add(self, data: bytes) -> None:
        chunk = self._dialect.read(data)
        recognize(self.exchange, chunk.id, self._order_id)
        self._assembly.add(chunk)


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
        """Make it once: the pool sends it again only if the server had closed the idle connection
        before it arrived. Cancelling closes the connection, by which vLLM aborts the request.

        Raises RequestRejected if the order is at fault, else InstanceError.
        """
        body = dialect.body(order, model)
        lines = self._header_lines + _session_line(order.session) + self.trace(order.id)
        target = dialect.target
        await self._throttle.acquire()
        answer = _Answer(order, dialect, assembly)
        exchange = answer.exchange = self._pool.send("POST", target, lines, body, answer)
        exchange.reusable = False  # until its answer is recognized
        try:
            async with asyncio.timeout(self._limit_s):
                return await answer.output
        except TimeoutError as error:
            raise InstanceError(f"{target} did not answer within {self._limit_s:g} s") from error
        except ExchangeError as error:
            raise as_instance_error(error, f"{target} failed: ") from error
        finally:
            exchange.cancel()

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
