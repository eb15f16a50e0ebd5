"""The simulated instance on the clock of an event loop, with tokens: an `InstanceClient`.

On the loop of `simulators.replay.virtual_loop` it is exact. On a real loop it is as exact as the
loop's timers, and delays do not add up: simulated times stay those of the model.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from rollout_sched.live.ports import (
    Description,
    Gauges,
    InstanceError,
    OnTokens,
    Order,
    RequestRejected,
)
from rollout_sched.simulators.fake_instance import tokens as text
from rollout_sched.simulators.fake_instance.answers import (
    CountedOutput,
    Lengths,
    OnProgress,
    OpenAnswer,
    OpenAnswers,
    TokenStreams,
)
from rollout_sched.simulators.instance import (
    Ended,
    InstanceSpec,
    Outcome,
    PauseMode,
    SimInstance,
    SimRequest,
)


class Pauses:
    """The pauses of one instance. As in vLLM, a paused instance shows its earlier gauges."""

    def __init__(self, engine: SimInstance) -> None:
        self._engine = engine
        self._asked: deque[tuple[PauseMode, asyncio.Future[None]]] = deque()
        self._frozen = False
        self._gauges = _look(engine)

    def ask(self, mode: PauseMode) -> asyncio.Future[None]:
        """Done when the instance is paused. Its gauges freeze now, unless the mode finishes running
        requests first."""
        if mode != "wait":
            self._frozen = True
        paused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append((mode, paused))
        return paused

    def confirm(self, mode: PauseMode) -> None:
        """The instance is paused."""
        asked = next(pause for pause in self._asked if pause[0] == mode)
        self._asked.remove(asked)
        if mode == "wait":
            self._gauges = _look(self._engine)
            self._frozen = self._engine.paused  # it may have been resumed meanwhile
        if not asked[1].done():
            asked[1].set_result(None)

    def end(self) -> None:
        """The instance resumes."""
        self._frozen = False

    def gauges(self) -> Gauges:
        if not self._frozen:
            self._gauges = _look(self._engine)
        return self._gauges

    def fail(self, error: Exception) -> None:
        """All waiters get an error."""
        for _, paused in self._asked:
            if not paused.done():
                paused.set_exception(error)
        self._asked.clear()


def _look(engine: SimInstance) -> Gauges:
    gauges = engine.gauges()
    return Gauges(
        gauges.running,
        gauges.waiting,
        gauges.kv_usage,
        gauges.preemptions,
        gauges.prefill_tokens,
        gauges.cached_tokens,
        gauges.reprefilled_tokens,
        gauges.generated_tokens,
        drafts=gauges.drafts,
        drafted_tokens=gauges.drafted_tokens,
        accepted_tokens=gauges.accepted_tokens,
    )


class RealtimeClock:
    """Simulated seconds on the running event loop, `speed` per second of the loop."""

    def __init__(self, speed: float) -> None:
        self.now = 0.0
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._speed = speed

    def tick(self) -> float:
        """Simulated seconds since the start. A timer may fire slightly early, but time never goes
        back."""
        self.now = max(self.now, (self._loop.time() - self._start) * self._speed)
        return self.now

    def set_speed(self, speed: float) -> None:
        """Applies from now on. Timers set with `call_at` must be set again."""
        self._start = self._loop.time() - self.tick() / speed
        self._speed = speed

    def reach(self, at: float) -> float:
        """Go to the present simulated time, but at least to `at`."""
        self.now = max(self.now, at)
        return self.tick()

    def call_at(self, at: float, callback: Callable[[float], None]) -> asyncio.TimerHandle:
        return self._loop.call_at(self._start + at / self._speed, callback, at)


class Alarm:
    """Calls `on_due` with the time when an output of the watched objects is due.

    `next_at` returns the time of the next output, in simulated seconds; it may be infinite.
    """

    def __init__(
        self,
        clock: RealtimeClock,
        next_at: Callable[[], float],
        on_due: Callable[[float], None],
    ) -> None:
        self._clock = clock
        self._next_at = next_at
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        self._planning = False
        self._closed = False

    def change(self) -> None:
        """The result of `next_at` may have changed. The timer is set after all inputs of the same
        moment, so that simultaneous outputs of two instances come in the order of their first
        inputs."""
        if not self._planning:
            self._planning = True
            asyncio.get_running_loop().call_soon(self._plan)

    def close(self) -> None:
        """Never call again."""
        self._closed = True
        self._cancel()

    def _plan(self) -> None:
        self._planning = False
        self._cancel()
        if not self._closed:
            at = self._next_at()
            if at < math.inf:
                self._timer = self._clock.call_at(at, self._on_due)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ClockedInstance:
    """A simulated instance on the clock of an event loop: inputs count now, outputs come when due.
    Calls `on_outcome` with each outcome of a `SimInstance` (see its docstrings) when it happens.

    `speed` simulated seconds pass per second of the running loop.
    """

    def __init__(
        self, instance: SimInstance, speed: float, on_outcome: Callable[[Outcome], None]
    ) -> None:
        self._instance = instance
        self._on_outcome = on_outcome
        self._streams = TokenStreams(instance)
        self._clock = RealtimeClock(speed)
        self._alarm = Alarm(self._clock, self._next_at, self._listen)

    def submit(
        self, request: SimRequest, every: int = 0, on_progress: OnProgress | None = None
    ) -> None:
        """`on_progress` is called for every `every` more tokens. Raises ValueError."""
        self._instance.submit(request, self._clock.tick())
        if every and on_progress is not None:
            self._streams.add(request.attempt, every, on_progress)
        self._alarm.change()

    def abort(self, attempt: int) -> None:
        self._instance.abort(attempt, self._clock.tick())
        self._alarm.change()

    def stop_telling(self, attempt: int) -> None:
        """Report no more progress of this attempt."""
        self._streams.remove(attempt)

    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        self._instance.pause(self._clock.tick(), mode, clear_cache)
        self._alarm.change()

    def resume(self) -> None:
        self._instance.resume(self._clock.tick())
        self._alarm.change()

    def set_version(self, version: int) -> None:
        self._instance.set_version(version, self._clock.tick())
        self._alarm.change()

    def update_drafter(self) -> None:
        self._instance.update_drafter(self._clock.tick())
        self._alarm.change()

    def clear_cache(self, *, preempt: bool) -> bool:
        """vLLM's reset_prefix_cache; False if it fails because blocks are in use."""
        self._listen(self._clock.tick())
        in_use = self._instance.gauges().running > 0
        self._instance.clear_cache(self._clock.now, preempt)
        self._alarm.change()
        return preempt or not in_use

    def set_speed(self, speed: float) -> None:
        """From now on, `speed` simulated seconds pass per second."""
        self._clock.set_speed(speed)
        self._alarm.change()

    async def catch_up(self) -> None:
        """Returns when everything that is due by now has been reported."""
        while self._instance.next_at() <= self._clock.tick():
            self._listen(self._clock.now)
            await asyncio.sleep(0)  # whoever got an answer runs first
        self._instance.advance(self._clock.now)  # no new look at the clock: nothing more is due

    def close(self) -> None:
        """Report nothing more."""
        self._alarm.close()

    def _next_at(self) -> float:
        return min(self._instance.next_at(), self._streams.next_at())

    def _listen(self, at: float) -> None:
        """Report what has happened by now."""
        clock = self._clock
        for outcome in self._instance.advance(clock.reach(at)):
            if isinstance(outcome, Ended):
                self._streams.remove(outcome.attempt)
            self._on_outcome(outcome)
        self._streams.advance(clock.now)
        self._alarm.change()


