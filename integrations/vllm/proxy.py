"""Calls for orders that the gateway, not the driver, makes on an instance's pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from rollout_sched.integrations.http import (
    Exchange,
    ExchangeError,
    Headers,
    NotConnected,
    Pool,
    Receiver,
)
from rollout_sched.integrations.vllm.control import Throttle
from rollout_sched.integrations.vllm.protocol.endpoints import names
from rollout_sched.live.ports import (
    AnswerUntrue,
    ConnectionBroken,
    InstanceError,
    InstanceUnreached,
    RequestRejected,
)


def recognize(exchange: Exchange, told: str, order_id: str) -> None:
    """Compare the id in an answer, or in an event of it, with the order that it should answer.

    A connection is used again after an answer with our id. So an answer without one is accepted
    only if its connection has carried nothing else: on another it may be the second answer to an
    earlier call, which some servers and proxies send. Raises AnswerUntrue.
    """
    ours = names(told, order_id)
    if ours:
        exchange.reusable = True
    elif ours is not None:
        raise AnswerUntrue(f"it answered {order_id} with the answer to another call")
    elif not (exchange.alone or exchange.reusable):
        raise AnswerUntrue(f"its answer to {order_id} does not name it, as earlier answers did")


class _Nobody:
    """Drops everything that arrives after the end."""

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: Exception) -> None: ...


_NOBODY = _Nobody()
_NO_HEAD = _NOBODY.on_head
_NO_DATA = _NOBODY.on_data


class ProxyCall:
    """Sits between an exchange and its receiver (`integrations.http.client_connection.Receiver`).

    Limits the rate of such calls, keeps the id that an abort needs, and turns errors into
    InstanceErrors. `register` has it under its order's id until its end, its error or `cancel`.
    Then it drops the reference to its receiver, which refers back to it, so that no cycle is left
    for the garbage collector.
    """

    __slots__ = (
        "_exchange",
        "_order_id",
        "_paused",
        "_receiver",
        "_register",
        "_waiting",
        "engine_id",
        "on_data",
        "on_head",
    )

    on_head: Callable[[int, Headers], None]
    on_data: Callable[[bytes], None]

    def __init__(
        self, order_id: str, engine_id: str, receiver: Receiver, register: dict[str, ProxyCall]
    ) -> None:
        self.engine_id = engine_id
        self.on_head = receiver.on_head
        self.on_data = receiver.on_data
        self._order_id = order_id
        self._receiver: Receiver = receiver
        self._register = register
        self._exchange: Exchange | None = None
        self._waiting: asyncio.Task[None] | None = None  # waits for the throttle
        self._paused = False
        register[order_id] = self

    def send(self, throttle: Throttle, send: Callable[[], Exchange]) -> None:
        """Make the call, now or when the throttle permits it.

        Raises RequestRejected if it cannot be sent, InstanceUnreached after the pool was closed.
        """
        if throttle.take():
            self._send(send)
        else:
            self._waiting = asyncio.create_task(self._send_later(throttle, send))

    async def _send_later(self, throttle: Throttle, send: Callable[[], Exchange]) -> None:
        await throttle.acquire()
        try:
            self._send(send)
        except Exception as error:  # otherwise it would be lost with the task
            self._receiver.on_error(error)

    def _send(self, send: Callable[[], Exchange]) -> None:
        try:
            exchange = self._exchange = send()
        except BaseException as error:
            self._register.pop(self._order_id, None)
            if isinstance(error, ValueError):  # a header or target with a line break
                raise RequestRejected(str(error)) from error
            if isinstance(error, RuntimeError):
                raise InstanceUnreached(str(error)) from error
            raise
        exchange.reusable = False  # until its answer is recognized
        if self._paused:
            exchange.pause()

    def recognize(self, told: str) -> None:
        """As the function, for the id in this call's answer."""
        assert self._exchange is not None
        recognize(self._exchange, told, self._order_id)

    def cancel(self) -> None:
        """End the call; the receiver gets no further callback."""
        self._let_go()
        if self._exchange is not None:
            self._exchange.cancel()
        elif self._waiting is not None:
            self._waiting.cancel()

    def cut(self) -> None:
        """End the call by closing its connection, for an instance without abort."""
        receiver = self._receiver
        self.cancel()
        receiver.on_error(InstanceError("it offers no abort, so the connection was closed"))

    def pause(self) -> None:
        """Stop reading the answer for now."""
        self._paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume(self) -> None:
        self._paused = False
        if self._exchange is not None:
            self._exchange.resume()

    def on_end(self) -> None:
        self._register.pop(self._order_id, None)
        self._receiver.on_end()  # if this raises, its `on_error` is called
        self._let_go()

    def on_error(self, error: Exception) -> None:
        receiver = self._receiver
        self._let_go()
        receiver.on_error(as_instance_error(error))

    def _let_go(self) -> None:
        self._register.pop(self._order_id, None)
        self._receiver = _NOBODY
        self.on_head = _NO_HEAD
        self.on_data = _NO_DATA


class ProxyCalls:
    """The gateway's calls for orders on an instance's pool; `open` has them by order.

    `key_line`: the key that every call must carry in place of the client's.
    """

    def __init__(self, pool: Pool, key_line: bytes, throttle: Throttle) -> None:
        self.open: dict[str, ProxyCall] = {}
        self._pool = pool
        self._key_line = key_line
        self._throttle = throttle

    def pass_on(
        self,
        order_id: str,
        engine_id: str,
        path: str,
        header_lines: bytes,
        body: bytes,
        receiver: Receiver,
    ) -> ProxyCall:
        """Make an order's call. An abort of the order uses `engine_id`. The receiver gets no
        callback before this has returned. Raises as `ProxyCall.send`."""
        proxy_call = ProxyCall(order_id, engine_id, receiver, self.open)
        lines = self._key_line + header_lines
        send = partial(self._pool.send, "POST", path, lines, body, proxy_call)
        proxy_call.send(self._throttle, send)
        return proxy_call


def as_instance_error(error: Exception, what: str = "") -> Exception:
    """An exchange's error as an InstanceError, with the prefix `what`; others stay unchanged."""
    if isinstance(error, NotConnected):
        return InstanceUnreached(f"{what}{error}")
    if isinstance(error, ExchangeError):
        return ConnectionBroken(f"{what}{error}")
    return error
