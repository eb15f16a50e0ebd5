"""Law: a jump over any number of steps gives exactly the results of single steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_sched.simulators.instance.model import (
    CostModel,
    Ended,
    InstanceSpec,
    Paused,
    SimRequest,
)
from rollout_sched.simulators.instance.sim_instance import SimInstance
from tests.simulators.instance.reference import ReferenceInstance
from tests.simulators.instance.test_model import speculations

COST = CostModel(
    step_s=6e-4,
    weights_s=5.95e-3,
    token_s=23.1e-6,
    sequence_s=4.4e-6,
    context_s=26.3e-9,
    attention_s=1.1e-10,
    request_s=3.3e-4,
    prefill_s=2.1e-4,
)
STEP_S = 7e-3

Simulated = SimInstance | ReferenceInstance
Kind = type[SimInstance] | type[ReferenceInstance]
Input = Callable[[Simulated, float], None]
Said = list[Ended | Paused]


def run(
    kind: Kind, spec: InstanceSpec, inputs: list[tuple[float, Input]], *, polls: bool
) -> tuple[Said, dict[str, Any], list[dict[int, int]]]:
    """Apply the inputs at their times and follow next_at in between, until nothing happens."""
    instance = kind(spec)
    said: Said = []
    progress = []
    for at, give in [*sorted(inputs, key=lambda entry: entry[0]), (math.inf, lambda i, t: None)]:
        while instance.next_at() <= at and instance.next_at() < math.inf:
            said += instance.advance(instance.next_at())
            instance.check_invariants()
            if polls:
                instance.step_at(instance.gauges().steps + 2)
        if at < math.inf:
            if polls:
                said += instance.advance(at)
                progress.append(instance.progress(at))
                instance.step_at(instance.gauges().steps + 2)
            give(instance, at)
    instance.check_invariants()
    return said, counters(instance), progress


def counters(instance: Simulated) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(instance.gauges()),
        "eviction": list(instance.eviction_order()),
    }


def assert_same(one: Any, other: Any) -> None:
    said, values, progress = one
    expected, expected_values, expected_progress = other
    assert [strip(s) for s in said] == [strip(s) for s in expected]
    for a, b in zip(said, expected, strict=True):
        assert a.at == pytest.approx(b.at, rel=1e-9, abs=1e-9)
    assert values == expected_values
    assert progress == expected_progress


def strip(said: Ended | Paused) -> Any:
    if isinstance(said, Paused):
        return said.mode
    return said.attempt, said.tokens, said.spans, said.reason


@st.composite
def specs(draw: st.DrawFn) -> InstanceSpec:
    slots = draw(st.integers(1, 12))
    size = draw(st.sampled_from([1, 4, 16]))
    return InstanceSpec(
        cost=COST,
        kv_blocks=draw(st.integers(-(-240 // size), -(-1200 // size))),
        block_size=size,
        max_num_seqs=slots,
        max_num_batched_tokens=draw(st.sampled_from([slots, 40, 128, 1000])),
        max_model_len=240,
        prefix_caching=draw(st.booleans()),
        scheduling=draw(st.sampled_from(["fcfs", "priority"])),
        watermark=draw(st.sampled_from([0.0, 0.05])),
        speculation=draw(st.none() | speculations),
    )


@st.composite
def scripts(draw: st.DrawFn) -> list[tuple[float, Input]]:
    """Inputs at arbitrary times; many at the same time."""
    times = st.floats(0, 300 * STEP_S) | st.sampled_from([0.0, 0.1, 0.5])
    count = draw(st.integers(1, 40))
    inputs: list[tuple[float, Input]] = []
    for number in range(count):
        at = draw(times)
        inputs.append((at, submit(draw(requests(number)))))
        if draw(st.integers(0, 4)) == 0:
            later = at + draw(st.floats(0, 60 * STEP_S))
            inputs.append((later, abort(number)))
            if draw(st.booleans()):
                inputs.append((later, submit(draw(requests(number + 1000, stream=number)))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(times)
        mode, clear = draw(st.sampled_from(["keep", "abort", "wait"])), draw(st.booleans())
        inputs.append((at, pause(mode, clear)))
        at += draw(st.floats(0, 30 * STEP_S))
        inputs.append((at, set_version(draw(st.integers(1, 9)))))
        inputs.append((at, resume()))
    for _ in range(draw(st.integers(0, 3))):
        inputs.append((draw(times), set_version(draw(st.integers(1, 9)))))
        inputs.append((draw(times), clear_cache(draw(st.booleans()))))
        inputs.append((draw(times), slow(draw(st.sampled_from([1.0, 1.5, 20.0])))))
    return inputs


@st.composite
def requests(draw: st.DrawFn, number: int, stream: int | None = None) -> SimRequest:
    prompt = draw(st.integers(0, 3))
    context = 20 + 16 * prompt + (0 if stream is None else draw(st.integers(0, 60)))
    new = draw(st.integers(1, 120))
    return SimRequest(
        attempt=number,
        context_tokens=context,
        new_tokens=new,
        max_new_tokens=draw(st.sampled_from([new, 200, 30])),
        prompt_stream=prompt,
        shared_tokens=draw(st.sampled_from([0, 16 + 16 * prompt, 20 + 16 * prompt])),
        stream=number if stream is None else stream,
        known_tokens=0 if stream is None else context - 1,
        salt=draw(st.sampled_from([0, 0, 1])),
        priority=draw(st.integers(0, 2)),
    )


def submit(request: SimRequest) -> Input:
    def give(instance: Simulated, now: float) -> None:
        try:
            instance.submit(request, now)
        except ValueError as error:
            # The stream's first attempt may still be here, if it was not aborted before.
            if "already has attempt" not in str(error):
                raise

    return give


def abort(number: int) -> Input:
    return lambda instance, now: instance.abort(number, now)


def pause(mode: Any, clear: bool) -> Input:
    return lambda instance, now: instance.pause(now, mode, clear)


def resume() -> Input:
    return lambda instance, now: instance.resume(now)


def set_version(version: int) -> Input:
    return lambda instance, now: instance.set_version(version, now)


def slow(factor: float) -> Input:
    return lambda instance, now: instance.slow(factor, now)


def clear_cache(preempt: bool) -> Input:
    return lambda instance, now: instance.clear_cache(now, preempt)


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(specs(), scripts())
def test_jump_says_what_single_steps_say(
    spec: InstanceSpec, inputs: list[tuple[float, Input]]
) -> None:
    stepped = run(ReferenceInstance, spec, inputs, polls=True)
    assert_same(run(SimInstance, spec, inputs, polls=True), stepped)


@relaxed
@given(specs(), scripts())
def test_looking_changes_nothing(spec: InstanceSpec, inputs: list[tuple[float, Input]]) -> None:
    said, values, _ = run(SimInstance, spec, inputs, polls=True)
    quiet, quiet_values, _ = run(SimInstance, spec, inputs, polls=False)
    assert said == quiet
    assert values == quiet_values