#: The default model name.
MODEL = "simulated"


class RealtimeInstance:
    """One simulated instance; `speed` simulated seconds pass per second of the running loop.

    `clocked` is that instance, without tokens. `version` is the initial one. With `versioned_text`,
    another version gives another text. `vocabulary`: the token
    ids.

    KV identity is derived from the tokens (see `tokens`): requests with equal prompts
    share their KV, and a context that contains one of our responses finds the KV of that response's
    line if the salt is the same. Two limits: prompts that are equal only in part share nothing, and
    the tokens after a response (an observation) count as equal whenever the response is. If two
    running attempts have the same text, as greedy siblings do, only one finds its own KV again.
    """

    def __init__(
        self,
        name: str,
        spec: InstanceSpec,
        lengths: Lengths,
        *,
        speed: float = 1.0,
        version: int = 0,
        versioned_text: bool = False,
        vocabulary: text.Vocabulary = text.LARGEST,
    ) -> None:
        self._name = name
        self._simulated = SimInstance(spec, version)
        self._description = Description(
            spec.max_num_seqs,
            spec.kv_blocks * spec.block_size,
            spec.max_model_len,
            version,
            model=MODEL,
            capabilities=frozenset(
                {"generate", "abort", "pause", "set_version", "weight_info", "weight_versions"}
            ),
        )
        self.clocked = ClockedInstance(self._simulated, speed, self._hear)
        self._closed = False
        self._vocabulary = vocabulary
        self._answers = OpenAnswers(lengths, versioned_text, vocabulary)
        self._pauses = Pauses(self._simulated)

    @property
    def name(self) -> str:
        return self._name

    @property
    def paused(self) -> bool:
        return self._simulated.paused

    # -- the port --------------------------------------------------------------------------

    async def describe(self) -> Description:
        self._check_open()
        return msgspec.structs.replace(self._description, version=self._simulated.version)

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> CountedOutput:
        self._check_open()
        number = self._submit(order, on_tokens)
        answer = self._answers.by_number[number]
        try:
            output = await answer.answer
        except asyncio.CancelledError:
            if self._answers.close(number) is not None:
                self.clocked.stop_telling(number)
                self._abort(number, answer)
            raise
        rest = answer.streamed
        if on_tokens is not None and rest < len(output.token_ids):
            logprobs = output.logprobs
            on_tokens(output.token_ids[rest:], None if logprobs is None else logprobs[rest:])
        return output

    async def detokenize(self, token_ids: Sequence[int]) -> str | None:
        return text.decode(token_ids, self._vocabulary)

    async def abort(self, order_id: str) -> None:
        self._check_open()
        for number in self._answers.numbers_of(order_id):
            self._abort(number, self._answers.by_number[number])

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Also supports vLLM's mode "wait", which finishes running requests first."""
        self._check_open()
        if mode != "wait":
            await self.gauges()
        paused = self._pauses.ask(mode)
        self.clocked.pause(mode, clear_cache)
        await paused

    async def resume(self) -> None:
        self._check_open()
        self._pauses.end()
        self.clocked.resume()

    async def set_version(self, version: int) -> None:
        self._check_open()
        self.clocked.set_version(version)

    async def gauges(self) -> Gauges:
        """The current gauges; while paused, those from before the pause, as in vLLM."""
        self._check_open()
        await self.clocked.catch_up()
        return self._pauses.gauges()

    async def weight_version(self) -> int | None:
        self._check_open()
        return self._simulated.version

    async def is_paused(self) -> bool:
        self._check_open()
        return self.paused

    async def close(self) -> None:
        """Waiting requests and all later calls get an InstanceError."""
        self._closed = True
        self.clocked.close()
        error = InstanceError(f"{self._name} was closed")
        for answer in self._answers.by_number.values():
            if not answer.answer.done():
                answer.answer.set_exception(error)
        self._answers.by_number.clear()
        self._pauses.fail(error)

    # -- beyond the port -------------------------------------------------------------------

    def abort_all(self, prefix: str = "") -> int:
        """End every request whose id begins so, with the tokens it has; returns how many."""
        ended = {n: a for n, a in self._answers.by_number.items() if a.id.startswith(prefix)}
        for number, answer in ended.items():
            self._abort(number, answer)
        return len(ended)

    def runs(self, order_id: str) -> bool:
        """Whether a request with this id is in flight."""
        return bool(self._answers.numbers_of(order_id))

    # -- inside ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise InstanceError(f"{self._name} was closed")

    def _submit(self, order: Order, on_tokens: OnTokens | None) -> int:
        request, answer = self._answers.read(order, on_tokens)
        number = request.attempt
        telling = None if on_tokens is None else self._streaming(number, answer)
        try:
            self.clocked.submit(request, order.stream_every, telling)
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        answer.answer = asyncio.get_running_loop().create_future()
        self._answers.open(number, answer)
        return number

    def _abort(self, number: int, answer: OpenAnswer) -> None:
        self.clocked.abort(number)
        self._answers.stop_writing(answer)

    def _hear(self, outcome: Outcome) -> None:
        if isinstance(outcome, Ended):
            self._answer(outcome)
        else:
            self._pauses.confirm(outcome.mode)

    def _answer(self, ended: Ended) -> None:
        answer = self._answers.close(ended.attempt)
        if answer is None:
            return  # nobody waits for it any more
        if not answer.answer.done():
            answer.answer.set_result(self._answers.output(answer, ended))

    def _streaming(self, number: int, answer: OpenAnswer) -> OnProgress:
        def progress(tokens: int, step: int) -> None:
            assert answer.on_tokens is not None
            spans = self._simulated.spans_of(number, tokens)
            answer.on_tokens(*self._answers.chunk(answer, tokens, spans))

        return progress
