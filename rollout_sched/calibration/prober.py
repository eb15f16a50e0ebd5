"""Sends bursts to otherwise idle instances and measures their times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rollout_sched.calibration.bursts import Burst, BurstTime, DraftCounts
from rollout_sched.core.errors import CallerError
from rollout_sched.live.ports import (
    Gauges,
    InstanceClient,
    InstanceError,
    Order,
    Output,
    RequestRejected,
)

_T = TypeVar("_T")

#: As in RL: sampled, with the log-prob of each token, and without an early stop.
SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "logprobs": 0, "ignore_eos": True}

#: Token ids that every vocabulary has.
IDS = range(16, 256)

#: Seconds to wait until requests of others have ended, or for answers before the instance is asked
#: whether it still works on them; and between two polls.
_PATIENCE_S = 20.0
_POLL_S = 0.2


class Prober:
    """Measures several instances at once, with the same burst; seconds are the event loop's.

    seed       of the prompts; use another one for each calibration, or its prompts are cached
    sampling   sampling parameters of the requests: they affect the time, too
    disturbed  measurements thrown away because other requests were served meanwhile
    drafts     how often the instances drafted tokens in all bursts
    """

    def __init__(
        self,
        instances: Sequence[InstanceClient],
        seed: int,
        sampling: Mapping[str, Any] = SAMPLING,
    ) -> None:
        self.instances = list(instances)
        self.disturbed = 0
        self.drafts = 0
        self._sampling = sampling
        self._rng = random.Random(seed)
        self._run = f"calibrate-{self._rng.getrandbits(64):x}"
        self._sent = 0

    async def burst(self, burst: Burst) -> list[BurstTime]:
        """The times of each instance that served no other requests.

        Raises CallerError if an instance stays busy with other requests, or ends a response early;
        InstanceError if one fails.
        """
        times = await asyncio.gather(*(self._timed(each, burst) for each in self.instances))
        kept = [time for time in times if time is not None]
        self.disturbed += len(times) - len(kept)
        return kept

    async def finds_prefixes(self, instance: InstanceClient, tokens: int) -> bool | None:
        """Whether a repeated prompt of `tokens` tokens is found in the prefix cache; None if that
        is unclear."""
        prompt = self._prompt(tokens)
        before = await self._when_idle(instance)
        first_s = await self._of_prompt(instance, prompt)
        middle = await instance.gauges()
        again_s = await self._of_prompt(instance, prompt)
        after = await instance.gauges()
        if middle.prefill_tokens + middle.cached_tokens > (
            before.prefill_tokens + before.cached_tokens
        ):
            return after.cached_tokens - middle.cached_tokens > tokens / 2
        if again_s < first_s / 2:
            return True
        return None  # computing a short prompt again may be just as fast

    async def pause_s(self, instance: InstanceClient) -> float:
        """Seconds of a pause and the resume after it while no request runs."""
        await self._when_idle(instance)
        start = self._now()
        await instance.pause("keep", clear_cache=False)
        await instance.resume()
        return self._now() - start

    async def _timed(self, instance: InstanceClient, burst: Burst) -> BurstTime | None:
        """The times; None if the instance served other requests meanwhile."""
        before = await self._when_idle(instance)
        lengths = burst.lengths
        orders = [self._order(burst.prompt, new) for new in lengths]
        answered_at: list[float] = []

        async def generate(order: Order) -> Output:
            output = await self._generate(instance, order)
            answered_at.append(self._now())
            return output

        start = self._now()
        outputs = await _unless_forgotten(instance, _all(map(generate, orders)))
        for new, output in zip(lengths, outputs, strict=True):
            _check_whole(instance, new, output)
        after = await instance.gauges()
        drafts = DraftCounts(
            after.drafts - before.drafts,
            after.drafted_tokens - before.drafted_tokens,
            after.accepted_tokens - before.accepted_tokens,
        )
        self.drafts += drafts.drafts
        if after.generated_tokens - before.generated_tokens > sum(lengths):
            return None
        mean_s = sum(answered_at) / len(answered_at) - start
        return BurstTime(answered_at[0] - start, answered_at[-1] - start, mean_s, drafts)

    async def _when_idle(self, instance: InstanceClient) -> Gauges:
        deadline = self._now() + _PATIENCE_S
        while (gauges := await instance.gauges()).running + gauges.waiting:
            if self._now() > deadline:
                raise CallerError(
                    f"{instance.name} is busy with other requests ({gauges.running} running, "
                    f"{gauges.waiting} waiting): take it out of service for the calibration, or "
                    "choose an unused server"
                )
            await asyncio.sleep(_POLL_S)
        return gauges

    async def _of_prompt(self, instance: InstanceClient, prompt: list[int]) -> float:
        order = Order(self._name(), prompt, 1, "", self._sampling)
        start = self._now()
        await self._generate(instance, order)
        return self._now() - start

    async def _generate(self, instance: InstanceClient, order: Order) -> Output:
        try:
            return await instance.generate(order)
        except RequestRejected as error:
            raise CallerError(
                f"{instance.name} does not accept prompts of token ids as vLLM does: {error}; "
                "give vLLM's own address, not that of a proxy that rewrites requests"
            ) from error

    def _order(self, prompt: int, new: int) -> Order:
        return Order(self._name(), self._prompt(prompt), new, "", self._sampling)

    def _name(self) -> str:
        self._sent += 1
        return f"{self._run}-{self._sent}"

    def _prompt(self, tokens: int) -> list[int]:
        """A random prompt: no two share a prefix, so the prefix cache finds nothing."""
        return self._rng.choices(IDS, k=tokens)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


async def _unless_forgotten(instance: InstanceClient, answers: Coroutine[Any, Any, _T]) -> _T:
    """The answers. Raises InstanceError if the instance has no requests left twice in a row, and
    has not answered."""
    waiting, looks = asyncio.ensure_future(answers), 0
    try:
        while not (await asyncio.wait([waiting], timeout=_PATIENCE_S))[0]:
            gauges = await instance.gauges()
            looks = 0 if gauges.running + gauges.waiting else looks + 1
            if looks == 2:
                raise InstanceError(
                    f"{instance.name} has lost requests: it reports none, and did not answer all; "
                    "restart it, and calibrate again"
                )
        return waiting.result()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _all(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Wait for all calls. If one fails, the others are cancelled and awaited, and its error is
    raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _check_whole(instance: InstanceClient, new: int, output: Output) -> None:
    made = len(output.token_ids)
    if output.finish == "abort":
        raise InstanceError(f"{instance.name}: another client aborts the calibration's requests")
    if made != new:
        raise CallerError(
            f"{instance.name} was asked for {new} tokens with ignore_eos and generated {made} "
            f"(finish_reason {output.finish!r}): it, or a proxy before it, does not honour "
            "ignore_eos; give vLLM's own address"
        )
