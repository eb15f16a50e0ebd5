"""A call of an order that somebody else, the gateway, makes on an instance's pool."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from rollout_sched.integrations.http.exchange import ExchangeError
from rollout_sched.integrations.vllm.throttle import Throttle
from rollout_sched.live.ports import InstanceError


class Passing:
    """Bounds the rate of such calls, knows what an abort must name, and says what went wrong as
    InstanceError. Use it as an async context manager around the call.

    `register` holds it under its order's id meanwhile.
    """

    __slots__ = ("_cut", "_order_id", "_register", "_task", "_throttle", "engine_id")

    def __init__(
        self, order_id: str, engine_id: str, register: dict[str, Passing], throttle: Throttle
    ) -> None:
        self.engine_id = engine_id
        self._order_id = order_id
        self._register = register
        self._throttle = throttle
        self._task: asyncio.Task[Any] | None = None
        self._cut = False

    def cut(self) -> None:
        """End the call from this side, where the instance offers no abort."""
        self._cut = True
        if self._task is not None:
            self._task.cancel()

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._register[self._order_id] = self
        try:
            await self._throttle()
        except BaseException:
            del self._register[self._order_id]
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del self._register[self._order_id]
        if self._cut and isinstance(error, asyncio.CancelledError):
            assert self._task is not None
            self._task.uncancel()
            raise InstanceError("it offers no abort, so the connection was cut") from None
        if isinstance(error, ExchangeError):
            raise InstanceError(str(error)) from error
