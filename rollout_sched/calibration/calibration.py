"""Calibrates running instances over HTTP or an engine in this process; the results of both."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median, quantiles

import msgspec

from rollout_sched.calibration.bursts import (
    SHORT,
    Burst,
    BurstTime,
    DraftCounts,
    DraftFit,
    Pace,
    Room,
    bursts_of,
    fit_drafts,
    pace,
    steps_of,
    trials,
    writing_s,
)
from rollout_sched.calibration.prober import IDS, SAMPLING, Prober
from rollout_sched.core.errors import CallerError
from rollout_sched.integrations.vllm import EngineLimits, EngineStep, SteppedEngine
from rollout_sched.integrations.vllm.weights import ReloadFromDisk
from rollout_sched.live.ports import Description, InstanceClient, InstanceError
from rollout_sched.simulators.instance import (
    CostModel,
    EngineSteps,
    Fit,
    MeasuredSpan,
    fit_spans,
)


class Measurements:
    """Times of bursts, each measured several times."""

    def __init__(self) -> None:
        self.times: dict[Burst, list[BurstTime]] = {}

    def add(self, burst: Burst, times: list[BurstTime]) -> None:
        self.times.setdefault(burst, []).extend(times)

    @property
    def whole(self) -> dict[Burst, list[BurstTime]]:
        """The bursts that have measurements."""
        return {burst: times for burst, times in self.times.items() if times}

    @property
    def seconds(self) -> dict[Burst, list[float]]:
        """Seconds until the last answer, by burst."""
        return {burst: [time.last_s for time in times] for burst, times in self.whole.items()}

    @property
    def medians(self) -> dict[Burst, float]:
        """The median of each burst, which ignores occasional disturbances by other processes."""
        return {burst: median(seconds) for burst, seconds in self.seconds.items()}

    @property
    def spread(self) -> float | None:
        return spread(self.seconds.values())

    @property
    def writing_s(self) -> float:
        """Seconds per answer token, outside the engine."""
        return writing_s(self.whole)

    def fit(self, slots: int, max_num_batched_tokens: int, leave_out: Collection[str] = ()) -> Fit:
        """The constants that fit the medians best; those named in `leave_out` are 0. Raises
        ValueError if nothing was measured."""
        token_s = self.writing_s
        return fit_spans(
            (
                MeasuredSpan(
                    steps_of(burst, slots, max_num_batched_tokens),
                    max(seconds - token_s * burst.answered, seconds / 2),
                    calls=1,
                )
                for burst, seconds in self.medians.items()
            ),
            leave_out=leave_out,
        )


def spread(each: Iterable[list[float]]) -> float | None:
    """Half the interquartile range over the median: the median of this ratio over all bursts. None
    if nothing was measured three times."""
    often = [seconds for seconds in each if len(seconds) >= 3]
    return median(map(_half_width, often)) if often else None


def _half_width(seconds: list[float]) -> float:
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / (2 * middle)


#: Called with the number of bursts done, their total, and the current activity.
Report = Callable[[int, int, str], None]

#: How often each burst is measured if there is time, and the approximate number of bursts.
_ROUNDS = 3
_BURSTS = 32
_LONGEST_BURST_S = 2.0

#: A checkpoint is loaded at most _LOADS times, and not again after _LOADING_S seconds in total.
_LOADS = 5
_LOADING_S = 5.0

#: With fewer measured bursts no scenario is written.
_FEWEST_BURSTS = 10

#: vLLM's default on a GPU, used if a server does not report its own.
USUAL_BATCHED_TOKENS = 8192


class Calibration(msgspec.Struct, frozen=True):
    """The results for identical instances.

    bursts          number of different bursts measured; in process: of kinds of steps
    measured        number of measurements in total
    spread          of the times of one burst: half the interquartile range over the median
    disturbed       measurements thrown away because other requests were served meanwhile
    context         the largest sum of contexts that was decoded, in tokens
    prefix_caching  as observed or as reported; None if neither
    pause_s         seconds of a pause and a resume; None if the server offers no pause
    reload_s        seconds to pause, load a checkpoint and resume; None if none was given
    writing_s       seconds per answer token, outside the engine; None in process
    whole           whether every planned burst was measured
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
    """One calibration over HTTP, from the first request to the results.

    measurements  the measurements to extend: new ones, or those of an earlier calibration of the
                  same servers. Its bursts are measured again, so that each burst has measurements
                  from both times
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
        self._rng = random.Random(seed)
        self._report = report
        self._measurements = measurements or Measurements()
        self._whole = False
        self._planned = 0

    async def run(self, seconds: float, checkpoint: str = "") -> Calibration:
        """Measure for `seconds`, and at least every burst once, however long that takes. A
        cancellation ends it earlier, with the results so far.

        `checkpoint`: loaded once to measure the time, or a few times if that is quick; it should be
        the one that is served.
        Raises CallerError, with the remedy, if there is no result.
        """
        first = self._prober.instances[0]
        described = await asyncio.gather(*(each.describe() for each in self._prober.instances))
        room = _room([instance.name for instance in self._prober.instances], described)
        found: dict[str, object] = {}
        try:
            found["pause_s"] = await self._pause_s(first, described[0])
            self._report(0, 1, "warming up")
            measured = await self._trials(room)
            if self._prober.drafts:
                raise CallerError(
                    f"{first.name} drafts tokens, whose cost is measured against the same server "
                    "without: calibrate it once without --speculative-config, and again with it "
                    "and --base FILE, the first calibration's"
                )
            tokens = min(room.max_model_len // 2, 1024)
            found["prefix_caching"] = await self._prober.finds_prefixes(first, tokens)
            if checkpoint:
                found["reload_s"] = await self._reload_s(first, described[0], checkpoint)
            bursts = list(self._measurements.times) or self._bursts(room, measured, seconds)
            await self._measure(bursts, seconds)
        except asyncio.CancelledError:
            if not self._enough:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
        return self._known(described[0], room, **found)

    async def drafts(self, cost: CostModel, seconds: float) -> tuple[Room, DraftCounts, DraftFit]:
        """The drafts of instances that cost so much without them, measured for `seconds`, and what
        they had drafted for others before. Raises CallerError, with the remedy, if there is no
        result."""
        instances = self._prober.instances
        described = await asyncio.gather(*(each.describe() for each in instances))
        room = _room([instance.name for instance in instances], described)
        served = [await each.gauges() for each in instances]
        before = DraftCounts(
            sum(one.drafts for one in served),
            sum(one.drafted_tokens for one in served),
            sum(one.accepted_tokens for one in served),
        )
        self._report(0, 1, "warming up")
        bursts = self._bursts(room, await self._trials(room), seconds)
        decoding = [burst for burst in bursts if burst.waves == 1 and burst.prompt == SHORT]
        await self._measure(decoding, seconds)
        return room, before, fit_drafts(self._measurements.whole, cost)

    async def _trials(self, room: Room) -> Pace:
        """Run each trial twice: the first run may compile something."""
        tried = trials(room)
        seconds: dict[Burst, float] = {}
        for burst in [*tried, *tried]:
            times = await self._prober.burst(burst)
            if times:
                seconds[burst] = min(time.last_s for time in times)
        if len(seconds) < len(tried):
            raise CallerError(
                f"{self._prober.instances[0].name} serves other requests all the time: take it out "
                "of service for the calibration"
            )
        return pace(seconds)

    def _bursts(self, room: Room, measured: Pace, seconds: float) -> list[Burst]:
        return bursts_of(room, measured, min(_LONGEST_BURST_S, seconds / (_ROUNDS * _BURSTS)))

    async def _measure(self, bursts: Sequence[Burst], seconds: float) -> None:
        deadline = _now() + seconds
        self._planned = _ROUNDS * len(bursts)
        done, unseen = 0, set(bursts)
        while not self._over(deadline):
            for burst in self._rng.sample(bursts, len(bursts)):
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
        """Whether to stop: not before every burst is measured once, unless there are too many
        disturbances."""
        return _now() > deadline and (self._whole or self._prober.disturbed > 2 * self._planned)

    @property
    def _enough(self) -> bool:
        return len(self._measurements.whole) >= _FEWEST_BURSTS

    async def _pause_s(self, instance: InstanceClient, told: Description) -> float | None:
        """Refuses an instance that is already paused: somebody else paused it, so we must not
        resume it."""
        if told.paused:
            raise CallerError(f"{instance.name} is paused: resume it before the calibration")
        return await self._prober.pause_s(instance) if "pause" in told.capabilities else None

    async def _reload_s(
        self, instance: InstanceClient, told: Description, checkpoint: str
    ) -> float | None:
        if "collective_rpc" not in told.capabilities:
            raise CallerError(
                f"--weights: {instance.name} cannot reload weights: set VLLM_SERVER_DEV_MODE=1 in "
                "vLLM's environment, or remove --weights"
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
                    f"--weights {checkpoint}: {error}; {instance.name} is left paused, because its "
                    "weights may be half loaded: restart it"
                ) from error
            await instance.resume()
            took_s.append(_now() - start)
        return median(took_s)

    def _known(self, told: Description, room: Room, **found: object) -> Calibration:
        if not self._enough:
            raise CallerError(
                f"too few undisturbed measurements ({len(self._measurements.whole)} bursts of "
                f"at least {_FEWEST_BURSTS}; {self._prober.disturbed} measurements were thrown "
                "away because other requests were served): take the server out of service, or "
                "increase --minutes"
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
                f"{name} ({room}) differs from {names[0]} ({rooms[0]}), but all instances of a "
                "scenario are identical: calibrate them one by one"
            )
    return rooms[0]


def _shown(burst: Burst) -> str:
    return f"{burst.batch} x ({burst.prompt} + {burst.new} tokens)"


def _now() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------------------
# An engine in this process, of which every step is timed.

_BURST_S = 1.0


class StepCalibrator:
    """Measures the steps of one engine, grouped by kind: burst, sequences, prefill tokens and
    requests."""

    def __init__(self, engine: SteppedEngine, seed: int, report: Report) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._report = report
        self._room = Room(engine.slots, engine.kv_tokens, engine.max_model_len)
        self._rows: dict[tuple[Burst, int, int, int], list[EngineStep]] = {}
        self._bursts: dict[Burst, None] = {}
        self._whole = False

    def run(self, seconds: float, model: str) -> Calibration:
        """Measure for `seconds`; Ctrl-C ends it earlier, with the results so far. Raises
        CallerError if nothing was measured."""
        try:
            self._measure(seconds)
        except KeyboardInterrupt:
            if not self._bursts:
                raise
        if not self._rows:
            raise CallerError("no step was measured: increase --minutes")
        limits = self._engine.limits
        return Calibration(
            model=model,
            instances=1,
            room=self._room,
            limits=limits,
            fit=fit_spans(_span(rows) for rows in self._rows.values()),
            bursts=len(self._rows),
            measured=sum(map(len, self._rows.values())),
            spread=spread([row.seconds for row in rows] for rows in self._rows.values()),
            disturbed=0,
            context=max(burst.kv_tokens for burst in self._bursts),
            prefix_caching=limits.prefix_caching,
            whole=self._whole,
            in_process=True,
        )

    def _measure(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        tried = {}
        for burst in [*trials(self._room), *trials(self._room)]:
            tried[burst] = sum(step.seconds for step in self._burst(burst))
        bursts = bursts_of(self._room, pace(tried), _BURST_S)
        rounds = 0
        while time.monotonic() < deadline and rounds < _ROUNDS:
            for number, burst in enumerate(self._rng.sample(bursts, len(bursts))):
                self._report(rounds * len(bursts) + number, _ROUNDS * len(bursts), str(burst))
                self._keep(burst, self._burst(burst))
                if time.monotonic() > deadline:
                    break
            rounds += 1
            self._whole = len(self._bursts) == len(bursts)

    def _burst(self, burst: Burst) -> list[EngineStep]:
        prompts = [self._rng.choices(IDS, k=burst.prompt) for _ in range(burst.requests)]
        return self._engine.burst(prompts, burst.lengths, SAMPLING)

    def _keep(self, burst: Burst, steps: list[EngineStep]) -> None:
        self._bursts[burst] = None
        for step in steps:
            kind = (burst, step.sequences, step.prefill_tokens, step.requests)
            self._rows.setdefault(kind, []).append(step)


def _span(rows: list[EngineStep]) -> MeasuredSpan:
    """The steps of one kind as one step: their mean counts and their median time."""
    count = len(rows)
    first = rows[0]
    steps = EngineSteps(
        1,
        first.sequences,
        first.prefill_tokens,
        sum(row.context for row in rows) / count,
        sum(row.attention for row in rows) / count,
        first.requests,
    )
    return MeasuredSpan([steps], median(row.seconds for row in rows))
