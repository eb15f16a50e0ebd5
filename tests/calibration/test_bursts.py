"""What is measured fits into the server and the time, and tells everything apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_sched.calibration.bursts import TRIALS, Burst, Pace, Room, bursts_of, pace, trials
from rollout_sched.core.model.errors import CallerError

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


def test_who_calibrates_again_measures_the_same() -> None:
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
