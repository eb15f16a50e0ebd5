"""An instance that does what a test says, when it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from rollout_sched.core.model.events import Spans
from rollout_sched.live.ports import (
    Description,
    Gauges,
    InstanceError,
    InstanceGone,
    OnTokens,
    Order,
    Output,
)


class Scripted:
    """Records what it is asked; a test answers each order by hand."""

    labelled = False  # its tokens, by us
    asks_versions = False
    takes_openai = True
    models = ("a model",)

    def __init__(self, name: str = "i0", *, slots: int = 8, kv_tokens: int = 10_000) -> None:
        self.name = name
        self.description = Description(slots, kv_tokens, kv_tokens, started_at=1.0)
        self.calls: list[Any] = []
        self.orders: dict[str, Order] = {}
        self.streams: dict[str, OnTokens | None] = {}
        self.cancelled: list[str] = []
        self.closed = False
        self.dead = False
        self.mute = False  # to polls
        self.weights: int | None = None  # the version that it says it has
        self.paused: bool | None = False
        self.texts: Mapping[int, str] | None = None  # of its tokens
        self.questions: list[str] = []  # of its weights and pauses
        self.report = Gauges(0, 0, 0.0)
        self.obey: Callable[[str], None] = lambda call: None
        self._answers: dict[str, asyncio.Future[Output]] = {}
        self._asked = asyncio.Event()

    def describes(self, **fields: Any) -> None:
        """From now on it describes itself with these."""
        self.description = msgspec.structs.replace(self.description, **fields)

    async def describe(self) -> Description:
        if self.dead:
            raise InstanceGone(f"{self.name}: connection refused")
        return self.description

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        self.orders[order.id] = order
        self.streams[order.id] = on_tokens
        answer = self._answers[order.id] = asyncio.get_running_loop().create_future()
        self._asked.set()
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(order.id)
            raise

    async def detokenize(self, token_ids: Sequence[int]) -> str | None:
        return None if self.texts is None else "".join([self.texts[token] for token in token_ids])

    async def abort(self, order_id: str) -> None:
        self._note("abort", order_id)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        self._note("pause", mode, clear_cache)

    async def resume(self) -> None:
        self._note("resume")

    async def set_version(self, version: int) -> None:
        self._note("version", version)

    async def gauges(self) -> Gauges:
        if self.mute:
            raise InstanceError(f"{self.name} did not answer in time")
        if self.dead:
            raise InstanceGone(f"{self.name}: connection refused")
        return self.report

    async def weight_version(self) -> int | None:
        self.questions.append("weights")
        return self.weights

    async def is_paused(self) -> bool | None:
        self.questions.append("paused")
        return self.paused

    async def close(self) -> None:
        self.closed = True

    def _note(self, *call: Any) -> None:
        self.calls.append(call if len(call) > 1 else call[0])
        self.obey(str(call[0]))

    # -- what a test does ------------------------------------------------------------------

    async def order(self, number: int = 0) -> Order:
        """The order that came as the so-maniest, waited for."""
        while len(self.orders) <= number:
            self._asked.clear()
            await asyncio.wait_for(self._asked.wait(), 5)
        return list(self.orders.values())[number]

    async def answer(
        self, number: int, token_ids: list[int], finish: Any = "stop", spans: Spans = ()
    ) -> None:
        order = await self.order(number)
        logprobs = [-0.5] * len(token_ids) if order.sampling.get("logprobs") is not None else None
        self._answers[order.id].set_result(Output(token_ids, logprobs, finish, spans))

    async def fail(self, number: int, error: Exception) -> None:
        order = await self.order(number)
        self._answers[order.id].set_exception(error)

    async def stream(self, number: int, token_ids: list[int]) -> None:
        order = await self.order(number)
        on_tokens = self.streams[order.id]
        assert on_tokens is not None
        on_tokens(token_ids, [-0.5] * len(token_ids) if "logprobs" in order.sampling else None)


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Let the loop turn until something is so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)
