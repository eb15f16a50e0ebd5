"""What a calibration found, and who finds it by requests of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from rollout_sched.calibration.bursts import Burst, Pace, Room, bursts_of, pace, trials
from rollout_sched.calibration.measurements import Measurements
from rollout_sched.calibration.prober import Prober
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm.engine_limits import EngineLimits
from rollout_sched.integrations.vllm.weights import ReloadFromDisk
from rollout_sched.live.ports import Description, InstanceClient, InstanceError
from rollout_sched.simulators.instance.cost_fit import Fit

#: Done, of how many, and what it is doing.
Report = Callable[[int, int, str], None]

#: How often each burst is to be measured, if there is time; and how many there are, more or less.
_ROUNDS = 3
_BURSTS = 32
_LONGEST_BURST_S = 2.0

#: A checkpoint is loaded so often, as long as that takes no more than so many seconds.
_LOADS = 5
_LOADING_S = 5.0

#: Fewer say too little to write anything down.
_FEWEST_BURSTS = 10

#: vLLM's own default on a GPU, where a server does not tell.
USUAL_BATCHED_TOKENS = 8192


class Calibration(msgspec.Struct, frozen=True):
    """What is known of instances that are alike.

    bursts          different ones that were measured; of an engine in process, kinds of steps
    measured        how many times in all
    spread          of the times of one: half its quartiles' distance over its median
    disturbed       times thrown away, since others were served meanwhile
    context         the largest sum of contexts that was decoded, tokens
    prefix_caching  as it was seen, or told; None where neither
    pause_s         for a pause and a resume; None where it offers none
    reload_s        for a pause, loading a checkpoint and a resume; None where none was named
    writing_s       of each token of an answer, beside the engine; None of one in process
    whole           whether every burst that was planned was measured
    """

    model: str
    instances: int
    room: Room
    limits: EngineLimits
    fit: Fit
    bursts: int
    measured: int
    spread: float | None
    disturbed: int
    context: int
    prefix_caching: bool | None
    pause_s: float | None = None
    reload_s: float | None = None
    writing_s: float | None = None
    whole: bool = True
    in_process: bool = False

    @property
    def max_num_batched_tokens(self) -> int:
        return self.limits.max_num_batched_tokens or USUAL_BATCHED_TOKENS


class Calibrator:
    """One calibration over HTTP, from its first request to what is known in the end.

    measurements  what it adds to; its own, or those of an earlier calibration of the same servers,
                  whose bursts are measured again: all of them in good times and in bad ones
    """

    def __init__(
        self,
        instances: Sequence[InstanceClient],
        limits: EngineLimits,
        *,
        seed: int,
        report: Report,
        measurements: Measurements | None = None,
    ) -> None:
        self._prober = Prober(instances, seed)
        self._limits = limits
        self._dice = random.Random(seed)
        self._report = report
        self._measurements = measurements or Measurements()
        self._whole = False
        self._planned = 0

    async def run(self, seconds: float, checkpoint: str = "") -> Calibration:
        """Measure for so many seconds, and everything once however long that takes; less if it is
        cancelled, and then what is known by then.

        `checkpoint`: loaded once, for the time that takes, or a few times if that is quick; it
        should be the one that is served.
        Raises CallerError, with what to do, where nothing can be said.
        """
        first = self._prober.instances[0]
        described = await asyncio.gather(*(each.describe() for each in self._prober.instances))
        room = _room([instance.name for instance in self._prober.instances], described)
        found: dict[str, object] = {}
        try:
            found["pause_s"] = await self._pause_s(first, described[0])
            self._report(0, 1, "warming up")
            measured = await self._trials(room)
            tokens = min(room.max_model_len // 2, 1024)
            found["prefix_caching"] = await self._prober.finds_prefixes(first, tokens)
            if checkpoint:
                found["reload_s"] = await self._reload_s(first, described[0], checkpoint)
            await self._measure(room, measured, seconds)
        except asyncio.CancelledError:
            if not self._enough:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        return self._known(described[0], room, **found)

    async def _trials(self, room: Room) -> Pace:
        """Each twice: the first of a kind may compile something."""
        tried = trials(room)
        seconds: dict[Burst, float] = {}
        for burst in [*tried, *tried]:
            times = await self._prober.burst(burst)
            if times:
                seconds[burst] = min(time.last_s for time in times)
        if len(seconds) < len(tried):
            raise CallerError(
                f"{self._prober.instances[0].name} serves others without a pause: take it out of "
                "service for the calibration"
            )
        return pace(seconds)

    async def _measure(self, room: Room, measured: Pace, seconds: float) -> None:
        deadline = _now() + seconds
        burst_s = min(_LONGEST_BURST_S, seconds / (_ROUNDS * _BURSTS))
        bursts = list(self._measurements.times) or bursts_of(room, measured, burst_s)
        self._planned = _ROUNDS * len(bursts)
        done, unseen = 0, set(bursts)
        while not self._over(deadline):
            for burst in self._dice.sample(bursts, len(bursts)):
                self._report(done, self._planned, _shown(burst))
                times = await self._prober.burst(burst)
                self._measurements.add(burst, times)
                done += 1
                if times:
                    unseen.discard(burst)
                self._whole = not unseen
                if self._over(deadline):
                    break

    def _over(self, deadline: float) -> bool:
        """A first look at everything is worth more than the second at something."""
        return _now() > deadline and (self._whole or self._prober.disturbed > 2 * self._planned)

    @property
    def _enough(self) -> bool:
        return len(self._measurements.whole) >= _FEWEST_BURSTS

    async def _pause_s(self, instance: InstanceClient, told: Description) -> float | None:
        """Not of one that somebody holds paused: it is not ours to resume."""
        if told.paused:
            raise CallerError(f"{instance.name} is paused: resume it, then calibrate it")
        return await self._prober.pause_s(instance) if "pause" in told.capabilities else None

    async def _reload_s(
        self, instance: InstanceClient, told: Description, checkpoint: str
    ) -> float | None:
        if "collective_rpc" not in told.capabilities:
            raise CallerError(
                f"--weights: {instance.name} cannot reload weights: set VLLM_SERVER_DEV_MODE=1 in "
                "vLLM's environment, or leave it out"
            )
        load = ReloadFromDisk(lambda version: checkpoint, visible_here=False)
        took_s: list[float] = []
        while len(took_s) < _LOADS and sum(took_s) <= _LOADING_S:
            start = _now()
            await instance.pause("keep", clear_cache=False)
            try:
                await load(instance, told.version or 0)
            except InstanceError as error:
                raise CallerError(
                    f"--weights {checkpoint}: {error}; {instance.name} is left paused, for its "
                    "weights may be half loaded: restart it"
                ) from error
            await instance.resume()
            took_s.append(_now() - start)
        return median(took_s)

    def _known(self, told: Description, room: Room, **found: object) -> Calibration:
        if not self._enough:
            raise CallerError(
                f"too little was measured undisturbed ({len(self._measurements.whole)} bursts of "
                f"at least {_FEWEST_BURSTS}; {self._prober.disturbed} times were thrown away "
                "because others were served): take the server out of service, or give --minutes"
            )
        limits = self._limits
        measured = self._measurements
        fit = measured.fit(room.slots, limits.max_num_batched_tokens or USUAL_BATCHED_TOKENS)
        bursts = measured.whole
        seen = found.pop("prefix_caching", None)
        return msgspec.structs.replace(
            Calibration(
                model=told.model,
                instances=len(self._prober.instances),
                room=room,
                limits=limits,
                fit=fit,
                bursts=len(bursts),
                measured=sum(map(len, bursts.values())),
                spread=measured.spread,
                disturbed=self._prober.disturbed,
                context=max(burst.kv_tokens for burst in bursts),
                prefix_caching=limits.prefix_caching if seen is None else bool(seen),
                writing_s=measured.writing_s,
                whole=self._whole,
            ),
            **found,
        )


def _room(names: Sequence[str], described: Sequence[Description]) -> Room:
    rooms = [Room(d.slots, d.kv_tokens, d.max_model_len) for d in described]
    for name, room in zip(names, rooms, strict=True):
        if room != rooms[0]:
            raise CallerError(
                f"{name} ({room}) is not like {names[0]} ({rooms[0]}), and a scenario has alike "
                "instances: calibrate them one by one"
            )
    return rooms[0]


def _shown(burst: Burst) -> str:
    return f"{burst.batch} x ({burst.prompt} + {burst.new} tokens)"


def _now() -> float:
    return asyncio.get_running_loop().time()
