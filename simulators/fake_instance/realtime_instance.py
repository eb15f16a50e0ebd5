"""The simulated instance on the clock of an event loop, with tokens: an `InstanceClient`.

On the loop of `simulators.replay.virtual_loop` it is exact, on a real one as exact as that loop's
timers, and what is late does not add up: the simulated times stay those of the model.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from rollout_sched.live.ports import (
    Description,
    Gauges,
    InstanceError,
    OnTokens,
    Order,
    Output,
    RequestRejected,
)
from rollout_sched.simulators.fake_instance import synthetic_tokens as text
from rollout_sched.simulators.fake_instance.token_streams import TokenStreams
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import Ended, PauseMode, SimRequest
from rollout_sched.simulators.instance.spec import InstanceSpec

Stream = tuple[int, ...]


class Response(NamedTuple):
    """What an order is to begin or to go on with; `made_tokens` of it are in the context."""

    name: int
    made_tokens: int


#: How many tokens a response has when it stops by itself, those made before included.
Lengths = Callable[[Order, Response], int]


class _Answering:
    """An attempt under way: its text, what was streamed of it, and who waits for it."""

    __slots__ = ("answer", "id", "logprobs", "name", "on_tokens", "start", "stream", "streamed")

    def __init__(self, order: Order, name: int, start: int, on_tokens: OnTokens | None) -> None:
        self.id = order.id
        self.name = name
        self.start = start  # tokens of this response that the context holds
        self.logprobs = order.sampling.get("logprobs") is not None
        self.on_tokens = on_tokens
        self.streamed = 0
        self.stream: tuple[str, bytes, Stream] = ("", b"", ())
        self.answer: asyncio.Future[Output]


class RealtimeInstance:
    """One simulated instance; `speed` simulated seconds pass in a second of the running loop.

    `version` is the one it starts with. With `versioned_text` another version makes another text.

    KV identity is read off the tokens (see `synthetic_tokens`): requests with equal prompts share
    theirs, and a context that holds a response of ours finds the KV of that response's line if the
    salt is the same. Two limits: prompts that are equal only in part share nothing, and what
    follows a response (an observation) is taken for the same whenever the response is. Where two
    running attempts have one text, as greedy siblings do, only one finds its own KV again.
    """

    def __init__(
        self,
        name: str,
        spec: InstanceSpec,
        lengths: Lengths,
        *,
        speed: float = 1.0,
        version: int = 0,
        model: str = "simulated",
        started_at: float = 0.0,
        versioned_text: bool = False,
    ) -> None:
        self._name = name
        self._lengths = lengths
        self._speed = speed
        self._versioned = versioned_text
        self._engine = SimInstance(spec, version)
        self._streams = TokenStreams(self._engine)
        self._description = Description(
            spec.max_num_seqs,
            spec.kv_blocks * spec.block_size,
            spec.max_model_len,
            version,
            started_at,
            model,
            frozenset({"generate", "abort", "pause", "weight_versions"}),
        )
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._now = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._planning = False
        self._closed = False
        self._attempts = 0
        self._answering: dict[int, _Answering] = {}
        self._numbers: dict[str, list[int]] = {}
        self._writing: set[tuple[str, bytes, Stream]] = set()
        self._pausing: deque[tuple[PauseMode, asyncio.Future[None]]] = deque()
        self._frozen = False
        self._gauges = self._look()

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def spec(self) -> InstanceSpec:
        return self._engine.spec

    @property
    def paused(self) -> bool:
        return self._engine.paused

    # -- the port --------------------------------------------------------------------------

    async def describe(self) -> Description:
        self._check_open()
        return msgspec.structs.replace(self._description, version=self._engine.version)

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
        self._check_open()
        number = self._submit(order, on_tokens)
        answering = self._answering[number]
        try:
            output = await answering.answer
        except asyncio.CancelledError:
            if self._answering.pop(number, None) is not None:
                self._forget(number, answering)
                self._abort(number, answering)
            raise
        rest = answering.streamed
        if on_tokens is not None and rest < len(output.token_ids):
            logprobs = output.logprobs
            on_tokens(output.token_ids[rest:], None if logprobs is None else logprobs[rest:])
        return output

    async def abort(self, order_id: str) -> None:
        self._check_open()
        for number in self._numbers.get(order_id, ()):
            self._abort(number, self._answering[number])

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Also takes vLLM's mode "wait": running requests are finished first."""
        self._check_open()
        if mode != "wait":
            await self.gauges()
            self._frozen = True
        paused: asyncio.Future[None] = self._loop.create_future()
        self._pausing.append((mode, paused))
        self._engine.pause(self._tick(), mode, clear_cache)
        self._change()
        await paused

    async def resume(self) -> None:
        self._check_open()
        self._frozen = False
        self._engine.resume(self._tick())
        self._change()

    async def set_version(self, version: int) -> None:
        self._check_open()
        self._engine.set_version(version, self._tick())
        self._change()

    async def gauges(self) -> Gauges:
        """As of now; while it is paused, those of before, as in vLLM."""
        self._check_open()
        while self._engine.next_at() <= self._tick():
            self._listen(self._now)
            await asyncio.sleep(0)  # whoever was answered goes first
        self._engine.advance(self._tick())  # says nothing
        if not self._frozen:
            self._gauges = self._look()
        return self._gauges

    async def close(self) -> None:
        """Whoever waits for an answer gets an InstanceError, as of every later call."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        error = InstanceError(f"{self._name} was closed")
        for answering in self._answering.values():
            _fail(answering.answer, error)
        for _, paused in self._pausing:
            _fail(paused, error)
        self._answering.clear()
        self._pausing.clear()

    # -- beyond the port -------------------------------------------------------------------

    def abort_all(self) -> int:
        """Every request ends with what it has; returns how many."""
        for number, answering in self._answering.items():
            self._abort(number, answering)
        return len(self._answering)

    def clear_cache(self, preempt: bool = False) -> bool:
        """vLLM's reset_prefix_cache; False if it cannot be, for requests hold blocks."""
        self._engine.advance(self._tick())
        held = self._engine.running > 0
        self._engine.clear_cache(self._now, preempt)
        self._change()
        return preempt or not held

    # -- inside ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise InstanceError(f"{self._name} was closed")

    def _tick(self) -> float:
        """Simulated seconds since the start. A timer may come a little early; time never goes
        back."""
        self._now = max(self._now, (self._loop.time() - self._start) * self._speed)
        return self._now

    def _submit(self, order: Order, on_tokens: OnTokens | None) -> int:
        try:
            context = text.read(order.token_ids)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        self._attempts += 1
        number = self._attempts
        name = context.name or text.name(context, _draw(order, number))
        answering = _Answering(order, name, context.made_tokens, on_tokens)
        length = self._lengths(order, Response(name, context.made_tokens))
        # One line of text has one writer; a second one gets a line of its own.
        stream: Stream = (context.stream or name,)
        if (order.salt, context.prompt, stream) in self._writing:
            stream = (*stream, number)
        request = SimRequest(
            number,
            len(order.token_ids),
            max(1, length - context.made_tokens),
            order.max_new_tokens,
            prompt_stream=context.prompt,
            shared_tokens=context.prompt_tokens,
            stream=stream,
            known_tokens=context.known_tokens,
            salt=order.salt,
            priority=order.sampling.get("priority", 0),
        )
        try:
            self._engine.submit(request, self._tick())
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        answering.stream = (order.salt, context.prompt, stream)
        answering.answer = self._loop.create_future()
        self._writing.add(answering.stream)
        self._answering[number] = answering
        self._numbers.setdefault(order.id, []).append(number)
        if order.stream_every and on_tokens is not None:
            self._streams.add(number, order.stream_every, self._streaming(number, answering))
        self._change()
        return number

    def _abort(self, number: int, answering: _Answering) -> None:
        self._engine.abort(number, self._tick())
        self._writing.discard(answering.stream)
        self._change()

    def _forget(self, number: int, answering: _Answering) -> None:
        self._streams.remove(number)
        self._writing.discard(answering.stream)
        numbers = self._numbers[answering.id]
        numbers.remove(number)
        if not numbers:
            del self._numbers[answering.id]

    def _change(self) -> None:
        """Something was put in. Planning waits for all that is put in at once: what two instances
        say at the same time then comes in the order in which they were first told something."""
        if not self._planning:
            self._planning = True
            self._loop.call_soon(self._plan)

    def _plan(self) -> None:
        self._planning = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = min(self._engine.next_at(), self._streams.next_at())
        if at < math.inf and not self._closed:
            self._timer = self._loop.call_at(self._start + at / self._speed, self._listen, at)

    def _listen(self, at: float) -> None:
        """Pass on what has been said by now."""
        self._now = max(self._now, at)
        for word in self._engine.advance(self._tick()):
            if isinstance(word, Ended):
                self._answer(word)
            else:
                self._confirm(word.mode)
        self._streams.advance(self._now)
        self._change()

    def _confirm(self, mode: PauseMode) -> None:
        waiting = next(pause for pause in self._pausing if pause[0] == mode)
        self._pausing.remove(waiting)
        if mode == "wait":
            self._gauges = self._look()
            self._frozen = self._engine.paused  # it may have been resumed meanwhile
        if not waiting[1].done():
            waiting[1].set_result(None)

    def _answer(self, ended: Ended) -> None:
        answering = self._answering.pop(ended.attempt, None)
        if answering is None:
            return  # nobody waits any more
        self._forget(ended.attempt, answering)
        ids, logprobs = self._text(answering, 0, ended.spans)
        if not answering.answer.done():
            answering.answer.set_result(Output(ids, logprobs, ended.reason, ended.spans))

    def _streaming(self, number: int, answering: _Answering) -> Callable[[int, int], None]:
        def progress(tokens: int, step: int) -> None:
            self._send(answering, tokens, self._engine.spans_by(number, step))

        return progress

    def _send(self, answering: _Answering, tokens: int, spans: text.Spans) -> None:
        assert answering.on_tokens is not None
        new = _without(spans, answering.streamed)
        ids, logprobs = self._text(answering, answering.streamed, new)
        answering.streamed = tokens
        answering.on_tokens(ids, logprobs)

    def _text(
        self, answering: _Answering, skip: int, spans: text.Spans
    ) -> tuple[list[int], list[float] | None]:
        start = answering.start + skip
        if not self._versioned:
            spans = [(0, sum(count for _, count in spans))]
        ids = text.tokens(answering.name, start, spans)
        wanted = answering.logprobs
        return ids, text.logprobs(answering.name, start, len(ids)) if wanted else None

    def _look(self) -> Gauges:
        gauges = self._engine.gauges()
        return Gauges(
            gauges.running,
            gauges.waiting,
            gauges.kv_usage,
            gauges.preemptions,
            gauges.prefill_tokens,
            gauges.cached_tokens,
            gauges.reprefilled_tokens,
            gauges.generated_tokens,
        )


def _draw(order: Order, number: int) -> str:
    """What a new response depends on besides its context: nothing if it is greedy."""
    sampling = order.sampling
    if sampling.get("temperature") == 0:
        return ""
    seed = sampling.get("seed")
    return f"{order.id} {number}" if seed is None else f"seed {seed}"


def _without(spans: text.Spans, tokens: int) -> list[tuple[int, int]]:
    """The spans of what comes after the first `tokens` tokens."""
    rest: list[tuple[int, int]] = []
    for version, count in spans:
        kept = max(0, count - tokens)
        tokens = max(0, tokens - count)
        if kept:
            rest.append((version, kept))
    return rest


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
