"""Calibrates an engine in this process: it times every step, without an HTTP server."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from statistics import median
from typing import Any, Protocol

from rollout_sched.calibration.bursts import Burst, Room, bursts_of, pace, trials
from rollout_sched.calibration.calibration import Calibration, Report, spread
from rollout_sched.calibration.prober import IDS, SAMPLING
from rollout_sched.core.model.errors import CallerError
from rollout_sched.integrations.vllm import EngineLimits, EngineStep
from rollout_sched.simulators.instance import EngineSteps, MeasuredSpan, fit_spans

#: How often each burst is measured: other work on the machine may delay a step.
_ROUNDS = 3
_BURST_S = 1.0


class MeasuredEngine(Protocol):
    """The used part of `integrations.vllm.in_process.SteppedEngine`."""

    @property
    def slots(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def kv_tokens(self) -> int: ...
    @property
    def limits(self) -> EngineLimits: ...
    def burst(
        self, prompts: list[list[int]], new: list[int], sampling: Mapping[str, Any]
    ) -> list[EngineStep]: ...


class StepCalibrator:
    """Measures the steps of one engine, grouped by kind: burst, sequences, prefill tokens and
    requests."""

    def __init__(self, engine: MeasuredEngine, seed: int, report: Report) -> None:
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
