"""The simulated instance on the clock of an event loop, with tokens: an `InstanceClient`.

On the loop of `simulators.replay.virtual_loop` it is exact. On a real loop it is as exact as the
loop's timers, and delays do not add up: simulated times stay those of the model.
"""

from __future__ import annotations

import asyncio

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
from rollout_sched.simulators.fake_instance.clocked_instance import ClockedInstance
from rollout_sched.simulators.fake_instance.open_answers import Lengths, OpenAnswer, OpenAnswers
from rollout_sched.simulators.fake_instance.pauses import Pauses
from rollout_sched.simulators.fake_instance.token_streams import OnProgress
from rollout_sched.simulators.instance.sim_instance import SimInstance
from rollout_sched.simulators.instance.sim_request import Ended, Outcome, PauseMode
from rollout_sched.simulators.instance.spec import InstanceSpec

#: The default model name.
MODEL = "simulated"


class RealtimeInstance:
    """One simulated instance; `speed` simulated seconds pass per second of the running loop.

    `clocked` is that instance, without tokens. `version` is the initial one. With `versioned_text`,
    another version gives another text, in a share `drift` of the tokens. `vocabulary`: the token
    ids.

    KV identity is derived from the tokens (see `synthetic_tokens`): requests with equal prompts
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
        drift: float = 1.0,
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
        self._answers = OpenAnswers(lengths, versioned_text, drift, vocabulary)
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

    async def generate(self, order: Order, on_tokens: OnTokens | None = None) -> Output:
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

    async def abort(self, order_id: str) -> None:
        self._check_open()
        for number in self._answers.of(order_id):
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

    def abort_all(self) -> int:
        """End every request with the tokens it has; returns how many."""
        for number, answer in self._answers.by_number.items():
            self._abort(number, answer)
        return len(self._answers.by_number)

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
