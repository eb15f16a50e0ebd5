"""Computes the engine steps of a burst with the simulated instance."""

from __future__ import annotations

import math
from itertools import groupby

from rollout_sched.calibration.bursts import Burst
from rollout_sched.simulators.instance.cost_fit import EngineSteps
from rollout_sched.simulators.instance.cost_model import CostModel
from rollout_sched.simulators.instance.reference.instance import ReferenceInstance
from rollout_sched.simulators.instance.sim_request import SimRequest
from rollout_sched.simulators.instance.spec import InstanceSpec

#: All requests arrive at once, so the duration of a step does not affect which requests are in it.
_A_SECOND = CostModel(step_s=1.0, weights_s=0.0, token_s=0.0)
_BLOCK = 16


def steps_of(burst: Burst, slots: int, max_num_batched_tokens: int) -> list[EngineSteps]:
    """The steps of requests that arrive at once at an instance that runs `slots` of them.
    Consecutive steps with equal numbers of sequences and prefill tokens become one entry."""
    each = _each_step(burst, slots, max_num_batched_tokens)
    runs = (list(run) for _, run in groupby(each, key=lambda step: step[1:3]))
    return [
        EngineSteps(
            len(run),
            run[0].sequences,
            run[0].prefill_tokens,
            sum(step.context for step in run),
            sum(step.attention for step in run),
            sum(step.requests for step in run),
        )
        for run in runs
    ]


def _each_step(burst: Burst, slots: int, max_num_batched_tokens: int) -> list[EngineSteps]:
    lengths = burst.lengths
    spec = InstanceSpec(
        _A_SECOND,
        kv_blocks=burst.requests * (1 + (burst.prompt + max(lengths)) // _BLOCK),
        block_size=_BLOCK,
        max_num_seqs=slots,
        max_num_batched_tokens=max(max_num_batched_tokens, slots),
        max_model_len=burst.prompt + max(lengths),
        prefix_caching=False,
    )
    instance = ReferenceInstance(spec)
    for number, new in enumerate(lengths):
        instance.submit(SimRequest(number, burst.prompt, new, new, number, 0, number), 0.0)
    computed = [0] * burst.requests
    found: list[EngineSteps] = []
    seen = instance.last_step
    while (at := instance.next_at()) < math.inf:
        instance.advance(at)
        if instance.last_step is not None and instance.last_step is not seen:
            seen = instance.last_step
            found.append(_step(seen.scheduled, seen.hits, computed, burst.prompt))
    return found


def _step(
    scheduled: dict[int, int], admitted: dict[int, int], computed: list[int], prompt: int
) -> EngineSteps:
    decoding, prefill, context, attention = 0, 0, 0, 0.0
    for number, tokens in scheduled.items():
        if computed[number] < prompt:
            prefill += tokens
            attention += tokens * (computed[number] + tokens / 2)
        else:
            decoding += 1
            context += computed[number] + 1
        computed[number] += tokens
    return EngineSteps(1, decoding, prefill, context, attention, len(admitted))
