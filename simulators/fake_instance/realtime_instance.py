"""The simulated instance on the clock of an event loop, with tokens: an `InstanceClient`.

On the loop of `simulators.replay.virtual_loop` it is exact, on a real one as exact as that loop's
timers, and what is late does not add up: the simulated times stay those of the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
from rollout_sched.simulators.fake_instance.open_answers import Lengths, OpenAnswer, OpenAnswers
from rollout_sched.simulators.fake_instance.pauses import Pauses
from rollout_sched.simulators.fake_instance.realtime_clock import Alarm, RealtimeClock
from rollout_sched.simulators.fake_instance.token_streams import TokenStreams
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import Ended, PauseMode
from rollout_sched.simulators.instance.spec import InstanceSpec

#: The model it says it has, if nobody says another.
MODEL = "simulated"


class RealtimeInstance:
    """One simulated instance; `speed` simulated seconds pass in a second of the running loop.

    `version` is the one it starts with. With `versioned_text` another version makes another text,
    in a share `drift` of the places. `vocabulary`: which ids there are.

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
        versioned_text: bool = False,
        drift: float = 1.0,
        vocabulary: text.Vocabulary = text.LARGEST,
    ) -> None:
        self._name = name
        self._engine = SimInstance(spec, version)
        self._streams = TokenStreams(self._engine)
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
        self._clock = RealtimeClock(speed)
        self._alarm = Alarm(self._clock, self._next_at, self._listen)
        self._closed = False
        self._answers = OpenAnswers(lengths, versioned_text, drift, vocabulary)
        self._pauses = Pauses(self._engine)

    @property
    def name(self) -> str:
        return self._name

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
        answer = self._answers.by_number[number]
        try:
            output = await answer.answer
        except asyncio.CancelledError:
            if self._answers.close(number) is not None:
                self._streams.remove(number)
                self._abort(number, answer)
            raise
        rest = answer.streamed
        if on_tokens is not None and rest < len(output.token_ids):
            logprobs = output.logprobs
            on_tokens(output.token_ids[rest:], None if logprobs is None else logprobs[rest:])
        return output

    async def abort(self, order_id: str) -> None:
        self._check_open()
        for number in self._answers.of(order_id):
            self._abort(number, self._answers.by_number[number])

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Also takes vLLM's mode "wait": running requests are finished first."""
        self._check_open()
        if mode != "wait":
            await self.gauges()
        paused = self._pauses.ask(mode)
        self._engine.pause(self._clock.tick(), mode, clear_cache)
        self._alarm.change()
        await paused

    async def resume(self) -> None:
        self._check_open()
        self._pauses.end()
        self._engine.resume(self._clock.tick())
        self._alarm.change()

    async def set_version(self, version: int) -> None:
        self._check_open()
        self._engine.set_version(version, self._clock.tick())
        self._alarm.change()

    async def gauges(self) -> Gauges:
        """As of now; while it is paused, those of before, as in vLLM."""
        self._check_open()
        while self._engine.next_at() <= self._clock.tick():
            self._listen(self._clock.now)
            await asyncio.sleep(0)  # whoever was answered goes first
        self._engine.advance(self._clock.tick())  # nothing is due any more
        return self._pauses.gauges()

    async def weight_version(self) -> int | None:
        self._check_open()
        return self._engine.version

    async def is_paused(self) -> bool:
        self._check_open()
        return self.paused

    async def close(self) -> None:
        """Whoever waits for an answer gets an InstanceError, as of every later call."""
        self._closed = True
        self._alarm.close()
        error = InstanceError(f"{self._name} was closed")
        for answer in self._answers.by_number.values():
            if not answer.answer.done():
                answer.answer.set_exception(error)
        self._answers.by_number.clear()
        self._pauses.fail(error)

    # -- beyond the port -------------------------------------------------------------------

    def set_speed(self, speed: float) -> None:
        """So many simulated seconds pass in a second from now on."""
        self._clock.set_speed(speed)
        self._alarm.change()

    def abort_all(self) -> int:
        """Every request ends with what it has; returns how many."""
        for number, answer in self._answers.by_number.items():
            self._abort(number, answer)
        return len(self._answers.by_number)

    def clear_cache(self, preempt: bool = False) -> bool:
        """vLLM's reset_prefix_cache; False if it cannot be, for blocks are in use."""
        self._engine.advance(self._clock.tick())
        in_use = self._engine.gauges().running > 0
        self._engine.clear_cache(self._clock.now, preempt)
        self._alarm.change()
        return preempt or not in_use

    # -- inside ----------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise InstanceError(f"{self._name} was closed")

    def _submit(self, order: Order, on_tokens: OnTokens | None) -> int:
        request, answer = self._answers.read(order, on_tokens)
        number = request.attempt
        try:
            self._engine.submit(request, self._clock.tick())
        except ValueError as error:
            raise RequestRejected(str(error)) from None
        answer.answer = asyncio.get_running_loop().create_future()
        self._answers.open(number, answer)
        if order.stream_every and on_tokens is not None:
            self._streams.add(number, order.stream_every, self._streaming(number, answer))
        self._alarm.change()
        return number

    def _abort(self, number: int, answer: OpenAnswer) -> None:
        self._engine.abort(number, self._clock.tick())
        self._answers.stop_writing(answer)
        self._alarm.change()

    def _next_at(self) -> float:
        return min(self._engine.next_at(), self._streams.next_at())

    def _listen(self, at: float) -> None:
        """Pass on what has happened by now."""
        clock = self._clock
        for outcome in self._engine.advance(clock.reach(at)):
            if isinstance(outcome, Ended):
                self._answer(outcome)
            else:
                self._pauses.confirm(outcome.mode)
        self._streams.advance(clock.now)
        self._alarm.change()

    def _answer(self, ended: Ended) -> None:
        answer = self._answers.close(ended.attempt)
        if answer is None:
            return  # nobody waits any more
        self._streams.remove(ended.attempt)
        if not answer.answer.done():
            answer.answer.set_result(self._answers.output(answer, ended))

    def _streaming(self, number: int, answer: OpenAnswer) -> Callable[[int, int], None]:
        def progress(tokens: int, step: int) -> None:
            assert answer.on_tokens is not None
            spans = self._engine.spans_of(number, tokens)
            answer.on_tokens(*self._answers.chunk(answer, tokens, spans))

        return progress
