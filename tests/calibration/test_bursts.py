"""What is measured fits into the server and the time, and tells everything apart."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.calibration.bursts import (
    SHORT,
    TRIALS,
    Burst,
    BurstTime,
    Pace,
    Room,
    bursts_of,
    pace,
    steps_of,
    trials,
    writing_s,
)
from rollout_sched.core.errors import CallerError
from rollout_sched.simulators.instance.cost_fit import EngineSteps
from rollout_sched.simulators.instance.model import CostModel, InstanceSpec, SimRequest
from tests.simulators.instance.reference import ReferenceInstance

LARGE = Room(256, 1_000_000, 131_072)


@given(
    st.integers(1, 512),
    st.integers(64, 10**6),
    st.integers(64, 10**5),
    st.floats(1e-5, 1.0),
    st.floats(1e-7, 1e-2),
)
def test_every_burst_fits(slots: int, kv: int, length: int, step_s: float, token_s: float) -> None:
    room = Room(slots, kv, length)
    bursts = bursts_of(room, Pace(step_s, token_s), 1.0)
    assert bursts
    assert len(bursts) == len(set(bursts)) <= 40
    for burst in [*bursts, *trials(room)]:
        assert burst.batch <= slots
        assert burst.prompt + max(burst.lengths) <= length
        assert burst.kv_tokens <= kv


def test_a_large_server_is_seen_from_all_sides() -> None:
    bursts = bursts_of(LARGE, Pace(6.6e-3, 23e-6), 1.0)
    assert {burst.batch for burst in bursts} == {1, 4, 16, 64, 256}
    assert {burst.new for burst in bursts} == {1, 16, 32, 64, 128, 256}
    assert [burst.prompt for burst in bursts if burst.waves > 1] == [32, 32, 128, 128]
    prefills = [burst.prompt for burst in bursts if burst.batch == burst.new == 1]
    assert max(prefills) > 10_000
    assert all(burst.batch * burst.prompt * 23e-6 < 1.1 for burst in bursts)


def test_a_slow_one_makes_fewer_tokens() -> None:
    bursts = bursts_of(LARGE, Pace(0.2, 5e-3), 1.0)
    assert max(burst.new for burst in bursts) == 32
    assert max(burst.batch * burst.prompt for burst in bursts) == 256 * 32, "no less can be asked"


def test_repeated_calibration_chooses_the_same_bursts() -> None:
    first = bursts_of(LARGE, Pace(6.6e-3, 23e-6), 1.0)
    assert bursts_of(LARGE, Pace(6.1e-3, 25e-6), 1.0) == first


def test_the_pace_is_what_the_trials_took() -> None:
    seconds = dict(zip(TRIALS, (0.010, 0.050, 0.019), strict=True))
    assert pace(seconds) == Pace(pytest.approx(0.005), pytest.approx(0.009 / 96))


def test_no_room() -> None:
    with pytest.raises(CallerError, match="max-model-len"):
        trials(Room(4, 10_000, 40))


def test_tokens_of_a_burst() -> None:
    assert Burst(3, 10, 4).kv_tokens == 42
    assert Burst(3, 10, 4).lengths == [4, 4, 4]


def test_a_burst_in_waves_has_lengths_of_all_kinds() -> None:
    burst = Burst(16, 32, 40, waves=3)
    assert burst.requests == len(burst.lengths) == 48
    assert sum(burst.lengths) / 48 == pytest.approx(40, rel=0.05)
    assert min(burst.lengths) < 15
    assert 65 < max(burst.lengths) <= 70
    assert len(set(burst.lengths)) > 30


def test_a_prefill_in_one_step_and_decodes() -> None:
    assert steps_of(Burst(2, 10, 4), 8, 100) == [
        EngineSteps(1, 0, 20, 0, 2 * 10 * 10 / 2, 2),
        EngineSteps(3, 2, 0, 2 * (11 + 12 + 13), 0, 0),
    ]


def test_a_prefill_in_chunks_beside_a_decode() -> None:
    found = steps_of(Burst(2, 10, 2), 8, 15)
    assert found == [
        EngineSteps(1, 0, 15, 0, 10 * 5 + 5 * 2.5, 2),
        EngineSteps(1, 1, 5, 11, 5 * (5 + 2.5), 0),
        EngineSteps(1, 1, 0, 11, 0, 0),
    ]


def test_one_token_is_the_prefill_alone() -> None:
    assert steps_of(Burst(1, 64, 1), 8, 2048) == [EngineSteps(1, 0, 64, 0, 64 * 32, 1)]


def test_more_than_run_at_once_come_and_go_one_by_one() -> None:
    burst = Burst(2, 10, 8, waves=3)
    found = steps_of(burst, 2, 100)
    assert sum(run.requests for run in found) == 6
    made = sum(run.number * run.sequences + run.requests for run in found)
    assert made == sum(burst.lengths)
    assert sum(run.number for run in found if run.prefill_tokens) > 3


@given(
    st.integers(1, 6), st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.integers(1, 60)
)
def test_the_steps_are_those_of_the_instance(
    batch: int, prompt: int, new: int, waves: int, budget: int
) -> None:
    burst, slots = Burst(batch, prompt, new, waves), batch
    assert steps_of(burst, slots, budget) == reference_steps(burst, slots, budget)


def reference_steps(burst: Burst, slots: int, budget: int) -> list[EngineSteps]:
    spec = InstanceSpec(
        CostModel(step_s=1.0, weights_s=0.0, token_s=0.0),
        kv_blocks=burst.requests * (burst.prompt + max(burst.lengths)),
        block_size=1,
        max_num_seqs=slots,
        max_num_batched_tokens=max(budget, slots),
        prefix_caching=False,
    )
    instance = ReferenceInstance(spec)
    for number, length in enumerate(burst.lengths):
        instance.submit(SimRequest(number, burst.prompt, length, length, number, 0, number), 0.0)
    computed = [0] * burst.requests
    found: list[EngineSteps] = []
    seen = None
    while (at := instance.next_at()) < math.inf:
        instance.advance(at)
        if instance.last_step is seen:
            continue
        seen = instance.last_step
        step = [1, 0, 0, 0, 0.0, len(seen.hits)]
        for number, tokens in seen.scheduled.items():
            if computed[number] < burst.prompt:
                step[2] += tokens
                step[4] += tokens * (computed[number] + tokens / 2)
            else:
                step[1] += 1
                step[3] += computed[number] + 1
            computed[number] += tokens
        if found and found[-1][1:3] == tuple(step[1:3]):
            last = found.pop()
            step = [
                last[0] + 1,
                *step[1:3],
                *(a + b for a, b in zip(last[3:], step[3:], strict=True)),
            ]
        found.append(EngineSteps(*step))
    return found


def spread(gap_s: float) -> list[BurstTime]:
    return [BurstTime(1.0, 1.0 + gap_s)]


def test_it_is_how_much_more_the_last_is_late_the_longer_answers_are() -> None:
    """Short ones are written while the last of the requests, which came one after the other, are
    still under way."""
    times = {
        Burst(batch, SHORT, new): spread((batch - 1) * max(2e-3, 1e-3 + 4e-5 * new))
        for batch in (1, 4, 16)
        for new in (1, 16, 64, 128)
    }
    assert writing_s(times) == pytest.approx(4e-5)


def test_bursts_that_end_in_several_steps_say_nothing() -> None:
    several = {Burst(4, SHORT, 16, waves=3): spread(9.0), Burst(4, 900, 16): spread(0.5)}
    assert writing_s(several) == 0.0


def test_answer_time_is_never_negative() -> None:
    times = {Burst(4, SHORT, 1): spread(0.1), Burst(4, SHORT, 128): spread(0.05)}
    assert writing_s(times) == 0.0


def test_one_length_or_one_request_at_once_says_nothing() -> None:
    assert writing_s({Burst(4, SHORT, 16): spread(0.1)}) == 0.0
    assert writing_s({Burst(1, SHORT, new): spread(0.0) for new in (1, 16)}) == 0.0
    assert writing_s({}) == 0.0
